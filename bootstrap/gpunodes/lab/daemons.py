"""The lab's daemons: libvirtd, dnsmasq, one BMC for each machine, Wake-on-LAN, and the server of the mirror."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gpunodes.lab import bmc, hypervisor, network, processes, wake
from gpunodes.lab.layout import LabRecord, Layout


def expected(record: LabRecord) -> list[str]:
    """The names of the daemons that a lab needs."""
    names = ["libvirtd", "dnsmasq", "wake", *(f"bmc-{each.name}" for each in record.machines)]
    return [*names, "mirror"] if record.mirror else names


def ensure(layout: Layout, record: LabRecord) -> None:
    """Start the daemons that are stopped, and restart those whose command has changed."""
    folder = layout.state / "processes"
    config = layout.state / "dnsmasq.conf"
    config.write_text(network.dnsmasq_config(layout, record))
    daemons: dict[str, tuple[Sequence[str | Path], Path]] = {
        "dnsmasq": (["dnsmasq", f"--conf-file={config}"], layout.state),
        "libvirtd": (hypervisor.prepare(layout, record.emulator), layout.state),
        "wake": (wake.command(layout, record.machines), layout.state),
    }
    for machine in record.machines:
        settings, scratch = bmc.configure(layout, record, machine)
        emulator = Path(sys.executable).with_name("sushy-emulator")
        daemons[f"bmc-{machine.name}"] = ([emulator, "--config", settings], scratch)
    if record.mirror:
        listen = ["--listen", f"{record.gateway}:80"]
        trees = (record.standin, record.updates, record.mirror)
        roots = [argument for tree in trees if tree for argument in ("--root", tree)]
        server = [sys.executable, "-m", "gpunodes.lab.mirror.serve", *roots, *listen]
        daemons["mirror"] = (server, layout.state)
    for name, (command, scratch) in daemons.items():
        argv = tuple(str(argument) for argument in network.inside(layout, command))
        running = processes.find(folder, name)
        if running and running.command == argv:
            continue
        if running:
            processes.end([running])
        environment = {
            "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(scratch),
            "TMPDIR": str(scratch),
            "LC_ALL": "C.UTF-8",
        }
        processes.start(folder, name, argv, layout.state / "log" / f"{name}.log", environment)
