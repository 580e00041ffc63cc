"""Optional add-ons on machines: each comes, does its work, is found unchanged, and goes. Not run on machines yet.

The mirror has their images (`lab up --images addons`). metrics-server verifies the kubelets' certificates.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from . import pods
from .conftest import LabSpec, Operator, search_for_secrets

LAB = LabSpec(
    "debian13",
    workers=2,
    up_options=("--images", "addons"),
    cluster=(),
    settings={"gpunodes_serving_certificates": True},
)
MACHINES = LAB.machines
IMAGE = "registry.k8s.io/e2e-test-images/busybox:1.37.0-1"
FOLDER = "/opt/local-path-provisioner"
WAIT_S = 300.0
"""Seconds for what controllers and add-ons do on emulated machines."""
# A slow API server logs the names of their events, POD.TIME. With six letters before the point that looks like a token.
SERVER, ALLOWED = "page", "allowed"
SERVES = "mkdir /tmp/www && echo served >/tmp/www/index.html && exec httpd -f -p 8080 -h /tmp/www"
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


def until(what: str, seen: Callable[[], object], limit_s: float = WAIT_S) -> None:
    began = time.monotonic()
    while not seen():
        assert time.monotonic() - began < limit_s, f"not within {limit_s:.0f} s: {what}"
        time.sleep(3)
    print(f"{what}: {time.monotonic() - began:.0f} s")


def apply(operator: Operator, manifest: str) -> None:
    operator.ssh("control-1", f"cat >/run/addon.yml <<'END'\n{manifest}\nEND")
    operator.kubectl("apply", "-f", "/run/addon.yml")


def installed(operator: Operator) -> set[str]:
    return {each["name"] for each in operator.document("addon", "list")["addons"] if each["installed"]}


def comes(operator: Operator, name: str) -> None:
    """Install an add-on: a dry run changes nothing, and neither does a second run."""
    would = operator.document("addon", "up", name, "--dry-run")["changes"]
    assert would
    assert name not in installed(operator)
    assert sorted(operator.document("addon", "up", name)["changes"]) == sorted(would)
    assert name in installed(operator)
    operator.gpunodes("addon", "verify", name)
    assert operator.document("addon", "up", name)["changes"] == []


def goes(operator: Operator, name: str) -> None:
    """Remove an add-on: no object of any kind remains."""
    assert operator.document("addon", "down", name, "--yes")["changes"]
    assert name not in installed(operator)
    # The cluster deletes what belongs to the objects, such as pods, afterwards.
    until(f"nothing of {name} is left", lambda: not labelled(operator, name))
    assert operator.document("addon", "down", name, "--yes")["changes"] == []


def labelled(operator: Operator, name: str) -> str:
    kubectl = "kubectl --kubeconfig /etc/kubernetes/admin.conf"
    kinds = f"{kubectl} api-resources --verbs=list -o name | grep -v '^componentstatuses$' | paste -sd,"
    return operator.ssh("control-1", f'{kubectl} get "$({kinds})" -A -l gpunodes.dev/addon={name} -o name').strip()


def refusal(operator: Operator, name: str) -> str:
    """Why an add-on is not removed."""
    return " ".join(operator.gpunodes("addon", "down", name, "--yes", code=1).stderr.split())


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
    address = operator.kubectl("get", "pod", SERVER, "-o", "jsonpath={.status.podIP}").strip()
    got = operator.kubectl("exec", pod, "--", "wget", "-q", "-T", "5", "-O", "-", f"http://{address}:8080/", code=None)
    return got.strip() == "served"


def test_without_enforcement_a_policy_stops_nothing(operator: Operator) -> None:
    """Otherwise the next test proves nothing."""
    probe = {"readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 5}}
    pods.start(operator, SERVER, IMAGE, SERVES, probe, nodeName="worker-1")
    for name in (ALLOWED, "stranger"):
        pods.start(operator, name, IMAGE, "sleep 86400", {}, nodeName="worker-2")
    names = [f"pod/{name}" for name in (SERVER, ALLOWED, "stranger")]
    operator.kubectl("wait", "--for=condition=Ready", *names, "--timeout=180s")
    operator.kubectl("label", "pod", SERVER, "test=server")
    operator.kubectl("label", "pod", ALLOWED, "test=client")
    apply(operator, DENY)
    assert reaches(operator, ALLOWED)


def test_a_policy_stops_packets_of_other_pods(operator: Operator) -> None:
    comes(operator, "network-policy")
    until("the policy is enforced", lambda: not reaches(operator, ALLOWED))
    assert not reaches(operator, "stranger")
    apply(operator, ALLOW)
    until("the allowed pod reaches the server", lambda: reaches(operator, ALLOWED))
    assert not reaches(operator, "stranger")
    agents = ("-n", "kube-system", "delete", "pods", "-l", "k8s-app=kube-network-policies", "--wait=true")
    operator.kubectl(*agents)
    operator.gpunodes("addon", "verify", "network-policy")
    until("new agents let the allowed pod pass", lambda: reaches(operator, ALLOWED))
    assert not reaches(operator, "stranger")
    # The kubelet's probes are not packets of a pod.
    ready = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
    assert operator.kubectl("get", "pod", SERVER, "-o", ready).strip() == "True"


def test_enforcement_ends_with_the_add_on(operator: Operator) -> None:
    assert "network policies, which nothing would enforce then (allow, deny)" in refusal(operator, "network-policy")
    operator.kubectl("delete", "networkpolicy", "deny", "allow")
    until("all pods reach the server", lambda: reaches(operator, "stranger"))
    goes(operator, "network-policy")
    # Its rules stay in the kernel until the next boot; without policies they concern no pod.
    assert reaches(operator, ALLOWED)
    operator.kubectl("delete", "pod", SERVER, ALLOWED, "stranger", "--grace-period=1")
    assert installed(operator) == set()


def test_no_secret_leaks(operator: Operator) -> None:
    search_for_secrets(operator, MACHINES)
