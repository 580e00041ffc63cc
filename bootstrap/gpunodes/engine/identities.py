"""The identities that machines reported last, for machines that do not respond: one private file for each cluster."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpunodes.errors import GpunodesError
from gpunodes.identity.model import MachineIdentity, reported
from gpunodes.settings import state_home


def remember(cluster: str, facts: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Save the identities in these facts (of the probe, or results of ``host_facts``), by machine name; 0600.

    A value that the same installation does not report this time stays (a probe without root reads no UUID). An error of
    the disk is ignored, and a file that cannot be read stays unchanged: the command must not fail.
    """
    found = {name: _entry(reported(name, "", each)) for name, each in facts.items() if each}
    if found:
        with contextlib.suppress(OSError, GpunodesError):
            _remember(_path(cluster), found)


def _entry(machine: MachineIdentity) -> dict[str, Any]:
    """The entry of an identity in the file, with the keys of the facts."""
    entry = {
        "hostname": machine.hostname,
        "boot_id": machine.boot_id,
        "machine_id": machine.machine_id,
        "product_uuid": machine.system_uuid,
        "product_serial": machine.serial,
        "macs": list(machine.macs),
        "default_address": "".join(machine.addresses[:1]),
        "addresses": list(machine.addresses[1:]),
    }
    # A machine that reports addresses reports all of them: none of an earlier record stays.
    return {key: value for key, value in entry.items() if value or (key == "addresses" and machine.addresses)}


def _remember(path: Path, found: Mapping[str, dict[str, Any]]) -> None:
    lock = os.open(path.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = _read(path)
        for name, entry in found.items():
            before = known.get(name, {})
            known[name] = {**before, **entry} if before.get("machine_id") == entry.get("machine_id") else entry
        partial = path.with_suffix(".new")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(known, file, indent=1, sort_keys=True)
        partial.replace(path)
    finally:
        os.close(lock)


def recall(cluster: str, name: str, address: str) -> MachineIdentity:
    """The last reported identity of a machine; only its name and address when there is no record."""
    return recall_all(cluster, {name: address})[name]


def recall_all(cluster: str, addresses: Mapping[str, str]) -> dict[str, MachineIdentity]:
    """The last reported identities of machines with these names and addresses.

    Raises GpunodesError for a file that cannot be read: without it, only the name identifies a dead machine.
    """
    known = _read(_path(cluster))
    return {name: reported(name, address, known.get(name), responded=False) for name, address in addresses.items()}


def _read(path: Path) -> dict[str, dict[str, Any]]:
    document: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise GpunodesError(
                f"{path} cannot be read: {error.strerror}", "the identities that machines reported last"
            ) from error
    if not isinstance(document, dict):
        raise GpunodesError(
            f"{path} holds no identities of machines",
            "the file that gpunodes wrote",
            "restore it, or remove it: gpunodes records identities again when machines respond",
        )
    return {name: entry for name, entry in document.items() if isinstance(entry, dict)}


def _path(cluster: str) -> Path:
    folder = state_home() / "identities"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{hashlib.sha256(cluster.encode()).hexdigest()[:12]}.json"
