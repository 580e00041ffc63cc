"""Pools that scale by power, after a reboot of the control plane, and with a disruption budget. Not run yet.

Measured: the seconds from a pod that waits to its start, beside those of the machine's own boot and driver.
"""

from __future__ import annotations

import json
import time

from . import scaling, unhealthy
from .conftest import Operator
from .scaling import GPU, IDLE_S, archive, are_off, gone, job, nodes, phases, power_of, prepare, runs_on, until

LAB = scaling.LAB
GOAL_S = 30.0
"""What gpunodes may add to a machine's own boot."""
EMULATED_S = 8 * GOAL_S
"""Emulated machines are about eight times slower."""
# It may run on the control plane, and prefers the GPU machine: the budget alone keeps it there.
BUDGET = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 0
      tolerations: [{key: node-role.kubernetes.io/control-plane, operator: Exists}]
      affinity:
        nodeAffinity:
          preferredDuringSchedulingIgnoredDuringExecution:
            - {weight: 100, preference: {matchExpressions: [{key: gpunodes.dev/pool, operator: In, values: [h100]}]}}
      containers: [{name: main, image: IMAGE, command: [sleep, "86400"]}]
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: web}
spec:
  minAvailable: 1
  selector: {matchLabels: {app: web}}
"""


def gpus(operator: Operator, machine: str) -> str:
    """The GPUs that a node offers, "" without it."""
    query = r"jsonpath={.status.allocatable.nvidia\.com/gpu}"
    return operator.kubectl("get", "node", machine, "-o", query, code=None).strip()


def autoscaler_renewed(operator: Operator) -> str:
    """When the autoscaler last renewed its Lease."""
    query = ("get", "lease", "cluster-autoscaler", "-o", "jsonpath={.spec.renewTime}")
    return operator.kubectl("-n", "kube-system", *query).strip()


def web_on(operator: Operator) -> list[str]:
    """The nodes of the running pods of the Deployment."""
    items = json.loads(operator.kubectl("get", "pods", "-l", "app=web", "-o", "json"))["items"]
    return [each["spec"].get("nodeName", "") for each in items if each["status"]["phase"] == "Running"]


def test_from_zero_after_the_control_plane_was_rebooted(operator: Operator) -> None:
    """The power server reads its orders from the cluster; what it knows of the pools is there, too."""
    prepare(operator, archive())
    operator.gpunodes("autoscale", "up", "--yes")
    until("both are idle and switched off", lambda: are_off(operator))
    assert operator.lab("power", "control-1", "cycle").returncode == 0
    until("it is back", lambda: operator.lab("ssh", "control-1", "true").returncode == 0)
    started = operator.ssh("control-1", "date --utc +%FT%TZ").strip()
    until("the API responds", lambda: nodes(operator) == {"control-1"})
    until("the power server knows its machines", lambda: phases(operator) == dict.fromkeys(GPU, "off"))
    # Their own start is no part of what is measured.
    until("the autoscaler runs again", lambda: autoscaler_renewed(operator) > started)
    until("the power server runs again", lambda: operator.document("autoscale", "status")["running"])
    job(operator, "after")
    began, seen = time.monotonic(), {}
    for what, is_so in (
        ("it has power", lambda: power_of(operator, "gpu-1") == "on"),
        ("its node has registered", lambda: "gpu-1" in nodes(operator)),
        ("its GPUs are offered", lambda: gpus(operator, "gpu-1") == "2"),
        ("the pod runs", lambda: runs_on(operator, "after") == "gpu-1"),
    ):
        until(what, is_so)
        seen[what] = time.monotonic() - began
    own = seen["its GPUs are offered"] - seen["it has power"]
    added = seen["the pod runs"] - own
    boot = seen["its node has registered"] - seen["it has power"]
    print(
        f"the pod runs after {seen['the pod runs']:.0f} s; of them {boot:.0f} s the machine's own boot, "
        f"{own - boot:.0f} s the load of its driver, and {added:.0f} s added by gpunodes: the goal is {GOAL_S:.0f} s, "
        f"the limit for emulated machines {EMULATED_S:.0f} s"
    )
    assert added < EMULATED_S
    assert power_of(operator, "gpu-2") == "off", "one machine for one pod"


def test_the_last_pod_of_a_node_stays_while_its_budget_allows_no_eviction(operator: Operator) -> None:
    unhealthy.apply(operator, BUDGET.replace("IMAGE", str(operator.setting("gpunodes_ready_image"))))
    until("the pod of the budget runs", lambda: web_on(operator) == ["gpu-1"])
    operator.kubectl("delete", "pod", "after", "--wait=true")
    # The autoscaler would drain it after IDLE_S, and needs some scans for it.
    for _ in range(4):
        time.sleep(IDLE_S)
        assert web_on(operator) == ["gpu-1"]
        assert (power_of(operator, "gpu-1"), phases(operator)["gpu-1"]) == ("on", "on")
    operator.kubectl("delete", "poddisruptionbudget", "web")
    until("gpu-1 is drained and switched off", lambda: gone(operator, "gpu-1"))
    until("the pod moved", lambda: web_on(operator) == ["control-1"])
    operator.kubectl("delete", "deployment", "web", "--wait=true")


def test_it_is_removed(operator: Operator) -> None:
    operator.gpunodes("autoscale", "down", "--yes")
    unhealthy.assert_no_password_leaks(operator)
