"""Snapshots of the etcd member of this machine, made by the etcdctl of its own container."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import time
from collections.abc import Iterator
from typing import Any

from . import containers, disk, etcd, etcd_data, etcdctl
from .problem import MachineProblem

DATA = etcd_data.FOLDER
"""It has the same path in the container."""
_LOCK = "/run/gpunodes-etcd-snapshot.lock"
_PREFIX = "gpunodes-snapshot-"
_RESERVE = 256 << 20
"""Bytes that stay free for etcd itself while a snapshot is in its folder."""
_SAVE_S = 900
_STATUS_S = 300
_MISSING = ("executable file not found", "no such file or directory", "unknown command")


def status() -> dict[str, Any]:
    """This member: ``version``, ``db_size`` in bytes, ``revision``, ``leader`` (whether it leads) and ``members``.

    A member has ``id``, ``name`` and ``learner``. Raises MachineProblem if etcd does not respond as expected.
    """
    found = _own()
    members = [{"id": each.number, "name": each.name, "learner": each.learner} for each in etcd.members()]
    return {**found, "members": members}


def revision() -> int:
    """The revision of this member, which it reports without a leader, too; raises MachineProblem if it does not run."""
    return int(_own()["revision"])


def _own() -> dict[str, Any]:
    """What this member reports of itself."""
    text = etcdctl.must(["endpoint", "status"])
    try:
        own = json.loads(text)[0]["Status"]
        leader = int(own.get("leader", 0))  # it is left out while there is none
        return {
            "version": str(own["version"]),
            "db_size": int(own["dbSize"]),
            "revision": int(own["header"]["revision"]),
            "leader": leader == own["header"]["member_id"],
            "leader_id": f"{leader:x}",
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise MachineProblem(
            f"etcdctl reports an unexpected status ({type(error).__name__})", "its JSON form", "see its version"
        ) from error


@contextlib.contextmanager
def snapshot() -> Iterator[tuple[str, dict[str, Any]]]:
    """The path of a new, checked snapshot and its ``status`` while inside; it is deleted in any case.

    ``status`` has those of ``status`` and, of the snapshot, ``hash``, ``revision`` and ``keys``. A snapshot that an
    earlier run left when it was killed is deleted, too. Raises MachineProblem, also if another backup runs here.
    """
    with _alone():
        clear()
        found = status()
        _check_space(found["db_size"])
        path = f"{DATA}/{_PREFIX}{os.getpid()}-{int(time.time())}.db"
        try:
            etcdctl.must(["snapshot", "save", path], limit_s=_SAVE_S)
            os.chmod(path, 0o600)
            yield path, {**found, **checked(etcdctl.container(), path)}
        finally:
            clear()


def checked(container: str, path: str) -> dict[str, Any]:
    """``hash``, ``revision`` and ``keys`` of a snapshot; raises MachineProblem if it is damaged.

    etcdctl lost this command in 3.6, etcdutl has it since 3.5 (etcd, CHANGELOG-3.6).
    """
    for program in ("etcdutl", "etcdctl"):
        done = containers.execute(container, [program, "snapshot", "status", path, "--write-out=json"], _STATUS_S)
        if done.ok or not any(word in done.text for word in _MISSING):
            break
    if not done.ok:
        raise MachineProblem(
            f"`{program} snapshot status` failed: {etcdctl.reason(done)}",
            "an undamaged snapshot",
            "see `crictl logs` of the etcd container",
            output=done.text,
        )
    try:
        found = json.loads(done.out)
        return {"hash": int(found["hash"]), "revision": int(found["revision"]), "keys": int(found["totalKey"])}
    except (ValueError, KeyError, TypeError) as error:
        raise MachineProblem("the snapshot's status cannot be read", "its hash and revision") from error


def clear() -> None:
    """Delete all snapshots of backups."""
    for path in glob.glob(f"{DATA}/{_PREFIX}*"):
        disk.remove(path)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    descriptor = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MachineProblem(
                "another backup of etcd runs on this machine", "one at a time", "wait until it ends"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _check_space(size: int) -> None:
    about = os.statvfs(DATA)
    free, needed = about.f_bavail * about.f_frsize, size + _RESERVE
    if free < needed:
        raise MachineProblem(
            f"{DATA} has {free >> 20} MiB free, and etcd's database has {size >> 20} MiB",
            f"{needed >> 20} MiB for a snapshot",
            "free space there, or compact and defragment etcd (etcd.io, Maintenance)",
        )


def members() -> dict[str, Any]:
    """All members, as the module ``etcd_members`` returns them; a problem is a part of the result."""
    try:
        listed = status()
        # A member that does not respond is missing here; etcdctl then ends with an error, and prints the others. It
        # asks one after the other, and prints nothing if it is ended before the last one.
        done = etcdctl.run(["endpoint", "status", "--cluster"], requests=1 + len(listed["members"]))
        responding = {}
        with contextlib.suppress(ValueError, KeyError, TypeError):
            for each in json.loads(done.out):
                own = each["Status"]
                responding[f"{int(own['header']['member_id']):x}"] = int(own["dbSize"])
        found = [
            {
                **each,
                "leader": each["id"] == listed["leader_id"],
                "healthy": each["id"] in responding,
                "db_size": responding.get(each["id"], 0),
            }
            for each in listed["members"]
        ]
        return {"problem": "", "members": found}
    except MachineProblem as problem:
        return {"problem": str(problem), "members": []}
