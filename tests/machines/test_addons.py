"""metrics-server, volumes of nodes and network policies on machines. Not run on machines yet."""

from __future__ import annotations

from typing import Any

from . import pods
from .conftest import Operator, search_for_secrets
from .optional_addons import IMAGE, LAB, READY, SERVES, apply, comes, goes, installed, refusal, until

MACHINES = LAB.machines
FOLDER = "/opt/local-path-provisioner"
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
DENY = """
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: deny}
spec: {podSelector: {}, policyTypes: [Ingress]}
"""
ALLOW = """
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: allow}
spec:
  podSelector: {matchLabels: {test: server}}
  ingress:
    - from: [{podSelector: {matchLabels: {test: client}}}]
      ports: [{port: 8080}]
"""


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


def reaches(operator: Operator, pod: str) -> bool:
    """Whether a pod gets the page of the server, which is on another node."""
    address = operator.kubectl("get", "pod", "server", "-o", "jsonpath={.status.podIP}").strip()
    got = operator.kubectl("exec", pod, "--", "wget", "-q", "-T", "5", "-O", "-", f"http://{address}:8080/", code=None)
    return got.strip() == "served"


def test_without_enforcement_a_policy_stops_nothing(operator: Operator) -> None:
    """Otherwise the next test proves nothing."""
    pods.start(operator, "server", IMAGE, SERVES, READY, nodeName="worker-1")
    for name in ("client", "stranger"):
        pods.start(operator, name, IMAGE, "sleep 86400", {}, nodeName="worker-2")
    operator.kubectl("wait", "--for=condition=Ready", "pod/server", "pod/client", "pod/stranger", "--timeout=180s")
    operator.kubectl("label", "pod", "server", "test=server")
    operator.kubectl("label", "pod", "client", "test=client")
    apply(operator, DENY)
    assert reaches(operator, "client")


def test_a_policy_stops_packets_of_other_pods(operator: Operator) -> None:
    comes(operator, "network-policy")
    until("the policy is enforced", lambda: not reaches(operator, "client"))
    assert not reaches(operator, "stranger")
    apply(operator, ALLOW)
    until("the allowed pod reaches the server", lambda: reaches(operator, "client"))
    assert not reaches(operator, "stranger")
    agents = ("-n", "kube-system", "delete", "pods", "-l", "k8s-app=kube-network-policies", "--wait=true")
    operator.kubectl(*agents)
    operator.gpunodes("addon", "verify", "network-policy")
    until("new agents let the allowed pod pass", lambda: reaches(operator, "client"))
    assert not reaches(operator, "stranger")
    # The kubelet's probes are not packets of a pod.
    ready = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
    assert operator.kubectl("get", "pod", "server", "-o", ready).strip() == "True"


def test_enforcement_ends_with_the_add_on(operator: Operator) -> None:
    assert "network policies, which nothing would enforce then (allow, deny)" in refusal(operator, "network-policy")
    operator.kubectl("delete", "networkpolicy", "deny", "allow")
    until("all pods reach the server", lambda: reaches(operator, "stranger"))
    goes(operator, "network-policy")
    # Its rules stay in the kernel until the next boot; without policies they concern no pod.
    assert reaches(operator, "client")
    operator.kubectl("delete", "pod", "server", "client", "stranger", "--grace-period=1")
    assert installed(operator) == set()


def test_no_secret_leaks(operator: Operator) -> None:
    search_for_secrets(operator, MACHINES)
