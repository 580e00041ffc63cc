"""Which pods and volumes the accounts of local-path and csi-driver-nfs may make or change, with a real API server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from gpunodes.planner import addons

from tests.repair.addon_accounts import MERGE, OWNER, STRATEGIC, Account, account, changed, cluster, field, put
from tests.repair.apiserver import ApiServer

VOLUMES, CLAIMS = "/api/v1/persistentvolumes", "/api/v1/namespaces/default/persistentvolumeclaims"
PODS = "/api/v1/namespaces/local-path-storage/pods"
FOLDER = "/opt/local-path-provisioner"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with cluster(tmp_path_factory.mktemp("cluster"), "local-path", "csi-driver-nfs") as made:
        yield made


@pytest.fixture(scope="module")
def local(server: ApiServer) -> Account:
    found = account(server, "local-path-storage", "local-path-provisioner")
    other = volume("probe", {"hostPath": {"path": "/etc"}})
    found.until_refused("gpunodes-local-path-volumes", "POST", f"{VOLUMES}?dryRun=All", other)
    found.until_refused("gpunodes-local-path-pods", "POST", f"{PODS}?dryRun=All", helper(data="/etc/kubernetes"))
    return found


def volume(name: str, source: dict[str, Any]) -> dict[str, Any]:
    spec = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "x", **source}
    if "local" in source:
        term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["w1"]}]}
        spec["nodeAffinity"] = {"required": {"nodeSelectorTerms": [term]}}
    return {"metadata": {"name": name}, "spec": spec}


def helper(script: str = "setup", data: str = f"{FOLDER}/", **changes: Any) -> dict[str, Any]:
    """A pod as local-path-provisioner v0.0.30 makes it (provisioner.go, createHelperPod)."""
    mounts = [{"name": "script", "mountPath": "/script"}, {"name": "data", "mountPath": f"{FOLDER}/"}]
    scripts = [{"key": each, "path": each} for each in ("setup", "teardown")]
    names = ("VOL_DIR", "VOL_MODE", "VOL_SIZE_BYTES")
    container = {
        "name": "helper-pod",
        "image": addons.chosen("local-path").images["helper"],
        "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/sh", f"/script/{script}"],
        "args": ["-p", f"{FOLDER}/pvc-1_a_b", "-s", "1", "-m", "Filesystem", "-a", "create"],
        "env": [{"name": each, "value": f"{FOLDER}/pvc-1_a_b"} for each in names],
        "volumeMounts": mounts,
        **changes.pop("container", {}),
    }
    spec = {
        "nodeName": "control-1",
        "serviceAccountName": "local-path-provisioner",
        "automountServiceAccountToken": False,
        "restartPolicy": "Never",
        "tolerations": [{"operator": "Exists"}],
        "containers": [container],
        "volumes": [
            {"name": "data", "hostPath": {"path": data, "type": "DirectoryOrCreate"}},
            {"name": "script", "configMap": {"name": "local-path-config", "items": scripts}},
        ],
        **changes,
    }
    return {"metadata": {"name": f"helper-pod-{script}"}, "spec": spec}


def test_local_path_makes_folders_and_volumes(server: ApiServer, local: Account) -> None:
    for script in ("setup", "teardown"):
        assert not local.refusal("POST", PODS, helper(script))
        assert not local.refusal("GET", f"{PODS}/helper-pod-{script}")
        assert not local.refusal("DELETE", f"{PODS}/helper-pod-{script}?gracePeriodSeconds=0")
    for source in ("hostPath", "local"):
        made = volume(f"pvc-{source.lower()}", {source: {"path": f"{FOLDER}/pvc-1_default_scratch"}})
        assert not local.refusal("POST", VOLUMES, made)
        path = f"{VOLUMES}/{made['metadata']['name']}"
        assert not local.refusal("PATCH", path, {"metadata": {"finalizers": None}}, MERGE)
        assert not local.refusal("DELETE", path)
    config = "/api/v1/namespaces/local-path-storage/configmaps/local-path-config"
    assert not local.refusal("GET", config)
    assert server.call("GET", config)["data"]["config.json"].count(FOLDER) == 1


SHELL = ["/bin/sh", "-c", "cat /data/admin.conf"]
MOUNTED = [{"name": "script", "mountPath": "/script"}]
THEFTS: dict[str, dict[str, Any]] = {
    "the keys of the cluster": helper(data="/etc/kubernetes"),
    "the folder of a volume": helper(data=f"{FOLDER}/pvc-1_a_b"),
    "another command": helper(container={"command": SHELL}),
    "no command": helper(container={"command": None}),
    "another image": helper(container={"image": "docker.io/library/busybox:1"}),
    "a hook": helper(container={"lifecycle": {"postStart": {"exec": {"command": SHELL}}}}),
    "a probe": helper(container={"livenessProbe": {"exec": {"command": SHELL}}}),
    "a variable": helper(container={"env": [{"name": "PATH", "value": FOLDER}]}),
    "variables": helper(container={"envFrom": [{"configMapRef": {"name": "x"}}]}),
    "a program of a user's volume": helper(
        container={"volumeMounts": [*MOUNTED, {"name": "data", "mountPath": "/bin", "subPath": "pvc-1_a_b"}]}
    ),
    "scripts of a user's volume": helper(container={"volumeMounts": [{"name": "data", "mountPath": "/script"}]}),
    "programs of users": helper(container={"volumeMounts": [*MOUNTED, {"name": "data", "mountPath": "/bin"}]}),
    "the processes of the node": helper(hostPID=True),
    "the network of the node": helper(hostNetwork=True),
    "all rights": helper(container={"securityContext": {"privileged": True}}),
    "more rights": helper(container={"securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}}}),
    "another container": helper(
        initContainers=[{"name": "x", "image": addons.chosen("local-path").images["helper"], "command": SHELL}]
    ),
    "a Secret": helper(
        container={"volumeMounts": MOUNTED}, volumes=[{"name": "script", "secret": {"secretName": "x"}}]
    ),
    "another file as a script": helper(
        volumes=[
            {"name": "data", "hostPath": {"path": FOLDER}},
            {"name": "script", "configMap": {"name": "local-path-config", "items": [{"key": "a", "path": "setup"}]}},
        ]
    ),
}


@pytest.mark.parametrize("what", THEFTS)
def test_the_token_of_local_path_starts_nothing_else(local: Account, what: str) -> None:
    refused = local.refusal("POST", f"{PODS}?dryRun=All", THEFTS[what])
    assert "ValidatingAdmissionPolicy 'gpunodes-local-path-pods'" in refused


def test_the_token_of_local_path_changes_no_volume_of_others(server: ApiServer, local: Account) -> None:
    server.call("POST", VOLUMES, volume("theirs", {"nfs": {"server": "nas.example", "path": "/a"}}))
    server.call("POST", VOLUMES, volume("folder", {"hostPath": {"path": "/srv"}}))
    for name in ("theirs", "folder"):
        bound = {"spec": {"claimRef": None}}
        refused = [local.refusal("DELETE", f"{VOLUMES}/{name}")]
        refused.append(local.refusal("PATCH", f"{VOLUMES}/{name}", bound, MERGE))
        assert all("ValidatingAdmissionPolicy 'gpunodes-local-path-volumes'" in each for each in refused)
        server.call("DELETE", f"{VOLUMES}/{name}")
    for source in (
        {"hostPath": {"path": "/etc/kubernetes"}},
        {"hostPath": {"path": FOLDER}},
        {"hostPath": {"path": f"{FOLDER}/pvc-1_a_b/link"}},
        {"local": {"path": "/"}},
        {"nfs": {"server": "nas.example", "path": "/"}},
    ):
        assert "gpunodes-local-path-volumes" in local.refusal("POST", VOLUMES, volume("mine", source))
    for path in ("/api/v1/pods", "/api/v1/configmaps", "/api/v1/secrets", PODS):
        assert "forbidden" in local.refusal("GET", path)
    assert "forbidden" in local.refusal("PATCH", f"{PODS}/x", {"metadata": {"labels": {"a": "b"}}}, MERGE)


def test_the_nfs_driver_changes_its_own_volumes_only(server: ApiServer) -> None:
    nfs = account(server, "kube-system", "csi-nfs-controller")
    foreign = volume("foreign", {"hostPath": {"path": "/srv"}})
    nfs.until_refused("gpunodes-csi-nfs-volumes", "POST", f"{VOLUMES}?dryRun=All", foreign)
    source = {"csi": {"driver": "nfs.csi.k8s.io", "volumeHandle": "nas.example#claims#pvc-1##"}}
    assert not nfs.refusal("POST", VOLUMES, volume("pvc-1", source))
    larger = {"spec": {"capacity": {"storage": "2Gi"}}}
    assert not nfs.refusal("PATCH", f"{VOLUMES}/pvc-1", larger, STRATEGIC)
    assert not nfs.refusal("DELETE", f"{VOLUMES}/pvc-1")
    other = {"csi": {"driver": "other.example", "volumeHandle": "x"}}
    for each in (foreign, volume("other", other)):
        path = f"{VOLUMES}/{each['metadata']['name']}"
        assert "gpunodes-csi-nfs-volumes" in nfs.refusal("POST", VOLUMES, each)
        server.call("POST", VOLUMES, each)
        assert "gpunodes-csi-nfs-volumes" in nfs.refusal("PATCH", path, larger, STRATEGIC)
        assert "gpunodes-csi-nfs-volumes" in nfs.refusal("DELETE", path)


def test_the_nfs_driver_changes_no_claim_but_its_notes(server: ApiServer) -> None:
    nfs = account(server, "kube-system", "csi-nfs-controller")
    chosen = {"volume.kubernetes.io/selected-node": "w1"}
    spec = {"storageClassName": "", "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    server.call("POST", CLAIMS, {"metadata": {"name": "claim", "annotations": chosen}, "spec": spec})
    path = f"{CLAIMS}/claim"
    wrong = changed(server.call("GET", path), field("spec", "volumeName", to="pvc-of-mine"))
    nfs.until_refused("gpunodes-csi-nfs-claims", "PUT", f"{path}?dryRun=All", wrong)
    assert "does not change what a claim" in put(nfs, path, field("metadata", "ownerReferences", to=OWNER))
    owned = {"metadata": {"ownerReferences": OWNER}}
    assert "does not change what a claim" in nfs.refusal("PATCH", f"{path}/status", owned, MERGE)
    assert not put(nfs, path, field("metadata", "annotations", to={}))
    grown = {"status": {"capacity": {"storage": "1Gi"}}}
    assert not nfs.refusal("PATCH", f"{path}/status", grown, MERGE)


def test_the_programs_are_those_that_were_read() -> None:
    """The policies allow what these versions do: read the source of others before they are used."""
    for name, version in (("local-path", ":v0.0.30"), ("csi-driver-nfs", "/csi-provisioner:v6.3.0")):
        assert addons.chosen(name).images["provisioner"].endswith(version)
