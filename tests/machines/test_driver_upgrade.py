"""The driver of a node replaced in stages, interrupted, refused and put back.

The driver is the lab's stand-in: packages, DKMS, kernel modules and services are real, GPUs are not. Its branch 595
does not build.
"""

from __future__ import annotations

import time
from typing import Any

from . import unhealthy
from .conftest import LONG, LabSpec, Operator, kill
from .pods import start

LAB = LabSpec("debian13", workers=0, gpu_workers=1)
UP_LIMIT_S = 3000.0
TAINT = "gpunodes.dev/repair"
BUSYBOX = "registry.k8s.io/e2e-test-images/busybox:1.37.0-1"
LOADED = "cat /sys/module/nvidia/version"
KEPT = "dpkg-query -W; ls -R /var/cache/gpunodes 2>&1; true"
BEGUN = "test -e /run/modprobe.d/gpunodes-driver-upgrade.conf"
"""Whether a driver is being replaced: until it is, no program may load a module."""
OLD, NEW = "580.65.06", "590.44.01"


def stage(operator: Operator, tags: str, driver: str, *more: str, code: int = 0) -> str:
    """Run stages of the playbook; returns its output."""
    words = ("--limit", "gpu-1", "--tags", tags, "-e", f"gpunodes_driver_branch={driver}", *more)
    done = operator.gpunodes("playbook", "gpu_upgrade", *words, code=code)
    return " ".join((done.stdout + done.stderr).split())


def uid(operator: Operator) -> str:
    return operator.kubectl(
        "get", "pod", "cpu", "-o", "jsonpath={.metadata.uid} {.status.containerStatuses[0].restartCount}"
    )


def test_a_node_with_the_old_driver_and_a_pod_without_gpus(operator: Operator) -> None:
    operator.gpunodes("up", "--driver", "580", limit_s=UP_LIMIT_S)
    assert operator.ssh("gpu-1", LOADED).strip() == OLD
    tolerations: dict[str, Any] = {"tolerations": [{"operator": "Exists"}], "nodeName": "gpu-1"}
    start(operator, "cpu", BUSYBOX, "sleep 36000", {}, **tolerations)
    operator.kubectl("wait", "--for=condition=Ready", "pod/cpu", "--timeout=180s")


def test_a_plan_touches_nothing(operator: Operator) -> None:
    before = operator.ssh("gpu-1", KEPT)
    document = operator.document("gpu", "upgrade", "plan", "gpu-1", "--driver", "590")
    [machine] = document["machines"]
    assert (machine["upgrade"]["installed"], machine["upgrade"]["needed"]) == (OLD, True)
    assert not operator.document("gpu", "upgrade", "plan", "gpu-1", "--driver", "580")["machines"][0]["upgrade"][
        "needed"
    ]
    refused = operator.document("gpu", "upgrade", "plan", "gpu-1", "--driver", "590.99.99", code=1)
    [conflict] = refused["machines"][0]["conflicts"]
    assert "has no nvidia-open 590.99.99" in conflict["fact"]
    assert f"{NEW}-1" in conflict["limit"]
    assert operator.ssh("gpu-1", KEPT) == before


def test_without_a_tag_nothing_is_changed(operator: Operator) -> None:
    operator.gpunodes("playbook", "gpu_upgrade", "--limit", "gpu-1", "-e", "gpunodes_driver_branch=590")
    assert operator.ssh("gpu-1", LOADED).strip() == OLD


def test_both_drivers_are_kept_before_anything_is_changed(operator: Operator) -> None:
    stage(operator, "prepare", "590")
    assert operator.ssh("gpu-1", "ls /var/cache/gpunodes/driver").split() == [OLD, NEW]
    assert operator.ssh("gpu-1", LOADED).strip() == OLD
    assert "changed=0" in stage(operator, "prepare", "590")


def test_a_driver_in_use_is_left_as_it_was(operator: Operator) -> None:
    operator.kubectl("taint", "node", "gpu-1", f"{TAINT}=test:NoExecute")
    time.sleep(30)
    operator.ssh("gpu-1", "systemd-run --unit=holder sh -c 'exec 3</dev/nvidia0; exec sleep 3600'")
    output = stage(operator, "apply", "590", code=2)
    assert "of holder.service)" in output
    assert "the GPUs" in output
    assert operator.ssh("gpu-1", LOADED).strip() == OLD
    assert operator.ssh("gpu-1", "systemctl is-active nvidia-persistenced").strip() == "active"
    operator.ssh("gpu-1", "systemctl stop holder")


def test_a_killed_replacement_continues(operator: Operator) -> None:
    words = ("--limit", "gpu-1", "--tags", "apply", "-e", "gpunodes_driver_branch=590")
    process = operator.start("playbook", "gpu_upgrade", *words)
    deadline = time.monotonic() + LONG
    while operator.lab("ssh", "gpu-1", BEGUN).returncode:
        assert time.monotonic() < deadline, "the replacement does not begin"
        time.sleep(1)
    time.sleep(20)
    kill(process)
    stage(operator, "apply,verify", "590")
    assert operator.ssh("gpu-1", LOADED).strip() == NEW
    assert "changed=0" in stage(operator, "apply", "590")
    label = "jsonpath={.metadata.labels.gpunodes\\.dev/gpu-driver}"
    assert operator.kubectl("get", "node", "gpu-1", "-o", label).strip() == NEW


def test_a_driver_that_does_not_build_is_put_back(operator: Operator) -> None:
    stage(operator, "prepare", "595")
    output = stage(operator, "apply", "595", code=2)
    assert "does not build for the kernel" in output
    stage(operator, "undo", "595")
    assert operator.ssh("gpu-1", LOADED).strip() == NEW
    held = operator.ssh("gpu-1", "apt-mark showhold").split()
    assert {"nvidia-open", "nvidia-driver-pinning-590"} <= {*held}
    assert not [name for name in operator.ssh("gpu-1", "dpkg-query -W").splitlines() if "pinning-595" in name]


def test_pods_get_gpus_again_and_the_other_pod_never_noticed(operator: Operator) -> None:
    operator.kubectl("taint", "node", "gpu-1", f"{TAINT}-")
    unhealthy.wait_until_healthy(operator)
    operator.gpunodes("gpu", "verify", "gpu-1")
    assert uid(operator).endswith(" 0")


def test_the_next_boot_loads_the_new_driver(operator: Operator) -> None:
    unhealthy.reboot(operator, "gpu-1")
    unhealthy.wait_until_healthy(operator)
    assert operator.ssh("gpu-1", LOADED).strip() == NEW


def test_a_reset_leaves_no_driver_and_no_kept_packages(operator: Operator) -> None:
    operator.gpunodes("remove", "gpu-1", "--yes")
    assert operator.ssh("gpu-1", "ls -d /var/cache/gpunodes /sys/module/nvidia", code=None) == ""
    assert operator.ssh("gpu-1", "apt-mark showhold").split() == []
