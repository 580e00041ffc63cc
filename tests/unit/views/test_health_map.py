"""The map of a health scan: on terminals of any size, and as plain lines."""

from __future__ import annotations

import io
import os
import re

import pytest
from gpunodes.health.model import Action, Finding, State, Verdict
from gpunodes.views.health_map import HealthLines, Map, progress

SIZE = os.terminal_size((80, 24))


def verdict(name: str, state: State = State.HEALTHY, message: str = "") -> Verdict:
    found = (Finding("rule", "", Action.NONE, state, message=message),) if message else ()
    return Verdict(name, "live", state, Action.REBOOT if state is State.HUNG else Action.NONE, findings=found)


def names(number: int) -> list[str]:
    return [f"gpu-{position:04d}" for position in range(1, number + 1)]


def plain(lines: list[str]) -> list[str]:
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]


def drawn(view: Map, columns: int = 80, rows: int = 24) -> list[str]:
    return plain(view.lines(columns, rows))


def test_a_cell_for_each_machine_readable_without_colour() -> None:
    view = Map(io.StringIO(), colour=False)
    view.begin([f"gpu-{number}" for number in range(1, 10)])
    for name, state in zip([f"gpu-{number}" for number in range(1, 8)], State, strict=True):
        view.scanned(verdict(name, state))
    lines = drawn(view)
    assert lines[0] == "gpu-1..9  .od?SHx··"
    legend = " ".join(lines[1:]).split("  ")
    assert legend[:5] == [". healthy 1", "o off 1", "d degraded 1", "? unknown 1", "S sick 1"]
    assert len(set(lines[0].split()[1])) == len(State) + 1


def test_colour_does_not_change_the_text() -> None:
    coloured, bare = Map(io.StringIO()), Map(io.StringIO(), colour=False)
    for view in (coloured, bare):
        view.begin(names(30))
        view.scanned(verdict("gpu-0003", State.HUNG))
    assert "\x1b[31mH\x1b[0m" in coloured.lines(80, 24)[0]
    assert drawn(coloured)[0] == bare.lines(80, 24)[0]


@pytest.mark.parametrize("number", [1, 9, 10, 11, 64, 999, 1000, 1024])
@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (40, 24), (200, 50), (20, 5), (3, 2)])
def test_it_fits_on_the_screen(number: int, columns: int, rows: int) -> None:
    view = Map(io.StringIO())
    view.begin(names(number))
    lines = drawn(view, columns, rows)
    assert len(lines) <= max(rows - 1, 4)
    if columns >= 20:
        assert max(len(line) for line in lines) < columns


def test_a_thousand_machines_are_all_shown() -> None:
    view = Map(io.StringIO())
    view.begin(names(1000))
    lines = drawn(view)
    assert sum(line.count("·") for line in lines) == 1001
    assert lines[0].split()[0] == "gpu-0001..0050"
    assert lines[19].split()[0] == "gpu-0951..1000"


def test_it_is_redrawn_in_place_and_not_for_every_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda: SIZE)
    stream = io.StringIO()
    view = Map(stream)
    view.begin(names(1000))
    for name in names(1000):
        view.scanned(verdict(name))
    view.close()
    assert 2 <= stream.getvalue().count("gpu-0001") < 20
    assert ". healthy 1000" in plain([stream.getvalue()])[0]


def test_without_a_terminal_plain_lines_have_no_control_characters() -> None:
    stream = io.StringIO()
    view = progress(stream)
    assert isinstance(view, HealthLines)
    view.begin(names(1000))
    for name in names(998):
        view.scanned(verdict(name))
    view.scanned(verdict("gpu-0999", State.HUNG, "\x1b[2Jgone"))
    view.scanned(verdict("gpu-1000", State.UNREACHABLE))
    view.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "scanning 1000 machines"
    assert lines[-3] == "gpu-0999: hung, reboot:  [2Jgone"
    assert lines[-2] == "gpu-1000: unreachable"
    assert lines[-1].startswith("1000 of 1000 scanned in")
    assert len(lines) < 20
    assert "\x1b" not in stream.getvalue()
