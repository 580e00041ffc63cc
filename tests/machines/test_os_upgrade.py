"""`gpunodes os upgrade` on a machine that boots its own disk: a kernel for which the GPU driver does not build is held
with the reason, one for which it builds boots, and a machine with nothing to do is left alone.
"""

from __future__ import annotations

import json

from . import unhealthy
from .conftest import LabSpec, Operator

LAB = LabSpec(
    "debian13",
    workers=0,
    gpu_workers=1,
    up_options=("--own-kernel",),
    cluster=unhealthy.DRIVER,
    settings=unhealthy.SINGLE_MACHINE_SETTINGS,
)
UPGRADE = ("os", "upgrade", "gpu-1", "--yes", "--reboot", "if-needed")
KERNELS = "dpkg-query -W -f '${db:Status-Status} ${Package}\\n' 'linux-image-[0-9]*' | grep ^installed"
HELD = "apt-mark showhold | grep ^linux-"


def kernel(operator: Operator) -> str:
    return operator.ssh("gpu-1", "uname -r").strip()


def outcome(operator: Operator) -> str:
    [machine] = operator.document(*UPGRADE)["machines"]
    return str(machine["outcome"])


def test_a_kernel_without_a_driver_is_held_with_the_reason(operator: Operator) -> None:
    before = kernel(operator), operator.ssh("gpu-1", KERNELS)
    [planned] = operator.document("os", "plan", "gpu-1")["machines"]
    assert planned["kernels"], "the mirror has a newer kernel"
    unhealthy.fault(operator, "gpu-1", "no-build")
    done = operator.gpunodes(*UPGRADE, "--json", limit_s=3000)
    assert json.loads(done.stdout)["machines"][0]["outcome"] == "done"
    assert f"the kernel {planned['kernels'][0]} is removed again" in done.stderr
    assert (kernel(operator), operator.ssh("gpu-1", KERNELS)) == before
    assert "linux-image" in operator.ssh("gpu-1", HELD)
    operator.gpunodes("gpu", "verify", "gpu-1")
    # The next boot is the same, too.
    assert operator.ssh("gpu-1", "ls /boot/vmlinuz-*").split() == [f"/boot/vmlinuz-{before[0]}"]


def test_a_kernel_for_which_it_builds_boots(operator: Operator) -> None:
    before = kernel(operator), unhealthy.boot(operator, "gpu-1")
    unhealthy.fault(operator, "gpu-1", "clear")
    operator.gpunodes(*UPGRADE, limit_s=3000)
    assert kernel(operator) != before[0]
    assert unhealthy.boot(operator, "gpu-1") != before[1]
    assert operator.ssh("gpu-1", "ls /sys/module | grep -x nvidia").split() == ["nvidia"]
    assert operator.ssh("gpu-1", HELD, code=None) == "", "the hold is released"
    operator.gpunodes("gpu", "verify", "gpu-1")
    unhealthy.assert_clean(operator)


def test_a_machine_with_nothing_to_do_is_left_alone(operator: Operator) -> None:
    before = unhealthy.boot(operator, "gpu-1")
    assert outcome(operator) == "unchanged"
    assert unhealthy.boot(operator, "gpu-1") == before
    unhealthy.assert_clean(operator)
