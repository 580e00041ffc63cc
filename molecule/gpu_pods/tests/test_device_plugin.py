"""NVIDIA's device plugin runs on the node with a GPU, and on no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

testinfra_hosts = ["control-1"]


def test_it_runs_on_the_gpu_node_only(get: Callable[[str], Any]) -> None:
    pods = get("/api/v1/namespaces/kube-system/pods?labelSelector=name%3Dnvidia-device-plugin-ds")["items"]
    assert [(pod["spec"]["nodeName"], pod["status"]["phase"]) for pod in pods] == [("gpu-1", "Running")]


def test_its_runtime_is_a_runtime_of_the_nodes(get: Callable[[str], Any]) -> None:
    assert get("/apis/node.k8s.io/v1/runtimeclasses/nvidia")["handler"] == "nvidia"


def test_the_kubelet_offers_the_gpu(node: dict[str, Any]) -> None:
    assert node["status"]["allocatable"]["nvidia.com/gpu"] == "1"
