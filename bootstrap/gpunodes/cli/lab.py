"""``gpunodes lab``: virtual machines to try gpunodes on."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpunodes.cli import HelpfulGroup, options, terminal
from gpunodes.errors import ExitCode, WrongInput
from gpunodes.views import document, steps

if TYPE_CHECKING:
    from gpunodes.lab.lab import LabStatus
    from gpunodes.lab.layout import Layout

_SNAPSHOT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@click.group(name="lab", cls=HelpfulGroup)
@click.option(
    "--name",
    default="lab",
    envvar="GPUNODES_LAB",
    show_default=True,
    help="Name of the lab; there may be several.",
)
@click.pass_context
def command(context: click.Context, name: str) -> None:
    """Virtual machines to try gpunodes on.

    The machines have real kernels and virtual BMCs. libvirt and QEMU run them in a network namespace of their own.
    Needs root.
    """
    from gpunodes.lab.layout import Layout, cache_dir

    context.obj = Layout(name, cache_dir())


@command.command()
@options.number_option("--workers", (0, 9), 2, "Workers besides the control plane.")
@options.number_option("--control-planes", (1, 5), 1, "Control planes; several are called cp-1, cp-2, ...")
@options.number_option("--gpu-workers", (0, 9), 0, "Workers with stand-in GPUs.")
@options.number_option("--gpus", (1, 16), 2, "Stand-in GPUs of each GPU worker.")
@click.option(
    "--gpu-device",
    "device",
    default="2330",
    show_default=True,
    metavar="ID[,ID...]",
    help="PCI device ids of these GPUs; 2330 is an H100.",
)
@options.number_option("--nvswitches", (0, 8), 0, "Stand-in NVSwitches of each GPU worker.")
@options.number_option("--cpus", (1, 64), 1, "CPUs of each worker.")
@click.option(
    "--os", "system", type=click.Choice(["debian12", "debian13"]), default="debian13", show_default=True,
    help="Operating system of the machines.",
)  # fmt: skip
@click.option(
    "--kubernetes-version", "minors", multiple=True, default=("1.36",), show_default=True, metavar="MINOR",
    help="A Kubernetes minor version that the mirror offers; may be repeated.",
)  # fmt: skip
@click.option(
    "--second-network", is_flag=True,
    help="A second network, with the default route, in which the machines do not reach each other.",
)  # fmt: skip
@click.option("--data-disk", is_flag=True, help="A second disk of 20 GB for each machine, mounted at /data.")
@click.option("--own-kernel", is_flag=True, help="Machines boot the kernel on their disk; the mirror has a newer one.")
@click.option("--docker", is_flag=True, help="Docker and cri-dockerd, which labs with GPU workers have anyway.")
@click.option("--images", "extras", multiple=True, metavar="NAME", help="More images of the mirror; may be repeated.")
@click.option("--no-mirror", is_flag=True, help="No package mirror: nothing can be installed on the machines.")
@options.json_option
@click.pass_obj
def up(
    layout: Layout,
    workers: int,
    control_planes: int,
    gpu_workers: int,
    gpus: int,
    device: str,
    nvswitches: int,
    cpus: int,
    system: str,
    minors: tuple[str, ...],
    second_network: bool,
    data_disk: bool,
    own_kernel: bool,
    docker: bool,
    extras: tuple[str, ...],
    no_mirror: bool,
    as_json: bool,
) -> None:
    """Start or repair the lab.

    Its inventory is written to ./inventory.
    """
    from gpunodes.lab import lab
    from gpunodes.lab.layout import Boards, Equipment, System
    from gpunodes.lab.plan import LabRequest
    from gpunodes.lab.standin.board import device_ids

    request = LabRequest(
        workers,
        System(system),
        Path.cwd() / "inventory",
        () if no_mirror else minors,
        gpu_workers,
        Boards(gpus, nvswitches, device_ids(device)) if gpu_workers else None,
        cpus,
        Equipment(second_network, data_disk, own_kernel),
        control_planes,
        extras,
        docker,
    )
    with contextlib.closing(steps.progress()) as view:
        state = lab.up(layout, request, view.report)
    _show(_status_data(state), as_json, lambda: _print_status(state))


@command.command()
@options.json_option
@click.pass_obj
def down(layout: Layout, as_json: bool) -> None:
    """Remove the lab and its files; the cache stays."""
    from gpunodes.lab import lab

    with contextlib.closing(steps.progress()) as view:
        kept = lab.down(layout, view.report)
    _show(
        {"schema": "gpunodes.lab-down/1", "lab": layout.name, "kept": [str(path) for path in kept]},
        as_json,
        lambda: None,
    )


@command.command()
@options.json_option
@click.pass_obj
def status(layout: Layout, as_json: bool) -> int:
    """Show machines, daemons and snapshots.

    Exit code 1 when something needs repair.
    """
    from gpunodes.lab import lab

    state = lab.status(layout)
    _show(_status_data(state), as_json, lambda: _print_status(state))
    return ExitCode.DONE if state.healthy else ExitCode.FAILED


@command.command(context_settings={"ignore_unknown_options": True})
@click.argument("machine")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="[COMMAND]...")
@click.pass_obj
def ssh(layout: Layout, machine: str, argv: tuple[str, ...]) -> None:
    """Open a shell on MACHINE, or run COMMAND there."""
    from gpunodes.lab import lab
    from gpunodes.lab import ssh as client

    line = client.command(layout, lab.load(layout).machine(machine), argv)
    os.execvp(line[0], line)  # noqa: S606 - the program replaces this one


@command.command()
@click.argument("machine")
@click.pass_obj
def console(layout: Layout, machine: str) -> None:
    """Attach to MACHINE's serial console; Ctrl-] leaves it."""
    from gpunodes.lab import lab

    name = lab.load(layout).machine(machine).name
    line = ["virsh", "--connect", layout.libvirt_uri, "console", "--force", name]
    os.execvp(line[0], line)  # noqa: S606 - the program replaces this one


@command.command()
@click.argument("machine")
@click.argument("action", type=click.Choice(["on", "off", "cycle"]))
@options.json_option
@click.pass_obj
def power(layout: Layout, machine: str, action: str, as_json: bool) -> None:
    """Switch MACHINE's power by its BMC (Redfish).

    off and cycle do not shut the system down first.
    """
    from gpunodes.lab import bmc, lab

    lab.power(layout, machine, bmc.LabPowerAction(action))
    _show(
        {"schema": "gpunodes.lab-power/1", "machine": machine, "action": action},
        as_json,
        lambda: terminal.echo(f"{machine}: power {action}"),
    )


@command.command()
@click.argument("machine")
@click.argument("action", type=click.Choice(["on", "off"]))
@options.json_option
@click.pass_obj
def network(layout: Layout, machine: str, action: str, as_json: bool) -> None:
    """Cut MACHINE off from the network, in both directions, or connect it again.

    The machine sees silence, not a lost link. Its BMC stays reachable, and switching its power connects it.
    """
    from gpunodes.lab import lab

    lab.connect(layout, machine, connected=action == "on")
    _show(
        {"schema": "gpunodes.lab-network/1", "machine": machine, "action": action},
        as_json,
        lambda: terminal.echo(f"{machine}: network {action}"),
    )


@command.command()
@click.argument("machine")
@click.argument("folder", type=click.Path(path_type=Path))
@options.json_option
@click.pass_obj
def seed(layout: Layout, machine: str, folder: Path, as_json: bool) -> None:
    """Replace MACHINE's disk by one without a user, on which cloud-init applies the NoCloud seed in FOLDER.

    The machine must be off; it is started. `gpunodes provision seed --output FOLDER` makes a seed.
    """
    from gpunodes.lab import lab

    with contextlib.closing(steps.progress()) as view:
        lab.seed(layout, machine, folder, view.report)
    _show(
        {"schema": "gpunodes.lab-seed/1", "machine": machine, "seed": str(folder.absolute())},
        as_json,
        lambda: terminal.echo(f"{machine}: started with the seed {folder}"),
    )


@command.command()
@click.argument("machine")
@click.argument("fault", metavar="FAULT")
@click.argument("code", type=options.Whole(min=0), required=False)
@options.number_option("--gpu", (0, None), 0, "Which GPU, from 0.")
@options.number_option("--times", (1, 1_000_000), 1, "Number of Xid lines.")
@options.number_option("--seconds", (1, 600), 60, "Duration of a lockup.")
@click.option("--at-boot", is_flag=True, help="Cause the fault at every start of the driver from now on, not now.")
@options.json_option
@click.pass_obj
def fault(
    layout: Layout,
    machine: str,
    fault: str,
    code: int | None,
    gpu: int,
    times: int,
    seconds: int,
    at_boot: bool,
    as_json: bool,
) -> None:
    """Cause or end a fault of MACHINE's GPUs.

    FAULT is one of hang, smi-hang, reboot-hang, xid CODE, sxid CODE, ecc, lost, gone, needs-cold, needs-cold-gone,
    other-hang, lockup, no-build; clear and clear-all end faults. `gpunodes help --page lab` describes each.
    """
    from gpunodes.lab import lab
    from gpunodes.lab.standin import faults

    if fault not in faults.known():
        raise WrongInput(f"the fault is {fault!r}", f"one of {', '.join(faults.known())}")
    request = faults.FaultRequest(faults.known()[fault], code, gpu, times, seconds, at_boot)
    faults.make(layout, lab.load(layout).machine(machine), request)
    _show(
        {"schema": "gpunodes.lab-fault/1", "machine": machine, "fault": fault, "code": code, "gpu": gpu},
        as_json,
        lambda: terminal.echo(f"{machine}: {fault}{'' if code is None else f' {code}'}"),
    )


@command.command()
@click.argument("name")
@options.json_option
@click.pass_obj
def snapshot(layout: Layout, name: str, as_json: bool) -> None:
    """Save memory and disk of all machines as NAME."""
    from gpunodes.lab import lab

    seconds = lab.snapshot(layout, _snapshot_name(name))
    data = {"schema": "gpunodes.lab-snapshot/1", "snapshot": name, "seconds": round(seconds, 1)}
    _show(data, as_json, lambda: terminal.echo(f"snapshot {name} taken in {seconds:.1f} s"))


@command.command()
@click.argument("name")
@options.json_option
@click.pass_obj
def restore(layout: Layout, name: str, as_json: bool) -> None:
    """Restore all machines from snapshot NAME.

    Their clocks are set.
    """
    from gpunodes.lab import lab

    seconds = lab.restore(layout, _snapshot_name(name))
    data = {"schema": "gpunodes.lab-snapshot/1", "snapshot": name, "seconds": round(seconds, 1)}
    _show(data, as_json, lambda: terminal.echo(f"snapshot {name} restored in {seconds:.1f} s"))


@command.command()
@options.json_option
def doctor(as_json: bool) -> int:
    """Check what this machine lacks for a lab."""
    from gpunodes.lab import doctor as doctors

    found = doctors.checks()
    data = {"schema": "gpunodes.lab-doctor/1", "checks": [dataclasses.asdict(check) for check in found]}

    def lines() -> None:
        for check in found:
            terminal.echo(f"{'ok     ' if check.ok else 'MISSING'} {check.name}: {check.found}")
            if not check.ok:
                terminal.echo(f"        {check.remedy}")

    _show(data, as_json, lines)
    return ExitCode.DONE if all(check.ok for check in found) else ExitCode.FAILED


def _show(data: dict[str, Any], as_json: bool, render: Callable[[], None]) -> None:
    if as_json:
        terminal.echo(document.dump(data))
    else:
        render()


def _snapshot_name(name: str) -> str:
    if not _SNAPSHOT_NAME.fullmatch(name):
        raise WrongInput(
            f"the snapshot's name is {name!r}", "letters, digits, dots, dashes and underscores, 63 at most"
        )
    return name


def _status_data(state: LabStatus) -> dict[str, Any]:
    from gpunodes.lab import bmc

    record = state.record
    machines = [
        {
            "name": each.machine.name,
            "role": each.machine.role.value,
            "address": each.machine.address,
            "uuid": each.machine.uuid,
            "memory_mib": each.machine.memory_mib,
            "cpus": each.machine.cpus,
            "gpus": each.machine.boards.gpus if each.machine.boards else 0,
            "power": each.power,
            "ssh": each.ssh,
            "connected": each.connected,
            "bmc": bmc.url(record, each.machine),
        }
        for each in state.machines
    ]
    return {
        "schema": "gpunodes.lab/1",
        "lab": record.name,
        "healthy": state.healthy,
        "os": record.system.value,
        "accelerator": record.accelerator,
        "subnet": record.subnet,
        "inventory": record.inventory,
        "mirror": record.mirror is not None,
        "machines": machines,
        "daemons": state.daemons,
        "snapshots": list(state.snapshots),
    }


def _print_status(state: LabStatus) -> None:
    from gpunodes.lab import bmc

    record = state.record
    terminal.echo(f"lab {record.name}: {record.system.value}, {record.accelerator}, {record.subnet}")
    for each in state.machines:
        reach = "ssh ok" if each.ssh else "no ssh" if each.connected else "network off"
        size = f"{each.machine.cpus} CPUs, {each.machine.memory_mib} MiB"
        terminal.echo(
            f"  {each.machine.name:<12} {each.machine.address:<15} power {each.power:<7} {reach}  {size}  "
            f"BMC {bmc.url(record, each.machine)}"
        )
    stopped = [name for name, runs in state.daemons.items() if not runs]
    if stopped:
        terminal.echo(f"  not running: {', '.join(stopped)}; `gpunodes lab up` repairs it")
    if record.mirror is None:
        terminal.echo("  no mirror: nothing can be installed on the machines")
    if state.snapshots:
        terminal.echo(f"  snapshots: {', '.join(state.snapshots)}")
    terminal.echo(f"  inventory: {record.inventory}")
