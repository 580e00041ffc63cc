"""Plans for machines with GPUs, from their facts, read now or from a file."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpunodes import settings
from gpunodes.engine import journal
from gpunodes.errors import WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, Role
from gpunodes.operations import phases, preflight
from gpunodes.operations.tracker import RunView
from gpunodes.planner import gpu, reports, versions
from gpunodes.planner.candidates import requirements_of

PHASES = (phases.PREFLIGHT,)


def run(
    inventory: Inventory,
    machines: Sequence[Machine],
    view: RunView,
    kubernetes: str | None,
    variables: Mapping[str, Any],
) -> gpu.Plans:
    """Read the machines and plan; ``variables`` are settings of this run. Nothing is changed.

    An existing cluster decides the Kubernetes version, as it does for a join, if there is a control plane to ask.
    """
    alone = preflight.are_alone(inventory)
    version = preflight.requested_version(inventory, kubernetes, machines, without_cluster=alone)
    folder = journal.open_run("gpu plan")
    view.begin("gpu plan", machines)
    requested = {**variables, "gpunodes_kubernetes_version": version}
    seen = preflight.inspect(inventory, machines, folder, view, requested, alone=alone)
    version = requirements_of(seen.cluster, version).kubernetes
    found = [
        gpu.planned(
            candidate.name,
            candidate.facts,
            candidate.requested.without_kubernetes()
            if candidate.role is Role.GPU_HOST
            else gpu.for_kubernetes(candidate.requested, version),
            candidate.unreachable,
        )
        for candidate in seen.candidates
    ]
    return gpu.Plans(version, found, interrupted=seen.interrupted)


def from_file(path: Path, patterns: Sequence[str], kubernetes: str | None, variables: Mapping[str, Any]) -> gpu.Plans:
    """Plan from a document that ``gpu plan --json`` printed, or from facts by machine.

    Settings in the document are kept unless ``variables`` override them. Raises WrongInput for another file, and for
    a pattern that matches none of its machines.
    """
    document = _document(path)
    version = versions.check(kubernetes or str(document.get("kubernetes") or _default("gpunodes_kubernetes_version")))
    saved = document.get("machines")
    entries = saved if isinstance(saved, list) else [{"name": name, "facts": facts} for name, facts in document.items()]
    names = [str(entry["name"]) for entry in entries]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise WrongInput(f"{pattern!r} matches no machine of {path}", f"one of {', '.join(names)}", "correct it")
    found = []
    for entry in entries:
        if not patterns or any(fnmatch.fnmatchcase(str(entry["name"]), pattern) for pattern in patterns):
            own = {**settings.defaults(), **(entry.get("settings") or {}), **variables}
            requested = gpu.requested_of(own, version)
            found.append(
                gpu.planned(str(entry["name"]), entry["facts"], requested, str(entry.get("unreachable") or ""))
            )
    return gpu.Plans(version, found)


def _default(name: str) -> str:
    return str(settings.defaults()[name])


def _document(path: Path) -> Mapping[str, Any]:
    """The file's content; raises WrongInput for another structure."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WrongInput(f"{path} cannot be read: {error.strerror}", "a readable file", "correct --from") from error
    except (ValueError, RecursionError) as error:
        raise WrongInput(f"{path} is not JSON: {error}", "what `gpu plan --json` printed", "correct --from") from error
    entries = document.get("machines") if isinstance(document, dict) else None
    shaped = (
        all(isinstance(entry, dict) and {"name", "facts"} <= set(entry) for entry in entries)
        if isinstance(entries, list)
        else isinstance(document, dict)
        and all(isinstance(facts, dict) and "os" in facts for facts in document.values())
    )
    if not shaped:
        raise WrongInput(
            f"{path} contains no machine facts",
            "what `gpu plan --json` printed, or facts by machine",
            "save it again with `gpunodes gpu plan --json`",
        )
    found: Mapping[str, Any] = document
    machines = {entry["name"]: entry["facts"] for entry in entries} if isinstance(entries, list) else found
    for name, facts in machines.items():
        if facts is not None and (wrong := reports.saved_problem(facts)):
            raise WrongInput(
                f"{path}: {name}: {wrong}",
                "facts as a machine reports them",
                "save it again with `gpunodes gpu plan --json`",
            )
    return found
