"""Mutual exclusion (docs/repair.md) on a real API server, each controller a separate process: the power server.

The BMC of its machine h1 is a Redfish service on loopback.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpunodes.autoscale.state import MachineState, Phase
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.leases.errors import Held
from gpunodes.engine.leases.held import Leases
from gpunodes.operations.autoscale.objects import Objects

from tests import redfish
from tests.power_fleet import uuid

from . import autoscaling, exclusion
from .apiserver import ApiServer
from .autoscaling import wait
from .exclusion import LIMIT_S, command, held, kubectl


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with exclusion.cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def objects(server: ApiServer) -> Iterator[Objects]:
    """What the power server has in the cluster: nothing at first."""
    with contextlib.closing(autoscaling.server_session(server)) as session:
        found = Objects(session)
        yield found
        found.delete_states()


class Bmc:
    """The BMC of h1, and the files of the power server."""

    def __init__(self, folder: Path, manner: str, state: str) -> None:
        self.resets: list[str] = []
        self.service: Any = redfish.fake(manner, state=state, resets=self.resets, hardware={"UUID": uuid("h1")})
        autoscaling.write_plan(folder, self.service.server_port)

    def report(self, state: str) -> None:
        """Report this state from now on."""
        self.service.RequestHandlerClass.state = state


def order(objects: Objects, phase: Phase) -> None:
    """Leave a state of h1 which is an order to the power server that starts next."""
    objects.states()
    objects.write({"h1": MachineState(phase, time.time(), "by a test")})


def log(folder: Path) -> str:
    return (folder / "power.log").read_text()


@pytest.mark.parametrize(
    ("words", "name", "waits"),
    [("repair", "h1", True), ("power on", "h1", True), ("reset", "c0", True), ("join", "n5", False)],
)
def test_the_power_server_beside_a_repair_or_a_command(
    server: ApiServer, objects: Objects, tmp_path: Path, words: str, name: str, waits: bool
) -> None:
    bmc = Bmc(tmp_path, "obeys", "Off")
    order(objects, Phase.STARTING)
    with contextlib.ExitStack() as running:
        with command(server, words, name) as (_, first):
            assert first.startswith("held")
            running.enter_context(autoscaling.program(server, tmp_path))
            if waits:
                wait(lambda: f"not now: {name} is locked by `gpunodes {words}` of " in log(tmp_path), LIMIT_S)
                assert bmc.resets == []
            else:
                wait(lambda: bmc.resets == ["On"], LIMIT_S)
        wait(lambda: bmc.resets == ["On"], LIMIT_S)
        wait(lambda: held(server) == [], LIMIT_S)
    bmc.service.shutdown()


def test_what_the_power_server_excludes_while_it_switches_a_machine(
    server: ApiServer, objects: Objects, tmp_path: Path
) -> None:
    """Its BMC accepts the order, and reports for a while that the machine is off."""
    bmc = Bmc(tmp_path, "lies", "Off")
    order(objects, Phase.STARTING)
    with autoscaling.program(server, tmp_path), contextlib.closing(autoscaling.server_session(server)) as session:
        other = Leases(Cluster(session), "remove")
        wait(lambda: bmc.resets == ["On"], LIMIT_S)
        for name, alone in (("h1", False), ("c0", True)):
            with pytest.raises(Held, match="h1 is locked by `gpunodes the power server` of "):
                other.take(name, alone=alone)
        other.take("n5")
        other.release("n5")
        bmc.report("On")
        wait(lambda: held(server) == [], LIMIT_S)
        other.take("h1")
        other.release("h1")
        other.close()
    bmc.service.shutdown()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", ""),
        ("annotate node h1 gpunodes.dev/maintenance=disk", "maintenance: disk"),
        ("cordon h1", "it was cordoned by someone else"),
    ],
    ids=["nothing", "maintenance", "cordon"],
)
def test_the_power_server_leaves_a_machine_on_that_others_keep(
    server: ApiServer, objects: Objects, tmp_path: Path, words: str, why: str
) -> None:
    bmc = Bmc(tmp_path, "obeys", "On")
    autoscaling.node(server, "h1", "gpunodes://h1")
    if words:
        kubectl(server, *words.split())
    order(objects, Phase.STOPPING)
    with autoscaling.program(server, tmp_path):
        wait(lambda: objects.states(create=False)["h1"].phase is not Phase.STOPPING, LIMIT_S)
        found = objects.states(create=False)["h1"]
    if words:
        assert (found.phase, bmc.resets) == (Phase.ON, [])
        assert why in found.reason
        server.call("DELETE", "/api/v1/nodes/h1")
    else:
        assert (found.phase, bmc.resets) == (Phase.OFF, ["GracefulShutdown"])
    bmc.service.shutdown()
