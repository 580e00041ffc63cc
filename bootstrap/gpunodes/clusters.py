"""The clusters that this controller knows: the key of each one's history, its control planes' addresses, and its CA.

The key of a cluster is the address of the control plane that its inventory named first when it was first seen. It
stays when that machine is replaced: an inventory that names any known control plane gets the same key. One private
file; a cluster with one control plane needs no entry. An inventory without control planes is its own key; its entry has
the uid of the cluster that a kubeconfig led to.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpunodes.errors import GpunodesError
from gpunodes.settings import state_home
from gpunodes.shape import Many, Optional, wrong

_FILE = "clusters.json"
_ENTRY = {"key": str, "addresses": Many(str, 1000), "ca": str, "uid": Optional(str)}
_SHAPE = {"clusters": Many(_ENTRY, 100_000)}
_Entries = list[dict[str, Any]]


def key(addresses: Sequence[str]) -> str:
    """The key of the cluster whose control planes have these addresses, in the inventory's order; records new ones.

    Raises GpunodesError for a file that cannot be read: under another key, the history of its machines is missing.
    """
    entries = _read()
    found = _of(entries, addresses)
    if found is not None and set(addresses) <= set(found["addresses"]):
        return str(found["key"])
    if found is None and len(addresses) == 1 and addresses[0] not in _keys(entries):
        return addresses[0]

    def change(known: _Entries) -> str:
        entry = _of(known, addresses)
        if entry is None:
            entry = {"key": _new_key(addresses[0], known), "addresses": [], "ca": ""}
            known.append(entry)
        # An address that left a cluster may become that of another one.
        entry["addresses"] = list(addresses)
        return str(entry["key"])

    return _change(change, change(entries))


def ca(cluster: str) -> str:
    """The hash of the CA that the cluster with this key had last, "" if it is not known."""
    return next((str(entry["ca"]) for entry in _read() if entry["key"] == cluster), "")


def remember_ca(cluster: str, found: str) -> None:
    """Record the hash of the CA of a cluster with several control planes."""

    def change(known: _Entries) -> str:
        for entry in known:
            if entry["key"] == cluster:
                entry["ca"] = found
        return found

    _change(change, found)


def confirm(cluster: str, uid: str) -> bool:
    """Whether the cluster with this key has this uid, of its namespace kube-system; one without a uid gets it.

    For clusters that are reached by a kubeconfig: the CA in it need not be the cluster's, and a CA is renewed.
    """

    def change(known: _Entries) -> str:
        entry = next((each for each in known if each["key"] == cluster), None)
        if entry is None:
            entry = {"key": cluster, "addresses": [], "ca": ""}
            known.append(entry)
        return str(entry.setdefault("uid", uid))

    return _change(change, change(_read())) == uid


def _of(entries: _Entries, addresses: Sequence[str]) -> dict[str, Any] | None:
    """The entry with one of these addresses; that of the first one if several have."""
    return next((entry for each in addresses for entry in entries if each in entry["addresses"]), None)


def _keys(entries: Sequence[Mapping[str, Any]]) -> set[str]:
    return {str(entry["key"]) for entry in entries}


def _new_key(address: str, entries: _Entries) -> str:
    """A key that no other cluster has: an earlier cluster may have begun at this address, and have left it."""
    used, number, new = _keys(entries), 1, address
    while new in used:
        number += 1
        new = f"{address} {number}"
    return new


def _change(change: Callable[[_Entries], str], otherwise: str) -> str:
    """Change the file under a lock; ``otherwise`` if it cannot be written, since the command must not fail."""
    path = _path()
    with contextlib.suppress(OSError):
        lock = os.open(path.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            entries = _read()
            before = json.dumps(entries)
            result = change(entries)
            if json.dumps(entries) != before:
                partial = path.with_suffix(".new")
                descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    json.dump({"clusters": entries}, file, indent=1)
                partial.replace(path)
            return result
        finally:
            os.close(lock)
    return otherwise


def _read() -> _Entries:
    path = _path()
    document: Any = None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise GpunodesError(f"{path} cannot be read: {error.strerror}", "the clusters of this controller") from error
    except (ValueError, RecursionError):
        pass
    if wrong(document, _SHAPE):
        raise GpunodesError(
            f"{path} does not list the clusters of this controller",
            "the file that gpunodes wrote",
            "restore it, or remove it: the first control plane of each inventory then names its history",
        )
    entries: _Entries = document["clusters"]
    return entries


def _path() -> Path:
    return state_home() / _FILE
