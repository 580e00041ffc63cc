"""`endpoint set`: what it refuses before any change, which machines it moves, and whom it reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from gpunodes.cli import root
from gpunodes.model import Machine, MachineResult, Outcome, RunResult
from gpunodes.operations import endpoint_set, preflight
from gpunodes.operations.run import Operation, RunOptions
from gpunodes.planner.candidates import MachineFacts
from gpunodes.planner.endpoint import EndpointSettings

from tests.hostile import ATTACKS, is_plain
from tests.stand_ins import facts

TARGET = "api.example:6443"
REACHED = {"endpoint": TARGET, "resolved": ["10.0.0.5"], "error": "", "names": ["kubernetes"]}
NODES = [
    {"name": name, "uid": f"uid-{name}", "boot_id": f"b-{name}", "machine_id": "", "product_uuid": "", "role": role}
    for name, role in (("control-1", "control_plane"), ("worker-1", "worker"), ("stranger", "worker"))
]


def reported(name: str, **changes: Any) -> dict[str, Any]:
    own: dict[str, Any] = {
        "hostname": name,
        "boot_id": f"b-{name}",
        "machine_id": None,
        "product_uuid": None,
        "addresses": [],
    }
    return facts(**{**own, "endpoints": [REACHED], "gpu": {"functions": []}, **changes})


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A control plane, a worker that responds, one that does not, and one that is no node."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "hosts.yml").write_text(
        "control_plane: {hosts: {control-1: {}}}\nworkers: {hosts: {worker-1: {}, down: {}, spare: {}}}\n"
    )
    seen: dict[str, Any] = {
        "path": tmp_path / "hosts.yml",
        "facts": {name: reported(name) for name in ("control-1", "worker-1", "spare")},
        "cluster": {"endpoint": "10.0.0.1:6443", "nodes": NODES},
        "carried": [],
        "why": "no route to host",
    }

    def inspect(_: Any, machines: Sequence[Machine], folder: Path, *__: Any, **___: Any) -> preflight.Inspection:
        candidates = [
            MachineFacts(each.name, each.role, seen["facts"].get(each.name), seen["why"], endpoint=seen["own"])
            for each in machines
        ]
        return preflight.Inspection(candidates, "control-1", seen["cluster"], None, "", False, folder)

    def carry_out(operation: Operation, _: Any, machines: Sequence[Machine], __: Any, options: RunOptions) -> RunResult:
        seen["carried"].append(([machine.name for machine in machines], options.variables))
        return RunResult(operation.name, [MachineResult(each.name, Outcome.CHANGED) for each in machines])

    seen["own"] = EndpointSettings()
    monkeypatch.setattr(preflight, "inspect", inspect)
    monkeypatch.setattr(endpoint_set, "carry_out", carry_out)
    return seen


def run(cluster: dict[str, Any], *words: str) -> Result:
    arguments = ["endpoint", "set", *words, "--yes", "-i", str(cluster["path"])]
    return CliRunner().invoke(root, arguments, standalone_mode=False)


def test_nodes_that_respond_are_moved_and_others_are_reported(cluster: dict[str, Any]) -> None:
    done = run(cluster, "api.example")
    assert done.exception is None, done.exception
    (names, variables) = cluster["carried"][0]
    assert names == ["control-1", "worker-1"]
    assert variables == {
        "gpunodes_control_plane_endpoint": TARGET,
        "wiring_new_endpoint": TARGET,
        "wiring_moving": [],  # "down" and "stranger" keep the earlier one
    }
    assert done.return_value == 3
    assert "stranger: endpoint (warning): its machine is not in the inventory" in done.output.replace("\n", " ")
    assert "down" in done.output


def test_a_machine_that_does_not_reach_the_endpoint_stops_everything(cluster: dict[str, Any]) -> None:
    cluster["facts"]["worker-1"] = reported("worker-1", endpoints=[{**REACHED, "error": "Connection refused"}])
    done = run(cluster, "api.example")
    assert cluster["carried"] == []
    assert "does not reach the API at api.example:6443: Connection refused" in done.output.replace("\n", " ")


def test_a_control_plane_that_does_not_respond_stops_everything(cluster: dict[str, Any]) -> None:
    del cluster["facts"]["control-1"]
    done = run(cluster, "api.example")
    assert cluster["carried"] == []
    assert done.return_value != 0


def test_a_virtual_address_in_use_stops_everything(cluster: dict[str, Any]) -> None:
    text = cluster["path"].read_text().replace("control-1: {}", "control-1: {gpunodes_control_plane_vip: 10.0.0.10}")
    cluster["path"].write_text(text)
    cluster["own"] = EndpointSettings(vip="10.0.0.10")
    used = {"held": False, "managed": False, "foreign": False, "others": [], "mac": "52:54:00:00:00:01", "answers": []}
    cluster["facts"]["control-1"] = reported(
        "control-1", addresses=["10.0.0.11"], virtual_address={**used, "answers": ["52:54:00:aa:bb:cc"]}
    )
    assert "52:54:00:aa:bb:cc" in run(cluster, "10.0.0.10").output
    assert cluster["carried"] == []
    cluster["facts"]["control-1"]["virtual_address"] = used
    assert run(cluster, "10.0.0.10").exception is None
    assert cluster["carried"][0][1] == {"wiring_new_endpoint": "10.0.0.10:6443", "wiring_moving": []}


def test_all_machines_together_leave_a_virtual_address(cluster: dict[str, Any]) -> None:
    cluster["path"].write_text("control_plane: {hosts: {control-1: {}}}\nworkers: {hosts: {worker-1: {}, spare: {}}}\n")
    cluster["cluster"]["nodes"] = NODES[:2]
    assert run(cluster, "api.example").return_value == 0
    assert cluster["carried"][0][1]["wiring_moving"] == ["control-1", "worker-1"]
    # Its kubelet has not registered it again yet, and uses the earlier endpoint.
    cluster["facts"]["spare"]["kubernetes"]["role"] = "worker"
    run(cluster, "api.example")
    assert cluster["carried"][1][1]["wiring_moving"] == []


@pytest.mark.parametrize(
    "setting", ["gpunodes_control_plane_vip: 10.0.0.10", "gpunodes_control_plane_endpoint: other.example"]
)
def test_an_endpoint_that_contradicts_the_settings_is_refused(setting: str, cluster: dict[str, Any]) -> None:
    text = cluster["path"].read_text().replace("control-1: {}", f"control-1: {{{setting}}}")
    cluster["path"].write_text(text)
    error = run(cluster, "api.example").exception
    assert "requests the endpoint" in str(error)
    assert cluster["carried"] == []


def test_without_a_cluster_nothing_moves(cluster: dict[str, Any]) -> None:
    cluster["cluster"] = None
    assert "it runs no cluster" in str(run(cluster, "api.example").exception)
    assert cluster["carried"] == []


def test_wrong_settings_of_the_virtual_address_are_one_sentence(cluster: dict[str, Any]) -> None:
    both = "{gpunodes_control_plane_vip: 10.0.0.10, gpunodes_control_plane_endpoint: api.example}"
    cluster["path"].write_text(cluster["path"].read_text().replace("control-1: {}", f"control-1: {both}"))
    error = run(cluster, "api.example").exception
    assert "gpunodes_control_plane_endpoint of control-1 is api.example, but gpunodes_control_plane_vip is" in str(
        error
    )


@pytest.mark.parametrize("attack", ATTACKS, ids=ascii)
def test_what_machines_and_nodes_say_is_shown_as_text(cluster: dict[str, Any], attack: str) -> None:
    """A node without a machine, why a machine does not respond, and what one says of the endpoint."""
    cluster["why"] = attack
    cluster["cluster"]["nodes"] = [*NODES[:2], {**NODES[2], **dict.fromkeys(("uid", "boot_id", "machine_id"), attack)}]
    for words in (("api.example",), ("api.example", "--json")):
        done = run(cluster, *words)
        assert "its machine is not in the inventory" in done.output
        assert is_plain(done.output)
    (names, variables) = cluster["carried"][-1]
    assert names == ["control-1", "worker-1"]
    assert variables == {
        "gpunodes_control_plane_endpoint": TARGET,
        "wiring_new_endpoint": TARGET,
        "wiring_moving": [],  # "down" and "stranger" keep the earlier one
    }
    for reached in ({"resolved": [attack]}, {"error": attack}, {"names": [attack]}):
        cluster["facts"]["worker-1"] = reported("worker-1", endpoints=[{**REACHED, **reached}])
        assert is_plain(run(cluster, "api.example").output)
