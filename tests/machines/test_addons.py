"""Optional add-ons on machines: each comes, does its work, is found unchanged, and goes. Not run on machines yet.

The mirror has their images (`lab up --images addons`). metrics-server verifies the kubelets' certificates.
"""

from __future__ import annotations

from typing import Any

from . import optional_addons, pods
from .conftest import Operator, search_for_secrets
from .optional_addons import IMAGE, apply, comes, goes, installed, refusal, until

LAB = optional_addons.lab("addons")
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
    # The pod that removed its folder leaves after it, and while it is there it counts as one of others.
    pods_left = ("-n", "local-path-storage", "get", "pods", "-o", "name")
    until("its pod is gone", lambda: "helper-pod" not in operator.kubectl(*pods_left))
    assert operator.ssh(node, f"ls -A {FOLDER}").strip() == ""
    goes(operator, "local-path")


def test_no_secret_leaks(operator: Operator) -> None:
    search_for_secrets(operator, MACHINES)
