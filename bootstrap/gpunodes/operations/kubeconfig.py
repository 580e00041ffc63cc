"""Fetch the administrator's kubeconfig, and merge it into the user's. It is only written to files of mode 0600."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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
from gpunodes.kubeconfig import ca_hash_of, from_control_plane, parse_yaml
from gpunodes.model import Machine

_DEADLINE_S = 60.0
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
    """``existing`` with the entries of ``new``; entries of the same name are replaced, all others stay."""
    result: dict[str, Any] = {"apiVersion": "v1", "kind": "Config", **(existing or {})}
    for key in ("clusters", "users", "contexts"):
        names = {entry["name"] for entry in new[key]}
        result[key] = [entry for entry in result.get(key) or [] if entry["name"] not in names] + list(new[key])
    result["current-context"] = new["current-context"]
    return result


def user_file() -> Path:
    """The file that kubectl uses: the first in $KUBECONFIG, by default ~/.kube/config."""
    named = [part for part in os.environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    return Path(named[0]) if named else Path.home() / ".kube/config"


def write(path: Path, document: Mapping[str, Any], *, merge: bool) -> None:
    """Write ``document`` to ``path`` (atomically, mode 0600), or merge it into the existing file."""
    if merge and path.exists():
        try:
            existing = parse_yaml(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise WrongInput(f"{path} is not valid YAML", "a kubeconfig", "correct it, or use --output") from error
        if existing is not None and not isinstance(existing, dict):
            raise WrongInput(f"{path} is not a mapping", "a kubeconfig", "correct it, or use --output")
        document = merged(existing, document)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        yaml.safe_dump(dict(document), file, sort_keys=False)
    partial.replace(path)
