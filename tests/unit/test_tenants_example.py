"""The quotas of examples/tenants limit what its page lets teams have. tests/repair has a real API server."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
QUOTAS = ROOT / "examples" / "tenants" / "team" / "quota.yml"


def test_urgent_pods_are_limited_in_all_names_of_gpus() -> None:
    """A quota limits what it names: with another name an urgent pod would take all GPUs of its team from others."""
    objects = [each for each in yaml.safe_load_all(QUOTAS.read_text()) if each["kind"] == "ResourceQuota"]
    found = {each["metadata"]["name"]: each["spec"]["hard"] for each in objects}
    named = {name for name in found["team"] if name.startswith("requests.nvidia.com/")}
    named |= set(re.findall(r"requests\.nvidia\.com/[\w.-]+", (ROOT / "docs" / "workloads.md").read_text()))
    assert len(named) >= 2
    assert {name: found["urgent"].get(name) for name in named} == dict.fromkeys(named, "1")
