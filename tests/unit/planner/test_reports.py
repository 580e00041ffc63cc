"""Reports of machines and clusters match their shape, or are refused with a message: odd values are not used."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from gpunodes.model import Role
from gpunodes.operations import gpu_verify
from gpunodes.planner import gpu, gpu_software, preflight, reports
from gpunodes.planner.candidates import MachineFacts, requirements_of
from gpunodes.planner.desired import desired
from gpunodes.planner.endpoint import EndpointSettings
from gpunodes.settings import defaults

from tests.hostile import ATTACKS, PIN, cluster_report, machine_report
from tests.stand_ins import SOURCES, given

PINNED = {"role": "worker", "ca_hash": PIN, "server": "https://10.0.0.1:6443"}
MACHINE = machine_report("worker-1", 1, kubernetes=PINNED)
MACHINE["gpu"]["driver"] |= {"module": "580.65.06", "loaded": True, "origin": "nvidia-repository", "flavour": "open"}
MACHINE["gpu"]["driver"]["packages"] = {"cuda-drivers": "580.1-1"}
MACHINE["gpu"]["cuda"] = {"13.0": "runfile"}
MACHINE |= {
    "addresses": ["10.0.0.1"],
    "virtual_address": {
        "held": False,
        "managed": False,
        "foreign": False,
        "others": [],
        "mac": "52:54:00:00:00:01",
        "answers": [],
    },
    "endpoints": [{"endpoint": "api:6443", "resolved": ["10.0.0.10"], "error": "", "names": ["api"]}],
}
VIP = EndpointSettings(vip="10.0.0.10", pods="10.244.0.0/16", services="10.96.0.0/12")
CLUSTER = cluster_report({"control-1": 1, "worker-1": 2})
ODD: tuple[Any, ...] = (
    *ATTACKS,
    "",
    "..",
    "../../etc/passwd",
    "a/b",
    "a b",
    "-x",
    None,
    True,
    -1,
    1 << 70,
    1 << 62,
    -(1 << 62),
    1.5,
    -1e18,
    1e18,
    "999.999.999.999",
    "999.1.1.1/24",
    "10.0.0.1/99",
    "::1",
    "9" * 99,
    float("nan"),
    [],
    [{}],
    {},
)
FREE = {
    ("os", "name"), ("swap",), ("machine_id",), ("product_uuid",), ("boot_id",), ("kubernetes", "server"),
    ("gpu", "functions", "subsystem"), ("gpu", "mok", "key"),
    ("sockets", "program"), ("sources", "name"), ("sources", "url"), ("sources", "error"), ("endpoints", "error"),
    ("disks", "mount"), *(("data_directory", "problem", name) for name in ("found", "wanted", "remedy")),
    ("nodes", "uid"), ("nodes", "addresses"), ("nodes", "maintenance"),
    ("nodes", "reason"), ("nodes", "machine_id"), ("nodes", "product_uuid"), ("nodes", "boot_id"),
    ("nodes", "managed", "labels", "gpunodes.dev/pool"),
    ("nodes", "managed", "labels", "gpunodes.dev/firewall"),
    *(("nodes", "managed", "taints", name) for name in ("key", "value", "effect")),
}  # fmt: skip
"""Values with free text: they are shown or compared, and never used in names, paths or commands."""


def places(document: Any, where: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield where
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for name, value in inner:
        yield from places(value, (*where, name))


def free(where: tuple[str | int, ...]) -> bool:
    return tuple(name for name in where if isinstance(name, str)) in FREE


def changed(document: Any, where: tuple[str | int, ...], value: Any) -> Any:
    made = copy.deepcopy([document])
    inside: Any = made
    for name in (0, *where[:-1]) if where else ():
        inside = inside[name]
    inside[where[-1] if where else 0] = value
    return made[0]


def test_good_reports_pass() -> None:
    assert reports.machine_problem(MACHINE) == reports.cluster_problem(CLUSTER) == ""


@pytest.mark.parametrize("where", list(places(MACHINE)), ids=str)
def test_an_odd_value_anywhere_is_refused_or_harmless(where: tuple[str | int, ...]) -> None:
    """Any value anywhere in a machine's report leads to a violation or to a judgement; never to another error."""
    for value in ODD:
        document = changed(MACHINE, where, value)
        violation = reports.machine_problem(document)
        if violation:
            assert violation.startswith("its answer")
            if document is not None:
                assert gpu_verify.assemble("worker-1", document, [], [], "").cause == violation
            continue
        assert free(where) or value not in ATTACKS, (where, value)
        for role, endpoint in ((Role.WORKER, EndpointSettings()), (Role.CONTROL_PLANE, VIP)):
            candidate = MachineFacts(
                "worker-1", role, document, read_at=0.0, asked_at=0.0, address="10.0.0.1", endpoint=endpoint
            )
            assert preflight.judge([candidate], requirements_of(CLUSTER, "1.36")) is not None
            assert desired(
                given(
                    document,
                    gpunodes_control_plane_vip=endpoint.vip,
                    groups=(f"{role.value}s".replace("planes", "plane"),),
                    joins=True,
                    reached="10.0.0.1",
                )
            )
        requested = gpu.requested_of(defaults(), "1.36.3")
        found = gpu.plan("worker-1", document, requested)
        if isinstance(found, gpu.Plan):
            assert gpu_software.by_role(found, document, SOURCES, ["containerd"]) is not None


@pytest.mark.parametrize("where", list(places(CLUSTER)), ids=str)
def test_an_odd_value_of_the_cluster_is_refused_or_harmless(where: tuple[str | int, ...]) -> None:
    for value in ODD:
        document = changed(CLUSTER, where, value)
        if not reports.cluster_problem(document):
            assert free(where) or value not in ATTACKS, (where, value)
            candidate = MachineFacts("worker-1", Role.WORKER, MACHINE, read_at=0.0)
            assert preflight.judge([candidate], requirements_of(document, "1.36")) is not None


@pytest.mark.parametrize("name", CLUSTER["nodes"][0])
def test_a_node_without_a_required_field_is_refused(name: str) -> None:
    (first, *others) = CLUSTER["nodes"]
    incomplete = {**CLUSTER, "nodes": [{key: value for key, value in first.items() if key != name}, *others]}
    assert reports.cluster_problem(incomplete) == f"its answer is invalid: nodes.{name} is missing"
    assert reports.cluster_problem(changed(CLUSTER, ("nodes", 0, name), None))


def test_package_names_must_match_their_pattern_too() -> None:
    for name in ATTACKS:
        assert reports.machine_problem(changed(MACHINE, ("packages",), {name: None}))


def test_facts_from_a_file_may_be_incomplete() -> None:
    assert reports.saved_problem({"os": {"id": "debian"}, "arch": "x86_64"}) == ""
    assert reports.saved_problem({"os": {"id": ATTACKS[1]}})
    assert reports.saved_problem({"arch": "x86_64"})
