"""What machines last reported of their identity: one private file for each cluster, for when they do not answer."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpunodes.ansible.module_utils.gpunodes.identity import MachineIdentity, reported
from gpunodes.errors import GpunodesError
from gpunodes.settings import state_home


def remember(cluster: str, facts: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Keep what these machines report now (the probe's facts, or results of ``host_facts``), by name; 0600.

    What an installation does not report this time (a probe without root has no UUID) stays as it was. A disk that is
    full costs the record, not the command; so does a file that cannot be read, which stays as it is.
    """
    found = {name: _entry(reported(name, "", each)) for name, each in facts.items() if each}
    if found:
        with contextlib.suppress(OSError, GpunodesError):
            _remember(_path(cluster), found)


def _entry(machine: MachineIdentity) -> dict[str, Any]:
    """What of an identity is kept, under the names that machines report it by."""
    entry = {
        "hostname": machine.hostname,
        "boot_id": machine.boot_id,
        "machine_id": machine.machine_id,
        "product_uuid": machine.system_uuid,
        "product_serial": machine.serial,
        "macs": list(machine.macs),
        "default_address": "".join(machine.addresses),
    }
    return {key: value for key, value in entry.items() if value}


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
    """A machine by what it last reported; by its name and address alone where nothing is recorded."""
    return recall_all(cluster, {name: address})[name]


def recall_all(cluster: str, addresses: Mapping[str, str]) -> dict[str, MachineIdentity]:
    """The machines of these names and addresses, each by what it last reported.

    Raises GpunodesError for a record that cannot be read: without it a dead machine would go by its name alone.
    """
    known = _read(_path(cluster))
    return {name: reported(name, address, known.get(name), answered=False) for name, address in addresses.items()}


def _read(path: Path) -> dict[str, dict[str, Any]]:
    read: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise GpunodesError(f"{path} cannot be read: {error.strerror}", "what machines last reported") from error
    if not isinstance(read, dict):
        raise GpunodesError(
            f"{path} holds no identities of machines",
            "what machines last reported, as gpunodes wrote it",
            "restore it, or remove it: machines are known again when they answer",
        )
    return {name: entry for name, entry in read.items() if isinstance(entry, dict)}


def _path(cluster: str) -> Path:
    folder = state_home() / "identities"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{hashlib.sha256(cluster.encode()).hexdigest()[:12]}.json"
