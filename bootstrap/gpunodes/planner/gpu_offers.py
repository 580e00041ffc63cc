"""Which offered drivers are compatible with a machine's GPUs, its kernel and the requested CUDA versions."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.planner import gpu_packages as software
from gpunodes.planner import tables
from gpunodes.planner.gpu_case import Case, Row, cite, number, version_of
from gpunodes.planner.gpu_model import Flavour


def offers_for(case: Case, system: str | None) -> list[Row]:
    """The offers of drivers on a system, for the machine's architecture."""
    return [
        offer
        for offer in tables.read("drivers")["offer"]
        if system in offer["systems"] and case.facts.get("arch") in offer["architectures"]
    ]


def compatible(
    case: Case, offers: Sequence[Row], flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]
) -> Iterator[tuple[Row, str, Flavour]]:
    """All choices that support the GPUs and ``cudas``: the preferred modules first, then in the table's order."""
    switched = case.switched()
    keeps_limits = functools.cache(lambda branch: not any(broken_limits(case, branch, cudas)))
    for flavour in flavours:
        for offer in offers:
            if not offer[flavour.value] or (switched and not offer["fabric_manager"]):
                continue
            for branch in offer["branches"]:
                if (
                    keeps_limits(branch)
                    and not unbuilt(case, offer, branch, flavour)
                    and all(software.cuda_row(case, offer, version) for version, _ in cudas)
                ):
                    yield offer, branch, flavour


def unbuilt(case: Case, offer: Row, branch: str, flavour: Flavour) -> Row | None:
    """The row with the reason why these modules do not build for the machine's kernel, None if there is none."""
    driver = case.gpu.get("driver") or {}
    built = str(driver.get("module") or "").partition(".")[0] == branch and driver.get("flavour") in {None, flavour}
    return None if offer["signed"] or built else unbuilt_for(case, branch, flavour, case.kernel())


def unbuilt_for(case: Case, branch: str, flavour: Flavour, release: str) -> Row | None:
    """The same for any kernel, of modules that are built on the machine."""
    rows: Sequence[Row] = tables.read("drivers")["unbuilt"]
    matching = (
        row
        for row in rows
        if case.system in row["systems"]
        and branch in row["branches"]
        and flavour.value in row["modules"]
        and version_of(row["from"]) <= version_of(release)
        and (not row["before"] or version_of(release) < version_of(row["before"]))
    )
    return next(matching, None)


def broken_limits(case: Case, branch: str, cudas: Sequence[tuple[str, Row]]) -> Iterator[Problem]:
    """The limits of GPUs and CUDA that a branch breaks."""
    for row in case.generations:
        if row["last"] and number(branch) > number(row["last"]):
            yield Problem(
                _unsupported(case, branch, row),
                f"{row['last']}, the last branch for these GPUs ({cite('drivers', row)})",
                f"request {row['last']} or older, or no branch",
            )
        if row["first"] and number(branch) < number(row["first"]):
            yield Problem(
                _unsupported(case, branch, row),
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


def _unsupported(case: Case, branch: str, row: Row) -> str:
    return f"driver {branch} does not support {row['title']} GPUs ({case.products(row)})"
