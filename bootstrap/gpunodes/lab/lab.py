"""The lab as a whole: up, down, status, power, snapshots. Every step makes what is missing and leaves what is right."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from ipaddress import IPv4Network
from pathlib import Path

from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.lab import bmc, disks, doctor, hypervisor, images, inventory, mirror, network, processes, ssh, trial
from gpunodes.lab.host import Owner, Report, memory_mib, used_networks
from gpunodes.lab.layout import Boards, LabMachine, LabRecord, LabRole, Layout, Size, System, free_subnet, plan_machines
from gpunodes.lab.mirror import aptrepo
from gpunodes.lab.standin import board
from gpunodes.lab.standin import construct as standin

MIRROR_URL = "http://mirror.lab"
_CONTROL_PLANE = Size(memory_mib=4096, cpus=2)
_WORKER_MIB = 2048
_LIBVIRT_PATIENCE = 60
"""Seconds that libvirtd gets to start; it asks QEMU for all it can do."""


@dataclass(frozen=True)
class LabRequest:
    """What ``up`` is asked for."""

    workers: int
    system: System
    inventory: Path
    minors: tuple[str, ...]
    """Kubernetes minors that the mirror offers; none: a lab without mirror."""
    gpu_workers: int = 0
    boards: Boards | None = None
    """What each GPU worker has."""
    cpus: int = 1
    """Of each worker. One leaves the control plane, on which all wait, the larger share of a small host."""


@dataclass(frozen=True)
class MachineStatus:
    """A machine as it is now."""

    machine: LabMachine
    power: str
    """``on``, ``off`` or ``unknown``."""
    ssh: bool


@dataclass(frozen=True)
class LabStatus:
    """The lab as it is now."""

    record: LabRecord
    machines: tuple[MachineStatus, ...]
    daemons: dict[str, bool]
    snapshots: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing is left for ``up`` to repair."""
        return all(self.daemons.values()) and all(each.ssh for each in self.machines)


def up(layout: Layout, request: LabRequest, say: Report) -> LabStatus:
    """Bring the lab up, or repair it; machines that run are left alone.

    Raises:
        WrongInput: this machine lacks something, another inventory is there, or a different lab is up.
        GpunodesError: a step failed; a further ``up`` goes on from there.
    """
    doctor.require(doctor.checks())
    inventory.check_free(request.inventory, layout.name)
    with _locked(layout):
        record = _usable_record(layout, say)
        if record:
            _compare(record, request)
        image = images.get(layout.cache, request.system, say)
        accelerator = record.accelerator if record else trial.accelerator(layout.cache, image)
        tree = None
        if request.minors:
            say("preparing the mirror")
            tree = mirror.build(layout.cache, minors=request.minors, suites=[request.system.suite], progress=say)
        standin = _standin(layout, request, image, say) if request.gpu_workers and tree else None
        if record is None:
            record = _plan(layout, request, accelerator)
            _make_state(layout)
        record = replace(
            record,
            mirror=str(tree) if tree else record.mirror,
            standin=str(standin) if standin else record.standin,
        )
        _save(layout, record)
        say(f"{len(record.machines)} machines, {'KVM' if accelerator == 'kvm' else 'emulated'}, on {record.subnet}")
        network.ensure(layout, IPv4Network(record.subnet))
        _ensure_disks(layout, record, image, say)
        _ensure_daemons(layout, record)
        with hypervisor.connect(layout, _LIBVIRT_PATIENCE) as machines:
            _ensure_machines(layout, record, machines, say)
        _write_inventory(layout, record)
        _wait_for_machines(layout, record, say)
    return status(layout)


def down(layout: Layout, say: Report) -> list[Path]:
    """Take everything away but the cache; return the inventory files that stay because the user changed them.

    Fine when there is nothing, or only a part.

    Raises:
        GpunodesError: something does not go.
    """
    with _locked(layout):
        return _remove(layout, say)


def load(layout: Layout) -> LabRecord:
    """The record of the lab that is up.

    Raises:
        WrongInput: none is.
    """
    try:
        return LabRecord.from_json(json.loads((layout.state / "record.json").read_text()))
    except FileNotFoundError:
        raise WrongInput(f"no lab {layout.name!r} is up", remedy="`gpunodes lab up` makes one") from None
    except PermissionError:
        raise WrongInput(f"{layout.state} is root's", remedy="run it as root: sudo gpunodes lab ...") from None


def status(layout: Layout) -> LabStatus:
    """How the lab's machines and daemons are.

    Raises:
        WrongInput: no lab is up.
    """
    record = load(layout)
    wanted = ["libvirtd", "dnsmasq", *(f"bmc-{each.name}" for each in record.machines)]
    if record.mirror:
        wanted.append("mirror")
    alive = processes.remembered(layout.state / "processes")
    powers = {each.name: "unknown" for each in record.machines}
    snapshots: set[str] = set()
    if "libvirtd" in alive:
        with hypervisor.connect(layout) as machines:
            known = machines.names()
            powers |= {name: "on" if machines.running(name) else "off" for name in powers if name in known}
            kept = [machines.snapshots(name) for name in powers if name in known]
            snapshots = set.intersection(*kept) if kept else set()
    with ThreadPoolExecutor() as pool:
        reachable = list(pool.map(ssh.answers, record.machines))
    states = tuple(
        MachineStatus(each, powers[each.name], answer) for each, answer in zip(record.machines, reachable, strict=True)
    )
    return LabStatus(record, states, {name: name in alive for name in wanted}, tuple(sorted(snapshots)))


def power(layout: Layout, name: str, wanted: bmc.LabPowerAction) -> None:
    """Ask a machine's BMC for power.

    Raises:
        GpunodesError: the BMC does not answer or refuses.
    """
    record = load(layout)
    bmc.power(record, record.machine(name), wanted)


def snapshot(layout: Layout, name: str) -> float:
    """Save memory and disk of all machines at one instant as ``name``; return the seconds it took.

    Raises:
        WrongInput: a machine is off, so its memory cannot be saved.
        GpunodesError: libvirt refused.
    """
    begun = time.monotonic()
    with _locked(layout), hypervisor.connect(layout) as machines:
        names = [each.name for each in load(layout).machines]
        off = [each for each in names if not machines.running(each)]
        if off:
            raise WrongInput(f"{', '.join(off)} is off", "all machines on", "`gpunodes lab up` starts them")
        machines.take_snapshots(names, name)
    return time.monotonic() - begun


def restore(layout: Layout, name: str) -> float:
    """Bring all machines back to snapshot ``name`` and set their clocks; return the seconds it took.

    Raises:
        WrongInput: there is no such snapshot of all machines.
        GpunodesError: libvirt refused, or a machine did not answer afterwards.
    """
    begun = time.monotonic()
    record = load(layout)
    known = status(layout).snapshots
    if name not in known:
        raise WrongInput(f"the lab has no snapshot {name!r}", f"one of: {', '.join(known) or '(none)'}")
    with _locked(layout), hypervisor.connect(layout) as machines:
        machines.restore_snapshots([each.name for each in record.machines], name)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda each: ssh.set_clock(layout, each), record.machines))
    return time.monotonic() - begun


@contextmanager
def _locked(layout: Layout) -> Iterator[None]:
    """One command at a time changes a lab; only root can."""
    doctor.require([doctor.root()])
    layout.cache.mkdir(parents=True, exist_ok=True)
    path = layout.cache / f"lab-{layout.name}.lock"
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise GpunodesError(f"another command works on lab {layout.name!r}", remedy="wait for its end") from None
        yield


def _usable_record(layout: Layout, say: Report) -> LabRecord | None:
    """The record of a lab that can be gone on with; what cannot is taken away."""
    try:
        record = load(layout)
    except (WrongInput, ValueError, TypeError, KeyError):
        record = None
    if record and network.exists(layout) and layout.disks.is_dir():
        return record
    if record or network.exists(layout) or layout.state.exists() or layout.disks.exists():
        say("taking away the remains of an earlier lab")
        _remove(layout, say)
    return None


def _compare(record: LabRecord, request: LabRequest) -> None:
    gpu_machines = [each for each in record.machines if each.boards]
    workers = len(record.machines) - len(gpu_machines) - 1
    pairs = [("workers", workers, request.workers), ("os", record.system, request.system)]
    pairs.append(("gpu-workers", len(gpu_machines), request.gpu_workers))
    if gpu_machines:
        pairs.append(("boards", gpu_machines[0].boards, request.boards))
    pairs.append(("inventory", record.inventory, str(request.inventory)))
    for what, there, wanted in pairs:
        if there != wanted:
            raise WrongInput(
                f"a lab is up with {what} {there}", f"{what} {wanted}", "`gpunodes lab down` first, or ask for the same"
            )


def _plan(layout: Layout, request: LabRequest, accelerator: str) -> LabRecord:
    subnet = free_subnet(used_networks())
    wanted = request.workers + request.gpu_workers + 1
    identities = [(str(uuid.uuid4()), secrets.token_urlsafe(12)) for _ in range(wanted)]
    sizes = {LabRole.CONTROL_PLANE: _CONTROL_PLANE, LabRole.WORKER: Size(_WORKER_MIB, request.cpus)}
    machines = plan_machines(subnet, request.workers, sizes, identities, request.gpu_workers, request.boards)
    needed = sum(machine.memory_mib for machine in machines)
    if memory_mib() < needed:
        raise WrongInput(
            f"{memory_mib()} MiB of memory are free here", f"{needed} MiB for the lab's machines", "use fewer --workers"
        )
    return LabRecord(
        name=layout.name,
        system=request.system,
        subnet=str(subnet),
        accelerator=accelerator,
        machines=machines,
        inventory=str(request.inventory),
        mirror=None,
    )


def _standin(layout: Layout, request: LabRequest, image: images.DiskImage, say: Report) -> Path:
    say("preparing the stand-in GPUs")
    return standin.build(layout.cache, suite=request.system.suite, kernel=image.kernel_release, say=say)


def _make_state(layout: Layout) -> None:
    # Others may pass through, so that the user behind sudo reaches the key that is theirs; they see nothing else.
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


def _ensure_disks(layout: Layout, record: LabRecord, image: images.DiskImage, say: Report) -> None:
    disks.take_kernel(layout, image)
    missing = [each for each in record.machines if not disks.overlay(layout, each.name).exists()]
    if missing:
        say(f"disks of {', '.join(each.name for each in missing)}")
    authorized = layout.ssh_key.with_suffix(".pub").read_text()
    sources = _apt_sources(layout, record.system)
    for machine in missing:
        files = disks.guest_files(record, machine, authorized, disks.host_key(layout, machine))
        if machine.boards:
            compiled = standin.compiled(layout.cache, suite=record.system.suite, kernel=image.kernel_release, say=say)
            files += board.guest_files(machine.boards, compiled)
        disks.make(layout, image, machine.name, [*files, *sources])
    keys = [
        f"{each.address} {disks.host_key(layout, each).with_suffix('.pub').read_text()}" for each in record.machines
    ]
    layout.known_hosts.write_text("".join(keys))
    layout.known_hosts.chmod(0o644)


def _apt_sources(layout: Layout, system: System) -> list[disks.GuestFile]:
    key = "/usr/share/keyrings/mirror.lab.asc"
    source = f"Types: deb\nURIs: {MIRROR_URL}/debian\nSuites: {system.suite}\nComponents: main\nSigned-By: {key}\n"
    return [
        disks.GuestFile(key, aptrepo.signing_key(layout.cache / "mirror").armoured),
        disks.GuestFile("/etc/apt/sources.list.d/debian.sources", source),
    ]


def _ensure_daemons(layout: Layout, record: LabRecord) -> None:
    """Start the daemons that do not run, or not as they should."""
    folder = layout.state / "processes"
    config = layout.state / "dnsmasq.conf"
    config.write_text(network.dnsmasq_config(layout, record))
    wanted: dict[str, tuple[Sequence[str | Path], Path]] = {
        "dnsmasq": (["dnsmasq", f"--conf-file={config}"], layout.state),
        "libvirtd": (hypervisor.prepare(layout), layout.state),
    }
    for machine in record.machines:
        settings, scratch = bmc.configure(layout, record, machine)
        emulator = Path(sys.executable).with_name("sushy-emulator")
        wanted[f"bmc-{machine.name}"] = ([emulator, "--config", settings], scratch)
    if record.mirror:
        listen = ["--listen", f"{record.gateway}:80"]
        roots = [word for tree in (record.standin, record.mirror) if tree for word in ("--root", tree)]
        server = [sys.executable, "-m", "gpunodes.lab.mirror.serve", *roots, *listen]
        wanted["mirror"] = (server, layout.state)
    for name, (command, scratch) in wanted.items():
        line = tuple(str(word) for word in network.inside(layout, command))
        running = processes.find(folder, name)
        if running and running.command == line:
            continue
        if running:
            processes.end([running])
        environment = {
            "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(scratch),
            "TMPDIR": str(scratch),
            "LC_ALL": "C.UTF-8",
        }
        processes.start(folder, name, line, layout.state / "log" / f"{name}.log", environment)


def _ensure_machines(layout: Layout, record: LabRecord, machines: hypervisor.Hypervisor, say: Report) -> None:
    known = machines.names()
    for machine in record.machines:
        if machine.name not in known:
            options = (board.KERNEL_OPTION,) if machine.boards else ()
            machines.define(hypervisor.domain_xml(layout, machine, record.accelerator, options))
        if not machines.running(machine.name):
            say(f"starting {machine.name}")
        machines.start(machine.name)


def _inventory_hashes(layout: Layout) -> Path:
    """With the disks, since /run is empty after the host has started anew."""
    return layout.disks / "inventory.json"


def _write_inventory(layout: Layout, record: LabRecord) -> None:
    settings = mirror.settings(MIRROR_URL, Path(record.mirror)) if record.mirror else {}
    if record.standin:
        settings |= standin.settings(MIRROR_URL, Path(record.standin))
        settings["gpunodes_image_mirrors"] |= {standin.REGISTRY: MIRROR_URL}
    written = inventory.write(Path(record.inventory), inventory.texts(layout, record, settings), Owner.current())
    _inventory_hashes(layout).write_text(json.dumps(written))


def _wait_for_machines(layout: Layout, record: LabRecord, say: Report) -> None:
    deadline = time.monotonic() + ssh.START_LIMIT

    def wait(machine: LabMachine) -> None:
        begun = time.monotonic()
        ssh.wait(layout, machine, deadline)
        say(f"{machine.name} answers at {machine.address} ({time.monotonic() - begun:.0f} s)")

    with ThreadPoolExecutor() as pool:
        list(pool.map(wait, record.machines))


def _remove(layout: Layout, say: Report) -> list[Path]:
    remembered = processes.remembered(layout.state / "processes")
    # libvirtd first, so that it does not watch its machines go.
    processes.end([process for name, process in remembered.items() if name == "libvirtd"])
    processes.end(remembered.values())
    processes.end(processes.elsewhere([f"{layout.state}/", f"{layout.disks}/"]))
    kept: list[Path] = []
    if _inventory_hashes(layout).exists():
        kept = inventory.remove(json.loads(_inventory_hashes(layout).read_text()))
    network.remove(layout)
    for folder in (layout.state, layout.disks):
        if folder.exists():
            shutil.rmtree(folder)
    for path in kept:
        say(f"{path} was changed by hand and stays")
    return kept
