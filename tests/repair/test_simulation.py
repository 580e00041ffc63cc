"""A thousand nodes on a real API server, some unhealthy: budget and locks hold, cost grows with the unhealthy nodes.

Real: etcd, kube-apiserver and gpunodes. The kubelets are KWOK's. The machines are simulated by files
(operator_process.py).
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
from .operator_process import PROGRAM

NODES = 1000
POOLS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with apiserver.running(tmp_path_factory.mktemp("cluster")) as made, kwok.running(made):
        for index in range(NODES):
            made.call("POST", "/api/v1/nodes", kwok.node(f"n{index:04}", {"test/pool": f"p{index % POOLS}"}))
        kwok.wait_ready(made, NODES)
        yield made


class Monitor:
    """Scans the cluster while it is repaired: the most that was unavailable in each pool, and all that was cordoned."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.most = dict.fromkeys((f"p{index}" for index in range(POOLS)), 0)
        self.cordoned: set[str] = set()
        self.scans = 0

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            found = self._server.call("GET", "/api/v1/nodes?fieldSelector=spec.unschedulable=true")["items"]
            self.scans += 1
            for pool in self.most:
                here = sum(node["metadata"]["labels"]["test/pool"] == pool for node in found)
                self.most[pool] = max(self.most[pool], here)
            self.cordoned |= {node["metadata"]["name"] for node in found}


def prepare(folder: Path, server: ApiServer, sick: Sequence[str], names: Sequence[str]) -> Path:
    """The machines' files, and pods on the unhealthy machines."""
    machines = folder / "machines"
    machines.mkdir()
    for number, name in enumerate(names):
        boot = server.call("GET", f"/api/v1/nodes/{name}")["status"]["nodeInfo"]["bootID"] if name in sick else "1"
        count = int(boot.rpartition("-")[2]) if "-boot-" in boot else 1
        deaf = [[], ["reboot"], ["reboot", "force"], ["reboot", "force", "sysrq"]][number % 4]
        state = {"sick": name in sick, "boot": count, "deaf": deaf, "done": [], "back": 0}
        (machines / f"{name}.json").write_text(json.dumps(state))
        if name in sick:
            body = {"status": {"nodeInfo": {"bootID": f"{name}-boot-{count}"}}}
            server.call("PATCH", f"/api/v1/nodes/{name}/status", body, "application/merge-patch+json")
            for pod, owner in ((f"job-{name}", "ReplicaSet"), (f"agent-{name}", "DaemonSet")):
                server.call("POST", "/api/v1/namespaces/default/pods", kwok.pod(pod, name, owner))
    return machines


def start(folder: Path, number: int, server: ApiServer, machines: Path, budget: str) -> subprocess.Popen[str]:
    """A controller with its own state folder."""
    state = folder / f"operator-{number}"
    state.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(server.kubeconfig), str(machines), budget],
        env={**os.environ, "XDG_STATE_HOME": str(state)},
        stdout=subprocess.PIPE,
        stderr=(folder / f"operator-{number}.log").open("a"),
        text=True,
    )


def finish(process: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    out, _ = process.communicate(timeout=900)
    assert process.returncode == 0, "\n".join(path.read_text()[-3000:] for path in folder.glob("*.log"))
    document: dict[str, Any] = json.loads(out)
    return document


def done(machines: Path) -> dict[str, list[str]]:
    read = {path.stem: json.loads(path.read_text()) for path in machines.glob("*.json")}
    assert not [name for name, state in read.items() if state["sick"]]
    return {name: state["done"] for name, state in read.items() if state["done"]}


def clean(server: ApiServer) -> None:
    """Nothing of gpunodes is left in the cluster."""
    path = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
    assert server.call("GET", f"{path}?labelSelector=app.kubernetes.io/managed-by=gpunodes")["items"] == []
    nodes = server.call("GET", "/api/v1/nodes")["items"]
    ours = [node["metadata"]["name"] for node in nodes if "gpunodes.dev/cordoned-by" in str(node["metadata"])]
    assert ours == []
    assert [node["metadata"]["name"] for node in nodes if node["spec"].get("unschedulable")] == []


def test_two_operators_repair_twenty_of_a_thousand(server: ApiServer, tmp_path: Path) -> None:
    names = [f"n{index:04}" for index in range(NODES)]
    sick = [f"n{index:04}" for index in range(100, 120)]
    machines = prepare(tmp_path, server, sick, names)
    with Monitor(server) as monitor:
        began = time.monotonic()
        operators = [start(tmp_path, number, server, machines, "2") for number in (1, 2)]
        results = [finish(process, tmp_path) for process in operators]
        took = time.monotonic() - began
    used = done(machines)
    assert set(used) == set(sick)
    expected = [["reboot"], ["reboot", "force"], ["reboot", "force", "sysrq"], ["reboot", "force", "sysrq", "bmc"]]
    assert all(used[name] == expected[names.index(name) % 4] for name in sick), "each once, by the step that works"
    repaired = [each["name"] for result in results for each in result["machines"] if each["outcome"] == "repaired"]
    assert sorted(repaired) == sick, "no machine by both"
    assert set(monitor.most.values()) == {2}, monitor.most
    assert monitor.cordoned == set(sick), "no healthy node was ever cordoned"
    assert server.call("GET", f"/api/v1/nodes/{sick[0]}")["status"]["nodeInfo"]["bootID"].endswith("-boot-2")
    pods = {pod["metadata"]["name"] for pod in server.call("GET", "/api/v1/namespaces/default/pods")["items"]}
    assert pods == {f"agent-{name}" for name in sick}
    clean(server)
    print(
        f"\n{len(sick)} of {NODES} in {took:.0f} s by two operators; {[len(r['machines']) for r in results]} acted on, "
        f"{[result['calls'] for result in results]} API calls, {monitor.scans} scans, most unavailable {monitor.most}"
    )


def test_cost_grows_with_unhealthy_nodes_and_not_with_healthy_ones(server: ApiServer, tmp_path: Path) -> None:
    calls = {}
    for title, total, unhealthy in (("few", 100, 4), ("many", NODES, 4), ("more unhealthy", NODES, 8)):
        folder = tmp_path / title.replace(" ", "-")
        folder.mkdir()
        names = [f"n{index:04}" for index in range(total)]
        # The same step for each machine.
        sick = [names[index * 4] for index in range(5, 5 + unhealthy)]
        # Machines that are not in the inventory do not count; all nodes exist in each run.
        machines = prepare(folder, server, sick, names)
        calls[title] = finish(start(folder, 1, server, machines, "8"), folder)["calls"]
        clean(server)
        for name in sick:
            server.call("DELETE", f"/api/v1/namespaces/default/pods/agent-{name}?gracePeriodSeconds=0")
            body = {"metadata": {"annotations": {"gpunodes.dev/repairs": None}}}
            server.call("PATCH", f"/api/v1/nodes/{name}", body, "application/merge-patch+json")
    print(f"\nAPI calls: {calls}")
    assert calls["many"] <= calls["few"] * 1.2 + 5
    assert calls["more unhealthy"] <= calls["many"] * 2 * 1.2


@pytest.mark.parametrize("after_s", [1.0, 3.0, 6.0])
def test_kill_and_again(server: ApiServer, tmp_path: Path, after_s: float) -> None:
    names = [f"n{index:04}" for index in range(NODES)]
    sick = [f"n{index:04}" for index in (203, 207, 301)]
    machines = prepare(tmp_path, server, sick, names)
    killed = start(tmp_path, 1, server, machines, "2")
    # After the first lock: before it there is nothing to resume.
    deadline = time.monotonic() + 60
    log = tmp_path / "operator-1.log"
    while "first step: " not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    time.sleep(after_s)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    # Another controller, which knows the first one only from the cluster. It runs on the same host, so that it sees
    # that the first process is dead; on another host the lock would have to expire.
    finish(start(tmp_path, 2, server, machines, "2"), tmp_path)
    used = done(machines)
    assert set(used) == set(sick)
    assert all(used[name].count("bmc") <= 2 and len(set(used[name])) == 4 for name in sick if name != "n0301"), used
    clean(server)
    for name in sick:
        server.call("DELETE", f"/api/v1/namespaces/default/pods/agent-{name}?gracePeriodSeconds=0")
        body = {"metadata": {"annotations": {"gpunodes.dev/repairs": None}}}
        server.call("PATCH", f"/api/v1/nodes/{name}", body, "application/merge-patch+json")
    print(f"\nkilled after {after_s} s: {used}")
