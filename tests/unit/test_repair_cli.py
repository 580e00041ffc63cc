"""The commands of repair: errors before any change, plans and JSON documents."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from gpunodes.cli import health
from gpunodes.engine.fleet import InventoryFleet
from gpunodes.engine.remote import probing
from gpunodes.engine.remote.reach import ProbeResult, Reach
from gpunodes.errors import WrongInput
from gpunodes.health.model import Action, Finding, State, Verdict
from gpunodes.inventory import Inventory
from gpunodes.repair.policy import Decision
from gpunodes.repair.record import RepairOutcome
from gpunodes.repair.result import MachineRepair, RepairResult
from gpunodes.views import repair as views

from tests.command import run


def gpunodes(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "inventory").mkdir(exist_ok=True)
    (folder / "inventory" / "hosts.yml").write_text(
        "control_plane: {hosts: {c1: {ansible_host: 127.0.0.1, ansible_port: 1}}}\n"
        "workers: {hosts: {gpu-1: {ansible_host: 127.0.0.1, ansible_port: 1}, gpu-2: {ansible_host: 127.0.0.2}}}\n"
    )
    return run(folder, *words, variables={"XDG_STATE_HOME": str(folder / "state"), "HOME": str(folder)})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("repair",), "no machine is named"),
        (("repair", "gpu-1", "--resume"), "exclude each other"),
        (("repair", "--resume", "--dry-run"), "--dry-run"),
        (("repair", "gpu-9", "--yes"), "matches no machine"),
        (("repair", "gpu-1"), "--yes"),
        (("repair", "gpu-1", "--yes", "--max-unavailable", "0"), "is not a budget"),
        (("repair", "gpu-1", "--from", "prayer"), "prayer"),
        (("health", "--reboot-hung"), "--yes"),
        (("health", "--reboot-hung", "--from", "x"), "--from"),
        (("health", "--reboot-hung", "--yes", "--actions", "dance"), "dance"),
        (("health", "--yes"), "--reboot-hung"),
        (("health", "--kubeconfig", "x"), "--reboot-hung"),
        (("repair", "gpu-1", "--yes", "--kubeconfig", "x"), "leave --kubeconfig out"),
        (("maintenance", "list", "--context", "x"), "--context without --kubeconfig"),
        (("power", "gpu-1", "status"), "gpu-1 has no BMC"),
        (("power", "gpu-1", "off"), "--yes"),
        (("power", "gpu-*", "status"), "selects 2 machines"),
        (("uncordon", "gpu-*"), "selects 2 machines"),
    ],
)
def test_wrong_input_ends_with_2(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = gpunodes(tmp_path, *words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stdout == ""
    assert "a bug in gpunodes" not in done.stderr


def test_an_unresponsive_control_plane_stops_it_before_any_change(tmp_path: Path) -> None:
    done = gpunodes(tmp_path, "repair", "gpu-1", "--yes", "--json")
    assert done.returncode == 1
    assert "--without-cluster" in json.loads(done.stdout)["remedy"]
    assert not list((tmp_path / "state" / "gpunodes" / "repairs").glob("*.json"))


def test_clearing_without_a_cluster_is_in_the_history(tmp_path: Path) -> None:
    output = json.loads(gpunodes(tmp_path, "uncordon", "gpu-1", "--without-cluster", "--json").stdout)
    assert output == {"schema": "gpunodes.uncordon/1", "machine": "gpu-1", "node": "", "schedulable": None}
    found = json.loads(gpunodes(tmp_path, "history", "gpu-1", "--json").stdout)
    assert [entry["kind"] for entry in found["entries"]] == ["cleared"]
    assert "cleared" in gpunodes(tmp_path, "history").stdout


def test_the_timer_contains_its_options(tmp_path: Path) -> None:
    units = json.loads(gpunodes(tmp_path, "health", "timer", "--every", "5min", "--json").stdout)["units"]
    assert "OnUnitInactiveSec=5min" in units["gpunodes-health.timer"]
    assert f"WorkingDirectory={tmp_path}" in units["gpunodes-health.service"]


def test_the_timer_s_paths_are_plain(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "hosts.yml").write_text("workers: {}\n")
    units = json.loads(gpunodes(tmp_path / "below", "health", "timer", "-i", "../hosts.yml", "--json").stdout)["units"]
    assert f"--inventory {tmp_path}/hosts.yml\n" in units["gpunodes-health.service"]


FINDING = Finding("hung-in-driver", "", Action.REBOOT, State.HUNG, evidence=("INFO: task \x1b[2J",))
VERDICT = Verdict("gpu-1", "live", State.HUNG, Action.REBOOT, True, (79,), (), "b1", 8, 7, (FINDING,))
RESULT = RepairResult(
    "health",
    [
        MachineRepair("gpu-1", Decision.REPAIR, "hung", RepairOutcome.REPAIRED, VERDICT, "sysrq", (), "r1", 65.2),
        MachineRepair("gpu-2", Decision.WAIT, "gpu-1 of pool workers unavailable; the limit is 1", None, VERDICT),
        MachineRepair("gpu-3", Decision.NOTHING, "its verdict's action is none"),
    ],
)


def test_a_summary_shows_the_result_of_each_machine() -> None:
    lines = views.summary(RESULT).splitlines()
    assert lines[0] == "gpu-1: repaired by sysrq in 1 min 05 s: hung"
    assert lines[1].startswith("gpu-2: wait: ")
    assert lines[2] == "1 other machine: nothing to repair"
    assert views.summary(RepairResult("health", RESULT.machines[2:])) == "1 machine: nothing to repair"
    assert RESULT.exit_code == 3


def test_a_plan_shows_steps_and_evidence_and_no_escapes() -> None:
    plan = RepairResult(
        "health", [MachineRepair("gpu-1", Decision.REPAIR, "hung", None, VERDICT, "reboot", ("GPU reset: no",))], True
    )
    message = views.summary(plan)
    assert "first step: reboot" in message
    assert "skipped: GPU reset: no" in message
    assert "INFO: task" in message
    assert "\x1b" not in message


def test_the_document() -> None:
    document = json.loads(json.dumps(views.document(RESULT)))
    assert document["schema"] == "gpunodes.repair/1"
    assert document["exit_code"] == 3
    assert [(each["decision"], each["outcome"]) for each in document["machines"]] == [
        ("repair", "repaired"),
        ("wait", None),
        ("nothing", None),
    ]
    assert document["machines"][0]["verdict"]["action"] == "reboot"


def test_without_a_cluster_the_inventory_names_the_pools(tmp_path: Path) -> None:
    """A machine's pool is the label that `join` gives its node: its group, gpunodes_pool, or a label setting."""
    (tmp_path / "hosts.yml").write_text(
        "all: {vars: {gpunodes_pools: {h100: {}}}}\n"
        "control_plane: {hosts: {c1: {}}}\n"
        "dc1: {children: {workers: {}}}\n"
        "h100: {hosts: {gpu-1: {}, gpu-2: {gpunodes_pool: spare}, gpu-3: {gpunodes_node_labels: {rack: r7}}}}\n"
        "workers: {children: {h100: {}}, hosts: {worker-1: {}}}\n"
    )
    fleet = InventoryFleet(Inventory(tmp_path / "hosts.yml"))
    names = ("gpu-1", "gpu-2", "gpu-3", "worker-1")
    assert [fleet.pool_label(name) for name in names] == ["h100", "spare", "h100", ""]
    fleet.settings = lambda: {"gpunodes_repair_pool_label": "rack"}  # type: ignore[method-assign]  # another label
    assert [fleet.pool_label(name) for name in names] == ["", "", "r7", ""]


def test_templates_of_pools_are_rendered(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text("workers: {hosts: {a: {kind: h100}, b: {kind: 'a b'}}, vars: {gpunodes_pool: '{{ kind }}'}}\n")
    fleet = InventoryFleet(Inventory(path))
    assert fleet.pool_label("a") == "h100"
    with pytest.raises(WrongInput, match="gpunodes_pool of b is 'a b'; wanted: the value of a node label"):
        fleet.pool_label("b")


def test_deadline_and_parallel_apply_to_the_scans_of_a_repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`health --deadline --parallel` limit the scans of --reboot-hung, too."""
    (tmp_path / "hosts.yml").write_text("control_plane: {hosts: {c1: {}}}\nworkers: {hosts: {gpu-1: {}}}\n")
    bounds: list[tuple[float, int]] = []

    def probe_all(targets: Any, *_: Any, deadline_s: float, parallel: int, on_result: Any) -> None:
        bounds.append((deadline_s, parallel))
        for target in targets:
            on_result(ProbeResult(target.name, Reach.NO_ROUTE))

    monkeypatch.setattr(probing, "probe", probe_all)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    words = ["--reboot-hung", "--dry-run", "--without-cluster", "-i", str(tmp_path / "hosts.yml")]
    CliRunner().invoke(health.command, [*words, "--deadline", "7", "--parallel", "3"], standalone_mode=False)
    CliRunner().invoke(health.command, words, standalone_mode=False)
    assert bounds == [(7.0, 3), (60.5, 64)]
    # A machine that has just booted may need longer: its verification ignores the deadline.
    place = InventoryFleet(Inventory(tmp_path / "hosts.yml"), 7.0, 3)
    place.scan(place.inventory.machines()[:1], full=False)
    assert bounds[2:] == [(60.25, 3)]


def test_an_invalid_probe_document_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gpunodes repair` failed with a missing key for a machine that reported nonsense."""
    (tmp_path / "hosts.yml").write_text("control_plane: {hosts: {c1: {}}}\nworkers: {hosts: {gpu-1: {}}}\n")

    def probe_all(targets: Any, *_: Any, on_result: Any, **__: Any) -> None:
        odd = {"schema": "gpunodes.probe/1", "expected": "8"}
        for target in targets:
            on_result(ProbeResult(target.name, Reach.ANSWERED, "", odd))

    monkeypatch.setattr(probing, "probe", probe_all)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    place = InventoryFleet(Inventory(tmp_path / "hosts.yml"))
    (seen,) = place.scan(place.inventory.machines()[:1]).values()
    assert (seen.verdict.state, seen.facts) == (State.UNREACHABLE, None)
