"""Fixtures of all scenarios; ``host`` is testinfra's connection to a machine, as root."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from testinfra.host import Host

HERE = Path(__file__).parent


@pytest.fixture
def bare(host: Host) -> list[str]:
    """The machine's initial state: the output of state.sh at its creation."""
    name = host.ansible.get_variables()["inventory_hostname"]
    return (Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / f"bare-{name}.txt").read_text().splitlines()


@pytest.fixture
def state(host: Host) -> list[str]:
    """The machine's current state: the output of state.sh."""
    lines: list[str] = host.check_output((HERE / "default" / "files" / "state.sh").read_text()).splitlines()
    return lines


@pytest.fixture(scope="session")
def defaults() -> dict[str, Any]:
    """The settings' defaults."""
    settings: dict[str, Any] = yaml.safe_load((HERE.parent / "roles/settings/defaults/main.yml").read_text())
    return settings


@pytest.fixture
def settings(host: Host) -> dict[str, Any]:
    """The machine's variables in the lab's inventory."""
    variables: dict[str, Any] = host.ansible.get_variables()
    return variables
