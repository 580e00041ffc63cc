"""Pools that scale by power: machines with BMCs are switched on for pods that wait, and off when they are idle.

Two pools of one GPU machine each. The autoscaler and the power server run as pods on the control plane, and reach the
BMC of gpu-1 by the lab's network. gpu-2 counts as a machine without a BMC: the lab's listener starts it by Wake-on-LAN,
and it shuts itself down. Not run since gpu-2 has no BMC, and since that of gpu-1 refuses.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import yaml
from gpunodes.inventory import Inventory

from tests import node_certificates

from . import scaling, unhealthy
from .conftest import Operator
from .scaling import (
    GPU,
    archive,
    are_off,
    bmc_without_users,
    gone,
    is_ready,
    job,
    phases,
    power_of,
    prepare,
    runs_on,
    unreachable_bmc,
    until,
    warnings,
)

LAB = scaling.LAB


def without_bmc(operator: Operator, machine: str) -> None:
    """Let a machine be switched on by Wake-on-LAN."""
    address = str(Inventory(operator.folder / "inventory").variables(machine)["gpunodes_bmc_address"])
    # The BMCs listen at the first address of the lab's subnet, a /24.
    broadcast = str(urlsplit(address).hostname).rpartition(".")[0] + ".255"
    variables = operator.folder / "inventory" / "host_vars" / f"{machine}.yml"
    variables.parent.mkdir(exist_ok=True)
    variables.write_text(yaml.safe_dump({"gpunodes_bmc_type": "wol", "gpunodes_bmc_address": broadcast}))


def test_machines_that_nothing_needs_are_switched_off(operator: Operator) -> None:
    without_bmc(operator, "gpu-2")
    done = operator.gpunodes("autoscale", "status", code=2)
    assert "this cluster has no autoscaler" in done.stderr
    prepare(operator, archive())
    planned = operator.document("autoscale", "up", "--dry-run")
    assert not planned["running"]
    assert any("passwords" in each for each in planned["changes"])
    assert "gpunodes-autoscaler" not in operator.kubectl("-n", "kube-system", "get", "configmaps,secrets,deployments")
    found = operator.document("autoscale", "up", "--yes")
    assert found["running"]
    assert {each["node"]: each["phase"] for each in found["machines"]} == dict.fromkeys(GPU, "on")
    until("both are idle and switched off", lambda: are_off(operator))
    # Nothing else may switch them on, or call them sick.
    verdicts = operator.document("health", "gpu-*", "--reboot-hung", "--yes", code=None)["machines"]
    assert {each["decision"] for each in verdicts} == {"nothing"}
    assert [power_of(operator, machine) for machine in GPU] == ["off", "off"]


def test_a_pod_that_waits_switches_one_machine_on(operator: Operator) -> None:
    job(operator, "first")
    taken = until("the first pod runs", lambda: runs_on(operator, "first"))
    assert runs_on(operator, "first") == "gpu-1"
    assert power_of(operator, "gpu-2") == "off", "one machine for one pod"
    until("it lists both GPUs", lambda: operator.kubectl("logs", "first").count("UUID: GPU-") == 2)
    assert "gpunodes.dev/starting" not in operator.kubectl("get", "node", "gpu-1", "-o", "json")
    print(f"from the waiting pod to its start: {taken:.0f} s")


def test_the_other_pool_when_the_first_is_full(operator: Operator) -> None:
    job(operator, "second")
    until("the second pod runs", lambda: runs_on(operator, "second"))
    assert runs_on(operator, "second") == "gpu-2"


def test_a_killed_power_server_goes_on(operator: Operator) -> None:
    operator.kubectl("delete", "pod", "first", "second", "--wait=true")
    until("a machine is stopped", lambda: "stopping" in phases(operator).values())
    operator.ssh("control-1", "kill -9 $(pgrep -f 'python3* -m gpunodes.autoscale' | head -1)")
    until("both are switched off", lambda: are_off(operator))


def reason(operator: Operator, machine: str) -> str:
    found = operator.document("autoscale", "status", code=None)["machines"]
    return str(next(each["reason"] for each in found if each["node"] == machine))


def test_a_bmc_that_refuses_or_does_not_respond_means_the_other_pool(operator: Operator) -> None:
    with bmc_without_users("gpu-1"):
        job(operator, "third")
        until("the third pod runs", lambda: runs_on(operator, "third"))
        assert runs_on(operator, "third") == "gpu-2"
        assert power_of(operator, "gpu-1") == "off"
        assert "refuses the user" in reason(operator, "gpu-1")
        # gpu-2 has booted meanwhile: the order was repeated, and told once.
        [told] = warnings(operator, "gpu-1", "NotSwitchedOn")
        assert "refuses the user" in told
        with unreachable_bmc(operator, "gpu-1"):
            until("another error is noticed", lambda: "does not respond" in reason(operator, "gpu-1"))
            [told] = warnings(operator, "gpu-1", "NotSwitchedOff")
            assert "does not respond" in told
    until("its BMC shows that it is off", lambda: phases(operator)["gpu-1"] == "failed")
    assert power_of(operator, "gpu-1") == "off"


def test_the_autoscaler_is_removed(operator: Operator) -> None:
    operator.kubectl("delete", "pod", "third", "--wait=true")
    until("gpu-2 is switched off", lambda: gone(operator, "gpu-2"))
    planned = operator.document("autoscale", "down", "--dry-run")
    assert planned["running"]
    assert any("passwords" in each for each in planned["changes"])
    assert operator.document("autoscale", "status", code=None)["running"]
    done = operator.gpunodes("autoscale", "down", "--yes")
    assert "gpu-2" in done.stdout
    left = operator.kubectl("-n", "kube-system", "get", "deployments,secrets,clusterroles", "-o", "name")
    # Kubernetes has a ClusterRole of its own for the autoscaler of pods.
    assert "gpunodes-autoscaler" not in left
    done = operator.gpunodes("power", "gpu-2", "on", "--wait", "--yes")
    assert "gpu-2: its node is ready" in done.stdout


def test_a_machine_whose_certificate_has_ended_is_joined_again(operator: Operator) -> None:
    """As if it had been off for more than a year."""
    ended = node_certificates.pem("gpu-2", days=-1)
    pem = "/var/lib/kubelet/pki/kubelet-client-current.pem"
    operator.ssh("gpu-2", f"systemctl stop kubelet && rm {pem} && cat >{pem} <<'END'\n{ended}END")
    # A node that is ready has another certificate.
    until("its node is not ready", lambda: not is_ready(operator, "gpu-2"))
    operator.gpunodes("join", "gpu-2", "--driver", "580")
    assert is_ready(operator, "gpu-2")
    operator.ssh("gpu-2", f"test -L {pem}")  # the kubelet's own: the test's is a file


def test_no_password_leaks(operator: Operator) -> None:
    unhealthy.assert_no_password_leaks(operator)
