"""Optional add-ons on machines: each comes, does its work, is found unchanged, and goes. Not run on machines yet.

The mirror has their images (`lab up --images addons`). metrics-server verifies the kubelets' certificates.
"""

from __future__ import annotations

import functools
import ipaddress
from typing import Any

import yaml

from . import optional_addons, pods
from .conftest import CHECKOUT, LONG, Operator, search_for_secrets
from .optional_addons import IMAGE, READY, SERVES, apply, comes, goes, installed, refusal, until

LAB = optional_addons.lab("addons")
MACHINES = LAB.machines
FOLDER = "/opt/local-path-provisioner"
# A slow API server logs the names of their events, POD.TIME. With six letters before the point that looks like a token.
SERVER = "page"
NODE_ADDRESS = "jsonpath={.status.addresses[?(@.type=='InternalIP')].address}"
VOLUME: dict[str, Any] = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "scratch"}}]}
MOUNT: dict[str, Any] = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
CLAIM = """
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: scratch}
spec:
  storageClassName: local-path
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 16Mi}}
"""
TEAM, TENANTS = "vision", "/root/tenants"
MATE, STRANGER = ("mate", TEAM), ("stranger", "default")
RESTRICTED = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
# As the example's namespace demands, and small enough for a worker of the lab.
OF_TEAM: dict[str, Any] = {
    **READY,
    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
}


def test_metrics_of_nodes_and_pods(operator: Operator) -> None:
    assert installed(operator) == set()
    comes(operator, "metrics-server")
    until("kubectl top has all nodes", lambda: set(MACHINES) == top(operator, "nodes"))
    until("kubectl top has pods", lambda: "etcd-control-1" in top(operator, "pods", "-n", "kube-system"))
    goes(operator, "metrics-server")
    assert "Metrics API not available" in operator.ssh("control-1", TOP, code=None)


TOP = "kubectl --kubeconfig /etc/kubernetes/admin.conf top nodes 2>&1"


def top(operator: Operator, *arguments: str) -> set[str]:
    found = operator.kubectl("top", *arguments, "--no-headers", code=None).splitlines()
    return {line.split()[0] for line in found if line.strip()}


def test_a_claim_is_a_folder_of_the_node_of_its_pod(operator: Operator) -> None:
    comes(operator, "local-path")
    apply(operator, CLAIM)
    for script, printed in (("echo kept >/data/file", ""), ("cat /data/file", "kept")):
        pods.start(operator, "scratch", IMAGE, script, MOUNT, **VOLUME)
        node, log = pods.ended(operator, "scratch")
        assert log.strip() == printed
        assert operator.ssh(node, f"cat {FOLDER}/*/file").strip() == "kept", "the second pod runs where the volume is"
    assert "there are volumes of the StorageClass local-path" in refusal(operator, "local-path")
    operator.kubectl("delete", "pvc", "scratch")
    until("its volume is gone", lambda: "pvc-" not in operator.kubectl("get", "pv", "-o", "name"))
    assert operator.ssh(node, f"ls -A {FOLDER}").strip() == ""
    goes(operator, "local-path")


def reaches(operator: Operator, pod: tuple[str, str], server: tuple[str, str] = (SERVER, TEAM)) -> bool:
    """Whether a pod gets the page of another one, which is on another node. Pods are names with their namespaces."""
    (name, space), (target, of) = pod, server
    address = operator.kubectl("-n", of, "get", "pod", target, "-o", "jsonpath={.status.podIP}").strip()
    read = ("wget", "-q", "-T", "5", "-O", "-", f"http://{address}:8080/")
    return operator.kubectl("-n", space, "exec", name, "--", *read, code=None).strip() == "served"


def resolves(operator: Operator) -> bool:
    """Whether a pod of the team gets an answer of the cluster's DNS."""
    lookup = ("exec", MATE[0], "--", "nslookup", "kubernetes.default.svc.cluster.local")
    return "Name:" in operator.kubectl("-n", TEAM, *lookup, code=None)


def test_without_enforcement_a_policy_stops_nothing(operator: Operator) -> None:
    """Otherwise the next test proves nothing."""
    pods.copy(operator, CHECKOUT / "examples" / "tenants", TENANTS)
    operator.kubectl("apply", "-k", f"{TENANTS}/{TEAM}")
    for wanted in (("serviceaccount", "default", "name"), ("quota", "team", "jsonpath={.status.hard.pods}")):
        ready = ("-n", TEAM, "get", *wanted[:2], "-o", wanted[2])
        until(f"the {wanted[0]} is ready", functools.partial(operator.kubectl, *ready, code=None))
    spec: dict[str, Any] = {"securityContext": RESTRICTED, "volumes": [{"name": "tmp", "emptyDir": {}}]}
    for name, node in ((SERVER, "worker-1"), (MATE[0], "worker-2")):
        pods.start(operator, name, IMAGE, SERVES, OF_TEAM, namespace=TEAM, nodeName=node, **spec)
    pods.start(operator, STRANGER[0], IMAGE, SERVES, READY, nodeName="control-1")
    for name, space in ((SERVER, TEAM), MATE, STRANGER):
        operator.kubectl("-n", space, "wait", "--for=condition=Ready", f"pod/{name}", "--timeout=180s")
    assert reaches(operator, STRANGER)
    assert reaches(operator, MATE, STRANGER)


def test_the_policies_of_the_tenants_keep_their_pods_apart(operator: Operator) -> None:
    comes(operator, "network-policy")
    until("nobody else reaches the team", lambda: not reaches(operator, STRANGER))
    until("the team reaches nobody else", lambda: not reaches(operator, MATE, STRANGER))
    assert reaches(operator, MATE)
    assert resolves(operator)
    operator.kubectl("-n", TEAM, "delete", "networkpolicy", "dns")
    until("without its policy there is no DNS", lambda: not resolves(operator))
    operator.kubectl("apply", "-k", f"{TENANTS}/{TEAM}")
    until("with its policy there is", lambda: resolves(operator))
    agents = ("-n", "kube-system", "delete", "pods", "-l", "k8s-app=kube-network-policies", "--wait=true")
    operator.kubectl(*agents)
    operator.gpunodes("addon", "verify", "network-policy")
    until("new agents let the team pass", lambda: reaches(operator, MATE))
    assert not reaches(operator, STRANGER)
    # The kubelet's probes are not packets of a pod.
    ready = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
    assert operator.kubectl("-n", TEAM, "get", "pod", SERVER, "-o", ready).strip() == "True"


def test_enforcement_ends_with_the_add_on(operator: Operator) -> None:
    refused = refusal(operator, "network-policy")
    assert "network policies, which nothing would enforce then (deny, dns, team)" in refused
    operator.kubectl("-n", TEAM, "delete", "networkpolicy", "deny", "dns", "team")
    until("all pods reach the server", lambda: reaches(operator, STRANGER))
    goes(operator, "network-policy")
    # Its rules stay in the kernel until the next boot; without policies they concern no pod.
    assert reaches(operator, MATE)
    operator.kubectl("delete", "pod", STRANGER[0], "--grace-period=1")
    operator.kubectl("delete", "-k", f"{TENANTS}/{TEAM}", "--ignore-not-found", limit_s=LONG)
    assert installed(operator) == set()


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
    pods.start(operator, SERVER, IMAGE, SERVES, READY, nodeName="worker-1")
    operator.kubectl("label", "pod", SERVER, "test=server")
    operator.kubectl("wait", "--for=condition=Ready", f"pod/{SERVER}", "--timeout=180s")
    operator.kubectl("expose", "pod", SERVER, "--type=LoadBalancer", "--port=8080")
    given = "jsonpath={.status.loadBalancer.ingress[0].ip}"
    until("the Service has an address", lambda: operator.kubectl("get", "svc", SERVER, "-o", given).strip())
    address = operator.kubectl("get", "svc", SERVER, "-o", given).strip()
    assert address in {first, last}
    until("all machines reach it", lambda: set(MACHINES) == set(answered(operator, address)))
    [holder] = holders(operator, address)
    asked = f"kube-vip.io/loadbalancerIPs={subnet[254]}"
    operator.kubectl("annotate", "svc", SERVER, asked, "--overwrite", code=1)
    assert f"there are Services of type LoadBalancer ({SERVER})" in refusal(operator, "load-balancer")
    another_holder(operator, address, holder)
    operator.kubectl("delete", "svc", SERVER)
    until("no machine has the address", lambda: not holders(operator, address))
    goes(operator, "load-balancer")
    operator.kubectl("delete", "pod", SERVER, "--grace-period=1")
    assert installed(operator) == set()


def another_holder(operator: Operator, address: str, holder: str) -> None:
    """Another node answers when the pod of the one that did has gone."""
    found = f"spec.nodeName={holder}"
    operator.kubectl("-n", "kube-vip", "delete", "pods", "-l", "app=kube-vip", "--field-selector", found)
    until("all machines reach it again", lambda: set(MACHINES) == set(answered(operator, address)))
    until("one machine has it", lambda: len(holders(operator, address)) == 1)
    operator.gpunodes("addon", "verify", "load-balancer")


def test_no_secret_leaks(operator: Operator) -> None:
    search_for_secrets(operator, MACHINES)
