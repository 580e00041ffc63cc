"""The command line: help, wrong input, JSON errors, views."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from gpunodes import cli
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.cli import terminal
from gpunodes.errors import GpunodesError
from gpunodes.health.model import State
from gpunodes.inventory import edit
from gpunodes.model import Machine, MachineResult, Outcome, PreflightFinding, Role, RunResult, Severity
from gpunodes.operations import phases
from gpunodes.planner import gates
from gpunodes.repair.record import RepairOutcome
from gpunodes.views import colours, document, gpu, health_map, screen, text

from tests.command import run as gpunodes

WITHOUT_JSON = {
    "serve-metrics": "it serves Prometheus' format, and prints nothing",
    "playbook": "Ansible's own output",
    "content": "one path, for scripts as it is",
    "lab console": "the terminal of a machine",
    "lab ssh": "the output of a machine",
    "help": "pages",
    "completion": "code for a shell",
}
"""The commands without --json, each with the reason; docs/json.md lists them."""


def all_commands(command: click.Command = cli.root, path: tuple[str, ...] = ()) -> dict[str, click.Command]:
    """Every command that does something, by its words."""
    if not isinstance(command, click.Group):
        return {" ".join(path): command}
    context = click.Context(command)
    found: dict[str, click.Command] = {}
    for name in command.list_commands(context):
        below = command.get_command(context, name)
        assert below is not None
        found |= all_commands(below, (*path, name))
    return found


def test_every_command_has_json_unless_a_reason_says_why_not() -> None:
    lacking = {
        name
        for name, command in all_commands().items()
        if not any("--json" in parameter.opts for parameter in command.params)
    }
    assert lacking == WITHOUT_JSON.keys()
    page = (Path(__file__).parents[3] / "docs/json.md").read_text()
    assert [name for name in WITHOUT_JSON if f"`{name}`" not in page] == []


def test_registry_open_prints_one_line_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts.yml").write_text("control_plane: {hosts: {cp-1: }}\n")

    def interrupted() -> None:
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def reached(_: object, port: int, __: object) -> Iterator[Any]:
        yield types.SimpleNamespace(port=port, follow=interrupted), "10.96.0.15:5000", None

    monkeypatch.setattr("gpunodes.operations.registry_server.verify.reached", reached)
    monkeypatch.setattr("sys.argv", ["gpunodes", "registry", "open", "--json", "-i", str(tmp_path / "hosts.yml")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found = {"schema": "gpunodes.tunnel/1", "port": 5000, "push": "127.0.0.1:5000", "pull": "10.96.0.15:5000"}
    assert json.loads(out) == found


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """From now on every command fails with ``error``."""

    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli.root, "main", fail)


def test_an_error_and_its_hint_are_one_line_each_whatever_others_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, GpunodesError("the API says: no\ngpu-1: cleared\r\x1b[2J", "a\nb", "c"))
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert capsys.readouterr().err == "error: the API says: no gpu-1: cleared  [2J; wanted: a b\nhint: c\n"


def test_what_nobody_foresaw_is_a_sentence_and_its_traceback_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    failing(monkeypatch, KeyError("uid"))
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    path = tmp_path / "gpunodes" / "traceback.txt"
    message = f"error: unexpected KeyError: 'uid'\nhint: this is a bug in gpunodes; please report it with {path}\n"
    assert capsys.readouterr().err == message
    assert "in fail" in path.read_text()


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name not in {"lab", "init-control-plane"}])
def test_each_command_has_the_help_that_the_list_shows(name: str) -> None:
    command = cli.root.get_command(click.Context(cli.root), name)
    assert command is not None
    assert command.get_short_help_str(200) == cli.COMMANDS[name]
    assert all(isinstance(option, click.Argument) or getattr(option, "help", None) for option in command.params)


def test_both_names_of_init_master_are_one_command() -> None:
    context = click.Context(cli.root)
    assert cli.root.get_command(context, "init-control-plane") is cli.root.get_command(context, "init-master")
    assert "init-master" in cli.COMMANDS["init-control-plane"]


def test_the_commands_are_listed_by_section(tmp_path: Path) -> None:
    shown = [line for line in gpunodes(tmp_path).stdout.splitlines() if line.endswith(":") and line[0] != " "]
    assert shown == ["Options:", "Cluster:", "GPUs:", "Health and repair:", "Tools:"]
    assert sum(map(len, cli.SECTIONS.values())) == len(cli.COMMANDS)


@pytest.mark.parametrize("argv", [("gpu",), ("maintenance",), ("lab",), ("help", "gpu")])
def test_a_group_without_a_command_shows_its_help(tmp_path: Path, argv: tuple[str, ...]) -> None:
    done = gpunodes(tmp_path, *argv)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: gpunodes ")
    assert "Commands:" in done.stdout


def test_help_shows_the_help_of_any_command(tmp_path: Path) -> None:
    assert gpunodes(tmp_path, "help", "health", "explain").stdout.startswith("Usage: gpunodes health explain ")
    assert gpunodes(tmp_path, "help", "join").stdout == gpunodes(tmp_path, "join", "--help").stdout
    done = gpunodes(tmp_path, "help", "join", "now")
    assert (done.returncode, done.stdout) == (2, "")
    for path, near in (((), "helth"), (("gpu",), "plna"), (("health",), "rulse")):
        done = gpunodes(tmp_path, "help", *path, near)
        assert (done.returncode, done.stdout) == (2, "")
        assert "hint: did you mean `gpunodes" in done.stderr


def test_versions(tmp_path: Path) -> None:
    assert gpunodes(tmp_path, "version").stdout.startswith("gpunodes ")
    found = json.loads(gpunodes(tmp_path, "version", "--json").stdout)
    assert list(found["versions"]) == ["gpunodes", "ansible-core", "ansible-runner", "python"]


def test_json_and_the_inventory_are_the_same_option_everywhere() -> None:
    """Each shared option is declared once (cli/options.py, and --json beside -o in cli/common.py)."""
    found: dict[str, set[str]] = {"as_json": set(), "inventory_path": set()}

    def walk(command: click.Command) -> None:
        for option in command.params:
            if option.name in found and isinstance(option, click.Option):
                found[option.name].add(option.help or "")
        if isinstance(command, click.Group):
            context = click.Context(command)
            for child in (command.get_command(context, name) for name in command.list_commands(context)):
                assert child is not None
                walk(child)

    walk(cli.root)
    assert found == {
        "as_json": {
            "Print one JSON document on standard output.",
            "Print one line of JSON on standard output when the tunnel is there; the command stays open.",
            "The same as -o json.",
        },
        "inventory_path": {"The Ansible inventory."},
    }


def test_a_mistyped_command_leads_to_the_nearest_only_where_one_is_near(tmp_path: Path) -> None:
    assert "did you mean `gpunodes join`? `" in gpunodes(tmp_path, "jion").stderr
    assert "did you mean `gpunodes up`? `" in gpunodes(tmp_path, "pu").stderr
    assert "did you mean" not in gpunodes(tmp_path, "nothing").stderr


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ("health --from", "error: option '--from' requires an argument\nhint: see `gpunodes health --help`\n"),
        ("gpu plan --driver", "error: option '--driver' requires an argument\nhint: see `gpunodes gpu plan --help`\n"),
        ("health --deadline x", "error: invalid value for '--deadline': 'x' is not a valid number\n"),
        ("health --parallel 1.5", "error: invalid value for '--parallel': '1.5' is not a valid whole number\n"),
        ("health --actions reboot", "error: --actions is for repairs; wanted: --reboot-hung\n"),
        ("health --yes --force-drain", "error: --yes, --force-drain are for repairs; wanted: --reboot-hung\n"),
        ("health explain fallen", "`gpunodes health rules` lists the rules\n"),
    ],
)
def test_an_error_of_an_option_names_it_and_its_command(tmp_path: Path, argv: str, error: str) -> None:
    done = gpunodes(tmp_path, *argv.split())
    assert done.returncode == 2
    assert error in done.stderr


def test_a_rule_of_a_verdict_is_explained(tmp_path: Path) -> None:
    assert gpunodes(tmp_path, "health", "explain", "fallen-off-bus").stdout.startswith("fallen-off-bus: ")
    (rule,) = json.loads(gpunodes(tmp_path, "health", "explain", "fallen-off-bus", "--json").stdout)["rules"]
    assert rule["name"] == "fallen-off-bus"


def test_the_history_of_an_unknown_machine_is_not_that_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert gpunodes(tmp_path, "history", "gpu-9").stdout.startswith("no history of gpu-9; ")
    assert gpunodes(tmp_path, "history").stdout == "no history yet\n"


@pytest.mark.parametrize(
    ("argv", "guess"),
    [(("helth",), "`gpunodes health`"), (("gpu", "plna"), "`gpunodes gpu plan`"), (("lab", "dwon"), "lab down`")],
)
def test_a_mistyped_command_leads_to_the_nearest(tmp_path: Path, argv: tuple[str, ...], guess: str) -> None:
    done = gpunodes(tmp_path, *argv)
    assert done.returncode == 2
    assert f"hint: did you mean {guess}" in done.stderr.replace("`gpunodes lab", "lab")


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"TERM": "xterm", "NO_COLOR": "1"}, False)],
)
def test_an_error_has_colours_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], coloured: bool
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    terminal.error(GpunodesError("a", "b", "c"))
    assert ("\x1b[31m" in stream.getvalue() or "\x1b[1m" in stream.getvalue()) == coloured
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stderr", plain)
    terminal.error(GpunodesError("a", "b", "c"))
    assert plain.getvalue() == "error: a; wanted: b\nhint: c\n"


STATES = """\
gpu-1: hung, reboot
  hung-in-driver: hung, failed
    | warning: a line of the log
gpu-2: healthy
gpu-3  FAILED  2 s  node: failed, too
gpu-4  gpu-4  worker  NOT READY  v1.36.3
gpu-5: swap (warning): on; wanted: off. nothing to do.
  warning: a plan
gpu-6: Verify that the node is ready (9 of 9)
[    3 s] gpu-7: repaired by reboot in 8 s: ok
gpu-8  not changed
0 of 8 healthy."""


@pytest.mark.parametrize("mode", ["terminal", "NO_COLOR", "dumb", "pipe"])
def test_states_have_their_colour_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    stream = io.StringIO() if mode == "pipe" else Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "dumb" if mode == "dumb" else "xterm")
    if mode == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
    terminal.report(STATES)
    found = stream.getvalue()
    assert re.sub(r"\x1b\[[0-9]+m", "", found) == f"{STATES}\n"
    coloured = [(words[1], words[0]) for words in re.findall(r"\x1b\[([1-9][0-9]*)m([^\x1b]*)\x1b\[0m", found)]
    expected = [
        ("hung", "31"),
        ("healthy", "32"),
        ("FAILED", "31"),
        ("NOT READY", "31"),
        ("warning", "33"),
        ("warning", "33"),
        ("repaired", "32"),
        ("not changed", "2"),
    ]
    assert coloured == (expected if mode == "terminal" else [])


def test_every_state_of_a_machine_has_a_colour() -> None:
    for word in (*State, *RepairOutcome, "ready", "not ready", "error", "hint"):
        assert colours.painted(word) != word


def test_the_help_of_a_run_lists_its_phases(tmp_path: Path) -> None:
    shown = gpunodes(tmp_path, "join", "--help").stdout
    for phase in (phases.PREFLIGHT, *phases.PREPARE, phases.WORKER, phases.READY):
        assert phase.name in shown
        assert phase.purpose in shown


@pytest.mark.parametrize(
    "words",
    [
        ("join", "worker-*"),
        ("init-master", "10.0.0.999"),
        ("init-master", "10.0.0.1", "--key", "none"),
        ("init-master", "10.0.0.1", "--user", "a;b"),
        ("init-master", "10.0.0.1", "--port", "99999"),
        ("init-master", "10.0.0.1", "--kubernetes-version", "1.99"),
        ("join", "a;b"),
        ("up", "extra"),
        ("frobnicate",),
        ("join", "x", "--skip-phase", "none"),
    ],
)
def test_wrong_input_ends_with_2_and_touches_nothing(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = gpunodes(tmp_path, *words)
    assert done.returncode == 2
    assert done.stdout == ""
    lines = [line.partition(": ")[0] for line in done.stderr.splitlines()]
    assert lines in (["error"], ["error", "hint"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["remove", "reset", "gpu remove"])
def test_commands_that_install_nothing_take_no_version_of_kubernetes(tmp_path: Path, command: str) -> None:
    done = gpunodes(tmp_path, *command.split(), "worker-1", "--kubernetes-version", "1.36")
    assert done.returncode == 2
    assert "no such option" in done.stderr


def test_words_that_no_command_takes_are_a_document_too(tmp_path: Path) -> None:
    output = json.loads(gpunodes(tmp_path, "join", "--json").stdout)
    assert (output["schema"], output["exit_code"]) == ("gpunodes.error/1", 2)


def test_an_inventory_grows_by_nothing_while_a_word_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "inventory/hosts.yml"
    edit.add(path, Role.CONTROL_PLANE, ["10.0.0.1"], {"ansible_user": "admin"})
    before = path.read_text()
    for wrong in (["typo"], ["--kubernetes-version", "1.99"]):
        assert gpunodes(tmp_path, "join", "10.0.0.2", *wrong).returncode == 2
    assert path.read_text() == before


def test_an_error_is_a_document_too(tmp_path: Path) -> None:
    done = gpunodes(tmp_path, "status", "--json")
    assert done.returncode == 2
    output = json.loads(done.stdout)
    assert output["schema"] == "gpunodes.error/1"
    assert output["exit_code"] == 2
    assert output["remedy"]


RESULT = RunResult(
    "join",
    [
        MachineResult("a", Outcome.CHANGED, 65.2, changes=("Join",), notes=("pods deleted by force: \x1b[2Jx/y",)),
        MachineResult("b", Outcome.FAILED, 2.0, "node", "no\x1b[2J"),
    ],
    [PreflightFinding("b", "swap", Problem("on", "off", "nothing to do"), Severity.WARNING)],
    "/run.log",
)


def test_the_document_of_a_run() -> None:
    message = json.loads(document.run(RESULT))
    assert message["schema"] == "gpunodes.run/1"
    assert message["exit_code"] == 3
    assert message["machines"][0] == {
        "name": "a",
        "outcome": "changed",
        "seconds": 65.2,
        "phase": "",
        "cause": "",
        "changes": ["Join"],
        "notes": ["pods deleted by force: \x1b[2Jx/y"],
    }
    assert message["findings"][0]["severity"] == "warning"


def test_a_summary_has_every_machine_and_no_escapes() -> None:
    message = text.summary(RESULT)
    assert "a  changed  1 min 05 s\n  pods deleted by force:  [2Jx/y" in message
    assert "b  FAILED  2 s  node: no" in message
    assert "\x1b" not in message


def test_plain_lines() -> None:
    stream = io.StringIO()
    view = text.progress(stream)
    view.begin("join", [Machine("a", "10.0.0.1", Role.WORKER)])
    view.phase("a", phases.NODE, 1, 9)
    view.task("a", "Disable swap")
    view.findings(RESULT.findings)
    view.ended(RESULT.machines[1])
    view.close()
    assert [line.partition("] ")[2] for line in stream.getvalue().splitlines()] == [
        "join: a",
        "a: Prepare the machine (1 of 9)",
        "b: swap (warning): on; wanted: off; nothing to do",
        "b: FAILED: no [2J",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A monotonic clock for the views that only the test moves; and no colours."""
    monkeypatch.setenv("NO_COLOR", "1")
    now = [1000.0]
    monkeypatch.setattr(text, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(health_map, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_live_lines_are_drawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    now = stopped_clock(monkeypatch)
    stream = Terminal()
    view = text.progress(stream)
    view.begin("join", [Machine("a", "10.0.0.1", Role.WORKER), Machine("b", "10.0.0.2", Role.WORKER)])
    view.phase("a", phases.NODE)
    view.ended(MachineResult("a", Outcome.UNCHANGED))
    view.phase("b", phases.CONTAINERD, 2, 9)
    view.task("b", "pulling images")
    now[0] += 125.2
    view.findings(RESULT.findings)
    before = stream.getvalue()
    view.close()
    finding = "b: swap (warning): on; wanted: off; nothing to do\n"
    line = "b   2:05  Install containerd (2 of 9): pulling images\n"
    assert before.endswith(f"\x1b[2A\r\x1b[J{finding}a         ok\n{line}")
    assert stream.getvalue() == before + "\x1b[2A\r\x1b[J"


def test_a_machine_without_a_task_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = stopped_clock(monkeypatch)
    view = text.Live(io.StringIO())
    view.begin("join", [Machine(name, "10.0.0.1", Role.WORKER) for name in ("gpu-1", "gpu-2", "gpu-3", "gpu-4")])
    for name in ("gpu-1", "gpu-2", "gpu-3"):
        view.phase(name, phases.GPU_DRIVER, 1, 2)
        view.task(name, "building")
    now[0] += 8
    view.task("gpu-1", "")
    now[0] += 3
    begun = "Install the GPU driver (1 of 2)"
    assert view.lines(80, 24) == [
        f"gpu-1    3 s  {begun}: waiting for 2 machines",
        f"gpu-2   11 s  {begun}: building",
        f"gpu-3   11 s  {begun}: building",
        "gpu-4   11 s  waiting",
    ]
    view.task("gpu-2", "")
    assert view.lines(80, 24)[0] == f"gpu-1    3 s  {begun}: waiting for gpu-3"
    view.close()


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (40, 10), (20, 5), (10, 2)])
def test_live_lines_fit_on_the_screen(columns: int, rows: int) -> None:
    view = text.Live(io.StringIO())
    names = [f"a-machine-with-a-long-name-{number}" for number in range(50)]
    view.begin("join", [Machine(name, "10.0.0.1", Role.WORKER) for name in names])
    for name in names:
        view.phase(name, phases.GPU_DRIVER, 1, 2)
    lines = view.lines(columns, rows)
    assert len(lines) == max(1, rows - 2)
    assert max(map(len, lines)) < columns
    assert columns < 20 or all(" 0 s " in line for line in lines)
    view.close()


def test_clocks_move_while_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen.Redrawn, "_PERIOD", 0.01)
    monkeypatch.setattr(health_map.Map, "_PERIOD", 0.01)
    now = stopped_clock(monkeypatch)
    stream = Terminal()
    live, cells = text.Live(stream), health_map.Map(stream)
    live.begin("join", [Machine("a", "10.0.0.1", Role.WORKER)])
    cells.begin(["a"])
    now[0] += 9
    deadline = time.time() + 20
    while not all(shown in stream.getvalue() for shown in ("a    9 s  waiting", "waiting 1  9 s")):
        assert time.time() < deadline, stream.getvalue()
        time.sleep(0.01)
    live.close()
    cells.close()


def test_a_line_begins_at_the_margin_where_the_terminal_has_echoed_an_interruption() -> None:
    stream = Terminal()
    screen.put_line(stream, "a\rb")
    assert stream.getvalue() == "\ra b\n"
    plain = io.StringIO()
    screen.put_line(plain, "a\rb")
    assert plain.getvalue() == "a b\n"


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(text.progress(Terminal()), text.RunLines)
    assert isinstance(health_map.progress(Terminal()), health_map.HealthLines)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(text.progress(Terminal()), text.Live)
    assert isinstance(health_map.progress(Terminal()), health_map.Map)


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_tables_fit_a_narrow_terminal(columns: int) -> None:
    shown = gpu.gates("1.36", gates.gates("1.36"), columns)
    assert max(map(len, shown.splitlines()[3:])) < max(columns, 73)
    rows = [("NAME", "WHY"), ("a", "x " * 100), ("b", "short")]
    assert max(map(len, text.table(rows, columns).splitlines())) < columns
    assert len(text.table(rows).splitlines()) == 3


def test_progress_that_nobody_can_read_stops_nothing() -> None:
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    view = text.progress(Closed())
    view.begin("join", [Machine("a", "10.0.0.1", Role.WORKER)])
    view.ended(RESULT.machines[1])
    view.close()


def completed(folder: Path, line: str) -> list[str]:
    """What bash gets for the last word of a command line."""
    words = line.split(" ")
    environment = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_GPUNODES_COMPLETE": "bash_complete"}
    done = gpunodes(folder, variables=environment)
    assert done.stderr == ""
    return [found.partition(",")[2] if found.startswith("plain,") else found for found in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("gpunodes gpu pl", ["plan"]),
        ("gpunodes join g", ["gpu-1", "gpu-2", "gpus"]),
        ("gpunodes join gpu-1 gpu-", ["gpu-2"]),
        ("gpunodes repair -i other.ini w", ["w1", "workers"]),
        ("gpunodes repair -i none.yml w", []),
        ("gpunodes health gpu-", ["gpu-1", "gpu-2"]),
        ("gpunodes health exp", ["explain"]),
        ("gpunodes health explain x", ["xid", "xid-recovery", "xid-repeated"]),
        ("gpunodes help hea", ["health"]),
        ("gpunodes help gpu pl", ["plan"]),
        ("gpunodes help join x", []),
        ("gpunodes health --actions reb", ["reboot"]),
        ("gpunodes health --actions reset_gpu,reb", ["reset_gpu,reboot"]),
        ("gpunodes health --from unkn", ["file,unkn"]),
        ("gpunodes health --from a.log unkn", ["file,unkn"]),
        ("gpunodes completion z", ["zsh"]),
        ("gpunodes nothing x", []),
    ],
)
def test_completion(tmp_path: Path, line: str, expected: list[str]) -> None:
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory" / "hosts.yml").write_text(
        "control_plane: {hosts: {c1: {}}}\nworkers: {children: {gpus: {hosts: {gpu-1: {}, gpu-2: null}}}}\n"
    )
    (tmp_path / "other.ini").write_text("[workers]\nw1 ansible_host=10.0.0.1\n[workers:vars]\nwild=1\n")
    assert sorted(found for found in completed(tmp_path, line) if found) == expected


@pytest.mark.parametrize(
    ("shell", "word"), [("bash", "complete -o nosort"), ("zsh", "#compdef"), ("fish", "complete ")]
)
def test_the_script_of_a_shell(tmp_path: Path, shell: str, word: str) -> None:
    done = gpunodes(tmp_path, "completion", shell)
    assert (done.returncode, word in done.stdout) == (0, True)
    assert "_GPUNODES_COMPLETE" in done.stdout


@pytest.mark.long
def test_verbose_shows_ansible_s_own_output(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text("control_plane: {hosts: {c1: {ansible_host: 127.0.0.1, ansible_port: 1}}}\n")
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    for flags, shown in ([], False), (["-v"], True):
        argv = [sys.executable, "-c", "from gpunodes.cli import main; main()", "status", "-i", "hosts.yml", *flags]
        done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, "")
        assert ("TASK [gpunodes.bootstrap.status : Read the cluster]" in done.stderr) == shown


def test_a_document_as_yaml_is_the_same(tmp_path: Path) -> None:
    found = gpunodes(tmp_path, "gates", "1.36", "--json").stdout
    assert yaml.safe_load(gpunodes(tmp_path, "gates", "1.36", "-o", "yaml").stdout) == json.loads(found)
    assert gpunodes(tmp_path, "gates", "1.36", "-o", "json").stdout == found
    assert gpunodes(tmp_path, "gates", "1.36", "-o", "wide").stdout == gpunodes(tmp_path, "gates", "1.36").stdout
    assert gpunodes(tmp_path, "gates", "1.36", "--json", "-o", "wide").returncode == 2


@pytest.mark.parametrize("command", ["status", "gpu plan", "history none", "gates 1"])
@pytest.mark.parametrize("flag", ["-o yaml", "-oyaml", "--output=yaml", "--output yaml"])
def test_an_error_is_a_document_of_the_same_format(tmp_path: Path, command: str, flag: str) -> None:
    done = gpunodes(tmp_path, *command.split(), *flag.split())
    found = yaml.safe_load(done.stdout)
    assert found["schema"] == ("gpunodes.history/1" if command.startswith("history") else "gpunodes.error/1")
