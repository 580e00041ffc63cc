"""Machines with stand-in GPUs that hang, lose GPUs and refuse to reboot: each repaired, or left with the reason.

Each test asserts the end: of the cluster (cordons, taints, locks), of the machine (its boot, what runs there), and of
what the command said.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from .conftest import Kind, Operator, kill

LAB = Kind("debian13", workers=0, more=("--gpu-workers", "2", "--gpus", "2"))
LEASES = (
    "apis/coordination.k8s.io/v1/namespaces/kube-system/leases?labelSelector=app.kubernetes.io%2Fmanaged-by%3Dgpunodes"
)
SEEN_S = 600.0
"""Seconds in which a fault must be seen; the kernel reports a hung task after two intervals of its detector."""
IMAGE = "registry.k8s.io/e2e-test-images/busybox:1.37.0-1"
WORKLOAD = """
apiVersion: apps/v1
kind: Deployment
metadata: {{name: steady}}
spec:
  replicas: 1
  selector: {{matchLabels: {{app: steady}}}}
  template:
    metadata: {{labels: {{app: steady}}}}
    spec:
      nodeName: {node}
      terminationGracePeriodSeconds: 1
      containers: [{{name: main, image: "{image}", command: [busybox, sleep, "100000"]}}]
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {{name: steady}}
spec: {{minAvailable: 1, selector: {{matchLabels: {{app: steady}}}}}}
"""


def boot(operator: Operator, machine: str) -> str:
    return operator.ssh(machine, "cat /proc/sys/kernel/random/boot_id").strip()


def node(operator: Operator, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(operator.kubectl("get", "node", name, "-o", "json"))
    return found


def fault(operator: Operator, machine: str, *words: str) -> None:
    done = operator.lab("fault", machine, *words)
    assert done.returncode == 0, done.stderr


def verdict(operator: Operator, machine: str) -> dict[str, Any]:
    found: dict[str, Any] = operator.document("health", machine, code=None)["machines"][0]
    return found


def wait_for(operator: Operator, machine: str, actions: Sequence[str]) -> dict[str, Any]:
    """Wait until the verdict asks for one of ``actions``."""
    deadline = time.monotonic() + SEEN_S
    while (found := verdict(operator, machine))["action"] not in actions:
        assert time.monotonic() < deadline, found
        time.sleep(5)
    return found


def hang(operator: Operator, machine: str = "gpu-1") -> None:
    operator.ssh(machine, "sysctl -w kernel.hung_task_timeout_secs=20")
    fault(operator, machine, "hang")
    assert wait_for(operator, machine, ["reboot"])["hung_in_driver"]


def repaired(document: dict[str, Any], machine: str = "gpu-1") -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in document["machines"] if each["name"] == machine)
    assert found["outcome"] == "repaired", found
    return found


def clean(operator: Operator, machines: Sequence[str] = ("gpu-1", "gpu-2")) -> None:
    """Nothing of ours is left, on nodes, in locks, on machines; all of it is well."""
    assert json.loads(operator.kubectl("get", "--raw", f"/{LEASES}"))["items"] == []
    for machine in machines:
        found = node(operator, machine)
        assert not found["spec"].get("unschedulable")
        assert "gpunodes.dev" not in json.dumps(found["spec"].get("taints", []))
        ours = {name for name in found["metadata"]["annotations"] if "cordoned-by" in name or "needs-repair" in name}
        assert ours == set()
        assert operator.ssh(machine, "pgrep -fc '^@gpunodes'", code=None).strip() == "0"
        assert verdict(operator, machine)["state"] == "well"


@pytest.fixture(scope="module", autouse=True)
def cluster(operator: Operator) -> None:
    """A cluster whose GPU machines are ready; the loop guard is out of the way of all but its own test."""
    (operator.folder / "inventory" / "host_vars").mkdir()
    (operator.folder / "inventory" / "host_vars" / "control-1.yml").write_text(
        "gpunodes_repair_guard_repairs: 100\ngpunodes_repair_sick_percent: 60\ngpunodes_repair_verify_timeout: 900\n"
        "gpunodes_repair_drain_timeout: 60\n"
    )
    operator.gpunodes("up", limit_s=7200)


def test_what_is_well_is_left_alone(operator: Operator) -> None:
    boots = [boot(operator, machine) for machine in ("gpu-1", "gpu-2")]
    document = operator.document("health", "gpu-*", "--reboot-hung", "--yes")
    assert {each["ruling"] for each in document["machines"]} == {"nothing"}
    assert [boot(operator, machine) for machine in ("gpu-1", "gpu-2")] == boots
    clean(operator)


def test_a_hang_whose_reboot_hangs_ends_by_sysrq_on_the_machine_itself(operator: Operator) -> None:
    before = boot(operator, "gpu-1")
    fault(operator, "gpu-1", "reboot-hang")
    hang(operator)
    plan = operator.document("health", "gpu-*", "--reboot-hung", "--dry-run", code=None)
    first = next(each for each in plan["machines"] if each["name"] == "gpu-1")
    assert (first["ruling"], first["rung"]) == ("repair", "reboot")
    assert any("os_execute_work_item" in line or "blocked for more" in line for line in first["verdict"]["evidence"])
    assert boot(operator, "gpu-1") == before
    found = repaired(operator.document("health", "gpu-*", "--reboot-hung", "--yes"))
    assert found["rung"] == "sysrq"
    assert boot(operator, "gpu-1") != before
    history = operator.document("history", "gpu-1")["entries"]
    assert [entry["what"] for entry in history if entry["kind"] == "rung"] == ["reboot", "force", "sysrq"]
    events = operator.kubectl("get", "events", "--field-selector", "involvedObject.name=gpu-1", "-o", "name")
    assert events
    clean(operator)


def test_the_same_with_sshd_dead_ends_by_the_bmc(operator: Operator) -> None:
    hang(operator)
    operator.ssh("gpu-1", "systemd-run --on-active=3 sh -c 'systemctl stop ssh.socket ssh.service; pkill -x sshd'")
    time.sleep(10)
    document = operator.document("health", "gpu-1", "--reboot-hung", "--yes", code=3)
    assert document["machines"][0]["ruling"] == "refuse"
    found = repaired(operator.document("repair", "gpu-1", "--yes", "--reason", "its sshd is dead"))
    assert found["rung"] == "bmc"
    clean(operator)


def test_a_lost_gpu_comes_back(operator: Operator) -> None:
    fault(operator, "gpu-1", "lost")
    wait_for(operator, "gpu-1", ["reboot"])
    repaired(operator.document("health", "gpu-*", "--reboot-hung", "--yes"))
    assert verdict(operator, "gpu-1")["gpus"]["seen"] == 2
    clean(operator)


def test_a_gpu_reset_suffices(operator: Operator) -> None:
    before = boot(operator, "gpu-1")
    fault(operator, "gpu-1", "ecc")
    wait_for(operator, "gpu-1", ["reset_gpu"])
    refused = operator.document("health", "gpu-1", "--reboot-hung", "--yes", code=3)
    assert refused["machines"][0]["ruling"] == "nothing"
    words = ("health", "gpu-1", "--reboot-hung", "--actions", "reset_gpu,reboot", "--yes")
    found = repaired(operator.document(*words))
    assert found["rung"] == "gpu-reset"
    assert boot(operator, "gpu-1") == before
    # What its log says of before the repair is over.
    clean(operator)


def test_a_disruption_budget_that_forbids_eviction(operator: Operator) -> None:
    manifest = WORKLOAD.format(node="gpu-1", image=IMAGE)
    operator.ssh("control-1", f"cat >/run/steady.yml <<'END'\n{manifest}\nEND")
    operator.kubectl("apply", "-f", "/run/steady.yml")
    operator.kubectl("rollout", "status", "deployment/steady", "--timeout=180s")
    before = boot(operator, "gpu-1")
    hang(operator)
    document = operator.document("health", "gpu-1", "--reboot-hung", "--yes", code=3)
    found = document["machines"][0]
    assert found["outcome"] == "not-repaired"
    assert "default/steady-" in found["why"]
    assert boot(operator, "gpu-1") == before
    assert not node(operator, "gpu-1")["spec"].get("unschedulable")
    repaired(operator.document("health", "gpu-1", "--reboot-hung", "--force-drain", "--yes"))
    operator.kubectl("delete", "-f", "/run/steady.yml")
    clean(operator)


def test_a_cordon_of_somebody_else_stays(operator: Operator) -> None:
    operator.kubectl("cordon", "gpu-1")
    hang(operator)
    repaired(operator.document("health", "gpu-1", "--reboot-hung", "--yes"))
    assert node(operator, "gpu-1")["spec"]["unschedulable"]
    operator.kubectl("uncordon", "gpu-1")
    clean(operator)


def test_what_only_a_loss_of_power_cures(operator: Operator) -> None:
    fault(operator, "gpu-1", "needs-cold")
    wait_for(operator, "gpu-1", ["reboot"])
    found = repaired(operator.document("health", "gpu-1", "--reboot-hung", "--yes"))
    assert found["rung"] == "cold"
    clean(operator)


def test_without_a_bmc_that_answers_it_needs_repair_and_is_cleared_by_hand(operator: Operator) -> None:
    fault(operator, "gpu-1", "needs-cold")
    wait_for(operator, "gpu-1", ["reboot"])
    down = operator.folder / "inventory" / "host_vars" / "gpu-1.yml"
    down.write_text("gpunodes_bmc_address: http://127.0.0.1:9\n")
    document = operator.document("health", "gpu-1", "--reboot-hung", "--yes", code=3)
    assert document["machines"][0]["outcome"] == "needs-repair"
    found = node(operator, "gpu-1")
    assert found["spec"]["unschedulable"]
    assert "gpunodes.dev/needs-repair" in [taint["key"] for taint in found["spec"]["taints"]]
    before = boot(operator, "gpu-1")
    again = operator.document("health", "gpu-1", "--reboot-hung", "--yes", code=3)
    assert again["machines"][0]["ruling"] == "needs-repair"
    assert boot(operator, "gpu-1") == before
    down.unlink()
    operator.gpunodes("power", "gpu-1", "cycle", "--yes")
    wait_for(operator, "gpu-1", ["none"])
    operator.gpunodes("uncordon", "gpu-1")
    clean(operator)


def test_a_hang_at_every_boot_is_given_up(operator: Operator) -> None:
    operator.ssh("gpu-1", "echo kernel.hung_task_timeout_secs=20 >/etc/sysctl.d/90-hung.conf")
    fault(operator, "gpu-1", "smi-hang", "--at-boot")
    wait_for(operator, "gpu-1", ["reboot"])
    document = operator.document("health", "gpu-1", "--reboot-hung", "--yes", code=3)
    assert document["machines"][0]["outcome"] == "needs-repair"
    fault(operator, "gpu-1", "clear")
    operator.gpunodes("power", "gpu-1", "cycle", "--yes")
    wait_for(operator, "gpu-1", ["none"])
    operator.gpunodes("uncordon", "gpu-1")
    clean(operator)


def test_too_many_sick_at_once_stops(operator: Operator) -> None:
    for machine in ("gpu-1", "gpu-2"):
        fault(operator, machine, "lost")
    for machine in ("gpu-1", "gpu-2"):
        wait_for(operator, machine, ["reboot"])
    document = operator.document("health", "gpu-*", "--reboot-hung", "--yes", code=3)
    assert {each["ruling"] for each in document["machines"]} == {"refuse"}
    for machine in ("gpu-1", "gpu-2"):
        fault(operator, machine, "mend")
        repaired(operator.document("repair", machine, "--yes"), machine)
    clean(operator)


def test_two_commands_at_once_repair_it_once(operator: Operator) -> None:
    hang(operator)
    running = operator.start("health", "gpu-1", "--reboot-hung", "--yes")
    operator.wait_for(running, "collecting the evidence")
    second = operator.document("health", "gpu-1", "--reboot-hung", "--yes", code=None)
    assert second["machines"][0]["outcome"] is None
    assert running.wait(timeout=1500) == 0
    clean(operator)


@pytest.mark.parametrize("step", ["collecting the evidence", "emptying the node", "graceful reboot", "proving it well"])
def test_a_kill_and_then_the_same_command(operator: Operator, step: str) -> None:
    hang(operator)
    running = operator.start("health", "gpu-1", "--reboot-hung", "--yes")
    operator.wait_for(running, step)
    kill(running)
    document = operator.document("health", "gpu-1", "--reboot-hung", "--yes")
    repaired(document)
    clean(operator)


def test_without_a_control_plane(operator: Operator) -> None:
    hang(operator)
    manifest = "/etc/kubernetes/manifests/kube-apiserver.yaml"
    operator.ssh("control-1", f"mv {manifest} /root/kube-apiserver.yaml; sleep 30")
    try:
        done = operator.gpunodes("health", "gpu-1", "--reboot-hung", "--yes", code=1)
        assert "--without-cluster" in done.stderr
        document = operator.document("health", "gpu-1", "--reboot-hung", "--without-cluster", "--yes")
        repaired(document)
    finally:
        operator.ssh("control-1", f"mv /root/kube-apiserver.yaml {manifest}")
    deadline = time.monotonic() + 600
    while operator.ssh("control-1", "kubectl --kubeconfig /etc/kubernetes/admin.conf get --raw /readyz", None) != "ok":
        assert time.monotonic() < deadline
        time.sleep(5)
    clean(operator)


def test_no_password_lies_about(operator: Operator) -> None:
    inventory = (operator.folder / "inventory" / "hosts.yml").read_text()
    passwords = [line.partition(": ")[2] for line in inventory.splitlines() if "gpunodes_bmc_password: " in line]
    assert passwords
    texts = ["\n".join(operator.said)]
    texts += [
        path.read_text(errors="replace")
        for path in Path(operator.environment["XDG_STATE_HOME"]).rglob("*")
        if path.is_file()
    ]
    assert not [password for password in passwords for text in texts if password in text]
