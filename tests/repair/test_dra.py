"""The objects for dynamic resource allocation on a real API server, with RBAC and admission policies.

The driver itself does not run: the tests send its requests, under its name.
"""

from __future__ import annotations

import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from gpunodes.ansible.module_utils import devices, gpu_cluster, kube_api, kubeconfig
from gpunodes.ansible.module_utils.cluster import nodes, objects, slices

from tests.unit.test_gpu_serving import rendered, resource_slice

from . import apiserver

SLICES = "/apis/resource.k8s.io/v1/resourceslices"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[apiserver.ApiServer]:
    with apiserver.running(tmp_path_factory.mktemp("dra"), {"authorization-mode": "RBAC"}) as made:
        yield made


@pytest.fixture(autouse=True)
def admin(server: apiserver.ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeconfig, "ADMIN", str(server.kubeconfig))


def as_driver(server: apiserver.ApiServer, node: str, method: str, path: str, body: Any = None) -> str:
    """The message of a request that the driver on a node sends, "" if it succeeds."""
    context = ssl.create_default_context(cafile=str(server.folder / "ca.crt"))
    context.load_cert_chain(server.folder / "admin.crt", server.folder / "admin.key")
    headers = {
        "Content-Type": "application/json",
        "Impersonate-User": "system:serviceaccount:kube-system:nvidia-dra-driver",
        "Impersonate-Group": "system:authenticated",
    }
    if node:
        headers["Impersonate-Extra-authentication.kubernetes.io%2Fnode-name"] = node
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"https://127.0.0.1:{server.port}{path}", data, headers, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(request, timeout=30):
            return ""
    except urllib.error.HTTPError as error:
        return str(json.loads(error.read())["message"])


def test_the_objects_are_accepted_and_applied_once() -> None:
    wanted = list(rendered().values())
    assert len(objects.apply(wanted, check=False)[0]) == len(wanted)
    assert objects.apply(wanted, check=False)[0] == []


def test_the_driver_changes_slices_of_its_own_node_only(server: apiserver.ApiServer) -> None:
    objects.apply(list(rendered().values()), check=False)
    own, other = resource_slice("gpu-1", "gpu-0", "gpu-1"), resource_slice("gpu-2", "gpu-0")
    deadline = time.monotonic() + 60
    # A new policy has an effect after a moment.
    while not (refused := as_driver(server, "gpu-1", "POST", SLICES, other)) and time.monotonic() < deadline:
        server.call("DELETE", f"{SLICES}/{other['metadata']['name']}")
        time.sleep(1)
    assert "of its own node only" in refused
    assert as_driver(server, "gpu-1", "POST", SLICES, own) == ""
    assert "of its own node only" in as_driver(server, "", "POST", SLICES, {**own, "metadata": {"name": "x"}})
    foreign = resource_slice("gpu-1", "nic-0", driver="nic.example", generation=2)
    assert "its own ResourceSlices only" in as_driver(server, "gpu-1", "POST", SLICES, foreign)
    path = f"{SLICES}/{own['metadata']['name']}"
    assert "of its own node only" in as_driver(server, "gpu-2", "DELETE", path)
    assert slices.offered(kube_api.admin()) == {"gpu-1": {"gpu-1/gpu-0", "gpu-1/gpu-1"}}
    assert slices.offered(kube_api.admin(), "gpu-2") == {}
    assert as_driver(server, "gpu-1", "DELETE", path) == ""


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/api/v1/secrets"), ("GET", "/api/v1/pods"), ("DELETE", "/api/v1/nodes/gpu-1"), ("GET", "/api/v1/nodes")],
)
def test_the_driver_has_no_other_rights(server: apiserver.ApiServer, method: str, path: str) -> None:
    objects.apply(list(rendered().values()), check=False)
    assert "forbidden" in as_driver(server, "gpu-1", method, path)


def test_the_claim_and_the_job_of_the_verification_are_accepted() -> None:
    objects.apply(list(rendered().values()), check=False)
    client = kube_api.admin()
    space = "kube-system"
    templates = f"/apis/resource.k8s.io/v1/namespaces/{space}/resourceclaimtemplates"
    made = client.call("POST", templates, slices.claim_template("verify"))
    assert made["spec"]["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] == "gpu.nvidia.com"
    job = client.call(
        "POST", f"/apis/batch/v1/namespaces/{space}/jobs", gpu_cluster.claiming_job("verify", "gpu-1", "i")
    )
    assert job["spec"]["template"]["spec"]["resourceClaims"][0]["resourceClaimTemplateName"] == "verify"
    assert slices.allocated(client) == set()


def test_a_label_fails_nothing_in_a_cluster_that_does_not_serve_the_api(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One before Kubernetes 1.34: each node may set such a label of its own."""
    flags = {"runtime-config": "resource.k8s.io/v1=false"}
    with apiserver.running(tmp_path_factory.mktemp("old"), flags) as old:
        monkeypatch.setattr(kubeconfig, "ADMIN", str(old.kubeconfig))
        metadata = {"name": "gpu-1", "labels": {devices.SERVING: devices.DRA}}
        old.call("POST", "/api/v1/nodes", {"metadata": metadata})
        found = nodes.info(required=True)
        assert found
        assert [(each["name"], each["gpus"]) for each in found["nodes"]] == [("gpu-1", 0)]
        assert slices.claims(kube_api.admin(), "default") is None
        assert slices.allocated(kube_api.admin()) == set()
