"""A join token whose signature the controller manager did not write at once; the API is a stand-in."""

from __future__ import annotations

from typing import Any

import pytest
from gpunodes.ansible.module_utils import kube_api
from gpunodes.ansible.module_utils.cluster import removed_nodes, tokens


class Forgetful:
    """An API whose controller manager signs only after the Secret of the token has changed."""

    def __init__(self) -> None:
        self.data: dict[str, str] = {}
        self.calls: list[tuple[str, str]] = []

    def call(self, method: str, path: str, body: Any = None, content_type: str = "") -> None:
        self.calls.append((method, path))
        if method == "PATCH":
            assert content_type == kube_api.MERGE
            self.data[f"jws-kubeconfig-{path.rpartition('-')[2]}"] = "signature"

    def get(self, _path: str) -> Any:
        return {"data": self.data}


def test_the_controller_manager_is_reminded_of_a_token_that_it_did_not_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Forgetful()
    monkeypatch.setattr(kube_api, "admin", lambda: api)
    monkeypatch.setattr(removed_nodes, "admit", lambda *_: None)
    monkeypatch.setattr(tokens, "_AGAIN_S", 0.0)
    name = tokens.create(900, 5).partition(".")[0]
    path = f"{kube_api.SYSTEM}/secrets"
    assert api.calls == [("POST", path), ("PATCH", f"{path}/bootstrap-token-{name}")]
