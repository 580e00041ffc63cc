"""A cluster is backed up and restored."""

from __future__ import annotations

import shlex
import signal
import stat
import time
from pathlib import Path

import pytest

from .conftest import BARE, LONG, SLOW_RESTARTS, LabSpec, Operator, kill, lines, search_for_secrets

LAB = LabSpec("debian13", workers=1, cluster=(), settings=SLOW_RESTARTS)
MACHINES = LAB.machines


def test_a_cluster_is_backed_up(operator: Operator) -> None:
    operator.kubectl("create", "namespace", "precious")
    operator.kubectl("-n", "precious", "create", "secret", "generic", "login", "--from-literal=word=correct-horse")
    operator.kubectl("-n", "precious", "create", "deployment", "web", "--image=registry.k8s.io/pause:3.10.2")
    before = operator.ssh("control-1", "ls -A /var/lib/etcd")
    saved = operator.document("etcd", "backup", "--output", "first.tar")
    path = Path(saved["path"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {part["name"] for part in saved["parts"]} >= {
        *("etcd/snapshot.db", "pki/ca.key", "pki/sa.key", "kubernetes/encryption-configuration"),
    }
    assert operator.ssh("control-1", "ls -A /var/lib/etcd") == before
    # The other file of this name stays.
    operator.gpunodes("etcd", "backup", "--output", "first.tar", code=2)


def test_a_killed_backup_leaves_nothing(operator: Operator) -> None:
    # The command says "making a snapshot" before it connects: without a snapshot there is nothing to clean up.
    made = "until ls -A /var/lib/etcd | grep -q gpunodes-snapshot; do sleep 0.1; done"
    for _ in range(3):
        running = operator.start("etcd", "backup", "--output", "second.tar")
        operator.wait_for(running, "making a snapshot")
        operator.ssh("control-1", f"timeout 200 sh -c {shlex.quote(made)}")
        kill(running)
        if running.returncode == -signal.SIGKILL:
            break
        (operator.folder / "second.tar").unlink()  # it was quicker than the connection
    else:
        pytest.fail("no backup could be killed")
    deadline = time.monotonic() + 120
    while "gpunodes-" in operator.ssh("control-1", "ls -A /var/lib/etcd"):
        assert time.monotonic() < deadline, "its snapshot is still there"
        time.sleep(5)
    assert not (operator.folder / "second.tar").exists()


def test_status_shows_the_member_of_etcd(operator: Operator) -> None:
    status = operator.document("status")
    assert [(each["name"], each["leader"], each["healthy"]) for each in status["etcd"]] == [("control-1", True, True)]
    # A kubelet that answers late is a warning, too.
    assert [each for each in status["warnings"] if "read" not in each] == []


def test_a_damaged_file_is_refused_before_anything_is_touched(operator: Operator) -> None:
    data = bytearray((operator.folder / "first.tar").read_bytes())
    data[5000] ^= 1
    (operator.folder / "damaged.tar").write_bytes(data)
    assert "is not a usable backup" in operator.gpunodes("etcd", "restore", "damaged.tar", "--yes", code=2).stderr
    operator.kubectl("get", "nodes")


def test_a_killed_restore_is_continued(operator: Operator) -> None:
    """A deleted namespace is back with its Secret, and controllers act on what is in it."""
    operator.kubectl("delete", "namespace", "precious", limit_s=LONG)
    running = operator.start("etcd", "restore", "first.tar", "--yes")
    operator.wait_for(running, "control-1: Restore etcd")
    time.sleep(3)
    kill(running)
    # The killed one's module goes on, and may restore everything before this one begins.
    operator.gpunodes("etcd", "restore", "first.tar", "--yes", limit_s=2 * LONG)
    word = operator.kubectl("-n", "precious", "get", "secret", "login", "-o", "jsonpath={.data.word}")
    assert word == "Y29ycmVjdC1ob3JzZQ=="
    operator.kubectl("-n", "precious", "scale", "deployment", "web", "--replicas=3")
    operator.kubectl("-n", "precious", "rollout", "status", "deployment", "web", "--timeout=600s", limit_s=LONG)
    kept = operator.ssh("control-1", "ls -d /var/lib/etcd/gpunodes-*").split()
    assert len(kept) == 1
    assert "before" in kept[0]
    operator.kubectl("wait", "--for=condition=Ready", "node", "--all", "--timeout=600s", limit_s=LONG)
    assert all(node["ready"] for node in operator.document("status")["nodes"])


def test_no_secret_leaks(operator: Operator) -> None:
    search_for_secrets(operator, MACHINES)


def test_reset_leaves_nothing(operator: Operator) -> None:
    operator.gpunodes("reset", "--yes", *MACHINES)
    for machine in MACHINES:
        assert lines(operator.ssh(machine, BARE)) == operator.bare[machine]
