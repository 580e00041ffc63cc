"""The kubelet's feature gates by Kubernetes version, and the requested gates that are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gpunodes.errors import WrongInput
from gpunodes.planner import gates, tables, versions
from gpunodes.planner.gates import Gate, GateStatus, check, needed

LISTINGS = Path(__file__).parents[1] / "fixtures" / "kubelet-help"
MINORS = [f"1.{number}" for number in range(6, 38)]


def gate(name: str, version: str) -> Gate:
    return next(gate for gate in gates.gates(version) if gate.name == name)


def test_the_tables_of_gates_reach_the_newest_minor() -> None:
    newest = list(versions.minors())[-1]
    tables_of_gates = {name: tables.read(name)["newest"] for name in ("gates", "kubelet_gates")}
    assert set(tables_of_gates.values()) == {newest}, (
        f"add the gates of Kubernetes {newest} to the table that ends before"
    )


# From Kubernetes' sources and its documentation of feature gates, independent of the table: gate, version, status,
# default, locked.
KNOWN = [
    ("Accelerators", "1.6", "alpha", False, False),
    ("Accelerators", "1.10", "alpha", False, False),
    ("Accelerators", "1.11", "absent", None, False),
    ("DevicePlugins", "1.7", "absent", None, False),
    ("DevicePlugins", "1.8", "alpha", False, False),
    ("DevicePlugins", "1.10", "beta", True, False),
    ("DevicePlugins", "1.25", "beta", True, False),
    ("DevicePlugins", "1.27", "ga", True, True),
    ("DevicePlugins", "1.28", "absent", None, False),
    ("KubeletPodResources", "1.14", "alpha", False, False),
    ("KubeletPodResources", "1.29", "ga", True, True),
    ("KubeletPodResources", "1.30", "absent", None, False),
    ("KubeletPodResourcesGetAllocatable", "1.23", "beta", True, False),
    ("KubeletPodResourcesGetAllocatable", "1.30", "absent", None, False),
    ("KubeletPodResourcesGet", "1.26", "absent", None, False),
    ("KubeletPodResourcesGet", "1.33", "alpha", False, False),
    ("KubeletPodResourcesGet", "1.35", "beta", True, False),
    ("KubeletPodResourcesGet", "1.36", "ga", True, True),
    ("KubeletPodResourcesDynamicResources", "v1.34.4", "beta", True, False),
    ("DynamicResourceAllocation", "1.31", "alpha", False, False),
    ("DynamicResourceAllocation", "1.33", "beta", False, False),
    ("DynamicResourceAllocation", "1.34", "ga", True, False),
    ("DynamicResourceAllocation", "1.35", "ga", True, True),
    ("DevicePluginCDIDevices", "1.30", "beta", True, False),
    ("DevicePluginCDIDevices", "1.33", "ga", True, True),
    ("DevicePluginCDIDevices", "1.34", "absent", None, False),
    ("DisableAcceleratorUsageMetrics", "1.19", "alpha", False, False),
    ("DisableAcceleratorUsageMetrics", "1.25", "ga", True, True),
    ("TopologyManager", "1.18", "beta", True, False),
    ("TopologyManager", "1.29", "absent", None, False),
    ("ResourceHealthStatus", "1.35", "alpha", False, False),
    ("ResourceHealthStatus", "1.36", "beta", True, False),
]


@pytest.mark.parametrize(("name", "version", "status", "default", "locked"), KNOWN)
def test_gates_match_kubernetes_sources(
    name: str, version: str, status: str, default: bool | None, locked: bool
) -> None:
    found = gate(name, version)
    assert (found.status, found.default, found.locked) == (status, default, locked)


@pytest.mark.parametrize("minor", MINORS)
def test_every_minor_lists_every_gate(minor: str) -> None:
    found = gates.gates(minor)
    assert len({gate.name for gate in found}) == len(tables.read("gates")["gate"])
    for each in found:
        assert each.why
        assert each.source
        assert (each.default is None) == (each.status is GateStatus.ABSENT)
        assert not each.locked or each.status is GateStatus.GA
        assert each.set_by_gpunodes is None or (
            each.status is not GateStatus.ABSENT and each.set_by_gpunodes != each.default
        )


@pytest.mark.parametrize("minor", MINORS)
def test_the_kubelet_accepts_the_gates_that_gpunodes_sets(minor: str) -> None:
    assert check(minor, needed(minor)) == []


def test_gates_that_gpunodes_sets() -> None:
    own = {minor: needed(minor) for minor in MINORS if needed(minor)}
    assert own == {
        "1.6": {"Accelerators": True},
        "1.7": {"Accelerators": True},
        "1.8": {"DevicePlugins": True},
        "1.9": {"DevicePlugins": True},
    }


def test_a_removed_gate_is_refused_with_its_version_and_replacement() -> None:
    (conflict,) = check("1.36", {"Accelerators": True})
    assert "1.11" in conflict.found
    assert "DevicePlugins" in conflict.remedy


def test_a_gate_of_a_later_version_is_refused() -> None:
    (conflict,) = check("1.25", {"DynamicResourceAllocation": True})
    assert "1.26" in conflict.found


def test_a_locked_gate_accepts_only_its_default() -> None:
    assert check("1.36", {"KubeletPodResourcesGet": True}) == []
    (conflict,) = check("1.36", {"KubeletPodResourcesGet": False})
    assert "locked from Kubernetes 1.36" in conflict.wanted


def test_an_unknown_gate_and_a_string_are_refused_together() -> None:
    unknown, string = check("1.36", {"ResourceHealthStatsu": True, "ResourceHealthStatus": "on"})
    assert "ResourceHealthStatus" in unknown.remedy
    assert "'on'" in string.found


def test_gates_that_are_not_about_gpus_are_known_for_installable_versions() -> None:
    assert check("1.36", {"MemoryQoS": True, "AllAlpha": False, "WatchListClient": False}) == []
    assert "was removed in Kubernetes 1.36" in check("1.37", {"HonorPVReclaimPolicy": True})[0].found
    assert "locked" in check("1.36", {"KubeletPSI": False})[0].wanted
    assert "did you mean MemoryQoS?" in check("1.36", {"MemoryQos": True})[0].remedy
    assert "does not exist in Kubernetes 1.34" in check("1.34", {"ResourceHealthStatusMessage": True})[0].found
    assert "not about GPUs" in check("1.20", {"MemoryQoS": True})[0].found


@pytest.mark.parametrize("minor", ["1.34", "1.35", "1.36"])
def test_both_tables_agree(minor: str) -> None:
    every = tables.read("kubelet_gates")["gates"]
    for gate in gates.gates(minor):
        stages = [stage for stage in every.get(gate.name, ()) if float(stage.split()[0]) <= float(minor)]
        default = "on" if gate.default else "off"
        stage = f"{gate.status} {default}{' locked' if gate.locked else ''}"
        assert (stages[-1].split(" ", 1)[1] if stages else "absent") == (
            stage if gate.default is not None else "absent"
        )


@pytest.mark.parametrize("version", ["1.5", "1.38", "2.0", "one", "1", ""])
def test_a_version_outside_the_table_is_wrong_input(version: str) -> None:
    with pytest.raises(WrongInput):
        gates.gates(version)


@pytest.mark.parametrize("listing", sorted(LISTINGS.glob("*.txt")), ids=lambda path: path.stem)
def test_the_tables_match_the_kubelets_help(listing: Path) -> None:
    """``kubelet --help`` lists the gates that are alpha or beta; the fixtures' make.sh built the kubelets."""
    release = listing.stem
    reported = {
        name: (status.lower(), default == "true")
        for name, status, default in re.findall(r"(\w+)=true\|false \((\w+) - default=(\w+)\)", listing.read_text())
    }
    known = {gate.name: (gate.status.value, gate.default) for gate in gates.gates(release)}
    listed = {name: gate for name, gate in known.items() if gate[0] in ("alpha", "beta")}
    assert listed == {name: gate for name, gate in reported.items() if name in known}
    installed = tables.read("kubelet_gates")["first"]
    if int(release.split(".")[1]) >= int(installed.split(".")[1]):
        assert [
            conflict for name, (_, default) in reported.items() for conflict in check(release, {name: not default})
        ] == []


def test_the_fixtures_have_kubelets_of_six_versions() -> None:
    assert len({path.stem.rpartition(".")[0] for path in LISTINGS.glob("*.txt")}) >= 6
