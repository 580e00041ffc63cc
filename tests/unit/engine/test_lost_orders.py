"""Orders to BMCs whose response is lost, or whose effect is late: they may have been carried out."""

from __future__ import annotations

import http.client
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from gpunodes.engine import machine_control, power
from gpunodes.engine.machine_control import MachineControl
from gpunodes.engine.power import Access, Order, PowerProblem, PowerState, Trouble, Uncertain, kinds
from gpunodes.engine.power import command as power_command
from gpunodes.identity.model import BmcIdentity

from tests import redfish

PAUSE_S = 10.0


class Clock:
    """A clock that only sleeping moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in (power, machine_control):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Bmc:
    """A BMC in memory, whose machine goes off ``late_s`` after the order.

    ``loses`` are orders that it carries out without a response; it is ``silent_s`` silent after each of them.
    """

    name = "BMC"

    def __init__(self, clock: Clock, loses: Sequence[Order] = (), late_s: float = 0.0, silent_s: float = 0.0) -> None:
        self._clock, self._loses, self._late_s, self._silent_s = clock, loses, late_s, silent_s
        self.silent_until = 0.0
        self._off_at = float("inf")
        self.orders: list[Order] = []

    def state(self) -> PowerState:
        if self._clock.now < self.silent_until:
            raise PowerProblem(Trouble.UNREACHABLE, "BMC does not respond")
        return PowerState.OFF if self._clock.now >= self._off_at else PowerState.ON

    def order(self, order: Order) -> None:
        self.orders.append(order)
        if order is not Order.RESET:
            self._off_at = self._clock.now + self._late_s if order is Order.OFF else float("inf")
        if order in self._loses:
            self.silent_until = self._clock.now + self._silent_s
            raise Uncertain(Trouble.UNREACHABLE, "BMC does not respond")

    def identity(self) -> BmcIdentity | None:
        return None

    def change_password(self, _new: str) -> None:
        raise NotImplementedError  # the protocol has it, and no repair changes a password


Made = Callable[[Bmc], tuple[MachineControl, list[str]]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Makes the control of a machine with a BMC, and the list that its reports go to."""

    def made(bmc: Bmc) -> tuple[MachineControl, list[str]]:
        lines: list[str] = []
        monkeypatch.setattr(MachineControl, "power", lambda _: bmc)
        return MachineControl("gpu-1", "127.0.0.1", {}, PAUSE_S, report=lines.append), lines

    return made


def test_a_reset_whose_response_is_lost_counts_as_ordered(clock: Clock, control: Made) -> None:
    """A higher step at once would cut the power of a machine that boots."""
    bmc = Bmc(clock, loses=[Order.RESET])
    ours, lines = control(bmc)
    ours.reset(redfish.held)
    assert bmc.orders == [Order.RESET]
    assert lines == ["BMC does not respond: the reset was sent, and may have been carried out"]


def test_a_reset_of_a_bmc_that_is_not_reached_fails(clock: Clock, control: Made) -> None:
    bmc = Bmc(clock)
    bmc.silent_until = 1.0
    with pytest.raises(PowerProblem, match="does not respond"):
        control(bmc)[0].reset(redfish.held)
    assert bmc.orders == []


@pytest.mark.parametrize(
    "bmc",
    [
        {"loses": [Order.OFF]},
        {"loses": [Order.OFF], "silent_s": 30.0},
        {"loses": [Order.OFF, Order.ON]},
        {"late_s": 90.0},
        {"loses": [Order.OFF], "late_s": 90.0},
    ],
)
def test_a_machine_that_goes_off_without_a_response_or_late_is_switched_on(
    clock: Clock, control: Made, bmc: dict[str, Any]
) -> None:
    """It stayed off, and its node was given up."""
    found = Bmc(clock, **bmc)
    ours, _ = control(found)
    ours.cold_cycle(redfish.held)
    assert found.orders == [Order.OFF, Order.ON]
    assert found.state() is PowerState.ON
    assert clock.now >= PAUSE_S


@pytest.mark.parametrize(
    ("bmc", "trouble"), [({"late_s": 9999.0}, "reports on"), ({"loses": [Order.OFF], "silent_s": 9999.0}, "respond")]
)
def test_a_machine_that_may_be_off_is_reported(clock: Clock, control: Made, bmc: dict[str, Any], trouble: str) -> None:
    found = Bmc(clock, **bmc)
    ours, lines = control(found)
    with pytest.raises(PowerProblem, match=trouble):
        ours.cold_cycle(redfish.held)
    assert found.orders == [Order.OFF]
    assert lines == ["the order to switch it off was sent: it may be off, or go off yet"]


def test_a_cold_cycle_without_an_order_reports_nothing(clock: Clock, control: Made) -> None:
    bmc = Bmc(clock)
    bmc.silent_until = 1.0
    ours, lines = control(bmc)
    with pytest.raises(PowerProblem, match="does not respond"):
        ours.cold_cycle(redfish.held)
    assert (bmc.orders, lines, clock.now) == ([], [], 0.0)


def at(address: str, kind: str = "redfish", command: str = "") -> power.Power:
    return kinds.connect("gpu-1", Access(kind, address, "", "", command=command))


def test_redfish_tells_an_order_that_was_sent_from_one_that_was_not() -> None:
    """The BMC closes the connection instead of a response; then nothing listens there any more."""
    server = redfish.fake("loses", state="On")
    bmc = at(f"http://127.0.0.1:{server.server_port}")
    with pytest.raises(Uncertain, match="does not respond") as lost:
        bmc.order(Order.OFF)
    assert lost.value.trouble is Trouble.UNREACHABLE
    power.change(bmc, Order.ON, redfish.held, 5, 0.1)
    assert bmc.state() is PowerState.ON
    server.shutdown()
    server.server_close()
    with pytest.raises(PowerProblem, match="does not respond") as refused:
        bmc.order(Order.OFF)
    assert not isinstance(refused.value, Uncertain)


@pytest.mark.parametrize("end", [TimeoutError(), http.client.IncompleteRead(b"{", 5), ConnectionResetError(104, "x")])
def test_redfish_sent_an_order_whose_response_does_not_come_to_its_end(
    end: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = redfish.fake("obeys", state="On")
    bmc = at(f"http://127.0.0.1:{server.server_port}")
    assert bmc.state() is PowerState.ON
    monkeypatch.setattr(http.client.HTTPConnection, "getresponse", mock.Mock(side_effect=end))
    with pytest.raises(Uncertain, match="does not respond"):
        bmc.order(Order.RESET)
    with pytest.raises(PowerProblem) as asked:
        bmc.state()
    assert not isinstance(asked.value, Uncertain)
    server.shutdown()


@pytest.mark.parametrize(
    ("script", "is_sent"),
    [
        ("echo 'Unable to set Chassis Power Control to Reset' >&2; exit 1", True),
        ("echo 'Error: Unable to establish IPMI v2 / RMCP+ session' >&2; exit 1", False),
        ("echo 'Set Chassis Power Control to Reset failed: Node busy' >&2; exit 1", False),
    ],
)
def test_ipmitool_tells_an_order_that_was_sent_from_one_that_was_not(
    script: str, is_sent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "ipmitool"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(PowerProblem) as problem:
        at("10.0.0.8", "ipmi").order(Order.RESET)
    assert isinstance(problem.value, Uncertain) is is_sent


def test_a_command_that_does_not_end_may_have_carried_out_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(power_command, "_TIMEOUT_S", 1)
    program = tmp_path / "pdu"
    program.write_text("#!/bin/sh\nsleep 60\n")
    program.chmod(0o755)
    with pytest.raises(Uncertain, match="did not end"):
        at("", "command", str(program)).order(Order.RESET)
    program.chmod(0o644)
    for ask in (lambda: at("", "command", str(program)).order(Order.RESET), at("", "command", "/nowhere/x").state):
        with pytest.raises(PowerProblem, match="cannot be started") as problem:
            ask()
        assert not isinstance(problem.value, Uncertain)
