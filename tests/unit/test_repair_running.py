"""Errors: they stop the repair of their own machine only, or the command before any change."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
from gpunodes.engine import history, records
from gpunodes.engine.cluster.errors import NoResponse
from gpunodes.engine.leases.held import Leases
from gpunodes.engine.machine_control import Boot
from gpunodes.errors import WrongInput
from gpunodes.operations.repair import commands
from gpunodes.repair import record as recording
from gpunodes.repair.policy import Budget, Decision, RepairCandidate, RepairLimits
from gpunodes.repair.record import RepairOutcome, RepairRecord
from gpunodes.repair.request import RepairRequest

from tests import repair_fleet
from tests.repair_fleet import Fleet, bury, clean, fleet, hurry, run


@pytest.fixture(autouse=True)
def quick(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own state folder, and very short time limits."""
    hurry(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("evidence_days", "soon"), ("evidence_days", -1), ("evidence_mib", 0), ("guard_repairs", "{{ 2 }}"),
        ("boot_timeout", "nan"), ("settle", [1]), ("unhealthy_percent", 0),
    ],
)  # fmt: skip
def test_an_invalid_number_is_refused_before_any_change(key: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative number of days deleted all evidence."""
    place = fleet(5, ["w1"])
    given = place.settings()
    monkeypatch.setattr(place, "settings", lambda: {**given, f"gpunodes_repair_{key}": value})
    with pytest.raises(WrongInput, match=f"gpunodes_repair_{key} is "):
        run(place)
    assert place.machines["w1"].done == []


FULL = OSError(errno.ENOSPC, "No space left on device", "/var/lib/x")


def odd_control(place: Fleet, patch: pytest.MonkeyPatch) -> None:
    machine_control = place.machine_control

    def give(machine: Any, **_: Any) -> Any:
        if machine.name == "w1":
            raise ValueError("its variables are odd")
        return machine_control(machine)

    patch.setattr(place, "machine_control", give)


def odd_boot(_: Fleet, patch: pytest.MonkeyPatch) -> None:
    boot = repair_fleet.StandInControl.boot

    def answer(self: repair_fleet.StandInControl) -> Boot:
        if self._machine.name == "w1":
            raise ValueError("could not convert string to float: 'load:'")
        return boot(self)

    patch.setattr(repair_fleet.StandInControl, "boot", answer)


def odd_scan(place: Fleet, patch: pytest.MonkeyPatch) -> None:
    scan = place.scan

    def answer(machines: Any, **_: Any) -> Any:
        if place.machines["w1"].done and machines[0].name == "w1":
            raise RecursionError("deep")
        return scan(machines)

    patch.setattr(place, "scan", answer)


def full_at(kind: history.EntryKind) -> Callable[[Fleet, pytest.MonkeyPatch], None]:
    def prepare(_: Fleet, patch: pytest.MonkeyPatch) -> None:
        append = history.append

        def full(entry: history.HistoryEntry) -> None:
            if entry.machine == "w1" and entry.kind is kind:
                raise FULL
            append(entry)

        patch.setattr(history, "append", full)

    return prepare


def full_record(_: Fleet, patch: pytest.MonkeyPatch) -> None:
    write = records.write

    def full(record: RepairRecord) -> None:
        if record.machine == "w1":
            raise FULL
        write(record)

    patch.setattr(records, "write", full)


def odd_report(_: Fleet, patch: pytest.MonkeyPatch) -> None:
    def odd(**values: Any) -> RepairCandidate:
        if values["name"] == "w1":
            raise KeyError("what it reported")
        return RepairCandidate(**values)

    patch.setattr("gpunodes.operations.repair.deciding.RepairCandidate", odd)


ODD = {
    "decision": (odd_report, "unexpected KeyError: 'what it reported'"),
    "machine_control": (odd_control, "unexpected ValueError: its variables are odd"),
    "boot": (odd_boot, "unexpected ValueError: could not convert"),
    "scan": (odd_scan, "unexpected RecursionError: deep"),
    "history before": (full_at(history.EntryKind.VERDICT), "/var/lib/x: No space left on device"),
    "history after the order": (full_at(history.EntryKind.STEP), "/var/lib/x: No space left on device"),
    "history at the end": (full_at(history.EntryKind.END), "/var/lib/x: No space left on device"),
    "record": (full_record, "/var/lib/x: No space left on device"),
}


@pytest.mark.parametrize("where", list(ODD))
def test_an_error_about_one_machine_stops_no_other_repair(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any error about one machine ends its repair with a sentence; the others are repaired."""
    place = fleet(20, ["w1", "w5", "w9"])
    prepare, message = ODD[where]
    with monkeypatch.context() as patch:
        prepare(place, patch)
        # Only a machine whose repair is unfinished counts in the budget.
        budget = Budget(2 if where in {"boot", "scan", "history after the order"} else 1)
        results = {each.machine: each for each in run(place, limits=RepairLimits(max_unavailable=budget)).machines}
    assert results["w1"].why.startswith(message)
    assert not results["w1"].healthy
    assert [results[name].outcome for name in ("w5", "w9")] == [RepairOutcome.REPAIRED] * 2
    # The same command resumes the repair.
    bury(place)
    run(place)
    assert place.machines["w1"].done == ["reboot"], "ordered only once"
    clean(place)


def test_an_unfinished_repair_that_cannot_be_resumed_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repair that cannot be resumed does not prevent the next run from repairing the others."""
    place = fleet(20, ["w1", "w5"])
    place.cordon("w1", "id-1")
    records.write(
        RepairRecord("id-1", "w1", "test", 0.0, "", "reboot", recording.Stage.ESCALATE, node="w1", step="reboot")
    )
    odd_control(place, monkeypatch)
    results = {each.machine: each for each in run(place, limits=RepairLimits(max_unavailable=Budget(2))).machines}
    assert results["w1"].why == "unexpected ValueError: its variables are odd"
    assert results["w5"].outcome is RepairOutcome.REPAIRED


@pytest.mark.parametrize("full", ["w1", "w5"])
def test_a_full_disk_for_a_machine_that_waits_ends_no_other_repair(full: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why it still waits is noted at the end, when all results are known."""
    place = fleet(20, ["w1", "w5"])
    for name, node in place.api.nodes.items():
        node["metadata"]["labels"]["gpunodes.dev/pool"] = "a" if name < "w2" else "b"
    place.cordon("w9")
    append = history.append

    def on_full_disk(entry: history.HistoryEntry) -> None:
        if entry.machine == full and entry.detail.startswith("wait: "):
            raise FULL
        append(entry)

    monkeypatch.setattr(history, "append", on_full_disk)
    results = {each.machine: each for each in run(place).machines}
    assert results["w1"].outcome is RepairOutcome.REPAIRED
    wanted = (Decision.REFUSE, "/var/lib/x: No space") if full == "w5" else (Decision.WAIT, "w9 of pool b unavailable")
    assert (results["w5"].decision, results["w5"].why[: len(wanted[1])]) == wanted


@pytest.mark.parametrize("where", ["history", "record"])
def test_a_record_that_cannot_be_dropped_ends_no_other_repair(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine was booted again; the record is dropped by the next command."""
    place, lines = fleet(20, ["w5"]), list[str]()
    fields: dict[str, Any] = {"reason": "", "action": "reboot", "node": "w1", "boot_id": "w1-boot-0"}
    records.write(RepairRecord("id-1", "w1", "test", 1.0, stage=recording.Stage.COLLECT, **fields))
    request = RepairRequest("health", RepairLimits())

    def full(*_: Any, **__: Any) -> None:
        raise FULL

    with monkeypatch.context() as patch:
        if where == "history":
            full_at(history.EntryKind.END)(place, patch)
        else:
            patch.setattr(records, "remove", lambda record: full() if record.machine == "w1" else None)
        result = commands.run(place, place.all_machines(), request, lambda name, text: lines.append(f"{name}: {text}"))
    assert {each.machine: each.outcome for each in result.machines}["w5"] is RepairOutcome.REPAIRED
    assert "w1: its record stays: /var/lib/x: No space left on device" in lines
    assert "w1" in records.read("test")
    run(place)
    assert place.machines["w1"].done == []
    clean(place)


def test_an_unresponsive_control_plane_stops_only_repairs_that_have_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Waiting machines are refused with the reason; started repairs continue."""
    place = fleet(20, ["w1", "w5"])
    deciding = Leases.deciding

    def once(self: Leases) -> Any:
        if place.machines["w1"].done:
            raise NoResponse("the control plane does not respond")
        return deciding(self)

    monkeypatch.setattr(Leases, "deciding", once)
    results = {each.machine: each for each in run(place).machines}
    assert results["w1"].outcome is RepairOutcome.REPAIRED
    assert (results["w5"].decision, results["w5"].why) == (Decision.REFUSE, "the control plane does not respond")
    assert place.machines["w5"].done == []
    clean(place)
