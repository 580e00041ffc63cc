"""Plans for GPUs and feature gates, for people and as JSON documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from gpunodes.ansible.module_utils import devices
from gpunodes.planner.gates import Gate
from gpunodes.planner.gpu import Group, Package, Plan, Planned, Plans
from gpunodes.planner.gpu_model import SOURCES
from gpunodes.views import document
from gpunodes.views.text import table, wrapped

_GROUPS = {
    Group.HEADERS: "headers",
    Group.DRIVER: "driver packages",
    Group.FABRIC_MANAGER: "fabric manager",
    Group.CUDA: "CUDA",
    Group.CUDNN: "cuDNN",
    Group.TOOLKIT: "container toolkit",
}


def plans(found: Plans, columns: int | None = None) -> str:
    """Every machine with its GPUs, its plan, and the reasons, for a screen of ``columns``, if any."""
    return "\n\n".join(
        "\n".join(part for line, indent in _machine(one) for part in wrapped(line, columns, indent))
        for one in found.machines
    )


def plans_document(found: Plans) -> str:
    """``gpunodes.gpu-plan/1``"""
    return document.dump(
        {
            "schema": "gpunodes.gpu-plan/1",
            "kubernetes": found.kubernetes,
            "exit_code": int(found.exit_code),
            "machines": [
                {
                    "name": one.name,
                    "settings": one.requested.settings(),
                    "plan": dataclasses.asdict(one.plan) if one.plan else None,
                    "conflicts": [document.conflict(each) for each in one.conflicts],
                    "unreachable": one.unreachable,
                    "facts": one.facts,
                }
                for one in found.machines
            ],
        }
    )


def gates(minor: str, found: Sequence[Gate], columns: int | None = None) -> str:
    """A table of gates, for a screen of ``columns``, if any."""
    rows = [("GATE", "STATE", "DEFAULT", "LOCKED", "GPUNODES SETS", "WHY")]
    rows += [
        (
            gate.name,
            gate.status,
            _text(gate.default),
            "yes" if gate.locked else "-",
            _text(gate.set_by_gpunodes),
            gate.why,
        )
        for gate in found
    ]
    sources = dict.fromkeys(gate.source for gate in found)
    cited = "\n".join(wrapped(f"sources: {'; '.join(sources)}", columns, 9))
    return f"Kubernetes {minor}\n\n{table(rows, columns)}\n\n{cited}"


def gates_document(minor: str, found: Sequence[Gate]) -> str:
    """``gpunodes.gates/1``"""
    keys = ("name", "status", "default", "locked", "removed_in", "set_by_gpunodes", "why")
    listed = [{key: getattr(gate, key) for key in keys} for gate in found]
    return document.dump({"schema": "gpunodes.gates/1", "version": minor, "gates": listed})


def _machine(one: Planned) -> Iterator[tuple[str, int]]:
    """Lines, each with the indent of what does not fit on a screen."""
    if one.plan is None:
        yield f"{one.name}: UNREACHABLE: {one.unreachable}" if one.unreachable else f"{one.name}: NOT POSSIBLE", 2
        for conflict in one.conflicts:
            yield f"  {conflict.found}", 4
            yield f"    wanted: {conflict.wanted}", 12
            yield f"    remedy: {conflict.remedy}", 12
        return
    yield f"{one.name}: {_gpus(one.plan)}", 2
    rows = list(_contents(one.plan))
    width = max((len(name) for name, _ in rows), default=0)
    yield from ((f"  {name:<{width}}  {value}", width + 4) for name, value in rows)
    yield from ((f"  warning: {warning}", 11) for warning in one.plan.warnings)
    yield "  why:", 2
    for reason in one.plan.reasons:
        yield f"    {reason.choice}: {reason.why}" + (f" [{reason.source}]" if reason.source else ""), 6


def _gpus(plan: Plan) -> str:
    if not plan.gpus:
        return "no NVIDIA GPU: joins as a CPU node"
    products = [gpu.product for gpu in plan.gpus]
    return ", ".join(f"{products.count(name)} x {name}" for name in dict.fromkeys(products))


def _contents(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.source:
        modules = f", {plan.flavour} modules" if plan.flavour else ""
        yield "driver", f"{plan.branch}{modules}, from {SOURCES[plan.source]}"
    if plan.module_stream:
        yield "module stream", plan.module_stream
    for group, title in _GROUPS.items():
        if packages := plan.group(group):
            yield title, ", ".join(_package(package) for package in packages)
    yield "runtime", plan.runtime + (" through cri-dockerd" if plan.cri_dockerd else "")
    if plan.gates:
        yield "feature gates", ", ".join(f"{name}={_text(value)}" for name, value in plan.gates.items())
    if plan.hold:
        yield "held", ", ".join(plan.hold)
    if plan.gpus:
        if plan.sharing:
            yield "sharing", _shares(len(plan.gpus), plan.sharing)
        if plan.serving:
            yield "serving", "dynamic resource allocation: pods claim the DeviceClass gpu.nvidia.com"
        yield "nouveau", "disabled" if plan.blacklist_nouveau else "not present"
        yield "reboot", plan.reboot_needed or "no"
        yield "labels", ", ".join(f"{name}={value}" for name, value in plan.labels.items())


def _package(package: Package) -> str:
    if package.same_version_as:
        return f"{package.name} (version of {package.same_version_as})"
    return f"{package.name} {package.version}".rstrip()


def _text(value: bool | None) -> str:
    return "-" if value is None else "true" if value else "false"


def _shares(gpus: int, sharing: str) -> str:
    """``2 GPUs x 4 = 8 shares by time-slicing``, ``2 GPUs x 7 = 14 MIG instances: 7 x 1g.10gb on each``"""
    count = devices.replicas({devices.SHARING: sharing})
    total = f"{gpus} GPU{'' if gpus == 1 else 's'} x {count} = {gpus * count}"
    if layout := devices.layout(sharing):
        return f"{total} MIG instances: {' + '.join(f'{each} x {name}' for name, each in layout.items())} on each"
    return f"{total} shares by {sharing.rpartition('-')[0]}"
