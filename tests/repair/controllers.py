"""A real controller manager and scheduler beside a real API server; nothing runs the pods, and tests end them."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from typing import Any

from gpunodes.lab.mirror import gobuild, pins, store

from tests.power_fleet import CAPACITY, GPU
from tests.programs import ending

from .apiserver import MINOR, ApiServer, cache

# Those that examples need. The one of nodes would evict: no kubelet reports here.
_CONTROLLERS = ",".join((
    "clusterrole-aggregation-controller",
    "deployment-controller",
    "disruption-controller",
    "endpointslice-controller",
    "job-controller",
    "replicaset-controller",
    "resourcequota-controller",
))  # fmt: skip
MERGE = "application/merge-patch+json"


@contextlib.contextmanager
def running(server: ApiServer) -> Iterator[None]:
    """Start both programs; they are stopped afterwards."""
    known = pins.load()
    with store.locked(cache(), print):
        go = gobuild.toolchain(cache(), known, print)
        folder = gobuild.programs(known.minors[MINOR].kubernetes, go, cache(), print)
    same = [f"--kubeconfig={server.kubeconfig}", "--leader-elect=false", "--secure-port=0"]
    more = {"kube-controller-manager": [f"--controllers={_CONTROLLERS}"], "kube-scheduler": []}
    with contextlib.ExitStack() as held:
        for name, options in more.items():
            log = held.enter_context((server.folder / f"{name}.log").open("wb"))
            argv = [str(folder / name), *same, *options]
            process = subprocess.Popen(ending(argv), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            held.callback(process.wait, 60)
            held.callback(process.terminate)
        yield


def add_node(server: ApiServer, name: str, gpus: int) -> None:
    """A node that is ready and offers GPUs."""
    server.call("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}})
    offered = {**CAPACITY, GPU: str(gpus)}
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    conditions = [
        {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "", "lastHeartbeatTime": now}
    ]
    status: dict[str, Any] = {"capacity": offered, "allocatable": offered, "conditions": conditions}
    server.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, MERGE)


def start(server: ApiServer, path: str, address: str) -> None:
    """Let a pod run and be ready at an address, as its kubelet would."""
    ready = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "ContainersReady", "Ready")]
    status = {"phase": "Running", "conditions": ready, "podIP": address, "podIPs": [{"ip": address}]}
    server.call("PATCH", f"{path}/status", {"status": status}, MERGE)


def end(server: ApiServer, path: str, phase: str, code: int, container: str, *, disrupted: bool = False) -> None:
    """End a pod as its kubelet would."""
    ended = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}
    status: dict[str, Any] = {
        "phase": phase,
        "containerStatuses": [
            {"name": container, "image": "i", "imageID": "i", "ready": False, "restartCount": 0, "state": ended}
        ],
    }
    if disrupted:
        status["conditions"] = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]
    server.call("PATCH", f"{path}/status", {"status": status}, MERGE)
