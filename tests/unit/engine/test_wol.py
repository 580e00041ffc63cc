"""Wake-on-LAN: the packet, what the network shows of a machine, and a shutdown over SSH; all on the loopback."""

from __future__ import annotations

import errno
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpunodes import settings
from gpunodes.engine import identities
from gpunodes.engine import power as powers
from gpunodes.engine.fleet import InventoryFleet
from gpunodes.engine.machine_control import MachineControl
from gpunodes.engine.power import Access, Order, PowerProblem, PowerState, Trouble, kinds, wol
from gpunodes.engine.scans import MachineScan
from gpunodes.errors import WrongInput
from gpunodes.health.model import Action, State, Verdict
from gpunodes.identity.model import MachineIdentity
from gpunodes.inventory import Inventory
from gpunodes.operations import power

MAC = "52:54:00:12:34:56"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wol, "_PAUSE_S", 0.0)
    monkeypatch.setattr(wol, "_TIMEOUT_S", 0.5)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def wire() -> Any:
    """A listener for packets, and its port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.settimeout(10)
        yield listening


def given(**values: Any) -> dict[str, Any]:
    return settings.resolve({f"gpunodes_bmc_{name}": value for name, value in {"type": "wol", **values}.items()})


def machine(port: int = 1, address: str = "127.0.0.1:9", *, macs: tuple[str, ...] = (MAC,)) -> wol.WakeOnLan:
    return wol.WakeOnLan("gpu-1", Access("wol", address, "", "", macs=macs, reached=("127.0.0.1", port)))


def silent(monkeypatch: pytest.MonkeyPatch, number: int | None = None) -> list[int]:
    """No connection succeeds; returns how many were tried."""
    tried: list[int] = []

    def connect(*_: Any) -> Any:
        tried.append(1)
        raise TimeoutError("timed out") if number is None else OSError(number, "no")

    monkeypatch.setattr(socket, "create_connection", connect)
    return tried


def test_the_machine_starts_when_the_packet_arrives(wire: socket.socket) -> None:
    """As the lab does it: a listener starts the machine, whose SSH port responds from then on."""
    with socket.socket() as booked:
        booked.bind(("127.0.0.1", 0))
        port = booked.getsockname()[1]
    started: list[bytes] = []
    server = socket.socket()

    def lab() -> None:
        started.append(wire.recv(2000))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()

    thread = threading.Thread(target=lab)
    thread.start()
    sleeping = machine(port, f"127.0.0.1:{wire.getsockname()[1]}", macs=("52-54-00-12-34-56",))
    sleeping._responds = lambda: bool(started) and wol.WakeOnLan._responds(sleeping)  # type: ignore[method-assign]  # a stand-in
    assert sleeping.state() is PowerState.OFF
    powers.change(sleeping, Order.ON, lambda: None, poll_s=0.05)
    thread.join()
    server.close()
    mac = bytes.fromhex("525400123456")
    assert started == [b"\xff" * 6 + mac * 16]
    assert len(started[0]) == 102


def test_each_reported_address_is_woken_several_times(wire: socket.socket) -> None:
    macs = (MAC, "52:54:00:00:00:01")
    machine(address=f"127.0.0.1:{wire.getsockname()[1]}", macs=macs).order(Order.ON)
    woken = {wire.recv(2000)[6:12].hex(":") for _ in range(6)}
    assert woken == set(macs)


def test_the_broadcast_address_and_the_port_have_defaults() -> None:
    assert machine(address="")._broadcast == ("255.255.255.255", 9)
    assert machine(address="10.0.0.255")._broadcast == ("10.0.0.255", 9)
    assert machine(address="10.0.0.255:7")._broadcast == ("10.0.0.255", 7)


def test_a_machine_that_refuses_a_connection_is_on() -> None:
    with socket.socket() as booked:
        booked.bind(("127.0.0.1", 0))
        assert machine(booked.getsockname()[1]).state() is PowerState.ON, "its kernel refuses: nothing listens"


@pytest.mark.parametrize("number", [None, errno.EHOSTUNREACH])
def test_a_machine_is_off_only_after_several_tries(monkeypatch: pytest.MonkeyPatch, number: int | None) -> None:
    tried = silent(monkeypatch, number)
    assert machine().state() is PowerState.OFF
    assert len(tried) == 3


@pytest.mark.parametrize("number", [errno.ENETUNREACH, socket.EAI_NONAME])
def test_what_the_controller_cannot_see_is_no_power_state(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    silent(monkeypatch, number)
    with pytest.raises(PowerProblem, match="whether gpu-1 is on cannot be seen") as problem:
        machine().state()
    assert problem.value.trouble is Trouble.UNREACHABLE


@pytest.mark.parametrize("order", [each for each in Order if each is not Order.ON])
def test_nothing_but_on_is_possible(order: Order) -> None:
    with pytest.raises(PowerProblem, match="Wake-on-LAN only switches on") as problem:
        machine().order(order)
    assert problem.value.trouble is Trouble.REFUSED
    assert "`gpunodes power gpu-1 off` shuts its system down over SSH" in problem.value.problem.remedy


def test_it_has_no_password() -> None:
    with pytest.raises(WrongInput, match="which has no password"):
        machine().change_password("x")


# Settings


def test_the_address_is_that_of_the_settings_or_the_reported_one() -> None:
    found = kinds.access("gpu-1", given(mac=MAC), ("10.0.0.1", 22), ["52:54:00:00:00:01"])
    assert found
    assert (found.macs, found.reached, found.password) == ((MAC,), ("10.0.0.1", 22), "")
    # What is none, a machine may report, too; it ended the command.
    found = kinds.access("gpu-1", given(), ("10.0.0.1", 22), ["zz", "", "aa" * 90, "52:54:00:00:00:01"])
    assert found
    assert found.macs == ("52:54:00:00:00:01",)
    with pytest.raises(WrongInput, match="but no gpunodes_bmc_mac, and the machine never reported one"):
        kinds.access("gpu-1", given())


OWN, OF_V = "52:54:00:00:00:01", "52:54:00:00:00:02"


def test_what_another_machine_has_is_not_woken() -> None:
    """Root on W reported the address of V: `gpunodes power W on` woke V."""
    found = kinds.access("w", given(), macs=[OF_V, OWN], others={OF_V: "v"})
    assert found
    assert (found.macs, found.shared) == ((OWN,), "")
    found = kinds.access("w", given(mac=OF_V), macs=[OF_V], others={OF_V: "v"})
    assert found
    assert (found.macs, found.shared) == ((OF_V,), ""), "the settings decide"
    control = MachineControl(
        "w", "10.0.0.5", given(), 0, MachineIdentity("w", macs=(OF_V,)), macs_of_others={OF_V: "v"}
    )
    why = f"w reported no MAC address of its own to wake: {OF_V} is one of v, too"
    with pytest.raises(PowerProblem, match=why) as problem:
        control.own_power().order(Order.ON)
    assert problem.value.trouble is Trouble.WRONG_MACHINE
    assert problem.value.problem.remedy == "set gpunodes_bmc_mac of w"


def test_the_addresses_of_others_are_those_of_settings_and_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = tmp_path / "hosts.yml"
    hosts = "{v: {gpunodes_bmc_mac: '52-54-00-00-00-AA'}, u: {}, w: {gpunodes_bmc_type: wol}}"
    path.write_text(f"workers: {{hosts: {hosts}}}\n")
    fleet = InventoryFleet(Inventory(path))
    reports = {"u": {"macs": [OF_V]}, "w": {"macs": [OF_V, "52:54:00:00:00:aa"]}}
    identities.remember(fleet.cluster_name, reports)
    assert fleet.macs_of_others("w") == {"52:54:00:00:00:aa": "v", OF_V: "u"}
    (w,) = [each for each in fleet.all_machines() if each.name == "w"]
    with pytest.raises(PowerProblem, match=f"{OF_V} is one of u, too"):
        fleet.machine_control(w).own_power().order(Order.ON)


@pytest.mark.parametrize("mac", ["52:54:00:12:34", "52:54:00:12:34:5g", "x", "525400123456", 41135085296])
def test_a_wrong_address_is_a_wrong_setting(mac: str | int) -> None:
    """The last one is what YAML makes of 52:54:00:12:34:56 without quotes."""
    (problem,) = settings.problems({"gpunodes_bmc_mac": mac})
    assert "a MAC address in quotes" in str(problem)
    assert list(settings.problems({"gpunodes_bmc_mac": MAC.upper().replace(":", "-")})) == []


def test_a_machine_is_seen_at_its_own_ssh_port_and_no_repair_counts_on_its_power() -> None:
    variables = {"gpunodes_bmc_type": "wol", "ansible_port": "2222"}
    control = MachineControl("gpu-1", "10.0.0.5", variables, 0, MachineIdentity("gpu-1", macs=(MAC,)))
    bmc = control.power()
    assert isinstance(bmc, wol.WakeOnLan)
    assert bmc._reached == ("10.0.0.5", 2222)
    assert control.own_power().name == f"Wake-on-LAN to {MAC}"
    assert (control.only_wakes, control.has_power()) == (True, False)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    ("reported", "given", "is_own"),
    [
        (["00:25:90:00:00:08"], "00:25:90:00:00:07", False),
        (["00:25:90:00:00:08", "00:25:90:00:00:07"], "00-25-90-00-00-07", True),
        (["00:25:90:00:00:08"], "", True),
        ([], "00:25:90:00:00:07", True),
        # Locally administered: virtual machines may get another one at each start.
        (["52:54:00:00:00:08"], MAC, True),
        (["00:25:90:00:00:08"], MAC, True),
    ],
)
def test_another_machine_is_not_woken(reported: list[str], given: str, is_own: bool, named: bool) -> None:
    """Also if the machine was named: its address in the inventory is that of another."""
    known, told = MachineIdentity("gpu-1", macs=tuple(reported)), list[str]()
    variables = {"gpunodes_bmc_type": "wol", "gpunodes_bmc_mac": given}
    control = MachineControl("gpu-1", "10.0.0.5", variables, 0, known, named=named, report=told.append)
    if is_own:
        assert control.own_power().name.startswith("Wake-on-LAN to ")
    else:
        with pytest.raises(PowerProblem, match="belongs to another machine: no common MAC address") as problem:
            control.own_power()
        assert problem.value.trouble is Trouble.WRONG_MACHINE
        assert "correct gpunodes_bmc_mac" in problem.value.problem.remedy
        skips = MachineControl("gpu-1", "", {**variables, "gpunodes_bmc_identity": "any"}, 0, known, named=named)
        assert skips.own_power().name == f"Wake-on-LAN to {given}"
    assert told == []


# gpunodes power


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fleet of one machine; ``place.states`` are its power states, one after the other, of which the last stays."""
    path = tmp_path / "hosts.yml"
    bmc = f"gpunodes_bmc_type: wol, gpunodes_bmc_mac: '{MAC}'"
    path.write_text(f"workers: {{hosts: {{gpu-1: {{ansible_host: 127.0.0.1, {bmc}}}}}}}\n")
    fleet = InventoryFleet(Inventory(path))
    found = SimpleNamespace(fleet=fleet, machine=fleet.inventory.machines()[0], states=[PowerState.ON], asked=[])
    verdict = Verdict("gpu-1", "live", State.HEALTHY, Action.NONE, boot_id="boot-1")
    found.seen = MachineScan(verdict)
    monkeypatch.setattr(fleet, "scan", lambda _: {"gpu-1": found.seen})
    monkeypatch.setattr(MachineControl, "shut_down", lambda _, boot_id: found.asked.append(boot_id))

    def state(_: Any) -> PowerState:
        left: PowerState = found.states.pop(0) if len(found.states) > 1 else found.states[0]
        return left

    monkeypatch.setattr(wol.WakeOnLan, "state", state)
    monkeypatch.setattr(power, "SHUTDOWN_S", 0.2)
    monkeypatch.setattr("gpunodes.engine.power.time.sleep", lambda _: None)
    return found


def test_off_shuts_the_system_down(place: Any) -> None:
    place.states = [PowerState.ON, PowerState.ON, PowerState.OFF]
    assert power.power(place.fleet, place.machine, power.PowerAction.OFF).state == "off"
    assert place.asked == ["boot-1"]


def test_off_of_a_machine_that_is_off_does_nothing(place: Any) -> None:
    place.states = [PowerState.OFF]
    assert power.power(place.fleet, place.machine, power.PowerAction.OFF).state == "off"
    assert place.asked == []


def test_a_system_that_does_not_end_or_respond_is_told(place: Any) -> None:
    with pytest.raises(PowerProblem, match="still responds 0 s after its system was asked to shut down"):
        power.power(place.fleet, place.machine, power.PowerAction.OFF)
    place.seen = MachineScan(Verdict("gpu-1", "live", State.UNREACHABLE, Action.NONE))
    with pytest.raises(PowerProblem, match="has no BMC, and its system does not respond over SSH"):
        power.power(place.fleet, place.machine, power.PowerAction.OFF)


def test_a_cycle_is_refused_before_anything_happens(place: Any) -> None:
    with pytest.raises(PowerProblem, match="Wake-on-LAN only switches on"):
        power.power(place.fleet, place.machine, power.PowerAction.CYCLE)
    assert place.asked == []


def test_its_status_says_where_it_comes_from(place: Any) -> None:
    found = power.power(place.fleet, place.machine, power.PowerAction.STATUS)
    assert (found.state, found.own) == ("on", None)
    assert found.identities.startswith("the network shows whether it is on; nothing to compare: machine gpu-1 (")
    assert found.identities.endswith(f"; its BMC (MAC {MAC})")
