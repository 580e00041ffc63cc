"""Plans the GPU software of a machine: facts and requested software in; a plan, or all conflicts at once, out. Pure.

The requirements of GPUs, driver branches, CUDA versions and runtimes are in the tables gpus, drivers, cuda, toolkit and
gates, each row with its source. This module only combines them. An installed driver that meets the request is kept:
nothing is upgraded without need.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpunodes.ansible.module_utils import devices
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.errors import WrongInput
from gpunodes.planner import gates, gpu_mig, gpu_serving, gpu_sharing, systems, tables
from gpunodes.planner import gpu_driver as drivers
from gpunodes.planner import gpu_existing as existing
from gpunodes.planner import gpu_packages as software
from gpunodes.planner.gpu_case import (
    Case,
    Row,
    branches,
    cite,
    expected_gpus,
    fill,
    gpus_of,
    is_gpu,
    number,
    version_of,
)
from gpunodes.planner.gpu_installed import reboot
from gpunodes.planner.gpu_model import (
    Facts,
    Flavour,
    Gpu,
    Group,
    Package,
    Plan,
    Planned,
    Plans,
    Reason,
    RequestedSoftware,
    Source,
)

__all__ = [
    "Flavour",
    "Gpu",
    "Group",
    "Package",
    "Plan",
    "Planned",
    "Plans",
    "Reason",
    "RequestedSoftware",
    "Source",
    "check",
    "for_kubernetes",
    "gpus_of",
    "plan",
    "planned",
    "requested_of",
]


def plan(machine: str, facts: Facts, requested: RequestedSoftware) -> Plan | tuple[Problem, ...]:
    """The plan for ``machine``, or all reasons why the requested software cannot be installed.

    ``facts`` is what the module ``host_facts`` returns.
    """
    case = Case(machine, systems.treated(facts, unsupported=requested.unsupported_os), requested)
    feature_gates = _gates(case)
    cri_dockerd = _runtime(case)
    if not case.gpus:
        _without_gpus(case)
        made = Plan(case.machine, runtime=case.requested.runtime, cri_dockerd=cri_dockerd, gates=feature_gates)
    else:
        made = _with_gpus(case, feature_gates, cri_dockerd=cri_dockerd)
    if case.conflicts:
        return tuple(dict.fromkeys(case.conflicts))
    return replace(made, warnings=tuple(case.warnings), reasons=tuple(dict.fromkeys(case.reasons)))


def planned(machine: str, facts: Facts | None, requested: RequestedSoftware, unreachable: str = "") -> Planned:
    """``plan`` for one of several machines, together with its input."""
    if facts is None:
        return Planned(machine, requested, unreachable=unreachable or "its facts could not be read")
    found = plan(machine, facts, requested)
    if isinstance(found, Plan):
        return Planned(machine, requested, plan=found, facts=facts)
    return Planned(machine, requested, conflicts=found, facts=facts)


def requested_of(settings: Mapping[str, Any], kubernetes_version: str) -> RequestedSoftware:
    """The software that a machine's settings request; raises WrongInput for values of the wrong type."""
    requested = settings["gpunodes_feature_gates"] or {}
    if not isinstance(requested, Mapping):
        raise WrongInput(
            f"gpunodes_feature_gates is {requested!r}", "a mapping from gates to true or false", "correct the setting"
        )
    versions = settings["gpunodes_cuda_versions"] or []
    if isinstance(versions, str | int | float):
        versions = [versions]
    return RequestedSoftware(
        kubernetes_version=kubernetes_version,
        driver=str(settings["gpunodes_driver_branch"] or ""),
        cuda=tuple(str(version) for version in versions),
        cudnn=str(settings["gpunodes_cudnn_version"] or ""),
        runtime=str(settings["gpunodes_runtime"]),
        source=str(settings["gpunodes_driver_source"] or ""),
        gates=dict(requested),
        sharing=gpu_sharing.sharing(settings),
        serving=gpu_serving.serving(settings),
        unsupported_os=bool(settings.get("gpunodes_unsupported_os")),
    )


def check(requested: RequestedSoftware) -> None:
    """Raise WrongInput for a version that no machine can have because no table contains it."""
    for conflict in _unknown(requested):
        raise WrongInput(conflict.found, conflict.wanted, conflict.remedy)


def for_kubernetes(requested: RequestedSoftware, kubernetes_version: str) -> RequestedSoftware:
    """The same request for another Kubernetes version."""
    return replace(requested, kubernetes_version=kubernetes_version)


def _unknown(requested: RequestedSoftware) -> Iterator[Problem]:
    if requested.driver and requested.branch not in branches():
        fact = f"the driver branch {requested.branch!r} is unknown"
        yield Problem(fact, f"one of {', '.join(branches())}", "choose one of these")
    elif not re.fullmatch(r"(\d{3}(\.\d{1,4}){0,2})?", requested.driver):
        fact = f"{requested.driver!r} is not a version of the driver"
        yield Problem(fact, "a branch such as 580, or an exact version such as 580.95.05", "correct it")
    known = [minor for row in tables.read("cuda")["cuda"] for minor in row["minors"]]
    minors: dict[str, str] = {}
    for version in requested.cuda:
        minor = software.minor_of(version)
        if minor not in known or not re.fullmatch(r"\d+\.\d+(\.\d+)?", version):
            yield Problem(f"CUDA {version} is unknown", f"one of {', '.join(known)}", "choose one of these")
        elif minors.setdefault(minor, version) != version:
            yield Problem(
                f"CUDA {minors[minor]} and {version} are both requested",
                f"one of them: both are CUDA {minor}",
                "drop one",
            )
    if requested.cudnn and not software.knows_cudnn(requested.cudnn):
        rows = tables.read("cuda")["cudnn"]
        limit = f"one of {', '.join(sorted({row['version'] for row in rows}, key=version_of))}"
        yield Problem(f"cuDNN {requested.cudnn} is unknown", limit, "choose one of these")


def _gates(case: Case) -> dict[str, bool]:
    version = case.requested.kubernetes_version
    try:
        known = gates.gates(version)
    except WrongInput as error:  # a cluster whose version gpunodes does not install
        if case.requested.gates:
            case.conflicts.append(replace(error.problem, remedy="remove gpunodes_feature_gates from the settings"))
        return {}
    case.conflicts += gates.check(version, case.requested.gates)
    wanted = gates.wanted(version, case.requested.gates, gpus=bool(case.gpus))
    for gate in known:
        if gate.set_by_gpunodes is not None and case.gpus:
            case.explain(f"feature gate {gate.name}", gate.why, gate.source)
    for name in case.requested.gates:
        case.explain(f"feature gate {name}", "requested")
    return wanted


def _runtime(case: Case) -> bool:
    """Judge the requested runtime; return whether it needs cri-dockerd."""
    table = tables.read("toolkit")
    rows = {row["name"]: row for row in table["runtime"]}
    name = case.requested.runtime
    row = rows.get(name)
    if row is None:
        case.refuse(f"the runtime {name!r} is unknown", " or ".join(rows), "correct gpunodes_runtime")
        return False
    case.explain(f"runtime {name}", "requested" if name != "containerd" else "the default runtime of Kubernetes")
    if case.gpus:
        _check_cdi(case, row)
    shim = table["cri_dockerd"]
    if name == "docker" and version_of(case.requested.kubernetes_version) >= version_of(shim["from"]):
        case.explain("cri-dockerd", f"Kubernetes has no dockershim from {shim['from']} on", cite("toolkit", shim))
        return True
    return False


def _check_cdi(case: Case, row: Row) -> None:
    installed = {**(case.facts.get("packages") or {}), **(case.gpu.get("runtimes") or {})}
    for package in row["packages"]:
        version = re.search(r"\d[\d.]*", str(installed.get(package) or "").rpartition(":")[2])
        if version and version_of(version[0]) < version_of(row["least"]):
            case.refuse(
                f"{package} {version[0]} is installed",
                f"{row['least']} or newer: it must support CDI specification 0.7 ({cite('toolkit', row)})",
                "upgrade it, or remove it and set gpunodes_containerd_source to docker",
            )


def _without_gpus(case: Case) -> None:
    requested = {
        "driver": case.requested.driver,
        "source": case.requested.source,
        "CUDA": ", ".join(case.requested.cuda),
        "cuDNN": case.requested.cudnn,
    }
    case.explain("CPU node", "no NVIDIA GPU is on the PCI bus")
    for what, value in requested.items():
        if value:
            case.warnings.append(f"no NVIDIA GPU is on the PCI bus: the requested {what} {value} has no effect")
    if (case.gpu.get("driver") or {}).get("loaded"):
        case.warnings.append("the NVIDIA driver is loaded, but no GPU is on the PCI bus: a GPU may have failed")
    _warn_of_passthrough(case)


def _warn_of_passthrough(case: Case) -> None:
    addresses = [
        function["address"]
        for function in case.gpu.get("functions") or ()
        if is_gpu(function) and function.get("driver") == "vfio-pci"
    ]
    if addresses:
        case.warnings.append(f"GPUs bound to vfio-pci (for virtual machines) are ignored: {', '.join(addresses)}")


def _with_gpus(case: Case, feature_gates: Mapping[str, bool], *, cri_dockerd: bool) -> Plan:
    _warn_of_passthrough(case)
    case.conflicts += _unknown(case.requested)
    flavours = _flavours(case)
    _limits(case)
    if case.requested.cudnn:
        software.cudnn_limits(case)
    cudas = software.requested_cudas(case)
    if case.requested.source == Source.EXISTING:
        return _with_existing_driver(case, cudas, feature_gates, cri_dockerd=cri_dockerd)
    offer, branch, flavour = drivers.choose(case, flavours, cudas)
    if offer is None or flavour is None:
        software.headers(case, signed=False)
        return Plan(case.machine)
    _warn_of_unknown(case, branch, flavour)
    gpu_mig.judge(case, branch)
    gpu_serving.judge(case)
    packages = [
        *software.headers(case, signed=offer["signed"]),
        *software.driver(case, offer, branch, flavour),
        *software.fabric_manager(case, offer, branch, flavour),
        *software.cuda(case, offer, branch),
        *software.container_toolkit(case),
    ]
    software.check_sources(case, packages)
    nouveau = case.gpu.get("nouveau") or "available"
    if nouveau != "absent":
        case.explain("nouveau off", f"it is {nouveau}, and blocks the GPUs if it is loaded first")
    case.explain("persistence on", "without it, the driver deinitialises idle GPUs")
    return replace(
        _for_gpus(case, feature_gates, cri_dockerd=cri_dockerd),
        flavour=flavour,
        branch=branch,
        source=Source(offer["source_of"]),
        packages=tuple(packages),
        module_stream=fill(offer["module_stream"][flavour.value], branch, case.facts),
        hold=(*offer["hold"], *tables.read("toolkit")["packages"]["names"]),
        blacklist_nouveau=nouveau != "absent",
        fabric_manager=any(package.group is Group.FABRIC_MANAGER for package in packages),
        persistence=True,
        reboot_needed=reboot(case, branch, flavour, nouveau),
    )


def _with_existing_driver(
    case: Case, cudas: Sequence[tuple[str, Row]], feature_gates: Mapping[str, bool], *, cri_dockerd: bool
) -> Plan:
    branch, flavour = existing.judge(case, cudas)
    if branch:
        gpu_mig.judge(case, branch)
    gpu_serving.judge(case)
    packages = [*existing.cuda(case, branch, cudas), *software.container_toolkit(case)] if branch else []
    software.check_sources(case, packages)
    return replace(
        _for_gpus(case, feature_gates, cri_dockerd=cri_dockerd),
        flavour=flavour,
        branch=branch,
        source=Source.EXISTING,
        packages=tuple(packages),
        hold=tuple(tables.read("toolkit")["packages"]["names"]),
    )


def _for_gpus(case: Case, feature_gates: Mapping[str, bool], *, cri_dockerd: bool) -> Plan:
    """The plan without its driver: GPUs, runtime, and how pods get the GPUs."""
    return Plan(
        case.machine,
        gpus=case.gpus,
        expected=bool(expected_gpus(case.facts)),
        generations=tuple(row["name"] for row in case.generations),
        runtime=case.requested.runtime,
        cri_dockerd=cri_dockerd,
        gates=feature_gates,
        sharing=case.requested.sharing,
        serving=case.requested.serving,
        labels=_labels(case),
    )


def _flavours(case: Case) -> list[Flavour]:
    """The kernel modules that support all GPUs, the preferred ones first."""
    common = [
        Flavour(name)
        for name in case.generations[-1]["modules"]
        if all(name in row["modules"] for row in case.generations)
    ]
    if not common:
        case.refuse(
            f"{case.named('open')} need the open modules, {case.named('proprietary')} the proprietary modules",
            "GPUs that one driver supports: a machine can have only one driver",
            "put them into different machines",
        )
    return common


def _warn_of_unknown(case: Case, branch: str, flavour: Flavour) -> None:
    """Warn of GPUs that are newer than the table, with the driver that was chosen for them."""
    ids = ", ".join(gpu.device for gpu in case.gpus if gpu.generation == "newer")
    if ids:
        case.warnings.append(
            f"PCI device {ids} is newer than gpunodes' table of GPUs: it gets driver {branch} with {flavour} modules,"
            " untested" + ("" if branch == branches()[-1] else f"; the newest in the table is {branches()[-1]}")
        )


def _limits(case: Case) -> None:
    if case.system is None:
        return
    for row in case.generations:
        if row["last"] and branches() and number(row["last"]) < number(branches()[0]):
            case.refuse(
                f"no driver after {row['last']} supports {row['title']} GPUs ({case.products(row)})",
                f"GPUs for driver {branches()[0]} or newer, the oldest that gpunodes installs ({cite('drivers', row)})",
                "take them out of the machine",
            )


def _labels(case: Case) -> dict[str, str]:
    """Labels that are known without a driver; with several products, the label names the first."""
    first = case.gpus[0]
    return {
        devices.PLUGIN: "true",
        devices.COUNT: str(len(case.gpus)),
        "gpunodes.dev/gpu-generation": first.generation,
        "gpunodes.dev/gpu-product": re.sub(r"[^A-Za-z0-9_.-]+", "-", first.product).strip("-_.")[:63],
    }


def taints(settings: Mapping[str, Any], *, gpus: bool) -> list[dict[str, str]]:
    """The taints of a machine's node by its settings; ``gpus``: whether the machine has some."""
    made = [dict(taint) for taint in settings["gpunodes_node_taints"]]
    if settings["gpunodes_gpu_taint"] and gpus:
        made.append({"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"})
    return made
