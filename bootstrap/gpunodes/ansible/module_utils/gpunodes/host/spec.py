"""The desired state of a machine, as the roles pass it to the module host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..packages import RequestedPackage


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


@dataclass(frozen=True)
class Service:
    """A systemd service: always enabled; started, and restarted after changes, unless ``started`` is false.

    With ``when_exists`` it is started only if that file exists.
    """

    name: str
    started: bool = True
    when_exists: str = ""


@dataclass(frozen=True)
class Spec:
    """The desired state that one role passes to the module host."""

    repositories: Sequence[Repository] = ()
    packages: Sequence[RequestedPackage] = ()
    files: Sequence[File] = ()
    directories: Sequence[str] = ()
    modules: Sequence[str] = ()
    sysctls: Mapping[str, str] = field(default_factory=dict)
    swap_off: bool = False
    services: Sequence[Service] = ()
    groups: Sequence[str] = ()
    """Groups that the packages create and do not delete."""
    users: Sequence[str] = ()
    """System users, each with its own group, that the packages create and do not delete."""
    holds: Sequence[str] = ()
    """Shell patterns of installed packages to hold, so that they are not upgraded."""
    generated: Sequence[Generated] = ()
    checks: Sequence[OutputCheck] = ()
    absent: Sequence[str] = ()
    """Files to remove if an earlier run of gpunodes created them."""
    module_stream: str = ""
    """Module stream of dnf that contains the packages, such as ``nvidia-driver:580-open``; "" for none."""
    driver: Driver | None = None
    devices: bool = False
    """Whether to keep a CDI specification for containers, and links that make the devices known to systemd."""
    images: Sequence[str] = ()
    """Images that containerd pulls in the background after a change; the run does not wait for them.

    ``{NAME}`` is replaced by the version of the package NAME.
    """
    section: str = ""
    """The section of the ledger that records the changes: one of ``ledger.SECTIONS``, or "" for the ledger itself."""


def spec_from(parameters: Mapping[str, Any]) -> Spec:
    """The desired state from a module's parameters."""

    def each(kind: Callable[..., Any], key: str) -> tuple[Any, ...]:
        return tuple(
            kind(**{name: value for name, value in row.items() if value is not None})
            for row in parameters.get(key) or ()
        )

    driver = parameters.get("driver")
    return Spec(
        repositories=each(Repository, "repositories"),
        packages=each(RequestedPackage, "packages"),
        files=each(File, "files"),
        directories=tuple(parameters.get("directories") or ()),
        modules=tuple(parameters.get("modules") or ()),
        sysctls={name: str(value) for name, value in (parameters.get("sysctls") or {}).items()},
        swap_off=bool(parameters.get("swap_off")),
        services=each(Service, "services"),
        groups=tuple(parameters.get("groups") or ()),
        users=tuple(parameters.get("users") or ()),
        holds=tuple(parameters.get("holds") or ()),
        generated=each(Generated, "generated"),
        checks=each(OutputCheck, "checks"),
        absent=tuple(parameters.get("absent") or ()),
        module_stream=parameters.get("module_stream") or "",
        driver=Driver(tuple(driver["modules"]), driver.get("conflicting_module") or "") if driver else None,
        devices=bool(parameters.get("devices")),
        images=tuple(parameters.get("images") or ()),
        section=parameters.get("section") or "",
    )


def filled(template: str, values: Mapping[str, str]) -> str:
    """``template`` with each placeholder replaced by its value."""
    for placeholder, value in values.items():
        template = template.replace(placeholder, value)
    return template
