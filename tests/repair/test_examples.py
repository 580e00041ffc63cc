"""The examples of training, serving and tenants against a real API server, scheduler and controllers."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.error
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.power_fleet import GPU

from . import apiserver, controllers
from .apiserver import ApiServer
from .autoscaling import wait

EXAMPLES = Path(__file__).parents[2] / "examples"
KUSTOMIZATIONS = [f"training{overlay}" for overlay in ("", "/overlays/gpu", "/overlays/s3", "/overlays/numpy")] + [
    "serving",
    "tenants",
]
_APPLY = "application/apply-patch+yaml"
_STRICT = "?fieldManager=test&fieldValidation=Strict"
_CLUSTER = {
    "Namespace",
    "PriorityClass",
    "PersistentVolume",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}
_PLURALS = {
    "NetworkPolicy": "networkpolicies",
    "PriorityClass": "priorityclasses",
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
}
_PODS = "/api/v1/namespaces/{}/pods"
_CLAIMS = "resourceclaims"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with (
        apiserver.running(tmp_path_factory.mktemp("api"), {"authorization-mode": "RBAC"}) as started,
        controllers.running(started),
    ):
        controllers.add_node(started, "gpu-1", 2)
        controllers.add_node(started, "gpu-2", 2)
        yield started


def built(name: str) -> list[dict[str, Any]]:
    """The objects of a kustomization."""
    done = subprocess.run(
        [apiserver.kubectl(), "kustomize", EXAMPLES / name], capture_output=True, text=True, check=True
    )
    return list(yaml.safe_load_all(done.stdout))


def path_of(found: Mapping[str, Any], namespace: str = "default") -> str:
    kind, group = found["kind"], found["apiVersion"]
    plural = _PLURALS.get(kind, f"{kind.lower()}s")
    base = f"/apis/{group}" if "/" in group else f"/api/{group}"
    if kind not in _CLUSTER:
        base += f"/namespaces/{found['metadata'].get('namespace', namespace)}"
    return f"{base}/{plural}/{found['metadata']['name']}"


def apply(server: ApiServer, objects: list[dict[str, Any]], namespace: str = "default", more: str = "") -> None:
    """Apply objects as kubectl does on the server's side; unknown and doubled fields are refused."""
    for each in objects:
        server.call("PATCH", path_of(each, namespace) + _STRICT + more, each, _APPLY)


def make_namespace(server: ApiServer, name: str, **labels: str) -> None:
    server.call("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_every_object_of_an_example_is_accepted(server: ApiServer, name: str) -> None:
    objects = built(name)
    if name == "tenants":  # a dry run would miss the namespaces
        objects = [each for each in objects if each["kind"] in _CLUSTER]
    apply(server, objects, more="&dryRun=All")


def test_all_pods_of_a_training_with_gpus_tolerate_their_taint() -> None:
    """Where each worker has the taint, the data loader and TensorBoard have no other node."""
    makers = [each for each in built("training/overlays/gpu") if each["kind"] in {"Job", "Deployment"}]
    found = {each["metadata"]["name"]: each["spec"]["template"]["spec"].get("tolerations") for each in makers}
    toleration = {"key": GPU, "operator": "Exists", "effect": "NoSchedule"}
    assert found == {name: [toleration] for name in ("load-data", "train", "tensorboard")}


def test_the_local_claim_is_accepted(server: ApiServer) -> None:
    documents = (EXAMPLES / "training" / "local-claim.yml").read_text()
    apply(server, list(yaml.safe_load_all(documents)), more="&dryRun=All")


def pods_of(server: ApiServer, namespace: str) -> dict[str, dict[str, Any]]:
    """The pods of the job train that have not ended, by their index."""
    items = server.call("GET", _PODS.format(namespace) + "?labelSelector=job-name%3Dtrain")["items"]
    index = "batch.kubernetes.io/job-completion-index"
    live = [each for each in items if each["status"].get("phase") not in ("Failed", "Succeeded")]
    return {
        each["metadata"]["annotations"][index]: each for each in live if "deletionTimestamp" not in each["metadata"]
    }


def placed(server: ApiServer, namespace: str) -> dict[str, str]:
    """The nodes of both ranks once both have one, else nothing."""
    nodes = {index: str(pod["spec"].get("nodeName", "")) for index, pod in pods_of(server, namespace).items()}
    return nodes if len(nodes) == 2 and all(nodes.values()) else {}


def make_claim(server: ApiServer, namespace: str) -> None:
    """The claim of the examples, in a namespace with the strictest rules: their pods keep them."""
    make_namespace(server, namespace, **{"pod-security.kubernetes.io/enforce": "restricted"})
    claim = {"accessModes": ["ReadWriteMany"], "storageClassName": "", "resources": {"requests": {"storage": "1Gi"}}}
    made: dict[str, Any] = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "training"}}
    volume: dict[str, Any] = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": namespace}}
    volume["spec"] = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteMany"],
        "hostPath": {"path": "/srv"},
        "claimRef": {"namespace": namespace, "name": "training"},
    }
    apply(server, [volume, {**made, "spec": {**claim, "volumeName": namespace}}], namespace)
    # No controller of volumes runs here.
    claimed = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/training"
    for path in (f"/api/v1/persistentvolumes/{namespace}", claimed):
        server.call("PATCH", f"{path}/status", {"status": {"phase": "Bound"}}, controllers.MERGE)
    bound = {"metadata": {"annotations": {"pv.kubernetes.io/bind-completed": "yes"}}}
    server.call("PATCH", claimed, bound, controllers.MERGE)


def start_training(server: ApiServer, namespace: str, name: str = "training/overlays/gpu") -> None:
    make_claim(server, namespace)
    # Its port of the node is taken while another namespace has it.
    apply(server, [each for each in built(name) if each["metadata"]["name"] != "tensorboard"], namespace)


@contextlib.contextmanager
def training(server: ApiServer, namespace: str) -> Iterator[dict[str, dict[str, Any]]]:
    """The job with both ranks on their nodes; its pods are gone afterwards."""
    start_training(server, namespace)
    try:
        wait(lambda: placed(server, namespace))
        yield pods_of(server, namespace)
    finally:
        for name in ("train", "load-data"):
            take_away(server, namespace, name)


def take_away(server: ApiServer, namespace: str, name: str) -> None:
    """Delete a job and its pods: they would keep their GPUs, and no kubelet ends them.

    It is suspended first: its controller replaces deleted pods until it has seen the end of the job.
    """
    path = f"/apis/batch/v1/namespaces/{namespace}/jobs/{name}"
    server.call("PATCH", path, {"spec": {"suspend": True}}, controllers.MERGE)
    over = {"Suspended", "FailureTarget", "Complete"}
    wait(lambda: over & {each["type"] for each in server.call("GET", path)["status"].get("conditions", [])})
    server.call("DELETE", path, {"propagationPolicy": "Background", "gracePeriodSeconds": 0})
    for pod in server.call("GET", f"{_PODS.format(namespace)}?labelSelector=job-name%3D{name}")["items"]:
        path = f"{_PODS.format(namespace)}/{pod['metadata']['name']}"
        with contextlib.suppress(urllib.error.HTTPError):
            server.call("PATCH", path, {"metadata": {"finalizers": None}}, controllers.MERGE)
            server.call("DELETE", path, {"gracePeriodSeconds": 0})


def job(server: ApiServer, namespace: str) -> dict[str, Any]:
    found: dict[str, Any] = server.call("GET", f"/apis/batch/v1/namespaces/{namespace}/jobs/train")["status"]
    return found


def test_ranks_are_on_two_nodes_with_their_names(server: ApiServer) -> None:
    with training(server, "ranks") as pods:
        assert sorted(placed(server, "ranks").values()) == ["gpu-1", "gpu-2"]
        for index, pod in pods.items():
            assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == (f"train-{index}", "train")
            assert pod["spec"]["containers"][0]["resources"]["limits"][GPU] == "1"


def test_a_drained_rank_and_the_one_that_lost_it_are_replaced(server: ApiServer) -> None:
    with training(server, "drained") as pods:
        paths = {index: f"{_PODS.format('drained')}/{pod['metadata']['name']}" for index, pod in pods.items()}
        controllers.end(server, paths["1"], "Failed", 1, "train", disrupted=True)
        controllers.end(server, paths["0"], "Failed", 1, "train")
        uids = {pod["metadata"]["uid"] for pod in pods.values()}
        wait(lambda: placed(server, "drained"))
        assert not uids & {pod["metadata"]["uid"] for pod in pods_of(server, "drained").values()}
        counted = "batch.kubernetes.io/job-index-failure-count"
        found = {
            index: pod["metadata"]["annotations"].get(counted) for index, pod in pods_of(server, "drained").items()
        }
        assert found == {"0": "1", "1": "0"}, "a drain is no failure"
        for pod in pods_of(server, "drained").values():
            controllers.end(server, f"{_PODS.format('drained')}/{pod['metadata']['name']}", "Succeeded", 0, "train")
        wait(lambda: job(server, "drained").get("succeeded") == 2)


def test_wrong_arguments_end_the_job(server: ApiServer) -> None:
    with training(server, "wrong") as pods:
        controllers.end(server, f"{_PODS.format('wrong')}/{pods['0']['metadata']['name']}", "Failed", 2, "train")
        wait(lambda: any(each["type"] == "FailureTarget" for each in job(server, "wrong").get("conditions", [])))


# Serving


def serving(server: ApiServer) -> dict[str, str]:
    """The node of each server that is not being deleted."""
    items = server.call("GET", _PODS.format("serving"))["items"]
    live = [each for each in items if "deletionTimestamp" not in each["metadata"]]
    return {each["metadata"]["name"]: str(each["spec"].get("nodeName", "")) for each in live}


def on_nodes(server: ApiServer, *nodes: str) -> bool:
    return sorted(serving(server).values()) == sorted(nodes)


def receivers(server: ApiServer) -> set[str]:
    """The addresses to which the Service sends requests."""
    path = "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices"
    found = [each for part in server.call("GET", path)["items"] for each in part["endpoints"] or []]
    return {address for each in found if each["conditions"]["ready"] for address in each["addresses"]}


def evicted(server: ApiServer, name: str) -> bool:
    """Evict a server as a drain does, and end it as its kubelet would; false if the budget refuses that."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    try:
        server.call("POST", f"{_PODS.format('serving')}/{name}/eviction", body)
    except urllib.error.HTTPError as error:
        if "disruption budget" not in json.loads(error.read())["message"]:
            raise
        return False
    server.call("DELETE", f"{_PODS.format('serving')}/{name}", {"gracePeriodSeconds": 0})
    return True


def start_server(server: ApiServer, seen: set[str], number: int) -> str:
    """Let the server that is not in ``seen`` become ready; its name."""
    [name] = set(serving(server)) - seen
    controllers.start(server, f"{_PODS.format('serving')}/{name}", f"10.0.0.{number}")
    wait(lambda: f"10.0.0.{number}" in receivers(server))
    return name


def cordon(server: ApiServer, node: str, wanted: bool) -> None:
    server.call("PATCH", f"/api/v1/nodes/{node}", {"spec": {"unschedulable": wanted}}, controllers.MERGE)


def test_a_drain_waits_until_another_server_is_ready(server: ApiServer) -> None:
    make_claim(server, "serving")
    apply(server, built("serving"), "serving")
    wait(lambda: on_nodes(server, "gpu-1", "gpu-2"))
    nodes = {node: name for name, node in serving(server).items()}
    start_server(server, {nodes["gpu-2"]}, 1)
    start_server(server, {nodes["gpu-1"]}, 2)
    budget = "/apis/policy/v1/namespaces/serving/poddisruptionbudgets/serve"
    wait(lambda: server.call("GET", budget)["status"].get("disruptionsAllowed") == 1)
    # gpu-1 is drained: its server comes to the other node, where one serves meanwhile.
    cordon(server, "gpu-1", True)
    assert evicted(server, nodes["gpu-1"])
    wait(lambda: on_nodes(server, "gpu-2", "gpu-2"))
    cordon(server, "gpu-1", False)
    # gpu-2 is drained next: the budget keeps each server until the one after it is ready.
    cordon(server, "gpu-2", True)
    assert not evicted(server, nodes["gpu-2"])
    second = start_server(server, {nodes["gpu-2"]}, 3)
    wait(lambda: evicted(server, nodes["gpu-2"]))
    wait(lambda: on_nodes(server, "gpu-1", "gpu-2"))
    assert receivers(server) == {"10.0.0.3"}
    assert not evicted(server, second)
    start_server(server, {second}, 4)
    wait(lambda: evicted(server, second))
    wait(lambda: on_nodes(server, "gpu-1", "gpu-1"))
    cordon(server, "gpu-2", False)


# Tenants


@pytest.fixture(scope="module")
def tenants(server: ApiServer) -> ApiServer:
    apply(server, sorted(built("tenants"), key=lambda each: each["kind"] not in _CLUSTER))
    quotas = "/api/v1/namespaces/{}/resourcequotas"
    wait(
        lambda: all(
            each.get("status", {}).get("hard")
            for team in ("vision", "language")
            for each in server.call("GET", quotas.format(team))["items"]
        )
    )
    # The API server needs some time to compile a new policy.
    wait(lambda: refusal(server, "vision", sliced()) and refusal(server, "language", sliced()))
    wait(lambda: refusal(server, "vision", service(externalIPs=["10.0.0.1"]), "services"))
    return server


def pod(name: str, gpus: int = 0, priority: str = "", **more: Any) -> dict[str, Any]:
    """A pod as the level restricted wants it."""
    allowed = {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
        **more,
    }
    container: dict[str, Any] = {"name": "main", "image": "i", "securityContext": allowed}
    if gpus:
        container["resources"] = {"limits": {GPU: gpus}}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    return {"metadata": {"name": name}, "spec": {**spec, **({"priorityClassName": priority} if priority else {})}}


def sliced(where: str = "containers") -> dict[str, Any]:
    """A pod that wants slices of GPUs in these containers."""
    wanted = pod("greedy")
    [container] = wanted["spec"]["containers"]
    slices = {**container, "name": "sliced", "resources": {"limits": {"nvidia.com/mig-1g.10gb": 7}}}
    wanted["spec"][where] = [slices, *([container] if where == "containers" else [])]
    return wanted


def service(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "open"}, "spec": {"ports": [{"port": 80}], **spec}}


def refusal(server: ApiServer, team: str, wanted: dict[str, Any], kind: str = "pods") -> str:
    """Why a pod, or an object of another ``kind``, is refused; "" if it is not, and then it does not stay."""
    base = "/apis/resource.k8s.io/v1" if kind == _CLAIMS else "/api/v1"
    try:
        server.call("POST", f"{base}/namespaces/{team}/{kind}?dryRun=All", wanted)
    except urllib.error.HTTPError as error:
        return str(json.loads(error.read())["message"])
    return ""


@contextlib.contextmanager
def having(server: ApiServer, team: str, *names_and_pods: dict[str, Any]) -> Iterator[None]:
    for each in names_and_pods:
        server.call("POST", _PODS.format(team), each)
    try:
        yield
    finally:
        for each in server.call("GET", _PODS.format(team))["items"]:
            server.call("DELETE", f"{_PODS.format(team)}/{each['metadata']['name']}", {"gracePeriodSeconds": 0})
        used = f"/api/v1/namespaces/{team}/resourcequotas/team"
        wait(lambda: server.call("GET", used)["status"]["used"][f"requests.{GPU}"] == "0")


def test_a_pod_past_the_quota_is_refused(tenants: ApiServer) -> None:
    with having(tenants, "language", pod("first", 3)):
        assert refusal(tenants, "language", pod("second", 1)) == ""
        assert "exceeded quota: team, requested: requests.nvidia.com/gpu=2" in refusal(tenants, "language", pod("b", 2))
        assert refusal(tenants, "vision", pod("second", 2)) == "", "another team has its own"
    assert "exceeded quota: urgent" in refusal(tenants, "language", pod("urgent", 2, "gpu-urgent"))


@pytest.mark.parametrize("where", ["containers", "initContainers"])
def test_a_resource_of_nvidia_without_a_number_in_the_quota_is_refused(tenants: ApiServer, where: str) -> None:
    """A quota does not limit what it does not name: each profile of MIG has a name of its own."""
    refused = refusal(tenants, "vision", sliced(where))
    assert "the quota of the team has no number for a resource of nvidia.com" in refused


def claim(**exactly: Any) -> dict[str, Any]:
    request = {"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com", **exactly}}
    return {"metadata": {"name": "gpus"}, "spec": {"devices": {"requests": [request]}}}


def test_claims_past_the_quota_are_refused(tenants: ApiServer) -> None:
    assert refusal(tenants, "language", claim(count=4), _CLAIMS) == ""
    for more in ({"count": 5}, {"allocationMode": "All"}):
        refused = refusal(tenants, "language", claim(**more), _CLAIMS)
        assert "exceeded quota: team, requested: gpu.nvidia.com.deviceclass.resource.k8s.io/devices" in refused


def test_claims_count_as_the_gpus_that_pods_request(tenants: ApiServer) -> None:
    """From Kubernetes 1.36 on, with the DeviceClass of the role."""
    made = {"metadata": {"name": "gpu.nvidia.com"}, "spec": {"extendedResourceName": GPU}}
    tenants.call("POST", "/apis/resource.k8s.io/v1/deviceclasses", made)
    path = "/apis/resource.k8s.io/v1/namespaces/language/resourceclaims"
    wait(lambda: f"requests.{GPU}=5" in refusal(tenants, "language", claim(count=5), _CLAIMS))
    tenants.call("POST", path, claim(count=3))
    assert f"exceeded quota: team, requested: requests.{GPU}=2" in refusal(tenants, "language", pod("b", 2))
    tenants.call("DELETE", f"{path}/gpus")
    wait(lambda: refusal(tenants, "language", pod("b", 2)) == "")
    tenants.call("DELETE", "/apis/resource.k8s.io/v1/deviceclasses/gpu.nvidia.com")


def test_a_container_without_requests_gets_some(tenants: ApiServer) -> None:
    with having(tenants, "language", pod("first")):
        found = tenants.call("GET", _PODS.format("language") + "/first")["spec"]["containers"][0]["resources"]
        assert found == {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "4Gi"}}


@pytest.mark.parametrize(
    "more",
    [{"privileged": True, "allowPrivilegeEscalation": True}, {"runAsNonRoot": False}, {"capabilities": {}}],
    ids=str,
)
def test_a_pod_with_more_rights_is_refused(tenants: ApiServer, more: dict[str, Any]) -> None:
    assert 'violates PodSecurity "restricted:latest"' in refusal(tenants, "vision", pod("greedy", **more))


def test_a_folder_of_the_node_and_a_node_port_are_refused(tenants: ApiServer) -> None:
    wanted = pod("greedy")
    wanted["spec"]["volumes"] = [{"name": "host", "hostPath": {"path": "/"}}]
    assert "hostPath" in refusal(tenants, "vision", wanted)
    assert "services.nodeports" in refusal(tenants, "vision", service(type="NodePort"), "services")


def test_a_service_that_would_take_over_addresses_of_others_is_refused(tenants: ApiServer) -> None:
    """Every node would send its own connections to such an address to the team's pods (CVE-2020-8554)."""
    assert refusal(tenants, "vision", service(), "services") == ""
    path = "/api/v1/namespaces/vision/services"
    for each in ("10.0.0.1", "2001:db8::1"):
        refused = refusal(tenants, "vision", service(externalIPs=[each]), "services")
        assert "a Service of a team has no externalIPs" in refused
    tenants.call("POST", path, service())
    change = {"spec": {"externalIPs": ["10.0.0.1"]}}
    with pytest.raises(urllib.error.HTTPError, match="422"):
        tenants.call("PATCH", f"{path}/open", change, controllers.MERGE)
    tenants.call("DELETE", f"{path}/open")
    assert refusal(tenants, "default", service(externalIPs=["10.0.0.1"]), "services") == "", "others are not concerned"


@pytest.mark.parametrize("name", ["system-node-critical", "system-cluster-critical", "of-others"])
def test_a_pod_of_a_class_of_others_is_refused(tenants: ApiServer, name: str) -> None:
    """It would end the pods of all teams."""
    if name == "of-others":
        with contextlib.suppress(urllib.error.HTTPError):
            tenants.call("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": name}, "value": 9})
    assert refusal(tenants, "default", pod("greedy", 0, name)) == "", "nothing else refuses it"
    assert "exceeded quota: classes" in refusal(tenants, "vision", pod("greedy", 0, name))
    for allowed in ("", "gpu-batch", "gpu-urgent"):
        assert refusal(tenants, "vision", pod("modest", 0, allowed)) == ""


def test_urgent_pods_without_gpus_are_few_too(tenants: ApiServer) -> None:
    """They end others for their processors and memory."""
    with having(tenants, "vision", pod("first", 0, "gpu-urgent")):
        assert "exceeded quota: urgent" in refusal(tenants, "vision", pod("second", 0, "gpu-urgent"))


def bound(server: ApiServer, team: str, name: str) -> str:
    return str(server.call("GET", f"{_PODS.format(team)}/{name}")["spec"].get("nodeName", ""))


def test_urgent_pods_take_gpus_and_batch_pods_wait(tenants: ApiServer) -> None:
    # All four GPUs of both nodes are in use.
    with having(tenants, "vision", pod("a", 2), pod("b", 2)), having(tenants, "language", pod("batch", 1, "gpu-batch")):
        wait(lambda: bound(tenants, "vision", "a") and bound(tenants, "vision", "b"))
        waiting = f"{_PODS.format('language')}/batch"
        wait(lambda: tenants.call("GET", waiting)["status"].get("conditions"))
        assert "not eligible" in tenants.call("GET", waiting)["status"]["conditions"][0]["message"]
        tenants.call("POST", _PODS.format("language"), pod("urgent", 1, "gpu-urgent"))
        wait(lambda: bound(tenants, "language", "urgent"))
        left = [each["metadata"]["name"] for each in tenants.call("GET", _PODS.format("vision"))["items"]]
        assert len(left) == 1, "one pod made room"
        # It freed two GPUs: the batch pod uses the other one.
        wait(lambda: bound(tenants, "language", "batch"))


def test_a_team_may_use_its_own_namespace_only(tenants: ApiServer) -> None:
    def may(verb: str, group: str, resource: str, namespace: str) -> bool:
        asked = {"verb": verb, "group": group, "resource": resource, "namespace": namespace}
        spec = {"resourceAttributes": asked, "user": "ann", "groups": ["vision", "system:authenticated"]}
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        return bool(tenants.call("POST", path, {"spec": spec})["status"]["allowed"])

    wait(lambda: may("create", "batch", "jobs", "vision"))  # the role `edit` is aggregated
    assert may("get", "", "pods", "vision")
    assert not may("create", "batch", "jobs", "language")
    assert not may("get", "", "secrets", "language")
    assert not may("update", "", "resourcequotas", "vision")
    assert not may("update", "", "namespaces", "vision")
    assert not may("list", "", "nodes", "")
