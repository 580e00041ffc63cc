"""The desired state of a machine, as the roles pass it to the module host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..packages import RequestedPackage
from ..problem import MachineProblem
from ..proxies import Proxies, proxies_from

_DATA_FOLDERS = {"containerd": "/var/lib/containerd", "docker": "/var/lib/docker", "kubelet": "/var/lib/kubelet"}


def data_folders(runtime: str) -> dict[str, str]:
    """The folders, by service, whose data gpunodes_data_directory moves on a machine with this container runtime."""
    return {name: path for name, path in _DATA_FOLDERS.items() if name != "docker" or runtime == "docker"}


@dataclass(frozen=True)
class Repository:
    """A package source. ``suite`` is "/" for a flat one.

    ``key`` is an armoured key, its URL, or the path of a keyring on the machine.
    """

    name: str
    url: str
    key: str
    fingerprint: str = ""
    suite: str = "/"
    components: str = ""


@dataclass(frozen=True)
class File:
    """A file that gpunodes writes completely.

    ``contents`` selects the content by the version of ``package``: {"1.*": ..., "2.*": ...}.
    """

    path: str
    content: str = ""
    mode: str = "0644"
    owner: str = "root"
    package: str = ""
    contents: Mapping[str, str] = field(default_factory=dict)
    validate: Sequence[str] = ()
    """A command that must accept the file; ``%s`` is replaced by its path."""


@dataclass(frozen=True)
class Generated:
    """A file that a program on the machine generates.

    ``command`` writes to the path ``%o``, initially a copy of the existing file; ``%i`` is a copy of ``input``. If
    ``when_exists`` does not exist, nothing is generated.
    """

    path: str
    command: Sequence[str]
    input: str = ""
    when_exists: str = ""
    mode: str = "0644"


@dataclass(frozen=True)
class OutputCheck:
    """A command that must succeed after packages were installed, and the text that its output must contain."""

    command: Sequence[str]
    output: str = ""


@dataclass(frozen=True)
class Driver:
    """A GPU driver's kernel modules, and the kernel module that conflicts with them."""

    modules: Sequence[str]
    conflicting_module: str = ""
    loaded: bool = True
    """Whether to load them now; if not, they are only built: this machine has no GPU."""


@dataclass(frozen=True)
class Service:
    """A systemd service: always enabled; started, and restarted after changes, unless ``started`` is false.

    With ``when_exists`` it is started only if that file exists. A ``proxied`` one gets the proxies in its environment.
    With ``off`` it is stopped and disabled instead, unless it was on before gpunodes.
    """

    name: str
    started: bool = True
    when_exists: str = ""
    proxied: bool = False
    off: bool = False


@dataclass(frozen=True)
class Firewall:
    """What the machine's active firewalls must let through."""

    ports: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The addresses and networks from which each port, ``tcp 10250``, can be reached; none: from everywhere."""
    devices: Sequence[str] = ()
    """Network devices of pods. Packets from them are forwarded, and packets from ``sources`` and ``pods`` to them."""
    sources: Sequence[str] = ()
    """The addresses of the cluster's machines."""
    pods: Sequence[str] = ()
    """The address ranges of pods."""


@dataclass(frozen=True)
class Spec:
    """The desired state that one role passes to the module host.

    A field's ``kind`` makes its value, or each of its rows, from plain data.
    """

    repositories: Sequence[Repository] = field(default=(), metadata={"kind": Repository})
    packages: Sequence[RequestedPackage] = field(default=(), metadata={"kind": RequestedPackage})
    files: Sequence[File] = field(default=(), metadata={"kind": File})
    directories: Sequence[str] = ()
    """Folders that contain only data of the installed software; those that are new are removed with it."""
    modules: Sequence[str] = ()
    """Kernel modules to load now and at every boot; they replace the previous ones, as ``sysctls`` do."""
    sysctls: Mapping[str, str] = field(default_factory=dict)
    raised: Mapping[str, str] = field(default_factory=dict)
    """Least values of kernel settings, now and at every boot; a higher value is kept."""
    moved: Mapping[str, str] = field(default_factory=dict)
    """Folders whose data belongs into ``data_directory``, by the service that uses them."""
    data_directory: str = ""
    """Directory on another disk for the data of the folders ``moved``; "" leaves them where they are."""
    swap_off: bool = False
    """Whether to turn off swap and comment it out in /etc/fstab."""
    services: Sequence[Service] = field(default=(), metadata={"kind": Service})
    groups: Sequence[str] = ()
    """Groups that the packages create and do not delete."""
    users: Sequence[str] = ()
    """System users, each with its own group, that the packages create and do not delete."""
    members: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Existing users that are members of a group, by group; others that an earlier run added are removed from it."""
    forwards: bool = False
    """Whether the software switches forwarding of packets on, and sets its policy: the previous state is recorded."""
    holds: Sequence[str] = ()
    """Shell patterns of installed packages to hold, so that they are not upgraded."""
    generated: Sequence[Generated] = field(default=(), metadata={"kind": Generated})
    checks: Sequence[OutputCheck] = field(default=(), metadata={"kind": OutputCheck})
    absent: Sequence[str] = ()
    """Files to remove if an earlier run of gpunodes created them; with "/" at the end, folders that are empty then."""
    module_stream: str = ""
    """Module stream of dnf that contains the packages, such as ``nvidia-driver:580-open``; "" for none."""
    driver: Driver | None = field(default=None, metadata={"kind": Driver})
    devices: bool = False
    """Whether to keep a CDI specification for containers, and links that make the devices known to systemd."""
    images: Sequence[str] = ()
    """Images that containerd pulls in the background after a change; the run does not wait for them.

    ``{NAME}`` is replaced by the version of the package NAME.
    """
    firewall: Firewall | None = field(default=None, metadata={"kind": Firewall})
    """None: firewalls are left as they are."""
    proxies: Proxies | None = None
    """HTTP proxies for the package manager, for keys, and for the services that are ``proxied``."""
    section: str = ""
    """The section of the ledger that records the changes: one of ``ledger.SECTIONS``, or "" for the ledger itself."""


def spec_from(wanted: Mapping[str, Any], proxy_credentials: Mapping[str, str] | None = None) -> Spec:
    """The desired state from plain data with the fields of Spec; raises MachineProblem if it has others.

    ``proxy_credentials`` are USER:PASSWORD for the URLs ``http`` and ``https`` of its proxies.
    """
    kinds = {each.name: each.metadata.get("kind") for each in fields(Spec)}

    def made(kind: Callable[..., Any] | None, value: Any) -> Any:
        if kind is None or not value:
            return value
        return kind(**value) if isinstance(value, Mapping) else tuple(kind(**row) for row in value)

    try:
        values = {name: made(kinds.get(name), value) for name, value in wanted.items()}
        return Spec(**{**values, "proxies": proxies_from(wanted.get("proxies"), proxy_credentials)})
    except TypeError as error:
        raise MachineProblem(f"the desired state is invalid: {error}", "the fields of host.Spec") from error


def filled(template: str, values: Mapping[str, str]) -> str:
    """``template`` with each placeholder replaced by its value."""
    for placeholder, value in values.items():
        template = template.replace(placeholder, value)
    return template
