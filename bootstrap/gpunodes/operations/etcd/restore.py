"""Replace the state of a cluster by that of a backup.

The file is checked to its last byte before anything is touched. Then its snapshot goes to the first control plane, and
the playbook stops all of them and restores that one. The others are reset and joined again afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpunodes import shape
from gpunodes.ansible.module_utils import lock
from gpunodes.engine import encryption
from gpunodes.engine.remote import stream
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.operations import nodes, phases, preflight
from gpunodes.operations.etcd import archive
from gpunodes.operations.run import Operation

OPERATION = Operation(
    name="etcd restore",
    playbook="etcd_restore.yml",
    phases=(phases.ETCD_STOPPED, phases.ETCD_RESTORED),
    ends_cluster=True,
    replaces_objects=True,
)
ABORT = replace(OPERATION, playbook="etcd_restore_abort.yml", phases=(phases.ETCD_RESTORE_ABORTED,))
_HASH_S = 900.0 + lock.WAIT_S
"""Seconds in which a machine must have computed the SHA-256 of a snapshot, after a run that still changes it."""
_PROGRESS_S = 2.0
_ANSWERS = (
    {"state": shape.one_of("present", "send")},
    {"error": {"found": str, "wanted": str, "remedy": str}},
)


@dataclass(frozen=True, slots=True)
class Source:
    """The file of a backup, and age's identity file if it is encrypted with age."""

    path: Path
    identity: Path | None = None

    def check(self) -> archive.Backup:
        """Read all of it; raises WrongInput, and GpunodesError if it cannot be decrypted."""
        return self._read(lambda _: None)

    def _read(self, on_snapshot: Callable[[bytes], None]) -> archive.Backup:
        try:
            with encryption.opened(self.path, self.identity) as plain:
                return archive.check(plain, str(self.path), on_snapshot)
        except OSError as error:
            raise WrongInput(
                f"{self.path} cannot be read: {error.strerror}", "a file of `gpunodes etcd backup`", "name another one"
            ) from error

    def send(self, backup: archive.Backup, target: stream.Stream, progress: Callable[[str], None]) -> None:
        """Send the snapshot of this file, which must still be the one of ``backup``."""
        done, last = 0, time.monotonic()

        def write(data: bytes) -> None:
            nonlocal done, last
            # The file may be another one by now: never more than the machine waits for.
            if done + len(data) > backup.snapshot.size:
                raise WrongInput(f"{self.path} has changed", "a file that stays as it is", "run the command again")
            target.write(data)
            done += len(data)
            if time.monotonic() - last > _PROGRESS_S:
                last = time.monotonic()
                progress(f"sent {done >> 20} of {backup.snapshot.size >> 20} MiB")

        if self._read(write) != backup:
            raise WrongInput(f"{self.path} has changed", "a file that stays as it is", "run the command again")


def check_all_respond(seen: preflight.Inspection) -> None:
    """Raise GpunodesError unless all control planes responded: an etcd that still runs would be a second cluster."""
    silent = {each.name: each.unreachable for each in seen.candidates if each.facts is None}
    if silent:
        [first, *_] = silent
        raise GpunodesError(
            f"{', '.join(silent)} cannot be read: {first}: {silent[first] or 'it did not report its facts'}",
            "all control planes of the inventory: an etcd that still runs on one of them would be a second cluster",
            "start them; those that are gone for good: switch them off, take them out of the inventory, and run the "
            "same command again (`gpunodes help --page backup`); nothing was changed",
        )


def unknown_control_planes(chosen: nodes.Chosen) -> list[str]:
    """The control planes that are not ready, and no machines of the inventory: their etcd may run all the same.

    Raises GpunodesError for one that is ready, and so would not be stopped. Only an API that responds tells of them; a
    cluster without one is restored with what the inventory has. An unfinished restore is continued: its nodes are those
    of the snapshot, ready as they were then.
    """
    own = {match.node.name for match in chosen.nodes.values() if match.node}
    listed = (chosen.seen.cluster or {}).get("nodes", ())
    others = {node["name"]: node["ready"] for node in listed if node["role"] == "control_plane"}
    unknown = sorted(others.keys() - own)
    ready = [name for name in unknown if others[name]]
    if ready and "unfinished" not in _restores(chosen.seen).values():
        raise GpunodesError(
            f"the cluster has control planes that are not in the inventory: {', '.join(ready)}",
            "all of them: an etcd that still runs on one of them would be a second cluster",
            "add them to the group control_plane, or remove them by `gpunodes remove` first; nothing was changed",
        )
    return unknown


def check_abortable(seen: preflight.Inspection) -> None:
    """Raise GpunodesError unless a restore is unfinished, and none of its machines has the restored cluster.

    The old members, started beside it, would be a second cluster with the same name and certificates.
    """
    states = _restores(seen)
    unfinished = [name for name, state in states.items() if state in {"unfinished", "aborted"}]
    done = [name for name, state in states.items() if state == "done"]
    if not unfinished:
        raise GpunodesError(
            "no restore of etcd is unfinished on a control plane",
            "control planes that a restore has stopped",
            "see `gpunodes status`; the data of before a finished restore is in /var/lib/etcd/gpunodes-before-*",
        )
    if done and "unfinished" in states.values():
        raise GpunodesError(
            f"a restore has ended on {done[0]}: with the old data, {', '.join(unfinished)} would be a second cluster",
            "a restore that has not ended on any control plane",
            f"`gpunodes reset {unfinished[0]} && gpunodes join {unfinished[0]}`; or restore again if {done[0]} was not "
            "restored by this restore",
        )


def _restores(seen: preflight.Inspection) -> dict[str, str]:
    """How the restore of each control plane stands, as the facts have it; "" for none."""
    found = {name: facts.get("kubernetes") or {} for name, facts in seen.facts.items()}
    return {name: str(kubernetes.get("restore") or "") for name, kubernetes in found.items()}


def upload(inventory: Inventory, source: Source, backup: archive.Backup, progress: Callable[[str], None]) -> None:
    """Bring the snapshot onto the first control plane, unless it is there.

    Raises GpunodesError if that machine is not of the backup's cluster, has an older etcd or too little space, or does
    not respond; nothing was stopped then.
    """
    machine = inventory.control_planes()[0]
    part = backup.snapshot
    options = {"size": part.size, "sha256": part.sha256, "ca_hash": backup.about["ca_hash"]}
    options["etcd"] = backup.about["etcd"]["version"]
    variables = inventory.connection(machine.name)
    with stream.over_ssh(machine.name, machine.address, variables, "etcd_upload", options) as target:
        if _answer(machine.name, target) == "present":
            return
        source.send(backup, target, progress)
        if _answer(machine.name, target) != "present":
            raise target.lost("it did not take the snapshot")


def _answer(name: str, target: stream.Stream) -> str:
    answer = target.line(_HASH_S)
    if all(shape.wrong(answer, each) for each in _ANSWERS):
        raise target.lost("its report is invalid")
    if "error" in answer:
        error = answer["error"]
        raise GpunodesError(f"{name}: {error['found']}", error["wanted"], error["remedy"])
    return str(answer["state"])


def variables(backup: archive.Backup) -> dict[str, Any]:
    """The variables of the playbook's roles: values that were checked, none of them free text."""
    return {
        "etcd_stopped_snapshot": backup.snapshot.sha256,
        "etcd_stopped_ca_hash": backup.about["ca_hash"],
        "etcd_stopped_version": backup.about["etcd"]["version"],
        "etcd_restored_snapshot": backup.snapshot.sha256,
        "etcd_restored_revision": backup.about["etcd"]["revision"],
    }


def next_steps(inventory: Inventory) -> list[str]:
    """The commands that make the other control planes members again."""
    others = [machine.name for machine in inventory.control_planes()[1:]]
    return [f"gpunodes reset {name} && gpunodes join {name}" for name in others]
