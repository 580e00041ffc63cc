"""Metrics: the text format of Prometheus, whatever machines report."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from gpunodes.health.model import Action, Finding, ScanSummary, State, Verdict
from gpunodes.views import metrics

FINDING = Finding("xid", "0000:3b:00.0", Action.REBOOT, State.SICK, code=79)
SICK = Verdict("gpu-1", "live", State.SICK, Action.REBOOT, gpus_expected=8, gpus_seen=7, findings=(FINDING, FINDING))
LOST = Verdict("gpu-2", "live", State.UNREACHABLE, Action.NONE)
SUMMARY = ScanSummary([SICK, LOST], 1700000000.5, 61.25, {"gpu-2"}, {"repaired": 3, "of a newer version": 1})
LINE = re.compile(
    r'gpunodes_[a-z_]+(\{[a-z]+="(?:[^"\\\n]|\\["\\])*"(,[a-z]+="(?:[^"\\\n]|\\["\\])*")*\})? \d+(\.\d+)?'
)


def promtool(text: str) -> None:
    """Check metrics with Prometheus' own tool."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian: the package prometheus, whose service it does not need)")
    done = subprocess.run([program, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_metrics_of_a_scan() -> None:
    lines = metrics.scan(SUMMARY).splitlines()
    assert [
        line for line in lines if line.startswith("gpunodes") and not line.startswith("gpunodes_machine_health")
    ] == [
        'gpunodes_machine_findings{machine="gpu-1",rule="xid",code="79"} 2',
        'gpunodes_gpus_expected{machine="gpu-1"} 8',
        'gpunodes_gpus_seen{machine="gpu-1"} 7',
        'gpunodes_machine_needs_repair{machine="gpu-1"} 0',
        'gpunodes_machine_needs_repair{machine="gpu-2"} 1',
        'gpunodes_repairs_total{outcome="repaired"} 3',
        'gpunodes_repairs_total{outcome="not-repaired"} 0',
        'gpunodes_repairs_total{outcome="needs-repair"} 0',
        "gpunodes_scan_timestamp_seconds 1700000000.500",
        "gpunodes_scan_duration_seconds 61.250",
    ]
    states = [line for line in lines if line.startswith("gpunodes_machine_health_state")]
    assert len(states) == 2 * len(State)
    assert [line for line in states if line.endswith(" 1")] == [
        'gpunodes_machine_health_state{machine="gpu-1",state="sick"} 1',
        'gpunodes_machine_health_state{machine="gpu-2",state="unreachable"} 1',
    ]
    assert "# TYPE gpunodes_repairs_total counter" in lines


def test_saved_logs_have_no_metrics_of_the_history() -> None:
    text = metrics.scan(ScanSummary([SICK], 1.0, 0.1))
    assert "needs_repair" not in text
    assert "repairs_total" not in text


def test_the_server_s_metrics() -> None:
    assert metrics.served(None, 2, 5.0).splitlines()[-1] == "gpunodes_scan_failures_total 2"
    text = metrics.served(SUMMARY, 1, 1700000060.5)
    assert text.startswith(metrics.scan(SUMMARY))
    assert "gpunodes_scan_age_seconds 60\n" in text
    # The clock was set back.
    assert "gpunodes_scan_age_seconds 0\n" in metrics.served(SUMMARY, 1, 1.0)
    assert set(re.findall(r"# TYPE (\S+)", text)) == {metric.name for metric in metrics.METRICS}


@pytest.mark.parametrize(
    "name",
    ['a"} 1\nforged{x="', "back\\slash\\", "\x1b[2J\r\x00\x85\u2028", "\udcff\udc80", "ä\u202e", "n" * 100_000, ""],
    ids=["quotes", "backslash", "control", "surrogates", "bidi", "long", "empty"],
)
def test_hostile_names_stay_one_label(name: str) -> None:
    finding = Finding(name, "", Action.NONE, State.SICK)
    text = metrics.scan(ScanSummary([Verdict(name, "file", State.SICK, Action.NONE, findings=(finding,))], 1.0, 1.0))
    lines = [line for line in text.split("\n")[:-1] if not line.startswith("#")]
    assert len(lines) == len(State) + 3
    assert all(LINE.fullmatch(line) and len(line) < 1000 for line in lines)
    text.encode()
    promtool(text)


def test_names_that_become_equal_are_one_series() -> None:
    """node exporter rejects a whole file for a series that it has twice."""
    text = metrics.scan(ScanSummary([Verdict(name, "file", State.SICK, Action.NONE) for name in "\x00\x01"], 1.0, 1.0))
    assert text.count("gpunodes_machine_health_state{") == len(State)


def test_a_machine_has_a_limited_number_of_series() -> None:
    findings = tuple(Finding("xid", "", Action.NONE, State.SICK, code=code) for code in range(1000))
    text = metrics.scan(ScanSummary([Verdict("gpu-1", "live", State.SICK, Action.NONE, findings=findings)], 1.0, 1.0))
    assert text.count("gpunodes_machine_findings{") == metrics.MANY_FINDINGS + 1
    assert f'rule="{metrics.OTHER_RULES}",code=""}} {1000 - metrics.MANY_FINDINGS}\n' in text


def test_promtool_accepts_the_metrics() -> None:
    promtool(metrics.served(SUMMARY, 0, 1700000001.0))
