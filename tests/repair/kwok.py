"""KWOK: simulated kubelets. It keeps nodes Ready, runs pods, and terminates evicted pods."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpunodes.lab.mirror import gobuild, pins, store

from tests.programs import ending

from . import apiserver
from .apiserver import ApiServer, cache

VERSION = "0.8.0"
"""The newest version that Go's module proxies serve."""


_STAGES = (
    "node/fast/node-initialize.yaml",
    "node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
    "pod/fast/pod-ready.yaml",
    "pod/fast/pod-delete.yaml",
)


class _Kwok(pins.Component):
    """Built as the lab's programs are; its go.mod is in tests/repair/kwok-go, since no lab needs it."""

    @property
    def modules(self) -> tuple[Path, Path]:
        folder = Path(__file__).parent / "kwok-go"
        return folder / "go.mod", folder / "go.sum"


@contextlib.contextmanager
def running(server: ApiServer, forwards: Mapping[int, int] | None = None) -> Iterator[None]:
    """Run KWOK for all nodes of ``server``; ``forwards``: ports of all pods, and the loopback ports behind them."""
    known = pins.load()
    component = _Kwok("kwok", VERSION)
    with store.locked(cache(), print):
        go = gobuild.toolchain(cache(), known, print)
        program = gobuild.programs(component, go, cache(), print) / "kwok"
    # The lifecycle of nodes and pods: KWOK's own "fast" stages.
    source = gobuild.source(component, go) / "kustomize" / "stage"
    stages = [source / name for name in _STAGES]
    config = server.folder / "stages.yaml"
    texts = [path.read_text() for path in stages]
    words = [str(program), "--kubeconfig", str(server.kubeconfig), "--manage-all-nodes", "--node-ip", "127.0.0.1"]
    words += ["--config", str(config)]
    if forwards:
        # Its kubelets listen at one port; their streaming is Kubernetes' own (k8s.io/cri-streaming).
        port = apiserver.free_port()
        words += [f"--node-port={port}", f"--server-address=127.0.0.1:{port}"]
        words += [f"--tls-cert-file={server.folder}/server.crt", f"--tls-private-key-file={server.folder}/server.key"]
        targets = [{"ports": [each], "target": {"port": to, "address": "127.0.0.1"}} for each, to in forwards.items()]
        about = {"apiVersion": "kwok.x-k8s.io/v1alpha1", "kind": "ClusterPortForward", "metadata": {"name": "all"}}
        texts.append(json.dumps({**about, "spec": {"forwards": targets}}))
    config.write_text("\n---\n".join(texts))
    with (server.folder / "kwok.log").open("wb") as log:
        argv = ending([*words, "--cidr", "10.1.0.0/16"])
        process = subprocess.Popen(argv, stdout=log, stderr=log, cwd=server.folder)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)


def wait_ready(server: ApiServer, number: int, limit_s: float = 300) -> None:
    """Wait until so many nodes are Ready."""
    deadline = time.monotonic() + limit_s
    while True:
        nodes = server.call("GET", "/api/v1/nodes")["items"]
        ready = sum(
            any(each["type"] == "Ready" and each["status"] == "True" for each in node["status"].get("conditions", ()))
            for node in nodes
        )
        if ready == number:
            return
        assert time.monotonic() < deadline, f"{ready} of {number} nodes are ready"
        time.sleep(2)


def node(name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """A GPU node; KWOK makes it Ready."""
    resources = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": "8"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": dict(labels)},
        "status": {"capacity": resources, "allocatable": resources, "nodeInfo": {"bootID": f"{name}-boot-1"}},
    }


def pod(name: str, on: str, owner: str) -> dict[str, Any]:
    """A pod as a controller of this kind would create it."""
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
