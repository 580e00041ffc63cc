"""The lab's own libvirt: its daemon's settings, the machines' definitions, power and snapshots.

Only this file imports libvirt. libvirtd of the root user always uses the system's folders, so the lab mounts its own
folders over them, in the mount namespace that ``ip netns exec`` creates: the lab's libvirt is separate from the host's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, SubElement, tostring

from gpunodes.errors import GpunodesError
from gpunodes.lab.disks import data_overlay, overlay
from gpunodes.lab.emulator import MODULES, modules
from gpunodes.lab.host import which
from gpunodes.lab.layout import BRIDGE, SECOND_BRIDGE, LabMachine, LabRole, Layout, Link
from gpunodes.lab.network import taps

_FOLDERS = {
    "/etc/libvirt": "libvirt-etc",
    "/var/lib/libvirt": "libvirt-lib",
    "/var/cache/libvirt": "libvirt-cache",
    "/var/log/libvirt": "libvirt-log",
    "/run/libvirt": "libvirt-run",
}
_DAEMON = """unix_sock_dir = "{sockets}"
unix_sock_rw_perms = "0700"
auth_unix_ro = "none"
auth_unix_rw = "none"
log_level = 3
log_outputs = "3:stderr"
"""
# The lab's QEMU runs in the lab's namespaces as root: further confinement by libvirt would need the host's cgroups,
# security modules and a log daemon.
_QEMU = """user = "root"
group = "root"
security_driver = "none"
namespaces = []
cgroup_controllers = []
stdio_handler = "file"
dynamic_ownership = 0
remember_owner = 0
"""
# CPU features that are disabled on emulated machines. cx16: QEMU 7.2 leaves wrong flags after CMPXCHG16B; an interrupt
# at that moment crashes the kernel's allocator with a double fault (seen in one of three boots). la57, smap, svm (five-
# level page tables, a switch around each access to user memory, nested KVM) are useless here; without them a boot takes
# about a tenth less. erms and fsrm make the kernel copy byte by byte, and emulated a byte takes as long as a word; with
# fsrm and without erms Linux 6.1 stops at its start (seen with QEMU 10.0, which has fsrm).
_DISABLED_CPU_FEATURES = ("cx16", "erms", "fsrm", "la57", "smap", "svm")
# QEMU discards all translated code when its cache is full. A control plane filled the default of 1024 MiB every two
# minutes; the limit is 2048 (tcg/region.c).
_TRANSLATION_CACHE_MIB = 2047
# Without drivers for missing disks and SSH over vsock a boot takes a second less.
_KERNEL_OPTIONS = "console=ttyS0 quiet audit=0 mitigations=off panic=10 module_blacklist=ahci systemd.ssh_auto=no"
# Preemption, clearing pages before they are allocated and high-resolution timers are too expensive under emulation:
# without them the same work takes about an eighth less. A kernel with two processors does not trust their time stamp
# counters and reads the HPET whenever a program asks for the time: 13 us instead of 2. QEMU's counters are the host's,
# the same on all processors (cpu_get_ticks).
_EMULATED_OPTIONS = "preempt=none init_on_alloc=0 highres=off tsc=reliable"

# All machines wait for the control plane, and an emulated one gets too little time of a small host while the workers
# install packages, so workers run with a higher niceness. The control plane is never idle: with a niceness of 10, sudo
# on a worker took half a minute to respond. Last of all the driver of a GPU machine is built, which takes longer than a
# control plane: GPU workers have a lower niceness. Linux puts each session into an autogroup with a niceness of its own
# (sched(7), "The autogroup feature").
_NICE_CONTROL_PLANE, _NICE_GPU_WORKER, _NICE_WORKER = 0, 2, 5
_NICE_QEMU = "nice-qemu-{}"
_NICE_QEMU_SCRIPT = """\
#!/bin/sh
echo {nice} 2>/dev/null >/proc/self/autogroup
exec nice -n {nice} {qemu} "$@"
"""


def prepare(layout: Layout, emulator: str | None) -> list[str]:
    """Write the daemon's settings; return the command that starts it inside the namespace.

    ``emulator`` is the QEMU of emulated machines, None the host's.
    """
    for folder in _FOLDERS.values():
        (layout.state / folder).mkdir(exist_ok=True)
    sockets = layout.state / "libvirt"
    sockets.mkdir(mode=0o700, exist_ok=True)
    (layout.state / "console").mkdir(exist_ok=True)
    qemu = emulator or which("qemu-system-x86_64")
    for nice in (_NICE_CONTROL_PLANE, _NICE_GPU_WORKER, _NICE_WORKER):
        script = layout.state / _NICE_QEMU.format(nice)
        script.write_text(_NICE_QEMU_SCRIPT.format(nice=nice, qemu=qemu))
        script.chmod(0o700)
    config = layout.state / "libvirtd.conf"
    config.write_text(_DAEMON.format(sockets=sockets))
    (layout.state / "libvirt-etc" / "qemu.conf").write_text(_QEMU)
    # /run is replaced as well: it has the host's D-Bus, by which libvirt would announce its machines to the host. The
    # lab's state folder, below /run, is bound to another place meanwhile; one of _FOLDERS is mounted there afterwards.
    # -n: otherwise mount(8) writes to the host's /run.
    parked = "/var/lib/libvirt"
    steps = [
        f"mount -n --bind {layout.state} {parked}",
        "mount -n -t tmpfs -o mode=755 tmpfs /run",
        f"mkdir /run/libvirt /run/lock {layout.state}",
        f"mount -n --bind {parked} {layout.state}",
        *(f"mount -n --bind {layout.state / own} {system}" for system, own in _FOLDERS.items()),
        *([f"mount -n --bind {modules(emulator)} {MODULES}"] if emulator and MODULES.is_dir() else []),
        f"exec {which('libvirtd')} --config {config} --pid-file {layout.state}/libvirtd.pid",
    ]
    return ["sh", "-c", " && ".join(steps)]


def kernel_options(accelerator: str, options: Sequence[str] = ()) -> tuple[str, ...]:
    """The kernel's command line on machines with this accelerator, with further ``options``."""
    emulated = () if accelerator == "kvm" else (_EMULATED_OPTIONS,)
    return (_KERNEL_OPTIONS, *emulated, *options)


def domain_xml(layout: Layout, machine: LabMachine, accelerator: str, options: Sequence[str] = ()) -> str:
    """libvirt's definition of a machine (https://libvirt.org/formatdomain.html), with further kernel ``options``."""
    domain = Element("domain", type="kvm" if accelerator == "kvm" else "qemu")
    _add(domain, "name", machine.name)
    _add(domain, "uuid", machine.uuid)
    _add(domain, "memory", str(machine.memory_mib), unit="MiB")
    _add(domain, "vcpu", str(machine.cpus))
    system = _add(domain, "os")
    _add(system, "type", "hvm", arch="x86_64", machine="q35")
    if not machine.own_kernel:
        _add(system, "kernel", str(layout.kernel))
        _add(system, "initrd", str(layout.initrd))
        _add(system, "cmdline", " ".join(kernel_options(accelerator, options)))
    features = _add(domain, "features")
    _add(features, "acpi")
    _add(features, "apic")
    if accelerator == "kvm":
        _add(domain, "cpu", mode="host-passthrough")
    else:
        processor = _add(domain, "cpu", mode="maximum")
        for feature in _DISABLED_CPU_FEATURES:
            _add(processor, "feature", policy="disable", name=feature)
        if machine.role is LabRole.CONTROL_PLANE:
            _add(_add(features, "tcg"), "tb-cache", str(_TRANSLATION_CACHE_MIB), unit="MiB")
    _add(domain, "clock", offset="utc")
    _add(domain, "on_poweroff", "destroy")
    _add(domain, "on_reboot", "restart")
    _add(domain, "on_crash", "restart")
    _add_devices(_add(domain, "devices"), layout, machine, accelerator)
    return tostring(domain, encoding="unicode")


def _add_devices(devices: Element, layout: Layout, machine: LabMachine, accelerator: str) -> None:
    """Emulator, disks, network links, console, random numbers."""
    if accelerator != "kvm":
        nice = _NICE_GPU_WORKER if machine.boards else _NICE_WORKER
        if machine.role is LabRole.CONTROL_PLANE:
            nice = _NICE_CONTROL_PLANE
        _add(devices, "emulator", str(layout.state / _NICE_QEMU.format(nice)))
    _add_disk(devices, overlay(layout, machine.name), "vda")
    if machine.data_disk:
        _add_disk(devices, data_overlay(layout, machine.name), "vdb")
    if machine.own_kernel:
        boot = _add(devices, "disk", type="file", device="disk")
        _add(boot, "driver", name="qemu", type="raw")
        _add(boot, "source", file=str(layout.boot_disk))
        # Behind the other disks: the kernel's names of those stay the same.
        _add(boot, "target", dev="vdy", bus="virtio")
        _add(boot, "boot", order="1")
        _add(boot, "readonly")
    tap, *second_tap = taps(machine)
    _add_link(devices, Link(machine.address, machine.mac), BRIDGE, tap)
    if machine.second_link:
        # Isolated ports reach the bridge itself only.
        second = _add_link(devices, machine.second_link, SECOND_BRIDGE, second_tap[0])
        _add(second, "port", isolated="yes")
    serial = _add(devices, "serial", type="pty")
    _add(serial, "log", file=str(layout.console_log(machine.name)), append="on")
    _add(serial, "target", port="0")
    rng = _add(devices, "rng", model="virtio")
    _add(rng, "backend", "/dev/urandom", model="random")
    _add(devices, "controller", type="usb", model="none")
    _add(devices, "memballoon", model="none")


def _add_disk(devices: Element, file: Path, target: str) -> None:
    disk = _add(devices, "disk", type="file", device="disk")
    # The disks are deleted with the lab: there is no need to wait for the host's disk.
    _add(disk, "driver", name="qemu", type="qcow2", cache="unsafe", discard="unmap")
    _add(disk, "source", file=str(file))
    _add(disk, "target", dev=target, bus="virtio")


def _add_link(devices: Element, link: Link, bridge: str, tap: str) -> Element:
    interface = _add(devices, "interface", type="bridge")
    _add(interface, "mac", address=link.mac)
    _add(interface, "source", bridge=bridge)
    _add(interface, "target", dev=tap)
    _add(interface, "model", type="virtio")
    return interface


def _add(parent: Element, tag: str, text: str = "", **attributes: str) -> Element:
    child = SubElement(parent, tag, attributes)
    child.text = text or None
    return child


class Hypervisor:
    """The machines of the lab's libvirt."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def define(self, xml: str) -> None:
        """Add or replace a machine's definition."""
        self._connection.defineXML(xml)

    def names(self) -> set[str]:
        """The names of all defined machines."""
        return {domain.name() for domain in self._connection.listAllDomains()}

    def running(self, name: str) -> bool:
        """Whether the machine is on and not paused."""
        domain = self._connection.lookupByName(name)
        return bool(domain.isActive()) and not _is_paused(domain)

    def start(self, name: str) -> None:
        """Switch on a machine that is off; resume one that an interrupted snapshot has left paused."""
        domain = self._connection.lookupByName(name)
        if not domain.isActive():
            domain.create()
        elif _is_paused(domain):
            domain.resume()

    def snapshots(self, name: str) -> set[str]:
        """The names of a machine's snapshots."""
        return set(self._connection.lookupByName(name).snapshotListNames())

    def take_snapshots(self, machines: list[str], snapshot: str) -> None:
        """Save memory and disk of all machines at one instant; snapshots of the same name are replaced."""
        with self._paused(machines):
            for name in machines:
                domain = self._connection.lookupByName(name)
                if snapshot in self.snapshots(name):
                    domain.snapshotLookupByName(snapshot).delete()
                domain.snapshotCreateXML(f"<domainsnapshot><name>{snapshot}</name></domainsnapshot>")

    def restore_snapshots(self, machines: list[str], snapshot: str) -> None:
        """Restore memory and disk of all machines; they resume when all are restored."""
        import libvirt

        def revert(name: str) -> None:
            domain = self._connection.lookupByName(name)
            flags = libvirt.VIR_DOMAIN_SNAPSHOT_REVERT_PAUSED | libvirt.VIR_DOMAIN_SNAPSHOT_REVERT_FORCE
            domain.revertToSnapshot(domain.snapshotLookupByName(snapshot), flags)

        with ThreadPoolExecutor() as pool:
            list(pool.map(revert, machines))
        for name in machines:
            self._connection.lookupByName(name).resume()

    @contextmanager
    def _paused(self, machines: list[str]) -> Iterator[None]:
        domains = [self._connection.lookupByName(name) for name in machines]
        for domain in domains:
            domain.suspend()
        try:
            yield
        finally:
            for domain in domains:
                domain.resume()


def _is_paused(domain: Any) -> bool:
    import libvirt

    return bool(domain.state()[0] == libvirt.VIR_DOMAIN_PAUSED)


@contextmanager
def connect(layout: Layout, start_limit: float = 0) -> Iterator[Hypervisor]:
    """A connection to the lab's libvirt; a daemon that was just started gets ``start_limit`` seconds.

    Raises:
        GpunodesError: libvirt does not respond, or refuses a request made within the context.
    """
    import libvirt

    # By default libvirt also prints errors to standard error.
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    deadline = time.monotonic() + start_limit
    try:
        while True:
            try:
                connection = libvirt.open(layout.libvirt_uri)
                break
            except libvirt.libvirtError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.1)
        try:
            yield Hypervisor(connection)
        finally:
            connection.close()
    except libvirt.libvirtError as error:
        raise GpunodesError(
            f"the lab's libvirt reports: {error}",
            remedy=f"`gpunodes lab up` repairs it; its log: {layout.state}/log/libvirtd.log",
        ) from error
