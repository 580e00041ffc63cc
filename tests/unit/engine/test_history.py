"""The history of machines: append-only, private, readable after a power loss."""

from __future__ import annotations

import json
import resource
import signal
import threading
from pathlib import Path

import pytest
from gpunodes.engine import history
from gpunodes.engine.history import EntryKind, HistoryEntry, MachineHistory
from gpunodes.errors import GpunodesError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def entry(kind: EntryKind, what: str = "reboot", outcome: str = "", at: float = 1.0, **more: str) -> HistoryEntry:
    return HistoryEntry(at, more.pop("machine", "gpu-1"), kind, what, outcome, cluster="c", **more)  # type: ignore[arg-type]  # texts all


def test_what_is_appended_is_read_back() -> None:
    first = HistoryEntry(
        1.5, "gpu-1", EntryKind.VERDICT, "reboot", "hung", "Xid 79 ÄÖ\n", 2.5, "r1", "c", "ann@desk", ("line",)
    )
    history.append(first)
    history.append(entry(EntryKind.END, machine="gpu-2"))
    assert history.read() == [first, entry(EntryKind.END, machine="gpu-2")]
    assert history.read("gpu-1") == [first]
    assert history.read(cluster="other") == []
    assert history.path().stat().st_mode & 0o777 == 0o600


def test_an_incomplete_last_line_does_not_spoil_the_next() -> None:
    history.append(entry(EntryKind.STEP))
    with history.path().open("a") as file:
        file.write('{"time": 3, "machine": "gpu-1", "ki')
    assert history.read() == [entry(EntryKind.STEP)]
    history.append(entry(EntryKind.END))
    assert history.read() == [entry(EntryKind.STEP), entry(EntryKind.END)]


@pytest.mark.parametrize(
    "line", ["", "[]", "null", "{}", '{"kind": "dance"}', '{"time": 1, "kind": "end"}', "\x00\xff"]
)
def test_invalid_lines_are_skipped(line: str) -> None:
    with history.path().open("a") as file:
        file.write(line + "\n")
    history.append(entry(EntryKind.END))
    assert history.read() == [entry(EntryKind.END)]


LINE = {"time": 1.0, "machine": "gpu-1", "kind": "end", "what": "repair", "cluster": "c"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"time": "1"},
        {"time": None},
        {"time": True},
        {"time": float("nan")},
        {"time": 1e300},
        {"time": 10**400},
        {"time": -1},
        {"seconds": "long"},
        {"seconds": float("inf")},
        {"machine": {"name": "gpu-1"}},
        {"machine": ["gpu-1"]},
        {"machine": 1},
        {"kind": []},
        {"kind": {}},
        {"what": None},
        {"outcome": 5},
        {"detail": {}},
        {"repair": []},
        {"cluster": 1},
        {"by": None},
        {"evidence": "text"},
        {"evidence": {"a": 1}},
        {"evidence": [1]},
        {"evidence": 5},
    ],
    ids=repr,
)
def test_lines_with_wrong_types_are_skipped(wrong: dict[str, object]) -> None:
    """Reading the history does not fail for a line that a user or another program has written."""
    with history.path().open("a") as file:
        file.write(json.dumps({**LINE, **wrong}) + "\n" + "[" * 100_000 + "\n")
    history.append(entry(EntryKind.END))
    assert history.read() == [entry(EntryKind.END)]
    assert set(history.summaries("c")) == {"gpu-1"}


def test_a_full_disk_is_one_sentence_and_leaves_no_incomplete_line() -> None:
    """The error is reported once, and the existing lines stay unchanged."""
    history.append(entry(EntryKind.STEP))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel writes as much as there is room for, as on a full disk.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (history.path().stat().st_size + 20, limit[1]))
    try:
        with pytest.raises(GpunodesError, match="the history of gpu-1 cannot be written"):
            history.append(entry(EntryKind.END))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert history.path().read_bytes().endswith(b"}\n")
    history.append(entry(EntryKind.END))
    assert history.read() == [entry(EntryKind.STEP), entry(EntryKind.END)]


def test_messages_of_a_machine_are_written_as_ascii() -> None:
    """They may hold any characters, and users read the file itself."""
    words = "no \udcff\x1b[2J\x9b1m\u202e\n"
    history.append(entry(EntryKind.STEP, detail=words))
    assert all(32 <= byte < 127 for byte in history.path().read_bytes().rstrip(b"\n"))
    assert history.read()[0].detail == words


def test_many_writers() -> None:
    def write(number: int) -> None:
        for _ in range(20):
            history.append(entry(EntryKind.STAGE, machine=f"gpu-{number}"))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(history.read()) == 100


def test_summaries_for_the_next_repair() -> None:
    history.append(entry(EntryKind.VERDICT, at=10.0, repair="r1"))
    history.append(entry(EntryKind.STEP, "gpu-reset", "skipped", 11.0, repair="r1"))
    history.append(entry(EntryKind.STEP, "reboot", "failed", 12.0, repair="r1"))
    history.append(entry(EntryKind.STEP, "bmc", "succeeded", 13.0, repair="r1"))
    history.append(entry(EntryKind.END, "repair", "repaired", 14.0, repair="r1"))
    assert history.summaries("c") == {"gpu-1": MachineHistory((10.0,), "")}
    history.append(entry(EntryKind.END, "repair", "needs-repair", 20.0, repair="r2", detail="GPU lost"))
    assert history.summaries("c")["gpu-1"] == MachineHistory((10.0,), "GPU lost")
    history.append(entry(EntryKind.CLEARED, "cleared", at=30.0))
    assert history.summaries("c")["gpu-1"] == MachineHistory()


def test_skipped_steps_do_not_count_as_a_repair() -> None:
    history.append(entry(EntryKind.STEP, "reboot", "skipped", repair="r1"))
    assert history.summaries("c")["gpu-1"].repairs == ()
