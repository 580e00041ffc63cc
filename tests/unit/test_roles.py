"""The habits of roles and playbooks that no linter knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes.model import Phase
from gpunodes.operations import phases

ROOT = Path(__file__).parents[2]
ROLES = sorted(path for path in (ROOT / "roles").iterdir() if path.is_dir())
PLAYBOOKS = sorted((ROOT / "playbooks").glob("*.yml"))
PHASES = [value for value in vars(phases).values() if isinstance(value, Phase)]
# Roles that read what the others need; they belong to no phase and run whatever is skipped.
ALWAYS = {"settings", "cluster"}


def read(path: Path) -> Any:
    """A YAML file, None when it is not there."""
    return yaml.safe_load(path.read_text()) if path.exists() else None


def inclusions() -> Iterator[tuple[str, str, list[str]]]:
    """Every role of every play: playbook, role, tags."""
    for path in PLAYBOOKS:
        for play in read(path):
            for entry in play.get("roles", ()):
                tags = entry["tags"]
                yield path.name, entry["role"], [tags] if isinstance(tags, str) else tags


def name_of(value: Any) -> str:
    return value.name if isinstance(value, Path | Phase) else str(value)


@pytest.mark.parametrize("role", ROLES, ids=name_of)
def test_defaults_are_those_that_are_documented(role: Path) -> None:
    """argument_specs only documents a default: what counts is defaults/main.yml, and both must say the same."""
    options = read(role / "meta" / "argument_specs.yml")["argument_specs"]["main"].get("options") or {}
    documented = {name: option["default"] for name, option in options.items() if "default" in option}
    assert (read(role / "defaults" / "main.yml") or {}) == documented
    assert all("default" in option or option.get("required") for option in options.values())


@pytest.mark.parametrize("role", ROLES, ids=name_of)
def test_variables_carry_their_role(role: Path) -> None:
    prefix = ("gpunodes_", "settings_") if role.name == "settings" else f"{role.name}_"
    options = read(role / "meta" / "argument_specs.yml")["argument_specs"]["main"].get("options") or {}
    assert not [name for name in options if not name.startswith(prefix)]


@pytest.mark.parametrize("path", sorted((ROOT / "roles").glob("*/tasks/*.yml")), ids=lambda path: str(path.parts[-3:]))
def test_tasks_hide_no_failure_and_start_no_shell(path: Path) -> None:
    text = path.read_text()
    assert "ignore_errors" not in text
    assert "ansible.builtin.shell" not in text
    assert "ansible.builtin.command" not in text, "three commands on one subject become a module"
    assert len(text.splitlines()) <= 100


@pytest.mark.parametrize(("playbook", "role", "tags"), [*inclusions()])
def test_a_role_is_included_under_its_own_tag(playbook: str, role: str, tags: list[str]) -> None:  # noqa: ARG001
    """--skip-phase and --from-phase are tags."""
    assert tags in ([role], ["always"], ["never"]) if role in ALWAYS else tags == [role]


@pytest.mark.parametrize("phase", PHASES, ids=name_of)
def test_every_phase_is_a_role(phase: Phase) -> None:
    assert phase.name in {role.name for role in ROLES}


@pytest.mark.parametrize("role", ROLES, ids=name_of)
def test_every_role_is_a_phase(role: Path) -> None:
    assert role.name in ALWAYS | {phase.name for phase in PHASES}
