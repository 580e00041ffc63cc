"""The lab's own libvirt: its daemon's settings, the machines' definitions, power and snapshots.

The one file that imports libvirt. libvirtd of a root user knows only the system's folders, so ours gets its own
mounted over them, in the mount namespace that ``ip netns exec`` makes for it: the host's libvirt never meets the lab's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from xml.etree.ElementTree import Element, SubElement, tostring

from gpunodes.errors import GpunodesError
from gpunodes.lab.disks import overlay
from gpunodes.lab.host import which
from gpunodes.lab.layout import BRIDGE, LabMachine, LabRole, Layout

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
# The lab's QEMU runs in the lab's namespaces as root: libvirt's further confinement would need the host's cgroups,
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
# CPU features that emulated machines go without. cx16: QEMU 7.2 leaves rubbish in the flags after CMPXCHG16B, and when
# an interrupt comes right then, the kernel's allocator dies of a double fault (seen on the first day, in one start of
# three). la57, smap, svm (a fifth level of page tables, a switch around each access to user memory, KVM in KVM) are
# worth nothing here; without them a start takes about a tenth less. erms makes the kernel copy byte by byte, and a byte
# takes as long as a word here.
_UNEMULATED = ("cx16", "erms", "la57", "smap", "svm")
# QEMU forgets all that it has translated when its cache is full. A control plane filled the usual 1024 MiB every two
# minutes; 2048 is the most (tcg/region.c).
_TRANSLATED_MIB = 2047
# Drivers of disks that are not there, and SSH over vsock, cost a second of each start.
_KERNEL_OPTIONS = "console=ttyS0 quiet audit=0 mitigations=off panic=10 module_blacklist=ahci systemd.ssh_auto=no"
# What a kernel does for latency and against attackers costs an emulated one more than it is worth: preemption, pages
# that are cleared before they are given out, and timers finer than a tick, by which its many sleepers wake one by one.
# Without them the same work takes about an eighth less. A kernel with two processors does not trust their time stamp
# counters and reads the HPET, for every program that asks what time it is: 13 us in place of 2. QEMU's are those of the
# host, the same on all processors (cpu_get_ticks).
_EMULATED_OPTIONS = "preempt=none init_on_alloc=0 highres=off tsc=reliable"

# All wait for the control plane, and an emulated one gets too little of a small host while the workers install. But it
# is never idle either: with a niceness of 10 a worker waited half a minute for sudo's first word. In the end all wait
# for the driver of a GPU machine, which takes longer than a control plane: it yields less. A group of processes that
# Linux makes of a session has a niceness of its own (sched(7), "The autogroup feature").
_NICE_WORKER, _NICE_GPU_WORKER = 5, 2
_YIELDING = "yielding-qemu-{}"
_YIELDING_TEXT = """\
#!/bin/sh
echo {nice} 2>/dev/null >/proc/self/autogroup
exec nice -n {nice} {qemu} "$@"
"""


def prepare(layout: Layout) -> list[str]:
    """Write the daemon's settings; return the command that starts it inside the namespace."""
    for folder in _FOLDERS.values():
        (layout.state / folder).mkdir(exist_ok=True)
    sockets = layout.state / "libvirt"
    sockets.mkdir(mode=0o700, exist_ok=True)
    (layout.state / "console").mkdir(exist_ok=True)
    for nice in (_NICE_WORKER, _NICE_GPU_WORKER):
        yielding = layout.state / _YIELDING.format(nice)
        yielding.write_text(_YIELDING_TEXT.format(nice=nice, qemu=which("qemu-system-x86_64")))
        yielding.chmod(0o700)
    config = layout.state / "libvirtd.conf"
    config.write_text(_DAEMON.format(sockets=sockets))
    (layout.state / "libvirt-etc" / "qemu.conf").write_text(_QEMU)
    # /run goes away too: there is the host's D-Bus, on which libvirt would tell the host's services of its machines.
    # What the lab keeps below /run is parked where libvirt's own folder comes afterwards.
    # -n: else mount(8) keeps notes in the host's /run.
    parked = "/var/lib/libvirt"
    steps = [
        f"mount -n --bind {layout.state} {parked}",
        "mount -n -t tmpfs -o mode=755 tmpfs /run",
        f"mkdir /run/libvirt /run/lock {layout.state}",
        f"mount -n --bind {parked} {layout.state}",
        *(f"mount -n --bind {layout.state / ours} {theirs}" for theirs, ours in _FOLDERS.items()),
        f"exec {which('libvirtd')} --config {config} --pid-file {layout.state}/libvirtd.pid",
    ]
    return ["sh", "-c", " && ".join(steps)]


def domain_xml(layout: Layout, machine: LabMachine, accelerator: str, options: Sequence[str] = ()) -> str:
    """libvirt's definition of a machine (https://libvirt.org/formatdomain.html), with further kernel ``options``."""
    domain = Element("domain", type="kvm" if accelerator == "kvm" else "qemu")

    def add(parent: Element, tag: str, text: str = "", **attributes: str) -> Element:
        child = SubElement(parent, tag, attributes)
        child.text = text or None
        return child

    add(domain, "name", machine.name)
    add(domain, "uuid", machine.uuid)
    add(domain, "memory", str(machine.memory_mib), unit="MiB")
    add(domain, "vcpu", str(machine.cpus))
    system = add(domain, "os")
    add(system, "type", "hvm", arch="x86_64", machine="q35")
    add(system, "kernel", str(layout.kernel))
    add(system, "initrd", str(layout.initrd))
    emulated = () if accelerator == "kvm" else (_EMULATED_OPTIONS,)
    add(system, "cmdline", " ".join((_KERNEL_OPTIONS, *emulated, *options)))
    features = add(domain, "features")
    add(features, "acpi")
    add(features, "apic")
    if accelerator == "kvm":
        add(domain, "cpu", mode="host-passthrough")
    else:
        processor = add(domain, "cpu", mode="maximum")
        for feature in _UNEMULATED:
            add(processor, "feature", policy="disable", name=feature)
        if machine.role is LabRole.CONTROL_PLANE:
            add(add(features, "tcg"), "tb-cache", str(_TRANSLATED_MIB), unit="MiB")
    add(domain, "clock", offset="utc")
    add(domain, "on_poweroff", "destroy")
    add(domain, "on_reboot", "restart")
    add(domain, "on_crash", "restart")
    devices = add(domain, "devices")
    if accelerator != "kvm" and machine.role is LabRole.WORKER:
        nice = _NICE_GPU_WORKER if machine.boards else _NICE_WORKER
        add(devices, "emulator", str(layout.state / _YIELDING.format(nice)))
    disk = add(devices, "disk", type="file", device="disk")
    # The disks die with the lab: nothing is gained by waiting for the host's.
    add(disk, "driver", name="qemu", type="qcow2", cache="unsafe", discard="unmap")
    add(disk, "source", file=str(overlay(layout, machine.name)))
    add(disk, "target", dev="vda", bus="virtio")
    link = add(devices, "interface", type="bridge")
    add(link, "mac", address=machine.mac)
    add(link, "source", bridge=BRIDGE)
    add(link, "target", dev=f"tap-{machine.name}"[:15])
    add(link, "model", type="virtio")
    serial = add(devices, "serial", type="pty")
    add(serial, "log", file=str(layout.console_log(machine.name)), append="on")
    add(serial, "target", port="0")
    rng = add(devices, "rng", model="virtio")
    add(rng, "backend", "/dev/urandom", model="random")
    add(devices, "controller", type="usb", model="none")
    add(devices, "memballoon", model="none")
    return tostring(domain, encoding="unicode")


class Hypervisor:
    """The machines as the lab's libvirt sees them."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def define(self, xml: str) -> None:
        """Add or replace a machine's definition."""
        self._connection.defineXML(xml)

    def names(self) -> set[str]:
        """The machines defined."""
        return {domain.name() for domain in self._connection.listAllDomains()}

    def running(self, name: str) -> bool:
        """Whether the machine is powered and not paused."""
        domain = self._connection.lookupByName(name)
        return bool(domain.isActive()) and not _is_paused(domain)

    def start(self, name: str) -> None:
        """Power a machine that is off; let one go on that an interrupted snapshot has left paused."""
        domain = self._connection.lookupByName(name)
        if not domain.isActive():
            domain.create()
        elif _is_paused(domain):
            domain.resume()

    def snapshots(self, name: str) -> set[str]:
        """The names of a machine's snapshots."""
        return set(self._connection.lookupByName(name).snapshotListNames())

    def take_snapshots(self, machines: list[str], snapshot: str) -> None:
        """Save memory and disk of all machines at one instant; one of the same name is replaced."""
        with self._paused(machines):
            for name in machines:
                domain = self._connection.lookupByName(name)
                if snapshot in self.snapshots(name):
                    domain.snapshotLookupByName(snapshot).delete()
                domain.snapshotCreateXML(f"<domainsnapshot><name>{snapshot}</name></domainsnapshot>")

    def restore_snapshots(self, machines: list[str], snapshot: str) -> None:
        """Bring memory and disk of all machines back; none goes on before all are back."""
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
def connect(layout: Layout, patience: float = 0) -> Iterator[Hypervisor]:
    """A connection to the lab's libvirt; a daemon that was just started gets ``patience`` seconds.

    Raises:
        GpunodesError: libvirt does not answer, or refuses what is asked within.
    """
    import libvirt

    # libvirt's own habit is to print errors to standard error as well.
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    deadline = time.monotonic() + patience
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
            f"the lab's libvirt says: {error}",
            remedy=f"`gpunodes lab up` repairs it; its log: {layout.state}/log/libvirtd.log",
        ) from error
