"""Cards, systems and requests in combination: no plan breaks a row of the tables, no request is ignored.

Generations of cards, systems, sources, branches and CUDA versions limit each other: every combination of all that the
tables have is planned, and beside them a branch and a version that no table has. cuDNN versions meet every combination
of generation, system and source with a branch, and with a CUDA version. Boot settings, kernels, NVSwitches, runtimes,
feature gates and Kubernetes versions come by pairs: every value of each of them meets every value of each other
dimension. The test checks that all of these meet.

An oracle, independent of the planner, determines from the tables alone whether a plan is possible: the planner must
return a plan in exactly these cases, and each plan is checked against every row again.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.planner import tables
from gpunodes.planner.gpu import Flavour, Group, Plan, RequestedSoftware, plan

# One card of each generation, and the exceptional ones.
CARDS = {
    "C2075": "1096",
    "K10": "118f",
    "K80": "102d",
    "M60": "13f2",
    "P100": "15f8",
    "V100": "1db6",
    "T4": "1eb8",
    "A100": "20b2",
    "RTX 4090": "2684",
    "H100": "2330",
    "GH200": "2342",
    "B200": "2901",
    "RTX PRO 6000": "2bb5",
    "B300": "3182",
    "GB300": "31c2",
    "newer": "3500",
}
ARM = {"GH200", "GB300"}
SYSTEMS = [f"{row['id']} {row['version']}" for row in tables.read("systems")["system"]]
LIKE_RHEL = {"rocky 9", "almalinux 9", "centos 9"}
BRANCHES = ["", *(row["name"] for row in tables.read("drivers")["branch"]), "999"]
SOURCES = ["", "nvidia", "distribution"]
CUDAS: list[tuple[str, ...]] = [
    (),
    *((minor,) for row in tables.read("cuda")["cuda"] for minor in row["minors"]),
    ("12.8", "13.0"),
    ("14.9",),
]
CUDNNS = ["", "9", "9.12", "9.10", "9.0", "8"]
BOOTS: list[dict[str, Any]] = [
    {"secure_boot": False},
    {"secure_boot": True},
    {"secure_boot": True, "mok": {"key": "/var/lib/dkms/mok.pub", "enrolled": True}},
]
MIXED = [("P100", "T4"), ("V100", "B200"), ("K80", "H100"), ("T4", "B200"), ("K80", "P100")]
RUNTIMES = ["containerd", "docker"]
# By system; for Debian's older and newer kernels, different modules build.
KERNELS = {
    "debian 12": ["6.1.0-40-amd64", "6.1.0-56-amd64", "6.12.95+deb12-amd64", "6.12.107+deb12-amd64"],
    "debian 13": ["6.12.48+deb13-amd64", "6.12.107+deb13-amd64", "7.3.4+deb13-amd64"],
}
GATES: list[dict[str, bool]] = [{}, {"ResourceHealthStatus": False}]
KUBERNETES = [row["version"] for row in tables.read("kubernetes")["minor"]]
SWITCHES = [0, 6]
REQUESTED: tuple[Sequence[Any], ...] = (SOURCES, BRANCHES, CUDAS, CUDNNS)

Row = Mapping[str, Any]


def machine(cards: tuple[str, ...], system: str, arch: str, switches: int, boot: Row, kernel: str) -> dict[str, Any]:
    """The facts of a machine with these cards and no driver."""
    id_, version = system.split()
    functions = [
        {"address": f"0000:{slot:02x}:00.0", "vendor": "10de", "device": CARDS[card], "class": "030200"}
        for slot, card in enumerate(cards)
    ]
    gpu = {
        "functions": functions,
        "nvswitches": switches,
        "nouveau": "available",
        "mok": {"key": None, "enrolled": False},
        "headers": {"running": True, "package": None},
        "driver": {"module": None, "loaded": False, "origin": None, "packages": {}, "flavour": None},
        **boot,
    }
    return {
        "os": {"id": id_, "version": version},
        "arch": arch,
        "kernel": kernel,
        "time": 1_795_000_000,
        "gpu": gpu,
    }


def rows_of(cards: tuple[str, ...]) -> list[Row]:
    """The generations of cards, from the tables alone."""
    found = []
    for card in cards:
        device = int(CARDS[card], 16)
        product: Row = next((row for row in tables.read("gpus")["product"] if row["device"] == device), {})
        ranges = (row["generation"] for row in tables.read("gpus")["range"] if row["first"] <= device <= row["last"])
        name = product.get("generation") or next(ranges, "newer")
        found.append(next(row for row in tables.read("drivers")["generation"] if row["name"] == name))
    return found


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def cuda_row(version: str) -> Row | None:
    return next((row for row in tables.read("cuda")["cuda"] if version in row["minors"]), None)


def has_cuda(source: str, system: str, version: str) -> bool:
    return any(
        row["source_of"] == source
        and system in row["systems"]
        and number(row["first"]) <= number(version)
        and (not row["last"] or number(version) <= number(row["last"]))
        for row in tables.read("cuda")["toolkit"]
    )


def builds(offer: Row, branch: str, flavour: str, facts: Row) -> bool:
    """Whether a choice's modules are prebuilt, or build for the machine's kernel."""
    kernel = tuple(int(part) for part in re.findall(r"\d+", facts["kernel"]))
    return offer["signed"] or not any(
        f"{facts['os']['id']} {facts['os']['version']}" in row["systems"]
        and branch in row["branches"]
        and flavour in row["modules"]
        and kernel >= tuple(int(part) for part in re.split(r"[.-]", row["from"]))
        and (not row["before"] or kernel < number(row["before"]))
        for row in tables.read("drivers")["unbuilt"]
    )


def drives(offer: Row, branch: str, flavour: str, facts: Row, gens: list[Row]) -> bool:
    """Whether a choice supports all the GPUs."""
    gpu = facts["gpu"]
    switched = gpu["nvswitches"] or any(
        row.get("switched") and any(int(f["device"], 16) == row["device"] for f in gpu["functions"])
        for row in tables.read("gpus")["product"]
    )
    return (
        bool(offer[flavour])
        and builds(offer, branch, flavour, facts)
        and all(flavour in gen["modules"] for gen in gens)
        and all(not gen["last"] or int(branch) <= int(gen["last"]) for gen in gens)
        and all(not gen["first"] or int(branch) >= int(gen["first"]) for gen in gens)
        and (not gpu["secure_boot"] or offer["signed"] or gpu["mok"]["enrolled"])
        and (not switched or bool(offer["fabric_manager"]))
    )


def serves(offer: Row, branch: str, version: str, system: str, gens: list[Row]) -> bool:
    """Whether a choice includes this CUDA version and is new enough for it."""
    row = cuda_row(version)
    return (
        row is not None
        and int(branch) >= int(row["least_driver"])
        and has_cuda(offer["source_of"], system, version)
        and all(not gen["last_cuda"] or number(version) <= number(f"{gen['last_cuda']}.99") for gen in gens)
    )


def cudnn_fits(source: str, system: str, branch: str, requested: RequestedSoftware, gens: list[Row]) -> bool:
    """Whether the source has the requested cuDNN, for the newest requested CUDA or one that driver and GPUs support."""
    request = requested.cudnn
    for gen in gens:
        if gen["last_cudnn"] == "none" and number(request) >= (9,):
            return False
        if gen["last_cudnn"] not in {"", "none"} and "." in request and number(request) > number(gen["last_cudnn"]):
            return False
    majors = {
        row["cuda"]
        for row in tables.read("cuda")["cudnn"]
        if row["source_of"] == source
        and (not row["systems"] or system in row["systems"])
        and all(left == right for left, right in zip(number(request), number(row["version"]), strict=False))
    }
    if requested.cuda:
        return max((version.split(".")[0] for version in requested.cuda), key=int) in majors
    return any(
        int(branch) >= int(row["least_driver"])
        and all(not gen["last_cuda"] or int(row["major"]) <= number(gen["last_cuda"])[0] for gen in gens)
        for row in tables.read("cuda")["cuda"]
        if row["major"] in majors
    )


def possible(system: str, facts: Row, requested: RequestedSoftware, gens: list[Row]) -> Iterator[tuple[Row, str, str]]:
    """All possible choices by the tables alone, without regard to cuDNN."""
    for offer in tables.read("drivers")["offer"]:
        if system in offer["systems"] and facts["arch"] in offer["architectures"]:
            for branch, flavour in itertools.product(offer["branches"], Flavour):
                if (
                    requested.source in {"", offer["source_of"]}
                    and requested.driver in {"", branch}
                    and drives(offer, branch, flavour, facts, gens)
                    and all(serves(offer, branch, version, system, gens) for version in requested.cuda)
                ):
                    yield offer, branch, flavour


def hold_against_the_rows(made: Plan, system: str, facts: Row, requested: RequestedSoftware, gens: list[Row]) -> None:
    """Check a plan against every row and every request."""
    assert made.source is not None
    assert made.flavour is not None
    assert requested.driver in {"", made.branch}
    assert requested.source in {"", made.source}
    assert made.runtime == requested.runtime
    assert requested.gates.items() <= made.gates.items()
    choices = [
        offer
        for offer, branch, flavour in possible(system, facts, requested, gens)
        if (offer["source_of"], branch, flavour) == (made.source, made.branch, made.flavour)
    ]
    assert choices
    names = [package.name for package in made.packages]
    assert len(set(names)) == len(names)
    groups = [package.group for package in made.packages]
    assert groups == sorted(groups, key=list(Group).index)
    assert all("{" not in name for name in names)
    assert made.group(Group.DRIVER)
    assert made.hold
    if made.source == "nvidia" and not system.startswith(("rhel", "rocky", "alma", "centos")):
        driver = made.group(Group.DRIVER)[-1]
        assert driver.name.endswith(f"-{made.branch}") == (int(made.branch) < 590)  # renamed at 590
        assert driver.version == f"{made.branch}.*"
    for version in requested.cuda:
        assert any(version.replace(".", "-") in p.name or p.version == f"{version}.*" for p in made.group(Group.CUDA))
    assert len(made.group(Group.CUDA)) == len(requested.cuda)
    assert len(made.group(Group.CUDNN)) == bool(requested.cudnn)
    for package in made.group(Group.CUDNN):
        assert package.version.startswith(requested.cudnn)
        for gen in gens:
            if gen["last_cudnn"] not in {"", "none"}:
                assert number(package.version.removesuffix(".*")) <= number(gen["last_cudnn"])
    if facts["gpu"]["nvswitches"]:
        assert made.fabric_manager
        assert made.group(Group.FABRIC_MANAGER)[0].same_version_as in {p.name for p in made.group(Group.DRIVER)}
    assert len(made.group(Group.TOOLKIT)) == 4
    assert all(reason.why for reason in made.reasons)


@functools.cache
def by_pairs(*sizes: int) -> tuple[tuple[int, ...], ...]:
    """Rows of positions in dimensions of these sizes: few, but with every pair of positions in every two dimensions."""

    def pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(row), 2))

    every = list(itertools.product(*map(range, sizes)))
    missing = set().union(*map(pairs, every))
    rows = []
    while missing:
        rows.append(max(every, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(rows[-1])
    return tuple(rows)


@functools.cache
def requests(rows: tuple[tuple[int, ...], ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Positions in REQUESTED, each with one of ``rows``: every source, branch and CUDA version in combination."""
    sizes = tuple(map(len, REQUESTED))
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for source, branch, cuda in itertools.product(*map(range, sizes[:3])):
        # Neighbours have another cuDNN version, and another row: the checks below say what meets what.
        cudnn = (source + branch - cuda) % sizes[3]
        row = rows[(source * sizes[1] + branch + cuda) % len(rows)]
        found.append(((source, branch, cuda, cudnn), row))
    for others in ((0, 1), (0, 2)):
        met = {tuple(positions[at] for at in (*others, 3)) for positions, _ in found}
        assert len(met) == math.prod(sizes[at] for at in (*others, 3)), "cuDNN did not meet them all"
    met_rows = {(*each, row) for positions, row in found for each in enumerate(positions)}
    assert len(met_rows) == len(rows) * sum(sizes), "a value of the request did not meet a row of the pairs"
    return found


def walk(cards: tuple[str, ...], system: str) -> tuple[int, int]:
    """Try every request for these cards on this system; return the number of plans and of refusals."""
    made = refused = 0
    gens = rows_of(cards)
    arch = "aarch64" if ARM & set(cards) else "x86_64"
    kernels = KERNELS.get(system, ["6.8.0-45-generic"])
    paired: tuple[Sequence[Any], ...] = (RUNTIMES, GATES, SWITCHES, BOOTS, kernels, KUBERNETES)
    for positions, row in requests(by_pairs(*map(len, paired))):
        source, branch, cuda, cudnn = (values[at] for values, at in zip(REQUESTED, positions, strict=True))
        runtime, gates, switches, boot, kernel, kubernetes = (
            values[at] for values, at in zip(paired, row, strict=True)
        )
        facts = machine(cards, system, arch, switches, boot, kernel)
        requested = RequestedSoftware(kubernetes, branch, cuda, cudnn, runtime, source, gates)
        result = plan("gpu-1", facts, requested)
        possible_choices = [
            choice
            for choice in possible(system, facts, requested, gens)
            if not cudnn or cudnn_fits(choice[0]["source_of"], system, choice[1], requested, gens)
        ]
        if isinstance(result, Plan):
            made += 1
            assert possible_choices
            hold_against_the_rows(result, system, facts, requested, gens)
        else:
            refused += 1
            assert not possible_choices, (result, requested)
            assert all(isinstance(each, Problem) and each.found and each.wanted and each.remedy for each in result)
            assert len(set(result)) == len(result)
    return made, refused


@pytest.mark.long
@pytest.mark.parametrize("system", [system for system in SYSTEMS if system not in LIKE_RHEL])
def test_every_card_with_every_request(system: str) -> None:
    counts = {card: walk((card,), system) for card in CARDS}
    assert sum(made for made, _ in counts.values()) > 0
    assert sum(refused for _, refused in counts.values()) > 0


@pytest.mark.long
@pytest.mark.parametrize("cards", MIXED, ids="+".join)
def test_cards_of_two_generations(cards: tuple[str, ...]) -> None:
    for system in ("debian 13", "ubuntu 24.04"):
        walk(cards, system)


def test_every_generation_has_a_card() -> None:
    assert {rows_of((card,))[0]["name"] for card in CARDS} == {
        row["name"] for row in tables.read("drivers")["generation"]
    }


@pytest.mark.parametrize("name", ["gpus", "drivers", "cuda", "toolkit", "gates"])
def test_every_row_names_its_source(name: str) -> None:
    table = tables.read(name)
    rows = [row for value in table.values() if isinstance(value, list) for row in value]
    rows += [value for key, value in table.items() if isinstance(value, dict) and key != "sources"]
    assert rows
    assert {row["source"] for row in rows} <= set(table["sources"])
    assert set(table["sources"]) == {row["source"] for row in rows}


def test_the_systems_of_the_tables_are_supported_and_have_a_key() -> None:
    keys = {system for row in tables.read("sources")["nvidia"]["key"] for system in row["systems"]}
    for table, rows in (("drivers", "offer"), ("cuda", "toolkit")):
        for row in tables.read(table)[rows]:
            assert set(row["systems"]) <= set(SYSTEMS), f"systems.toml lacks a system of {table}.toml"
            assert row["source_of"] != "nvidia" or set(row["systems"]) <= keys, "add NVIDIA's key to sources.toml"


def test_the_rhel_family_has_the_same_rows() -> None:
    """The grid tests only one of them."""
    for table, rows in (("drivers", "offer"), ("cuda", "toolkit")):
        for row in tables.read(table)[rows]:
            assert ("rhel 9" in row["systems"]) == (set(row["systems"]) >= LIKE_RHEL)


def test_ranges_do_not_overlap_and_generations_and_branches_are_known() -> None:
    ranges = sorted((row["first"], row["last"]) for row in tables.read("gpus")["range"])
    assert all(first <= last for first, last in ranges)
    assert all(lower[1] < upper[0] for lower, upper in itertools.pairwise(ranges))
    known = {row["name"] for row in tables.read("drivers")["generation"]}
    assert {row["generation"] for row in tables.read("gpus")["range"]} <= known
    branches = [row["name"] for row in tables.read("drivers")["branch"]]
    assert branches == sorted(branches, key=int)
    offered = {branch for offer in tables.read("drivers")["offer"] for branch in offer["branches"]}
    assert offered == set(branches)
    assert tables.read("drivers")["recommended"] in branches
    assert all(re.fullmatch(r"\d{4}-\d{2}", row["ends"]) for row in tables.read("drivers")["branch"])
