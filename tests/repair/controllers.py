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
_CONTROLLERS = "job-controller,resourcequota-controller,clusterrole-aggregation-controller"
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
