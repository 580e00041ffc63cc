"""The pinned versions of pins.toml, typed."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Component:
    """One Go module tree in go/NAME/, and its build options."""

    name: str
    version: str
    cgo: bool = False
    tags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()
    libraries: str = field(default="", repr=False)
    """Another component: its modules are required in at least the same versions, so that they are compiled once."""

    @property
    def modules(self) -> tuple[Path, Path]:
        """Its go.mod and go.sum."""
        return HERE / "go" / self.name / "go.mod", HERE / "go" / self.name / "go.sum"

    @property
    def sources(self) -> tuple[Path, ...]:
        """The lab's own main packages, for components whose upstream main package includes too much."""
        return tuple(sorted(self.modules[0].parent.rglob("*.go")))


@dataclass(frozen=True)
class Minor:
    """A Kubernetes minor: its components, and the image tags that its kubeadm requires."""

    minor: str
    kubernetes: Component
    etcd: Component
    etcd_tag: str
    coredns: Component
    coredns_tag: str
    pause_tag: str
    etcd_step: Component | None = None
    """An etcd that all members must have before the first gets this minor's; None: any release of the minor before."""
    etcd_step_tag: str = ""

    @property
    def etcds(self) -> tuple[tuple[Component, str], ...]:
        """Each etcd with its image's tag."""
        step = ((self.etcd_step, self.etcd_step_tag),) if self.etcd_step else ()
        return ((self.etcd, self.etcd_tag), *step)


@dataclass(frozen=True)
class ExtraImage:
    """An image that only labs which request it have: of a component, or of Debian's packages."""

    name: str
    """Its path after the registry's host."""
    tag: str
    component: Component | None
    programs: Mapping[str, str]
    """The component's programs, and where the image has each; the first is the entrypoint."""
    entrypoint: bool
    packages: tuple[str, ...]
    wheel: str = ""
    """A Python package that Debian does not have, as a line of pip's requirements with its checksum."""


@dataclass(frozen=True)
class Pins:
    """All of pins.toml."""

    go_minimum: str
    go_wheel: str
    suites: Mapping[str, int]
    components: Mapping[str, Component]
    minors: Mapping[str, Minor]
    extras: Mapping[str, tuple[ExtraImage, ...]]
    pause_tags: tuple[str, ...]
    flannel_tag: str
    flannel_cni_plugin_tag: str
    busybox_tag: str
    node_packages: tuple[str, ...]
    image_packages: tuple[str, ...]
    busybox_package: str

    @property
    def image_suite(self) -> str:
        """The Debian suite of the programs in the container images."""
        return next(iter(self.suites))


@cache
def load() -> Pins:
    """Read pins.toml. Errors are not translated: a malformed file is a bug of this package."""
    raw = tomllib.loads((HERE / "pins.toml").read_text())
    components = {
        name: Component(
            name,
            entry["version"],
            entry.get("cgo", False),
            tuple(entry.get("tags", ())),
            tuple(entry.get("ldflags", ())),
            entry.get("libraries", ""),
        )
        for name, entry in raw["components"].items()
    }
    minors = {
        minor: Minor(
            minor,
            components[entry["kubernetes"]],
            components[entry["etcd"]],
            entry["etcd_tag"],
            components[entry["coredns"]],
            entry["coredns_tag"],
            entry["pause_tag"],
            components[entry["etcd_step"]] if "etcd_step" in entry else None,
            entry.get("etcd_step_tag", ""),
        )
        for minor, entry in raw["minors"].items()
    }
    return Pins(
        go_minimum=raw["toolchain"]["minimum"],
        go_wheel=raw["toolchain"]["wheel"],
        suites=raw["suites"],
        components=components,
        minors=minors,
        extras={name: tuple(_extra(each, components) for each in entries) for name, entries in raw["extras"].items()},
        pause_tags=tuple(raw["images"]["pause_tags"]),
        flannel_tag=raw["images"]["flannel_tag"],
        flannel_cni_plugin_tag=raw["images"]["flannel_cni_plugin_tag"],
        busybox_tag=raw["images"]["busybox_tag"],
        node_packages=tuple(raw["debian"]["packages"]),
        image_packages=tuple(raw["debian"]["image_packages"]),
        busybox_package=raw["debian"]["busybox_package"],
    )


def _extra(entry: Mapping[str, Any], components: Mapping[str, Component]) -> ExtraImage:
    return ExtraImage(
        entry["image"],
        entry["tag"],
        components[entry["component"]] if "component" in entry else None,
        entry.get("programs", {}),
        entry.get("entrypoint", True),
        tuple(entry.get("packages", ())),
        entry.get("wheel", ""),
    )
