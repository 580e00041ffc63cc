"""Pods that wait switch simulated machines on, and idle ones are switched off; the real autoscaler decides."""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpunodes.autoscale.nodes import MORE_GPUS, POWER_OFF
from gpunodes.autoscale.state import MachineState, Phase
from gpunodes.autoscale.store import Overtaken
from gpunodes.engine.cluster import connection
from gpunodes.engine.cluster.session import Session
from gpunodes.model import Machine, Role
from gpunodes.operations.autoscale import removal, switched_on
from gpunodes.operations.autoscale.objects import PASSWORDS, Objects
from gpunodes.planner import registration

from tests import redfish
from tests.power_fleet import document, uuid

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


def test_a_node_that_needs_repair_leaves_its_place_to_one_other_machine(site: Site) -> None:
    """The pool has one place. The pods select nodes by labels that only a kubelet sets: from zero, too."""
    site.pod("first", "h100", autoscaling.SYSTEM)
    site.until(lambda: site.node_of("first"))
    marks = {"metadata": {"annotations": {"gpunodes.dev/needs-repair": "GPU 1"}}, "spec": {"unschedulable": True}}
    site.server.call("PATCH", "/api/v1/nodes/h1", marks, "application/merge-patch+json")
    site.pod("second", "h100", autoscaling.SYSTEM)
    site.until(lambda: site.node_of("second"))
    assert site.node_of("second") == "h2"
    assert site.started() == ["h1", "h2"], "one for each pod"
    # Nobody switches the unhealthy one off; the other goes when it is idle.
    for name in ("first", "second"):
        site.delete_pod(name)
    site.until(lambda: set(site.machines.on) == {"h1"})


def test_a_node_that_offers_more_than_is_known_leaves_its_place_to_one_other_machine(site: Site) -> None:
    """The real autoscaler neither counts on its many GPUs nor switches it off, and the scheduler sends no pod there."""
    site.pod("first")
    site.until(lambda: site.node_of("first"))
    many = {"status": {"capacity": {"nvidia.com/gpu": "64"}, "allocatable": {"nvidia.com/gpu": "64"}}}
    site.server.call("PATCH", "/api/v1/nodes/h1/status", many, "application/merge-patch+json")
    path = "/api/v1/nodes/h1"
    site.until(lambda: MORE_GPUS in {each["key"] for each in site.server.call("GET", path)["spec"].get("taints", ())})
    site.pod("second", "h100")
    site.until(lambda: site.node_of("second"))
    assert site.node_of("second") == "h2"
    assert site.started() == ["h1", "h2"]
    assert site.machines.on.keys() >= {"h1", "h2"}


def test_a_bmc_that_refuses_and_a_boot_that_never_registers(site: Site) -> None:
    site.machines.refuses = {"h1", "h2"}
    site.pod("first")
    site.until(lambda: site.node_of("first"))
    assert site.node_of("first") == "t1"
    assert site.started() == ["t1"]
    events = site.server.call("GET", "/api/v1/namespaces/default/events")["items"]
    [told] = [each for each in events if each["reason"] == "NotSwitchedOn"]
    assert told["involvedObject"]["name"] == "h1"
    site.machines.refuses = set()
    site.machines.dead = {"t1"}
    site.delete_pod("first")
    site.until(lambda: not site.machines.on)
    site.pod("second", "t4")
    site.until(lambda: site.machines.orders[-1] == ("t1", "on"))
    site.until(lambda: site.machines.orders.count(("t1", "off")) == 2, 150)
    assert not site.machines.on


def test_a_node_whose_gpus_no_pod_can_use_gets_none_and_another_machine_starts(site: Site) -> None:
    site.machines.broken = {"h1"}
    site.pod("first")
    site.until(lambda: site.node_of("first"), 150)
    assert site.node_of("first") != "h1"
    site.until(lambda: "h1" not in site.machines.on, 150)
    assert site.started()[0] == "h1"


def test_a_machine_without_a_bmc_reads_its_node_and_shuts_down(tmp_path: Path) -> None:
    """The program of such a machine against the real API; only its files and `systemctl` are the test's."""
    with apiserver.running(tmp_path) as server:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "w1"}}
        server.call("POST", "/api/v1/nodes", node)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        for text in ("of-another-boot", boot):
            assert not (tmp_path / "off").exists()
            patch = {"metadata": {"annotations": {POWER_OFF: text}}}
            server.call("PATCH", "/api/v1/nodes/w1", patch, "application/merge-patch+json")
            _run_power_off(server, tmp_path)
        assert (tmp_path / "off").read_text() == "poweroff\n"


def _run_power_off(server: apiserver.ApiServer, folder: Path) -> None:
    """Run the program until its file is gone, which ends it."""
    spec = registration.registered("w1", {}, [], without_bmc=True)
    [text] = [file.content for file in spec.files if file.path.endswith("sbin/gpunodes-power-off")]
    pem, systemctl, program = folder / "client.pem", folder / "systemctl", folder / "power-off"
    pem.write_text((folder / "admin.crt").read_text() + (folder / "admin.key").read_text())
    systemctl.write_text(f"#!/bin/sh\necho $1 >{folder}/off\n")
    systemctl.chmod(0o755)
    for path, own in {
        "/etc/kubernetes/kubelet.conf": server.kubeconfig,
        "/etc/kubernetes/pki/ca.crt": folder / "ca.crt",
        "/var/lib/kubelet/pki/kubelet-client-current.pem": pem,
        '"systemctl"': f'"{systemctl}"',
        "time.sleep(10)": "os.unlink(__file__)",
    }.items():
        assert path in text
        text = text.replace(path, str(own))
    program.write_text(text)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""


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

        objects.delete_passwords()
        objects.delete_plan()
        objects.delete_states()
        objects.delete_plan()
        assert (objects.plan(), objects.states(create=False)) == (None, {})
        for each in (session, in_pod):
            each.close()


def test_a_removal_gives_nodes_back_and_a_switch_on_ends_what_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the real API: taints, marks and states; the fleet has only names and addresses."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    machines = [Machine(name, "", Role.WORKER) for name in MACHINES]
    fleet: Any = SimpleNamespace(cluster_name="c", all_machines=lambda: machines)
    lines: list[str] = []

    def report(_: str, text: str) -> None:
        lines.append(text)

    with apiserver.running(tmp_path) as server, contextlib.closing(autoscaling.server_session(server)) as session:
        objects = Objects(session)
        assert (objects.is_installed(), objects.pod_nodes()) == (False, [])
        objects.write_plan(document(MACHINES, POOLS), {})
        for name, provider in (("h1", "gpunodes://h1"), ("t1", "gpunodes://other")):
            autoscaling.node(server, name, provider)
        objects.states()
        objects.write({name: MachineState(Phase.STOPPING, 1.0, "nothing needs it") for name in MACHINES})
        removal.settle(fleet, objects, report)
        assert _taints(server, "h1") == ["yours"]
        assert len(_taints(server, "t1")) == 4, "it is not certainly its own"
        found = objects.seen_nodes()["h1"]
        assert dict(found.annotations) == {}
        phases = {name: each.phase for name, each in objects.states(create=False).items()}
        assert phases == {"h2": Phase.OFF, "t1": Phase.OFF}
        switched_on.end_off(fleet, machines[1], session, report)
        assert lines[-1].startswith("it is off on purpose no longer")
        assert set(objects.states(create=False)) == {"t1"}
        server.call("DELETE", "/api/v1/nodes/t1", {})
        autoscaling.node(server, "t1", "gpunodes://t1")
        removal.settle(fleet, objects, report)
        assert (objects.states(create=False), _taints(server, "t1")) == ({}, ["yours"])


def _taints(server: apiserver.ApiServer, name: str) -> list[str]:
    return sorted(each["key"] for each in server.call("GET", f"/api/v1/nodes/{name}")["spec"].get("taints", ()))


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


def test_the_program_reads_its_plan_switches_a_real_redfish_service_(tmp_path: Path) -> None:
    """`python -m gpunodes.autoscale`, as in its pod, but with a kubeconfig; the BMC is a service on loopback."""
    resets: list[str] = []
    bmc = redfish.fake("obeys", state="Off", resets=resets, hardware={"UUID": uuid("h1")})
    planned = autoscaling.write_plan(tmp_path, bmc.server_port)
    with apiserver.running(tmp_path) as server:
        session = autoscaling.server_session(server)
        objects = Objects(session)

        def phase() -> str:
            return objects.states(create=False)["h1"].phase if objects.states(create=False) else ""

        with autoscaling.program(server, tmp_path) as process:
            autoscaling.wait(lambda: phase() == Phase.OFF)
            # Killed between the order and its answer: the state says what is to be done.
            process.kill()
            process.wait()
        objects.states()
        objects.write({"h1": MachineState(Phase.STARTING, time.time(), "a pod waits for it")})
        with autoscaling.program(server, tmp_path) as process:
            autoscaling.wait(lambda: resets == ["On"])
            planned["machines"] = {}
            (tmp_path / "plan.json").write_text(json.dumps(planned))
            autoscaling.wait(lambda: not objects.states(create=False))
            assert resets == ["On"], "a machine that has left the plan stays as it is"
            process.terminate()
            assert process.wait(30) == 0
        assert "secret" not in (tmp_path / "power.log").read_text()
        session.close()
    bmc.shutdown()
