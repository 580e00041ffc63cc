"""The lab as a whole: up, down, status, power, snapshots. Each step creates what is missing and keeps the rest."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.lab import (
    bmc,
    daemons,
    disks,
    doctor,
    emulator,
    guest,
    hypervisor,
    images,
    inventory,
    mirror,
    network,
    processes,
    seeded,
    ssh,
    trial,
)
from gpunodes.lab.host import Owner, Report
from gpunodes.lab.layout import LabMachine, LabRecord, Layout
from gpunodes.lab.mirror import updates
from gpunodes.lab.plan import LabRequest, compare, plan
from gpunodes.lab.standin import construct as standin

_LIBVIRT_START_LIMIT = 60
"""Seconds that libvirtd gets to start; it first queries QEMU's capabilities."""


@dataclass(frozen=True)
class MachineStatus:
    """The current state of a machine."""

    machine: LabMachine
    power: str
    """``on``, ``off`` or ``unknown``."""
    ssh: bool
    connected: bool = True
    """Whether its links pass frames (`gpunodes lab network`)."""


@dataclass(frozen=True)
class LabStatus:
    """The current state of the lab."""

    record: LabRecord
    machines: tuple[MachineStatus, ...]
    daemons: dict[str, bool]
    snapshots: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether all daemons run and all machines are reachable; if not, ``up`` repairs the lab."""
        return all(self.daemons.values()) and all(each.ssh for each in self.machines)


def up(layout: Layout, request: LabRequest, report: Report) -> LabStatus:
    """Start the lab, or repair it; running machines are not changed.

    Raises:
        WrongInput: the host lacks a requirement, the folder has another inventory, or a different lab is up.
        GpunodesError: a step failed; the next ``up`` continues there.
    """
    doctor.require(doctor.checks())
    inventory.check_free(request.inventory, layout.name)
    with _locked(layout):
        record = _usable_record(layout, report)
        if record:
            compare(record, request)
        kind = images.Kind.OWN_KERNEL if request.equipment.own_kernel else images.Kind.PLAIN
        image = images.get(layout.cache, request.system, report, kind)
        accelerator = record.accelerator if record else trial.accelerator(layout.cache, image)
        tree = None
        if request.minors:
            report("preparing the mirror")
            tree = mirror.build(
                layout.cache,
                minors=request.minors,
                suites=[request.system.suite],
                progress=report,
                extras=request.extras,
            )
        newer = None
        if request.equipment.own_kernel and tree:
            newer = updates.build(layout.cache, suite=request.system.suite, progress=report)
        standin = _standin(layout, request, image, report) if request.standin else None
        if record is None:
            record = plan(layout, request, accelerator)
            if accelerator != "kvm":
                record = replace(record, emulator=emulator.program(layout.cache, report))
            _make_state(layout)
        record = replace(
            record,
            mirror=str(tree) if tree else record.mirror,
            standin=str(standin) if standin else record.standin,
            updates=str(newer) if newer else record.updates,
        )
        _save(layout, record)
        report(f"{len(record.machines)} machines, {'KVM' if accelerator == 'kvm' else 'emulated'}, on {record.subnet}")
        network.ensure(layout, record)
        _ensure_disks(layout, record, image, report)
        daemons.ensure(layout, record)
        with hypervisor.connect(layout, _LIBVIRT_START_LIMIT) as machines:
            _ensure_machines(layout, record, machines, report)
        _write_inventory(layout, record)
        _wait_for_machines(layout, record, report)
    return status(layout)


def down(layout: Layout, report: Report) -> list[Path]:
    """Remove everything except the cache; return the inventory files that are kept because the user changed them.

    Does nothing where no lab is up, and removes an incomplete one.

    Raises:
        GpunodesError: something could not be removed.
    """
    with _locked(layout):
        return _remove(layout, report)


def load(layout: Layout) -> LabRecord:
    """The record of the lab that is up.

    Raises:
        WrongInput: no lab is up.
    """
    try:
        return LabRecord.from_json(json.loads((layout.state / "record.json").read_text()))
    except FileNotFoundError:
        raise WrongInput(f"no lab {layout.name!r} is up", remedy="run `gpunodes lab up`") from None
    except PermissionError:
        raise WrongInput(f"only root can read {layout.state}", remedy="run it as root: sudo gpunodes lab ...") from None


def status(layout: Layout) -> LabStatus:
    """The state of the lab's machines, daemons and snapshots.

    Raises:
        WrongInput: no lab is up.
    """
    record = load(layout)
    running = processes.recorded(layout.state / "processes")
    powers = {each.name: "unknown" for each in record.machines}
    snapshots: set[str] = set()
    if "libvirtd" in running:
        with hypervisor.connect(layout) as machines:
            defined = machines.names()
            powers |= {name: "on" if machines.running(name) else "off" for name in powers if name in defined}
            names = [machines.snapshots(name) for name in powers if name in defined]
            snapshots = set.intersection(*names) if names else set()
    with ThreadPoolExecutor() as pool:
        reachable = list(pool.map(ssh.responds, record.machines))
    cut = network.disconnected(layout) if network.exists(layout) else set()
    states = tuple(
        MachineStatus(each, powers[each.name], ssh_works, cut.isdisjoint(network.taps(each)))
        for each, ssh_works in zip(record.machines, reachable, strict=True)
    )
    return LabStatus(
        record, states, {name: name in running for name in daemons.expected(record)}, tuple(sorted(snapshots))
    )


def power(layout: Layout, name: str, action: bmc.LabPowerAction) -> None:
    """Switch a machine's power by its BMC.

    Raises:
        GpunodesError: the BMC does not respond, or refuses the request.
    """
    record = load(layout)
    bmc.power(record, record.machine(name), action)


def connect(layout: Layout, name: str, *, connected: bool) -> None:
    """Connect a machine to the lab's networks, or cut it off from them.

    Raises:
        WrongInput: the machine is off.
        GpunodesError: the kernel refused.
    """
    machine = load(layout).machine(name)
    with _locked(layout), hypervisor.connect(layout) as machines:
        if not machines.running(name):
            raise WrongInput(f"{name} is off", "a machine that is on", f"run `gpunodes lab power {name} on`")
        network.connect(layout, machine, connected=connected)


def seed(layout: Layout, name: str, folder: Path, report: Report) -> None:
    """Give a machine a new disk without a user, on which cloud-init applies the NoCloud seed in ``folder``.

    Raises:
        WrongInput: the folder is no seed, or the machine is on.
        GpunodesError: a step failed, or the machine does not start.
    """
    with _locked(layout), hypervisor.connect(layout) as machines:
        seeded.reinstall(layout, load(layout), name, folder, machines, report)


def snapshot(layout: Layout, name: str) -> float:
    """Save memory and disk of all machines at one instant as snapshot ``name``; return the seconds that it took.

    Raises:
        WrongInput: a machine is off, so its memory cannot be saved.
        GpunodesError: libvirt refused.
    """
    started = time.monotonic()
    with _locked(layout), hypervisor.connect(layout) as machines:
        names = [each.name for each in load(layout).machines]
        off = [each for each in names if not machines.running(each)]
        if off:
            raise WrongInput(f"{', '.join(off)} is off", "all machines on", "`gpunodes lab up` starts them")
        machines.take_snapshots(names, name)
    return time.monotonic() - started


def restore(layout: Layout, name: str) -> float:
    """Restore snapshot ``name`` of all machines and set their clocks; return the seconds that it took.

    Raises:
        WrongInput: not every machine has a snapshot of this name.
        GpunodesError: libvirt refused, or a machine did not respond afterwards.
    """
    started = time.monotonic()
    record = load(layout)
    existing = status(layout).snapshots
    if name not in existing:
        raise WrongInput(f"the lab has no snapshot {name!r}", f"one of: {', '.join(existing) or '(none)'}")
    with _locked(layout), hypervisor.connect(layout) as machines:
        machines.restore_snapshots([each.name for each in record.machines], name)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda each: ssh.set_clock(layout, each), record.machines))
    return time.monotonic() - started


@contextmanager
def _locked(layout: Layout) -> Iterator[None]:
    """Lock the lab: one command at a time changes it, as root."""
    doctor.require([doctor.root()])
    layout.cache.mkdir(parents=True, exist_ok=True)
    path = layout.cache / f"lab-{layout.name}.lock"
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise GpunodesError(
                f"another command is changing lab {layout.name!r}", remedy="wait until it ends"
            ) from None
        yield


def _usable_record(layout: Layout, report: Report) -> LabRecord | None:
    """The record of a lab that can be used; the remains of any other are removed."""
    try:
        record = load(layout)
    except (WrongInput, ValueError, TypeError, KeyError):
        record = None
    if record and network.exists(layout) and layout.disks.is_dir():
        return record
    if record or network.exists(layout) or layout.state.exists() or layout.disks.exists():
        report("removing the remains of an earlier lab")
        _remove(layout, report)
    return None


def _standin(layout: Layout, request: LabRequest, image: images.DiskImage, report: Report) -> Path:
    report("preparing the stand-in GPUs")
    return standin.build(layout.cache, suite=request.system.suite, kernel=image.kernel_release, report=report)


def _make_state(layout: Layout) -> None:
    # Mode 0711: the user behind sudo reaches their key; other users can list nothing.
    layout.state.mkdir(mode=0o711)
    layout.state.chmod(0o711)
    (layout.state / "log").mkdir(mode=0o700)
    (layout.state / "processes").mkdir(mode=0o700)
    owner = Owner.current()
    disks.make_key(layout.ssh_key, f"gpunodes lab {layout.name}")
    layout.ssh_key.parent.chmod(0o755)
    owner.give(layout.ssh_key, layout.ssh_key.with_suffix(".pub"))


def _save(layout: Layout, record: LabRecord) -> None:
    path = layout.state / "record.json"
    scratch = path.with_suffix(".new")
    scratch.touch(mode=0o600)
    scratch.write_text(json.dumps(record.to_json(), indent=2))
    scratch.rename(path)


def _ensure_disks(layout: Layout, record: LabRecord, image: images.DiskImage, report: Report) -> None:
    disks.take_kernel(layout, image)
    missing = [each for each in record.machines if not disks.overlay(layout, each.name).exists()]
    if missing:
        report(f"creating the disks of {', '.join(each.name for each in missing)}")
    authorized = layout.ssh_key.with_suffix(".pub").read_text()
    for machine in missing:
        if machine.data_disk:
            disks.make_data(layout, machine.name)
        disks.make(layout, image, machine.name, guest.files(layout, record, machine, image, authorized, report))
    keys = [
        f"{each.address} {disks.host_key(layout, each).with_suffix('.pub').read_text()}" for each in record.machines
    ]
    layout.known_hosts.write_text("".join(keys))
    layout.known_hosts.chmod(0o644)


def _ensure_machines(layout: Layout, record: LabRecord, machines: hypervisor.Hypervisor, report: Report) -> None:
    defined = machines.names()
    for machine in record.machines:
        if machine.name not in defined:
            machines.define(hypervisor.domain_xml(layout, machine, record.accelerator, guest.kernel_options(machine)))
        if not machines.running(machine.name):
            report(f"starting {machine.name}")
        machines.start(machine.name)
    cut = network.disconnected(layout)
    for machine in record.machines:
        if not cut.isdisjoint(network.taps(machine)):
            report(f"connecting {machine.name} to the network")
            network.connect(layout, machine, connected=True)


def _inventory_hashes(layout: Layout) -> Path:
    """In the disks' folder, since /run is empty after a reboot of the host."""
    return layout.disks / "inventory.json"


def _write_inventory(layout: Layout, record: LabRecord) -> None:
    settings = mirror.settings(guest.MIRROR_URL, Path(record.mirror)) if record.mirror else {}
    if record.standin:
        settings |= standin.settings(guest.MIRROR_URL, Path(record.standin))
        settings["gpunodes_image_mirrors"] |= {standin.REGISTRY: guest.MIRROR_URL}
    written = inventory.write(Path(record.inventory), inventory.texts(layout, record, settings), Owner.current())
    _inventory_hashes(layout).write_text(json.dumps(written))


def _wait_for_machines(layout: Layout, record: LabRecord, report: Report) -> None:
    deadline = time.monotonic() + ssh.START_LIMIT

    def wait(machine: LabMachine) -> None:
        started = time.monotonic()
        ssh.wait(layout, machine, deadline)
        ssh.set_clock(layout, machine)
        report(f"{machine.name} is reachable at {machine.address} ({time.monotonic() - started:.0f} s)")

    with ThreadPoolExecutor() as pool:
        list(pool.map(wait, record.machines))


def _remove(layout: Layout, report: Report) -> list[Path]:
    running = processes.recorded(layout.state / "processes")
    # libvirtd first, so that it does not react to the end of its machines.
    processes.end([process for name, process in running.items() if name == "libvirtd"])
    processes.end(running.values())
    processes.end(processes.in_other_namespaces([f"{layout.state}/", f"{layout.disks}/"]))
    kept: list[Path] = []
    if _inventory_hashes(layout).exists():
        kept = inventory.remove(json.loads(_inventory_hashes(layout).read_text()))
    network.remove(layout)
    for folder in (layout.state, layout.disks):
        if folder.exists():
            shutil.rmtree(folder)
    for path in kept:
        report(f"{path} was changed by hand and is kept")
    return kept
