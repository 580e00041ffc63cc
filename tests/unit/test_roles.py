"""Roles hold their promises: argument_specs and defaults agree, tasks use few and named things."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ROLES = sorted(path for path in (ROOT / "roles").iterdir() if path.is_dir())
PLAYBOOKS = sorted((ROOT / "playbooks").glob("*.yml"))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def options(role: Path) -> dict[str, Any]:
    found: dict[str, Any] = load(role / "meta/argument_specs.yml")["argument_specs"]["main"].get("options") or {}
    return found


def defaults(role: Path) -> dict[str, Any]:
    path = role / "defaults/main.yml"
    return (load(path) or {}) if path.exists() else {}


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_defaults_equal_argument_specs(role: Path) -> None:
    specified = {name: option.get("default") for name, option in options(role).items()}
    assert defaults(role) == specified


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_every_option_is_described(role: Path) -> None:
    assert load(role / "meta/argument_specs.yml")["argument_specs"]["main"]["short_description"]
    for name, option in options(role).items():
        assert option["description"], name
        assert option["type"], name


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_variables_carry_the_role_name(role: Path) -> None:
    prefixes = ("gpunodes_", f"{role.name}_") if role.name == "settings" else (f"{role.name}_",)
    assert [name for name in defaults(role) if not name.startswith(prefixes)] == []


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_no_role_reads_settings_or_other_roles(role: Path) -> None:
    if role.name == "settings":
        return
    text = "".join(
        path.read_text(encoding="utf-8") for part in ("tasks", "vars") for path in (role / part).glob("*.yml")
    )
    others = [other.name for other in ROLES if other != role]
    wired = [name for other in others for name in options(ROOT / "roles" / other) if re.search(rf"\b{name}\b", text)]
    assert wired == []
    assert "wiring_" not in text


def test_every_wired_variable_is_an_option_of_a_role() -> None:
    known = {name for role in ROLES for name in options(role)}
    wired = load(ROOT / "playbooks/group_vars/all.yml")
    missing = [name for name in wired if not name.startswith("wiring_") and name not in known]
    assert missing == [], "add it to its role, in defaults/main.yml and meta/argument_specs.yml"


@pytest.mark.parametrize("playbook", PLAYBOOKS, ids=lambda path: path.name)
def test_every_role_of_a_play_carries_its_name_as_tag(playbook: Path) -> None:
    for play in load(playbook):
        for entry in play.get("roles", []):
            assert entry["tags"] in {entry["role"], "always", "never"}


@pytest.mark.parametrize("playbook", PLAYBOOKS, ids=lambda path: path.name)
def test_every_playbook_checks_the_controller_first(playbook: Path) -> None:
    """An older Ansible, or other settings, would let reports run here: refused before a machine is asked."""
    first = load(playbook)[0]
    assert "controller" in str(first.get("ansible.builtin.import_playbook") or first["roles"])


@pytest.mark.parametrize("playbook", PLAYBOOKS, ids=lambda path: path.name)
def test_playbooks_only_wire(playbook: Path) -> None:
    for play in load(playbook):
        assert not {"tasks", "pre_tasks", "post_tasks", "handlers"} & set(play)


@pytest.mark.parametrize("playbook", PLAYBOOKS, ids=lambda path: path.name)
def test_host_diff_compares_only_roles_of_its_play(playbook: Path) -> None:
    """A role's desired state (``node_wanted``) is defined only in plays with that role."""
    everywhere = load(ROOT / "playbooks/group_vars/all.yml")
    for play in load(playbook):
        wired = {**everywhere, **play.get("vars", {})}
        roles = {entry["role"] for entry in play.get("roles", [])}
        if "host_diff" in roles:
            compared = wired["host_diff_wanted"].replace("wiring_gpu_wanted", str(wired["wiring_gpu_wanted"]))
            assert set(re.findall(r"\b([a-z_]+)_wanted\b", compared)) <= roles
