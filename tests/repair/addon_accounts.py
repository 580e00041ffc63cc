"""The accounts of add-ons with a real API server, as their programs or thieves of their tokens use them."""

from __future__ import annotations

import contextlib
import copy
import json
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from gpunodes.ansible.module_utils import kubeconfig
from gpunodes.ansible.module_utils.cluster import optional
from gpunodes.planner import addons

from tests.repair import apiserver
from tests.repair.apiserver import ApiServer
from tests.unit.test_addon_role import rendered

MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"


@contextlib.contextmanager
def cluster(folder: Path, *names: str) -> Iterator[ApiServer]:
    """An API server that checks rights, with these add-ons."""
    with (
        apiserver.running(folder, {"authorization-mode": "RBAC"}) as made,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(kubeconfig, "ADMIN", str(made.kubeconfig))
        for name in names:
            optional.up(list(rendered(name)), name, addons.chosen(name).version, check=False)
        yield made


@dataclass
class Account:
    """An account of an add-on, by its token."""

    server: ApiServer
    token: str

    def refusal(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> str:
        """Why a request is refused, "" if it is carried out."""
        handler = urllib.request.HTTPSHandler(
            context=ssl.create_default_context(cafile=str(self.server.folder / "ca.crt"))
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), handler)
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.server.port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {self.token}", "Content-Type": kind},
            method=method,
        )
        try:
            with opener.open(request, timeout=60) as answer:
                answer.read()
        except HTTPError as error:
            return str(json.loads(error.read())["message"])
        return ""

    def until_refused(self, policy: str, *request: Any) -> None:
        """A policy takes effect some time after it was made."""
        deadline = time.monotonic() + 60
        while f"ValidatingAdmissionPolicy '{policy}'" not in self.refusal(*request):
            assert time.monotonic() < deadline
            time.sleep(0.5)


def account(server: ApiServer, space: str, name: str) -> Account:
    made = server.call("POST", f"/api/v1/namespaces/{space}/serviceaccounts/{name}/token", {"spec": {}})
    return Account(server, str(made["status"]["token"]))


def changed(found: Any, change: Callable[[Any], None]) -> Any:
    made = copy.deepcopy(found)
    made["metadata"].setdefault("finalizers", [])
    change(made)
    return made


def put(who: Account, path: str, change: Callable[[Any], None], sub: str = "") -> str:
    """Why a change of an object is refused, "" if it is done."""
    return who.refusal("PUT", path + sub, changed(who.server.call("GET", path), change))


def field(*path: str, to: Any) -> Callable[[Any], None]:
    def change(found: Any) -> None:
        for each in path[:-1]:
            found = found.setdefault(each, {})
        found[path[-1]] = to

    return change


OWNER = [{"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "x"}]
