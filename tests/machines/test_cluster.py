"""From bare machines to a cluster on Debian 13 with the default Kubernetes, with failures on the way.

test_leave.py tests removal and reset.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from .conftest import STATE, TOKEN, LabSpec, Operator, kill

LAB = LabSpec("debian13", workers=2)
MACHINES = ("control-1", "worker-1", "worker-2")


def test_the_machines_are_bare(operator: Operator) -> None:
    for machine in MACHINES:
        assert operator.ssh(machine, "ls /opt/cni /etc/kubernetes /var/lib/kubelet 2>/dev/null", code=None) == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("init-master", "10.0.0.999"), "matches no machine"),
        (("init-master", "worker-1"), "not in the group control_plane"),
        (("join", "wroker-1"), "worker-1"),
        (("join", "worker-1; reboot"), "not the name, address or pattern"),
        (("join", "worker-1", "--kubernetes-version", "1.12"), "cannot install Kubernetes 1.12"),
        (("join", "worker-1", "--key", "/nonexistent"), "cannot be read"),
        (("join", "worker-1", "--skip-phase", "cuddle"), "cuddle"),
        (("join", "worker-1", "-i", "nowhere.yml"), "nowhere.yml"),
        (("reset", "worker-1"), "--yes"),
    ],
)
def test_wrong_input_is_refused_with_one_message(operator: Operator, arguments: tuple[str, ...], message: str) -> None:
    done = operator.gpunodes(*arguments, code=2)
    assert message in done.stderr
    assert done.stdout == ""
    assert "a bug in gpunodes" not in done.stderr


def test_preflight_passes_and_changes_nothing(operator: Operator) -> None:
    before = {machine: operator.ssh(machine, STATE) for machine in MACHINES}
    # The lab's machines have no time service, which is a warning.
    assert {finding["check"] for finding in operator.document("preflight")["findings"]} == {"time"}
    assert {machine: operator.ssh(machine, STATE) for machine in MACHINES} == before


def test_preflight_shows_all_failures_at_once(operator: Operator) -> None:
    operator.ssh("worker-1", "systemd-run --unit=squatter --collect python3 -m http.server 10250")
    operator.ssh("worker-2", "hostnamectl set-hostname worker-1")
    try:
        time.sleep(5)
        found = operator.document("preflight", "worker-*", code=1)["findings"]
        errors = [finding for finding in found if finding["severity"] == "error"]
        assert {(finding["machine"], finding["check"]) for finding in errors} == {
            ("worker-1", "ports"),
            ("worker-1", "hostname"),
            ("worker-2", "hostname"),
        }
        done = operator.gpunodes("join", "worker-*", code=1)
        assert "nothing was changed" in done.stdout
    finally:
        operator.ssh("worker-1", "systemctl stop squatter")
        operator.ssh("worker-2", "hostnamectl set-hostname worker-2")


def test_a_join_without_a_control_plane_is_refused(operator: Operator) -> None:
    done = operator.gpunodes("join", "worker-1", code=1)
    assert "init-master" in done.stdout + done.stderr


def test_a_dry_run_changes_nothing(operator: Operator) -> None:
    before = operator.ssh("control-1", STATE)
    document = operator.document("init-master", "control-1", "--dry-run")
    assert document["dry_run"]
    assert document["machines"][0]["outcome"] == "changed"
    assert operator.ssh("control-1", STATE) == before


def test_init_completes_after_a_kill_and_a_second_command_is_refused(operator: Operator) -> None:
    first = operator.start("init-master", "control-1")
    operator.wait_for(first, "control-1: Install containerd")
    refused = operator.gpunodes("init-master", "control-1", code=1)
    assert "another command works on this cluster: init-master of " in refused.stderr
    operator.wait_for(first, "control-1: Start the control plane")
    time.sleep(20)
    kill(first)
    operator.gpunodes("init-master", "control-1")
    status = operator.document("status", code=0)
    assert [(node["name"], node["ready"]) for node in status["nodes"]] == [("control-1", True)]


def test_a_second_init_changes_nothing(operator: Operator) -> None:
    before = operator.ssh("control-1", STATE)
    document = operator.document("init-master", "control-1")
    assert [machine["outcome"] for machine in document["machines"]] == ["unchanged"]
    assert operator.ssh("control-1", STATE) == before


def test_a_secret_is_encrypted_in_etcd_and_not_in_the_audit_log(operator: Operator) -> None:
    """A copy of etcd reveals no Secret; the audit log has the requests, but not the Secret's content."""
    operator.kubectl("create", "secret", "generic", "audited", "--from-literal=password=correct-horse")
    operator.kubectl("get", "secret", "audited")
    etcd = "/var/lib/etcd/member/wal /var/lib/etcd/member/snap"
    assert operator.ssh("control-1", f"grep -rlaF correct-horse {etcd}", code=None) == ""
    assert operator.ssh("control-1", f"grep -rlaF k8s:enc:secretbox:v1:gpunodes-1: {etcd}")
    log = operator.ssh("control-1", "grep audited /var/log/kubernetes/audit.log")
    assert {"create", "get"} <= {json.loads(line)["verb"] for line in log.splitlines()}
    assert "Y29ycmVjdC1ob3JzZQ" not in log  # base64 of the password
    private = "/etc/kubernetes/gpunodes/* /var/lib/kubelet/config.yaml /var/log/kubernetes/audit.log"
    assert set(operator.ssh("control-1", f"stat -c %U:%a {private}").split()) == {"root:600"}
    operator.kubectl("delete", "secret", "audited")


def test_two_machines_join_at_once_and_no_secret_is_in_a_command_line(operator: Operator) -> None:
    # Commands with a secret run for many seconds; a shorter interval would load the machine.
    sampler = "while :; do cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '; echo; sleep 4; done >/run/cmdlines"
    for machine in MACHINES:
        operator.ssh(machine, f'systemd-run --unit=sampler --collect sh -c "{sampler}"')
    operator.gpunodes("join", "worker-*")
    seen = ""
    for machine in MACHINES:
        operator.ssh(machine, "systemctl stop sampler; grep -q containerd /run/cmdlines")
        seen += operator.ssh(machine, f"grep -ohE '{TOKEN}' /run/cmdlines | sort -u; rm /run/cmdlines", code=None)
    assert seen == ""
    status = operator.document("status")
    assert {node["name"]: node["ready"] for node in status["nodes"]} == dict.fromkeys(MACHINES, True)
    assert status["missing"] == []
    assert operator.tokens() == []


def test_a_second_join_changes_nothing(operator: Operator) -> None:
    before = {machine: operator.ssh(machine, STATE) for machine in MACHINES}
    document = operator.document("join", "worker-*")
    assert [machine["outcome"] for machine in document["machines"]] == ["unchanged", "unchanged"]
    assert {machine: operator.ssh(machine, STATE) for machine in MACHINES} == before


def test_a_workload_runs_on_the_workers_and_its_service_responds(operator: Operator) -> None:
    image = "registry.k8s.io/e2e-test-images/busybox:1.37.0-1"
    manifest = (Path(__file__).parent / "workload.yml").read_text().replace("IMAGE", image)
    operator.ssh("control-1", f"cat >/run/workload.yml <<'END'\n{manifest}\nEND")
    operator.kubectl("apply", "-f", "/run/workload.yml")
    operator.kubectl("rollout", "status", "deployment/hello", "--timeout=180s")
    nodes = operator.kubectl("get", "pods", "-l", "app=hello", "-o", "jsonpath={.items[*].spec.nodeName}")
    assert set(nodes.split()) == {"worker-1", "worker-2"}
    address = operator.kubectl("get", "service", "hello", "-o", "jsonpath={.spec.clusterIP}").strip()
    responses = operator.ssh("control-1", f"for n in 1 2 3 4 5 6 7 8; do curl -sf -m 10 http://{address}/; done")
    assert set(responses.split()) <= set(
        operator.kubectl("get", "pods", "-l", "app=hello", "-o", "name").replace("pod/", "").split()
    )
    assert responses.split()


def test_the_kubeconfig_is_private_and_merges(operator: Operator) -> None:
    operator.gpunodes("kubeconfig", "--merge")
    path = Path(operator.environment["KUBECONFIG"])
    assert path.stat().st_mode & 0o777 == 0o600
    assert "client-key-data" in path.read_text()
