"""A lab with several control planes: machines, sizes, inventory, and what an existing lab is compared with."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes.errors import WrongInput
from gpunodes.lab import inventory, plan
from gpunodes.lab.layout import SUBNETS, LabRecord, LabRole, Layout, System
from gpunodes.lab.plan import LabRequest

LAYOUT = Layout("lab", Path("/cache"))


def request(control_planes: int, workers: int = 1) -> LabRequest:
    return LabRequest(workers, System.DEBIAN13, Path("/here/inventory"), ("1.36",), control_planes=control_planes)


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "used_networks", list)
    monkeypatch.setattr(plan, "memory_mib", lambda: 12000)


def planned(control_planes: int, accelerator: str = "tcg") -> LabRecord:
    return plan.plan(LAYOUT, request(control_planes), accelerator)


def variables(record: LabRecord) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(inventory.texts(LAYOUT, record, {})["group_vars/all.yml"])
    return found


def test_several_control_planes_are_machines_of_that_group() -> None:
    record = planned(3)
    hosts = yaml.safe_load(inventory.texts(LAYOUT, record, {})["hosts.yml"])["all"]["children"]
    assert list(hosts["control_plane"]["hosts"]) == ["cp-1", "cp-2", "cp-3"]
    assert list(hosts["workers"]["hosts"]) == ["worker-1"]
    assert {(each.memory_mib, each.cpus) for each in record.control_planes} == {(3072, 2)}
    for part in ("address", "mac", "uuid", "bmc_port", "bmc_password"):
        assert len({getattr(each, part) for each in record.machines}) == 4


def test_an_only_control_plane_keeps_its_name_and_size() -> None:
    [machine] = planned(1).control_planes
    assert (machine.name, machine.memory_mib) == ("control-1", 4096)


def test_the_virtual_address_is_unused_and_in_the_network_of_the_machines() -> None:
    record = planned(3)
    address = variables(record)["gpunodes_control_plane_vip"]
    assert address not in {each.address for each in record.machines} | {record.gateway}
    assert address in {str(each) for each in IPv4Network(record.subnet).hosts()}
    assert LabRecord.from_json(record.to_json()) == record


def test_an_only_control_plane_has_no_virtual_address_and_no_elections() -> None:
    found = variables(planned(1))
    assert "gpunodes_control_plane_vip" not in found
    arguments = found["gpunodes_component_arguments"]
    assert "etcd" not in arguments
    assert arguments["scheduler"] == {"leader-elect": "false"}
    assert arguments["controllerManager"]["leader-elect"] == "false"


def test_several_control_planes_have_elections_with_long_leases() -> None:
    found = variables(planned(3))
    arguments = found["gpunodes_component_arguments"]
    for component in ("controllerManager", "scheduler"):
        assert "leader-elect" not in arguments[component]
        assert arguments[component]["leader-elect-lease-duration"] == "60s"
        assert arguments[component]["leader-elect-renew-deadline"] == "45s"
        assert arguments[component]["leader-elect-retry-period"] == "15s"
    assert arguments["etcd"] == {"heartbeat-interval": "500", "election-timeout": "5000"}
    assert found["gpunodes_control_plane_vip_interval"] == 2
    # A join takes minutes longer than kubeadm and its token allow by default.
    assert found["gpunodes_kubeadm_timeouts"]["etcdAPICall"] == "10m0s"
    assert found["gpunodes_kubeadm_limit"] == found["gpunodes_join_token_ttl"] == 2400
    for name, patch in found["gpunodes_kubeadm_patches"].items():
        [container] = patch["spec"]["containers"]
        assert name == f"{container.pop('name')}0+strategic"
        assert all(probe == {"periodSeconds": 15} for probe in container.values())
        assert "livenessProbe" in container


def test_machines_with_kvm_need_the_address_but_no_slow_settings() -> None:
    assert set(variables(planned(3, "kvm"))) == {"gpunodes_control_plane_vip"}


def test_too_little_memory_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "memory_mib", lambda: 9000)
    with pytest.raises(WrongInput) as caught:
        planned(3)
    assert "11264 MiB" in str(caught.value)
    assert "--control-planes" in caught.value.problem.remedy


def test_a_lab_with_another_number_of_control_planes_is_not_changed() -> None:
    record = planned(3)
    plan.compare(record, request(3))
    with pytest.raises(WrongInput, match="control-planes 3"):
        plan.compare(record, request(1))
    with pytest.raises(WrongInput, match="own-kernel False"):
        plan.compare(record, replace(request(3), equipment=replace(request(3).equipment, own_kernel=True)))
    assert [each.role for each in record.machines].count(LabRole.CONTROL_PLANE) == 3
    assert record.subnet == str(SUBNETS[0])
