"""What else can happen to a repair: on machines with stand-in GPUs, in the order of how much depends on it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml

from . import sick
from .conftest import Operator, kill
from .sick import clean, entry, fault, hang, history, needs_repair, repaired, wait_for, wait_until_well

LAB = sick.LAB
PODS = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: steady}
spec:
  selector: {matchLabels: {app: steady}}
  template:
    metadata: {labels: {app: steady}}
    spec:
      nodeSelector: {kubernetes.io/hostname: gpu-1}
      terminationGracePeriodSeconds: 1
      containers: [{name: main, image: "IMAGE", command: [sh, -c, "exec sleep 100000"]}]
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: steady}
spec: {minAvailable: 1, selector: {matchLabels: {app: steady}}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: stuck}
spec:
  selector: {matchLabels: {app: stuck}}
  template:
    metadata: {labels: {app: stuck}}
    spec:
      nodeSelector: {kubernetes.io/hostname: gpu-1}
      terminationGracePeriodSeconds: 1
      containers:
        - name: main
          image: IMAGE
          command: [sh, -c, "while :; do nvidia-smi -L >/dev/null; sleep 4; done"]
          resources: {limits: {nvidia.com/gpu: 1}}
"""
STEPS = (
    "gpu-1: reboot: ",
    "gpu-1: collecting the evidence",
    "gpu-1: cordoned",
    "gpu-1: emptying the node",
    "gpu-1: graceful reboot",
    "gpu-1: proving it well",
    "gpu-1: well: ",
    "gpu-1: uncordoned",
)
"""What the command says when it begins a step, from the first to the last."""
REPAIR = ("health", "gpu-1", "--reboot-hung", "--yes")


@pytest.fixture(scope="module", autouse=True)
def cluster(operator: Operator) -> None:
    sick.cluster(operator)


def test_a_lost_gpu_comes_back_by_one_of_two_commands_and_a_cordon_of_somebody_else_stays(operator: Operator) -> None:
    operator.kubectl("cordon", "gpu-1")
    before = sick.boot(operator, "gpu-1")
    fault(operator, "gpu-1", "lost")
    assert 79 in wait_for(operator, "gpu-1", ["reboot"])["xids"]
    running = operator.start(*REPAIR)
    operator.wait_for(running, "collecting the evidence")
    second = entry(operator.document(*REPAIR, code=3))
    assert (second["ruling"], second["outcome"]) == ("refuse", None)
    assert running.wait(timeout=1500) == 0
    assert sick.boot(operator, "gpu-1") != before
    assert history(operator)[-1]["outcome"] == "repaired"
    clean(operator, theirs=["gpu-1"])
    operator.kubectl("uncordon", "gpu-1")


def test_a_budget_that_forbids_eviction_and_a_pod_that_cannot_end(operator: Operator) -> None:
    image = operator.kubectl(
        "-n", "kube-system", "get", "daemonset", "nvidia-device-plugin-daemonset",
        "-o", "jsonpath={.spec.template.spec.containers[0].image}",
    ).strip()  # fmt: skip
    sick.apply(operator, PODS.replace("IMAGE", image))
    for name in ("steady", "stuck"):
        operator.kubectl("rollout", "status", f"deployment/{name}", "--timeout=180s")
    before = sick.boot(operator, "gpu-1")
    fault(operator, "gpu-1", "smi-hang")
    assert wait_for(operator, "gpu-1", ["reboot"])["hung_in_driver"]

    done = operator.gpunodes(*REPAIR, "--json", code=3)
    found = entry(json.loads(done.stdout))
    assert found["outcome"] == "not-repaired"
    assert "default/steady-" in found["why"]
    assert "--force-drain" in found["why"]
    assert "pods that do not end: default/stuck-" in done.stderr
    assert sick.boot(operator, "gpu-1") == before
    assert not sick.node(operator, "gpu-1")["spec"].get("unschedulable")

    done = operator.gpunodes(*REPAIR, "--force-drain", "--json")
    repaired(json.loads(done.stdout))
    (forced,) = [line for line in done.stderr.splitlines() if "were deleted by force" in line]
    assert "default/steady-" in forced
    assert "default/stuck-" in forced
    assert sick.boot(operator, "gpu-1") != before
    operator.kubectl("delete", "-f", "/run/sick.yml")
    clean(operator)


def test_a_kill_in_every_step_and_then_the_same_command(operator: Operator) -> None:
    before = sick.boot(operator, "gpu-1")
    hang(operator)
    for step in STEPS:
        running = operator.start(*REPAIR)
        operator.wait_for(running, step)
        kill(running)
    operator.gpunodes(*REPAIR)
    assert sick.boot(operator, "gpu-1") != before
    ends = [each["outcome"] for each in history(operator) if each["kind"] == "end"]
    assert set(ends) == {"repaired"}
    clean(operator)


def test_what_only_a_loss_of_power_cures_waits_for_a_bmc_and_for_hands(operator: Operator) -> None:
    fault(operator, "gpu-1", "needs-cold")
    wait_for(operator, "gpu-1", ["reboot"])
    with sick.bmc(operator, "down"):
        document = operator.document(*REPAIR, code=3)
        assert entry(document)["outcome"] == "needs-repair"
        assert "the new boot has findings" in entry(document)["why"]
        (cold,) = [each for each in history(operator) if each["what"] == "cold"]
        assert "does not answer" in cold["detail"]
    needs_repair(operator)
    before = sick.boot(operator, "gpu-1")
    again = entry(operator.document(*REPAIR, code=3))
    assert (again["ruling"], again["outcome"]) == ("needs-repair", None)
    assert "gpunodes uncordon gpu-1" in again["why"]
    assert sick.boot(operator, "gpu-1") == before

    operator.gpunodes("uncordon", "gpu-1")
    assert repaired(operator.document(*REPAIR))["rung"] == "cold"
    clean(operator)


def test_a_bmc_that_says_on_and_is_off(operator: Operator) -> None:
    assert operator.lab("power", "gpu-1", "off").returncode == 0
    # Nothing starts here: there is no sense in waiting long.
    with sick.bmc(operator, "lies"), sick.given(operator, "control-1", gpunodes_repair_boot_timeout=60):
        document = operator.document("repair", "gpu-1", "--yes", code=3)
    assert entry(document)["outcome"] == "needs-repair"
    (cold,) = [each for each in history(operator) if each["what"] == "cold"]
    assert "took the order off and says on" in cold["detail"]
    needs_repair(operator)
    assert operator.document("power", "gpu-1", "status")["state"] == "off"
    assert operator.document("power", "gpu-1", "on")["state"] == "on"
    wait_until_well(operator)
    operator.gpunodes("uncordon", "gpu-1")
    clean(operator)


def test_too_many_sick_at_once_stops(operator: Operator) -> None:
    for machine in sick.GPU:
        fault(operator, machine, "lost")
    for machine in sick.GPU:
        wait_for(operator, machine, ["reboot"])
    boots = [sick.boot(operator, machine) for machine in sick.GPU]
    document = operator.document("health", "gpu-*", "--reboot-hung", "--yes", code=3)
    assert {each["ruling"] for each in document["machines"]} == {"refuse"}
    assert all("2 of 2" in each["why"] for each in document["machines"])
    assert [sick.boot(operator, machine) for machine in sick.GPU] == boots
    document = operator.document("repair", *sick.GPU, "--max-unavailable", "100%", "--yes")
    for machine in sick.GPU:
        repaired(document, machine)
    clean(operator)


def test_the_loop_guard_and_no_control_plane(operator: Operator) -> None:
    before = sick.boot(operator, "gpu-1")
    hang(operator)
    wait_for(operator, "gpu-1", ["reboot"])
    with sick.given(operator, "control-1", gpunodes_repair_guard_repairs=1):
        found = entry(operator.document(*REPAIR, code=3))
        assert (found["ruling"], found["outcome"]) == ("needs-repair", "needs-repair")
        assert "times in 24 h and is sick again" in found["why"]
        needs_repair(operator)
        operator.gpunodes("uncordon", "gpu-1")
    assert sick.boot(operator, "gpu-1") == before

    # Nobody reaches the API server, and its kubelet does not start it anew for that: emulated, one that starts while
    # three nodes come back to it at once can take longer than the minute that it gives itself.
    refused = "INPUT -p tcp --dport 6443 -j REJECT --reject-with tcp-reset"
    operator.ssh("control-1", f"systemctl stop kubelet; iptables -I {refused}")
    try:
        done = operator.gpunodes(*REPAIR, code=1)
        assert "--without-cluster" in done.stderr
        assert sick.boot(operator, "gpu-1") == before
        repaired(operator.document(*REPAIR, "--without-cluster"))
        assert sick.boot(operator, "gpu-1") != before
    finally:
        operator.ssh("control-1", f"iptables -D {refused}; systemctl start kubelet")
    deadline = time.monotonic() + sick.BOOT_S
    answers = "kubectl --kubeconfig /etc/kubernetes/admin.conf get --raw /readyz --request-timeout=5s"
    while operator.ssh("control-1", answers, code=None) != "ok":
        assert time.monotonic() < deadline
        time.sleep(5)
    wait_until_well(operator)
    clean(operator)


def test_a_hang_at_every_boot_is_given_up(operator: Operator) -> None:
    for more in ((), ("--at-boot",)):
        fault(operator, "gpu-1", "smi-hang", *more)
    wait_for(operator, "gpu-1", ["reboot"])
    found = entry(operator.document(*REPAIR, code=3))
    assert found["outcome"] == "needs-repair"
    assert "the new boot has findings" in found["why"]
    assert [each["what"] for each in history(operator) if each["kind"] == "proof"][-1] == "cold"
    needs_repair(operator)
    # Somebody comes and mends it.
    fault(operator, "gpu-1", "clear")
    operator.gpunodes("power", "gpu-1", "cycle", "--yes")
    wait_until_well(operator)
    operator.gpunodes("uncordon", "gpu-1")
    clean(operator)


def test_no_password_lies_about(operator: Operator) -> None:
    hosts = yaml.safe_load((operator.folder / "inventory" / "hosts.yml").read_text())["all"]["children"]
    machines = [values for group in hosts.values() for values in group["hosts"].values()]
    passwords = {values["gpunodes_bmc_password"] for values in machines if values}
    assert len(passwords) == len(sick.GPU) + 1
    texts = ["\n".join(operator.said)]
    texts += [
        path.read_text(errors="replace")
        for path in Path(operator.environment["XDG_STATE_HOME"]).rglob("*")
        if path.is_file()
    ]
    assert not [password for password in passwords for text in texts if password in text]
