"""Labels and taints of a node: those of the settings and of its GPU, and an administrator's own."""

from __future__ import annotations

import json
from typing import Any

testinfra_hosts = ["control-1"]

REQUESTED = {
    "gpunodes.dev/pool": "h100",
    "example.com/team": "ml",
    "gpunodes.dev/gpu": "true",
    "gpunodes.dev/gpu-count": "1",
    "gpunodes.dev/gpu-generation": "hopper",
}


def test_the_node_has_the_requested_labels(node: dict[str, Any]) -> None:
    labels = node["metadata"]["labels"]
    assert {name: labels.get(name) for name in REQUESTED} == REQUESTED
    # What nvidia-smi reported on the machine.
    assert labels["gpunodes.dev/gpu-driver"].startswith("580.")


def test_the_node_has_the_requested_taints_and_keeps_the_administrators(node: dict[str, Any]) -> None:
    taints = {(taint["key"], taint.get("value"), taint["effect"]) for taint in node["spec"]["taints"]}
    assert taints == {
        ("example.com/dedicated", "ml", "NoSchedule"),
        ("nvidia.com/gpu", "present", "NoSchedule"),
        ("example.com/quiet", "true", "PreferNoSchedule"),
    }
    assert node["metadata"]["labels"]["example.com/rack"] == "r1"


def test_only_what_gpunodes_set_is_managed(node: dict[str, Any]) -> None:
    managed = json.loads(node["metadata"]["annotations"]["gpunodes.dev/managed"])
    assert managed["taints"] == ["example.com/dedicated:NoSchedule", "nvidia.com/gpu:NoSchedule"]
    assert set(REQUESTED) <= set(managed["labels"])
    assert "example.com/rack" not in managed["labels"]
