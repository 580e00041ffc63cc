"""Pools that scale by power: a power server that is killed, a BMC that refuses, a machine without one, the removal.

The workers joined before their pools scaled. The autoscaler and the power server run as pods on the control plane, and
reach the BMC of worker-1 by the lab's network. worker-2 counts as a machine without a BMC: the lab's listener starts it
by Wake-on-LAN, and it shuts itself down.
"""

from __future__ import annotations

import dataclasses
from urllib.parse import urlsplit

import yaml
from gpunodes.inventory import Inventory

from tests import node_certificates

from . import scaling, unhealthy
from .conftest import Operator
from .scaling import (
    WORKERS,
    archive,
    are_off,
    bmc_without_users,
    gone,
    is_ready,
    job,
    phases,
    power_of,
    reason,
    runs_on,
    unreachable_bmc,
    until,
    warnings,
    write_pools,
)

LAB = dataclasses.replace(scaling.LAB, cluster=())


def without_bmc(operator: Operator, machine: str) -> None:
    """Let a machine be switched on by Wake-on-LAN."""
    address = str(Inventory(operator.folder / "inventory").variables(machine)["gpunodes_bmc_address"])
    # The BMCs listen at the first address of the lab's subnet, a /24.
    broadcast = str(urlsplit(address).hostname).rpartition(".")[0] + ".255"
    variables = operator.folder / "inventory" / "host_vars" / f"{machine}.yml"
    variables.parent.mkdir(exist_ok=True)
    variables.write_text(yaml.safe_dump({"gpunodes_bmc_type": "wol", "gpunodes_bmc_address": broadcast}))


def test_a_killed_power_server_goes_on(operator: Operator) -> None:
    without_bmc(operator, "worker-2")
    write_pools(operator, archive(), WORKERS)
    operator.gpunodes("join", *WORKERS)
    operator.gpunodes("autoscale", "up", "--yes")
    until("a machine is stopped", lambda: "stopping" in phases(operator).values())
    operator.ssh("control-1", "kill -9 $(pgrep -f 'python3* -m gpunodes.autoscale' | head -1)")
    # The locks that it held expire first.
    until("both are switched off", lambda: are_off(operator))


def test_a_bmc_that_refuses_or_does_not_respond_means_the_other_pool(operator: Operator) -> None:
    with bmc_without_users("worker-1"):
        job(operator, "only")
        until("the pod runs", lambda: runs_on(operator, "only"))
        assert runs_on(operator, "only") == "worker-2"
        assert power_of(operator, "worker-1") == "off"
        assert "refuses the user" in reason(operator, "worker-1")
        # worker-2 has booted meanwhile: the order was repeated, and told once.
        assert len(warnings(operator, "worker-1", "NotSwitchedOn", "refuses the user")) == 1
        with unreachable_bmc(operator, "worker-1"):
            until("another error is noticed", lambda: "does not respond" in reason(operator, "worker-1"))
            until("it is told", lambda: warnings(operator, "worker-1", "NotSwitchedOff", "does not respond"))
    until("its BMC shows that it is off", lambda: phases(operator)["worker-1"] == "failed")
    assert power_of(operator, "worker-1") == "off"


def test_the_autoscaler_is_removed(operator: Operator) -> None:
    operator.kubectl("delete", "pod", "only", "--wait=true")
    until("worker-2 is switched off", lambda: gone(operator, "worker-2"))
    planned = operator.document("autoscale", "down", "--dry-run")
    assert planned["running"]
    assert any("passwords" in each for each in planned["changes"])
    assert operator.document("autoscale", "status", code=None)["running"]
    done = operator.gpunodes("autoscale", "down", "--yes")
    assert "worker-2" in done.stdout
    left = operator.kubectl("-n", "kube-system", "get", "deployments,secrets,clusterroles", "-o", "name")
    # Kubernetes has a ClusterRole of its own for the autoscaler of pods.
    assert "gpunodes-autoscaler" not in left
    done = operator.gpunodes("power", "worker-2", "on", "--wait", "--yes")
    assert "worker-2: its node is ready" in done.stdout


def test_a_machine_whose_certificate_has_ended_is_joined_again(operator: Operator) -> None:
    """As if it had been off for more than a year."""
    ended = node_certificates.pem("worker-2", days=-1)
    pem = "/var/lib/kubelet/pki/kubelet-client-current.pem"
    operator.ssh("worker-2", f"systemctl stop kubelet && rm {pem} && cat >{pem} <<'END'\n{ended}END")
    # A node that is ready has another certificate.
    until("its node is not ready", lambda: not is_ready(operator, "worker-2"))
    operator.gpunodes("join", "worker-2")
    assert is_ready(operator, "worker-2")
    operator.ssh("worker-2", f"test -L {pem}")  # the kubelet's own: the test's is a file


def test_no_password_leaks(operator: Operator) -> None:
    unhealthy.assert_no_password_leaks(operator)
