"""What kubelets report of their feature gates; tests/repair has a real API server in between."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from gpunodes.ansible.module_utils import kube_api, kubeconfig
from gpunodes.ansible.module_utils.cluster import kubelet_gates, nodes
from gpunodes.ansible.module_utils.kube_api import ApiError
from gpunodes.ansible.module_utils.kubeconfig import Kubeconfig
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.planner import reports

from tests.hostile import ATTACKS

CONFIG = Kubeconfig("https://127.0.0.1:9", "", "", "")
READY = [{"type": "Ready", "status": "True"}]


def node(name: str, *, annotations: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"metadata": {"name": name}, "spec": {}, "status": {"conditions": READY}, **more}
    made["metadata"]["annotations"] = {nodes.READY_BOOT: "boot"} if annotations is None else annotations
    return made


class Api:
    """An API with these nodes; ``answers``: what their kubelets send, or the error of the request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *listed: dict[str, Any], **answers: Any) -> None:
        self.listed, self.answers, self.text = listed, answers, ""
        self.asked: list[str] = []
        self.lock = threading.Lock()
        monkeypatch.setattr(kubeconfig, "load", lambda _: CONFIG)
        monkeypatch.setattr(kubelet_gates, "Client", lambda *_, **__: self)

    def get(self, path: str) -> Any:
        if path == "/api/v1/nodes":
            return {"items": self.listed}
        with self.lock:
            self.asked.append(path)
        answer = self.answers.get(path.split("/")[4], {"kubeletconfig": {}})
        if isinstance(answer, float):
            time.sleep(answer)
            raise ApiError(0, "timed out")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def find(self, path: str) -> Any:
        assert path == kubelet_gates.CONFIG
        return {"data": {"kubelet": self.text}} if self.text else None

    def close(self) -> None:
        """Nothing is open."""


def test_only_kubelets_of_ready_nodes_that_gpunodes_made_are_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(
        monkeypatch,
        node("a"),
        node("scaled", annotations={}, spec={"providerID": "gpunodes://scaled"}),
        node("foreign", annotations={}),
        node("cloud", annotations={}, spec={"providerID": "aws:///i-1"}),
        node("down", status={"conditions": [{"type": "Ready", "status": "Unknown"}]}),
        a={"kubeletconfig": {"featureGates": {"AllBeta": True}}},
    )
    assert kubelet_gates.report() == {
        "problem": "",
        "cluster": {},
        "nodes": {"a": {"AllBeta": True}, "scaled": {}},
        "silent": {},
    }
    assert sorted(api.asked) == [f"/api/v1/nodes/{name}/proxy/configz" for name in ("a", "scaled")]


def test_a_kubelet_that_does_not_respond_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Api(monkeypatch, node("a"), node("b"), node("c"), b=ApiError(503, "x" * 900), c=0.01)
    found = kubelet_gates.report()
    assert found["nodes"] == {"a": {}}
    assert found["silent"]["b"].startswith("the Kubernetes API reports: xxx")
    assert len(found["silent"]["b"]) == 300
    assert found["silent"]["c"] == "no complete answer within 4 s"


def test_no_kubelet_is_queried_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubelet_gates, "_AT_ONCE", 2)
    monkeypatch.setattr(kubelet_gates, "_WHOLE_S", 0.3)
    names = [f"n{number}" for number in range(40)]
    api = Api(monkeypatch, *map(node, names), **dict.fromkeys(names, 0.2))
    began = time.monotonic()
    found = kubelet_gates.report()
    assert time.monotonic() - began < 10
    assert list(found["silent"]) == names
    assert len(api.asked) < len(names)
    assert set(found["silent"].values()) == {"no complete answer within 4 s", "it was not queried within 0 s"}


def test_kubelets_that_hang_do_not_keep_others_from_being_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubelet_gates, "_AT_ONCE", 4)
    monkeypatch.setattr(kubelet_gates, "_WHOLE_S", 1.0)
    hanging = [f"a{number}" for number in range(40)]
    api = Api(
        monkeypatch, *map(node, [*hanging, *(f"b{number}" for number in range(200))]), **dict.fromkeys(hanging, 0.4)
    )
    assert len(kubelet_gates.report()["nodes"]) > 10
    assert len(api.asked) > 10


WRONG: list[Any] = [
    None,
    [],
    "text",
    {"message": "garbage"},
    {"kubeletconfig": []},
    {"kubeletconfig": {"featureGates": ["AllBeta"]}},
    {"kubeletconfig": {"featureGates": {"AllBeta": "true"}}},
    {"kubeletconfig": {"featureGates": {"AllBeta": 1}}},
    {"kubeletconfig": {"featureGates": {"x" * 101: True}}},
    {"kubeletconfig": {"featureGates": {f"Gate{number}": True for number in range(501)}}},
    *({"kubeletconfig": {"featureGates": {attack: True}}} for attack in ATTACKS),
]


@pytest.mark.parametrize("answer", WRONG)
def test_an_answer_of_another_form_names_its_kubelet(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    Api(monkeypatch, node("a"), node("b"), b=answer)
    found = kubelet_gates.report()
    assert found["nodes"] == {"a": {}}
    assert found["silent"]["b"].startswith("its answer has no valid feature gates")
    assert reports.kubelet_gates_problem(found) == ""


def test_what_a_kubelet_sends_with_an_error_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server passes it on, whatever it is."""

    class Answer:
        status, reason = 500, "Internal Server Error"

    class Connection:
        def request(self, *_: object) -> None:
            """Sent."""

        def getresponse(self) -> Answer:
            return Answer()

    client = kube_api.Client.__new__(kube_api.Client)
    client._limits, client._patience_s, client._token_file = kube_api.Limits(), -1, ""
    client._connection = Connection()  # type: ignore[assignment]  # all that a call uses of it
    for body in (b"[]", b'"x"', b"1", b'{"message": [[1]]}', b"null"):
        monkeypatch.setattr(kube_api, "_content", lambda *_, body=body: body)
        with pytest.raises(ApiError, match="reports: Internal Server Error"):
            client.get("/api/v1/nodes/a/proxy/configz")


def test_without_a_cluster_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeconfig, "load", lambda _: None)
    assert kubelet_gates.report() == {"problem": "", "cluster": {}, "nodes": {}, "silent": {}}


def test_kubectl_is_needed_only_where_the_cluster_sets_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    class Workshop:
        def __enter__(self) -> Workshop:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing is left."""

        def data(self, text: str, _: str) -> Any:
            read.append(text)
            if "bad" in text:
                raise MachineProblem("the ConfigMap cannot be read")
            return {"featureGates": {"AllBeta": True}}

    monkeypatch.setattr(kubelet_gates, "Workshop", Workshop)
    api = Api(monkeypatch, node("a"))
    api.text = "kind: KubeletConfiguration\n"
    assert kubelet_gates.report()["cluster"] == {}
    assert read == []
    api.text = "featureGates: {AllBeta: true}\n"
    assert kubelet_gates.report()["cluster"] == {"AllBeta": True}
    api.text = "featureGates: bad\n"
    assert kubelet_gates.report() == {
        "problem": "the ConfigMap cannot be read",
        "cluster": {},
        "nodes": {},
        "silent": {},
    }
