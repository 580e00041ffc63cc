"""Pods that wait switch simulated machines on, and idle ones are switched off; the real autoscaler decides."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpunodes.autoscale.state import MachineState, Phase
from gpunodes.autoscale.store import Overtaken
from gpunodes.engine.cluster import connection
from gpunodes.engine.cluster.session import Session
from gpunodes.operations.autoscale.objects import PASSWORDS, Objects

from tests.power_fleet import document

from . import apiserver, autoscaling
from .autoscaling import Site

MACHINES = {"h1": "h100", "h2": "h100", "t1": "t4"}
POOLS = {"h100": (0, 1, 50), "t4": (0, 1, 10)}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with apiserver.running(tmp_path) as server, autoscaling.running(server, POOLS, MACHINES) as found:
        yield found


def test_one_machine_for_one_pod_then_the_other_pool_then_none(site: Site) -> None:
    site.pod("first")
    site.until(lambda: site.node_of("first"))
    assert site.started() == ["h1"], "one machine for one pod, although its GPUs come after its node"
    assert site.node_of("first") == "h1"
    site.pod("second")  # h100 is at its max
    site.until(lambda: site.node_of("second"))
    assert site.started() == ["h1", "t1"]
    for name in ("first", "second"):
        site.delete_pod(name)
    site.until(lambda: not site.machines.on)
    site.until(lambda: not site.server.call("GET", "/api/v1/nodes")["items"])
    assert sorted(site.machines.orders[2:]) == [("h1", "off"), ("t1", "off")]
    # The other machine of the pool was off for longer.
    site.pod("third", "h100")
    site.until(lambda: site.node_of("third"))
    assert site.started()[2:] == ["h2"]


def test_a_bmc_that_refuses_and_a_boot_that_never_registers(site: Site) -> None:
    site.machines.refuses = {"h1", "h2"}
    site.pod("first")
    site.until(lambda: site.node_of("first"))
    assert site.node_of("first") == "t1"
    assert site.started() == ["t1"]
    site.machines.refuses = set()
    site.machines.dead = {"t1"}
    site.delete_pod("first")
    site.until(lambda: not site.machines.on)
    site.pod("second", "t4")
    site.until(lambda: site.machines.orders[-1] == ("t1", "on"))
    site.until(lambda: site.machines.orders[-1] == ("t1", "off"), 150)
    assert not site.machines.on


def test_plan_passwords_and_states_in_the_cluster(tmp_path: Path) -> None:
    """As `gpunodes autoscale` writes them, and as a pod reads them with the token of its account."""
    with apiserver.running(tmp_path) as server:
        session = autoscaling.server_session(server)
        objects = Objects(session)
        assert (objects.plan(), objects.states(create=False), objects.is_running()) == (None, {}, False)
        planned = document(MACHINES, POOLS)
        objects.write_plan(planned, {"h1": "one", "h2": "two"})
        objects.write_plan(planned, {"h1": "three"})
        assert objects.plan() == planned
        secret = server.call("GET", f"/api/v1/namespaces/kube-system/secrets/{PASSWORDS}")
        assert {name: base64.b64decode(text) for name, text in secret["data"].items()} == {"h1": b"three"}, (
            "h2 has left"
        )

        in_pod = Session(connection.here(sys.executable, _account(server, tmp_path)))
        store = Objects(in_pod)
        assert store.states() == {}
        store.write({"h1": MachineState(Phase.OFF, 1.0, "why")})
        assert objects.states(create=False)["h1"].reason == "why"
        objects.write({"h1": MachineState(Phase.ON, 2.0)})
        with pytest.raises(Overtaken):
            store.write({"h1": MachineState(Phase.STARTING, 3.0)})
        assert objects.states()["h1"].phase is Phase.ON

        objects.delete_plan()
        objects.delete_states()
        objects.delete_plan()
        assert (objects.plan(), objects.states(create=False)) == (None, {})
        for each in (session, in_pod):
            each.close()


def _account(server: apiserver.ApiServer, folder: Path) -> Path:
    """A kubeconfig with the token of a service account in a file, as a pod has it."""
    accounts = "/api/v1/namespaces/kube-system/serviceaccounts"
    server.call("POST", accounts, {"metadata": {"name": "power"}})
    made = server.call("POST", f"{accounts}/power/token", {"spec": {"expirationSeconds": 600}})
    token = folder / "token"
    token.write_text(made["status"]["token"])
    path = folder / "account.conf"
    lines = server.kubeconfig.read_text().splitlines()
    path.write_text("\n".join([*(each for each in lines if "client-" not in each), f"  tokenFile: {token}"]))
    return path
