"""What kubelets report of their settings; tests/repair has a real API server in between."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from gpunodes.ansible.module_utils import kube_api, kubeconfig
from gpunodes.ansible.module_utils.cluster import kubelet_settings, nodes
from gpunodes.ansible.module_utils.kube_api import ApiError
from gpunodes.ansible.module_utils.kubeconfig import Kubeconfig
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.planner import reports
from gpunodes.planner.kubelet_layers import FIELDS

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
        monkeypatch.setattr(kubelet_settings, "Client", lambda *_, **__: self)

    def get(self, path: str) -> Any:
        assert path == "/api/v1/nodes"
        return {"items": self.listed}

    def call(self, method: str, path: str) -> Any:
        assert method == "GET"
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
        assert path == kubelet_settings.CONFIG
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
        a={"kubeletconfig": {"featureGates": {"AllBeta": True}, "maxPods": 110, "podPidsLimit": 9}},
    )
    assert kubelet_settings.report(FIELDS) == {
        "problem": "",
        "cluster": {},
        "nodes": {"a": {"featureGates": '{"AllBeta": true}', "podPidsLimit": "9"}, "scaled": {}},
        "silent": {},
    }
    assert kubelet_settings.report([*FIELDS, "maxPods"])["nodes"]["a"]["maxPods"] == "110"
    assert sorted(set(api.asked)) == [f"/api/v1/nodes/{name}/proxy/configz" for name in ("a", "scaled")]


def test_a_kubelet_that_does_not_respond_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Api(monkeypatch, node("a"), node("b"), node("c"), b=ApiError(503, "x" * 900), c=0.01)
    found = kubelet_settings.report(FIELDS)
    assert found["nodes"] == {"a": {}}
    assert found["silent"]["b"].startswith("the Kubernetes API reports: xxx")
    assert len(found["silent"]["b"]) == 300
    assert found["silent"]["c"] == "no complete answer within 4 s"


def test_no_kubelet_is_waited_for_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for those that were queried before, nor for further ones."""
    monkeypatch.setattr(kubelet_settings, "_AT_ONCE", 2)
    monkeypatch.setattr(kubelet_settings, "_WHOLE_S", 0.5)
    names = [f"n{number}" for number in range(40)]
    api = Api(monkeypatch, *map(node, names), **{**dict.fromkeys(names, 0.2), "n1": 30.0})
    began = time.monotonic()
    found = kubelet_settings.report(FIELDS)
    assert time.monotonic() - began < 10
    assert list(found["silent"]) == names
    assert len(api.asked) < len(names)
    assert set(found["silent"].values()) == {
        "no complete answer within 4 s",
        "no answer within the 0 s for all kubelets",
    }


def test_kubelets_that_hang_do_not_keep_others_from_being_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubelet_settings, "_AT_ONCE", 4)
    monkeypatch.setattr(kubelet_settings, "_WHOLE_S", 1.0)
    hanging = [f"a{number}" for number in range(40)]
    api = Api(
        monkeypatch, *map(node, [*hanging, *(f"b{number}" for number in range(200))]), **dict.fromkeys(hanging, 0.4)
    )
    assert len(kubelet_settings.report(FIELDS)["nodes"]) > 10
    assert len(api.asked) > 10


def nested(depth: int) -> Any:
    made: Any = 1
    for _ in range(depth):
        made = [made]
    return made


WRONG: list[Any] = [
    None,
    [],
    "text",
    {"message": "garbage"},
    {"kubeletconfig": []},
    {"kubeletconfig": {"featureGates": {f"Gate{number}": True for number in range(5000)}}},
    {"kubeletconfig": {"podPidsLimit": "x" * (1 << 16)}},
    {"kubeletconfig": {"providerID": ATTACKS[0] * 5000}},
    *({"kubeletconfig": {"podPidsLimit": nested(depth)}} for depth in (50, 900, 949, 970, 5000)),
    {"kubeletconfig": {"registerWithTaints": {"a": nested(60)}}},
]


@pytest.mark.parametrize("answer", WRONG)
def test_an_answer_of_another_form_names_its_kubelet(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    Api(monkeypatch, node("a"), node("b"), b=answer)
    found = kubelet_settings.report(FIELDS)
    assert found["nodes"] == {"a": {}}
    why = ("its answer has no configuration", "its answer is too long", "its answer is nested too deeply")
    assert found["silent"]["b"].startswith(why)
    assert reports.kubelet_settings_problem(found) == ""


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_a_kubelet_says_stays_one_text_of_json(monkeypatch: pytest.MonkeyPatch, attack: str) -> None:
    shown = {"featureGates": {attack: True}, "podPidsLimit": [attack], "providerID": attack, attack: 1}
    Api(monkeypatch, node("a"), a={"kubeletconfig": shown})
    found = kubelet_settings.report(FIELDS)
    assert reports.kubelet_settings_problem(found) == ""
    assert {name: json.loads(text) for name, text in found["nodes"]["a"].items()} == {
        name: value for name, value in shown.items() if name != attack
    }


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
    assert kubelet_settings.report(FIELDS) == {"problem": "", "cluster": {}, "nodes": {}, "silent": {}}


def test_kubectl_is_needed_only_where_kubelets_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
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
            if "deep" in text:
                return {"featureGates": nested(970)}
            return {"featureGates": {"AllBeta": True}}

    monkeypatch.setattr(kubelet_settings, "Workshop", Workshop)
    api = Api(monkeypatch, node("a"))
    assert kubelet_settings.report(FIELDS)["cluster"] == {}
    api.text, api.listed = "featureGates: {AllBeta: true}\n", ()
    assert kubelet_settings.report(FIELDS)["cluster"] == {}
    assert read == []
    api.listed = (node("a"),)
    assert kubelet_settings.report(FIELDS)["cluster"] == {"featureGates": '{"AllBeta": true}'}
    api.text = "featureGates: deep\n"
    found = kubelet_settings.report(FIELDS)["problem"]
    assert found.startswith("the ConfigMap kubelet-config in kube-system is nested too deeply")
    api.text = "featureGates: bad\n"
    assert kubelet_settings.report(FIELDS) == {
        "problem": "the ConfigMap cannot be read",
        "cluster": {},
        "nodes": {},
        "silent": {},
    }
