"""The burn-in of GPUs with a real API server: its taint, and the pods, the key and a quota of the NCCL test.

No kubelet runs: the tests end the pods. Nothing measures a bandwidth here.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from gpunodes.ansible.module_utils import burn_in_taint, devices, kube_api, kubeconfig, nccl_test
from gpunodes.ansible.module_utils.burn_in_taint import TAINT
from gpunodes.ansible.module_utils.kube_api import ApiError
from gpunodes.ansible.module_utils.problem import MachineProblem

from tests.power_fleet import GPU
from tests.repair import apiserver, controllers
from tests.repair.apiserver import ApiServer

NODES = {"gpu-1": 8, "gpu-2": 8}
RDMA = {"rdma/hca": "1"}
PODS, SECRETS = f"{kube_api.SYSTEM}/pods", f"{kube_api.SYSTEM}/secrets"
MERGE = "application/merge-patch+json"
OTHER = {"key": "team", "value": "a", "effect": "NoSchedule"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with apiserver.running(tmp_path_factory.mktemp("burn-in")) as made:
        for name, gpus in NODES.items():
            controllers.add_node(made, name, gpus)
        yield made


@pytest.fixture(autouse=True)
def admin(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeconfig, "ADMIN", str(server.kubeconfig))
    monkeypatch.setattr(nccl_test, "is_disconnected", lambda: False)


def made_pods() -> list[dict[str, Any]]:
    """As the test makes them: the two servers, and the launcher."""
    requested = {devices.GPU: "8", **RDMA}
    servers = [
        nccl_test._pod(f"run-{at}", "run", node, "image:1", [nccl_test._SERVER], 60, requested)
        for at, node in enumerate(NODES)
    ]
    arguments = [nccl_test._LAUNCHER, "mpirun", "16", "10.0.0.1:8,10.0.0.2:8"]
    return [*servers, nccl_test._pod("run-launcher", "run", "gpu-1", "image:1", arguments, 60, {})]


def test_the_pods_have_only_fields_that_the_api_knows(server: ApiServer) -> None:
    for pod in made_pods():
        made = server.call("POST", f"{PODS}?dryRun=All&fieldValidation=Strict", pod)
        assert made["spec"]["tolerations"][0] == {"operator": "Exists"}
        assert made["spec"]["automountServiceAccountToken"] is False
        assert made["spec"]["volumes"][0]["secret"]["defaultMode"] == 0o600


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="the key is made by ssh-keygen")
def test_the_key_belongs_to_the_first_pod_and_all_goes_when_the_test_is_interrupted(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def wait(client: kube_api.Client, names: list[str], _: float) -> list[str]:
        pods = [client.get(f"{PODS}/{name}") for name in names]
        [key] = client.get(SECRETS)["items"]
        seen.extend([pods, key])
        raise MachineProblem("interrupted")

    monkeypatch.setattr(nccl_test, "_wait_ready", wait)
    with pytest.raises(MachineProblem, match="interrupted"):
        nccl_test.measure(NODES, "image:1", {}, 0, 60)
    pods, key = seen
    [owner] = key["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Pod", pods[0]["metadata"]["uid"])
    assert set(key["data"]) == {"key", "public", "config"}
    assert [pod["spec"]["containers"][0]["resources"]["limits"][GPU] for pod in pods] == ["8", "8"]
    assert server.call("GET", PODS)["items"] == []
    assert server.call("GET", SECRETS)["items"] == []


def test_a_quota_that_forbids_the_pods_is_reported_and_leaves_nothing(server: ApiServer) -> None:
    quotas = f"{kube_api.SYSTEM}/resourcequotas"
    # No controller counts here; the API server itself refuses what is beyond the quota.
    hard = {f"requests.{GPU}": "8"}
    server.call("POST", quotas, {"metadata": {"name": "small"}, "spec": {"hard": hard}})
    server.call("PATCH", f"{quotas}/small/status", {"status": {"hard": hard, "used": {f"requests.{GPU}": "0"}}}, MERGE)
    try:
        with pytest.raises(ApiError, match="exceeded quota: small"):
            nccl_test.measure(NODES, "image:1", {}, 0, 60)
        assert server.call("GET", PODS)["items"] == []
        assert server.call("GET", SECRETS)["items"] == []
    finally:
        server.call("DELETE", f"{quotas}/small")


def test_nodes_that_offer_other_gpus_are_not_tested() -> None:
    found = nccl_test.measure({"gpu-1": 4, "gpu-2": 8}, "image:1", {}, 0, 60)
    assert "gpu-1 offers nvidia.com/gpu: 8 instead of 4 whole GPUs" in found["skipped"]


def test_the_taint_comes_and_goes_beside_others(server: ApiServer) -> None:
    server.call("PATCH", "/api/v1/nodes/gpu-2", {"spec": {"taints": [OTHER]}}, MERGE)
    options: dict[str, Any] = {"only_tainted": False, "drain": False, "limit_s": 1, "check": False}
    assert burn_in_taint.hold("gpu-2", **options)[0]
    assert server.call("GET", "/api/v1/nodes/gpu-2")["spec"]["taints"] == [OTHER, TAINT]
    assert burn_in_taint.release("gpu-2", check=False)
    assert server.call("GET", "/api/v1/nodes/gpu-2")["spec"]["taints"] == [OTHER]
    user = {
        "metadata": {"name": "train", "namespace": "default"},
        "spec": {
            "nodeName": "gpu-2",
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "c", "image": "i", "resources": {"limits": {GPU: "1"}}}],
        },
    }
    server.call("POST", "/api/v1/namespaces/default/pods", user)
    with pytest.raises(MachineProblem, match="default/train uses GPUs of gpu-2"):
        burn_in_taint.hold("gpu-2", **options)
    assert server.call("GET", "/api/v1/nodes/gpu-2")["spec"]["taints"] == [OTHER]
