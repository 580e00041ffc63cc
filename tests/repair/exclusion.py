"""A cluster, its machines and the competing processes of tests of mutual exclusion (docs/repair.md)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import apiserver, autoscaling, command_process, kwok, operator_process, rollout_process
from .apiserver import ApiServer

LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
LIMIT_S = 120.0
"""How long a process may take to get where a test wants it, in seconds."""
NAMES = ("c0", *(f"n{index}" for index in range(10)))
_CONTROL_PLANE = "node-role.kubernetes.io/control-plane"


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[ApiServer]:
    """An API server with ready nodes and no kubelets."""
    with apiserver.running(folder) as made:
        for name in NAMES:
            labels = {"test/pool": "p"} | ({_CONTROL_PLANE: ""} if name.startswith("c") else {})
            made.call("POST", "/api/v1/nodes", kwok.node(name, labels))
            ready = {"status": {"conditions": [{"type": "Ready", "status": "True", "reason": "x", "message": "x"}]}}
            made.call("PATCH", f"/api/v1/nodes/{name}/status", ready, "application/merge-patch+json")
        yield made


def prepare(server: ApiServer, folder: Path) -> Path:
    """The machines' files: n1 is unhealthy, and its repair takes a few seconds."""
    folder.mkdir()
    for name in NAMES:
        boot = server.call("GET", f"/api/v1/nodes/{name}")["status"]["nodeInfo"]["bootID"]
        count = int(boot.rpartition("-")[2])
        state = {"sick": name == "n1", "boot": count, "deaf": ["reboot"], "done": [], "back": 0}
        state |= {"version": "1", "prepared": 0, "applied": 0}
        (folder / f"{name}.json").write_text(json.dumps(state))
    server.call(
        "PATCH",
        "/api/v1/nodes/n1",
        {"metadata": {"annotations": {"gpunodes.dev/repairs": None}}},
        "application/merge-patch+json",
    )
    return folder


def read(machines: Path, machine: str) -> dict[str, Any]:
    """The state of a machine."""
    found: dict[str, Any] = json.loads((machines / f"{machine}.json").read_text())
    return found


def change(machines: Path, machine: str, **changes: object) -> None:
    """Change the state of a machine on which nothing works now."""
    (machines / f"{machine}.json").write_text(json.dumps(read(machines, machine) | changes))


@contextlib.contextmanager
def opened(server: ApiServer, machines: Path) -> Iterator[operator_process.Fleet]:
    """The machines, for what a test does itself."""
    fleet = operator_process.Fleet(server.kubeconfig, machines)
    try:
        yield fleet
    finally:
        fleet.made.close()
        fleet.close()


@contextlib.contextmanager
def in_work(machines: Path, machine: str) -> Iterator[None]:
    """The next step of a repair, or the work of a roll-out, begins on a machine while inside, and does not end."""
    mark = machines / f"{machine}.hold"
    mark.touch()
    try:
        yield
    finally:
        mark.unlink()


@contextlib.contextmanager
def command(server: ApiServer, words: str, *names: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A command that works on machines while inside, and its first line."""
    with subprocess.Popen(
        [sys.executable, str(command_process.PROGRAM), str(server.kubeconfig), words, *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        yield process, process.stdout.readline().strip()
        if process.poll() is None:
            message, _ = process.communicate(timeout=120)
            assert message.strip() in {"kept", ""}


def repair(server: ApiServer, machines: Path, tmp_path: Path, number: int = 1, name: str = "") -> subprocess.Popen[str]:
    """`health --reboot-hung`, or `repair NAME`."""
    words = [str(server.kubeconfig), str(machines), "2", *([name] if name else [])]
    return _start([str(operator_process.PROGRAM), *words], tmp_path, f"operator-{number}")


def roll_out(
    server: ApiServer, machines: Path, tmp_path: Path, *names: str, what: str = "begin", budget: int = 2
) -> subprocess.Popen[str]:
    """A roll-out to machines, or, with "resume", the one that stands in the cluster."""
    words = [str(server.kubeconfig), str(machines), what, str(budget), *names]
    return _start([*rollout_process.PROGRAM, *words], tmp_path, "controller")


def _start(words: list[str], tmp_path: Path, name: str) -> subprocess.Popen[str]:
    """A controller with its own state folder."""
    state = tmp_path / name
    state.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=rollout_process.ROOT,
        env={**os.environ, "XDG_STATE_HOME": str(state)},
        stdout=subprocess.PIPE,
        stderr=(tmp_path / f"{name}.log").open("a"),
        text=True,
    )


def results(process: subprocess.Popen[str], tmp_path: Path) -> dict[str, dict[str, Any]]:
    """The result for each machine."""
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, "\n".join(path.read_text()[-2000:] for path in tmp_path.glob("*.log"))
    return {each["name"]: each for each in json.loads(out)["machines"]}


def outcome(process: subprocess.Popen[str], tmp_path: Path, machine: str = "n1") -> dict[str, Any]:
    """The result for a machine."""
    return results(process, tmp_path)[machine]


def used(machines: Path, machine: str = "n1") -> list[str]:
    """The steps of repairs that a machine has got."""
    found: list[str] = read(machines, machine)["done"]
    return found


def started(machines: Path, machine: str) -> None:
    """Wait until the repair of a machine has ordered its first step."""
    autoscaling.wait(lambda: used(machines, machine), LIMIT_S)


def kubectl(server: ApiServer, *words: str) -> None:
    """Run kubectl as the administrator."""
    subprocess.run(
        [str(apiserver.kubectl()), "--kubeconfig", str(server.kubeconfig), *words], check=True, capture_output=True
    )


def spec(server: ApiServer, node: str) -> dict[str, Any]:
    """The spec of a node."""
    found: dict[str, Any] = server.call("GET", f"/api/v1/nodes/{node}")["spec"]
    return found


def held(server: ApiServer) -> list[str]:
    """The names of the Leases that commands hold."""
    every = [item["metadata"]["name"] for item in server.call("GET", LEASES)["items"]]
    return sorted(name for name in every if name.startswith("gpunodes-"))
