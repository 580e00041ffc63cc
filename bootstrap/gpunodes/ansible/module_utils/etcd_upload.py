"""Receives the snapshot of a backup on the control plane that restores it: a program (engine/remote/programs.py).

It prints one line of JSON: {"state": "present"}, {"state": "send"} or {"error": {...}}. After "send" it reads exactly
as many bytes as its options say from standard input, and prints {"state": "present"} or an error.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from . import disk, etcd_snapshot, kubeconfig, ledger, lock, static_pod_files
from .ledger import Ledger
from .problem import MachineProblem

PREFIX = "gpunodes-restore-"
_CHUNK = 1 << 20
_RESERVE = 256 << 20


def path_of(sha256: str) -> str:
    """Where the snapshot with this SHA-256 is kept: on the disk of etcd's data."""
    return f"{etcd_snapshot.DATA}/{PREFIX}{sha256[:16]}.db"


def _end(*_: object) -> None:
    """Handle a signal: end with all clean-up."""
    raise SystemExit(1)


def main(options: Mapping[str, Any]) -> None:
    """Receive a snapshot; the options are its ``size``, ``sha256``, and ``ca_hash`` and ``etcd`` of its cluster."""
    signal.signal(signal.SIGTERM, _end)
    try:
        check_authority(str(options["ca_hash"]))
        check_version(str(options["etcd"]), ledger.load())
        # The restore of a command that was killed may go on here, and deletes the snapshot at its end.
        with lock.held():
            _take(options)
    except MachineProblem as problem:
        _line({"error": asdict(problem.problem)})


def _take(options: Mapping[str, Any]) -> None:
    path = path_of(str(options["sha256"]))
    if os.path.lexists(path) and digest(path) == options["sha256"]:
        _line({"state": "present"})
        return
    clear()
    _check_space(int(options["size"]))
    _line({"state": "send"})
    _receive(path, int(options["size"]), str(options["sha256"]))
    _line({"state": "present"})


def check_authority(ca_hash: str) -> None:
    """Raise MachineProblem unless this machine is a control plane of the cluster whose CA has this pin."""
    pem = disk.read(kubeconfig.CA)
    if pem is None or not os.path.isdir(etcd_snapshot.DATA):
        raise MachineProblem(
            "this machine is no control plane",
            "one of the backup's cluster",
            "to begin with bare machines, see the page backup (`gpunodes help --page backup`)",
        )
    if (own := kubeconfig.ca_hash(pem)) != ca_hash:
        raise MachineProblem(
            f"this machine's cluster has the CA {own}, and the backup is of the cluster with the CA {ca_hash}",
            "a backup of this cluster",
            "use a backup of this cluster, or another inventory",
        )


def check_version(version: str, machine_ledger: Ledger) -> None:
    """Raise MachineProblem if the etcd of this control plane is of an older minor than ``version``, the backup's.

    An image without a version in its tag decides nothing.
    """
    manifest = disk.read(machine_ledger.manifests.get("etcd", static_pod_files.path("etcd"))) or ""
    tag = static_pod_files.image("etcd", manifest).partition("@")[0].rpartition("/")[2].rpartition(":")[2]
    own, needed = _minor(tag), _minor(version)
    if own and needed and own < needed:
        raise MachineProblem(
            f"the backup is of etcd {version}, and this control plane has etcd {tag}",
            f"etcd {needed[0]}.{needed[1]} or newer: an older one cannot read it",
            "restore an older backup, or upgrade Kubernetes to the version of the backup first; nothing was stopped",
        )


def _minor(version: str) -> tuple[int, int] | None:
    found = re.match(r"v?([0-9]{1,4})\.([0-9]{1,4})\.", version)
    return (int(found.group(1)), int(found.group(2))) if found else None


def clear() -> None:
    """Delete all snapshots that were received."""
    for path in glob.glob(f"{etcd_snapshot.DATA}/{PREFIX}*"):
        disk.remove(path)


def digest(path: str) -> str:
    """The SHA-256 of a file, which must be no link."""
    found = hashlib.sha256()
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        while piece := file.read(_CHUNK):
            found.update(piece)
    return found.hexdigest()


def _check_space(size: int) -> None:
    about = os.statvfs(etcd_snapshot.DATA)
    # The snapshot, and the database that is restored from it.
    free, needed = about.f_bavail * about.f_frsize, 2 * size + _RESERVE
    if free < needed:
        raise MachineProblem(
            f"{etcd_snapshot.DATA} has {free >> 20} MiB free", f"{needed >> 20} MiB for a restore", "free space there"
        )


def _receive(path: str, size: int, sha256: str) -> None:
    partial = f"{path}.part"
    found = hashlib.sha256()
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            left = size
            while left:
                # Not sys.stdin: its buffer may already hold more than the program itself.
                piece = os.read(0, min(_CHUNK, left))
                if not piece:
                    raise MachineProblem("the connection ended before the snapshot was complete")
                found.update(piece)
                file.write(piece)
                left -= len(piece)
            file.flush()
            os.fsync(file.fileno())
        if found.hexdigest() != sha256:
            raise MachineProblem("the snapshot that arrived is not the one that was sent (SHA-256)")
        os.replace(partial, path)
    finally:
        disk.remove(partial)


def _line(document: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()
