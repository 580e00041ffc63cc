"""Fetch the administrator's kubeconfig, and merge it into the user's. It is only written to files of mode 0600."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gpunodes import clusters
from gpunodes.engine import control_planes, journal
from gpunodes.engine.cluster.connection import ADMIN
from gpunodes.engine.events import ssh_reason
from gpunodes.engine.remote import answers, commands, shell
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.kubeconfig import OWN_PREFIX, ca_hash_of, from_control_plane, parse_yaml
from gpunodes.model import Machine

_DEADLINE_S = 60.0
_CA = "certificate-authority-data"
_NO_CLUSTER = f"{ADMIN} does not exist: not a control plane"
_READ = f"if [ -e {ADMIN} ]; then exec cat {ADMIN}; else echo {_NO_CLUSTER} >&2; exit 1; fi"


def fetch(inventory: Inventory, warn: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The cluster's kubeconfig with entries named after its first control plane; raises GpunodesError if none has it.

    It is read over SSH into memory, so no temporary file can be left behind. ``warn`` is called for each control plane
    that does not have it, while another one does.
    """
    journal.discard_secrets()
    first, failed = inventory.control_planes()[0], list[GpunodesError]()
    chosen = control_planes.choose(inventory)
    for name, why in chosen.failures:
        warn(f"{name} does not respond as a control plane: {why}")
    # That whose API responds, then those that may still be readable.
    for control in dict.fromkeys([chosen.machine, *inventory.control_planes()]):
        try:
            found = _fetch(inventory, control, first.name)
        except GpunodesError as error:
            failed.append(error)
            continue
        for each in failed:
            warn(each.problem.found)
        return found
    raise failed[0]


def _fetch(inventory: Inventory, control: Machine, name: str) -> dict[str, Any]:
    """The kubeconfig of one control plane, with entries of this name."""
    variables = inventory.connection(control.name)
    result = shell.run(
        control.address,
        variables,
        commands.remote(["sh", "-c", _READ], variables),
        deadline_s=_DEADLINE_S,
    )
    text = answers.unframed(result.out) if result.ok else None
    if text is None:
        if _NO_CLUSTER in result.err:
            remedy = f"`gpunodes init-master {control.name}` creates one"
        else:
            remedy = "start the machine, or correct its address, SSH and sudo settings in the inventory"
        raise GpunodesError(
            f"{control.name}: {ssh_reason(result.err) or 'no kubeconfig received'}",
            "a control plane that is reachable by SSH, with sudo",
            remedy,
        )
    found = from_control_plane(text, control.name, name)
    known = clusters.ca(inventory.cluster) if len(inventory.control_planes()) > 1 else ""
    if known and ca_hash_of(found) != known:
        raise GpunodesError(
            f"{control.name} belongs to another cluster",
            "a machine of the cluster that this inventory had before",
            "remove it from the group control_plane, or reset it",
        )
    return found


def merged(existing: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, Any]:
    """``existing`` with the entries of ``new``; entries of the same name are replaced, all others stay.

    Raises WrongInput for lists that are none.
    """
    result: dict[str, Any] = {"apiVersion": "v1", "kind": "Config", **(existing or {})}
    for key in ("clusters", "users", "contexts"):
        names, before = {entry["name"] for entry in new[key]}, result.get(key) or []
        if not isinstance(before, list):
            raise WrongInput(f"{key} of the kubeconfig is no list", "a kubeconfig", "correct it, or use --output")
        result[key] = [entry for entry in before if _name(entry) not in names] + list(new[key])
    result["current-context"] = new["current-context"]
    return result


@dataclass(frozen=True, slots=True)
class Merged:
    """What gpunodes merged into the user's kubeconfig for one cluster: the names of its entries."""

    path: Path
    clusters: Collection[str]
    contexts: Collection[str]
    users: Collection[str]


def find_merged(inventory: Inventory) -> Merged | None:
    """What `kubeconfig --merge` wrote for the inventory's cluster into the user's file; None if there is nothing.

    Entries have the prefix of gpunodes and the CA of the cluster, for which its control plane is asked; their server
    may be that of before `endpoint set`. Raises GpunodesError if it does not respond, while the file has such entries.
    """
    path = user_file()
    try:
        document = _existing(path)
    except (OSError, WrongInput):
        return None
    if not any(name.startswith(OWN_PREFIX) for name in _entries(document, "cluster")):
        return None
    found = merged_for(document, fetch(inventory)["clusters"][0]["cluster"][_CA])
    return dataclasses.replace(found, path=path) if found.contexts else None


def merged_for(document: Mapping[str, Any], ca: str) -> Merged:
    """The entries of a kubeconfig that gpunodes made for the cluster of this CA; none that one of the user needs."""
    named = {
        name for name, each in _entries(document, "cluster").items() if isinstance(each, dict) and each.get(_CA) == ca
    }
    contexts = _entries(document, "context")
    own = {
        name
        for name, each in contexts.items()
        if name.startswith(OWN_PREFIX) and isinstance(each, dict) and each.get("cluster") in named
    }
    kept = [each for name, each in contexts.items() if name not in own and isinstance(each, dict)]
    users = {str(contexts[name].get("user")) for name in own} - {each.get("user") for each in kept}
    return Merged(
        Path(),
        {str(contexts[name]["cluster"]) for name in own} - {each.get("cluster") for each in kept},
        own,
        {name for name in users if name.startswith(OWN_PREFIX)},
    )


def forget(merged: Merged) -> None:
    """Take these entries out of the user's kubeconfig; everything else stays as it is."""
    document = dict(_existing(merged.path))
    for kind in ("clusters", "contexts", "users"):
        gone, listed = getattr(merged, kind), document.get(kind)
        if isinstance(listed, list):
            document[kind] = [each for each in listed if _name(each) not in gone]
    if document.get("current-context") in merged.contexts:
        document["current-context"] = ""
    _replace(_behind_links(merged.path), document)


def _entries(document: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The clusters, contexts or users of a kubeconfig by name."""
    listed = document.get(f"{kind}s")
    return {_name(each): each.get(kind) for each in listed if _name(each)} if isinstance(listed, list) else {}


def _name(entry: Any) -> str:
    return str(entry.get("name") or "") if isinstance(entry, dict) else ""


def user_file() -> Path:
    """The file that kubectl uses: the first in $KUBECONFIG, by default ~/.kube/config."""
    named = [part for part in os.environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    return Path(named[0]) if named else Path.home() / ".kube/config"


def write(path: Path, document: Mapping[str, Any], *, merge: bool) -> None:
    """Write ``document`` to ``path`` (atomically, mode 0600), or merge it into that file, which may be a link."""
    if merge:
        path = _behind_links(path)
    if merge and path.exists():
        document = merged(_existing(path), document)
    _replace(path, document)


def _behind_links(path: Path) -> Path:
    # Path.resolve raises for a link that leads to itself.
    return Path(os.path.realpath(path))


def _existing(path: Path) -> dict[str, Any]:
    """The user's kubeconfig; raises WrongInput for another file, and OSError."""
    try:
        existing = parse_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WrongInput(f"{path} is not valid YAML", "a kubeconfig", "correct it, or use --output") from error
    if existing is not None and not isinstance(existing, dict):
        raise WrongInput(f"{path} is not a mapping", "a kubeconfig", "correct it, or use --output")
    return existing or {}


def _replace(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        yaml.safe_dump(dict(document), file, sort_keys=False)
    partial.replace(path)
