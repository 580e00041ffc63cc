"""Chooses the driver: source, branch and modules for all GPUs and requested versions; judges an installed driver."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence

from gpunodes.ansible.module_utils.gpunodes.problem import Problem
from gpunodes.planner import gpu_packages as software
from gpunodes.planner import tables
from gpunodes.planner.gpu_case import Case, Row, branches, cite, installed_driver, number, title_of, version_of
from gpunodes.planner.gpu_model import SOURCES, Flavour, Source


def choose(
    case: Case, flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]
) -> tuple[Row | None, str, Flavour | None]:
    """The offer, branch and modules to install; adds a conflict for each limit that the request breaks."""
    request = case.requested
    if request.source and request.source not in {Source.NVIDIA, Source.DISTRIBUTION}:
        case.refuse(
            f"the driver source {request.source!r} is unknown",
            "nvidia or distribution",
            "correct gpunodes_driver_source",
        )
    if request.driver in branches():
        _judge_branch(case, request.driver, cudas)
    offers = [
        offer
        for offer in tables.read("drivers")["offer"]
        if case.system in offer["systems"] and case.facts.get("arch") in offer["architectures"]
    ]
    if request.source:
        offers = [offer for offer in offers if offer["source_of"] == request.source]
    if not offers:
        case.refuse(
            f"no NVIDIA driver is available {case.for_system()} on {case.facts.get('arch')}",
            "a system with an available driver",
            "choose another gpunodes_driver_source, or install another system",
        )
        return None, "", None
    choices = list(_choices(case, offers, flavours, cudas))
    installed = _installed(case)
    _judge_installed(case, installed, choices)
    if not choices:
        _explain_no_choice(case, offers, flavours, cudas)
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
    for choice in _compatible(case, offers, flavours, cudas):
        if case.requested.driver in {"", choice[1]} and (
            not case.requested.cudnn or software.cudnn_row(case, *choice[:2])
        ):
            yield choice


def _compatible(
    case: Case, offers: Sequence[Row], flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]
) -> Iterator[tuple[Row, str, Flavour]]:
    """All choices that support the GPUs and ``cudas``: the preferred modules first, then in the table's order."""
    for flavour in flavours:
        for offer in offers:
            for branch in offer["branches"]:
                if (
                    offer[flavour.value]
                    and not _unbuilt(case, offer, branch, flavour)
                    and not any(_broken_limits(case, branch, cudas))
                    and all(software.cuda_row(case, offer, version) for version, _ in cudas)
                    and (not case.switched() or offer["fabric_manager"])
                ):
                    yield offer, branch, flavour


def _unbuilt(case: Case, offer: Row, branch: str, flavour: Flavour) -> Row | None:
    """The row with the reason why these modules do not build for the machine's kernel, None if there is none."""
    driver = case.gpu.get("driver") or {}
    built = str(driver.get("module") or "").partition(".")[0] == branch and driver.get("flavour") in {None, flavour}
    if offer["signed"] or built:
        return None
    kernel = version_of(case.kernel())
    rows: Sequence[Row] = tables.read("drivers")["unbuilt"]
    matching = (
        row
        for row in rows
        if case.system in row["systems"]
        and branch in row["branches"]
        and flavour.value in row["modules"]
        and version_of(row["from"]) <= kernel
        and (not row["before"] or kernel < version_of(row["before"]))
    )
    return next(matching, None)


def _broken_limits(case: Case, branch: str, cudas: Sequence[tuple[str, Row]]) -> Iterator[Problem]:
    """The limits of GPUs and CUDA that a branch breaks."""
    for row in case.generations:
        fact = f"driver {branch} does not support {row['title']} GPUs ({case.products(row)})"
        if row["last"] and number(branch) > number(row["last"]):
            yield Problem(
                fact,
                f"{row['last']}, the last branch for these GPUs ({cite('drivers', row)})",
                f"request {row['last']} or older, or no branch",
            )
        if row["first"] and number(branch) < number(row["first"]):
            yield Problem(
                fact,
                f"{row['first']}, the first branch for these GPUs ({cite('drivers', row)})",
                f"request {row['first']} or newer, or no branch",
            )
    for version, row in cudas:
        if number(branch) < number(row["least_driver"]):
            yield Problem(
                f"driver {branch} is too old for CUDA {version}",
                f"{row['least_driver']} or newer ({cite('cuda', row)})",
                f"request the branch {row['least_driver']} or newer, or an older CUDA version",
            )


def _judge_branch(case: Case, branch: str, cudas: Sequence[tuple[str, Row]]) -> None:
    case.conflicts += _broken_limits(case, branch, cudas)


def _warn_of_ended_support(case: Case, branch: str) -> None:
    row = next(row for row in tables.read("drivers")["branch"] if row["name"] == branch)
    if row["ends"] < case.month():
        case.warnings.append(f"NVIDIA's support for driver {branch} ended in {row['ends']}")


def _explain_no_choice(
    case: Case, offers: Sequence[Row], flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]
) -> None:
    """Add conflicts with the reasons why no offer meets the request, unless they were added before."""
    system = case.system
    if case.requested.driver in branches() and not any(case.requested.driver in offer["branches"] for offer in offers):
        offered = ", ".join(dict.fromkeys(branch for offer in offers for branch in offer["branches"]))
        case.refuse(
            f"driver {case.requested.driver} is not available {case.for_system()}",
            f"one of {offered}",
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
    kernel_refused = _judge_kernel(case, offers, flavours)
    compatible = [
        choice for choice in _compatible(case, offers, flavours, cudas) if case.requested.driver in {"", choice[1]}
    ]
    if (
        software.knows_cudnn(case.requested.cudnn)
        and compatible
        and not any(software.cudnn_row(case, *choice[:2]) for choice in compatible)
    ):
        available = [
            f"{row['version']} for CUDA {row['cuda']} from {SOURCES[row['source_of']]}"
            for row in tables.read("cuda")["cudnn"]
            if any(row["source_of"] == choice[0]["source_of"] for choice in compatible)
            and (not row["systems"] or system in row["systems"])
        ]
        majors = software.cuda_majors(case)
        case.refuse(
            f"cuDNN {case.requested.cudnn}{f' for CUDA {majors[-1]}' if majors else ''} is not available for"
            f" {title_of(system)}",
            f"cuDNN {', '.join(available)}" if available else "no cuDNN: none is available",
            "choose one of these, or another gpunodes_driver_source, or do not request cuDNN",
        )
    if _conflicting_requests(case, offers, flavours, cudas):
        return
    without_cuda = any(_compatible(case, offers, flavours, ()))
    if flavours and not kernel_refused and (not without_cuda or not case.conflicts):
        needs = " and ".join(
            f"{row['title']} GPUs ({' or '.join(row['modules'])} modules{_range(row)})" for row in case.generations
        )
        offered = ", ".join(dict.fromkeys(branch for offer in offers for branch in offer["branches"]))
        extras = [f"CUDA {version}" for version, _ in cudas if without_cuda] + (
            ["NVSwitches"] if case.switched() else []
        )
        systems = " or ".join(map(title_of, _systems_with_driver(case, flavours, cudas if without_cuda else ())))
        case.refuse(
            f"no driver that is available {case.for_system()} ({offered}) supports {needs}"
            + (f" with {', '.join(extras)}" if extras else ""),
            "a driver that supports all GPUs and requested versions",
            f"install {systems}, where one is available" if systems else "separate the GPUs, or request fewer versions",
        )


def _range(generation: Row) -> str:
    """``, branch 570 to 580``: the branches that support a generation; empty for all."""
    first, last = generation["first"], generation["last"]
    if first and last:
        return f", branch {first} to {last}"
    if first or last:
        return f", branch {first} or newer" if first else f", branch {last} or older"
    return ""


def _conflicting_requests(
    case: Case, offers: Sequence[Row], flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]
) -> bool:
    """Report a driver and a CUDA that are available, but not from one source; whether that is so."""
    driver = case.requested.driver
    branches_for = sorted({branch for _, branch, _ in _compatible(case, offers, flavours, cudas)}, key=number)
    available = any(branch == driver for _, branch, _ in _compatible(case, offers, flavours, ()))
    if not (cudas and branches_for and available) or driver in branches_for or any(_broken_limits(case, driver, cudas)):
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
            row = _unbuilt(case, offer, branch, flavour)
            if (
                not row
                or branch in refused
                or case.requested.driver not in {"", branch}
                or any(_broken_limits(case, branch, ()))
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


def _systems_with_driver(case: Case, flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]) -> list[str]:
    """The systems on which this machine could get the requested software."""
    found = []
    for system in dict.fromkeys(name for offer in tables.read("drivers")["offer"] for name in offer["systems"]):
        other = copy.copy(case)
        other.system = system
        # That system has another kernel.
        other.facts = {**case.facts, "kernel": ""}
        offers = [
            offer
            for offer in tables.read("drivers")["offer"]
            if system in offer["systems"] and case.facts.get("arch") in offer["architectures"]
        ]
        if any(_compatible(other, offers, flavours, cudas)):
            found.append(system)
    return found


def _best(
    case: Case, choices: Sequence[tuple[Row, str, Flavour]], installed: tuple[Source, str, Flavour | None] | None
) -> tuple[Row, str, Flavour]:
    """The installed driver if it meets the request; else the preferred modules with the recommended branch, or with
    the newest supported one."""
    if installed:
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
    if flavour is not Flavour.OPEN and (row := _unbuilt(case, offer, branch, Flavour.OPEN)):
        why = f"the open modules of driver {branch} do not build for the kernel {case.kernel()}: {row['why']}"
        case.explain("no open kernel modules", why, cite("drivers", row))


def _secure_boot_accepts(case: Case, offer: Row) -> bool:
    mok = case.gpu.get("mok") or {}
    return not case.gpu.get("secure_boot") or bool(offer["signed"] or mok.get("enrolled"))


def _installed(case: Case) -> tuple[Source, str, Flavour | None] | None:
    """Source, branch and modules of a driver that was installed from packages, if there is one."""
    driver = case.gpu.get("driver") or {}
    origin = {"nvidia-repository": Source.NVIDIA, "distribution": Source.DISTRIBUTION}.get(driver.get("origin") or "")
    version = installed_driver(driver)
    if not origin or not version:
        return None
    modules = driver.get("flavour")
    return origin, version.partition(".")[0], Flavour(modules) if modules else None


def _judge_installed(
    case: Case,
    installed: tuple[Source, str, Flavour | None] | None,
    choices: Sequence[tuple[Row, str, Flavour]],
) -> None:
    driver = case.gpu.get("driver") or {}
    if installed is None:
        if installed_driver(driver):
            origin = {"runfile": "by NVIDIA's .run installer"}.get(
                driver.get("origin") or "", "by an unknown installer"
            )
            remedy = (
                "`nvidia-uninstall`, then reboot" if driver.get("origin") == "runfile" else "remove it, then reboot"
            )
            case.refuse(
                f"driver {installed_driver(driver)} was installed {origin}",
                "a driver from packages, or no driver: two drivers overwrite each other's files",
                remedy,
            )
        return
    source, branch, modules = installed
    for offer, other, flavour in choices:
        if (offer["source_of"], other) == (source, branch) and modules in {None, flavour}:
            return
    if not choices:
        return
    clients = case.gpu.get("clients")
    in_cluster = bool((case.facts.get("kubernetes") or {}).get("role"))
    used = driver.get("loaded") and (clients or (clients is None and in_cluster))
    users = f"{clients} processes use it" if clients else "pods may use it"
    sources = {choice[0]["source_of"] for choice in choices}
    fact = f"driver {installed_driver(driver)} ({modules or 'unknown'} modules, from {source}) is installed"
    if used:
        case.refuse(
            f"{fact}, and {users}",
            "a driver that meets the request, or one that is not in use: a driver in use is not replaced",
            f"drain the node, run `gpunodes gpu remove {case.machine}`, and try again; or change the request",
        )
    elif source not in sources:
        case.refuse(
            fact,
            f"a driver from {' or '.join(sorted(sources))}: packages of two sources overwrite each other",
            f"run `gpunodes gpu remove {case.machine}`, or set gpunodes_driver_source to {source}",
        )
    else:
        case.warnings.append(f"{fact} and will be replaced, because it does not meet the request")


def reboot(case: Case, branch: str, flavour: Flavour, nouveau: str) -> str | None:
    """Why the machine must be rebooted after the installation, or None."""
    driver = case.gpu.get("driver") or {}
    if nouveau == "loaded":
        return "nouveau is loaded, and blocks the GPUs until the next boot"
    loaded = str(driver.get("module") or "")
    if driver.get("loaded") and (
        loaded.partition(".")[0] != branch or driver.get("flavour") not in {None, flavour.value}
    ):
        return f"the module {loaded} stays loaded until the next boot"
    return None
