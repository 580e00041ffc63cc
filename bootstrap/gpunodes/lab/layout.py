"""The lab's names, paths, addresses and machines. Pure data: this module does not touch the host."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

from gpunodes.errors import WrongInput

BRIDGE = "lab0"
SECOND_BRIDGE = "lab1"
USER = "admin"
"""The unprivileged user of every machine, as in the images of hosting providers."""
SUBNETS = tuple(IPv4Network(f"10.213.{third}.0/24") for third in range(16))
"""Candidate subnets of a lab; it gets the first one that the host does not use."""
_SECOND_NETWORK = 1 << 16
"""What an address is away from the same machine's address in the second network: 10.214 instead of 10.213."""

_NAME = re.compile(r"[a-z][a-z0-9]{0,9}")
_FIRST_BMC_PORT = 8001
_VIRTUAL_HOST = 10
"""Host number of the API's virtual address; those of control planes follow it."""


class LabRole(StrEnum):
    """The role that a machine gets in the cluster."""

    CONTROL_PLANE = "control_plane"
    WORKER = "workers"


class System(StrEnum):
    """Operating systems of a lab's machines."""

    DEBIAN12 = "debian12"
    DEBIAN13 = "debian13"

    @property
    def suite(self) -> str:
        """Its name in Debian's archive."""
        return {"debian12": "bookworm", "debian13": "trixie"}[self.value]


def cache_dir() -> Path:
    """The folder for files that take long to make and can be kept (XDG base directory specification)."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "gpunodes"


@dataclass(frozen=True)
class Layout:
    """Names and paths of the lab called ``name``; no two labs share one."""

    name: str
    cache: Path
    run: Path = Path("/run")

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            # 10 characters, since the kernel limits a link's name to 15.
            raise WrongInput(
                f"the lab's name is {self.name!r}",
                "a lower-case letter, then at most 9 lower-case letters and digits",
                "choose another --name",
            )

    @property
    def namespace(self) -> str:
        """The network namespace."""
        return f"gpunodes-{self.name}"

    @property
    def link(self) -> str:
        """The host's end of the veth pair between host and namespace."""
        return f"gpn-{self.name}"

    @property
    def state(self) -> Path:
        """Configuration, sockets, logs and keys of the running lab."""
        return self.run / self.namespace

    @property
    def disks(self) -> Path:
        """The machines' disks: too large for /run, which may be memory."""
        return self.cache / "run" / self.name

    @property
    def kernel(self) -> Path:
        """The kernel that the machines start."""
        return self.disks / "vmlinuz"

    @property
    def initrd(self) -> Path:
        """Its initial ramdisk."""
        return self.disks / "initrd.img"

    @property
    def boot_disk(self) -> Path:
        """The disk with the boot loader of machines that start their own kernel."""
        return self.disks / "boot.raw"

    @property
    def libvirt_uri(self) -> str:
        """The lab's own libvirt daemon."""
        return f"qemu+unix:///system?socket={self.state}/libvirt/libvirt-sock"

    @property
    def ssh_key(self) -> Path:
        """The private key for every machine."""
        return self.state / "ssh" / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """The machines' host keys, written before their first start."""
        return self.state / "ssh" / "known_hosts"

    def console_log(self, machine: str) -> Path:
        """The complete output of a machine's serial console."""
        return self.state / "console" / f"{machine}.log"


@dataclass(frozen=True)
class Boards:
    """The stand-in boards of a GPU machine."""

    gpus: int
    switches: int
    devices: tuple[str, ...]
    """PCI device ids of the GPUs, four hexadecimal digits each; where there are fewer than GPUs, they repeat."""

    @classmethod
    def from_json(cls, data: dict[str, Any] | None) -> Boards | None:
        """The reverse of :func:`dataclasses.asdict`; None stays None."""
        return cls(**{**data, "devices": tuple(data["devices"])}) if data else None


@dataclass(frozen=True)
class Link:
    """A network link of a machine."""

    address: str
    mac: str


@dataclass(frozen=True)
class LabMachine:
    """One virtual machine and its BMC."""

    name: str
    role: LabRole
    address: str
    mac: str
    uuid: str
    memory_mib: int
    cpus: int
    bmc_port: int
    bmc_password: str
    boards: Boards | None = None
    """None: a machine without GPUs."""
    second_link: Link | None = None
    """In the lab's second network; None: the lab has one network."""
    data_disk: bool = False
    own_kernel: bool = False
    """Whether it boots the kernel on its disk instead of the image's."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LabMachine:
        """The reverse of :func:`dataclasses.asdict`."""
        link = data.get("second_link")
        own = {"role": LabRole(data["role"]), "boards": Boards.from_json(data.get("boards"))}
        return cls(**{**data, **own, "second_link": Link(**link) if link else None})


@dataclass(frozen=True)
class LabRecord:
    """The plan of a running lab; kept in its state folder for later commands."""

    name: str
    system: System
    subnet: str
    accelerator: str
    machines: tuple[LabMachine, ...]
    inventory: str
    """The inventory folder that ``up`` wrote."""
    mirror: str | None
    """The folder that the mirror serves; None: the lab has no mirror."""
    standin: str | None = None
    """The folder that takes precedence over it; None: the lab has no GPU machines."""
    updates: str | None = None
    """The folder with a newer kernel; None: the machines do not boot their own."""
    emulator: str | None = None
    """The QEMU of emulated machines; None: KVM, or the host's QEMU."""

    @property
    def control_planes(self) -> tuple[LabMachine, ...]:
        """The control-plane machines."""
        return tuple(each for each in self.machines if each.role is LabRole.CONTROL_PLANE)

    @property
    def virtual_address(self) -> str | None:
        """An unused address for the API of several control planes; None: there is one."""
        return str(IPv4Network(self.subnet)[_VIRTUAL_HOST]) if len(self.control_planes) > 1 else None

    @property
    def second_subnet(self) -> str | None:
        """The second network, which has the machines' default route; None: the lab has one network."""
        return str(second_network(IPv4Network(self.subnet))) if self.machines[0].second_link else None

    @property
    def gateway(self) -> str:
        """The bridge: the machines' gateway, name server and mirror."""
        return str(IPv4Network(self.subnet)[1])

    def machine(self, name: str) -> LabMachine:
        """The machine called ``name``.

        Raises:
            WrongInput: the lab has no such machine.
        """
        for machine in self.machines:
            if machine.name == name:
                return machine
        names = ", ".join(each.name for each in self.machines)
        raise WrongInput(f"the lab has no machine {name!r}", f"one of {names}")

    def to_json(self) -> dict[str, Any]:
        """As plain data for a JSON file."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LabRecord:
        """The reverse of :meth:`to_json`."""
        machines = tuple(LabMachine.from_json(each) for each in data["machines"])
        return cls(**{**data, "system": System(data["system"]), "machines": machines})


def free_subnet(used: Sequence[IPv4Network]) -> IPv4Network:
    """The first subnet that overlaps no network ``used`` on the host.

    Raises:
        WrongInput: all are in use.
    """
    for subnet in SUBNETS:
        if not any(own.overlaps(each) for own in (subnet, second_network(subnet)) for each in used):
            return subnet
    raise WrongInput(
        f"the host has routes into all of {SUBNETS[0]} to {SUBNETS[-1]}",
        "one of these subnets free",
        "run `gpunodes lab down` for another lab",
    )


def second_network(subnet: IPv4Network) -> IPv4Network:
    """The second network of a lab in ``subnet``."""
    return IPv4Network((int(subnet.network_address) + _SECOND_NETWORK, subnet.prefixlen))


def host_address(subnet: IPv4Network) -> IPv4Address:
    """The host's own address in the lab's subnet."""
    return subnet[254]


@dataclass(frozen=True, slots=True)
class Size:
    """Memory and CPUs of a machine."""

    memory_mib: int
    cpus: int


@dataclass(frozen=True, slots=True)
class Equipment:
    """What all machines of a lab have besides their disk and their first network."""

    second_network: bool = False
    """A network with the default route, in which the machines do not reach each other."""
    data_disk: bool = False
    """A disk that is mounted at /data."""
    own_kernel: bool = False
    """Firmware and a boot loader, which start the kernel on the disk."""


def plan_machines(
    subnet: IPv4Network,
    workers: int,
    sizes: Mapping[LabRole, Size],
    identities: Sequence[tuple[str, str]],
    gpu_workers: int = 0,
    boards: Boards | None = None,
    equipment: Equipment = Equipment(),
    control_planes: int = 1,
) -> tuple[LabMachine, ...]:
    """Control-plane machines, ``workers`` workers and ``gpu_workers`` with ``boards``, with fixed addresses.

    A single control plane is called control-1; several are cp-1, cp-2 and so on.

    ``identities`` gives each machine its UUID and its BMC's password, in order.
    """
    prefix = "control" if control_planes == 1 else "cp"
    plan: list[tuple[str, LabRole, int, Boards | None]] = [
        (f"{prefix}-{number}", LabRole.CONTROL_PLANE, _VIRTUAL_HOST + number, None)
        for number in range(1, control_planes + 1)
    ]
    plan += [(f"worker-{number}", LabRole.WORKER, 20 + number, None) for number in range(1, workers + 1)]
    plan += [(f"gpu-{number}", LabRole.WORKER, 40 + number, boards) for number in range(1, gpu_workers + 1)]
    return tuple(
        LabMachine(
            name=name,
            role=role,
            address=(link := _link(subnet, host)).address,
            mac=link.mac,
            uuid=identity[0],
            memory_mib=sizes[role].memory_mib,
            cpus=sizes[role].cpus,
            bmc_port=_FIRST_BMC_PORT + index,
            bmc_password=identity[1],
            boards=machine_boards,
            second_link=_link(second_network(subnet), host) if equipment.second_network else None,
            data_disk=equipment.data_disk,
            own_kernel=equipment.own_kernel,
        )
        for index, ((name, role, host, machine_boards), identity) in enumerate(zip(plan, identities, strict=True))
    )


def _link(subnet: IPv4Network, host: int) -> Link:
    _, second, third, _ = subnet.network_address.packed
    # 52:54:00 is QEMU's own prefix.
    return Link(str(subnet[host]), f"52:54:00:{second:02x}:{third:02x}:{host:02x}")
