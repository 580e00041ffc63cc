"""One control plane becomes several in place: `endpoint set`, killed and repeated, then a second one joins. Without it
the second one is refused.
"""

from __future__ import annotations

import json

from gpunodes.inventory import Inventory

from . import availability, web
from .conftest import LONG, LabSpec, Operator, kill, search_for_secrets
from .etcd_members import CRICTL, FIRST, KUBECTL, SECOND, regroup, voters, with_vip

LAB = LabSpec("debian13", workers=1, control_planes=2)
MACHINES = (FIRST, SECOND, "worker-1")
NODES = (FIRST, "worker-1")
SERVER = "sed -n 's/^ *server: //p' /etc/kubernetes/{}.conf"


def servers(operator: Operator, address: str, *controls: str) -> dict[str, list[str]]:
    """The servers of the kubelets: that of a control plane is its own machine, as kubeadm has it."""
    inventory = Inventory(operator.folder / "inventory")
    own = {name: inventory.select([name])[0].address for name in controls}
    return {name: [f"https://{each}:6443"] for name, each in {**own, "worker-1": address}.items()}


def test_without_a_common_endpoint_a_second_control_plane_is_refused(operator: Operator) -> None:
    address = with_vip(operator, "")
    assert address
    (operator.folder / "vip").write_text(address)
    regroup(operator, FIRST)
    operator.gpunodes("up")
    regroup(operator, FIRST, SECOND)
    done = operator.gpunodes("join", SECOND, code=1)
    assert "gpunodes endpoint set" in " ".join((done.stdout + done.stderr).split())
    assert voters(operator) == {FIRST}


def test_the_endpoint_moves_and_pods_keep_running(operator: Operator) -> None:
    """Killed while nodes move; afterwards every machine uses the virtual address, and a second run changes nothing."""
    regroup(operator, FIRST)
    address = (operator.folder / "vip").read_text()
    with_vip(operator, address)
    operator.kubectl("create", "deployment", "still", f"--image={web.IMAGE}", "--", "sleep", "100000")
    operator.kubectl("rollout", "status", "deployment/still", "--timeout=300s", limit_s=LONG)
    pods = ("get", "pods", "-l", "app=still", "-o", "jsonpath={.items[*].metadata.uid}")
    before = operator.kubectl(*pods)
    running = operator.start("endpoint", "set", address, "--yes")
    operator.wait_for(running, ": Move the nodes")
    kill(running)
    operator.gpunodes("endpoint", "set", address, "--yes")
    assert operator.each(NODES, SERVER.format("kubelet")) == servers(operator, address, FIRST)
    assert operator.each([FIRST], SERVER.format("admin")) == {FIRST: [f"https://{address}:6443"]}
    for namespace, name in (
        ("kube-public", "cluster-info"),
        ("kube-system", "kube-proxy"),
        ("kube-system", "kubeadm-config"),
    ):
        found = operator.kubectl("--namespace", namespace, "get", "configmap", name, "--output", "json")
        assert f"{address}:6443" in json.dumps(json.loads(found)["data"]), name
    status = operator.document("status")
    assert (status["virtual_address"], status["holders"]) == (address, [FIRST])
    assert operator.kubectl(*pods) == before, "its pod was not replaced"
    again = operator.document("endpoint", "set", address, "--yes")
    assert {each["outcome"] for each in again["machines"]} == {"unchanged"}


def test_then_a_second_one_joins_and_serves(operator: Operator) -> None:
    regroup(operator, FIRST, SECOND)
    operator.gpunodes("join", SECOND, limit_s=2 * LONG)
    assert voters(operator) == {FIRST, SECOND}
    address = (operator.folder / "vip").read_text()
    assert operator.each(MACHINES, SERVER.format("kubelet")) == servers(operator, address, FIRST, SECOND)
    # The API server of the first one goes: the address moves to the second, which both members of etcd still carry.
    manifest = "/etc/kubernetes/manifests/kube-apiserver.yaml"
    listed = f"found=$({CRICTL} ps --quiet --label io.kubernetes.container.name=kube-apiserver)"
    with availability.watched(f"https://{address}:6443/readyz", timeout_s=availability.SLOW_S) as prober:
        # A slow response counts as a failure, too: what shows the end is its container.
        operator.ssh(FIRST, f'mv {manifest} /root/; until {listed} && [ -z "$found" ]; do sleep 1; done')
        prober.wait_for_success(limit_s=300)
        nodes = operator.ssh(SECOND, f"{KUBECTL} --server https://{address}:6443 get nodes --output name").split()
        operator.ssh(FIRST, f"mv /root/kube-apiserver.yaml {manifest}")
    assert len(nodes) == len(MACHINES)
    # keepalived's checks are 2 s apart and three must fail; beside that the lab is slow.
    assert prober.report().longest_gap_s < 180


def test_no_secret_leaks(operator: Operator) -> None:
    search_for_secrets(operator, MACHINES)
