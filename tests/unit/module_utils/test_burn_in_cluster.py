"""Burn-in in the cluster: the taint, and the pods of the NCCL test, with an API in memory."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from gpunodes.ansible.module_utils import burn_in_taint, kube_api, kubeconfig, nccl_test
from gpunodes.ansible.module_utils.burn_in_taint import TAINT
from gpunodes.ansible.module_utils.kube_api import ApiError
from gpunodes.ansible.module_utils.problem import MachineProblem

OTHER = {"key": "team", "value": "a", "effect": "NoSchedule"}


def pod(name: str, gpus: int, labels: dict[str, str] | None = None) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    return {
        "metadata": {"namespace": "default", "name": name, "labels": labels or {}},
        "spec": {"nodeName": "gpu-1", "containers": [{"resources": {"limits": limits}}]},
        "status": {"phase": "Running"},
    }


class MemoryApi:
    """The few requests of a burn-in."""

    def __init__(self) -> None:
        self.node: dict[str, Any] | None = {
            "metadata": {"name": "gpu-1", "resourceVersion": "1"},
            "spec": {"taints": [OTHER]},
            "status": {"allocatable": {"nvidia.com/gpu": "8"}},
        }
        self.pods: list[dict[str, Any]] = []
        self.conflicts = 0
        self.budget = False
        self.on_patch: Callable[[], None] = lambda: None
        self.created: list[dict[str, Any]] = []
        self.deleted: list[str] = []
        self.output = ""

    @property
    def taints(self) -> list[dict[str, str]]:
        assert self.node
        return list(self.node["spec"].get("taints") or [])

    def find(self, path: str) -> Any:
        return copy.deepcopy(self.node)

    def get(self, path: str, **query: str) -> Any:
        if path.startswith("/api/v1/nodes/"):
            return copy.deepcopy(self.node)
        if path == "/api/v1/pods":
            return {"items": copy.deepcopy(self.pods)}
        if path.endswith("/log"):
            return {"message": self.output}
        if path == f"{kube_api.SYSTEM}/pods":
            label = query["labelSelector"].partition("=")[0]
            return {"items": [each for each in [*self.created, *self.pods] if label in each["metadata"]["labels"]]}
        (found,) = [each for each in self.created if path.endswith(f"/{each['metadata']['name']}")]
        return found

    def call(self, method: str, path: str, body: Any = None, *_: Any) -> Any:
        if method == "PATCH":
            if self.conflicts:
                self.conflicts -= 1
                raise ApiError(409, "changed")
            assert self.node
            self.node["spec"]["taints"] = body["spec"]["taints"]
            self.on_patch()
        elif path.endswith("/eviction"):
            if self.budget:
                raise ApiError(429, "Cannot evict pod as it would violate the pod's disruption budget.")
            self.pods = [each for each in self.pods if each["metadata"]["name"] != body["metadata"]["name"]]
        elif method == "POST":
            number = len(self.created)
            ready = [{"type": "Ready", "status": "True"}]
            launcher = body["metadata"]["name"].endswith("launcher")
            status = {"phase": "Succeeded" if launcher else "Running", "podIP": f"10.0.0.{number}", "conditions": ready}
            body = {**body, "status": status} if body["kind"] == "Pod" else body
            body["metadata"]["uid"] = f"u{number}"
            self.created.append(body)
        return {}

    def delete(self, path: str, **_: str) -> bool:
        name = path.rpartition("/")[2]
        self.deleted.append(name)
        self.created = [each for each in self.created if each["metadata"]["name"] != name]
        self.pods = [each for each in self.pods if each["metadata"]["name"] != name]
        return True


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> MemoryApi:
    made = MemoryApi()
    monkeypatch.setattr(kube_api, "admin", lambda *_, **__: made)
    monkeypatch.setattr(kubeconfig, "load", lambda _: object())
    for module in (burn_in_taint, nccl_test):
        monkeypatch.setattr(module, "_POLL_S", 0)
    monkeypatch.setattr(nccl_test, "is_disconnected", lambda: False)
    return made


def hold(**options: Any) -> tuple[bool, Any, list[str]]:
    return burn_in_taint.hold(
        "gpu-1", **{"only_tainted": False, "drain": False, "limit_s": 1, "check": False, **options}
    )


def test_an_idle_node_gets_the_taint_and_keeps_others(api: MemoryApi) -> None:
    api.conflicts = 2
    api.pods = [pod("web", 0)]
    assert hold()[0]
    assert api.taints == [OTHER, TAINT]
    assert hold()[:2] == (True, [])
    assert burn_in_taint.release("gpu-1", check=False)
    assert api.taints == [OTHER]
    assert not burn_in_taint.release("gpu-1", check=False)


def test_check_mode_changes_nothing(api: MemoryApi) -> None:
    due, differences, _ = hold(check=True)
    assert (due, len(differences), api.taints) == (True, 1, [OTHER])
    api.pods = [pod("train", 8)]
    assert hold(check=True, drain=True)[2] == ["default/train"]
    with pytest.raises(MachineProblem):
        hold(check=True)
    api.node = None
    assert hold(check=True) == (False, [], [])


def test_a_node_in_use_is_refused_and_stays_as_it_was(api: MemoryApi) -> None:
    api.pods = [pod("train", 8)]
    with pytest.raises(
        MachineProblem, match=r"default/train uses GPUs of gpu-1; wanted: .*--drain; nothing was changed"
    ):
        hold()
    assert api.taints == [OTHER]


def test_a_pod_that_comes_before_the_taint_is_noticed(api: MemoryApi) -> None:
    api.on_patch = lambda: api.pods.append(pod("late", 1)) if TAINT in api.taints else None
    with pytest.raises(MachineProblem, match="default/late"):
        hold()
    assert api.taints == [OTHER]


def test_an_earlier_taint_stays_when_a_node_is_refused(api: MemoryApi) -> None:
    assert api.node
    api.node["spec"]["taints"] = [TAINT]
    api.pods = [pod("tolerant", 1)]
    with pytest.raises(MachineProblem):
        hold()
    assert api.taints == [TAINT]


def test_after_a_join_only_tainted_nodes_are_due(api: MemoryApi) -> None:
    api.pods = [pod("train", 8)]
    assert hold(only_tainted=True) == (False, [], [])
    assert api.taints == [OTHER]
    assert api.node
    api.node["spec"]["taints"], api.pods = [TAINT], []
    assert hold(only_tainted=True)[0]


def test_drain_evicts_only_pods_that_use_gpus(api: MemoryApi) -> None:
    api.pods = [pod("train", 8), pod("web", 0)]
    assert hold(drain=True)[2] == ["default/train"]
    assert [each["metadata"]["name"] for each in api.pods] == ["web"]
    assert TAINT in api.taints


def test_disruption_budgets_are_respected(api: MemoryApi) -> None:
    api.pods, api.budget = [pod("train", 8)], True
    with pytest.raises(MachineProblem, match=r"default/train still use GPUs of gpu-1 after 0 s: .*disruption budget"):
        hold(drain=True, limit_s=0)
    assert api.taints == [OTHER]


def test_pods_of_an_interrupted_burn_in_do_not_count(api: MemoryApi) -> None:
    api.pods = [pod("gpunodes-nccl-1-0", 8, {burn_in_taint.LABEL: "gpunodes-nccl-1"})]
    assert hold()[0]
    assert api.deleted == ["gpunodes-nccl-1-0"]


# --- NCCL ------------------------------------------------------------------------------------------------------------

REPORT = "# Out of bounds values : {} OK\n# Avg bus bandwidth    : {} \n"
NODES = {"gpu-1": 8, "gpu-2": 8}


def measure(minimum: float = 0) -> dict[str, Any]:
    return nccl_test.measure(NODES, "nccl:1", {"rdma/ib": "8"}, minimum, 5)


def test_nccl_between_two_nodes(api: MemoryApi, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[dict[str, Any]] = []
    call = api.call

    def keep(*arguments: Any) -> Any:
        kept.append(arguments[2])
        return call(*arguments)

    monkeypatch.setattr(api, "call", keep)
    api.output = REPORT.format(0, 181.5)
    assert measure()["summary"] == "NCCL all_reduce between 2 nodes: 181.5 GB/s bus bandwidth"
    first, second, secret, launcher = kept
    limits = first["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": "8", "rdma/ib": "8"}
    places = [
        each["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][
            0
        ]["matchFields"][0]["values"]
        for each in (first, second, launcher)
    ]
    assert places == [["gpu-1"], ["gpu-2"], ["gpu-1"]]
    assert launcher["spec"]["containers"][0]["command"][3:] == ["mpirun", "16", "10.0.0.0:8,10.0.0.1:8"]
    assert secret["metadata"]["ownerReferences"][0]["uid"] == "u0"
    assert "PRIVATE KEY" not in json.dumps([first, second, launcher])
    assert len(set(api.deleted)) == 4
    assert not api.created


@pytest.mark.parametrize(
    ("output", "minimum", "failed"),
    [
        (REPORT.format(0, 12.5), 0, ""),
        (REPORT.format(0, 12.5), 12.5, ""),
        (
            REPORT.format(0, 12.5),
            100,
            "NCCL all_reduce between gpu-1, gpu-2: 12.5 GB/s bus bandwidth; wanted: at least 100",
        ),
        (REPORT.format(4, 500), 0, "NCCL all_reduce between gpu-1, gpu-2: 4 wrong values"),
    ],
)
def test_thresholds(output: str, minimum: float, failed: str, api: MemoryApi) -> None:
    api.output = output
    found = measure(minimum)
    assert found["failed"].startswith(failed)
    assert bool(found["failed"]) == bool(failed)


def test_a_test_without_a_result_raises_and_leaves_nothing(api: MemoryApi) -> None:
    api.output = "# NCCL\nssh: connect to host 10.0.0.1 port 2222: Connection refused\n"
    with pytest.raises(MachineProblem, match="gave no result: ssh: connect to host"):
        measure()
    assert not api.created


def test_an_address_that_is_none_never_becomes_an_argument(api: MemoryApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_test, "_is_ready", lambda each: bool(each["status"].update(podIP="-x;reboot") or True))
    with pytest.raises(MachineProblem, match="reports no IPv4 address"):
        measure()
    assert not api.created


def test_nodes_with_slices_are_skipped(api: MemoryApi) -> None:
    assert api.node
    api.node["status"]["allocatable"] = {"nvidia.com/mig-1g.5gb": "56"}
    assert measure()["skipped"] == "NCCL was not tested: gpu-1 offers nvidia.com/mig-1g.5gb: 56 instead of 8 whole GPUs"
    assert not api.created
