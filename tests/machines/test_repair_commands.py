"""Repairs with concurrent commands, with pods that may not or cannot be evicted, and killed in each stage."""

from __future__ import annotations

import json

from . import unhealthy
from .conftest import Operator, kill
from .unhealthy import assert_clean, entry, fault, hang, history, repaired, wait_for

LAB = unhealthy.LAB
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
    "gpu-1: collecting evidence",
    "gpu-1: cordoned",
    "gpu-1: draining the node",
    "gpu-1: graceful reboot",
    "gpu-1: verifying that it is healthy",
    "gpu-1: verified: ",
    "gpu-1: uncordoned",
)
"""The command's message at the start of each stage, in order."""
REPAIR = ("health", "gpu-1", "--reboot-hung", "--yes")


def test_one_of_two_commands_repairs_a_lost_gpu_and_a_foreign_cordon_stays(operator: Operator) -> None:
    operator.kubectl("cordon", "gpu-1")
    before = unhealthy.boot(operator, "gpu-1")
    fault(operator, "gpu-1", "lost")
    assert 79 in wait_for(operator, "gpu-1", ["reboot"])["xids"]
    running = operator.start(*REPAIR)
    operator.wait_for(running, "collecting evidence")
    # assert_clean expects none of these at the end.
    assert unhealthy.leases(operator)
    assert unhealthy.sessions(operator) > 0
    second = entry(operator.document(*REPAIR, code=3))
    assert (second["decision"], second["outcome"]) == ("refuse", None)
    assert running.wait(timeout=1500) == 0
    assert unhealthy.boot(operator, "gpu-1") != before
    assert history(operator)[-1]["outcome"] == "repaired"
    assert_clean(operator, cordoned_by_others=["gpu-1"])
    operator.kubectl("uncordon", "gpu-1")


def test_a_budget_that_forbids_eviction_and_a_pod_that_cannot_end(operator: Operator) -> None:
    image = operator.kubectl(
        "-n", "kube-system", "get", "daemonset", "nvidia-device-plugin-daemonset",
        "-o", "jsonpath={.spec.template.spec.containers[0].image}",
    ).strip()  # fmt: skip
    unhealthy.apply(operator, PODS.replace("IMAGE", image))
    for name in ("steady", "stuck"):
        operator.kubectl("rollout", "status", f"deployment/{name}", "--timeout=180s")
    before = unhealthy.boot(operator, "gpu-1")
    fault(operator, "gpu-1", "smi-hang")
    assert wait_for(operator, "gpu-1", ["reboot"])["hung_in_driver"]

    done = operator.gpunodes(*REPAIR, "--json", code=3)
    found = entry(json.loads(done.stdout))
    assert found["outcome"] == "not-repaired"
    assert "default/steady-" in found["why"]
    assert "--force-drain" in found["why"]
    assert "pods that do not terminate: default/stuck-" in done.stderr
    assert unhealthy.boot(operator, "gpu-1") == before
    assert not unhealthy.node(operator, "gpu-1")["spec"].get("unschedulable")

    done = operator.gpunodes(*REPAIR, "--force-drain", "--json")
    repaired(json.loads(done.stdout))
    (forced,) = [line for line in done.stderr.splitlines() if "deleted by force" in line]
    assert "default/steady-" in forced
    assert "default/stuck-" in forced
    assert unhealthy.boot(operator, "gpu-1") != before
    operator.kubectl("delete", "-f", "/run/unhealthy.yml")
    assert_clean(operator)


def test_a_repair_completes_after_a_kill_in_every_stage(operator: Operator) -> None:
    before = unhealthy.boot(operator, "gpu-1")
    hang(operator)
    for step in STEPS:
        running = operator.start(*REPAIR)
        operator.wait_for(running, step)
        kill(running)
    operator.gpunodes(*REPAIR)
    assert unhealthy.boot(operator, "gpu-1") != before
    # A second run removes the remains of the killed ones.
    operator.gpunodes(*REPAIR)
    ends = [each["outcome"] for each in history(operator) if each["kind"] == "end"]
    assert set(ends) == {"repaired"}
    assert_clean(operator)
