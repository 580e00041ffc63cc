"""A roll-out to hundreds of nodes on a real API server: budget, resumption after a kill, linear cost.

An independent watcher sees that the budget holds, also when the command is killed and another controller resumes.

Real: etcd, kube-apiserver and gpunodes. The kubelets are KWOK's. The machines are files (rollout_process.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from . import apiserver, kwok
from .apiserver import ApiServer
from .rollout_process import PROGRAM, ROOT

NODES = 200
MACHINES = 60
"""How many of the nodes the roll-out goes to; each takes some dozens of requests."""
POOLS = 2
BUDGET = 8
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
_WATCH_S = 4 * 3600
"""Longer than any roll-out here. By default the API server ends a watch after 30 to 60 minutes (its flag
min-request-timeout)."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with apiserver.running(tmp_path_factory.mktemp("cluster")) as made, kwok.running(made):
        for index in range(NODES):
            made.call("POST", "/api/v1/nodes", kwok.node(f"n{index:04}", {"test/pool": f"p{index % POOLS}"}))
        kwok.wait_ready(made, NODES)
        yield made


class Watcher:
    """Follows every change of a node by a watch: the most nodes of a pool that were cordoned at once."""

    def __init__(self, server: ApiServer, nodes: int = NODES, pools: int = POOLS) -> None:
        self._server = server
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._pool_of = {f"n{index:04}": f"p{index % pools}" for index in range(nodes)}
        self._cordoned = {pool: set[str]() for pool in self._pool_of.values()}
        self.ever: dict[str, None] = {}
        """Nodes in the order in which they were cordoned first."""
        self.most = 0

    def __enter__(self) -> Watcher:
        folder, query = self._server.folder, f"watch=true&timeoutSeconds={_WATCH_S}"
        path = f"https://127.0.0.1:{self._server.port}/api/v1/nodes?{query}"
        certificates: list[str | Path] = [
            "--cacert",
            folder / "ca.crt",
            "--cert",
            folder / "admin.crt",
            "--key",
            folder / "admin.key",
        ]
        self._process = subprocess.Popen(
            ["curl", "--silent", "--no-buffer", "--noproxy", "*", *certificates, path],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(0.5)
        assert self._process is not None
        is_complete = self._process.poll() is None and self._thread.is_alive()
        self._process.terminate()
        self._process.wait()
        self._thread.join()
        assert is_complete, "the watch ended before the roll-out: it did not see all cordons"

    def _run(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            node = json.loads(line)["object"]
            name = node["metadata"]["name"]
            cordoned = self._cordoned[self._pool_of[name]]
            if node["spec"].get("unschedulable"):
                cordoned.add(name)
                self.ever.setdefault(name)
            else:
                cordoned.discard(name)
            self.most = max(self.most, len(cordoned))


def prepare(folder: Path, server: ApiServer, names: Sequence[str]) -> Path:
    """The machines' files, and a pod on each tenth machine."""
    machines = folder / "machines"
    machines.mkdir()
    for name in names:
        state = {"version": "1", "prepared": 0, "applied": 0, "sick": False, "boot": 1, "back": 0}
        (machines / f"{name}.json").write_text(json.dumps(state))
    for name in names[::10]:
        server.call("POST", "/api/v1/namespaces/default/pods", kwok.pod(f"job-{name}", name, "ReplicaSet"))
    return machines


def start(
    folder: Path, number: int, server: ApiServer, machines: Path, what: str, budget: int = BUDGET
) -> subprocess.Popen[str]:
    """A controller with its own state folder."""
    state = folder / f"controller-{number}"
    state.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, *PROGRAM, str(server.kubeconfig), str(machines), what, str(budget)],
        cwd=ROOT,
        env={**os.environ, "XDG_STATE_HOME": str(state)},
        stdout=subprocess.PIPE,
        stderr=(folder / f"controller-{number}.log").open("a"),
        text=True,
    )


def finish(process: subprocess.Popen[str], folder: Path, limit_s: float = 900) -> dict[str, Any]:
    out, _ = process.communicate(timeout=limit_s)
    assert process.returncode == 0, "\n".join(path.read_text()[-3000:] for path in folder.glob("*.log"))
    document: dict[str, Any] = json.loads(out)
    assert document["exit_code"] == 0, document
    return document


def read(machines: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in machines.glob("*.json")}


def clean(server: ApiServer) -> None:
    """Nothing of the roll-out is left in the cluster."""
    assert server.call("GET", f"{LEASES}?labelSelector=app.kubernetes.io/managed-by=gpunodes")["items"] == []
    nodes = server.call("GET", "/api/v1/nodes")["items"]
    assert [node["metadata"]["name"] for node in nodes if node["spec"].get("unschedulable")] == []
    assert [node["metadata"]["name"] for node in nodes if "gpunodes.dev/rollout" in str(node["metadata"])] == []


def test_the_budget_holds_through_a_kill_and_a_resume(server: ApiServer, tmp_path: Path) -> None:
    names = [f"n{index:04}" for index in range(MACHINES)]
    machines = prepare(tmp_path, server, names)
    began = time.monotonic()
    with Watcher(server) as watcher:
        killed = start(tmp_path, 1, server, machines, "begin")
        deadline = time.monotonic() + 900
        try:
            while sum(each["version"] == "2" for each in read(machines).values()) < MACHINES // 4:
                assert time.monotonic() < deadline, (tmp_path / "controller-1.log").read_text()[-3000:]
                assert killed.poll() is None, (tmp_path / "controller-1.log").read_text()[-3000:]
                time.sleep(0.1)
        finally:
            killed.send_signal(signal.SIGKILL)
            killed.wait()
        record = json.loads(
            server.call("GET", f"{LEASES}/gpunodes-rollout")["metadata"]["annotations"]["gpunodes.dev/record"]
        )
        # Another controller, which knows the first one only from the cluster. It runs on the same host, so that it sees
        # that the first process is dead; on another host the locks would have to expire.
        result = finish(start(tmp_path, 2, server, machines, "resume"), tmp_path)
    assert record["running"], "it was killed in the middle"
    assert {each["outcome"] for each in result["machines"]} == {"done"}
    found = read(machines)
    assert {each["version"] for each in found.values()} == {"2"}
    again = [name for name, each in found.items() if each["applied"] > 1]
    assert set(again) <= set(record["running"]), "only what the kill interrupted was applied again"
    assert 1 < watcher.most <= BUDGET, watcher.most
    assert set(watcher.ever) == set(names)
    assert set(list(watcher.ever)[:2]) == {"n0000", "n0001"}, "the canaries"
    assert server.call("GET", "/api/v1/namespaces/default/pods")["items"] == []
    clean(server)
    print(f"\n{MACHINES} of {NODES} nodes in {time.monotonic() - began:.0f} s; unavailable {watcher.most} of {BUDGET}")


def test_cost_is_linear(server: ApiServer, tmp_path: Path) -> None:
    calls = {}
    for number in (6, 24):
        folder = tmp_path / str(number)
        folder.mkdir()
        machines = prepare(folder, server, [f"n{index:04}" for index in range(number)])
        calls[number] = finish(start(folder, 1, server, machines, "begin"), folder)["calls"]
        clean(server)
    print(f"\nAPI calls: {calls}")
    assert calls[24] <= calls[6] * 4 * 1.2
    assert calls[24] <= 24 * 40
