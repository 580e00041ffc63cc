"""A repair only changes the node that certainly matches its machine; otherwise it changes none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.filter import general as filters
from gpunodes.engine import history, identities, records, runner
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.errors import NoResponse
from gpunodes.engine.leases.held import Leases
from gpunodes.engine.leases.objects import lock_name
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.model import Machine
from gpunodes.operations import power
from gpunodes.operations.repair import commands
from gpunodes.repair.policy import Decision, RepairLimits
from gpunodes.repair.record import RepairOutcome, RepairRecord, Stage
from gpunodes.repair.request import RepairRequest
from gpunodes.repair.result import MachineRepair

from tests.repair_fleet import Fleet, fleet, hurry

UUID = "4c4c4544-0042-4810-8052-b2c04f595331"
OTHER = "9c1e4b1a-5c3b-4d0e-9a2f-0123456789ab"


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own state folder, and very short time limits."""
    hurry(monkeypatch, tmp_path)


def run(place: Fleet, name: str, *, by_hand: bool = False, **request: Any) -> MachineRepair:
    """The result of one machine; with ``by_hand`` only this machine is repaired."""
    chosen = [entry for entry in place.all_machines() if entry.name == name or not by_hand]
    made = RepairRequest("repair", RepairLimits(by_hand=by_hand), **request)
    return next(each for each in commands.run(place, chosen, made, lambda *_: None).machines if each.machine == name)


def refused(place: Fleet, name: str, **request: Any) -> str:
    """Why a machine is refused; checks that nothing is changed."""
    machine, found = place.machines[name], run(place, name, **request)
    assert found.decision is Decision.REFUSE, found
    assert machine.done == []
    assert place.api.events == []
    assert place.api.leases == {}
    assert not [node for node in place.api.nodes.values() if node["spec"].get("unschedulable")]
    return found.why


def renamed(place: Fleet, name: str, new: str) -> None:
    """Give a machine another name in the inventory; its node keeps its own."""
    place.machines = {new if each == name else each: machine for each, machine in place.machines.items()}


def test_an_inventory_name_with_a_domain_matches_the_node_by_boot_id() -> None:
    """It was rebooted without lock, cordon and drain, since no node had its name."""
    place = fleet(5, ["w1"])
    place.api.add_pod("job", "w1")
    renamed(place, "w1", "w1.example.org")
    assert run(place, "w1.example.org").outcome is RepairOutcome.REPAIRED
    assert place.api.pods == {}
    stages = [entry.what for entry in history.read("w1.example.org") if entry.kind is history.EntryKind.STAGE]
    assert stages == ["collect", "cordon", "drain"]


@pytest.mark.parametrize("name", ["w1.example.org", "rack-7"])
def test_a_machine_without_a_matching_node_is_not_rebooted(name: str) -> None:
    """A similar node is named in the message; --without-cluster repairs the machine anyway."""
    place = fleet(5, ["w1"])
    renamed(place, "w1", name)
    place.api.nodes["w1"]["status"]["nodeInfo"]["bootID"] = "another"
    why = refused(place, name)
    assert "--without-cluster" in why
    assert ("node w1 (boot another)" in why) is (name != "rack-7")
    assert run(place, name, without_cluster=True).outcome is RepairOutcome.REPAIRED


def test_a_node_that_reports_the_address_of_another_is_not_drained() -> None:
    """The machine was rebooted with its pods, and the node that reported its address was drained."""
    place = fleet(5, ["w4"])
    place.api.nodes["w0"]["status"]["addresses"].append({"type": "ExternalIP", "address": "addr-w4"})
    place.api.add_pod("job", "w4")
    place.api.add_pod("other", "w0")
    assert run(place, "w4").outcome is RepairOutcome.REPAIRED
    assert set(place.api.pods) == {"other"}
    place = fleet(5, ["w4"])
    del place.api.nodes["w4"]
    place.api.nodes["w0"]["status"]["addresses"].append({"type": "ExternalIP", "address": "addr-w4"})
    assert "--without-cluster" in refused(place, "w4")


def test_two_nodes_in_one_boot_are_refused() -> None:
    place = fleet(5, ["w1"])
    place.api.nodes["w3"]["status"]["nodeInfo"]["bootID"] = "w1-boot-1"
    assert "the nodes w1 and w3 report the same boot id" in refused(place, "w1")


def test_an_unreachable_machine_is_matched_by_its_name_and_its_last_report() -> None:
    """Another machine that took over its node is neither drained nor reset."""
    place = fleet(5, ["w1"], off=True)
    identities.remember("test", {"w1": {"boot_id": "older", "product_uuid": UUID}})
    place.api.nodes["w1"]["status"]["nodeInfo"]["systemUUID"] = OTHER
    why = refused(place, "w1", by_hand=True, named=frozenset({"w1"}))
    assert UUID in why
    assert OTHER in why
    place.api.nodes["w1"]["status"]["nodeInfo"]["systemUUID"] = UUID.upper()
    assert run(place, "w1", by_hand=True, named=frozenset({"w1"})).outcome is RepairOutcome.REPAIRED
    # If no node has the machine's name, the recorded boot id finds the node.
    place = fleet(5, ["w1"], off=True)
    renamed(place, "w1", "rack-7")
    identities.remember("test", {"rack-7": {"boot_id": "w1-boot-1"}})
    assert run(place, "rack-7", by_hand=True, named=frozenset({"rack-7"})).outcome is RepairOutcome.REPAIRED


def left_behind(place: Fleet, machine: str, node: str, lock: str = "") -> None:
    """The Lease of a dead controller with a repair of ``machine`` whose recorded node is ``node``."""
    record = RepairRecord(
        id="r1", machine=machine, cluster="theirs", started=time.time(), reason="sick", action="reboot",
        stage=Stage.ESCALATE, node=node, step="reboot", named=True, boot_id=f"{machine}-boot-1",
    )  # fmt: skip
    place.cordon(node, "r1")
    dead = Leases(Cluster(place.session()), "repair")
    dead.take(lock or node, record.text())
    dead.close()
    lease = place.api.leases[lock_name(lock or node)]
    head, _, _, tail = lease["spec"]["holderIdentity"].rsplit("/", 3)
    lease["spec"]["holderIdentity"] = f"{head}/1/0/{tail}"


def resumed(place: Fleet) -> list[MachineRepair]:
    return list(commands.resume(place, RepairRequest("repair", RepairLimits()), lambda *_: None).machines)


def test_a_repair_in_a_lock_is_resumed_on_its_own_machine_and_node() -> None:
    place = fleet(5, ["w1"])
    left_behind(place, "w1", "w1")
    (found,) = resumed(place)
    assert (found.machine, found.outcome) == ("w1", RepairOutcome.REPAIRED)
    assert records.read("theirs") == {}, "it is filed under this cluster"


@pytest.mark.parametrize(("machine", "node"), [("w1", "w2"), ("rack-7", "w2")])
def test_a_repair_in_a_lock_changes_no_machine_that_is_not_its_node(machine: str, node: str) -> None:
    """Another inventory gives another machine that name: it was rebooted with the pods of its own node."""
    place = fleet(5, ["w1"])
    if machine != "w1":
        renamed(place, "w1", machine)
        place.api.nodes["w1"]["status"]["nodeInfo"]["bootID"] = "another"
    left_behind(place, machine, node)
    (found,) = resumed(place)
    assert (found.decision, found.outcome) == (Decision.REFUSE, None)
    assert f"its repair was started for the node {node}, but" in found.why
    assert place.machines[machine].done == []


def test_a_repair_in_the_lock_of_another_node_is_ignored() -> None:
    place = fleet(5, ["w1"])
    left_behind(place, "w1", "w1", lock="w2")
    place.api.nodes["w1"]["metadata"]["annotations"].clear()
    assert resumed(place) == []
    assert place.machines["w1"].done == []


def test_a_control_plane_that_misses_one_query_ends_no_other_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    place = fleet(5, ["w1", "w2"])
    left_behind(place, "w1", "w1")
    left_behind(place, "w2", "w2")
    node, asked = Cluster.node, list[str]()

    def away_once(cluster: Cluster, name: str, **more: bool) -> Any:
        asked.append(name)
        if len(asked) == 1:
            raise NoResponse("no answer", "an API that answers")
        return node(cluster, name, **more)

    monkeypatch.setattr(Cluster, "node", away_once)
    found = {each.machine: each for each in resumed(place)}
    assert found["w1"].decision is Decision.REFUSE
    assert found["w2"].outcome is RepairOutcome.REPAIRED


def test_a_machine_is_only_named_by_its_own_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unidentified BMC is used only for a machine that the user of this controller named."""
    place = fleet(5, ["w1"])
    named: list[bool] = []
    machine_control = place.machine_control

    def noted(machine: Machine, **given: Any) -> Any:
        named.append(given["named"])
        return machine_control(machine, **given)

    monkeypatch.setattr(place, "machine_control", noted)
    left_behind(place, "w1", "w1")
    assert [each.outcome for each in resumed(place)] == [RepairOutcome.REPAIRED]
    place.machines["w1"].sick = True
    place.cordon("w1", "r2")
    records.write(RepairRecord(
        id="r2", machine="w1", cluster="test", started=time.time(), reason="sick", action="reboot",
        stage=Stage.ESCALATE, node="w1", step="reboot", named=True, boot_id="w1-boot-2",
    ))  # fmt: skip
    resumed(place)
    assert named == [False, True]


def test_marks_are_cleared_only_on_the_machine_s_own_node() -> None:
    place = fleet(2)
    place.api.nodes["w1"]["status"]["nodeInfo"]["bootID"] = "another"
    with pytest.raises(WrongInput, match="node w1"):
        power.clear(place, place.all_machines()[1], without_cluster=False)
    assert power.clear(place, place.all_machines()[0], without_cluster=False).node == "w0"


def test_clearing_brings_back_a_device_plugin_that_a_command_took() -> None:
    """A `gpu upgrade` that was killed and abandoned by an older gpunodes left it away."""
    place = fleet(1)
    node = place.api.nodes["w0"]
    node["metadata"]["labels"]["gpunodes.dev/gpu-count"] = "8"
    power.clear(place, place.all_machines()[0], without_cluster=False)
    assert node["metadata"]["labels"]["gpunodes.dev/gpu"] == "true"
    assert json.loads(node["metadata"]["annotations"]["gpunodes.dev/managed"])["labels"] == ["gpunodes.dev/gpu"]


def test_records_of_identities_are_private_and_limited() -> None:
    odd = {"boot_id": "b", "machine_id": ["much"], "macs": ["3c:ec:ef:00:00:01"] * 1000, "log": {"text": "much"}}
    identities.remember("test", {"gpu-1": odd, "gpu-2": None})
    (path,) = (Path(os.environ["XDG_STATE_HOME"]) / "gpunodes" / "identities").glob("*.json")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size < 10000
    identities.remember("test", {"gpu-1": {"boot_id": "c"}})
    found = identities.recall_all("test", {"gpu-1": "10.0.0.1", "gpu-3": "10.0.0.3"})
    assert (found["gpu-1"].boot_id, found["gpu-1"].responded, found["gpu-3"].boot_id) == ("c", False, "")


@pytest.mark.parametrize("text", ["[broken", "[]", "5", "[" * 100_000])
def test_invalid_records_of_identities_are_neither_overwritten_nor_ignored(text: str) -> None:
    identities.remember("test", {"gpu-1": {"boot_id": "b"}})
    (path,) = (Path(os.environ["XDG_STATE_HOME"]) / "gpunodes" / "identities").glob("*.json")
    path.write_text(text)
    with pytest.raises(GpunodesError, match="holds no identities of machines"):
        identities.recall_all("test", {"gpu-1": "a"})
    identities.remember("test", {"gpu-1": {"boot_id": "c"}})
    assert path.read_text() == text


def node(name: str, address: str, boot: str, uuid: str) -> dict[str, Any]:
    about = {"uid": f"uid-{name}", "boot_id": boot, "machine_id": "id-1", "product_uuid": uuid}
    return {"name": name, "address": address, "version": "v1.36.3", "managed": {"labels": {}, "taints": []}, **about}


def facts(hostname: str, boot: str, uuid: str, role: str | None = "worker") -> dict[str, Any]:
    return {
        "hostname": hostname,
        "boot_id": boot,
        "machine_id": "id-1",
        "product_uuid": uuid,
        "kubernetes": {"role": role},
    }


MACHINES = {"control-1": "10.0.0.9", "worker-1": "10.0.0.1", "worker-5": "10.0.0.5", "w6.example.org": ""}
NODES = [node("worker-1", "10.0.0.1", "b1", UUID), node("w6", "10.0.0.6", "b6", "")]


def test_playbooks_match_as_commands_do() -> None:
    """A clone with the hostname worker-1 is not that node, not even when it joins with the same machine-id."""
    clone = facts("worker-1", "b5", OTHER)
    for joins in (False, True):
        found = filters.match(NODES, clone, "worker-5", MACHINES, ["c"], joins=joins)
        assert found["node"] == {}
        assert "machine worker-5 (boot b5" in found["problem"]
        assert "node worker-1 (boot b1" in found["problem"]
    assert filters.match(NODES, facts("w6", "b6", ""), "w6.example.org", MACHINES, ["c"])["node"] == NODES[1]
    assert filters.match(NODES, {}, "worker-1", MACHINES, ["c"])["node"] == NODES[0]
    assert filters.match(NODES, facts("new", "b9", ""), "worker-5", MACHINES, ["c"], joins=True) == {
        "node": {},
        "by": "",
        "problem": "",
    }


@pytest.mark.long
def test_a_clone_with_the_hostname_of_another_is_neither_drained_nor_reset(tmp_path: Path) -> None:
    """`remove worker-5`, a clone with the hostname worker-1, drained and deleted worker-1."""
    (tmp_path / "hosts.yml").write_text(
        "all:\n  vars: {ansible_connection: local, ansible_become: false}\n  children:\n"
        "    control_plane: {hosts: {control-1: {ansible_host: 10.0.0.9}}}\n"
        "    workers: {hosts: {worker-1: {ansible_host: 10.0.0.1}, worker-5: {ansible_host: 10.0.0.5}}}\n"
    )
    cluster = {"version": "v1.36.3", "endpoint": "10.0.0.9:6443", "ca_hash": "sha256:aa", "nodes": NODES}
    known = {
        "gpunodes_facts": {"worker-5": runner._encoded(facts("worker-1", "b5", OTHER))},
        "gpunodes_cluster": runner._encoded(cluster),
    }
    (tmp_path / "known.json").write_text(json.dumps(known))
    root = Path(__file__).parents[2]
    words = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(tmp_path / "hosts.yml"), "--check"]
    words += ["playbooks/remove.yml", "-e", f"@{tmp_path}/known.json", "--limit", "worker-5"]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "machine worker-5 (boot b5" in done.stdout, done.stdout + done.stderr
    assert "TASK [drain" not in done.stdout
    assert "TASK [reset" not in done.stdout
