"""The add-ons of a cluster: what an update would change, and the table of optional ones. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpunodes.errors import WrongInput
from gpunodes.planner import load_balancer, tables
from gpunodes.planner.upgrade_model import image_parts


@dataclass(frozen=True, slots=True)
class PlannedAddon:
    """A DaemonSet of an add-on that is installed."""

    name: str
    wanted: Sequence[str]
    """Its images in this gpunodes."""
    running: Mapping[str, int]
    """The number of nodes by image."""
    changes: Sequence[str]
    """Objects of the add-on that would change."""
    behind: Sequence[str]
    """Nodes whose pod is of an earlier version or does not run."""

    @property
    def needed(self) -> bool:
        """Whether there is anything to update, or to wait for."""
        return bool(self.changes or self.behind)


def planned(report: Mapping[str, Any]) -> PlannedAddon:
    """The add-on of a row of the result of addon_pending, whose form was checked."""
    return PlannedAddon(report["name"], report["wanted"], report["running"], report["changes"], report["behind"])


@dataclass(frozen=True, slots=True)
class Addon:
    """An optional add-on: a row of the table addons."""

    name: str
    purpose: str
    version: str
    licence: str
    source: str
    namespace: str
    run: str
    """How far it was tried."""
    why: str = ""
    """Why not further."""
    images: Mapping[str, str] = field(default_factory=dict)
    """By their names in its template."""
    manifest: str = ""
    """Where its objects come from if it has no template."""
    workload: str = ""
    """Kind and name of the workload that these objects must have."""
    requires: Mapping[str, Any] = field(default_factory=dict)
    """Settings with the values that they must have."""
    settings: Sequence[str] = ()
    """Settings that its template uses."""
    needed: Sequence[str] = ()
    """Those of them that must not be empty."""
    proof: Mapping[str, Any] = field(default_factory=dict)
    """What is queried after its workloads run."""
    uses: Sequence[Mapping[str, Any]] = ()
    """Objects that forbid its removal."""
    argument: Mapping[str, str] = field(default_factory=dict)
    """One that API servers must have: ``name``, and ``setting``, by which it is decided when the cluster is made."""
    network: bool = False
    """Whether it is the network of pods."""

    @property
    def obtaining(self) -> str:
        """How to get the file for ``manifest``."""
        is_address = self.manifest.startswith("https://")
        return f"download {self.manifest}" if is_address else f"make it: {self.manifest} > FILE"


@dataclass(frozen=True, slots=True)
class Change:
    """What was done to an optional add-on."""

    objects: Sequence[str]
    """Those that changed, or with ``dry_run`` would change."""
    idle: Sequence[str] = ()
    """Its DaemonSets for which the cluster has no node."""


def optional() -> dict[str, Addon]:
    """The table of optional add-ons."""
    return {name: Addon(name, **row) for name, row in tables.read("addons").items()}


def chosen(name: str) -> Addon:
    """The optional add-on ``name``; raises WrongInput for another name."""
    if found := optional().get(name):
        return found
    raise WrongInput(f"{name!r} is no optional add-on", f"one of {', '.join(optional())}", "see `gpunodes addon list`")


def version_of(addon: Addon, objects: Sequence[Mapping[str, Any]]) -> str:
    """The version of the objects of a file, "unknown" if the tags of its images do not say it.

    Raises WrongInput for objects of something else, or of another version.
    """
    kind, name = addon.workload.split()
    found = [
        each
        for each in objects
        if (each["kind"], each["metadata"]["name"], each["metadata"].get("namespace")) == (kind, name, addon.namespace)
    ]
    wanted = f"the objects of {addon.name} {addon.version}"
    if not found:
        raise WrongInput(f"the file has no {addon.workload} in {addon.namespace}", wanted, addon.obtaining)
    versions = [tag for each in found for tag in _tags(each) if re.match(r"v?[0-9]+\.[0-9]", tag)]
    if addon.version.removeprefix("v") in {tag.removeprefix("v") for tag in versions}:
        return addon.version
    if versions:
        raise WrongInput(f"the file has version {versions[0]} of {addon.workload}", wanted, addon.obtaining)
    return "unknown"


def _tags(workload: Mapping[str, Any]) -> list[str]:
    """The tags of the images of a workload; a file of a user may have any form."""
    spec: Any = workload
    for key in ("spec", "template", "spec", "containers"):
        spec = spec.get(key) if isinstance(spec, Mapping) else None
    containers = spec if isinstance(spec, list) else []
    return [image_parts(str(each.get("image")))[1] for each in containers if isinstance(each, Mapping)]


def images_of(addon: Addon, replaced: Mapping[str, Any]) -> dict[str, str]:
    """Its images, with those of the setting gpunodes_addon_images; raises WrongInput for one that no add-on has."""
    known = {f"{each.name}/{image}" for each in optional().values() for image in each.images}
    if unknown := sorted(set(replaced) - known):
        raise WrongInput(
            f"gpunodes_addon_images has {', '.join(unknown)}", f"names among {', '.join(sorted(known))}", "correct it"
        )
    return {key: str(replaced.get(f"{addon.name}/{key}", image)) for key, image in addon.images.items()}


def values_of(addon: Addon, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for its template; addresses as networks. Call it where ``refusal`` has nothing to say."""
    forms = {load_balancer.SETTING: load_balancer.blocks}
    return {key: forms.get(key, lambda value: value)(settings[key]) for key in addon.settings}


def refusal(addon: Addon, settings: Mapping[str, Any], cluster: Sequence[str] = ()) -> WrongInput | None:
    """Why the settings of the cluster forbid the add-on, None if they do not.

    ``cluster``: the addresses of its nodes and of its API, as far as they are known.
    """
    for key in addon.needed:
        if not settings[key]:
            return WrongInput(
                f"{addon.name} needs the setting {key}, which is empty", _WANTED[key], "set it for the whole cluster"
            )
    for key, wanted in addon.requires.items():
        given, shown = (str(each).lower() for each in (settings[key], wanted))
        # An INI inventory has texts.
        if ("true" if given in {"yes", "on", "1"} else given) != shown:
            return WrongInput(
                f"{addon.name} needs another value of the setting {key}, which is {given}",
                f"{key}: {shown}",
                "that is decided when a cluster is made: leave the add-on out, or make the cluster again",
            )
    if (addresses := load_balancer.SETTING) in addon.settings:
        given = settings[addresses]
        if not load_balancer.is_valid(given):
            return WrongInput(f"{addresses} is {given!r}", load_balancer.WANTED, "correct it")
        own = [str(settings[f"gpunodes_{each}_subnet"]) for each in ("pod", "service")]
        own.append(str(settings["gpunodes_control_plane_vip"]))
        if found := load_balancer.clash(given, cluster, own):
            return WrongInput(
                f"{addresses} contains {found}, which the cluster itself has",
                "addresses that nobody has",
                "correct it",
            )
    return None


_WANTED = {load_balancer.SETTING: load_balancer.WANTED}
