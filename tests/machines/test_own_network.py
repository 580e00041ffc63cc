"""A cluster whose network add-on is not of gpunodes (`gpunodes_network: none`): bridges and routes by hand."""

from __future__ import annotations

import yaml
from gpunodes.inventory import Inventory

from . import own_network, pods
from .conftest import BARE, STATE, LabSpec, Operator, lines

LAB = LabSpec("debian13", workers=1)
MACHINES = LAB.machines
IMAGE = "registry.k8s.io/e2e-test-images/busybox:1.37.0-1"

_bare: dict[str, list[str]] = {}


def daemon_sets(operator: Operator) -> set[str]:
    return set(operator.kubectl("get", "daemonsets", "-A", "-o", "jsonpath={.items[*].metadata.name}").split())


def test_init_leaves_the_network_to_the_administrator(operator: Operator) -> None:
    _bare.update(operator.each(MACHINES, BARE))
    path = operator.folder / "inventory" / "group_vars" / "all.yml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "gpunodes_network": "none"}))
    operator.gpunodes("init-master", "control-1")
    assert daemon_sets(operator) == {"kube-proxy"}
    [node] = operator.document("status", code=None)["nodes"]
    assert (node["name"], node["ready"]) == ("control-1", False)


def test_without_a_network_up_fails_and_says_what_to_do(operator: Operator) -> None:
    done = operator.gpunodes("up", code=None)
    assert done.returncode
    output = " ".join((done.stdout + done.stderr).split())
    assert "the cluster has no network add-on yet: install yours, then run the command again" in output


def test_with_a_network_of_its_own_the_cluster_is_ready(operator: Operator) -> None:
    inventory = Inventory(operator.folder / "inventory")
    addresses = {name: inventory.select([name])[0].address for name in MACHINES}
    for name in MACHINES:
        own_network.bridge(operator, name, addresses)
    operator.gpunodes("up")
    assert {node["name"]: node["ready"] for node in operator.document("status")["nodes"]} == dict.fromkeys(
        MACHINES, True
    )
    assert daemon_sets(operator) == {"kube-proxy"}
    assert "flannel" not in {each["name"] for each in operator.document("addon", "plan")["addons"]}
    lookup = "nslookup kubernetes.default.svc.cluster.local"
    pods.start(operator, "lookup", IMAGE, lookup, {}, nodeName="worker-1")
    assert pods.ended(operator, "lookup")[0] == "worker-1"


def test_a_second_run_changes_nothing(operator: Operator) -> None:
    before = operator.each(MACHINES, STATE)
    assert {each["outcome"] for each in operator.document("up")["machines"]} == {"unchanged"}
    assert operator.each(MACHINES, STATE) == before


def test_reset_leaves_bare_machines_with_the_routes_of_the_add_on(operator: Operator) -> None:
    """Its file leaves with the folder, which was not there before containerd; routes are the administrator's."""
    operator.gpunodes("reset", "--yes", "worker-1", "control-1")
    for name in MACHINES:
        operator.ssh(name, "ip route | awk '/^10[.]244[.]/ {print $1}' | xargs -rn1 ip route del")
        assert lines(operator.ssh(name, BARE)) == _bare[name]
