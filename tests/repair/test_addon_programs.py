"""The programs of add-ons with the arguments and the rights of their manifests, beside a real API server."""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gpunodes.planner import addons

from tests.repair import apiserver
from tests.repair.addon_programs import (
    MERGE,
    NODE,
    Kubelet,
    container,
    get,
    installed,
    kubeconfig_of,
    program,
    replaced,
    running,
    token,
    until,
)
from tests.repair.apiserver import ApiServer
from tests.unit.test_addon_role import with_settings


@pytest.mark.usefixtures("admin")
def test_metrics_server_reads_kubelets_whose_certificates_it_verifies(server: ApiServer) -> None:
    path = program("metrics-server", "metrics-server")
    words = container(installed("metrics-server"), "metrics-server")["args"]
    port, ca = apiserver.free_port(), server.folder / "ca.crt"
    given = {"--secure-port": port, "--cert-dir": server.folder / "metrics", "--kubelet-certificate-authority": ca}
    own = replaced(words, given)
    rights = kubeconfig_of(server, "kube-system", "metrics-server")
    access = [f"--{name}kubeconfig={rights}" for name in ("", "authentication-", "authorization-")]
    # The reader has what `view` has by aggregation.
    server.call("POST", "/api/v1/namespaces/default/serviceaccounts", {"metadata": {"name": "reader"}})
    reader = {"kind": "ServiceAccount", "name": "reader", "namespace": "default"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:aggregated-metrics-reader"}
    binding = {"metadata": {"name": "reader"}, "roleRef": role, "subjects": [reader]}
    server.call("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", binding)
    with running(server, "metrics-server", [str(path), *own, *access, "--bind-address=127.0.0.1"]):
        until("it is alive", lambda: get(f"https://127.0.0.1:{port}/livez") == "ok")
        nodes = f"https://127.0.0.1:{port}/apis/metrics.k8s.io/v1beta1/nodes"
        assert get(nodes) == "", "nobody reads it without rights"
        read = token(server, "default", "reader")
        [node] = until("it has the usage", lambda: json.loads(get(nodes, read) or "{}").get("items"))
        assert node["metadata"]["name"] == NODE
        assert node["usage"]["memory"] == "1Mi"
        until("it is ready", lambda: get(f"https://127.0.0.1:{port}/readyz") == "ok")
    assert "/metrics/resource" in Kubelet.asked


@pytest.mark.usefixtures("admin")
def test_local_path_makes_a_volume_with_a_pod_on_the_node(server: ApiServer) -> None:
    path = program("local-path-provisioner", "local-path-provisioner")
    objects = installed("local-path")
    found = container(objects, "local-path-provisioner")
    config = server.folder / "config"
    config.mkdir()
    for name, text in next(each for each in objects if each["kind"] == "ConfigMap")["data"].items():
        (config / name).write_text(text)
    rights = kubeconfig_of(server, "local-path-storage", "local-path-provisioner")
    own = replaced(found["args"], {"--config": config / "config.json"})
    assert found["command"][0] == path.name
    argv = [str(path), *found["command"][1:], *own, f"--kubeconfig={rights}"]
    chosen = {
        "volume.kubernetes.io/selected-node": NODE,
        "volume.kubernetes.io/storage-provisioner": "rancher.io/local-path",
    }
    claim = {
        "metadata": {"name": "scratch", "annotations": chosen},
        "spec": {
            "storageClassName": "local-path",
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Mi"}},
        },
    }
    space = "/api/v1/namespaces/local-path-storage/pods"
    environment = {"POD_NAMESPACE": "local-path-storage", "CONFIG_MOUNT_PATH": f"{config}/"}
    with running(server, "local-path", argv, **environment):
        server.call("POST", "/api/v1/namespaces/default/persistentvolumeclaims", claim)
        [pod] = until("a pod makes the folder", lambda: server.call("GET", space)["items"])
        assert pod["spec"]["nodeName"] == NODE
        [helper] = pod["spec"]["containers"]
        assert helper["image"] == addons.chosen("local-path").images["helper"]
        done = {"status": {"phase": "Succeeded"}}
        server.call("PATCH", f"{space}/{pod['metadata']['name']}/status", done, MERGE)
        volumes = "/api/v1/persistentvolumes"
        [volume] = until("the volume is made", lambda: server.call("GET", volumes)["items"])
        assert volume["spec"]["claimRef"]["name"] == "scratch"
        assert "/opt/local-path-provisioner/" in json.dumps(volume["spec"])


def test_network_policies_take_their_arguments() -> None:
    """Without a cluster: it would write rules into this machine's kernel."""
    path = program("kube-network-policies", "cmd")
    words = container(with_settings("network-policy"), "kube-network-policies")["args"]
    assert words[0] == "/bin/netpol"
    done = subprocess.run(
        [path, *words[1:]], env={"PATH": "/"}, capture_output=True, text=True, check=False, timeout=60
    )
    assert "unable to load in-cluster configuration" in done.stderr
    assert 'name="nfqueue-id" value="98"' in done.stderr


def service(name: str, **annotations: str) -> dict[str, Any]:
    spec = {"type": "LoadBalancer", "selector": {"app": name}, "ports": [{"port": 80}]}
    return {"metadata": {"name": name, "annotations": annotations}, "spec": spec}


def of_type_load_balancer(server: ApiServer) -> list[str]:
    services = server.call("GET", "/api/v1/services")["items"]
    return [each["metadata"]["name"] for each in services if each["spec"]["type"] == "LoadBalancer"]


@pytest.mark.usefixtures("admin")
def test_services_get_addresses_of_the_setting(server: ApiServer) -> None:
    path = program("kube-vip-cloud-provider", "kube-vip-cloud-provider")
    found = container(installed("load-balancer"), "kube-vip-cloud-provider")
    assert found["command"] == [f"/{path.name}"]
    rights = home(server, "kube-vip-cloud-provider")
    environment = {each["name"]: each["value"] for each in found["env"]} | {"HOME": str(rights.parents[1])}
    # In a pod it finds the API server by itself.
    argv = [str(path), *found["args"], "--OutSideCluster", f"--kubeconfig={rights}"]
    services, asked = "/api/v1/namespaces/default/services", "kube-vip.io/loadbalancerIPs"

    def address(name: str) -> str:
        read = server.call("GET", f"{services}/{name}")
        return str(read["metadata"].get("annotations", {}).get(asked, ""))

    def is_kept(name: str) -> bool:
        finalizers = server.call("GET", f"{services}/{name}")["metadata"].get("finalizers", [])
        return "service.kubernetes.io/load-balancer-cleanup" in finalizers

    with running(server, "kube-vip-cloud-provider", argv, **environment) as log:
        for name in ("first", "second"):
            server.call("POST", services, service(name))
        given = [until("it gets an address", functools.partial(address, name)) for name in ("first", "second")]
        assert len(set(given)) == 2
        assert set(given) <= {"10.0.0.200", "10.0.0.201", "10.0.0.202", "10.0.0.203", "10.0.0.210"}
        server.call("POST", services, service("third", **{asked: "10.0.0.210"}))
        for name in ("first", "second", "third"):
            until("it is kept until its address is given back", functools.partial(is_kept, name))
            server.call("DELETE", f"{services}/{name}")
        until("they are gone", lambda: not of_type_load_balancer(server))
        assert "forbidden" not in log.read_text()


@pytest.mark.usefixtures("admin")
def test_kube_vip_becomes_the_one_that_answers(server: ApiServer) -> None:
    """Without Services: it would give their addresses to this machine."""
    path = program("kube-vip", "kube-vip")
    if Path("/etc/kubernetes/admin.conf").exists():
        pytest.skip("kube-vip would use the cluster of this machine")
    found = container(installed("load-balancer"), "kube-vip")
    assert of_type_load_balancer(server) == []
    port = apiserver.free_port()
    environment = {each["name"]: each.get("value", NODE) for each in found["env"]}
    environment |= {"prometheus_server": f"127.0.0.1:{port}", "vip_interface": "lo"}
    environment |= {"HOME": str(home(server, "kube-vip").parents[1])}
    with running(server, "kube-vip", [str(path), *found["args"]], **environment) as log:
        lease = "/apis/coordination.k8s.io/v1/namespaces/kube-vip/leases"
        until("it has the lease", lambda: NODE in str(server.call("GET", lease)["items"]))
        until("it watches Services", lambda: "starting services watcher" in log.read_text())
        assert "kube_vip_manager" in get(f"http://127.0.0.1:{port}/metrics")
        assert "forbidden" not in log.read_text()


def home(server: ApiServer, account: str) -> Path:
    """The kubeconfig of an account where programs look for that of a user."""
    path = server.folder / account / ".kube" / "config"
    path.parent.mkdir(parents=True)
    return kubeconfig_of(server, "kube-vip", account).rename(path)
