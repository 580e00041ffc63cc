"""Lists of the API when a user of one namespace makes very large objects: no response is too large to be read."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from gpunodes.ansible.module_utils import kube_api, kubeconfig
from gpunodes.ansible.module_utils import session as program
from gpunodes.ansible.module_utils.sent import MARK
from gpunodes.engine.cluster import pages, pods
from gpunodes.engine.cluster import session as sessions
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.connection import TOO_LARGE, Connects, Response, Transport, here
from gpunodes.engine.cluster.direct import ByKubeconfig
from gpunodes.engine.cluster.errors import NoResponse, Refused, TooLarge
from gpunodes.engine.cluster.session import Session

from tests import tls_api
from tests.tls_api import Server

WORST = "\x01" * (256 << 10)
"""The most that the API allows as annotations of one object: 1.57 MB as JSON."""
ANNOTATED = {"annotations": {"a": WORST}}
MIRRORED = {"annotations": {"kubernetes.io/config.mirror": WORST}}
OWNED = {"ownerReferences": [{"kind": WORST, "name": "a", "uid": "u", "controller": True}]}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tls_api.certificate(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def server(certificate: Path) -> Iterator[Server]:
    with tls_api.serving(certificate) as made:
        yield made


def pod(number: int, metadata: Any) -> dict[str, Any]:
    return {"metadata": {"name": f"p{number}", "namespace": "team", "uid": f"u{number}", **metadata}, "spec": {}}


def lists(server: Server, items: list[Any]) -> list[int]:
    """Let a server list ``items``, as an API server does; returns how many were requested at once, as it grows."""
    limits: list[int] = []

    def answer(path: str) -> tuple[int, dict[str, str], bytes]:
        query = parse_qs(urlsplit(path).query)
        start, limit = int(query.get("continue", ["0"])[0]), int(query.get("limit", [str(len(items))])[0])
        limits.append(limit)
        metadata = {"continue": str(start + limit)} if start + limit < len(items) else {}
        return 200, {}, json.dumps({"metadata": metadata, "items": items[start : start + limit]}).encode()

    server.answer = answer
    return limits


def over_program(server: Server, folder: Path, machine: str) -> Transport:
    """The program of a control plane, which it runs on its own machine."""
    ca = base64.b64encode((server.folder / "server.crt").read_bytes()).decode()
    path = folder / f"{machine}.conf"
    path.write_text(f"    certificate-authority-data: {ca}\n    server: https://127.0.0.1:{server.port}\n")
    return here(sys.executable, path, machine)


@pytest.fixture(params=["a control plane", "a kubeconfig"])
def session(
    request: pytest.FixtureRequest, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Session]:
    # A busy test machine takes long to start a program.
    monkeypatch.setattr(sessions, "TURN_S", 40.0)
    transports: list[Connects] = [ByKubeconfig(server.kubeconfig())]
    if request.param == "a control plane":
        transports = [over_program(server, tmp_path, name) for name in ("c1", "c2")]
    else:
        pytest.importorskip("kubernetes.config.kube_config", reason="needs the extra gpunodes[kubeconfig]")
    opened = Session(transports)
    yield opened
    opened.close()


@pytest.mark.long
@pytest.mark.parametrize("metadata", [ANNOTATED, MIRRORED, OWNED], ids=["annotations", "a mirror pod", "an owner"])
def test_the_pods_of_a_node_are_read_however_large_their_user_made_them(
    server: Server, session: Session, metadata: Any
) -> None:
    """34 MB in one response blocked every drain of the node, and the control plane counted as failed."""
    limits = lists(server, [pod(number, metadata) for number in range(22)])
    found = Cluster(session, patience_s=0.0).pods_on("n1")
    assert [each.name for each in found] == [f"p{number}" for number in range(22)]
    assert session.failures == {}
    assert pages.PODS_AT_ONCE in limits
    assert session.machine in {"c1", f"the API of {server.folder / 'config'}"}


@pytest.mark.parametrize("path", ["/api/v1/pods", "/api/v1/pods?labelSelector=a"])
def test_a_module_on_a_machine_reads_in_pages_what_is_too_large(server: Server, tmp_path: Path, path: str) -> None:
    limits = lists(server, [pod(number, {"annotations": {"a": "x" * 1000}}) for number in range(22)])
    over_program(server, tmp_path, "c1")
    config = kubeconfig.load(str(tmp_path / "c1.conf"))
    assert config
    client = kube_api.Client(config, limits=kube_api.Limits(most=15_000))
    began = time.monotonic()
    found = client.get(path, fieldSelector="spec.nodeName=n1")
    assert time.monotonic() - began < 30, "what is too large is not requested again until a limit"
    assert [each["metadata"]["name"] for each in found["items"]] == [f"p{number}" for number in range(22)]
    assert limits == [22, 50, 12, 12]
    assert all("fieldSelector=spec.nodeName%3Dn1" in asked for asked, _ in server.asked)
    client = kube_api.Client(config, limits=kube_api.Limits(most=500))
    with pytest.raises(kube_api.ApiError, match="does not end"):
        client.get(path)


def test_of_a_pod_only_what_is_used_is_requested() -> None:
    whole = pod(1, ANNOTATED)
    whole["metadata"]["annotations"]["kubernetes.io/config.mirror"] = "x"
    whole["metadata"]["ownerReferences"] = [{"kind": "Job", "name": "j" * 99, "uid": "u", "controller": True}]
    container = {"name": "c", "env": [{"name": "A", "value": WORST}], "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    whole["spec"] = {"containers": [container], "nodeName": "n1"}
    kept = program.pruned(whole, list(pods.KEEP))
    assert pods.parse(kept) == pods.parse(whole)
    assert pods.parse(kept).mirror
    assert pods.parse(kept).owner == "Job"
    assert pods.parse(kept).uses_gpus
    assert len(json.dumps(kept)) < 500


def test_a_dot_in_the_name_of_a_field() -> None:
    assert pages.field("a", "b.c/d.e") == r"a.b\.c/d\.e"
    item = {"a": {"b.c/d.e": 1, "b": {"c/d": {"e": 2}}, "x": 3}}
    assert program.pruned(item, [pages.field("a", "b.c/d.e")]) == {"a": {"b.c/d.e": 1}}


class Listing:
    """What an API returns to requests for pages, by how many objects are requested at once."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def __call__(self, path: str) -> Response:
        self.asked.append(path)
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(found, Exception):
            raise found
        items, token = found
        return Response(200, {"metadata": {"continue": token}, "items": items}, "", float(len(self.asked)))


def read_all(*arguments: Any) -> Any:
    return pages.read_all(*arguments)


def test_pages_are_joined_and_have_the_time_of_the_first() -> None:
    """A Lease of a later page is as old as the first page: by a later time it would seem to have expired."""
    listing = Listing((["a"], "x/y+z"), ([], "1"), (["b"], ""))
    found = read_all(listing, "/api/v1/pods?fieldSelector=a", 7)
    assert (found.items, found.time) == (["a", "b"], 1.0)
    path = "/api/v1/pods?fieldSelector=a&limit=7"
    assert listing.asked == [path, f"{path}&continue=x%2Fy%2Bz", f"{path}&continue=1"]


def test_a_list_without_metadata_is_whole() -> None:
    assert read_all(lambda _: Response(200, {"items": [1]}, "", 1.0), "/x") == ([1], 1.0)


def test_the_api_server_may_forget_the_moment_of_a_list() -> None:
    gone = Refused(410, "the provided continue parameter is too old")
    listing = Listing((["a"], "1"), gone, (["b"], "1"), (["c"], ""))
    assert read_all(listing, "/x").items == ["b", "c"]
    with pytest.raises(Refused, match="too old"):
        read_all(Listing(gone), "/x")


def test_a_list_without_an_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_MOST_PAGES", 5)
    with pytest.raises(NoResponse, match="the list /x has no end"):
        read_all(Listing((["a"], "1")), "/x?y")


def test_a_response_that_is_too_large_makes_no_control_plane_count_as_failed() -> None:
    """Another one would have the same response; a request for a single object has no smaller one."""
    frame = {"status": TOO_LARGE, "body": None, "error": "the response is too large", "time": 1.0, "ca": "sha256:a"}
    text = (
        f"import json, sys; print('\\n{MARK}')\nfor line in sys.stdin:\n"
        f"    print(json.dumps({{'id': json.loads(line)['id'], **{frame!r}}}), flush=True)\n"
    )
    opened = Session([Transport([sys.executable, "-c", text], machine=name) for name in ("c1", "c2")])
    began = time.monotonic()
    with pytest.raises(TooLarge, match="to GET /api/v1/pods is too large"):
        Cluster(opened).pods_on("n1")
    assert time.monotonic() - began < 20, "it is not repeated until a limit"
    assert (opened.failures, opened.machine) == ({}, "c1")
    opened.close()
