"""The stages of upgrades: Ansible is real, the machines are stand-ins, and what they report is an attack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hostile import ATTACKS, Machines, cluster_report, machine_report, machines
from tests.trust.test_walk import playbook

NOTHING: dict[str, Any] = {"packages": [], "kernels": [], "kept_back": [], "held": [], "reboot": []}
DRIVER = {"module": "580.65.06", "loaded": True, "origin": "nvidia-repository", "packages": {}, "flavour": "open"}


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    """A GPU node with a driver."""
    settings = {"gpunodes_driver_branch": "590"}
    made = machines(tmp_path, {"control_plane": ["control-1"], "workers": ["worker-1"]}, settings)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    report = machine_report("worker-1", 2)
    made.answer("worker-1", "host_facts", {"host_facts": {**report, "gpu": {**report["gpu"], "driver": DRIVER}}})
    made.answer("control-1", "cluster_info", {"cluster": cluster_report({"control-1": 1, "worker-1": 2})})
    return made


def stage(made: Machines, name: str, tags: str) -> str:
    return " ".join(playbook(made, name, "--limit", "worker-1", "--tags", tags).split())


def asked(made: Machines) -> set[str]:
    return {line.partition("/")[2] for line in made.asked if line.startswith("worker-1/")} - {"host_facts"}


def test_hostile_pending_packages_of_stand_in_machines_stop_their_upgrades(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"control-1": 1} | {f"worker-{number}": number + 1 for number in range(1, len(ATTACKS) + 1)}
    made = machines(tmp_path, {"control_plane": ["control-1"], "workers": list(names)[1:]}, {})
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    made.answer("control-1", "cluster_info", {"cluster": cluster_report(names)})
    for attack, (name, number) in zip(ATTACKS, list(names.items())[1:], strict=True):
        made.answer(name, "host_facts", {"host_facts": machine_report(name, number)})
        made.answer(name, "os_pending", {"os_pending": {**NOTHING, "kernels": [attack]}})
    output = " ".join(playbook(made, "os_upgrade.yml", "--limit", "workers", "--tags", "prepare").split())
    for name in list(names)[1:]:
        assert f"{name}: of its pending upgrades, " in output
        assert {line for line in made.asked if line.startswith(f"{name}/")} == {
            f"{name}/host_facts",
            f"{name}/os_pending",
        }
    assert not made.ran


def test_the_stages_of_a_stand_in_machine_send_their_modules(fleet: Machines) -> None:
    fleet.answer("worker-1", "os_pending", {"os_pending": NOTHING})
    fleet.answer("worker-1", "os_upgrade", {"notes": [ATTACKS[1]], "reboot": [ATTACKS[1]], "changed": True})
    output = stage(fleet, "os_upgrade.yml", "prepare,apply,verify")
    assert asked(fleet) == {"os_pending", "os_upgrade"}, output
    assert "failed=0" in output


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("os_upgrade.yml", "os_upgrade"),
        ("gpu_upgrade.yml", "gpu_upgrade"),
        ("runtime_upgrade.yml", "runtime_upgrade"),
        ("control_plane_settings.yml", "control_plane_settings"),
        ("kubelet_settings.yml", "host"),
    ],
)
def test_a_stage_of_a_stand_in_machine_that_is_not_its_node_changes_nothing(
    fleet: Machines, name: str, module: str
) -> None:
    """As where an address belongs to another machine since the roll-out began."""
    fleet.answer("control-1", "host_facts", {"host_facts": machine_report("control-1", 1)})
    fleet.answer("worker-1", module, {"changed": True})
    fleet.answer("control-1", module, {"changed": True})
    fleet.answer("control-1", "cluster_info", {"cluster": cluster_report({"control-1": 3, "worker-1": 4})})
    for stage in ("prepare", "apply"):
        output = " ".join(playbook(fleet, name, "--tags", stage).split())
        assert "may not be the same machine: its UUID differs" in output
        assert not [line for line in fleet.asked if line.endswith(f"/{module}")], output


@pytest.mark.parametrize("tags", ["prepare", "apply", "undo"])
def test_a_stage_of_a_driver_upgrade_of_a_stand_in_machine(fleet: Machines, tags: str) -> None:
    fleet.answer("worker-1", "gpu_upgrade", {"version": ATTACKS[1], "reboot": "", "changed": True})
    output = stage(fleet, "gpu_upgrade.yml", tags)
    assert asked(fleet) == {"gpu_upgrade"}, output
    assert "failed=0" in output
    # The device plugin leaves the node meanwhile.
    assert ("control-1/node_pools" in fleet.asked) is (tags != "prepare"), output


def test_a_driver_that_needs_a_reboot_is_the_failure_of_a_stand_in_machine(fleet: Machines) -> None:
    fleet.answer("worker-1", "gpu_upgrade", {"version": "", "reboot": f"Xorg {ATTACKS[1]}", "changed": True})
    output = stage(fleet, "gpu_upgrade.yml", "apply")
    assert "a reboot is required: allow it" in output
    assert not fleet.ran


@pytest.mark.parametrize("tags", ["prepare", "apply", "undo"])
def test_a_stage_of_a_runtime_upgrade_of_a_stand_in_machine(fleet: Machines, tags: str) -> None:
    fleet.answer("worker-1", "runtime_upgrade", {"version": ATTACKS[1], "actions": [ATTACKS[1]], "changed": True})
    output = stage(fleet, "runtime_upgrade.yml", tags)
    assert asked(fleet) == {"runtime_upgrade"}, output
    assert "failed=0" in output
    assert not fleet.ran


def test_what_a_stand_in_machine_reports_of_its_runtime_is_passed_on_as_data(fleet: Machines) -> None:
    fleet.answer("worker-1", "runtime_upgrade", {"version": ATTACKS[1], "actions": [], "changed": False})
    fleet.answer("control-1", "node_upgraded", {"version": ATTACKS[1], "changed": False})
    stage(fleet, "runtime_upgrade.yml", "verify")
    assert "control-1/node_upgraded" in {*fleet.asked}
    assert not fleet.ran


@pytest.mark.parametrize(
    ("name", "state"),
    [
        *(("local-path", state) for state in ("present", "absent", "verified", "listed")),
        # Its template has settings, and files with expressions in braces.
        ("monitoring", "present"),
    ],
)
def test_optional_add_ons_on_a_hostile_control_plane(fleet: Machines, name: str, state: str) -> None:
    answer = {"installed": {ATTACKS[1]: ATTACKS[1]}, "objects": [ATTACKS[1]], "changed": True}
    fleet.answer("control-1", "addon", answer)
    words = ("--limit", "control-1", "--tags", "optional", "-e", f"addon_name={name}", "-e", f"addon_state={state}")
    output = playbook(fleet, "addon.yml", *words)
    assert "control-1/addon" in fleet.asked, output
    assert not fleet.ran


@pytest.mark.parametrize(("tag", "module"), [("pending", "addon_pending"), ("addons", "addon_upgrade")])
def test_the_add_ons_are_read_and_updated_on_one_control_plane(fleet: Machines, tag: str, module: str) -> None:
    fleet.answer("control-1", module, {"addons": ATTACKS[1], "objects": [ATTACKS[1]], "changed": True})
    output = " ".join(playbook(fleet, "addon.yml", "--limit", "control-1", "--tags", tag).split())
    assert [each for each in fleet.asked if each.endswith(module)] == [f"control-1/{module}"] * 2
    assert "failed=0" in output
    assert not fleet.ran
