"""Fetch the administrator's kubeconfig, and merge it into the user's. It never lies in a file wider than 0600."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gpunodes.engine import events, journal, runner
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.operations import phases
from gpunodes.operations.tracker import Tracker, View

PHASES = (phases.KUBECONFIG,)


def fetch(inventory: Inventory, view: View) -> dict[str, Any]:
    """The cluster's kubeconfig, its entries named after the cluster; raises GpunodesError when it cannot be had."""
    control = inventory.control_plane()
    tracker = Tracker([control], PHASES, view)
    view.begin("kubeconfig", [control])
    folder = journal.open_run("kubeconfig")
    # The play has a folder of its own name beside it.
    fetched = folder / "admin.conf"
    play = runner.Play(
        "kubeconfig.yml", inventory.path, [control.name], variables={"gpunodes_kubeconfig_path": str(fetched)}
    )
    try:
        ended = runner.run(play, folder, tracker.on_event)
        if not ended.ok or not fetched.exists():
            failure = tracker.failures.get(control.name)
            raise GpunodesError(
                f"{control.name}: {events.cause(failure) if failure else 'no kubeconfig came'}",
                "a control plane",
                f"`gpunodes init-master {control.name}` makes one; the log is {ended.log}",
            )
        document: dict[str, Any] = yaml.safe_load(fetched.read_text(encoding="utf-8"))
    finally:
        fetched.unlink(missing_ok=True)
    return renamed(document, f"gpunodes-{control.name}")


def renamed(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """kubeadm calls every cluster `kubernetes`; two of them in one file need names of their own."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": document["clusters"][0]["cluster"]}],
        "users": [{"name": name, "user": document["users"][0]["user"]}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }


def merged(existing: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, Any]:
    """``existing`` with the entries of ``new``; an entry of the same name is replaced, all else stays."""
    result: dict[str, Any] = {"apiVersion": "v1", "kind": "Config", **(existing or {})}
    for key in ("clusters", "users", "contexts"):
        names = {entry["name"] for entry in new[key]}
        result[key] = [entry for entry in result.get(key) or [] if entry["name"] not in names] + list(new[key])
    result["current-context"] = new["current-context"]
    return result


def user_file() -> Path:
    """Where kubectl looks: the first file of $KUBECONFIG, by default ~/.kube/config."""
    named = [part for part in os.environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    return Path(named[0]) if named else Path.home() / ".kube/config"


def write(path: Path, document: Mapping[str, Any], *, merge: bool) -> None:
    """Write ``document`` to ``path`` (0600, in one step), or merge it into what is there."""
    if merge and path.exists():
        try:
            existing = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise WrongInput(f"{path} is not valid YAML", "a kubeconfig", "correct it, or use --output") from error
        if existing is not None and not isinstance(existing, dict):
            raise WrongInput(f"{path} is not a mapping", "a kubeconfig", "correct it, or use --output")
        document = merged(existing, document)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        yaml.safe_dump(dict(document), file, sort_keys=False)
    partial.replace(path)
