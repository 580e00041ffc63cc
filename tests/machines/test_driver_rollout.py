"""`gpunodes gpu upgrade` on two GPU machines: one at a time while a job goes on on the other, killed in every stage; a
driver that does not build; a driver that hangs in the middle.

The driver is the lab's stand-in: packages, DKMS, modules and services are real, GPUs are not. Its branch 595 does not
build. tests/machines/test_driver_upgrade.py has the stages of one machine.
"""

from __future__ import annotations

import time

from . import unhealthy
from .conftest import LONG, LabSpec, Operator, kill
from .unhealthy import entry

LAB = LabSpec("debian13", workers=0, gpu_workers=2, cluster=unhealthy.DRIVER, settings=unhealthy.TEST_SETTINGS)
MACHINES = ("gpu-1", "gpu-2")
OLD, NEW = "580.65.06", "590.44.01"
LOADED = "cat /sys/module/nvidia/version"
UPGRADE = ("gpu", "upgrade", "gpu-*", "--driver", "590", "--yes", "--wait-for-jobs", "2h")
STEPS = (
    "gpu-1: cordoned",
    "gpu-1: prepare: done",
    "gpu-1: draining the node",
    "gpu-1: applying gpu-driver",
    "gpu-1: verifying",
    "gpu-1: uncordoned",
)
PODS = """
apiVersion: batch/v1
kind: Job
metadata: {name: train}
spec:
  backoffLimit: 0
  template:
    spec:
      restartPolicy: Never
      nodeSelector: {kubernetes.io/hostname: gpu-2}
      volumes: [{name: run, hostPath: {path: /run/train, type: DirectoryOrCreate}}]
      containers:
        - name: main
          image: IMAGE
          command: [sh, -c, "while [ ! -e /train/end ]; do nvidia-smi -L >/dev/null || exit 1; sleep 3; done"]
          resources: {limits: {nvidia.com/gpu: 1}}
          volumeMounts: [{name: run, mountPath: /train}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: cpu}
spec:
  selector: {matchLabels: {app: cpu}}
  template:
    metadata: {labels: {app: cpu}}
    spec:
      nodeSelector: {kubernetes.io/hostname: gpu-1}
      containers: [{name: main, image: "IMAGE", command: [sh, -c, "exec sleep 100000"]}]
"""


def loaded(operator: Operator) -> dict[str, str]:
    return {machine: found[0] for machine, found in operator.each(MACHINES, LOADED).items()}


def pod(operator: Operator, label: str) -> str:
    """The UID and the restarts of the only pod with a label."""
    where = "jsonpath={range .items[*]}{.metadata.uid} {.status.containerStatuses[0].restartCount}{end}"
    return operator.kubectl("get", "pods", "-l", label, "-o", where).strip()


def job(operator: Operator, field: str) -> str:
    return operator.kubectl("get", "job", "train", "-o", f"jsonpath={{.status.{field}}}").strip()


def test_one_node_after_the_other_while_a_job_goes_on(operator: Operator) -> None:
    """Killed in each stage of the first node; the second one waits for its job."""
    image = operator.kubectl(
        "-n", "kube-system", "get", "daemonset", "nvidia-device-plugin-daemonset",
        "-o", "jsonpath={.spec.template.spec.containers[0].image}",
    ).strip()  # fmt: skip
    unhealthy.apply(operator, PODS.replace("IMAGE", image))
    operator.kubectl("rollout", "status", "deployment/cpu", "--timeout=300s", limit_s=LONG)
    operator.kubectl("wait", "--for=jsonpath={.status.ready}=1", "job/train", "--timeout=300s", limit_s=LONG)
    before = {label: pod(operator, label) for label in ("app=cpu", "job-name=train")}
    for number, step in enumerate(STEPS):
        running = operator.start(*(("rollout", "resume") if number else UPGRADE))
        operator.wait_for(running, step)
        kill(running)
    running = operator.start("rollout", "resume")
    operator.wait_for(running, "gpu-2: waiting for 1 pods of Jobs")
    assert loaded(operator) == {"gpu-1": NEW, "gpu-2": OLD}
    assert {label: pod(operator, label) for label in before} == before, "neither pod noticed"
    operator.ssh("gpu-2", "touch /run/train/end")
    assert running.wait(timeout=2 * LONG) == 0
    assert (job(operator, "succeeded"), job(operator, "failed")) == ("1", "")
    assert loaded(operator) == dict.fromkeys(MACHINES, NEW)
    assert pod(operator, "app=cpu") == before["app=cpu"], "a pod without GPUs stays"
    operator.gpunodes("gpu", "verify", *MACHINES)
    unhealthy.assert_clean(operator, MACHINES)
    # Another run has nothing to do.
    again = operator.document(*UPGRADE)["machines"]
    assert {each["name"]: each["outcome"] for each in again} == dict.fromkeys(MACHINES, "unchanged")


def test_a_driver_that_does_not_build_is_taken_back_and_the_roll_out_stops(operator: Operator) -> None:
    done = operator.document("gpu", "upgrade", "gpu-*", "--driver", "595", "--yes", code=3, limit_s=2 * LONG)
    assert {each["name"]: each["outcome"] for each in done["machines"]} == {"gpu-1": "undone", "gpu-2": None}
    assert "does not build for the kernel" in done["stopped"]
    assert loaded(operator) == dict.fromkeys(MACHINES, NEW)
    operator.gpunodes("gpu", "upgrade", "gpu-*", "--driver", "580", "--yes", code=2)
    operator.gpunodes("rollout", "abandon", "--yes")
    operator.gpunodes("gpu", "verify", *MACHINES)
    unhealthy.assert_clean(operator, MACHINES)


def test_a_driver_that_hangs_in_the_middle_is_left_to_a_repair(operator: Operator) -> None:
    """The hang keeps the driver loaded, and cannot be taken back either: the node is held until a repair reboots it."""
    with unhealthy.with_variables(operator, "control-1", gpunodes_rollout_verify_timeout=240):
        running = operator.start("gpu", "upgrade", "gpu-1", "--driver", "580", "--yes")
        operator.wait_for(running, "gpu-1: draining the node")
        unhealthy.fault(operator, "gpu-1", "smi-hang")
        operator.ssh("gpu-1", "systemd-run --unit=stuck nvidia-smi")
        assert running.wait(timeout=2 * LONG) == 3
    status = operator.document("rollout", "status")
    assert entry(status["rollout"])["state"] == "failed", status
    assert unhealthy.node(operator, "gpu-1")["spec"]["unschedulable"]
    assert loaded(operator)["gpu-2"] == NEW
    refused = entry(operator.document("repair", "gpu-1", "--yes", code=3))
    assert refused["decision"] == "refuse"
    operator.gpunodes("rollout", "abandon", "--yes", code=None)
    operator.gpunodes("uncordon", "gpu-1")
    unhealthy.repaired(operator.document("repair", "gpu-1", "--from", "reboot", "--yes"))
    deadline = time.monotonic() + LONG
    while not unhealthy.serves_gpus(operator, "gpu-1"):
        assert time.monotonic() < deadline
        time.sleep(10)
    # Whichever of the two it came back with.
    operator.gpunodes("gpu", "upgrade", "gpu-1", "--driver", "590", "--yes")
    assert loaded(operator)["gpu-1"] == NEW
    unhealthy.assert_clean(operator, MACHINES)
