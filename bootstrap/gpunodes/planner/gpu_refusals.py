"""Why no driver can be installed: the conflicts that name what is missing, and what to change."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

from gpunodes.planner import gpu_packages as software
from gpunodes.planner import tables
from gpunodes.planner.gpu_case import Case, Row, branches, cite, number, title_of
from gpunodes.planner.gpu_model import SOURCES, Flavour
from gpunodes.planner.gpu_offers import broken_limits, compatible, offers_for, unbuilt


def explain_no_choice(
    case: Case, offers: Sequence[Row], flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]
) -> None:
    """Add conflicts with the reasons why no offer meets the request, unless they were added before."""
    _refuse_unavailable(case, offers, cudas)
    kernel_refused = _judge_kernel(case, offers, flavours)
    _refuse_cudnn(case, offers, flavours, cudas)
    if _conflicting_requests(case, offers, flavours, cudas):
        return
    without_cuda = any(compatible(case, offers, flavours, ()))
    if flavours and not kernel_refused and (not without_cuda or not case.conflicts):
        _refuse_generations(case, offers, flavours, cudas if without_cuda else ())


def _refuse_unavailable(case: Case, offers: Sequence[Row], cudas: Sequence[tuple[str, Row]]) -> None:
    """Refuse a driver branch, a CUDA version and Fabric Manager that no offer has."""
    if case.requested.branch in branches() and not any(case.requested.branch in offer["branches"] for offer in offers):
        case.refuse(
            f"driver {case.requested.driver} is not available {case.for_system()}",
            f"one of {_offered(offers)}",
            "choose one of these, or another gpunodes_driver_source",
        )
    for version, _ in cudas:
        if not any(software.cuda_row(case, offer, version) for offer in offers):
            case.refuse(
                f"CUDA {version} is not available {case.for_system()}",
                software.cudas_of(case, offers),
                "choose one of these, or another gpunodes_driver_source",
            )
    if case.switched() and not any(offer["fabric_manager"] for offer in offers):
        case.refuse(
            f"the machine has NVSwitches, but Fabric Manager is not available {case.for_system()}",
            "Fabric Manager in exactly the driver's version",
            "install the driver from NVIDIA (gpunodes_driver_source: nvidia)",
        )


def _refuse_cudnn(
    case: Case, offers: Sequence[Row], flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]
) -> None:
    """Refuse a cuDNN version that no compatible offer has."""
    choices = [
        choice for choice in compatible(case, offers, flavours, cudas) if case.requested.branch in {"", choice[1]}
    ]
    if (
        not software.knows_cudnn(case.requested.cudnn)
        or not choices
        or any(software.cudnn_row(case, *choice[:2]) for choice in choices)
    ):
        return
    available = [
        f"{row['version']} for CUDA {row['cuda']} from {SOURCES[row['source_of']]}"
        for row in tables.read("cuda")["cudnn"]
        if any(row["source_of"] == choice[0]["source_of"] for choice in choices)
        and (not row["systems"] or case.system in row["systems"])
    ]
    majors = software.cuda_majors(case)
    case.refuse(
        f"cuDNN {case.requested.cudnn}{f' for CUDA {majors[-1]}' if majors else ''} is not available for"
        f" {title_of(case.system)}",
        f"cuDNN {', '.join(available)}" if available else "no cuDNN: none is available",
        "choose one of these, or another gpunodes_driver_source, or do not request cuDNN",
    )


def _refuse_generations(
    case: Case, offers: Sequence[Row], flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]
) -> None:
    """Refuse GPUs, with ``cudas``, that no offered driver supports together."""
    needs = " and ".join(
        f"{row['title']} GPUs ({' or '.join(row['modules'])} modules{_range(row)})" for row in case.generations
    )
    extras = [f"CUDA {version}" for version, _ in cudas] + (["NVSwitches"] if case.switched() else [])
    systems = " or ".join(map(title_of, _systems_with_driver(case, flavours, cudas)))
    case.refuse(
        f"no driver that is available {case.for_system()} ({_offered(offers)}) supports {needs}"
        + (f" with {', '.join(extras)}" if extras else ""),
        "a driver that supports all GPUs and requested versions",
        f"install {systems}, where one is available" if systems else "separate the GPUs, or request fewer versions",
    )


def _offered(offers: Sequence[Row]) -> str:
    """The branches of all offers, in the table's order."""
    return ", ".join(dict.fromkeys(branch for offer in offers for branch in offer["branches"]))


def _conflicting_requests(
    case: Case, offers: Sequence[Row], flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]
) -> bool:
    """Report a driver and a CUDA that are available, but not from one source; whether that is so."""
    driver = case.requested.branch
    branches_for = sorted({branch for _, branch, _ in compatible(case, offers, flavours, cudas)}, key=number)
    available = any(branch == driver for _, branch, _ in compatible(case, offers, flavours, ()))
    if not (cudas and branches_for and available) or driver in branches_for or any(broken_limits(case, driver, cudas)):
        return False
    named = " and ".join(version for version, _ in cudas)
    case.refuse(
        f"driver {driver} and CUDA {named} are requested, and no source has both {case.for_system()}",
        f"a driver that comes with CUDA {named}: {', '.join(branches_for)}",
        "drop one of the two requests, or choose one of these drivers",
    )
    return True


def _judge_kernel(case: Case, offers: Sequence[Row], flavours: Sequence[Flavour]) -> bool:
    """Refuse each branch whose modules support the GPUs but do not build for the kernel; whether there is one."""
    refused = set()
    for offer, flavour in itertools.product(offers, flavours):
        for branch in offer["branches"]:
            row = unbuilt(case, offer, branch, flavour)
            if (
                not row
                or branch in refused
                or case.requested.branch not in {"", branch}
                or any(broken_limits(case, branch, ()))
            ):
                continue
            refused.add(branch)
            case.refuse(
                f"the {flavour} modules of driver {branch} from {SOURCES[offer['source_of']]} do not build"
                f" for the kernel {case.kernel()}: {row['why']}",
                f"a kernel before {row['from']}, or a driver that supports this kernel ({cite('drivers', row)})",
                "choose another gpunodes_driver_source or gpunodes_driver_branch, or boot an older kernel",
            )
    return bool(refused)


def _range(generation: Row) -> str:
    """``, branch 570 to 580``: the branches that support a generation; empty for all."""
    first, last = generation["first"], generation["last"]
    if first and last:
        return f", branch {first} to {last}"
    if first or last:
        return f", branch {first} or newer" if first else f", branch {last} or older"
    return ""


def _systems_with_driver(case: Case, flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]) -> list[str]:
    """The systems on which this machine could get the requested software."""
    found = []
    for system in dict.fromkeys(name for offer in tables.read("drivers")["offer"] for name in offer["systems"]):
        other = copy.copy(case)
        other.system = system
        # That system has another kernel.
        other.facts = {**case.facts, "kernel": ""}
        if any(compatible(other, offers_for(case, system), flavours, cudas)):
            found.append(system)
    return found
