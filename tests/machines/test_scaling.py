"""Pools that scale by power, with GPUs: machines are switched on for pods that wait, and off when they are idle.

Two pools of one GPU machine each, which are pools from the beginning of the cluster. Measured: the seconds from a pod
that waits to its start, beside those of the machine's own boot and driver.
"""

from __future__ import annotations

import time

from . import pods, unhealthy
from .conftest import LabSpec, Operator
from .scaling import IMAGES, archive, are_off, nodes, power_of, runs_on, until, write_pools

GPU = ("gpu-1", "gpu-2")
LAB = LabSpec("debian13", workers=0, gpu_workers=2, up_options=IMAGES)
UP_LIMIT_S = 3600.0
"""Two emulated machines build a kernel module while a control plane starts."""
AUTOSCALER_S = 30.0
"""So old is a pod that requests GPUs before the autoscaler looks for a machine (core/static_autoscaler.go)."""
GOAL_S = 30.0
"""What gpunodes may add to that and to a machine's own boot."""
EMULATED_S = 12 * GOAL_S
"""Emulated machines are about eight times slower, and each look at them takes some seconds."""


def gpus(operator: Operator, machine: str) -> str:
    """The GPUs that a node offers, "" without it."""
    query = r"jsonpath={.status.allocatable.nvidia\.com/gpu}"
    return operator.kubectl("get", "node", machine, "-o", query, code=None).strip()


def test_machines_that_nothing_needs_are_switched_off(operator: Operator) -> None:
    write_pools(operator, archive(), GPU)
    operator.gpunodes("up", *unhealthy.DRIVER, limit_s=UP_LIMIT_S)
    done = operator.gpunodes("autoscale", "status", code=2)
    assert "this cluster has no autoscaler" in done.stderr
    planned = operator.document("autoscale", "up", "--dry-run")
    assert not planned["running"]
    assert any("passwords" in each for each in planned["changes"])
    assert "gpunodes-autoscaler" not in operator.kubectl("-n", "kube-system", "get", "configmaps,secrets,deployments")
    found = operator.document("autoscale", "up", "--yes")
    assert found["running"]
    # A machine that was idle long enough meanwhile is stopped already.
    assert {each["node"]: each["phase"] in {"on", "stopping"} for each in found["machines"]} == dict.fromkeys(GPU, True)
    until("both are idle and switched off", lambda: are_off(operator, GPU))
    # Nothing else may switch them on, or call them sick.
    verdicts = operator.document("health", "gpu-*", "--reboot-hung", "--yes", code=None)["machines"]
    assert {each["decision"] for each in verdicts} == {"nothing"}
    assert [power_of(operator, machine) for machine in GPU] == ["off", "off"]


def test_a_pod_that_waits_switches_one_machine_on(operator: Operator) -> None:
    limits = {"resources": {"limits": {"nvidia.com/gpu": 2}}}
    pods.start(operator, "first", pods.GPU_IMAGE, "nvidia-smi -L; sleep 86400", limits)
    began, seen = time.monotonic(), {}
    for what, is_so in (
        ("it has power", lambda: power_of(operator, "gpu-1") == "on"),
        ("its node has registered", lambda: "gpu-1" in nodes(operator)),
        ("its GPUs are offered", lambda: gpus(operator, "gpu-1") == "2"),
        ("the pod runs", lambda: runs_on(operator, "first") == "gpu-1"),
    ):
        until(what, is_so)
        seen[what] = time.monotonic() - began
    own = seen["its GPUs are offered"] - seen["it has power"]
    added = seen["the pod runs"] - own - AUTOSCALER_S
    boot = seen["its node has registered"] - seen["it has power"]
    print(
        f"the pod runs after {seen['the pod runs']:.0f} s; of them {boot:.0f} s the machine's own boot, "
        f"{own - boot:.0f} s the load of its driver, and {added:.0f} s added by gpunodes: the goal is {GOAL_S:.0f} s, "
        f"the limit for emulated machines {EMULATED_S:.0f} s"
    )
    assert added < EMULATED_S
    assert power_of(operator, "gpu-2") == "off", "one machine for one pod"
    until("it lists both GPUs", lambda: operator.kubectl("logs", "first").count("UUID: GPU-") == 2)
    assert "gpunodes.dev/starting" not in operator.kubectl("get", "node", "gpu-1", "-o", "json")


def test_it_is_removed_while_a_machine_serves(operator: Operator) -> None:
    done = operator.gpunodes("autoscale", "down", "--yes")
    assert "not on: gpu-2" in done.stdout
    assert runs_on(operator, "first") == "gpu-1"
    unhealthy.assert_no_password_leaks(operator)
