"""Machines switched through BMCs by Redfish: identity, password, lock, and what is done while they are locked."""

from __future__ import annotations

import dataclasses
import errno
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gpunodes.autoscale import plan
from gpunodes.autoscale.emptying import StillUsed
from gpunodes.autoscale.power import AlreadyOn, BmcMachines
from gpunodes.autoscale.state import Kubelet
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.leases.errors import Held
from gpunodes.engine.leases.held import Leases
from gpunodes.engine.power import PowerProblem, PowerState, Trouble, wol
from gpunodes.engine.power.redfish import Redfish

from tests import redfish, repair_fleet
from tests.power_fleet import document, uuid
from tests.sshd import free_ports

Start = Callable[..., tuple[BmcMachines, list[str]]]


class Locks:
    """Leases that record what is done with them, ``done`` in common with the tests."""

    def __init__(self, done: list[str], lost: bool = False) -> None:
        self.done = done
        self.lost = lost

    def take(self, machine: str) -> None:
        self.done.append(f"take {machine}")

    def confirm(self, machine: str) -> None:
        if self.lost and "before" in self.done:
            raise RuntimeError("the lock is lost")

    def release_unused(self, machine: str) -> None:
        self.done.append(f"release {machine}")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    servers = []
    monkeypatch.setattr("gpunodes.autoscale.power._POLL_S", 0.02)

    def make(manner: str, state: str = "Off", *, lost: bool = False, **hardware: Any) -> tuple[BmcMachines, list[str]]:
        done: list[str] = []
        servers.append(redfish.fake(manner, state=state, resets=done, hardware={"UUID": uuid("w1"), **hardware}))
        found = document({"w1": "h100"}, {"h100": (0, 1, 0)})
        found["machines"]["w1"]["identity"] |= {"serial": "A-1", "macs": ["00:25:90:00:00:01"]}
        found["machines"]["w1"]["bmc"] = {
            "gpunodes_bmc_type": "redfish",
            "gpunodes_bmc_address": f"http://127.0.0.1:{servers[-1].server_port}",
            "gpunodes_bmc_user": "admin",
            "gpunodes_bmc_verify": "true",
            "gpunodes_bmc_identity": "check",
        }
        (tmp_path / "w1").write_text("secret\n")
        leases: Any = Locks(done, lost)
        return BmcMachines(plan.parse(found), tmp_path, leases, lambda _: None, shutdown_s=0.3), done

    yield make
    for server in servers:
        server.shutdown()


def test_a_machine_is_switched_on_while_it_is_locked(start: Start) -> None:
    machines, done = start("obeys")
    machines.switch_on("w1", lambda: None, again=False)
    assert done == ["take w1", "On", "release w1"]
    assert machines.state("w1") is PowerState.ON
    with pytest.raises(AlreadyOn):
        machines.switch_on("w1", lambda: None, again=False)
    machines.switch_on("w1", lambda: None, again=True)
    assert done.count("On") == 1


def test_a_system_shuts_down_and_its_node_is_deleted_while_it_is_locked(start: Start) -> None:
    machines, done = start("obeys", "On")
    machines.switch_off("w1", lambda: done.append("before"), lambda: done.append("then"))
    assert done == ["take w1", "before", "GracefulShutdown", "then", "release w1"]


def test_a_system_that_does_not_end_loses_its_power(start: Start) -> None:
    machines, done = start("hangs", "On")
    machines.switch_off("w1", lambda: done.append("before"), lambda: done.append("then"))
    assert done == ["take w1", "before", "GracefulShutdown", "ForceOff", "then", "release w1"]


def test_the_node_of_a_machine_that_was_off_only_once_stays(start: Start) -> None:
    """Its power was switched off; its BMC reported that once, and since then that it is on."""
    machines, done = start("relapses", "On")
    with pytest.raises(PowerProblem, match="not twice in a row") as caught:
        machines.switch_off("w1", lambda: done.append("before"), lambda: done.append("then"))
    assert caught.value.trouble is Trouble.INCONSISTENT
    assert done == ["take w1", "before", "GracefulShutdown", "ForceOff", "release w1"]


def test_a_machine_that_is_off_is_not_ordered_anything(start: Start) -> None:
    machines, done = start("obeys")
    machines.switch_off("w1", lambda: done.append("before"), lambda: done.append("then"))
    assert done == ["take w1", "before", "then", "release w1"]


def test_a_machine_in_use_is_not_ordered_anything(start: Start) -> None:
    machines, done = start("obeys", "On")

    def used() -> None:
        raise StillUsed("pods run on it")

    with pytest.raises(StillUsed):
        machines.switch_off("w1", used, lambda: done.append("then"))
    assert done == ["take w1", "release w1"]


def test_a_lost_lock_stops_before_the_order(start: Start) -> None:
    machines, done = start("obeys", "On", lost=True)
    with pytest.raises(RuntimeError, match="lost"):
        machines.switch_off("w1", lambda: done.append("before"), lambda: done.append("then"))
    assert done == ["take w1", "before", "release w1"]


@pytest.mark.parametrize("state", ["Off", "On"])
def test_a_lock_that_is_lost_while_the_bmc_responds_stops_the_order(
    start: Start, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    machines, done = start("obeys", state, lost=True)
    read = Redfish.state

    def slow(bmc: Redfish) -> PowerState:
        done.append("before")
        return read(bmc)

    monkeypatch.setattr(Redfish, "state", slow)
    with pytest.raises(RuntimeError, match="lost"):
        machines.switch_on("w1", lambda: None, again=True) if state == "Off" else machines.switch_off(
            "w1", *[lambda: None] * 2
        )
    assert set(done) == {"take w1", "before", "release w1"}


@pytest.mark.parametrize(
    "hardware",
    [
        {"UUID": uuid("w9")},
        # A clone, or a board of the same vendor: the UUID is the same.
        {"SerialNumber": "B-2"},
        {"macs": ["00:25:90:00:00:02"]},
        {"macs": ["00:25:90:00:00:02"], "SerialNumber": "A-1"},
    ],
)
@pytest.mark.parametrize(
    ("state", "ask"),
    [
        ("Off", lambda machines: machines.switch_on("w1", lambda: None, again=False)),
        ("On", lambda machines: machines.switch_off("w1", lambda: None, lambda: None)),
        ("On", lambda machines: machines.state("w1")),
    ],
)
def test_the_bmc_of_another_machine_gets_no_order(
    start: Start, state: str, ask: Callable[[BmcMachines], object], hardware: dict[str, Any]
) -> None:
    machines, done = start("obeys", state, **hardware)
    with pytest.raises(PowerProblem) as caught:
        ask(machines)
    assert caught.value.trouble is Trouble.WRONG_MACHINE
    assert not {"On", "ForceOff", "GracefulShutdown"} & set(done)


class Wakes:
    """A machine without a BMC: it starts to listen when a packet for it comes, and ends when its node is marked."""

    def __init__(self, mac: str) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.settimeout(10)
        self.port = self._socket.getsockname()[1]
        self._wanted = wol.packet(bytes.fromhex(mac.replace(":", "")))
        self._kubelet: socket.socket | None = None
        [self.kubelet_port] = free_ports(1)

    def wait(self) -> None:
        while self._socket.recv(200) != self._wanted:
            pass
        self._kubelet = socket.create_server(("127.0.0.1", self.kubelet_port))

    def end(self) -> None:
        if self._kubelet:
            self._kubelet.close()
        self._socket.close()


def test_a_machine_without_a_bmc_is_woken_and_shuts_itself_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is that of its network. A port that refuses counts as on: here the network is off when it is closed."""
    mac = "02:00:00:00:00:07"
    machine = Wakes(mac)
    monkeypatch.setattr("gpunodes.autoscale.power._POLL_S", 0.02)
    monkeypatch.setattr("gpunodes.autoscale.power.KUBELET", machine.kubelet_port)
    monkeypatch.setattr(wol, "_ALIVE", frozenset())
    monkeypatch.setattr(wol, "_SILENT", frozenset({errno.ECONNREFUSED}))
    monkeypatch.setattr(wol, "_PAUSE_S", 0.01)
    done: list[str] = []
    found = document({"w1": "h100"}, {"h100": (0, 1, 0)})
    found["machines"]["w1"]["bmc"] = {
        "gpunodes_bmc_type": "wol",
        "gpunodes_bmc_address": f"127.0.0.1:{machine.port}",
        "gpunodes_bmc_mac": mac,
    }
    leases: Any = Locks(done)
    asked = []

    def ask_off(name: str) -> None:
        asked.append(name)
        machine.end()

    machines = BmcMachines(plan.parse(found), tmp_path, leases, ask_off, shutdown_s=5)
    assert machines.state("w1") is PowerState.OFF
    with ThreadPoolExecutor(1) as pool:
        pool.submit(machine.wait)
        machines.switch_on("w1", lambda: None, again=False)
    assert machines.state("w1") is PowerState.ON
    machines.switch_off("w1", lambda: done.append("before"), lambda: done.append("then"))
    assert asked == ["w1"]
    assert done == ["take w1", "release w1", "take w1", "before", "then", "release w1"]


def test_a_machine_without_a_bmc_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen of them that never boot kept every other machine from being switched on or off for half an hour."""
    monkeypatch.setattr(wol.WakeOnLan, "state", lambda _: PowerState.OFF)
    done: list[str] = []
    monkeypatch.setattr(wol.WakeOnLan, "order", lambda _, order: done.append(order.value))
    found = document({"w1": "h100"}, {"h100": (0, 1, 0)})
    found["machines"]["w1"]["bmc"] = {"gpunodes_bmc_type": "wol", "gpunodes_bmc_mac": "02:00:00:00:00:07"}
    leases: Any = Locks(done)
    machines = BmcMachines(plan.parse(found), tmp_path, leases, lambda _: None)
    began = time.monotonic()
    machines.switch_on("w1", lambda: done.append("before"), again=False)
    assert done == ["take w1", "before", "on", "release w1"]
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("held", ["the machine", "a control plane, alone"])
def test_a_machine_that_another_command_holds_is_not_ordered_anything(start: Start, held: str) -> None:
    """With the Leases of both, in an API in memory."""
    machines, done = start("obeys")
    api: Any = repair_fleet.Api()
    own, other = Leases(Cluster(api), "the power server"), Leases(Cluster(api), "power on")
    other.holder = "ann@desk/power on/another-boot/7/7/7"
    machines._leases = own
    other.take("w1") if held == "the machine" else other.take("control-1", alone=True)
    with pytest.raises(Held):
        machines.switch_on("w1", lambda: done.append("before"), again=True)
    with pytest.raises(Held):
        machines.switch_off("w1", lambda: done.append("before"), lambda: done.append("then"))
    assert done == []
    other.release_all()
    machines.switch_on("w1", lambda: done.append("before"), again=True)
    assert done == ["before", "On"]
    assert api.leases == {}
    for each in (own, other):
        each.close()


def test_a_packet_is_not_sent_to_an_address_that_the_machine_does_not_have(tmp_path: Path) -> None:
    found = document({"w1": "h100"}, {"h100": (0, 1, 0)})
    found["machines"]["w1"]["bmc"] = {"gpunodes_bmc_type": "wol", "gpunodes_bmc_mac": "00:25:90:00:00:07"}
    found["machines"]["w1"]["identity"]["macs"] = ["00:25:90:00:00:08"]
    leases: Any = Locks([])
    machines = BmcMachines(plan.parse(found), tmp_path, leases, lambda _: None)
    with pytest.raises(PowerProblem, match=r"no common MAC address: machine w1 .*MAC 00:25:90:00:00:08") as caught:
        machines.state("w1")
    assert caught.value.trouble is Trouble.WRONG_MACHINE


def test_the_network_shows_whether_a_kubelet_listens(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    machines, _ = start("obeys")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setattr("gpunodes.autoscale.power.KUBELET", listening.getsockname()[1])
        assert machines.kubelet("w1") is Kubelet.RUNS
    assert machines.kubelet("w1") is Kubelet.DOWN
    monkeypatch.setattr(socket, "create_connection", lambda *_: (_ for _ in ()).throw(TimeoutError()))
    assert machines.kubelet("w1") is Kubelet.SILENT


def test_an_authority_of_the_plan_is_a_private_file(start: Start) -> None:
    machines, _ = start("obeys")
    text = "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"
    given = {"gpunodes_bmc_verify": "/home/me/ca.pem"}
    machines.plan = dataclasses.replace(machines.plan, authorities={"/home/me/ca.pem": text})
    found = machines._settings("w1", given)
    path = Path(found["gpunodes_bmc_verify"])
    assert path.read_text() == text
    assert path.stat().st_mode & 0o777 == 0o600
    assert machines._settings("w1", given) == found, "one file for all machines"
    assert found["gpunodes_bmc_password"] == "secret"
    path.unlink()


def test_a_machine_is_not_woken_by_an_address_of_another_in_the_plan(tmp_path: Path) -> None:
    """The plan may be one that an earlier release made."""
    found = document({"w1": "h100", "w2": "h100"}, {"h100": (0, 2, 0)})
    for each in found["machines"].values():
        each["bmc"] = {"gpunodes_bmc_type": "wol", "gpunodes_bmc_identity": "check"}
        each["identity"] |= {"macs": ["00:25:90:00:00:01"]}
    done: list[str] = []
    leases: Any = Locks(done)
    machines = BmcMachines(plan.parse(found), tmp_path, leases, lambda _: None)
    with pytest.raises(PowerProblem, match=r"w1 reported no MAC address of its own to wake: \S+ is one of w2, too"):
        machines.switch_on("w1", lambda: None, again=True)
    assert done == ["take w1", "release w1"]
