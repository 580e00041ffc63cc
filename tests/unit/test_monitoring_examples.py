"""Alert rules and the dashboard in examples/monitoring: they use metrics that exist, and the rules fire."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes.health.model import State
from gpunodes.views import metrics

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
RULES = FOLDER / "rules.yml"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian's package prometheus) is not installed")

SICK = 'gpunodes_machine_health_state{machine="gpu-1",state="hung"}'
LOST = 'gpunodes_machine_health_state{machine="gpu-2",state="unreachable"}'
# Alert -> series and their values for an hour, when it is looked at, and the labels of its machine.
FIRING: dict[str, tuple[list[tuple[str, str]], str, dict[str, str]]] = {
    "GpunodesMachineSick": ([(SICK, "1x60")], "1m", {"machine": "gpu-1", "state": "hung"}),
    "GpunodesMachineUnreachable": ([(LOST, "1x60")], "20m", {"machine": "gpu-2", "state": "unreachable"}),
    "GpunodesMachineDegraded": (
        [(SICK.replace("hung", "degraded"), "1x60")],
        "40m",
        {"machine": "gpu-1", "state": "degraded"},
    ),
    "GpunodesMachineNeedsRepair": (
        [('gpunodes_machine_needs_repair{machine="gpu-1"}', "1x60")],
        "1m",
        {"machine": "gpu-1"},
    ),
    "GpunodesGpusMissing": (
        [('gpunodes_gpus_seen{machine="gpu-1"}', "7x60"), ('gpunodes_gpus_expected{machine="gpu-1"}', "8x60")],
        "10m",
        {"machine": "gpu-1"},
    ),
    "GpunodesScanTooOld": ([("gpunodes_scan_timestamp_seconds", "0x200")], "2h", {}),
    "GpunodesScanMissing": ([("up", "1x200")], "2h", {}),
    "GpunodesScanFails": ([("gpunodes_scan_failures_total", "0+1x60")], "40m", {}),
}


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def dashboard_queries() -> Iterator[str]:
    for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def promtool(*arguments: str | Path) -> None:
    assert PROMTOOL
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_and_dashboard_use_metrics_and_states_that_exist() -> None:
    known = {metric.name for metric in metrics.METRICS}
    queries = [*(rule["expr"] for rule in rules()), *dashboard_queries()]
    assert queries
    used = {name for query in queries for name in re.findall(r"\bgpunodes_\w+", query)}
    assert used <= known
    states = {
        state for query in queries for given in re.findall(r'state=~?"([^"]+)"', query) for state in given.split("|")
    }
    assert states == {state.value for state in State}


def test_every_alert_says_what_to_do() -> None:
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in {"critical", "warning"}


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", RULES)


@needs_promtool
def test_promtool_accepts_the_dashboard_s_queries(tmp_path: Path) -> None:
    queries = [query.replace("$machine", ".*") for query in dashboard_queries()]
    recorded = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    promtool("check", "rules", path)


def test_every_alert_has_a_case() -> None:
    assert list(FIRING) == [rule["alert"] for rule in rules()]


@needs_promtool
@pytest.mark.parametrize("alert", FIRING)
def test_alerts_fire_and_end(tmp_path: Path, alert: str) -> None:
    series, moment, labels = FIRING[alert]
    (rule,) = [rule for rule in rules() if rule["alert"] == alert]
    tests = [
        case(alert, series, moment, [{"exp_labels": {**labels, **rule["labels"]}}]),
        case(alert, HEALTHY, moment, []),
    ]
    path = tmp_path / "test.yml"
    # The texts of annotations are not part of these cases.
    plain = [{key: value for key, value in each.items() if key != "annotations"} for each in rules()]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "gpunodes", "rules": plain}]}))
    path.write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", path)


HEALTHY = [
    ('gpunodes_machine_health_state{machine="gpu-1",state="healthy"}', "1x200"),
    (SICK, "0x200"),
    (LOST, "0x200"),
    ('gpunodes_machine_needs_repair{machine="gpu-1"}', "0x200"),
    ('gpunodes_gpus_seen{machine="gpu-1"}', "8x200"),
    ('gpunodes_gpus_expected{machine="gpu-1"}', "8x200"),
    ("gpunodes_scan_failures_total", "0x200"),
    ("gpunodes_scan_timestamp_seconds", "0+60x200"),
]


def case(alert: str, series: list[tuple[str, str]], moment: str, expected: list[dict[str, Any]]) -> dict[str, Any]:
    """A case for `promtool test rules`."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series],
        "alert_rule_test": [{"eval_time": moment, "alertname": alert, "exp_alerts": expected}],
    }
