"""Services of type LoadBalancer on machines: one node answers for an address of the lab's network. Not run yet.

The mirror has the images (`lab up --images addons`).
"""

from __future__ import annotations

import ipaddress

import yaml

from . import optional_addons, pods
from .conftest import LONG, Operator, search_for_secrets
from .optional_addons import IMAGE, READY, SERVER, SERVES, comes, goes, installed, refusal, until

LAB = optional_addons.lab("addons")
MACHINES = LAB.machines
NODE_ADDRESS = "jsonpath={.status.addresses[?(@.type=='InternalIP')].address}"


def answered(operator: Operator, address: str) -> list[str]:
    """The machines that get the page of the server at an address."""
    read = f"curl -s --noproxy '*' -m 5 http://{address}:8080/"
    return [machine for machine, lines in operator.each(MACHINES, read, code=None).items() if lines == ["served"]]


def holders(operator: Operator, address: str) -> list[str]:
    """The machines with an address."""
    found = operator.each(MACHINES, f"ip -o -4 address show to {address}")
    return [machine for machine, lines in found.items() if lines]


def test_a_service_gets_an_address_for_which_one_node_answers(operator: Operator) -> None:
    own = operator.kubectl("get", "node", "control-1", "-o", NODE_ADDRESS).strip()
    subnet = ipaddress.ip_network(f"{own}/24", strict=False)
    first, last = str(subnet[200]), str(subnet[201])
    path = operator.folder / "inventory" / "host_vars" / "control-1.yml"
    settings = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**settings, "gpunodes_load_balancer_addresses": [f"{first}-{last}"]}))
    comes(operator, "load-balancer")
    # The taint of another_holder() must not end it.
    pods.start(operator, SERVER, IMAGE, SERVES, READY, nodeName="worker-1", tolerations=[{"operator": "Exists"}])
    operator.kubectl("label", "pod", SERVER, "test=server")
    operator.kubectl("wait", "--for=condition=Ready", f"pod/{SERVER}", "--timeout=180s")
    operator.kubectl("expose", "pod", SERVER, "--type=LoadBalancer", "--port=8080")
    given = "jsonpath={.status.loadBalancer.ingress[0].ip}"
    until("the Service has an address", lambda: operator.kubectl("get", "svc", SERVER, "-o", given).strip())
    address = operator.kubectl("get", "svc", SERVER, "-o", given).strip()
    assert address in {first, last}
    until("all machines reach it", lambda: set(MACHINES) == set(answered(operator, address)))
    # Where the API is slow kube-vip may lose its lease, and then starts again.
    until("one machine has it", lambda: len(holders(operator, address)) == 1)
    [holder] = holders(operator, address)
    asked = f"kube-vip.io/loadbalancerIPs={subnet[254]}"
    operator.kubectl("annotate", "svc", SERVER, asked, "--overwrite", code=1)
    assert f"there are Services of type LoadBalancer ({SERVER})" in refusal(operator, "load-balancer")
    another_holder(operator, address, holder)
    removed_holder(operator, address)
    operator.kubectl("delete", "svc", SERVER, limit_s=LONG)
    until("no machine has the address", lambda: not holders(operator, address))
    goes(operator, "load-balancer")
    operator.kubectl("delete", "pod", SERVER, "--grace-period=1")
    assert installed(operator) == set()


def another_holder(operator: Operator, address: str, holder: str) -> None:
    """Another node answers when the one that did has no pod of kube-vip any more.

    A deleted pod would come again at once on the same node, under the same name in the lease.
    """
    taint = "test/away"
    operator.kubectl("taint", "node", holder, f"{taint}:NoExecute")
    until("another machine has it", lambda: len(now := holders(operator, address)) == 1 and now != [holder])
    until("all machines reach it again", lambda: set(MACHINES) == set(answered(operator, address)))
    operator.kubectl("taint", "node", holder, f"{taint}-")
    operator.gpunodes("addon", "verify", "load-balancer")
    until("one machine has it", lambda: len(holders(operator, address)) == 1)
    # The taint evicted others, too.
    for kind, namespace in (("daemonset/kube-flannel-ds", "kube-flannel"), ("deployment/coredns", "kube-system")):
        operator.kubectl("-n", namespace, "rollout", "status", kind, "--timeout=300s", limit_s=LONG)


def removed_holder(operator: Operator, address: str) -> None:
    """A worker that leaves the cluster while it has the address does not keep it: two machines would answer for it."""
    if "worker-2" not in holders(operator, address):
        for machine in ("control-1", "worker-1"):
            operator.kubectl("taint", "node", machine, "test/away:NoExecute")
        until("worker-2 has it", lambda: holders(operator, address) == ["worker-2"])
        for machine in ("control-1", "worker-1"):
            operator.kubectl("taint", "node", machine, "test/away-")
    operator.gpunodes("remove", "worker-2", "--yes", "--force-drain")
    until("another machine has it", lambda: len(now := holders(operator, address)) == 1 and now != ["worker-2"])


def test_no_secret_leaks(operator: Operator) -> None:
    search_for_secrets(operator, MACHINES)
