"""Optional add-ons with a real API server: it accepts their objects, and what was installed is found and deleted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError

import pytest
from gpunodes.ansible.module_utils import kubeconfig
from gpunodes.ansible.module_utils.cluster import optional, settling
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.planner import addons

from tests.repair import apiserver
from tests.repair.apiserver import ApiServer
from tests.unit.test_addon_role import TEMPLATES, rendered


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with apiserver.running(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(autouse=True)
def admin(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeconfig, "ADMIN", str(server.kubeconfig))


def up(name: str, *, check: bool = False) -> list[str]:
    return optional.up(list(rendered(name)), name, addons.chosen(name).version, check)[0]


def down(name: str, *, check: bool = False) -> list[str]:
    return optional.down(name, addons.chosen(name).uses, check)[0]


def titles(name: str) -> set[str]:
    return {f"{each['kind']} {each['metadata']['name']}" for each in rendered(name)}


def strict(server: ApiServer, name: str) -> None:
    """Each object is valid: a field that its kind does not have is an error."""
    kinds = {
        "StorageClass": "storageclasses",
        "NetworkPolicy": "networkpolicies",
        "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
    }
    for each in rendered(name):
        base = f"/{'apis' if '/' in each['apiVersion'] else 'api'}/{each['apiVersion']}"
        space = f"/namespaces/{each['metadata']['namespace']}" if "namespace" in each["metadata"] else ""
        path = f"{base}{space}/{kinds.get(each['kind'], each['kind'].lower() + 's')}/{each['metadata']['name']}"
        query = "dryRun=All&fieldValidation=Strict&fieldManager=test&force=true"
        server.call("PATCH", f"{path}?{query}", each, "application/apply-patch+yaml")


def finish(server: ApiServer, space: str) -> None:
    """Delete a namespace that is being deleted: no controller does it here."""
    found = server.call("GET", f"/api/v1/namespaces/{space}")
    if found["metadata"].get("deletionTimestamp"):
        server.call("PUT", f"/api/v1/namespaces/{space}/finalize", {**found, "spec": {"finalizers": []}})


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_add_on_comes_stays_and_goes(server: ApiServer, name: str) -> None:
    assert set(up(name, check=True)) == titles(name)
    assert name not in optional.installed()
    assert set(up(name)) == titles(name)
    strict(server, name)
    assert up(name) == []
    assert optional.installed()[name] == addons.chosen(name).version
    assert set(down(name, check=True)) == titles(name)
    assert set(down(name)) == titles(name)
    assert name not in optional.installed()
    assert down(name) == []
    for each in rendered(name):
        if each["kind"] == "Namespace":
            finish(server, each["metadata"]["name"])


def test_an_add_on_comes_again_when_its_namespace_has_gone(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server makes nothing in a namespace that is being deleted."""
    name, space = "local-path", "local-path-storage"
    up(name)
    down(name)
    monkeypatch.setattr(optional, "_LEAVE_S", 0)
    with pytest.raises(MachineProblem, match=f"Namespace {space} is being deleted, and still exists after 0 s"):
        up(name)
    monkeypatch.setattr(optional, "_LEAVE_S", 60)
    ending = threading.Timer(3, finish, (server, space))
    ending.start()
    assert set(up(name)) == titles(name)
    ending.join()
    assert set(down(name)) == titles(name)
    finish(server, space)


@pytest.mark.parametrize(
    "name", [name for name in TEMPLATES if "ClusterRole" in {each["kind"] for each in rendered(name)}]
)
def test_objects_of_others_are_never_changed_or_deleted(server: ApiServer, name: str) -> None:
    [role] = [each for each in rendered(name) if each["kind"] == "ClusterRole"][-1:]
    path = "/apis/rbac.authorization.k8s.io/v1/clusterroles"
    server.call("POST", path, {**role, "rules": []})
    try:
        with pytest.raises(MachineProblem, match=f"ClusterRole {role['metadata']['name']} exist, without the label"):
            up(name)
        assert name not in optional.installed()
        assert down(name) == []
        assert server.call("GET", f"{path}/{role['metadata']['name']}")["rules"] is None
    finally:
        server.call("DELETE", f"{path}/{role['metadata']['name']}")


def test_local_storage_stays_while_it_has_volumes(server: ApiServer) -> None:
    up("local-path")
    volume = {
        "metadata": {"name": "pvc-1"},
        "spec": {
            "storageClassName": "local-path",
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": "/opt/x"},
        },
    }
    server.call("POST", "/api/v1/persistentvolumes", volume)
    with pytest.raises(MachineProblem, match=r"in use: there are volumes of the StorageClass local-path \(pvc-1\)"):
        down("local-path")
    change = {"metadata": {"finalizers": None}}
    server.call("PATCH", "/api/v1/persistentvolumes/pvc-1", change, "application/merge-patch+json")
    server.call("DELETE", "/api/v1/persistentvolumes/pvc-1")
    claim = {
        "metadata": {"name": "of-a-user"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    claims = "/api/v1/namespaces/local-path-storage/persistentvolumeclaims"
    server.call("POST", claims, claim)
    with pytest.raises(MachineProblem, match=r"local-path-storage has persistentvolumeclaims of others \(of-a-user\)"):
        down("local-path")
    server.call("PATCH", f"{claims}/of-a-user", change, "application/merge-patch+json")
    server.call("DELETE", f"{claims}/of-a-user")
    assert set(down("local-path")) == titles("local-path")
    finish(server, "local-path-storage")


def test_metrics_in_a_claim_of_the_user_stay(server: ApiServer) -> None:
    up("monitoring")
    claim = {
        "metadata": {"name": "prometheus"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    claims = "/api/v1/namespaces/gpunodes-monitoring/persistentvolumeclaims"
    server.call("POST", claims, claim)
    with pytest.raises(
        MachineProblem, match=r"gpunodes-monitoring has persistentvolumeclaims of others \(prometheus\)"
    ):
        down("monitoring")
    server.call("PATCH", f"{claims}/prometheus", {"metadata": {"finalizers": None}}, "application/merge-patch+json")
    server.call("DELETE", f"{claims}/prometheus")
    up("network-policy")
    with pytest.raises(
        MachineProblem, match=r"network policies, which nothing would enforce then \(kube-state-metrics"
    ):
        down("network-policy")
    assert set(down("monitoring")) == titles("monitoring")
    assert set(down("network-policy")) == titles("network-policy")
    for space in ("gpunodes-monitoring", "gpunodes-node-exporter"):
        finish(server, space)


def service(**changes: Any) -> dict[str, Any]:
    spec = {"type": "LoadBalancer", "ports": [{"port": 80}], **changes.pop("spec", {})}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", **changes}, "spec": spec}


def refused_by(server: ApiServer, path: str, given: Any) -> str:
    """Why the API server does not accept an object, "" if it does."""
    try:
        server.call("POST", f"{path}?dryRun=All", given)
    except HTTPError as error:
        return error.read().decode()
    return ""


def test_services_get_the_addresses_of_the_setting_only(server: ApiServer) -> None:
    """kube-vip would answer for any address of an annotation: the gateway's, or that of another machine."""
    services = "/api/v1/namespaces/default/services"
    server.call("POST", services, service(name="earlier", spec={"type": "ClusterIP", "externalIPs": ["10.0.0.9"]}))
    up("load-balancer")
    asked = "kube-vip.io/loadbalancerIPs"
    other = service(annotations={asked: "10.0.0.1"})
    deadline = time.monotonic() + 30
    while not (refusal := refused_by(server, services, other)):  # a policy takes effect some time after it was made
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert "not among gpunodes_load_balancer_addresses" in refusal
    for allowed in (
        service(),
        service(annotations={asked: "10.0.0.201", "example.org/x": "y"}),
        service(spec={"loadBalancerIP": "10.0.0.203"}),
        service(annotations={"kube-vip.io/vipHost": "w1"}),
    ):
        assert not refused_by(server, services, allowed)
    for refused in (
        service(annotations={asked: "10.0.0.200,10.0.0.1"}),
        service(annotations={asked: "gateway.example"}),
        # With one of these anywhere the cloud provider (mapImplementedServices) gives no more addresses to others.
        service(annotations={asked: "10.0.0.201 "}),
        service(annotations={asked: ""}),
        service(spec={"loadBalancerIP": "10.0.0.203 "}),
        # They would take addresses away from others, past the quota of load balancers.
        service(annotations={asked: "10.0.0.200,10.0.0.201"}),
        service(annotations={asked: "10.0.0.200"}, labels={"implementation": "kube-vip"}, spec={"type": "ClusterIP"}),
        service(annotations={asked: "0.0.0.0"}),  # noqa: S104 - an address by DHCP
        service(annotations={asked: "fd00::1"}),
        service(spec={"loadBalancerIP": "10.0.0.204"}),
        service(annotations={"kube-vip.io/egress": "true"}),
        # Every node's own connections to that address would go to its pods.
        service(spec={"externalIPs": ["10.0.0.1"]}),
        service(spec={"type": "ClusterIP", "externalIPs": ["10.0.0.200"]}),
        # It becomes a load balancer later.
        service(annotations={"kube-vip.io/serviceInterface": "eth1"}, spec={"type": "ClusterIP"}),
    ):
        assert "ValidatingAdmissionPolicy 'gpunodes-load-balancer'" in refused_by(server, services, refused)
    server.call("POST", services, service())
    merge = "application/merge-patch+json"
    for changed, change in (
        ("web", {"metadata": {"annotations": {asked: "10.0.0.9"}}}),
        ("web", {"spec": {"externalIPs": ["10.0.0.1"]}}),
        ("earlier", {"spec": {"externalIPs": ["10.0.0.9", "10.0.0.1"]}}),
        ("web", {"metadata": {"annotations": {asked: "10.0.0.200"}}, "spec": {"type": "ClusterIP"}}),
    ):
        with pytest.raises(HTTPError, match="422"):
            server.call("PATCH", f"{services}/{changed}", change, merge)
    # A Service that is no load balancer any more gives its address back.
    server.call("PATCH", f"{services}/web", {"metadata": {"annotations": {asked: "10.0.0.200"}}}, merge)
    with pytest.raises(HTTPError, match="422"):
        server.call("PATCH", f"{services}/web", {"spec": {"type": "ClusterIP"}}, merge)
    for kind, address in (("ClusterIP", None), ("LoadBalancer", "10.0.0.200")):
        change = {"metadata": {"annotations": {asked: address}}, "spec": {"type": kind}}
        server.call("PATCH", f"{services}/web", change, merge)
    # What was there before can be changed, and loses them.
    server.call("PATCH", f"{services}/earlier", {"metadata": {"labels": {"a": "b"}}}, merge)
    server.call("PATCH", f"{services}/earlier", {"spec": {"externalIPs": None}}, merge)
    server.call("DELETE", f"{services}/earlier")
    with pytest.raises(MachineProblem, match=r"there are Services of type LoadBalancer \(web\)"):
        down("load-balancer")
    server.call("DELETE", f"{services}/web")
    assert set(down("load-balancer")) == titles("load-balancer")
    finish(server, "kube-vip")


def test_enforcement_stays_while_there_are_network_policies(server: ApiServer) -> None:
    up("network-policy")
    policies = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"
    server.call("POST", policies, {"metadata": {"name": "deny-all"}, "spec": {"podSelector": {}}})
    with pytest.raises(MachineProblem, match=r"network policies, which nothing would enforce then \(deny-all\)"):
        down("network-policy")
    server.call("DELETE", f"{policies}/deny-all")
    assert set(down("network-policy")) == titles("network-policy")


def test_a_manifest_brings_its_own_kinds_and_goes_only_without_objects_of_them(server: ApiServer) -> None:
    group = "test.gpunodes.dev"
    kind = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"queues.{group}"},
        "spec": {
            "group": group,
            "scope": "Cluster",
            "names": {"kind": "Queue", "plural": "queues", "singular": "queue"},
            "versions": [
                {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {"type": "object"}}}
            ],
        },
    }
    own = {"apiVersion": f"{group}/v1", "kind": "Queue", "metadata": {"name": "own"}}
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "queues"}}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "queues"}}
    assert len(optional.up([config, own, kind, space], "queues", "v1", True)[0]) == 4
    assert optional.up([config, own, kind, space], "queues", "v1", False)[0][:2] == [
        "Namespace queues",
        f"CustomResourceDefinition queues.{group}",
    ]
    assert optional.up([config, own, kind, space], "queues", "v1", False)[0] == []
    # A newer version has no such ConfigMap.
    assert "ConfigMap a" in optional.up([own, kind, space], "queues", "v2", False)[0]
    assert optional.installed()["queues"] == "v2"
    queues = f"/apis/{group}/v1/queues"
    server.call("POST", queues, {"apiVersion": f"{group}/v1", "kind": "Queue", "metadata": {"name": "theirs"}})
    with pytest.raises(MachineProblem, match=r"there are objects of the kind Queue \(theirs\)"):
        optional.down("queues", (), False)
    server.call("DELETE", f"{queues}/theirs")
    assert optional.down("queues", (), False)[0] == [
        "Queue own",
        f"CustomResourceDefinition queues.{group}",
        "Namespace queues",
    ]
    finish(server, "queues")


def test_an_add_on_runs_when_its_workloads_do_and_it_answers(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "metrics-server"
    monkeypatch.setattr(settling, "SETTLE_S", 0)
    with pytest.raises(MachineProblem, match="metrics-server: it is not installed"):
        optional.wait(name, {}, 0)
    up(name)
    with pytest.raises(MachineProblem, match="metrics-server: its controller has not seen it yet"):
        optional.wait(name, {}, 0)
    path = "/apis/apps/v1/namespaces/kube-system/deployments/metrics-server/status"
    ready = {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, "readyReplicas": 1}
    for counts in ({**ready, "readyReplicas": 0}, ready):
        server.call("PATCH", path, {"status": counts}, "application/merge-patch+json")
        if not counts["readyReplicas"]:
            with pytest.raises(MachineProblem, match="0 of 1 pods are ready"):
                optional.wait(name, {}, 0)
    optional.wait(name, {}, 0)
    with pytest.raises(MachineProblem, match="/api/v1/nodes has no item yet"):
        optional.wait(name, {"path": "/api/v1/nodes", "items": True}, 0)
    # Nothing serves the metrics: the removal must not wait for that.
    assert set(down(name)) == titles(name)
