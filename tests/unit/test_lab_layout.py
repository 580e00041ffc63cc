"""Names, addresses and machines of a lab."""

from __future__ import annotations

import json
from ipaddress import IPv4Network
from pathlib import Path

import pytest
from gpunodes.errors import WrongInput
from gpunodes.lab.layout import SUBNETS, Layout, Record, Role, System, cache_dir, free_subnet, plan_machines


def record(workers: int = 2, accelerator: str = "tcg", mirror: str | None = None) -> Record:
    identities = [(f"00000000-0000-4000-8000-{number:012d}", f"secret-{number}") for number in range(workers + 1)]
    machines = plan_machines(SUBNETS[0], workers, 4096, 2048, 2, identities)
    return Record("lab", System.DEBIAN13, str(SUBNETS[0]), accelerator, machines, "/somewhere/inventory", mirror)


@pytest.mark.parametrize("name", ["", "Two", "a-b", "../x", "1lab", "elevenchars"])
def test_a_name_that_cannot_be_a_link_is_refused(name: str) -> None:
    with pytest.raises(WrongInput, match="the lab's name is"):
        Layout(name, Path("/cache"))


def test_two_labs_share_no_name_and_no_path() -> None:
    one, two = Layout("lab", Path("/cache")), Layout("two", Path("/cache"))
    for part in ("namespace", "link", "state", "disks", "libvirt_uri", "ssh_key"):
        assert getattr(one, part) != getattr(two, part)
    assert len(Layout("a123456789", Path("/cache")).link) <= 15


def test_machines_differ_in_all_that_must_differ() -> None:
    machines = record(workers=9).machines
    for part in ("name", "address", "mac", "uuid", "bmc_port", "bmc_password"):
        assert len({getattr(machine, part) for machine in machines}) == 10
    assert [machine.role for machine in machines] == [Role.CONTROL_PLANE] + [Role.WORKER] * 9


def test_machines_of_two_subnets_have_different_hardware_addresses() -> None:
    identity = [("u", "p")]
    first, second = (plan_machines(subnet, 0, 1, 1, 1, identity)[0] for subnet in SUBNETS[:2])
    assert first.mac != second.mac


def test_a_record_survives_its_file() -> None:
    there = record(mirror="/cache/tree")
    assert Record.from_json(json.loads(json.dumps(there.to_json()))) == there


def test_an_unknown_machine_is_refused_with_those_that_exist() -> None:
    with pytest.raises(WrongInput, match="control-1, worker-1, worker-2"):
        record().machine("worker-3")


def test_the_first_free_subnet_is_taken() -> None:
    assert free_subnet([]) == SUBNETS[0]
    assert free_subnet([IPv4Network("10.213.0.254/32"), IPv4Network("192.168.0.0/16")]) == SUBNETS[1]
    with pytest.raises(WrongInput, match="routes into all"):
        free_subnet([IPv4Network("10.0.0.0/8")])


def test_the_cache_follows_the_base_directory_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_dir() == Path("/elsewhere/gpunodes")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_dir() == Path("/home/someone/.cache/gpunodes")
