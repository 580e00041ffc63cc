"""What kubelets do, as far as the tests need it: nodes are Ready from the start, and pods that are evicted end.

A stand-in of the test's own, in its process.
"""

from __future__ import annotations

import contextlib
import threading
import urllib.error
from collections.abc import Iterator, Mapping
from typing import Any

from .apiserver import ApiServer


@contextlib.contextmanager
def running(server: ApiServer) -> Iterator[None]:
    """End pods that are to end, until left."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.2):
            with contextlib.suppress(OSError):
                for pod in server.call("GET", "/api/v1/namespaces/default/pods")["items"]:
                    if "deletionTimestamp" in pod["metadata"]:
                        path = f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}"
                        with contextlib.suppress(urllib.error.HTTPError):
                            server.call("DELETE", f"{path}?gracePeriodSeconds=0")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def node(name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """A GPU node, Ready as its kubelet would say."""
    resources = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": "8"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": dict(labels)},
        "status": {"capacity": resources, "allocatable": resources, "nodeInfo": {"bootID": f"{name}-boot-1"}}
        | {"conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]},
    }


def pod(name: str, on: str, owner: str) -> dict[str, Any]:
    """A pod that a controller of this kind would have made."""
    reference = {"apiVersion": "apps/v1", "kind": owner, "name": "owner", "uid": "1", "controller": True}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "ownerReferences": [reference]},
        "spec": {
            "nodeName": on,
            "containers": [{"name": "main", "image": "none"}],
            "tolerations": [{"operator": "Exists"}],
        },
    }
