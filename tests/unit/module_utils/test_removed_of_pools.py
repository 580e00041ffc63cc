"""A machine that is removed from a pool that scales: the power server must not go on to switch it."""

from __future__ import annotations

from typing import Any

import pytest
from gpunodes.ansible.module_utils.cluster import removal
from gpunodes.ansible.module_utils.kube_api import ApiError
from gpunodes.autoscale import kept_off


class Client:
    """The API, with or without the ConfigMap."""

    def __init__(self, exists: bool) -> None:
        self.exists = exists
        self.calls: list[Any] = []

    def call(self, method: str, path: str, body: Any = None, *_: Any, **__: Any) -> None:
        self.calls.append((method, path, body))
        if method == "PATCH" and not self.exists:
            raise ApiError(404, "not found")


@pytest.mark.parametrize("exists", [True, False])
def test_it_is_recorded_for_the_power_server(exists: bool) -> None:
    client: Any = Client(exists)
    node = {"metadata": {"name": "w3"}, "spec": {"providerID": "gpunodes://w3"}}
    [note] = removal._leave_off(client, node)
    assert "the autoscaler leaves w3 alone" in note
    [(name, made)] = kept_off.parse(client.calls[-1][2]["data"]).items()
    # Any node that is ready ends it: the machine has joined again.
    assert (name, made.by, made.boot_id) == ("w3", "gpunodes remove", "")
    assert client.calls[-1][1].endswith("/configmaps" + ("/gpunodes-kept-off" if exists else ""))


def test_a_machine_of_another_pool_is_not() -> None:
    client: Any = Client(True)
    assert removal._leave_off(client, {"metadata": {"name": "w3"}, "spec": {}}) == []
    assert client.calls == []
