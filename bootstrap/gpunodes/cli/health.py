"""gpunodes health"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpunodes.cli import complete, connections, options, repair_options, scan_outputs, terminal
from gpunodes.errors import ExitCode, WrongInput
from gpunodes.health.model import State, Verdict

if TYPE_CHECKING:
    from gpunodes.model import Kubeconfig
    from gpunodes.repair.result import RepairResult

# systemd.time(7)
_UNITS = "us(ec)?|ms(ec)?|s(ec(onds?)?)?|m(in(utes?)?)?|h(r|ours?)?|d(ays?)?|w(eeks?)?|M|months?|y(ears?)?"
_TIME_SPAN = re.compile(rf"\s*(\d+|(\d+(\.\d+)?\s*({_UNITS})\s*)+)\s*")


def _kinds(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001 - click's
    """The kinds of codes, and the rules, for shell completion."""
    from gpunodes.operations import health

    names = dict.fromkeys(["xid", "sxid", *(rule.name for rule in health.rules())])
    return [name for name in names if name.startswith(incomplete)]


def _actions(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001 - as above
    """The actions that a repair can act on, after those that the list has already, for shell completion."""
    from gpunodes.health.model import Action

    before, comma, _ = incomplete.rpartition(",")
    names = [f"{before}{comma}{action.value}" for action in Action if action.value not in before.split(",")]
    return [name for name in names if name.startswith(incomplete)]


class _MachinesOrCommand(click.Group):
    """A command that takes machines, unless its first argument is the name of one of its sub-commands.

    A machine with such a name is selected after two dashes: ``gpunodes health -- rules``.
    """

    _ARGV = "gpunodes.health.argv"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] in self.commands and ctx.resilient_parsing:
            # Shell completion goes on with what is left.
            click.Command.parse_args(self, ctx, [])
            ctx.args = args
            return args
        if args and args[0] in self.commands:
            ctx.meta[self._ARGV] = args
            args = []
        return click.Command.parse_args(self, ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        argv = ctx.meta.get(self._ARGV)
        if argv is None:
            return click.Command.invoke(self, ctx)
        # Not below this context: its path would have MACHINES in it.
        path = f"{ctx.info_name} {argv[0]}"
        with self.commands[argv[0]].make_context(path, argv[1:], parent=ctx.parent) as context:
            return context.command.invoke(context)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return click.Command.collect_usage_pieces(self, ctx)


# Options may stand after the machines, as everywhere; click's groups would take them for machines.
@click.group(
    cls=_MachinesOrCommand,
    invoke_without_command=True,
    no_args_is_help=False,
    context_settings={"allow_interspersed_args": True},
)
@click.argument("patterns", nargs=-1, metavar="[MACHINES]...", shell_complete=complete.machines_or_files)
@click.option(
    "--from",
    "files",
    type=click.Path(),
    multiple=True,
    metavar="FILE...",
    help="Saved logs of one machine: files, or folders with such files.",
)
@connections.options
@options.kubeconfig_option
@options.inventory_option
@click.option(
    "--watch",
    type=options.Number(min=1),
    metavar="SECONDS",
    help="Repeat the scan every so many seconds, until Ctrl-C.",
)
@click.option(
    "--deadline",
    type=options.Number(min=1),
    metavar="SECONDS",
    help="Time limit of the scan; by default 60, plus a quarter of a second for each machine. With --reboot-hung it "
    "limits each scan, not the repairs.",
)
@options.number_option("--parallel", (1, 1024), 64, "How many machines to probe at once.")
@click.option("--reboot-hung", is_flag=True, help="Repair the machines whose verdict has the action reboot.")
@click.option(
    "--actions",
    metavar="ACTIONS",
    shell_complete=_actions,
    help="With --reboot-hung: repair machines with one of these actions, such as reset_gpu,reboot; by default reboot.",
)
@scan_outputs.options
@repair_options.options
@options.json_option
def command(
    patterns: tuple[str, ...],
    files: tuple[str, ...],
    connection: connections.Connection,
    kubeconfig: Kubeconfig | None,
    inventory_path: Path,
    watch: float | None,
    deadline: float | None,
    parallel: int,
    reboot_hung: bool,
    actions: str | None,
    repair_flags: repair_options.RepairOptions,
    outputs: scan_outputs.ScanOutputs,
    as_json: bool,
) -> int:
    """Check GPU machines: state, action and evidence.

    MACHINES are names, addresses, groups or patterns of the inventory; by default all machines. With --user, --key or
    --port, or without an inventory, they are addresses. With --from, saved
    files of one machine are judged, and no machine is contacted: kernel logs, journals, nvidia-smi output, bug reports
    or sosreports, compressed or not; `-` is standard input. Exit code 3 when a machine is not healthy or does not
    respond.

    With --reboot-hung, machines whose action is reboot are drained, rebooted, verified and uncordoned; if a reboot
    fails, the next escalation step follows. Machines that are not healthy afterwards stay cordoned, with the reason.
    Interrupted repairs are resumed.
    """
    if reboot_hung:
        if files or watch:
            raise WrongInput("--reboot-hung repairs live machines", "no --from and no --watch with it", "leave it out")
        if repair_flags.dry_run:
            outputs = outputs.refuse("--dry-run changes nothing", metrics=True)
        pace = (deadline, parallel)
        source = (inventory_path, connection, kubeconfig)
        return _repair(patterns, source, actions or "reboot", repair_flags, outputs, pace, as_json=as_json)
    api = ["--kubeconfig"] if kubeconfig else []
    if given := [*(["--actions"] if actions else []), *api, *repair_flags.given()]:
        are, them = ("are", "them") if len(given) > 1 else ("is", "it")
        raise WrongInput(
            f"{', '.join(given)} {are} for repairs", "--reboot-hung", f"add --reboot-hung, or leave {them} out"
        )
    if not files:
        if watch and as_json:
            raise WrongInput("--watch repeats, and --json prints one document", "one of them", "leave one out")
        return _live(patterns, (inventory_path, connection, None), outputs, watch, deadline, parallel, as_json=as_json)
    if watch or connection.variables:
        option = "--watch" if watch else "--user, --key or --port"
        raise WrongInput("--from reads saved logs", f"no {option} with it", "leave one out")
    outputs = outputs.refuse("--from reads saved logs")
    from gpunodes.operations import health
    from gpunodes.views import health as view

    began = time.monotonic()
    # A shell expands `--from *.log` to one value and arguments.
    verdict = health.of_files([*files, *patterns])
    outputs.write([verdict], began, None)
    if not as_json:
        for line in view.files(verdict):
            terminal.line(line, err=True)
    return _show([verdict], as_json=as_json)


@command.command()
@click.argument("kind", metavar="{xid|sxid|RULE}", shell_complete=_kinds)
@click.argument("code", required=False, metavar="[CODE]")
@options.json_option
def explain(kind: str, code: str | None, as_json: bool) -> int:
    """Explain an Xid, an SXid or a rule.

    Exit code 2 for a code that NVIDIA's catalog does not have.
    """
    from gpunodes.operations import health
    from gpunodes.views import health as view

    if kind.isdecimal() and code is None:
        kind, code = "xid", kind
    is_kind = kind.lower() in {"xid", "sxid"}
    if code is None and not is_kind and (rule := [each for each in health.rules() if each.name == kind]):
        terminal.echo(view.dump(view.rules_document(rule)) if as_json else view.rules(rule))
        return ExitCode.DONE
    if not is_kind or code is None or not code.isdecimal():
        given = kind if code is None else f"{kind} {code}"
        raise WrongInput(
            f"{given!r} is not a code" if is_kind else f"{given!r} is neither a code nor a rule",
            "xid or sxid, and a number; or the name of a rule",
            "try `gpunodes health explain xid 79`; `gpunodes health rules` lists the rules",
        )
    meaning = health.explain(kind.lower(), int(code))
    terminal.echo(view.dump(view.meaning_document(meaning)) if as_json else view.meaning(meaning))
    return ExitCode.DONE


@command.command()
@options.json_option
def rules(as_json: bool) -> int:
    """List the rules that lead to a verdict."""
    from gpunodes.operations import health
    from gpunodes.views import health as view

    found = health.rules()
    terminal.echo(view.dump(view.rules_document(found)) if as_json else view.rules(found))
    return ExitCode.DONE


@command.command()
@click.option(
    "--every",
    default="10min",
    show_default=True,
    metavar="TIME",
    help="Time between two runs, as a systemd time span.",
)
@options.inventory_path_option
@options.json_option
def timer(every: str, inventory_path: Path, as_json: bool) -> int:
    """Print a systemd service and timer that repair hung machines.

    The service runs `gpunodes health --reboot-hung` as the current user, in the current folder. Save each unit as the
    file that the comment above it names.
    """
    import getpass
    import shutil

    from gpunodes.errors import together
    from gpunodes.views import repair as view

    problems = []
    if not _TIME_SPAN.fullmatch(every):
        problems.append(WrongInput(f"{every!r} is not a time span", "one such as 10min or 1h 30min", "correct --every"))
    if not inventory_path.exists():
        wanted = "an Ansible inventory"
        problems.append(WrongInput(f"there is no inventory at {inventory_path}", wanted, "name it with -i"))
    if problems:
        raise together(problems)
    program = shutil.which(sys.argv[0]) or sys.argv[0]
    # Links stay: an installation may move behind one.
    paths = [Path(os.path.abspath(path)) for path in (program, inventory_path)]  # noqa: PTH100 - pathlib follows links
    units = view.units(str(paths[0]), getpass.getuser(), Path.cwd(), paths[1], every)
    if as_json:
        import json

        terminal.echo(json.dumps({"schema": "gpunodes.health-timer/1", "units": units}, indent=2))
    else:
        terminal.echo("\n".join(f"# /etc/systemd/system/{name}\n{text}" for name, text in units.items()).rstrip())
    return ExitCode.DONE


_Source = tuple[Path, connections.Connection, "Kubeconfig | None"]
"""Where the machines are from: the inventory, or their addresses with a connection; and the user's kubeconfig."""


def _repair(
    patterns: tuple[str, ...],
    source: _Source,
    actions: str,
    flags: repair_options.RepairOptions,
    outputs: scan_outputs.ScanOutputs,
    pace: tuple[float | None, int],
    *,
    as_json: bool,
) -> int:
    """Scan machines and repair those whose verdict recommends it; returns the exit code."""
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import checked, scan_reports

    path, connection, kubeconfig = source
    inventory, addressed = connections.inventory(path, patterns, connection, checked.Needs.REPAIR, kubeconfig)
    connections.check_cluster(addressed=addressed, kubeconfig=kubeconfig, without_cluster=flags.without_cluster)
    fleet = InventoryFleet(inventory, *pace)
    request = repair_options.request(flags, "health", fleet, patterns, actions=actions)
    machines = inventory.select(patterns)

    began = time.monotonic()

    def after(result: RepairResult) -> None:
        with scan_outputs.warning():
            outputs.write(scan_reports.after_repair(fleet, machines, result), began, inventory.cluster)

    ended = after if outputs.any() else None
    return repair_options.carry_out(fleet, machines, request, yes=flags.yes, as_json=as_json, ended=ended)


def _live(
    patterns: tuple[str, ...],
    source: _Source,
    outputs: scan_outputs.ScanOutputs,
    watch: float | None,
    deadline: float | None,
    parallel: int,
    *,
    as_json: bool,
) -> int:
    """Scan the machines of the inventory, once or repeatedly; returns the exit code."""
    from gpunodes.engine import scans
    from gpunodes.operations import checked, scan, switched_off
    from gpunodes.views import health_map

    try:
        inventory, _ = connections.inventory(source[0], patterns, source[1], checked.Needs.MACHINES)
        machines = scans.scan_targets(inventory, inventory.select(patterns))
    except WrongInput:
        _refuse_files(patterns)
        raise
    view = health_map.progress()
    while True:
        began = time.monotonic()
        try:
            verdicts = scan.run(
                machines,
                view,
                deadline_s=deadline,
                parallel=parallel,
                cluster=inventory.cluster,
                off=switched_off.read(inventory),
            )
        finally:
            view.close()
        outputs.write(verdicts, began, inventory.cluster)
        code = _show(verdicts, as_json=as_json)
        if watch is None:
            return code
        time.sleep(max(0.0, began + watch - time.monotonic()))
        click.clear()


def _refuse_files(patterns: tuple[str, ...]) -> None:
    """Raise WrongInput for existing files, which are named without --from."""
    files = [pattern for pattern in patterns if Path(pattern).is_file()]
    if files:
        raise WrongInput(
            f"{files[0]} is a file, and no machine",
            "machines of the inventory",
            f"`gpunodes health --from {shlex.join(files)}` reads saved logs",
        )


def _show(verdicts: list[Verdict], *, as_json: bool) -> int:
    """Print verdicts; returns the exit code."""
    from gpunodes.views import health as view

    if as_json:
        terminal.echo(view.dump(view.document(verdicts)))
    else:
        terminal.report(view.listing(verdicts))
    fine = {State.HEALTHY, State.OFF}
    return ExitCode.DONE if all(verdict.state in fine for verdict in verdicts) else ExitCode.PARTLY
