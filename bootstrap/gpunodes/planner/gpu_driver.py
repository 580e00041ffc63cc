"""Chooses the driver: source, branch and modules for all GPUs and requested versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpunodes.planner import gpu_packages as software
from gpunodes.planner import tables
from gpunodes.planner.gpu_case import Case, Row, branches, cite, number
from gpunodes.planner.gpu_installed import installed_from, is_requested, judge_installed
from gpunodes.planner.gpu_model import SOURCES, Flavour, Source
from gpunodes.planner.gpu_offers import broken_limits, compatible, offers_for, unbuilt
from gpunodes.planner.gpu_refusals import explain_no_choice


def choose(
    case: Case, flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]
) -> tuple[Row | None, str, Flavour | None]:
    """The offer, branch and modules to install; adds a conflict for each limit that the request breaks."""
    request = case.requested
    if request.source and request.source not in {Source.NVIDIA, Source.DISTRIBUTION}:
        case.refuse(
            f"the driver source {request.source!r} is unknown",
            "nvidia, distribution or existing",
            "correct gpunodes_driver_source",
        )
    if request.branch in branches():
        case.conflicts += broken_limits(case, request.branch, cudas)
    offers = [offer for offer in offers_for(case, case.system) if request.source in {"", offer["source_of"]}]
    if not offers:
        case.refuse(
            f"no NVIDIA driver is available {case.for_system()} on {case.facts.get('arch')}",
            "a system with an available driver",
            "choose another gpunodes_driver_source, or install another system",
        )
        return None, "", None
    choices = list(_choices(case, offers, flavours, cudas))
    installed = installed_from(case)
    judge_installed(case, installed, choices)
    if not choices:
        explain_no_choice(case, offers, flavours, cudas)
        return None, "", None
    trusted = [choice for choice in choices if _secure_boot_accepts(case, choice[0])]
    if not trusted:
        case.refuse(
            "Secure Boot is on, and DKMS' signing key is not enrolled",
            "modules that are signed with an enrolled key",
            "enrol it (`mokutil --import /var/lib/dkms/mok.pub`, then confirm at the console while booting),"
            " turn Secure Boot off in the firmware, or use Ubuntu's signed modules"
            " (gpunodes_driver_source: distribution)",
        )
        return None, "", None
    offer, branch, flavour = _best(case, trusted, installed)
    _warn_of_ended_support(case, branch)
    return offer, branch, flavour


def _choices(
    case: Case, offers: Sequence[Row], flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]
) -> Iterator[tuple[Row, str, Flavour]]:
    """All choices that meet the request."""
    for choice in compatible(case, offers, flavours, cudas):
        if case.requested.branch in {"", choice[1]} and (
            not case.requested.cudnn or software.cudnn_row(case, *choice[:2])
        ):
            yield choice


def _secure_boot_accepts(case: Case, offer: Row) -> bool:
    mok = case.gpu.get("mok") or {}
    return not case.gpu.get("secure_boot") or bool(offer["signed"] or mok.get("enrolled"))


def _warn_of_ended_support(case: Case, branch: str) -> None:
    row = next(row for row in tables.read("drivers")["branch"] if row["name"] == branch)
    if row["ends"] < case.month():
        case.warnings.append(f"NVIDIA's support for driver {branch} ended in {row['ends']}")


def _best(
    case: Case, choices: Sequence[tuple[Row, str, Flavour]], installed: tuple[Source, str, Flavour | None] | None
) -> tuple[Row, str, Flavour]:
    """The installed driver if it meets the request; else the preferred modules with the recommended branch, or with
    the newest supported one."""
    if installed and is_requested(case):
        source, branch, modules = installed
        for choice in choices:
            if (choice[0]["source_of"], choice[1]) == (source, branch) and choice[2] in {modules or choice[2]}:
                why = f"it is installed from {SOURCES[source]}, and meets the request"
                case.explain(f"driver branch {branch}", why)
                _explain_modules(case, *choice)
                return choice
    preferred = [choice for choice in choices if choice[2] is choices[0][2]]
    newest = any(row["name"] == "newer" for row in case.generations)
    recommended = "" if newest else str(tables.read("drivers")["recommended"])
    ends = {row["name"]: row["ends"] for row in tables.read("drivers")["branch"]}

    def rank(choice: tuple[Row, str, Flavour]) -> tuple[bool, bool, str, int, bool, bool]:
        offer, branch, _ = choice
        return (
            branch == recommended,
            ends[branch] >= case.month(),
            "" if newest else ends[branch],
            number(branch),
            offer["signed"] == bool(case.gpu.get("secure_boot")),
            offer["source_of"] == Source.NVIDIA,
        )

    best = max(preferred, key=rank)
    if case.requested.driver:
        why = "requested"
    elif best[1] == recommended:
        why = "long-term support, and it supports the GPUs"
    elif newest:
        why = "the newest branch with NVIDIA's support: most likely to support these GPUs"
    else:
        why = "of the branches that support the GPUs, the one with the longest support"
    row = next(row for row in tables.read("drivers")["branch"] if row["name"] == best[1])
    case.explain(f"driver branch {best[1]}", why, cite("drivers", row))
    if case.requested.source:
        case.explain(f"driver from {SOURCES[case.requested.source]}", "requested")
    if best[0]["signed"]:
        case.explain(
            "signed modules", "Secure Boot is on, and the distribution signs these modules", cite("drivers", best[0])
        )
    _explain_modules(case, *best)
    return best


def _explain_modules(case: Case, offer: Row, branch: str, flavour: Flavour) -> None:
    for row in case.generations:
        only = len(row["modules"]) == 1
        why = f"{row['title']} GPUs {'need these' if only else 'work with both; NVIDIA recommends the open ones'}"
        case.explain(f"{flavour} kernel modules", why, cite("drivers", row))
    if flavour is not Flavour.OPEN and (row := unbuilt(case, offer, branch, Flavour.OPEN)):
        why = f"the open modules of driver {branch} do not build for the kernel {case.kernel()}: {row['why']}"
        case.explain("no open kernel modules", why, cite("drivers", row))
