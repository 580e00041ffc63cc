"""Pools that scale by power, after a reboot of the control plane, and with a disruption budget."""

from __future__ import annotations

import json
import time

from . import scaling, unhealthy
from .conftest import Operator
from .scaling import IDLE_S, WORKERS, are_off, gone, job, nodes, phases, power_of, prepare, runs_on, until

LAB = scaling.LAB
# It may run on the control plane, and prefers the first worker: the budget alone keeps it there.
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
            - weight: 100
              preference: {matchExpressions: [{key: gpunodes.dev/pool, operator: In, values: [preferred]}]}
      containers: [{name: main, image: IMAGE, command: [sleep, "86400"]}]
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: web}
spec:
  minAvailable: 1
  selector: {matchLabels: {app: web}}
"""


def autoscaler_renewed(operator: Operator) -> str:
    """When the autoscaler last renewed its Lease."""
    query = ("get", "lease", "cluster-autoscaler", "-o", "jsonpath={.spec.renewTime}")
    return operator.kubectl("-n", "kube-system", *query).strip()


def web_on(operator: Operator) -> list[str]:
    """The nodes of the running pods of the Deployment."""
    items = json.loads(operator.kubectl("get", "pods", "-l", "app=web", "-o", "json"))["items"]
    return [each["spec"].get("nodeName", "") for each in items if each["status"]["phase"] == "Running"]


def delete_jobs(operator: Operator, machine: str) -> None:
    """Delete the pods of a machine that are not of the Deployment."""
    operator.kubectl("delete", "pods", "-l", "app!=web", "--field-selector", f"spec.nodeName={machine}", "--wait=true")


def test_from_zero_after_the_control_plane_was_rebooted(operator: Operator) -> None:
    """The power server reads its orders from the cluster; what it knows of the pools is there, too."""
    prepare(operator)
    operator.gpunodes("autoscale", "up", "--yes")
    until("both are idle and switched off", lambda: are_off(operator))
    assert operator.lab("power", "control-1", "cycle").returncode == 0
    until("it is back", lambda: operator.lab("ssh", "control-1", "true").returncode == 0)
    started = operator.ssh("control-1", "date --utc +%FT%TZ").strip()
    until("the API responds", lambda: nodes(operator) == {"control-1"})
    until("the power server knows its machines", lambda: phases(operator) == dict.fromkeys(WORKERS, "off"))
    until("the autoscaler runs again", lambda: autoscaler_renewed(operator) > started)
    job(operator, "after")
    until("worker-1 is switched on", lambda: power_of(operator, "worker-1") == "on")
    assert power_of(operator, "worker-2") == "off", "both pools fit, and the priority of the first is higher"


def test_the_other_pool_when_the_first_is_full(operator: Operator) -> None:
    # Both machines boot at the same time; each pod may get either.
    job(operator, "second")
    until("both pods run", lambda: {runs_on(operator, name) for name in ("after", "second")} == set(WORKERS))
    delete_jobs(operator, "worker-2")


def test_the_last_pod_of_a_node_stays_while_its_budget_allows_no_eviction(operator: Operator) -> None:
    unhealthy.apply(operator, BUDGET.replace("IMAGE", str(operator.setting("gpunodes_ready_image"))))
    until("the pod of the budget runs", lambda: web_on(operator) == ["worker-1"])
    delete_jobs(operator, "worker-1")
    # The autoscaler would drain it after IDLE_S, and needs some scans for it.
    for _ in range(3):
        time.sleep(IDLE_S)
        assert (power_of(operator, "worker-1"), web_on(operator)) == ("on", ["worker-1"])
        until("the power server leaves it on", lambda: phases(operator)["worker-1"] == "on", limit_s=IDLE_S)
    operator.kubectl("delete", "poddisruptionbudget", "web")
    until("worker-1 is drained and switched off", lambda: gone(operator, "worker-1"))
    until("the pod moved", lambda: web_on(operator) == ["control-1"])
    operator.kubectl("delete", "deployment", "web", "--wait=true")


def test_it_is_removed(operator: Operator) -> None:
    operator.gpunodes("autoscale", "down", "--yes")
    unhealthy.assert_no_password_leaks(operator)
