"""Roles hold their promises: argument_specs and defaults agree, tasks use few and named things."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes import operations
from gpunodes.model import Phase
from gpunodes.operations import gpu_verify, status
from gpunodes.operations.run import Operation

from tests.playbooks import phases_of, roles_of

ROOT = Path(__file__).parents[2]
ROLES = sorted(path for path in (ROOT / "roles").iterdir() if path.is_dir())
PLAYBOOKS = sorted((ROOT / "playbooks").glob("*.yml"))
OPERATIONS: list[Operation] = [
    module.OPERATION
    for found in pkgutil.iter_modules(operations.__path__, f"{operations.__name__}.")
    if hasattr(module := importlib.import_module(found.name), "OPERATION")
]


@functools.cache
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
    words = set(re.findall(r"\w+", text))
    assert [name for other in ROLES if other != role for name in options(other) if name in words] == []
    assert "wiring_" not in text


def test_the_wiring_converts_every_boolean_setting() -> None:
    """An inventory in INI has the text "false", which is true for Jinja and Python."""
    known = options(ROOT / "roles/settings").items()
    booleans = [name for name, option in known if option["type"] == "bool" and name.startswith("gpunodes_")]
    use = re.compile(rf"(?<!['\w])({'|'.join(booleans)})\b(?!['\w:])(?P<filter> \| bool)?")
    for file in (*ROOT.glob("playbooks/**/*.yml"), *ROOT.glob("roles/*/tasks/*.yml")):
        text = re.sub(r"^ *#.*$", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert [each[0] for each in use.finditer(text) if not each["filter"]] == [], file


def test_every_wired_variable_is_an_option_of_a_role() -> None:
    known = {name for role in ROLES for name in options(role)}
    wired = load(ROOT / "playbooks/group_vars/all.yml")
    missing = [name for name in wired if not name.startswith("wiring_") and name not in known]
    assert missing == [], "add it to its role, in defaults/main.yml and meta/argument_specs.yml"


@pytest.mark.parametrize("playbook", PLAYBOOKS, ids=lambda path: path.name)
def test_every_role_of_a_play_carries_its_name_as_tag(playbook: Path) -> None:
    for play in load(playbook):
        for entry in roles_of(play):
            tags = {entry["tags"]} if isinstance(entry["tags"], str) else set(entry["tags"])
            # A playbook of stages may need a role in some of them only; that of add-ons has a tag for each purpose.
            stages = tags <= {"prepare", "apply", "undo"} or tags == {"never", "optional"}
            assert stages or tags <= {entry["role"], "always", "never"}


@pytest.mark.parametrize("playbook", PLAYBOOKS, ids=lambda path: path.name)
def test_every_playbook_checks_the_controller_first(playbook: Path) -> None:
    """An older Ansible, or other settings, would let reports run here: refused before a machine is asked."""
    first = load(playbook)[0]
    assert "controller" in str(first.get("ansible.builtin.import_playbook") or first["roles"])


@pytest.mark.parametrize("playbook", PLAYBOOKS, ids=lambda path: path.name)
def test_playbooks_only_wire(playbook: Path) -> None:
    for play in load(playbook):
        assert not {"pre_tasks", "post_tasks", "handlers"} & set(play)
        assert all(any("import_" in word for word in task) for task in play.get("tasks", []))


@pytest.mark.parametrize(
    ("playbook", "phases"),
    [
        *((operation.playbook, operation.phases) for operation in OPERATIONS),
        ("gpu_verify.yml", gpu_verify.PHASES),
        ("status.yml", status.PHASES),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_playbooks_have_the_phases_of_their_operation_in_its_order(playbook: str, phases: Sequence[Phase]) -> None:
    assert phases_of(load(ROOT / "playbooks" / playbook)) == [phase.name for phase in phases]


@pytest.mark.parametrize("playbook", PLAYBOOKS, ids=lambda path: path.name)
def test_the_cluster_is_read_before_package_sources_are_checked(playbook: Path) -> None:
    """An existing cluster determines the minor whose source is checked, whatever the settings say."""
    for play in load(playbook):
        roles = [entry["role"] for entry in roles_of(play)]
        if playbook.name == "prepare.yml":
            # It contacts no cluster: the settings decide.
            assert "cluster" not in roles
        elif "preflight" in roles:
            assert roles.index("cluster") < roles.index("settings") < roles.index("preflight")


@pytest.mark.parametrize("playbook", PLAYBOOKS, ids=lambda path: path.name)
def test_host_diff_compares_only_roles_of_its_play(playbook: Path) -> None:
    """Else a role that does not run would stay pending."""
    everywhere = load(ROOT / "playbooks/group_vars/all.yml")
    parts = {"desired_state.wanted": {"node", "containerd", "kubernetes", "docker", "cri_dockerd"}}
    parts["desired_state.gpu.wanted"] = {"gpu_driver", "container_toolkit", "cuda", "gpu_mig"}
    for play in load(playbook):
        wired = {**everywhere, **play.get("vars", {})}
        roles = {entry["role"] for entry in roles_of(play)}
        if "host_diff" in roles:
            compared = wired["host_diff_wanted"].replace("wiring_gpu_wanted", str(wired["wiring_gpu_wanted"]))
            assert {role for part in re.findall(r"desired_state[a-z._]*", compared) for role in parts[part]} <= roles


def test_results_that_the_wiring_reads_are_registered() -> None:
    """A change of any container runtime makes the node and its GPUs be verified again."""
    wiring = (ROOT / "playbooks/group_vars/all.yml").read_text()
    read = set(re.findall(r"\((\w+)_result \| default\(\{\}\)\)", wiring))
    assert {"containerd", "docker", "cri_dockerd"} <= read
    for role in read:
        tasks = "".join(path.read_text() for path in (ROOT / "roles" / role / "tasks").iterdir())
        assert f"register: {role}_result\n" in tasks, role
