"""The container runtime of a worker is upgraded, killed and resumed."""

from __future__ import annotations

import os
import signal

from .conftest import BARE, LONG, LabSpec, Operator, lines
from .test_upgrade import wait_until

# Pods move to the control plane while the worker is drained.
LAB = LabSpec("debian13", workers=1, cluster=(), settings={"gpunodes_control_plane_schedulable": True})


def test_a_node_keeps_an_older_runtime_until_it_is_upgraded(operator: Operator) -> None:
    """The sources have one version only: the same package with an older number is installed."""
    older = "1.7.1~ds1-1"
    operator.ssh(
        "worker-1",
        "set -e; rm -rf /root/older; mkdir -p /root/older; cd /root/older; chmod 755 /root/older; "
        "apt-get download -qq -oAPT::Sandbox::User=root containerd; dpkg-deb -R containerd_*.deb tree; "
        f"sed -i 's/^Version: .*/Version: {older}/' tree/DEBIAN/control; "
        f"file=/var/cache/apt/archives/containerd_{older}_$(dpkg --print-architecture).deb; "
        "dpkg-deb -Znone -b tree $file; dpkg -i --force-downgrade --force-confold --force-hold $file; "
        "apt-mark hold containerd; cd /; rm -r /root/older",
        limit_s=LONG,
    )
    results = operator.document("up", "--dry-run")["machines"]
    assert {each["outcome"] for each in results} == {"unchanged"}
    [planned] = operator.document("runtime", "plan", "worker-1")["machines"]
    assert planned["needed"], planned
    assert [each["old"] for each in planned["packages"] if each["name"] == "containerd"] == [older]


def test_a_killed_upgrade_of_the_runtime_is_resumed(operator: Operator) -> None:
    running = operator.start("runtime", "upgrade", "worker-1", "--yes")
    wait_until(operator, "worker-1", "test -e /var/cache/gpunodes/runtime/set.json", "nothing was downloaded")
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    operator.gpunodes("rollout", "resume")
    assert lines(operator.ssh("worker-1", "apt-mark showhold | grep -x containerd")) == ["containerd"]
    [planned] = operator.document("runtime", "plan", "worker-1")["machines"]
    assert not planned["needed"], planned
    assert operator.kubectl("get", "node", "worker-1", "--no-headers").split()[1] == "Ready"
    again = operator.document("runtime", "upgrade", "worker-1", "--yes")["machines"]
    assert [each["outcome"] for each in again] == ["unchanged"]


def test_a_reset_still_leaves_a_bare_machine(operator: Operator) -> None:
    operator.gpunodes("remove", "--yes", "worker-1")
    assert lines(operator.ssh("worker-1", BARE)) == operator.bare["worker-1"]
