"""Which driver: source, branch and modules that serve all GPUs and wishes; what becomes of one that is there."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence

from gpunodes.planner import gpu_packages as software
from gpunodes.planner import tables
from gpunodes.planner.gates import Conflict
from gpunodes.planner.gpu_case import Case, Row, branches, cite, installed_driver, number, version_of
from gpunodes.planner.gpu_model import SOURCES, Flavour, Source


def choose(
    case: Case, flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]
) -> tuple[Row | None, str, Flavour | None]:
    """Which offer, branch and modules; a conflict for each limit that is broken."""
    request = case.requested
    if request.source and request.source not in {Source.NVIDIA, Source.DISTRIBUTION}:
        case.refuse(f"drivers from {request.source!r} are wished", "nvidia or distribution", "correct the setting")
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
            f"no NVIDIA driver is known for {case.system or 'this system'} on {case.facts.get('arch')}"
            + (f" from {request.source}" if request.source else ""),
            "a system that has one",
            "choose another gpunodes_driver_source, or install another system",
        )
        return None, "", None
    choices = list(_choices(case, offers, flavours, cudas))
    installed = _installed(case)
    _judge_installed(case, installed, choices)
    if not choices:
        _no_choice(case, offers, flavours, cudas)
        return None, "", None
    trusted = [choice for choice in choices if _boots(case, choice[0])]
    if not trusted:
        case.refuse(
            "Secure Boot is on, and the key that DKMS signs modules with is not enrolled",
            "modules that the firmware's keys vouch for",
            "enrol it (`mokutil --import /var/lib/dkms/mok.pub`, then confirm at the console while booting),"
            " switch Secure Boot off in the firmware, or take Ubuntu's signed modules"
            " (gpunodes_driver_source: distribution)",
        )
        return None, "", None
    offer, branch, flavour = _best(case, trusted, installed)
    _judge_life(case, branch)
    return offer, branch, flavour


def _choices(
    case: Case, offers: Sequence[Row], flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]
) -> Iterator[tuple[Row, str, Flavour]]:
    """All that would do what is wished."""
    for choice in _fitting(case, offers, flavours, cudas):
        if case.requested.driver in {"", choice[1]} and (
            not case.requested.cudnn or software.cudnn_row(case, *choice[:2])
        ):
            yield choice


def _fitting(
    case: Case, offers: Sequence[Row], flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]
) -> Iterator[tuple[Row, str, Flavour]]:
    """All that drives the GPUs and serves ``cudas``: the better modules first, then in the table's order."""
    for flavour in flavours:
        for offer in offers:
            for branch in offer["branches"]:
                if (
                    offer[flavour.value]
                    and not _unbuilt(case, offer, branch, flavour)
                    and not any(_broken(case, branch, cudas))
                    and all(software.cuda_row(case, offer, version) for version, _ in cudas)
                    and (not case.switched() or offer["fabric_manager"])
                ):
                    yield offer, branch, flavour


def _unbuilt(case: Case, offer: Row, branch: str, flavour: Flavour) -> Row | None:
    """The row that says why these modules do not build for the machine's kernel; None where they do, or need not."""
    driver = case.gpu.get("driver") or {}
    built = str(driver.get("module") or "").partition(".")[0] == branch and driver.get("flavour") in {None, flavour}
    if offer["signed"] or built:
        return None
    kernel = version_of(case.kernel())
    rows: Sequence[Row] = tables.read("drivers")["unbuilt"]
    fitting = (
        row
        for row in rows
        if case.system in row["systems"]
        and branch in row["branches"]
        and flavour.value in row["modules"]
        and version_of(row["from"]) <= kernel
        and (not row["before"] or kernel < version_of(row["before"]))
    )
    return next(fitting, None)


def _broken(case: Case, branch: str, cudas: Sequence[tuple[str, Row]]) -> Iterator[Conflict]:
    """The limits of GPUs and CUDA that a branch breaks."""
    requested = f"the driver branch {branch} is wished"
    for row in case.generations:
        who = f"{row['title']} GPUs ({case.products(row)})"
        if row["last"] and number(branch) > number(row["last"]):
            yield Conflict(
                f"{requested}, for {who}",
                f"{row['last']}, the last branch for them ({cite('drivers', row)})",
                f"wish for {row['last']} or older, or for none",
            )
        if row["first"] and number(branch) < number(row["first"]):
            yield Conflict(
                f"{requested}, for {who}",
                f"{row['first']}, the first branch for them ({cite('drivers', row)})",
                f"wish for {row['first']} or newer, or for none",
            )
    for version, row in cudas:
        if number(branch) < number(row["least_driver"]):
            yield Conflict(
                f"{requested}, and CUDA {version}",
                f"{row['least_driver']} or newer for CUDA {version} ({cite('cuda', row)})",
                f"wish for the branch {row['least_driver']} or newer, or for an older CUDA",
            )


def _judge_branch(case: Case, branch: str, cudas: Sequence[tuple[str, Row]]) -> None:
    case.conflicts += _broken(case, branch, cudas)


def _judge_life(case: Case, branch: str) -> None:
    row = next(row for row in tables.read("drivers")["branch"] if row["name"] == branch)
    if row["ends"] < case.month():
        case.warnings.append(f"support of the driver branch {branch} ended in {row['ends']}")


def _no_choice(
    case: Case, offers: Sequence[Row], flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]
) -> None:
    """Say why no offer does, as far as it has not been said."""
    system = case.system
    if case.requested.driver in branches() and not any(case.requested.driver in offer["branches"] for offer in offers):
        has = ", ".join(dict.fromkeys(branch for offer in offers for branch in offer["branches"]))
        case.refuse(
            f"the driver branch {case.requested.driver} is wished, which {case.where()} has not for {system}",
            f"one of {has}",
            "choose one of these, or another gpunodes_driver_source",
        )
    for version, _ in cudas:
        if not any(software.cuda_row(case, offer, version) for offer in offers):
            case.refuse(
                f"CUDA {version} is wished, which {case.where()} has not for {system}",
                software.cudas_of(case, offers),
                "choose one of these, or another gpunodes_driver_source",
            )
    if case.switched() and not any(offer["fabric_manager"] for offer in offers):
        case.refuse(
            f"it has NVSwitches, and {case.where()} has no Fabric Manager for {system}",
            "Fabric Manager of exactly the driver's version",
            "take the driver from NVIDIA (gpunodes_driver_source: nvidia)",
        )
    kernel_said = _judge_kernel(case, offers, flavours)
    fitting = [choice for choice in _fitting(case, offers, flavours, cudas) if case.requested.driver in {"", choice[1]}]
    if (
        software.knows_cudnn(case.requested.cudnn)
        and fitting
        and not any(software.cudnn_row(case, *choice[:2]) for choice in fitting)
    ):
        installed_driver = [
            f"{row['version']} for CUDA {row['cuda']} from {row['source_of']}"
            for row in tables.read("cuda")["cudnn"]
            if any(row["source_of"] == choice[0]["source_of"] for choice in fitting)
            and (not row["systems"] or system in row["systems"])
        ]
        majors = software.cuda_majors(case)
        case.refuse(
            f"cuDNN {case.requested.cudnn} is wished" + (f", with CUDA {majors[-1]}" if majors else ""),
            f"one that there is for {system}: {', '.join(installed_driver) or 'none'}",
            "choose one of these, or another gpunodes_driver_source, or take the wish out",
        )
    if _conflicting_requests(case, offers, flavours, cudas):
        return
    alone = any(_fitting(case, offers, flavours, ()))
    if flavours and not kernel_said and (not alone or not case.conflicts):
        needs = " and ".join(
            f"{row['title']} ({' or '.join(row['modules'])} modules, branch {row['first'] or '...'} to"
            f" {row['last'] or '...'})"
            for row in case.generations
        )
        has = ", ".join(dict.fromkeys(branch for offer in offers for branch in offer["branches"]))
        asked = [f"CUDA {version}" for version, _ in cudas if alone] + (["NVSwitches"] if case.switched() else [])
        beside = f" with {', '.join(asked)}" if asked else ""
        systems = ", ".join(_elsewhere(case, flavours, cudas if alone else ()))
        case.refuse(
            f"none of the drivers that {case.where()} has for {system} ({has}) serves {needs}{beside}",
            "one that serves all GPUs and wishes",
            f"install {systems}: there is one for it" if systems else "separate the GPUs, or take wishes out",
        )


def _conflicting_requests(
    case: Case, offers: Sequence[Row], flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]
) -> bool:
    """Report a driver and a CUDA that are available, but not from one source; whether that is so."""
    driver = case.requested.driver
    branches_for = sorted({branch for _, branch, _ in _fitting(case, offers, flavours, cudas)}, key=number)
    available = any(branch == driver for _, branch, _ in _fitting(case, offers, flavours, ()))
    if not (cudas and branches_for and available) or driver in branches_for or any(_broken(case, driver, cudas)):
        return False
    named = " and ".join(version for version, _ in cudas)
    case.refuse(
        f"driver {driver} and CUDA {named} are requested, and no source has both for {case.system}",
        f"a driver that comes with CUDA {named}: {', '.join(branches_for)}",
        "drop one of the two requests, or choose one of these drivers",
    )
    return True


def _judge_kernel(case: Case, offers: Sequence[Row], flavours: Sequence[Flavour]) -> bool:
    """Say it of each branch that would drive the GPUs, were it not for the kernel; whether there was one."""
    message = set()
    for offer, flavour in itertools.product(offers, flavours):
        for branch in offer["branches"]:
            row = _unbuilt(case, offer, branch, flavour)
            if (
                not row
                or branch in message
                or case.requested.driver not in {"", branch}
                or any(_broken(case, branch, ()))
            ):
                continue
            message.add(branch)
            case.refuse(
                f"the {flavour} modules of the driver branch {branch} from {SOURCES[offer['source_of']]} do not build"
                f" for the kernel {case.kernel()}: {row['why']}",
                f"a kernel before {row['from']}, or a driver that knows this one ({cite('drivers', row)})",
                "choose another gpunodes_driver_source or gpunodes_driver_branch, or boot an older kernel",
            )
    return bool(message)


def _elsewhere(case: Case, flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]) -> list[str]:
    """The systems on which this machine could have what is wished."""
    found = []
    for system in dict.fromkeys(name for offer in tables.read("drivers")["offer"] for name in offer["systems"]):
        other = copy.copy(case)
        other.system = system
        # It would have another kernel there.
        other.facts = {**case.facts, "kernel": ""}
        offers = [
            offer
            for offer in tables.read("drivers")["offer"]
            if system in offer["systems"] and case.facts.get("arch") in offer["architectures"]
        ]
        if any(_fitting(other, offers, flavours, cudas)):
            found.append(system)
    return found


def _best(
    case: Case, choices: Sequence[tuple[Row, str, Flavour]], installed: tuple[Source, str, Flavour | None] | None
) -> tuple[Row, str, Flavour]:
    """What is installed where it does; else the better modules, the recommended branch, else the newest alive."""
    if installed:
        source, branch, modules = installed
        for choice in choices:
            if (choice[0]["source_of"], choice[1]) == (source, branch) and choice[2] in {modules or choice[2]}:
                case.say(f"driver branch {branch}", f"{branch} from {source} is installed, and does what is wished")
                _say_modules(case, *choice)
                return choice
    better = [choice for choice in choices if choice[2] is choices[0][2]]
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

    best = max(better, key=rank)
    if case.requested.driver:
        why = "it is wished"
    elif best[1] == recommended:
        why = "long-term support, and it fits the GPUs"
    elif newest:
        why = "the newest that is supported: it is the likeliest to know these GPUs"
    else:
        why = "of those that fit the GPUs, it is supported longest"
    row = next(row for row in tables.read("drivers")["branch"] if row["name"] == best[1])
    case.say(f"driver branch {best[1]}", why, cite("drivers", row))
    if case.requested.source:
        case.say(f"driver from {case.requested.source}", "it is wished")
    if best[0]["signed"]:
        case.say("signed modules", "Secure Boot is on, and the distribution signs these", cite("drivers", best[0]))
    _say_modules(case, *best)
    return best


def _say_modules(case: Case, offer: Row, branch: str, flavour: Flavour) -> None:
    for row in case.generations:
        only = len(row["modules"]) == 1
        why = f"{row['title']} takes {'these only' if only else 'either, the open ones are recommended'}"
        case.say(f"{flavour} kernel modules", why, cite("drivers", row))
    if flavour is not Flavour.OPEN and (row := _unbuilt(case, offer, branch, Flavour.OPEN)):
        why = f"those of {branch} do not build for the kernel {case.kernel()}: {row['why']}"
        case.say("no open kernel modules", why, cite("drivers", row))


def _boots(case: Case, offer: Row) -> bool:
    mok = case.gpu.get("mok") or {}
    return not case.gpu.get("secure_boot") or bool(offer["signed"] or mok.get("enrolled"))


def _installed(case: Case) -> tuple[Source, str, Flavour | None] | None:
    """Source, branch and modules of a driver that packages brought, if there is one."""
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
            origin = {"runfile": "by NVIDIA's .run installer"}.get(driver.get("origin") or "", "by something unknown")
            remedy = (
                "`nvidia-uninstall`, then reboot" if driver.get("origin") == "runfile" else "remove it, then reboot"
            )
            case.refuse(
                f"the driver {installed_driver(driver)} was installed {origin}",
                "a driver from packages, or none: two would overwrite each other's files",
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
    who = f"{clients} processes use it" if clients else "pods may use it"
    requested = {choice[0]["source_of"] for choice in choices}
    known = f"the driver {installed_driver(driver)} ({modules or 'unknown'} modules, from {source}) is installed"
    if used:
        case.refuse(
            f"{known}, and {who}",
            "a driver that does what is wished, or one that nobody uses: none is replaced under running pods",
            f"drain the node, `gpunodes gpu remove {case.machine}`, and run again; or take the wish out",
        )
    elif source not in requested:
        case.refuse(
            known,
            f"one from {' or '.join(sorted(requested))}: packages of two sources overwrite each other",
            f"`gpunodes gpu remove {case.machine}`, or set gpunodes_driver_source to {source}",
        )
    else:
        case.warnings.append(f"{known}: it will be replaced, since it does not do what is wished")


def reboot(case: Case, branch: str, flavour: Flavour, nouveau: str) -> str | None:
    """Why the machine must be rebooted after the installation, or None."""
    driver = case.gpu.get("driver") or {}
    if nouveau == "loaded":
        return "nouveau is loaded, and holds the GPUs until the next boot"
    loaded = str(driver.get("module") or "")
    if driver.get("loaded") and (
        loaded.partition(".")[0] != branch or driver.get("flavour") not in {None, flavour.value}
    ):
        return f"the module {loaded} is loaded, and stays until the next boot"
    return None
