"""What of a control plane's kubeconfig reaches the user: where the cluster is, and who we are.

Who has a control-plane machine would else have what kubectl runs, and reads, on the user's.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import yaml

from gpunodes.ansible.module_utils.gpunodes.kubeconfig import ADMIN
from gpunodes.errors import GpunodesError

_CLUSTER = frozenset({"server", "certificate-authority-data"})
_USER = frozenset({"client-certificate-data", "client-key-data"})


def taken(text: str | bytes, machine: str) -> dict[str, Any]:
    """The kubeconfig ``text`` of a control-plane machine as ``renamed`` gives it; raises GpunodesError."""
    try:
        document = parsed(text)
    except ValueError:
        raise _odd(machine, "is no YAML") from None
    return renamed(document, machine)


def parsed(text: str | bytes) -> Any:
    """YAML from elsewhere; raises ValueError for what is none, also where PyYAML fails in another way.

    PyYAML's own errors quote the text, of which a part is a key: no error of ours leads to one of them.
    """
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"no YAML: {type(error).__name__}") from None


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
