"""The warning about nodes whose pool label a run changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpunodes.inventory import Inventory
from gpunodes.model import Severity
from gpunodes.operations import join, phases, pools, preflight, run
from gpunodes.operations.preflight import Inspection
from gpunodes.planner.candidates import MachineFacts

from tests.hostile import cluster_report, machine_report


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("", "and this run removes it; pods that select a no longer start there"),
        ("gpunodes_pools: {h100: {}}", "and this run sets h100; pods that select a no longer"),
        ("gpunodes_pools: {a: {}}", None),
        ("gpunodes_pool: a", None),
    ],
)
def test_a_label_of_the_old_rule_is_reported_before_it_changes(tmp_path: Path, given: str, told: str | None) -> None:
    """Nodes had the label of the first of their groups; the node reports it as one that gpunodes set."""
    path = tmp_path / "hosts.yml"
    path.write_text(
        f"all: {{vars: {{{given}}}}}\ncontrol_plane: {{hosts: {{c1: {{ansible_host: 10.0.0.1}}}}}}\n"
        "workers:\n  children:\n    a: {hosts: {gpu-1: {ansible_host: 10.0.0.2}}}\n    h100: {hosts: {gpu-1: {}}}\n"
    )
    inventory = Inventory(path)
    (machine,) = inventory.select(["gpu-1"])
    facts = MachineFacts("gpu-1", machine.role, facts=machine_report("gpu-1", 2))
    seen = Inspection([facts], "c1", cluster_report({"c1": 1, "gpu-1": 2}), None, "", interrupted=False, log=tmp_path)
    found = pools.changes(inventory, [machine], seen)
    if told is None:
        assert found == []
        return
    (warning,) = found
    assert (warning.machine, warning.severity) == ("gpu-1", Severity.WARNING)
    assert f"its node's label gpunodes.dev/pool is a, {told}" in str(warning)


def test_without_a_cluster_no_label_changes(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text("workers: {hosts: {gpu-1: {}}}\n")
    seen = Inspection([], "c1", None, None, "", interrupted=False, log=tmp_path)
    assert pools.changes(Inventory(path), [], seen) == []


def test_a_run_whose_preflight_was_interrupted_asks_for_no_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def changes(*given: object) -> list[object]:
        asked.append(given)
        return []

    monkeypatch.setattr(pools, "changes", changes)
    monkeypatch.setattr(preflight, "judge", lambda *_, **__: [])
    path = tmp_path / "hosts.yml"
    path.write_text("all: {children: {control_plane: {hosts: {c1: {ansible_host: 10.0.0.1}}}}}\n")
    inventory = Inventory(path)
    for interrupted, times in ((True, 0), (False, 1)):
        seen = Inspection([], "c1", None, None, "", interrupted=interrupted, log=tmp_path)
        machines = inventory.select(["c1"])
        assert not run._judged(join.OPERATION, inventory, machines, seen, "1.36", [phases.POOL])
        assert len(asked) == times
