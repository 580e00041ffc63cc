"""No power action is sent to a BMC that belongs to another machine."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from gpunodes.ansible.module_utils.probe import document
from gpunodes.ansible.module_utils.probe.options import ProbeOptions
from gpunodes.engine import identities, machine_control
from gpunodes.engine.fleet import InventoryFleet
from gpunodes.engine.power import PowerProblem, Trouble
from gpunodes.engine.scans import MachineScan
from gpunodes.errors import GpunodesError
from gpunodes.health.model import Action, State, Verdict
from gpunodes.identity.model import reported
from gpunodes.identity.values import macs
from gpunodes.inventory import Inventory
from gpunodes.operations import power
from gpunodes.operations.autoscale import switched_on
from gpunodes.repair.policy import Node

from tests import redfish

UUID = "4c4c4544-0042-4810-8052-b2c04f595331"
SWAPPED = "44454C4C-4200-1048-8052-B2C04F595331"
OTHER = "9c1e4b1a-5c3b-4d0e-9a2f-0123456789ab"
MAC = "3c:ec:ef:00:00:01"
FACTS = {"machine_id": "id-1", "product_uuid": UUID, "product_serial": "ABC123", "macs": [MAC]}
Serve = Callable[..., InventoryFleet]
live: dict[str, Any] = {}
"""What the machines report now; empty when they do not respond."""


def scans(fleet: InventoryFleet, names: list[str]) -> dict[str, MachineScan]:
    """A scan of machines, which records their identities."""
    identities.remember(fleet.cluster_name, {name: live for name in names if live})
    state = State.HEALTHY if live else State.UNREACHABLE
    return {
        name: MachineScan(Verdict(name, "live", state, Action.NONE, boot_id=live.get("boot_id")), live or None)
        for name in names
    }


@pytest.fixture
def orders() -> list[str]:
    """The power actions that the BMC received."""
    return []


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orders: list[str]) -> Iterator[Serve]:
    """An inventory with one machine, whose BMC reports ``hardware``, and what is recorded of the machine."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(sys.modules[__name__], "live", {})
    servers = []

    def made(hardware: dict[str, Any], facts: dict[str, Any] | None = None, **settings: str) -> InventoryFleet:
        servers.append(redfish.fake("obeys", state="On", hardware=hardware, resets=orders))
        given = {"type": "redfish", "address": f"http://127.0.0.1:{servers[-1].server_port}", **settings}
        bmc = ", ".join(f"gpunodes_bmc_{key}: '{value}'" for key, value in given.items())
        path = tmp_path / "hosts.yml"
        path.write_text(f"workers: {{hosts: {{gpu-1: {{ansible_host: 10.0.0.1, {bmc}}}}}}}\n")
        fleet = InventoryFleet(Inventory(path))
        monkeypatch.setattr(fleet, "scan", lambda machines: scans(fleet, [machine.name for machine in machines]))
        if facts:
            identities.remember(fleet.cluster_name, {"gpu-1": facts})
        return fleet

    yield made
    for server in servers:
        server.shutdown()


@pytest.mark.parametrize(
    ("hardware", "facts"),
    [
        ({"UUID": UUID}, FACTS),
        ({"UUID": SWAPPED}, FACTS),
        ({"macs": ["3C:EC:EF:00:00:02", MAC.upper()]}, FACTS),
        ({"SerialNumber": "abc123"}, FACTS),
    ],
)
def test_a_machine_is_switched_off_by_its_own_bmc(
    serve: Serve, orders: list[str], hardware: dict[str, Any], facts: dict[str, Any]
) -> None:
    """By UUID in either byte order, by MAC address, or by serial number; without being named as well."""
    fleet = serve(hardware, facts)
    assert power.power(fleet, fleet.inventory.machines()[0], power.PowerAction.OFF).state == "off"
    assert orders == ["ForceOff"]


FOREIGN = {"UUID": OTHER, "SerialNumber": "XYZ", "macs": ["3c:ec:ef:00:00:09"]}


def test_the_bmc_of_another_machine_is_refused(serve: Serve, orders: list[str]) -> None:
    """On, off, cycle and both escalation steps; the message names both identities. Its status may be read."""
    fleet = serve(FOREIGN, FACTS)
    machine = fleet.inventory.machines()[0]
    ours = fleet.machine_control(machine, named=True)
    for harm in (
        lambda: power.power(fleet, machine, power.PowerAction.OFF, named=True),
        lambda: power.power(fleet, machine, power.PowerAction.CYCLE, named=True),
        lambda: power.power(fleet, machine, power.PowerAction.ON, named=True),
        lambda: ours.reset(redfish.held),
        lambda: ours.cold_cycle(redfish.held),
    ):
        with pytest.raises(PowerProblem, match="belongs to another machine") as message:
            harm()
        assert message.value.trouble is Trouble.WRONG_MACHINE
        assert UUID in str(message.value)
        assert OTHER in str(message.value)
    assert orders == []
    shown = power.power(fleet, machine, power.PowerAction.STATUS)
    assert shown.own is False
    assert UUID in shown.identities
    assert OTHER in shown.identities
    fleet = serve(FOREIGN, FACTS, identity="any")
    assert power.power(fleet, machine, power.PowerAction.OFF).state == "off"


class Fence:
    """A lock that may be lost while a BMC responds, or during the pause of a cold cycle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: str) -> None:
        self.lost = False
        compare = machine_control.MachineControl.compare

        def compared(control: machine_control.MachineControl, bmc: Any) -> Any:
            self.lost = after == "compare"
            return compare(control, bmc)

        def paused(_: float) -> None:
            self.lost = True

        monkeypatch.setattr(machine_control.MachineControl, "compare", compared)
        monkeypatch.setattr("gpunodes.engine.machine_control.time.sleep", paused)
        monkeypatch.setattr(power, "locked", lambda *_: contextlib.nullcontext(self.confirm))

    def confirm(self) -> None:
        if self.lost:
            raise GpunodesError("the lock is lost")


@pytest.mark.parametrize("use", ["reset", "cold_cycle", "off", "cycle"])
def test_no_order_is_given_if_the_lock_was_lost_while_the_bmc_was_compared(
    serve: Serve, orders: list[str], monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    """A BMC may need longer for its identity than a lock lasts without a renewal."""
    fleet, fence = serve({"UUID": UUID}, FACTS), Fence(monkeypatch, "compare")
    machine = fleet.inventory.machines()[0]
    control = fleet.machine_control(machine)
    with pytest.raises(GpunodesError, match="the lock is lost"):
        power.power(fleet, machine, power.PowerAction(use)) if use in {"off", "cycle"} else getattr(control, use)(
            fence.confirm
        )
    assert orders == []


@pytest.mark.parametrize("use", ["cold_cycle", "cycle"])
def test_a_machine_is_not_switched_on_if_the_lock_was_lost_during_the_pause(
    serve: Serve, orders: list[str], monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    fleet, fence, lines = serve({"UUID": UUID}, FACTS), Fence(monkeypatch, "pause"), list[str]()
    machine = fleet.inventory.machines()[0]
    control = fleet.machine_control(machine, report=lines.append)
    with pytest.raises(GpunodesError, match="the lock is lost"):
        power.power(
            fleet, machine, power.PowerAction.CYCLE, report=lambda _, text: lines.append(text)
        ) if use == "cycle" else control.cold_cycle(fence.confirm)
    assert (orders, lines) == (["ForceOff"], ["it was switched off, and may still be off"])


def test_a_responsive_machine_is_identified(serve: Serve, orders: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a controller without its record, another machine was switched off; a machine that is off cannot report."""
    monkeypatch.setattr(sys.modules[__name__], "live", FACTS)
    fleet = serve(FOREIGN)
    machine = fleet.inventory.machines()[0]
    with pytest.raises(PowerProblem, match="belongs to another machine"):
        power.power(fleet, machine, power.PowerAction.OFF, named=True)
    assert orders == []
    shown = power.power(serve({"UUID": UUID}), machine, power.PowerAction.STATUS)
    assert (shown.own, UUID in shown.identities) == (True, True)


def test_a_machine_that_contradicts_its_node_keeps_its_power(
    serve: Serve, orders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for power actions, a clone named gpu-1 does not count as gpu-1."""
    monkeypatch.setattr(sys.modules[__name__], "live", {**FACTS, "boot_id": "here"})
    nodes = [Node("gpu-1", boot_id="there", system_uuid=OTHER)]
    monkeypatch.setattr(power, "Cluster", lambda *_, **__: mock.Mock(nodes=lambda: nodes))
    fleet = serve({"UUID": UUID})
    monkeypatch.setattr(fleet, "session", mock.Mock())
    monkeypatch.setattr(switched_on, "keep_off", lambda *_: None)
    machine = fleet.inventory.machines()[0]
    for action in (power.PowerAction.OFF, power.PowerAction.CYCLE):
        with pytest.raises(GpunodesError, match="its UUID differs"):
            power.power(fleet, machine, action, named=True)
    assert orders == []
    assert power.power(fleet, machine, power.PowerAction.STATUS).own is True
    nodes[:] = [Node("gpu-1", boot_id="here", system_uuid=UUID)]
    assert power.power(fleet, machine, power.PowerAction.OFF, named=True).state == "off"


@pytest.mark.parametrize(("hardware", "facts"), [({}, FACTS), ({"UUID": UUID}, None), ({"UUID": [1]}, FACTS)])
def test_a_bmc_without_identity_is_used_only_if_the_machine_is_named(
    serve: Serve, orders: list[str], hardware: dict[str, Any], facts: dict[str, Any] | None
) -> None:
    """A repair by a timer does not use it; a user who names the machine does, and gets a message."""
    fleet = serve(hardware, facts)
    machine = fleet.inventory.machines()[0]
    with pytest.raises(PowerProblem, match="cannot be verified as the BMC of this machine"):
        fleet.machine_control(machine).reset(redfish.held)
    assert orders == []
    message: list[str] = []
    fleet.machine_control(machine, named=True, report=message.append).reset(redfish.held)
    assert orders == ["ForceRestart"]
    assert "cannot be verified as the BMC of this machine" in message[0]
    assert power.power(fleet, machine, power.PowerAction.STATUS).own is None


def test_a_command_of_the_user_gets_the_name_of_the_machine(serve: Serve, tmp_path: Path) -> None:
    program = tmp_path / "pdu"
    program.write_text(f"#!/bin/sh\n[ $1 = status ] && cat {tmp_path}/state || echo $1 $2 >>{tmp_path}/log\n")
    program.chmod(0o755)
    (tmp_path / "state").write_text("on\n")
    fleet = serve({}, None, type="command", command=str(program))
    fleet.machine_control(fleet.inventory.machines()[0]).reset(redfish.held)
    assert (tmp_path / "log").read_text() == "reset gpu-1\n"


IPMITOOL = """#!/bin/sh
case "$*" in
*" mc guid") [ "$GUID" ] || { echo "Get GUID command failed" >&2; exit 1; }
  printf 'System GUID  : %s\\nGUID Encoding : SMBIOS\\n' "$GUID" ;;
*" power status") echo "Chassis Power is on" ;;
*) echo "$@" >>"$LOG" ;;
esac
"""


@pytest.mark.parametrize(
    ("guid", "same"),
    [
        (UUID, True),
        (SWAPPED, True),
        ("3153594f-c0b2-5280-1048-420044454c4c", True),
        (OTHER, False),
        ("", None),
        ("00000000-0000-0000-0000-000000000000", None),
    ],
)
def test_a_guid_by_ipmi(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guid: str, same: bool | None
) -> None:
    """Vendors send it in the order of SMBIOS, of RFC 4122, or of IPMI itself; some send none."""
    program = tmp_path / "bin" / "ipmitool"
    program.parent.mkdir()
    program.write_text(IPMITOOL)
    program.chmod(0o755)
    for name, value in {
        "GUID": guid,
        "LOG": str(tmp_path / "log"),
        "PATH": f"{program.parent}:{os.environ['PATH']}",
    }.items():
        monkeypatch.setenv(name, value)
    fleet = serve({}, FACTS, type="ipmi", address="10.0.0.9")
    machine = fleet.inventory.machines()[0]
    assert power.power(fleet, machine, power.PowerAction.STATUS).own is same
    if same:
        fleet.machine_control(machine).reset(redfish.held)
    else:
        with pytest.raises(PowerProblem):
            fleet.machine_control(machine).reset(redfish.held)
    assert (tmp_path / "log").exists() is bool(same)


def test_what_the_probe_reports_of_a_machine_s_identity(tmp_path: Path) -> None:
    """Physical interfaces only: a bridge has no device, a virtual function has a physfn link.

    A port of a bond has the bond's address, which is a locally administered one here, and its own beside it.
    """
    for name, text in {
        "proc/sys/kernel/hostname": "gpu-1\n",
        "etc/machine-id": "0a1b\n",
        "sys/class/dmi/id/product_uuid": f"{UUID}\n",
        "sys/class/dmi/id/product_serial": "ABC123\n",
        "sys/class/net/eth0/address": f"{MAC}\n",
        "sys/class/net/eth0/device/vendor": "0x15b3\n",
        "sys/class/net/eth1/address": "3c:ec:ef:00:00:02\n",
        "sys/class/net/eth1/device/physfn/vendor": "0x15b3\n",
        "sys/class/net/br0/address": "3c:ec:ef:00:00:03\n",
        "sys/class/net/eth2/address": "9a:1b:2c:3d:4e:5f\n",
        "sys/class/net/eth2/device/vendor": "0x15b3\n",
        "sys/class/net/eth2/bonding_slave/perm_hwaddr": "3c:ec:ef:00:00:04\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = reported("gpu-1", "", document.read(ProbeOptions(root=str(tmp_path), deadline_s=5)))
    assert (found.hostname, found.machine_id, found.system_uuid) == ("gpu-1", "0a1b", UUID)
    assert found.serial == "ABC123"
    assert macs(found.macs) == {MAC, "3c:ec:ef:00:00:04"}


def test_a_missing_bmc_is_reported() -> None:
    with pytest.raises(PowerProblem, match="no BMC is configured"):
        machine_control.MachineControl("gpu-1", "10.0.0.1", {}, 0.0).reset(redfish.held)
