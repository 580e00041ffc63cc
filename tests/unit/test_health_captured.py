"""Captured data of machines with real faults: the verdict must stay as it was when it was captured and reviewed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from gpunodes.health import judge, shape
from gpunodes.health.model import SiteRules, Verdict
from gpunodes.operations import health
from gpunodes.views import health as view

CAPTURED = Path(__file__).parent / "fixtures" / "captured"
CASES = sorted(path.parent for path in CAPTURED.glob("*/verdict.json"))


def fixed_part(machine: dict[str, Any]) -> dict[str, Any]:
    """The part of a machine's document that must not change; messages of findings may be reworded."""
    kept = ("source", "state", "action", "hung_in_driver", "xids", "sxids", "gpus")
    return {**{name: machine[name] for name in kept}, "rules": sorted({each["rule"] for each in machine["findings"]})}


def document(verdict: Verdict) -> dict[str, Any]:
    machine: dict[str, Any] = json.loads(view.dump(view.document([verdict])))["machines"][0]
    return machine


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_a_live_machine(case: Path) -> None:
    expected = json.loads((case / "verdict.json").read_text())["live"]
    facts = json.loads(gzip.decompress((case / "probe.json.gz").read_bytes()))
    assert shape.violation(facts) == ""
    assert fixed_part(document(judge.judge_facts(expected["name"], facts, SiteRules()))) == fixed_part(expected)


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_saved_files_of_a_machine(case: Path) -> None:
    expected = json.loads((case / "verdict.json").read_text())["files"]
    files = sorted(str(path) for path in case.iterdir() if path.suffix == ".xml" or path.name.startswith("kernel.log"))
    assert fixed_part(document(health.of_files(files))) == fixed_part(expected)
