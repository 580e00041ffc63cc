"""Fetch the administrator's kubeconfig, and merge it into the user's. It never lies in a file wider than 0600."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gpunodes.engine import journal, shell
from gpunodes.engine.cluster import ADMIN
from gpunodes.engine.events import ssh_reason
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.inventory import Inventory

_DEADLINE_S = 60.0
_READ = f"if [ -e {ADMIN} ]; then exec cat {ADMIN}; else echo there is no {ADMIN}: it runs no cluster >&2; exit 1; fi"
_CLUSTER = frozenset({"server", "certificate-authority-data"})
_USER = frozenset({"client-certificate-data", "client-key-data"})


def fetch(inventory: Inventory) -> dict[str, Any]:
    """The cluster's kubeconfig, its entries named after the cluster; raises GpunodesError when it cannot be had.

    It comes over SSH into memory: what is in no file cannot be left in one.
    """
    journal.discard_secrets()
    control = inventory.control_plane()
    variables = inventory.connection(control.name)
    said = shell.run(
        control.address,
        variables,
        shell.remote(["sh", "-c", _READ], variables),
        deadline_s=_DEADLINE_S,
        stdin=shell.for_sudo(variables).encode(),
    )
    text = shell.unframed(said.out) if said.ok else None
    if text is None:
        raise GpunodesError(
            f"{control.name}: {ssh_reason(said.err) or 'no kubeconfig came'}",
            "a control plane that answers on SSH, and sudo there",
            f"`gpunodes init-master {control.name}` makes one",
        )
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _odd(control.name, "is no YAML") from error
    return renamed(document, control.name)


def renamed(document: Any, machine: str) -> dict[str, Any]:
    """What says where the cluster is and who we are, out of the kubeconfig of a control-plane machine.

    kubeadm calls every cluster `kubernetes`; two of them in one file need names of their own. Raises GpunodesError for
    anything but certificates and a key: a kubeconfig may also name programs that kubectl runs, and files that it
    reads.
    """
    name = f"gpunodes-{machine}"
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": _part(document, machine, "cluster", _CLUSTER)}],
        "users": [{"name": name, "user": _part(document, machine, "user", _USER)}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }


def _part(document: Any, machine: str, kind: str, wanted: frozenset[str]) -> dict[str, str]:
    """The only cluster or user of a kubeconfig, which has just these fields."""
    entries = document.get(f"{kind}s") if isinstance(document, dict) else None
    entry = entries[0] if isinstance(entries, list) and len(entries) == 1 else None
    part = entry.get(kind) if isinstance(entry, dict) else None
    if not isinstance(part, dict) or not all(isinstance(key, str) for key in part):
        raise _odd(machine, f"has not one {kind}")
    if more := sorted(part.keys() - wanted):
        raise _odd(machine, f"gives its {kind} {', '.join(more)!a}")
    for key in sorted(wanted):
        value = part.get(key)
        if not isinstance(value, str) or not (_is_url(value) if key == "server" else _is_pem(value)):
            raise _odd(machine, f"has no {key} that can be used")
    return {key: part[key] for key in sorted(wanted, reverse=True)}


def _is_url(text: str) -> bool:
    return text.startswith("https://") and text.isascii() and text.isprintable()


def _is_pem(text: str) -> bool:
    try:
        return base64.b64decode(text, validate=True).startswith(b"-----BEGIN ")
    except (binascii.Error, ValueError):
        return False


def _odd(machine: str, found: str) -> GpunodesError:
    return GpunodesError(
        f"{ADMIN} of {machine} {found}",
        f"what kubeadm writes: {', '.join(sorted(_CLUSTER | _USER))}",
        f"look at it on {machine}; nothing was written here",
    )


def merged(existing: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, Any]:
    """``existing`` with the entries of ``new``; an entry of the same name is replaced, all else stays."""
    result: dict[str, Any] = {"apiVersion": "v1", "kind": "Config", **(existing or {})}
    for key in ("clusters", "users", "contexts"):
        names = {entry["name"] for entry in new[key]}
        result[key] = [entry for entry in result.get(key) or [] if entry["name"] not in names] + list(new[key])
    result["current-context"] = new["current-context"]
    return result


def user_file() -> Path:
    """Where kubectl looks: the first file of $KUBECONFIG, by default ~/.kube/config."""
    named = [part for part in os.environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    return Path(named[0]) if named else Path.home() / ".kube/config"


def write(path: Path, document: Mapping[str, Any], *, merge: bool) -> None:
    """Write ``document`` to ``path`` (0600, in one step), or merge it into what is there."""
    if merge and path.exists():
        try:
            existing = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
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
