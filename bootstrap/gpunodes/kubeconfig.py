"""Takes from a control plane's kubeconfig only the cluster's address and the administrator's credentials.

A kubeconfig can also name programs and files for kubectl: an attacker on a control-plane machine must not be able to
run or read them on the user's machine.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import yaml

from gpunodes.ansible.module_utils.kubeconfig import ADMIN, ca_hash
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.errors import GpunodesError

OWN_PREFIX = "gpunodes-"
"""The start of the names of all entries that gpunodes makes."""
_CLUSTER = frozenset({"server", "certificate-authority-data"})
_USER = frozenset({"client-certificate-data", "client-key-data"})


def from_control_plane(text: str | bytes, machine: str, name: str = "") -> dict[str, Any]:
    """The kubeconfig ``text`` of a control-plane machine as ``reduced`` gives it; raises GpunodesError."""
    try:
        document = parse_yaml(text)
    except ValueError:
        raise _invalid(machine, "is not valid YAML") from None
    return reduced(document, machine, name)


def ca_hash_of(document: Mapping[str, Any]) -> str:
    """The hash of the CA in a kubeconfig that ``reduced`` gave, "" for an invalid certificate."""
    pem = base64.b64decode(document["clusters"][0]["cluster"]["certificate-authority-data"])
    try:
        return ca_hash(pem.decode("ascii", "replace"))
    except MachineProblem:
        return ""


def parse_yaml(text: str | bytes) -> Any:
    """Parsed YAML from another machine; raises ValueError for invalid YAML, whatever error PyYAML raises.

    PyYAML's errors quote the text, which contains a private key: they are therefore never chained.
    """
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"not valid YAML: {type(error).__name__}") from None


def reduced(document: Any, machine: str, name: str = "") -> dict[str, Any]:
    """The kubeconfig of a control-plane machine, reduced to the cluster's address, the certificates and the key.

    kubeadm names every cluster `kubernetes`; to merge several into one file, they get their own names, from ``name`` or
    that of the machine. Raises GpunodesError if the kubeconfig contains anything else, such as programs or files for
    kubectl.
    """
    name = f"{OWN_PREFIX}{name or machine}"
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": _part(document, machine, "cluster", _CLUSTER)}],
        "users": [{"name": name, "user": _part(document, machine, "user", _USER)}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }


def _part(document: Any, machine: str, kind: str, fields: frozenset[str]) -> dict[str, str]:
    """The only cluster or user of a kubeconfig, which must have exactly these fields."""
    entries = document.get(f"{kind}s") if isinstance(document, dict) else None
    entry = entries[0] if isinstance(entries, list) and len(entries) == 1 else None
    part = entry.get(kind) if isinstance(entry, dict) else None
    if not isinstance(part, dict) or not all(isinstance(key, str) for key in part):
        raise _invalid(machine, f"does not have exactly one {kind}")
    if unexpected := sorted(part.keys() - fields):
        raise _invalid(machine, f"has unexpected fields in its {kind}: {', '.join(unexpected)!a}")
    for key in sorted(fields):
        value = part.get(key)
        if not isinstance(value, str) or not (_is_url(value) if key == "server" else _is_pem(value)):
            raise _invalid(machine, f"has no valid {key}")
    return {key: part[key] for key in sorted(fields, reverse=True)}


def _is_url(text: str) -> bool:
    return text.startswith("https://") and text.isascii() and text.isprintable()


def _is_pem(text: str) -> bool:
    try:
        return base64.b64decode(text, validate=True).startswith(b"-----BEGIN ")
    except (binascii.Error, ValueError):
        return False


def _invalid(machine: str, found: str) -> GpunodesError:
    return GpunodesError(
        f"{ADMIN} of {machine} {found}",
        f"only the fields that kubeadm writes: {', '.join(sorted(_CLUSTER | _USER))}",
        f"check the file on {machine}; nothing was written on the controller",
    )
