"""Fixtures of this scenario; its tests read the cluster's API on the control plane."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from testinfra.host import Host

Get = Callable[[str], Any]


@pytest.fixture
def get(host: Host) -> Get:
    """A function that reads a path of the API, and returns its JSON."""

    def read(path: str) -> Any:
        return json.loads(host.check_output("kubectl --kubeconfig /etc/kubernetes/admin.conf get --raw %s", path))

    return read


@pytest.fixture
def node(get: Get) -> dict[str, Any]:
    """The node of the GPU machine."""
    found: dict[str, Any] = get("/api/v1/nodes/gpu-1")
    return found
