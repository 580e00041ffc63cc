"""The verdicts of a scan as metrics, in the text format of Prometheus.

https://prometheus.io/docs/instrumenting/exposition_formats/; names and units follow
https://prometheus.io/docs/practices/naming/. Texts may come from machines: each label is one short line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpunodes.health.model import ScanSummary, State, Verdict
from gpunodes.model import printable
from gpunodes.repair.record import RepairOutcome

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OTHER_RULES = "other"
"""The label of the findings of a machine above ``MANY_FINDINGS``."""
MANY_FINDINGS = 32
"""Series of one machine's findings."""
_LONG = 200
"""Characters of a label's value."""

_Labels = tuple[tuple[str, str], ...]
_Samples = Mapping[_Labels, float]


@dataclass(frozen=True, slots=True)
class _Metric:
    name: str
    type: str
    help: str


_STATE = _Metric("gpunodes_machine_health_state", "gauge", "Whether the machine is in this state, 1 or 0.")
_FINDINGS = _Metric("gpunodes_machine_findings", "gauge", "Findings of the verdict, by rule and by Xid or SXid.")
_EXPECTED = _Metric("gpunodes_gpus_expected", "gauge", "GPUs that the machine should have.")
_SEEN = _Metric("gpunodes_gpus_seen", "gauge", "GPUs of the machine that respond.")
_NEEDS_REPAIR = _Metric("gpunodes_machine_needs_repair", "gauge", "Whether repairs gave the machine up, 1 or 0.")
_REPAIRS = _Metric("gpunodes_repairs_total", "counter", "Repairs that ended, in the history of this controller.")
_TIMESTAMP = _Metric("gpunodes_scan_timestamp_seconds", "gauge", "When the last scan ended, in seconds since 1970.")
_DURATION = _Metric(
    "gpunodes_scan_duration_seconds", "gauge", "How long the last scan took, with the repairs after it."
)
_AGE = _Metric("gpunodes_scan_age_seconds", "gauge", "Time since the end of the last scan.")
_FAILURES = _Metric("gpunodes_scan_failures_total", "counter", "Scans that failed since the server started.")
METRICS = (_STATE, _FINDINGS, _EXPECTED, _SEEN, _NEEDS_REPAIR, _REPAIRS, _TIMESTAMP, _DURATION, _AGE, _FAILURES)
"""All metrics, in the order in which they are written."""


def scan(summary: ScanSummary) -> str:
    """The metrics of one scan, for node exporter's textfile collector."""
    return _text(_of_scan(summary))


def served(summary: ScanSummary | None, failures: int, now: float) -> str:
    """The metrics of the last scan (None before the first) for a scrape at ``now``, in seconds since 1970."""
    found: dict[_Metric, _Samples] = {_FAILURES: {(): failures}}
    if summary:
        found |= {**_of_scan(summary), _AGE: {(): max(0.0, now - summary.ended)}}
    return _text(found)


def _of_scan(summary: ScanSummary) -> dict[_Metric, _Samples]:
    machines = {_label(verdict.name): verdict for verdict in summary.verdicts}
    found: dict[_Metric, _Samples] = {
        _STATE: {
            (("machine", name), ("state", state.value)): verdict.state is state
            for name, verdict in machines.items()
            for state in State
        },
        _FINDINGS: {
            (("machine", name), ("rule", rule), ("code", code)): number
            for name, verdict in machines.items()
            for (rule, code), number in _findings(verdict)
        },
        _EXPECTED: {
            (("machine", name),): each.gpus_expected
            for name, each in machines.items()
            if each.gpus_expected is not None
        },
        _SEEN: {(("machine", name),): each.gpus_seen for name, each in machines.items() if each.gpus_seen is not None},
        _TIMESTAMP: {(): summary.ended},
        _DURATION: {(): summary.seconds},
    }
    if summary.needs_repair is not None:
        needs_repair = summary.needs_repair
        found[_NEEDS_REPAIR] = {(("machine", name),): each.name in needs_repair for name, each in machines.items()}
    if summary.repairs is not None:
        known = summary.repairs
        found[_REPAIRS] = {(("outcome", each.value),): known.get(each.value, 0) for each in RepairOutcome}
    return found


def _findings(verdict: Verdict) -> Iterator[tuple[tuple[str, str], int]]:
    """The number of findings by rule and code: a machine may report any number of codes."""
    counts = Counter(
        (_label(finding.rule), "" if finding.code is None else str(finding.code)) for finding in verdict.findings
    )
    found = list(counts.items())
    yield from found[:MANY_FINDINGS]
    if more := sum(number for _, number in found[MANY_FINDINGS:]):
        yield (OTHER_RULES, ""), more


def _text(found: Mapping[_Metric, _Samples]) -> str:
    lines = []
    for metric in METRICS:
        if samples := found.get(metric):
            lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.type}"]
            lines += [f"{metric.name}{_braces(labels)} {_number(value)}" for labels, value in samples.items()]
    return "".join(f"{line}\n" for line in lines)


def _braces(labels: Sequence[tuple[str, str]]) -> str:
    values = [(name, value.replace("\\", "\\\\").replace('"', '\\"')) for name, value in labels]
    return "{" + ",".join(f'{name}="{value}"' for name, value in values) + "}" if values else ""


def _label(text: str) -> str:
    """A label's value: one line of valid UTF-8, not too long."""
    return printable(text[:_LONG])


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.3f}"
