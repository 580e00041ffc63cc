"""Check mode has changed nothing in the cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

testinfra_hosts = ["control-1"]


def test_the_node_is_as_it_joined(node: dict[str, Any]) -> None:
    assert [name for name in node["metadata"]["labels"] if name.startswith("gpunodes.dev/")] == []
    assert "gpunodes.dev/managed" not in node["metadata"]["annotations"]
    assert "nvidia.com/gpu" not in node["status"]["allocatable"]


def test_there_is_no_device_plugin(get: Callable[[str], Any]) -> None:
    plugins = get("/apis/apps/v1/namespaces/kube-system/daemonsets")["items"]
    assert "nvidia-device-plugin-daemonset" not in {plugin["metadata"]["name"] for plugin in plugins}
    assert get("/apis/node.k8s.io/v1/runtimeclasses")["items"] == []
