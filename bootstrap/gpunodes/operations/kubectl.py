"""kubectl on the controller: whether it is there, and fits the version of a cluster."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.engine import control_planes
from gpunodes.engine.cluster.api import Api
from gpunodes.errors import GpunodesError
from gpunodes.inventory import Inventory

_SKEW = 1
"""Minors by which kubectl may differ from the API server (kubernetes.io, "Version Skew Policy")."""
_LIMIT_S = 10.0
_VERSION = re.compile(r"v1\.(\d{1,3})\.\d{1,3}(?:[-+.][0-9A-Za-z.+-]{0,60})?")


def problem(inventory: Inventory) -> Problem | None:
    """What is wrong with kubectl for this cluster; None if it fits, or the API does not respond."""
    try:
        with control_planes.connected(inventory, Api) as api:
            server = _minor(api.call_once("GET", "/version").body)
    except GpunodesError:
        return None
    return _compared(server, own()) if server is not None else None


def own() -> int | None:
    """The minor of the kubectl that a shell would find; None without one that works."""
    program = shutil.which("kubectl")
    if program is None:
        return None
    try:
        # The user's own program, as the shell finds it.
        done = subprocess.run(
            [program, "version", "--client", "-o", "json"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError, RecursionError):
        return None
    return _minor(found.get("clientVersion")) if isinstance(found, Mapping) else None


def _minor(version: Any) -> int | None:
    text = version.get("gitVersion") if isinstance(version, Mapping) else None
    found = _VERSION.fullmatch(text) if isinstance(text, str) else None
    return int(found[1]) if found else None


def _compared(server: int, client: int | None) -> Problem | None:
    wanted = f"kubectl 1.{server - _SKEW} to 1.{server + _SKEW} for this cluster of 1.{server}"
    remedy = f"install kubectl 1.{server} (kubernetes.io, Install Tools)"
    if client is None:
        return Problem("no kubectl that works is on the PATH", wanted, remedy)
    if abs(client - server) > _SKEW:
        return Problem(f"kubectl on the PATH has the version 1.{client}", wanted, remedy)
    return None
