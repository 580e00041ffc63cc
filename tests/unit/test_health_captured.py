"""What machines with real faults said, judged again: each verdict as it was when it was captured and looked at."""

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


def told(machine: dict[str, Any]) -> dict[str, Any]:
    """What of a machine's document must stay; the words of findings may become better ones."""
    kept = ("source", "state", "action", "hung_in_driver", "xids", "sxids", "gpus")
    return {**{name: machine[name] for name in kept}, "rules": sorted({each["rule"] for each in machine["findings"]})}


def document(verdict: Verdict) -> dict[str, Any]:
    machine: dict[str, Any] = json.loads(view.dump(view.document([verdict])))["machines"][0]
    return machine


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_the_machine(case: Path) -> None:
    wanted = json.loads((case / "verdict.json").read_text())["live"]
    facts = json.loads(gzip.decompress((case / "probe.json.gz").read_bytes()))
    assert shape.violation(facts) == ""
    assert told(document(judge.judge_facts(wanted["name"], facts, SiteRules()))) == told(wanted)


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_its_saved_files(case: Path) -> None:
    wanted = json.loads((case / "verdict.json").read_text())["files"]
    files = sorted(str(path) for path in case.iterdir() if path.suffix == ".xml" or path.name.startswith("kernel.log"))
    assert told(document(health.of_files(files))) == told(wanted)
