"""What the commands share: their options, and how a run is carried out and shown."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from gpunodes import settings
from gpunodes.cli import options, terminal
from gpunodes.errors import WrongInput
from gpunodes.inventory import Inventory
from gpunodes.inventory.edit import Tentative
from gpunodes.model import Machine, Outcome, RunResult
from gpunodes.operations import nodes, switched_off
from gpunodes.operations.phases import PREFLIGHT, RESET, skipped
from gpunodes.operations.run import Operation, RunOptions, carry_out, check_kinds
from gpunodes.operations.storage import findings
from gpunodes.planner import gpu, versions
from gpunodes.views import document, text

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """The options that every run has."""

    inventory: Path
    as_json: bool
    options: RunOptions


@dataclass(frozen=True, slots=True)
class Added:
    """Machines that this command added to the inventory."""

    change: Tentative
    names: Sequence[str]


def ansible_options(command: _Command) -> _Command:
    """The options of a command that runs Ansible: the inventory with its passwords, and -v/--verbose."""
    return click.option(
        "-v",
        "--verbose",
        is_flag=True,
        expose_value=False,
        callback=_verbose,
        help="Show Ansible's own output on standard error while it runs.",
    )(options.inventory_option(command))


def _verbose(context: click.Context, parameter: click.Parameter, value: bool) -> None:  # noqa: ARG001 - click's signature
    if value and not context.resilient_parsing:
        os.environ[settings.VERBOSE] = "1"


def output_option(command: _Command) -> _Command:
    """-o/--output and --json, passed as ``output``: ``json``, ``yaml``, ``wide`` or empty."""

    @click.option(
        "-o",
        "--output",
        type=click.Choice(["json", "yaml", "wide"]),
        help="Print JSON or YAML; wide: a table that is not fitted to the terminal.",
    )
    @click.option("--json", "as_json", is_flag=True, help="The same as -o json.")
    @functools.wraps(command)
    def wrapped(*args: Any, output: str | None, as_json: bool, **kwargs: Any) -> Any:
        if as_json and output not in {None, "json"}:
            raise WrongInput(f"--json and -o {output} exclude each other", "one of them", "leave one out")
        return command(*args, output="json" if as_json else output or "", **kwargs)

    return wrapped  # type: ignore[return-value]  # a decorator that changes the parameters cannot say so


def show_output(output: str, document_text: Callable[[], str], table: Callable[[int | None], str]) -> None:
    """Print a document or a table; ``table`` gets the width of the screen that it must fit, None for any."""
    if output in {"json", "yaml"}:
        terminal.echo(document.as_yaml(document_text()) if output == "yaml" else document_text())
    else:
        terminal.report(table(None if output == "wide" else terminal.columns()))


def version_option(command: _Command) -> _Command:
    """--kubernetes-version"""
    return click.option(
        "--kubernetes-version",
        metavar="VERSION",
        help="Minor version such as 1.36 (for its newest patch), or an exact one; by default the setting "
        "gpunodes_kubernetes_version.",
    )(command)


def _unchanged(command: _Command) -> _Command:
    return command


def gpu_options(command: _Command) -> _Command:
    """--driver, --with-cuda, --with-cudnn and --runtime, passed as ``requested``: settings of this run.

    Raises WrongInput for a version that no machine can have.
    """

    @click.option(
        "--driver",
        metavar="BRANCH",
        help="Branch of the driver, such as 580, or an exact version, such as 580.95.05; by default a compatible one.",
    )
    @click.option(
        "--with-cuda",
        metavar="VERSION",
        multiple=True,
        help="CUDA version to install on the machine, such as 13.0 or 13.0.2; may be repeated.",
    )
    @click.option(
        "--with-cudnn", metavar="VERSION", help="cuDNN version to install on the machine, such as 9 or 9.14.0.64."
    )
    @click.option(
        "--runtime",
        type=click.Choice(["containerd", "docker"]),
        help="Container runtime; by default the setting gpunodes_runtime.",
    )
    @functools.wraps(command)
    def wrapped(
        *args: Any,
        driver: str | None,
        with_cuda: tuple[str, ...],
        with_cudnn: str | None,
        runtime: str | None,
        **kwargs: Any,
    ) -> Any:
        gpu.check(gpu.RequestedSoftware("", driver or "", with_cuda, with_cudnn or ""))
        given = {
            "gpunodes_driver_branch": driver,
            "gpunodes_cuda_versions": list(with_cuda),
            "gpunodes_cudnn_version": with_cudnn,
            "gpunodes_runtime": runtime,
        }
        return command(*args, requested={name: value for name, value in given.items() if value}, **kwargs)

    return wrapped  # type: ignore[return-value]  # a decorator that changes the parameters cannot say so


def reboot_option(command: _Command) -> _Command:
    """--no-reboot, added to ``requested``; below gpu_options."""

    @click.option(
        "--no-reboot", is_flag=True, help="Do not reboot a machine whose driver needs it; report that instead."
    )
    @functools.wraps(command)
    def wrapped(*args: Any, no_reboot: bool, requested: dict[str, Any], **kwargs: Any) -> Any:
        if no_reboot:
            requested = {**requested, "gpunodes_gpu_reboot": False}
        return command(*args, requested=requested, **kwargs)

    return wrapped  # type: ignore[return-value]  # as above


_unsupported_os = click.option(
    "--unsupported-os",
    is_flag=True,
    help="Treat an operating system that is not supported as the nearest one of the same family.",
)


def unsupported_os_option(command: _Command) -> _Command:
    """--unsupported-os, added to the settings of the run in ``flags``; above run_options."""

    @_unsupported_os
    @functools.wraps(command)
    def wrapped(*args: Any, unsupported_os: bool, flags: CommonOptions, **kwargs: Any) -> Any:
        requested = {"gpunodes_unsupported_os": True} if unsupported_os else {}
        return command(*args, flags=requesting(flags, requested), **kwargs)

    return wrapped  # type: ignore[return-value]  # as above


def unsupported_os_setting(command: _Command) -> _Command:
    """--unsupported-os of a command without run_options, added to ``requested``; below gpu_options, if it has them."""

    @_unsupported_os
    @functools.wraps(command)
    def wrapped(*args: Any, unsupported_os: bool, requested: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        given = {"gpunodes_unsupported_os": True} if unsupported_os else {}
        return command(*args, requested={**(requested or {}), **given}, **kwargs)

    return wrapped  # type: ignore[return-value]  # as above


def run_options(operation: Operation) -> Callable[[_Command], _Command]:
    """The options of every run, passed as ``flags``; the operation's phases go into the help.

    An operation without a preflight installs nothing, and takes no version of Kubernetes.
    """
    phases = operation.phases
    width = max(len(phase.name) for phase in phases)
    listing = "\n".join(f"  {phase.name:<{width}}  {phase.purpose}" for phase in phases)
    names = [phase.name for phase in phases]

    def decorate(command: _Command) -> _Command:
        @ansible_options
        @(version_option if PREFLIGHT in phases else _unchanged)
        @click.option(
            "--skip-phase",
            type=click.Choice(names),
            metavar="PHASE",
            multiple=True,
            help="Skip this phase; may be repeated.",
        )
        @click.option(
            "--from-phase", type=click.Choice(names), metavar="PHASE", help="Skip all phases before this one."
        )
        @click.option("--dry-run", is_flag=True, help="Show what would change; change nothing.")
        @options.json_option
        @functools.wraps(command)
        def wrapped(
            *args: Any,
            inventory_path: Path,
            skip_phase: tuple[str, ...],
            from_phase: str | None,
            dry_run: bool,
            as_json: bool,
            kubernetes_version: str | None = None,
            **kwargs: Any,
        ) -> Any:
            options = RunOptions(kubernetes_version, skip_phase, from_phase, dry_run)
            return command(*args, flags=CommonOptions(inventory_path, as_json, options), **kwargs)

        wrapped.__doc__ = f"{inspect.getdoc(command)}\n\n\b\nPhases, in order:\n{listing}"
        return wrapped  # type: ignore[return-value]  # as above

    return decorate


def requesting(flags: CommonOptions, requested: Mapping[str, Any]) -> CommonOptions:
    """``flags`` with settings for this run."""
    return replace(flags, options=replace(flags.options, variables={**flags.options.variables, **requested}))


def without_off(inventory: Inventory, machines: Sequence[Machine], named: Collection[str] = ()) -> list[Machine]:
    """The machines that are not off on purpose, and those that the user ``named``; the others are shown as skipped."""
    on, off = switched_off.split(inventory, [each for each in machines if each.name not in named])
    for name, why in sorted(off.items()):
        terminal.line(f"skipped: {name}: {why}", err=True)
    chosen = {each.name for each in on}.union(named)
    return [each for each in machines if each.name in chosen]


def check(operation: Operation, flags: CommonOptions) -> None:
    """Raise WrongInput for invalid options, before an inventory is written for them."""
    options = flags.options
    skipped(operation.phases, options.skip_phases, options.from_phase)
    if options.kubernetes:
        versions.check(options.kubernetes)


def execute(
    operation: Operation,
    inventory: Inventory,
    machines: Sequence[Machine],
    flags: CommonOptions,
    added: Added | None = None,
) -> int:
    """Carry an operation out with progress on standard error; prints its result, returns its exit code.

    Machines of ``added`` that never responded are removed from the inventory: their addresses may be mistyped.
    """
    view = text.progress()
    try:
        result = carry_out(operation, inventory, machines, view, flags.options)
        if RESET in operation.phases and (left := findings.still_exported(inventory, result)):
            view.findings(left)
            result = replace(result, findings=[*result.findings, *left])
    finally:
        view.close()
    if added is not None:
        _drop_unreached(added, result, inventory.path)
    return show(result, as_json=flags.as_json)


def _drop_unreached(added: Added, result: RunResult, path: Path) -> None:
    unreached = {finding.machine for finding in result.findings if finding.check == "reachable"}
    # Without preflight, or when it was interrupted because a machine did not respond.
    unreached |= {
        machine.name
        for machine in result.machines
        if (machine.outcome is Outcome.UNREACHABLE and not machine.changes)
        or (machine.outcome is Outcome.SKIPPED and result.interrupted)
    }
    names = [name for name in added.names if name in unreached]
    if names and not result.dry_run:
        added.change.drop(names)
        terminal.line(f"not reached, and not added to {path}: {', '.join(names)}", err=True)


def execute_confirmed(
    operation: Operation,
    inventory: Inventory,
    machines: Sequence[Machine],
    flags: CommonOptions,
    consequence: str,
    *,
    yes: bool,
    needs_cluster: bool = True,
    check_seen: Callable[[Collection[str]], None] = lambda _: None,
) -> int:
    """Show which node each machine is, ask for a confirmation, then carry the operation out; returns the exit code.

    ``needs_cluster``: machines that run as nodes are not changed where their cluster does not respond. ``check_seen``
    gets the names of the machines that responded, and may raise. Raises WrongInput without a terminal to ask on,
    GpunodesError where a machine and a node contradict each other.
    """
    check_kinds(operation, machines)
    names = ", ".join(machine.name for machine in machines)
    yes = yes or flags.options.dry_run
    terminal.check_confirmable(f"{operation.name} of {names}", yes=yes)
    view = text.progress()
    try:
        chosen = nodes.choose(
            operation.name,
            inventory,
            machines,
            view,
            needs_cluster=needs_cluster,
            without_cluster=operation.without_cluster,
        )
    finally:
        view.close()
    check_seen(chosen.seen.facts)
    for line in chosen.lines:
        terminal.line(line, err=True)
    terminal.confirm(consequence.format(names), yes=yes)
    options = replace(flags.options, seen=chosen.seen, confirmed=True)
    return execute(operation, inventory, machines, replace(flags, options=options))


def show(result: RunResult, *, as_json: bool) -> int:
    """Print a run's result; returns its exit code."""
    if as_json:
        terminal.echo(document.run(result))
    else:
        terminal.report(text.summary(result))
    if result.interrupted:
        terminal.line(terminal.INTERRUPTED, err=True)
    return int(result.exit_code)
