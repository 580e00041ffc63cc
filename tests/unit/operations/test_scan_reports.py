"""What follows a scan: the state after a repair, repairs in the metrics, notices of changes only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from gpunodes.engine import history, webhook
from gpunodes.engine.history import EntryKind
from gpunodes.errors import GpunodesError
from gpunodes.health.changes import StateChange
from gpunodes.health.model import Action, State, Verdict
from gpunodes.operations import scan_reports

from tests import repair_fleet

HOOK = webhook.webhook("https://hooks.example.org/x")
CLUSTER = "c"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repair_fleet.hurry(monkeypatch, tmp_path)


def verdict(name: str, state: State) -> Verdict:
    return Verdict(name, "live", state, Action.NONE)


def names(changes: Sequence[StateChange]) -> list[tuple[str, str, str]]:
    return [(each.verdict.name, each.before.value, each.verdict.state.value) for each in changes]


def test_the_verdicts_after_a_repair() -> None:
    fleet = repair_fleet.fleet(3, sick=["w1"])
    result = repair_fleet.run(fleet)
    assert result.machines[1].verdict
    assert result.machines[1].verdict.state is not State.HEALTHY
    scans = fleet.scans
    after = scan_reports.after_repair(fleet, fleet.all_machines(), result)
    assert [(each.name, each.state) for each in after] == [(f"w{number}", State.HEALTHY) for number in range(3)]
    assert fleet.scans == scans + 1, "only the repaired machine is scanned again"
    summary = scan_reports.summary(after, time.monotonic(), fleet.cluster_name)
    assert (summary.repairs, summary.needs_repair) == ({"repaired": 1}, set())


def test_a_machine_that_was_given_up_needs_repair() -> None:
    history.note("gpu-1", CLUSTER, EntryKind.END, "repair", "needs-repair", "no step helped")
    history.note("gpu-2", "other", EntryKind.END, "repair", "needs-repair", "no step helped")
    summary = scan_reports.summary([verdict("gpu-1", State.SICK)], time.monotonic() - 5, CLUSTER)
    assert summary.needs_repair == {"gpu-1"}
    assert summary.repairs == {"needs-repair": 1}
    assert 5 <= summary.seconds < 60
    assert scan_reports.summary([], time.monotonic(), None).repairs is None


def test_a_change_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[tuple[str, str, str]]] = []

    def notify(*verdicts: Verdict) -> None:
        def body(changes: Sequence[StateChange]) -> bytes:
            sent.append(names(changes))
            return b"{}"

        scan_reports.notify(HOOK, CLUSTER, verdicts, body)

    monkeypatch.setattr(webhook, "post", lambda *_: None)
    notify(verdict("gpu-1", State.SICK), verdict("gpu-2", State.HEALTHY))
    notify(verdict("gpu-1", State.SICK), verdict("gpu-2", State.HEALTHY))
    notify(verdict("gpu-1", State.HUNG), verdict("gpu-2", State.UNREACHABLE))
    notify(verdict("gpu-2", State.HEALTHY))
    assert sent == [
        [("gpu-1", "healthy", "sick")],
        [("gpu-1", "sick", "hung"), ("gpu-2", "healthy", "unreachable")],
        [("gpu-2", "unreachable", "healthy")],
    ]
    assert {entry.kind for entry in history.read()} == {EntryKind.STATE}


def test_what_was_not_sent_is_sent_by_the_next_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise GpunodesError("the notice failed")

    monkeypatch.setattr(webhook, "post", fail)
    sick = [verdict("gpu-1", State.SICK)]
    with pytest.raises(GpunodesError, match="the notice failed"):
        scan_reports.notify(HOOK, CLUSTER, sick, lambda _: b"")
    assert history.read() == []
    sent: list[bytes] = []
    monkeypatch.setattr(webhook, "post", lambda _, body: sent.append(body))
    scan_reports.notify(HOOK, CLUSTER, sick, lambda changes: names(changes)[0][0].encode())
    assert sent == [b"gpu-1"]


def test_a_notice_does_not_change_what_repairs_know() -> None:
    history.note("gpu-1", CLUSTER, EntryKind.VERDICT, "reboot", "hung", "its pool has no budget")
    before = history.summaries(CLUSTER)
    history.note("gpu-1", CLUSTER, EntryKind.STATE, "hung", "reported")
    assert history.summaries(CLUSTER) == before
    assert before["gpu-1"].not_repaired


def test_an_unknown_state_in_the_history_counts_as_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a newer version."""
    history.note("gpu-1", CLUSTER, EntryKind.STATE, "molten", "reported")
    sent: list[bytes] = []
    monkeypatch.setattr(webhook, "post", lambda _, body: sent.append(body))
    scan_reports.notify(HOOK, CLUSTER, [verdict("gpu-1", State.SICK)], lambda changes: b"x")
    assert sent == [b"x"]
