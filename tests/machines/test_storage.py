"""Shared storage on machines: the control plane serves a folder, pods on two workers write and read it.

The server is rebooted, and frozen, while a pod writes: the writer goes on afterwards, and `health` does not take the
waiting programs for a hung driver.
"""

from __future__ import annotations

import json
from typing import Any

from . import pods, shares
from .conftest import Operator, search_for_secrets
from .shares import FOLDER, MACHINES, WORKERS, packages, until

LAB = shares.LAB
EXPORTS = "/etc/exports.d/gpunodes.exports"
VOLUME: dict[str, Any] = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "training"}}]}
MOUNT: dict[str, Any] = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
# As a log of a training job: the file is open while nothing is written. close(2) sends what was written, and only this
# wait for the server counts as hung: the kernel skips tasks that a signal ends, as in open(2) (kernel/hung_task.c).
APPENDS = "while exec 3>>{0}; do sleep 1; {1} >&3; exec 3>&-; done"
HOMES = ("home-1", "home-2")
CONNECTED = "ss -Htn state established '( sport = :2049 )'"
_before: dict[str, list[str]] = {}
"""The state of the machines before `storage up`."""


def mounts(operator: Operator) -> list[str]:
    """The NFS mounts of the workers."""
    return [line for found in operator.each(WORKERS, "grep ' nfs4 ' /proc/mounts || true").values() for line in found]


def written(operator: Operator) -> int:
    """The number of lines that the writer has written, as the server has them on its disk."""
    return int(operator.ssh("control-1", f"cat {FOLDER}/writes 2>/dev/null | wc -l"))


def last_line(operator: Operator) -> int:
    """The last number that the writer has written, as the pod on the other node reads it; 0 if that fails."""
    return int(operator.kubectl("exec", "read", "--", "tail", "-n", "1", "/data/writes", code=None).strip() or 0)


def test_without_shares_there_is_nothing_to_do(operator: Operator) -> None:
    assert "gpunodes_storage has no share" in operator.gpunodes("storage", "up", code=2).stderr


def test_up_serves_a_folder_and_pods_on_two_nodes_use_it(operator: Operator) -> None:
    shares.serve_from(operator, "control-1")
    _before.update(packages(operator))
    would = operator.document("storage", "up", "--dry-run")
    assert would["dry_run"]
    changes = {each["name"]: each["changes"] for each in would["machines"]}
    assert {"Install the NFS server", "Write the exports"} <= set(changes["control-1"])
    assert changes["worker-2"] == ["Install the NFS client"]
    assert packages(operator) == _before
    assert "training" not in operator.kubectl("get", "pv,pvc", "-o", "name")
    done = operator.gpunodes("storage", "up")
    assert "training: worker-1 wrote, worker-2 read" in " ".join(done.stdout.split())
    claim = json.loads(operator.kubectl("get", "pvc", "training", "-o", "json"))
    assert claim["status"]["phase"] == "Bound"
    assert operator.ssh("control-1", f"stat -c '%U %a' {FOLDER}").strip() == "nobody 1777"
    exported = operator.ssh("control-1", "exportfs -v")
    assert exported.count("root_squash") == len(MACHINES)
    assert "<world>" not in exported
    assert operator.ssh("control-1", f"ls -A {FOLDER}").strip() == "", "the pods' files are removed"


def test_again_changes_nothing(operator: Operator) -> None:
    started = operator.ssh("control-1", "systemctl show --property=ExecMainStartTimestampMonotonic nfs-server")
    result = operator.document("storage", "up")
    assert {each["outcome"] for each in result["machines"]} == {"unchanged"}
    assert operator.ssh("control-1", "systemctl show --property=ExecMainStartTimestampMonotonic nfs-server") == started
    operator.gpunodes("storage", "verify")


def test_a_writer_goes_on_after_a_reboot_of_the_server(operator: Operator) -> None:
    # As most systems have it; the lab's images lack the package linux-sysctl-defaults. The pods' user is root.
    operator.each(WORKERS, "sysctl -qw fs.protected_regular=2")
    image = operator.setting("gpunodes_ready_image")
    # A slow API server logs the names of their events, POD.TIME: with six letters before the point like tokens.
    writes = f"i=0; {APPENDS.format('/data/writes', 'i=$((i + 1)); echo $i')}"
    pods.start(operator, "write", image, writes, MOUNT, nodeName="worker-1", **VOLUME)
    pods.start(operator, "read", image, "sleep 86400", MOUNT, nodeName="worker-2", **VOLUME)
    until("the pod has written", lambda: written(operator) > 3)
    assert operator.lab("power", "control-1", "cycle").returncode == 0
    until("the server is back", lambda: operator.lab("ssh", "control-1", "true").returncode == 0)
    before = written(operator)
    # NFS 4 gives clients a grace period of 90 s to claim what they had open.
    until("the writer goes on", lambda: written(operator) > before + 3)
    until("the API responds", lambda: "pod/write" in operator.kubectl("get", "pods", "-o", "name", code=None))
    assert "Running" in operator.kubectl("get", "pod", "write", "-o", "jsonpath={.status.phase}")
    # An API server that has just started may not reach the kubelets yet.
    until("the other node reads it", lambda: last_line(operator) > before)


def test_a_pod_with_the_share_does_not_reach_its_server(operator: Operator) -> None:
    """The server would take it for its node, and serve it the shares of all namespaces."""
    server = operator.kubectl("get", "pv", "-o", "jsonpath={.items[0].spec.nfs.server}").strip()
    # Another port of the same machine, with patience: the pod has a network. The API server closes what is closed here.
    connect = "busybox timeout {1} busybox nc -w {1} {0} {2} </dev/null 2>&1; echo exit $?"
    reached = operator.kubectl("exec", "read", "--", "sh", "-c", connect.format(server, 60, 6443))
    assert "exit 0" in reached, reached
    tried = operator.kubectl("exec", "read", "--", "sh", "-c", connect.format(server, 10, 2049))
    assert "exit 0" not in tried, tried
    rules = operator.each(MACHINES, "nft list table inet gpunodes_storage")
    for machine, found in rules.items():
        # control-1 has booted since they were written.
        assert any("dport 2049" in line or "dport { 2049 }" in line for line in found), (machine, found)
    [dropped] = [line for line in rules["worker-2"] if line.strip().startswith("tcp dport")]
    assert "packets 0 " not in dropped, "what the node itself sends does not count"
    before = written(operator)
    until("the writer goes on", lambda: written(operator) > before)
    until("the other node reads it", lambda: last_line(operator) > before)


def test_a_frozen_server_is_no_hung_driver(operator: Operator) -> None:
    """The kernel reports programs that write there, one of them named nvidia-smi, as hung after 20 s.

    The workers have no GPU, and the probe starts no nvidia-smi: only the verdict by the kernel's log could be wrong.
    A probe whose own nvidia-smi waits for NFS is in tests/unit/test_health_nfs.py.
    """
    block = "INPUT -p tcp --dport 2049 -j DROP"
    operator.each(WORKERS, "sysctl -qw kernel.hung_task_timeout_secs=20 kernel.hung_task_check_interval_secs=5")
    # Two programs of that name that write to a mount of their own, as a log in a home directory on NFS: one of them may
    # open its file at the moment when the server freezes.
    server = operator.kubectl("get", "pv", "-o", "jsonpath={.items[0].spec.nfs.server}").strip()
    operator.ssh("worker-1", f"mkdir -p /run/home && mount -t nfs4 -o hard,noresvport {server}:{FOLDER} /run/home")
    # /run allows no programs.
    operator.ssh("worker-1", "cp /bin/sh /var/tmp/nvidia-smi")
    for name in HOMES:
        command = APPENDS.format(f"/run/home/{name}.log", "echo x")
        operator.ssh("worker-1", f"systemd-run --unit={name} --collect /var/tmp/nvidia-smi -c '{command}'")
    logs = f"grep -l x {FOLDER}/home-*.log"
    until("both have written", lambda: len(operator.ssh("control-1", logs, code=None).split()) == len(HOMES))
    # Not for two minutes: clients then give their connections up, of which the server does not hear.
    operator.ssh("control-1", f"iptables -I {block}")
    try:
        hung = "journalctl -k -b --no-pager | grep -c 'task nvidia-smi:.* blocked '"
        until(
            "the kernel reports the hung program",
            lambda: int(operator.ssh("worker-1", hung, code=None)) > 0,
            limit_s=300,
        )
        verdicts = operator.document("health", *WORKERS, "--reboot-hung", "--yes", code=None)["machines"]
    finally:
        operator.ssh("control-1", f"iptables -D {block}")
    print(operator.ssh("worker-1", "journalctl -k -b --no-pager | grep -A 30 ' blocked ' | tail -60"))
    assert {each["decision"] for each in verdicts} == {"nothing"}, verdicts
    assert not any(each["verdict"]["state"] == "hung" or each["verdict"]["hung_in_driver"] for each in verdicts)
    log = operator.folder / "kernel.log"
    log.write_text(operator.ssh("worker-1", "journalctl -k -b --no-pager"))
    saved = operator.document("health", "--from", str(log), code=None)
    assert '"hung"' not in json.dumps(saved), saved
    before = written(operator)
    until("the writer goes on", lambda: written(operator) > before + 3)


def test_down_is_refused_while_a_pod_uses_the_share(operator: Operator) -> None:
    refused = operator.gpunodes("storage", "down", "--yes", code=1).stderr
    assert "default/read, default/write use shared storage" in " ".join(refused.split())
    assert operator.ssh("control-1", f"test -f {EXPORTS} && echo there").strip() == "there"


def test_down_is_refused_while_a_node_has_the_share_mounted(operator: Operator) -> None:
    operator.kubectl("delete", "pod", "write", "read", "--wait=true", "--grace-period=1")
    done = operator.gpunodes("storage", "down", "--yes", code=None)
    assert done.returncode
    assert "is mounted on /run/home" in " ".join((done.stdout + done.stderr).split())
    assert "training" in operator.kubectl("get", "pvc", "-o", "name"), "nothing is removed before the check"
    operator.ssh("worker-1", f"systemctl stop {' '.join(HOMES)}; umount /run/home; rmdir /run/home")
    operator.ssh("worker-1", "rm /var/tmp/nvidia-smi")


def test_down_leaves_the_data_and_nothing_else(operator: Operator) -> None:
    # While the server was frozen for longer, it keeps such connections for 6 to 12 minutes more, and `storage down`
    # fails after two (svc_age_temp_xprts in the kernel's net/sunrpc/svc_xprt.c).
    until("no client is connected", lambda: not operator.ssh("control-1", CONNECTED).strip())
    operator.gpunodes("storage", "down", "--yes")
    assert mounts(operator) == []
    assert operator.kubectl("get", "pv,pvc", "-o", "name").strip() == ""
    assert packages(operator) == _before
    assert operator.ssh("control-1", f"ls -d {EXPORTS} 2>/dev/null || echo gone").strip() == "gone"
    guard = "systemctl is-active gpunodes-storage; ls /etc/gpunodes-storage.nft 2>/dev/null || true"
    assert {*map(tuple, operator.each(MACHINES, guard).values())} == {("inactive",)}
    assert "gpunodes-storage" not in operator.kubectl("get", "validatingadmissionpolicies", "-o", "name")
    assert "writes" in operator.ssh("control-1", f"ls {FOLDER}"), "data is never removed"
    again = operator.document("storage", "down", "--yes")
    assert {each["outcome"] for each in again["machines"]} == {"unchanged"}


def test_no_secret_leaks(operator: Operator) -> None:
    search_for_secrets(operator, MACHINES, boots={"control-1": 2})
