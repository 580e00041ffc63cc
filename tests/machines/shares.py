"""Shares that a machine of the lab serves, for the tests of storage and of what uses it."""

from __future__ import annotations

import functools

import yaml

from . import waiting
from .conftest import LabSpec, Operator

LAB = LabSpec("debian13", workers=2, cluster=())
MACHINES = LAB.machines
WORKERS = ("worker-1", "worker-2")
FOLDER = "/srv/training"
SHARES = [{"name": "training", "path": FOLDER, "size": "1Gi"}]
WAIT_S = 900.0
"""Seconds for a boot of an emulated machine, and for its clients until they have reconnected."""


until = functools.partial(waiting.until, limit_s=WAIT_S)


def serve_from(operator: Operator, machine: str) -> None:
    """Let the settings have the share, which a machine serves; `storage up` is the caller's."""
    operator.group("storage", machine)
    variables = operator.folder / "inventory" / "group_vars" / "all.yml"
    variables.write_text(yaml.safe_dump({**yaml.safe_load(variables.read_text()), "gpunodes_storage": SHARES}))


def packages(operator: Operator) -> dict[str, list[str]]:
    return operator.each(MACHINES, "dpkg-query -W -f '${Package} ${Version}\n' | sort")
