"""`remove` and `gpu remove` show the affected nodes and ask for confirmation before any change."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from gpunodes.cli import common, root
from gpunodes.engine import identities
from gpunodes.errors import ExitCode, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, MachineResult, Outcome, Role, RunResult
from gpunodes.operations import nodes, preflight
from gpunodes.operations.run import Operation, RunOptions
from gpunodes.operations.storage import findings
from gpunodes.planner.candidates import MachineFacts

UUID = "4c4c4544-0042-4810-8052-b2c04f595331"
OTHER = "9c1e4b1a-5c3b-4d0e-9a2f-0123456789ab"
NODE = {"name": "worker-1", "uid": "uid-1", "boot_id": "b1", "machine_id": "id-1", "product_uuid": UUID}
REPORTED: dict[str, dict[str, Any]] = {
    "worker-1": {"hostname": "worker-1", "boot_id": "b1", "machine_id": "id-1", "product_uuid": UUID},
    # A clone of its disk.
    "worker-5": {"hostname": "worker-1", "boot_id": "b5", "machine_id": "id-1", "product_uuid": OTHER},
    "worker-6": {"hostname": "worker-6", "boot_id": "b6", "machine_id": "id-6"},
}


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three workers and a dead one, in a cluster whose only node is worker-1."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "hosts.yml"
    workers = ", ".join(f"{name}: {{}}" for name in [*REPORTED, "dead"])
    path.write_text(f"control_plane: {{hosts: {{control-1: {{}}}}}}\nworkers: {{hosts: {{{workers}}}}}\n")

    def scan(
        _: Any, machines: Sequence[Machine], folder: Path, *__: Any, sources: bool, without_cluster: bool
    ) -> preflight.Inspection:
        assert not sources, "package sources are not queried for a removal"
        assert not without_cluster, "the inventory has a control plane"
        candidates = [MachineFacts(each.name, Role.WORKER, REPORTED.get(each.name)) for each in machines]
        return preflight.Inspection(candidates, "control-1", {"nodes": [NODE]}, None, "", False, folder)

    monkeypatch.setattr(preflight, "inspect", scan)
    return path


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> list[RunOptions]:
    """The options of the operations that were carried out."""
    done: list[RunOptions] = []

    def carry_out(operation: Operation, _: Any, __: Any, ___: Any, options: RunOptions) -> RunResult:
        done.append(options)
        return RunResult(operation.name, ())

    monkeypatch.setattr(common, "carry_out", carry_out)
    return done


def run(inventory: Path, *words: str) -> Result:
    return CliRunner().invoke(root, [*words, "-i", str(inventory)], standalone_mode=False)


@pytest.mark.parametrize("command", [["remove"], ["gpu", "remove"], ["reset"]])
def test_the_node_is_shown_and_confirmation_is_needed(
    inventory: Path, carried: list[RunOptions], command: list[str]
) -> None:
    """Without a terminal it needs --yes; what was read of machines and cluster is not read again."""
    refused = run(inventory, *command, "worker-1")
    assert "is not confirmed" in str(refused.exception)
    assert carried == []
    done = run(inventory, *command, "worker-1", "worker-6", "--yes")
    assert "worker-1: node worker-1, by its boot id" in done.stderr
    assert "worker-6: not a node of the cluster" in done.stderr
    assert carried[0].seen is not None
    assert carried[0].seen.facts["worker-1"] == REPORTED["worker-1"]
    assert run(inventory, *command, "worker-1", "--dry-run").exception is None
    assert carried[1].dry_run


@pytest.mark.parametrize("command", [["remove"], ["gpu", "remove"], ["reset"]])
def test_a_clone_stops_the_command_before_any_change(
    inventory: Path, carried: list[RunOptions], command: list[str]
) -> None:
    """`remove worker-5`, a clone with the hostname worker-1, drained and deleted worker-1."""
    done = run(inventory, *command, "worker-6", "worker-5", "--yes")
    assert "machine worker-5 (boot b5" in str(done.exception)
    assert "node worker-1 (boot b1" in str(done.exception)
    assert carried == []


def test_a_node_whose_cluster_does_not_respond_is_not_changed(
    inventory: Path, carried: list[RunOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for a machine without a cluster, and its pods were not checked."""
    monkeypatch.setitem(REPORTED, "worker-1", {**REPORTED["worker-1"], "kubernetes": {"role": "worker"}})

    def scan(_: Any, machines: Sequence[Machine], folder: Path, *__: Any, **___: Any) -> preflight.Inspection:
        candidates = [MachineFacts(each.name, Role.WORKER, REPORTED[each.name]) for each in machines]
        return preflight.Inspection(candidates, "control-1", None, None, "", False, folder)

    monkeypatch.setattr(preflight, "inspect", scan)
    done = run(inventory, "gpu", "remove", "worker-1", "--yes")
    assert "worker-1 run as nodes, but the cluster is unknown: control-1" in str(done.exception)
    assert carried == []
    # A reset works without a cluster.
    done = run(inventory, "reset", "worker-1", "--yes")
    assert "worker-1: no cluster responds, so its node is unknown" in done.stderr
    assert len(carried) == 1


@pytest.mark.parametrize("force", [True, False])
def test_pods_are_deleted_by_force_on_request(inventory: Path, carried: list[RunOptions], force: bool) -> None:
    """--force-drain sets the variable of the role drain."""
    run(inventory, "remove", "worker-1", "--yes", *(["--force-drain"] if force else []))
    assert carried[0].variables.get("gpunodes_drain_force", False) is force


def test_an_unreachable_machine_is_matched_by_its_last_report(inventory: Path, carried: list[RunOptions]) -> None:
    """Its node may be removed; it is found by recorded identities, whatever its name."""
    identities.remember("control-1", {"dead": {"boot_id": "b1"}})
    done = run(inventory, "remove", "dead", "--yes")
    assert done.exception is not None
    assert "another machine of that name, worker-1" in str(done.exception)
    assert carried == []
    identities.remember("control-1", {"dead": {"boot_id": "b1", "product_uuid": UUID}})
    elsewhere: Any = _Inventory()
    seen = preflight.Inspection([], "control-1", {"nodes": [NODE]}, None, "", False, Path())
    found = nodes.match(elsewhere, [_Inventory.dead], seen)
    assert found["dead"].by == "recorded boot id"


CONTROLS = {f"cp-{number}": {"hostname": f"cp-{number}", "boot_id": f"c{number}"} for number in (1, 2)}


@pytest.fixture
def several(inventory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three control planes, of which cp-3 does not respond."""
    for name, found in CONTROLS.items():
        monkeypatch.setitem(REPORTED, name, found)
    names = ", ".join(f"{name}: {{}}" for name in [*CONTROLS, "cp-3"])
    inventory.write_text(f"control_plane: {{hosts: {{{names}}}}}\nworkers: {{hosts: {{worker-1: {{}}, dead: {{}}}}}}\n")
    return inventory


def test_a_control_plane_is_removed(several: Path, carried: list[RunOptions]) -> None:
    assert run(several, "remove", "cp-2", "--yes").exception is None
    assert list(carried[0].skip_phases) == []
    assert "drain_dead" not in carried[0].variables


def test_a_dead_control_plane_is_removed_without_a_reset(several: Path, carried: list[RunOptions]) -> None:
    assert run(several, "remove", "cp-3", "--dead", "--yes").exception is None
    assert list(carried[0].skip_phases) == ["reset"]
    assert carried[0].variables == {"drain_dead": True, "gpunodes_drain_force": True}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cp-2", "--dead"], "cp-2 responds; wanted: a control plane that is gone"),
        (["cp-3"], "cp-3 does not respond; wanted: a control plane that can be reset; .*--dead"),
        (["cp-1", "cp-2"], "cp-1, cp-2 are 2 control planes; wanted: one"),
        (["control_plane"], "are all control planes; .*`gpunodes reset` ends the cluster"),
        (["dead", "--dead"], "--dead is for one control plane"),
        (["worker-1", "cp-3", "--dead"], "--dead is for one control plane"),
    ],
)
def test_control_planes_that_are_not_removed(
    several: Path, carried: list[RunOptions], words: list[str], message: str
) -> None:
    done = run(several, "remove", *words, "--yes")
    assert isinstance(done.exception, WrongInput)
    assert re.search(message, str(done.exception))
    assert carried == []


def test_the_last_control_plane_is_not_removed(inventory: Path, carried: list[RunOptions]) -> None:
    done = run(inventory, "remove", "control-1", "worker-1", "--yes")
    assert "control-1 is the last control plane" in str(done.exception)
    assert "`gpunodes reset` ends the cluster" in str(done.exception)
    assert carried == []


@pytest.mark.parametrize("command", ["remove", "reset"])
def test_a_storage_server_stays_while_nodes_use_its_shares(
    inventory: Path, carried: list[RunOptions], command: str
) -> None:
    """Processes of the other nodes would hang in their mounts."""
    shares = "gpunodes_storage: [{name: data, path: /srv/data, size: 9Gi, namespaces: [default]}]"
    served = f"storage: {{hosts: {{worker-6: {{}}}}}}\nall: {{vars: {{{shares}}}}}\n"
    inventory.write_text(inventory.read_text() + served)
    done = run(inventory, command, "worker-6", "--yes")
    assert isinstance(done.exception, WrongInput)
    assert "worker-6 serves data to nodes that stay" in str(done.exception)
    assert "`gpunodes storage down`, and take worker-6 out of the group storage" in str(done.exception)
    assert carried == []
    # Without nodes that stay, without shares, and for another machine there is nothing in the way.
    known = Inventory(inventory)
    findings.check_leaving(known, known.machines())
    run(inventory, command, "worker-1", "--yes")
    assert carried.pop()
    inventory.write_text(inventory.read_text().replace(shares, ""))
    run(inventory, command, "worker-6", "--yes")
    assert carried


@pytest.mark.parametrize("command", ["remove", "reset"])
def test_a_server_that_still_exports_to_a_machine_is_named(
    inventory: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Only `storage up` writes the exports of a server; NFS trusts addresses, and the next machine may get this one."""
    shares = "gpunodes_storage: [{name: data, path: /srv/data, size: 9Gi}]"
    inventory.write_text(f"{inventory.read_text()}storage: {{hosts: {{nas-1: }}}}\nall: {{vars: {{{shares}}}}}\n")
    outcome, dry_run = Outcome.CHANGED, False

    def carry_out(operation: Operation, _: Any, machines: Sequence[Machine], *__: Any) -> RunResult:
        return RunResult(operation.name, [MachineResult(each.name, outcome) for each in machines], dry_run=dry_run)

    monkeypatch.setattr(common, "carry_out", carry_out)
    remedy = "delete it from the inventory and run `gpunodes storage up`"
    done = run(inventory, command, "worker-1", "--yes")
    assert "nas-1: storage (warning): it still exports data to worker-1" in done.stderr
    assert remedy in done.stderr
    found = json.loads(run(inventory, command, "worker-1", "--yes", "--json").stdout)
    assert [(each["machine"], each["severity"]) for each in found["findings"]] == [("nas-1", "warning")]
    assert found["exit_code"] == ExitCode.DONE
    dry_run = True
    assert "still exports" not in run(inventory, command, "worker-1", "--yes").stderr
    outcome, dry_run = Outcome.FAILED, False
    assert "still exports" not in run(inventory, command, "worker-1", "--yes").stderr
    outcome = Outcome.CHANGED
    if command == "reset":
        done = run(inventory, command, "control-1", "worker-1", "--yes")
        assert "delete /etc/exports.d/gpunodes.exports there, then run `exportfs -ra`" in done.stderr


class _Inventory:
    """An inventory without the machine that has the node's name."""

    dead = Machine("dead", "10.0.0.1", Role.WORKER)
    cluster = "control-1"

    def machines(self) -> list[Machine]:
        return [self.dead]
