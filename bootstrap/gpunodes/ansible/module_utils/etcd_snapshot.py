"""Snapshots of the etcd member of this machine, made by the etcdctl of its own container."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import containers, disk
from .problem import MachineProblem
from .process import CommandResult, last_line

DATA = "/var/lib/etcd"
"""kubeadm's data folder (etcd.local.dataDir): it has the same path in the container."""
PKI = "/etc/kubernetes/pki/etcd"
_LOCK = "/run/gpunodes-etcd-snapshot.lock"
_PREFIX = "gpunodes-snapshot-"
_RESERVE = 256 << 20
"""Bytes that stay free for etcd itself while a snapshot is in its folder."""
_SAVE_S = 900
_STATUS_S = 300
_MISSING = ("executable file not found", "no such file or directory", "unknown command")


def etcdctl(container: str, arguments: Sequence[str], timeout_s: int = 30) -> str:
    """The output of etcdctl for the member of this machine; raises MachineProblem with its reason."""
    return _output(_run(container, arguments, timeout_s), f"etcdctl {arguments[0]}")


def _run(container: str, arguments: Sequence[str], timeout_s: int) -> CommandResult:
    return containers.execute(
        container,
        [
            "etcdctl",
            "--endpoints=https://127.0.0.1:2379",
            f"--cacert={PKI}/ca.crt",
            f"--cert={PKI}/healthcheck-client.crt",
            f"--key={PKI}/healthcheck-client.key",
            f"--command-timeout={timeout_s}s",
            *arguments,
        ],
        timeout_s,
    )


def container() -> str:
    """The id of the running etcd container; raises MachineProblem without one."""
    found = containers.ids("etcd")
    if not found:
        raise MachineProblem(
            "no etcd runs on this machine", "a control plane with etcd", "see `crictl ps -a --name etcd` and its logs"
        )
    return found[0]


def status(etcd: str) -> dict[str, Any]:
    """This member: ``version``, ``db_size`` in bytes, ``revision``, ``leader`` (whether it leads) and ``members``.

    A member has ``id``, ``name`` and ``learner``. Raises MachineProblem if etcd does not respond as expected.
    """
    try:
        own = json.loads(etcdctl(etcd, ["endpoint", "status", "--write-out=json"]))[0]["Status"]
        listed = json.loads(etcdctl(etcd, ["member", "list", "--write-out=json"]))["members"]
        return {
            "version": str(own["version"]),
            "db_size": int(own["dbSize"]),
            "revision": int(own["header"]["revision"]),
            "leader": own["leader"] == own["header"]["member_id"],
            "leader_id": f"{int(own['leader']):x}",
            "members": [
                {
                    "id": f"{int(each['ID']):x}",
                    # A member that was added and has never started has no name.
                    "name": str(each.get("name") or ""),
                    "learner": bool(each.get("isLearner")),
                }
                for each in listed
            ],
        }
    except (ValueError, KeyError, TypeError, IndexError) as error:
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
        etcd = container()
        found = status(etcd)
        _check_space(found["db_size"])
        path = f"{DATA}/{_PREFIX}{os.getpid()}-{int(time.time())}.db"
        try:
            etcdctl(etcd, ["snapshot", "save", path], _SAVE_S)
            os.chmod(path, 0o600)
            yield path, {**found, **checked(etcd, path)}
        finally:
            clear()


def checked(etcd: str, path: str) -> dict[str, Any]:
    """``hash``, ``revision`` and ``keys`` of a snapshot; raises MachineProblem if it is damaged.

    etcdctl lost this command in 3.6, etcdutl has it since 3.5 (etcd, CHANGELOG-3.6).
    """
    for program in ("etcdutl", "etcdctl"):
        done = containers.execute(etcd, [program, "snapshot", "status", path, "--write-out=json"], _STATUS_S)
        if done.ok or not any(word in done.text for word in _MISSING):
            break
    text = _output(done, f"{program} snapshot status")
    try:
        found = json.loads(text)
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


def _output(done: CommandResult, what: str) -> str:
    if not done.ok:
        raise MachineProblem(
            f"`{what}` failed: {_reason(done)}",
            "an etcd that responds",
            "see `crictl logs` of the etcd container",
            output=done.text,
        )
    return done.out


def _reason(done: CommandResult) -> str:
    """etcdctl reports its reason as JSON in its last line; a part of that is text enough."""
    line = last_line(done.err) or last_line(done.out)
    with contextlib.suppress(ValueError):
        parsed = json.loads(line)
        if isinstance(parsed, Mapping):
            return str(parsed.get("error") or parsed.get("msg") or line)
    return line


def members() -> dict[str, Any]:
    """All members, as the module ``etcd_members`` returns them; a problem is a part of the result."""
    try:
        etcd = container()
        listed = status(etcd)
        # A member that does not respond is missing here; etcdctl then ends with an error, and prints the others.
        done = _run(etcd, ["endpoint", "status", "--cluster", "--write-out=json"], 30)
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
