"""A machine switched off after a drain, and on until it is ready: in memory, with a BMC that does what it is told."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import io
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from gpunodes.autoscale import kept_off
from gpunodes.autoscale.state import MachineState, Phase
from gpunodes.cli import main, terminal
from gpunodes.engine.cluster.errors import NoCluster
from gpunodes.engine.leases.errors import Lost
from gpunodes.engine.leases.holders import user_at_host
from gpunodes.engine.machine_control import Membership
from gpunodes.engine.power import Order, PowerProblem, PowerState, Trouble
from gpunodes.engine.scans import MachineScan
from gpunodes.errors import ExitCode, GpunodesError, WrongInput
from gpunodes.model import Machine as Entry
from gpunodes.operations import power, switched_off, switching, waking
from gpunodes.operations.autoscale import switched_on
from gpunodes.repair.maintenance import Maintenance
from gpunodes.repair.policy import Budget
from gpunodes.repair.switched_off import Switched
from gpunodes.rollout.record import RolloutOutcome

from tests import repair_fleet, rollout_fleet
from tests.repair_fleet import Fleet

MARK = "gpunodes.dev/maintenance"


@dataclass
class Bmc:
    """A BMC in memory; the machine boots when it is switched on."""

    machine: repair_fleet.Machine
    orders: list[str] = field(default_factory=list)
    name: str = "a BMC in memory"

    def state(self) -> PowerState:
        return PowerState.OFF if self.machine.off else PowerState.ON

    def order(self, order: Order) -> None:
        self.orders.append(order.value)
        self.machine.off = order is Order.OFF
        if order is Order.ON:
            self.machine.use("power")


@dataclass
class Control:
    """The control of a machine in memory."""

    machine: repair_fleet.Machine
    bmc: Any
    ends: bool = True
    """Its system ends when it is asked to."""
    own: bool = True
    asked: list[str] = field(default_factory=list)
    meanwhile: Callable[[], None] = lambda: None
    """What happens while its system ends."""
    member: Membership = Membership.NONE
    only_wakes: bool = False

    def power(self) -> Any:
        return self.bmc

    def own_power(self) -> Any:
        if not self.own:
            raise PowerProblem(Trouble.WRONG_MACHINE, "the BMC belongs to another machine")
        return self.bmc

    def membership(self) -> Membership:
        return Membership.UNKNOWN if self.machine.off else self.member

    def shut_down(self, boot_id: str) -> None:
        self.asked.append(boot_id)
        self.meanwhile()
        if self.ends and boot_id == self.machine.boot_id:
            self.machine.off = True


class Place(Fleet):
    """A fleet whose machines have BMCs."""

    def __init__(self, made: Fleet) -> None:
        super().__init__(made.api, made.machines, made._control_planes)
        self.controls = {name: Control(each, Bmc(each)) for name, each in made.machines.items()}

    def machine_control(self, machine: Entry, **_: Any) -> Any:
        return self.controls[machine.name]

    def scan(self, machines: Sequence[Entry], *, full: bool = True) -> dict[str, MachineScan]:
        self.scanned()
        return super().scan(machines, full=full)

    def scanned(self) -> None:
        """What a scan brings to light."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    repair_fleet.hurry(monkeypatch, tmp_path)
    monkeypatch.setattr(
        switching, "time_limits", lambda _: switching.TimeLimits(drain=0.3, verify=0.3, shutdown=0.2, poll=0.01)
    )
    return Place(repair_fleet.fleet(3))


def switch(place: Any, action: str, name: str = "w1", lines: list[str] | None = None) -> Any:
    machine = next(each for each in place.all_machines() if each.name == name)
    said = [] if lines is None else lines
    return getattr(switching, action)(place, machine, lambda _, text: said.append(text))


def mark(place: Any, name: str = "w1") -> str:
    return str(place.api.nodes[name]["metadata"]["annotations"].get(MARK, ""))


def test_off_drains_and_shuts_down_and_on_gives_the_node_back(place: Any) -> None:
    place.api.add_pod("train", "w1")
    place.api.add_pod("agent", "w1", owner="DaemonSet")
    control = place.controls["w1"]
    done = switch(place, "off")
    assert (done.state, control.asked, control.bmc.orders) == ("off", ["w1-boot-1"], []), "its system ended itself"
    assert set(place.api.pods) == {"agent"}
    assert switching.REASON in mark(place)
    assert place.api.nodes["w1"]["spec"]["unschedulable"]
    assert [name for name, each in place.api.nodes.items() if each["spec"].get("unschedulable")] == ["w1"]
    assert switch(place, "off").state == "off", "again: nothing to do"
    done = switch(place, "on")
    assert (done.state, control.bmc.orders) == ("on", ["on"])
    repair_fleet.clean(place)
    assert [each["reason"] for each in place.api.events] == ["SwitchedOff", "SwitchedOn"]


def test_a_system_that_does_not_end_is_switched_off(place: Any) -> None:
    control, lines = place.controls["w1"], list[str]()
    control.ends = False
    assert switch(place, "off", lines=lines).state == "off"
    assert control.bmc.orders == ["off"]
    assert any("did not end within" in line for line in lines)


@pytest.mark.parametrize("kind", ["budgeted", "sticky", "bare"])
def test_pods_that_cannot_leave_keep_the_machine_on(place: Any, kind: str) -> None:
    place.api.add_pod("train", "w1", owner="" if kind == "bare" else "ReplicaSet")
    if kind != "bare":
        getattr(place.api, kind).add("train")
    with pytest.raises(GpunodesError, match=r"pods of w1 cannot leave: .*train"):
        switch(place, "off")
    assert place.controls["w1"].bmc.state() is PowerState.ON
    assert place.controls["w1"].asked == []
    repair_fleet.clean(place)


def test_no_pod_is_evicted_from_a_machine_that_another_one_keeps_on(place: Any) -> None:
    place.api.add_pod("notebook", "w1", owner="")
    place.api.add_pod("train", "w1")
    with pytest.raises(GpunodesError, match=r"pods of w1 cannot leave: .*notebook"):
        switch(place, "off")
    assert {*place.api.pods} == {"notebook", "train"}
    repair_fleet.clean(place)


def test_the_maintenance_of_a_person_stays(place: Any) -> None:
    place.api.nodes["w1"]["metadata"]["annotations"][MARK] = "new disks"
    lines: list[str] = []
    switch(place, "off")
    switch(place, "on", lines=lines)
    assert json.loads(mark(place))["reason"] == "new disks"
    assert "it stays in maintenance: new disks" in lines


def test_a_node_in_maintenance_without_a_cordon_gets_no_new_pods_before_its_machine_is_off(place: Any) -> None:
    place.api.nodes["w1"]["metadata"]["annotations"][MARK] = Maintenance("fans", until=32503680000.0).text()
    place.api.add_pod("train", "w1")
    cordoned, lines = list[bool](), list[str]()

    def seen(_: str, path: str) -> None:
        if path.endswith("/eviction"):
            cordoned.append(bool(place.api.nodes["w1"]["spec"].get("unschedulable")))

    place.api.before = seen
    switch(place, "off", lines=lines)
    assert cordoned == [True]
    assert any("fans, until 3000-01-01 00:00 UTC; when that ends, a repair may switch" in line for line in lines)


@pytest.mark.parametrize("again", [False, True], ids=["the command's cordon", "a person cordons it meanwhile"])
def test_the_maintenance_of_a_person_is_as_before_if_pods_cannot_leave(place: Any, again: bool) -> None:
    """The node had no cordon, and kept that of the failed command until the maintenance ended."""
    before = Maintenance("watch the fans", "ann", 1.0).text()
    place.api.nodes["w1"]["metadata"]["annotations"][MARK] = before
    place.api.add_pod("train", "w1")
    place.api.budgeted.add("train")
    if again:
        place.api.before = lambda _, path: place.cordon("w1") if path.endswith("/eviction") else None
    with pytest.raises(GpunodesError, match=r"pods of w1 cannot leave"):
        switch(place, "off")
    assert mark(place) == before
    assert bool(place.api.nodes["w1"]["spec"].get("unschedulable")) is again


def test_a_machine_that_is_off_already_gets_its_maintenance(place: Any) -> None:
    """Otherwise the next repair switches it on."""
    place.machines["w1"].off = True
    assert switch(place, "off").state == "off"
    assert switching.REASON in mark(place)
    assert place.controls["w1"].bmc.orders == []


def test_the_bmc_is_compared_with_the_machine_that_responds_now(place: Any) -> None:
    """Its record may be missing, or that of an earlier machine."""
    control = place.controls["w1"]
    place.scanned = lambda: setattr(control, "own", False)
    with pytest.raises(PowerProblem, match="another machine"):
        switch(place, "off")
    assert (control.asked, control.bmc.orders, mark(place)) == ([], [], "")


def steal(place: Any) -> None:
    """Another command takes all locks."""
    for lease in place.api.leases.values():
        lease["spec"]["holderIdentity"] = "alice@elsewhere 1 2 repair"
        place.api.version += 1
        lease["metadata"]["resourceVersion"] = str(place.api.version)


def test_the_power_stays_on_if_another_command_took_the_machine_while_it_shut_down(place: Any) -> None:
    control = place.controls["w1"]
    control.ends, control.meanwhile = False, lambda: steal(place)
    with pytest.raises(Lost, match="was taken by"):
        switch(place, "off")
    assert control.bmc.orders == []


def test_nothing_is_ordered_if_another_command_took_the_machine_while_its_bmc_responded(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A BMC may need minutes to report its identity and its state."""
    control, own_power, state = place.controls["w1"], Control.own_power, Bmc.state

    def slow(of: Control) -> Any:
        steal(place)
        return own_power(of)

    def slow_state(of: Bmc) -> PowerState:
        steal(place)
        return state(of)

    with monkeypatch.context() as patch:
        patch.setattr(Control, "own_power", slow)
        with pytest.raises(Lost, match="was taken by"):
            switch(place, "off")
    assert (control.asked, control.bmc.orders) == ([], [])
    place.machines["w1"].off = True
    place.api.leases.clear()
    monkeypatch.setattr(Bmc, "state", slow_state)
    with pytest.raises(Lost, match="was taken by"):
        switch(place, "on")
    assert control.bmc.orders == []


def test_a_node_that_another_command_took_during_the_drain_is_left_as_it_is(place: Any) -> None:
    place.api.add_pod("train", "w1")
    place.api.budgeted.add("train")
    place.api.before = lambda _, path: steal(place) if path.endswith("/eviction") else None
    with pytest.raises(GpunodesError, match=r"cannot leave|was taken by"):
        switch(place, "off")
    assert switching.REASON in mark(place), "its cordon may be that of the other command now"
    assert place.api.nodes["w1"]["spec"]["unschedulable"]
    assert place.controls["w1"].asked == []


def test_the_maintenance_stays_if_another_command_took_the_machine_while_it_started(place: Any) -> None:
    switch(place, "off")
    place.scanned = lambda: steal(place)
    with pytest.raises(Lost, match="was taken by"):
        switch(place, "on")
    assert switching.REASON in mark(place)


def test_a_machine_that_is_not_ready_in_time_stays_in_maintenance(place: Any) -> None:
    switch(place, "off")
    place.machines["w1"].gpus = 8
    place.api.nodes["w1"]["status"]["allocatable"]["nvidia.com/gpu"] = "7"
    with pytest.raises(GpunodesError, match="7 of 8 GPUs can be allocated"):
        switch(place, "on")
    assert switching.REASON in mark(place)
    place.api.nodes["w1"]["status"]["allocatable"]["nvidia.com/gpu"] = "8"
    switch(place, "on")
    repair_fleet.clean(place)


def test_what_is_not_switched(place: Any) -> None:
    place.controls["w0"].bmc = None
    with pytest.raises(WrongInput, match="w0 has no BMC"):
        switch(place, "off", "w0")
    place.controls["w1"].own = False
    with pytest.raises(PowerProblem, match="another machine"):
        switch(place, "off", "w1")
    place.api.nodes["w2"]["metadata"]["labels"]["node-role.kubernetes.io/control-plane"] = ""
    with pytest.raises(WrongInput, match="w2 is a control plane"):
        switch(place, "off", "w2")
    assert all(not machine.off for machine in place.machines.values())
    repair_fleet.clean(place)


@pytest.mark.parametrize("note", ["gpunodes.dev/cordoned-by", "gpunodes.dev/rollout"])
def test_a_node_that_a_repair_or_a_roll_out_holds_is_left_alone(place: Any, note: str) -> None:
    place.api.nodes["w1"]["metadata"]["annotations"][note] = "20261101-1"
    place.api.nodes["w1"]["spec"]["unschedulable"] = True
    with pytest.raises(WrongInput, match=r"an unfinished (repair|roll-out) holds w1"):
        switch(place, "off")
    assert place.controls["w1"].asked == []
    assert mark(place) == ""


def test_another_machine_behind_the_name_is_not_shut_down(place: Any) -> None:
    """It reports another boot than any node has, and its name is not confirmed by anything."""
    place.machines["w1"].boot = 9
    place.api.nodes["w1"]["status"]["addresses"] = [{"type": "InternalIP", "address": "addr-other"}]
    place.api.nodes["w1"]["metadata"]["name"] = "other"
    with pytest.raises(WrongInput, match=r"^w1: .*(no node|may not be the same machine)"):
        switch(place, "off")
    assert (place.controls["w1"].asked, place.controls["w1"].bmc.orders) == ([], [])


@pytest.mark.parametrize(("action", "flag"), [("on", "--drain"), ("off", "--wait"), ("status", "--drain")])
def test_flags_fit_their_action(
    action: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["gpunodes", "power", "w1", action, flag])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ExitCode.WRONG_INPUT
    assert f"{flag} with {action}" in capsys.readouterr().err


SERVING = """
control_plane: {hosts: {c1: {ansible_host: 127.0.0.1}}}
workers: {hosts: {w1: {ansible_host: 127.0.0.2}, w2: {ansible_host: 127.0.0.3}}}
storage: {hosts: {w1: }}
all: {vars: {gpunodes_storage: [{name: data, path: /srv/data, size: 9Gi}]}}
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("w1", "off", "--drain", "--yes"), "w1 serves data to nodes that stay"),
        (("w1", "off"), "without a shutdown of its system; programs on other nodes that use data hang until it is on"),
        (("w1", "cycle"), "programs on other nodes that use data hang until it is on again. Continue?"),
        (("w2", "off"), "The power of w2 is switched off, without a shutdown of its system. Continue?"),
    ],
)
def test_a_machine_that_serves_shared_storage_is_not_switched_off_as_an_idle_one(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts.yml").write_text(SERVING)
    monkeypatch.setattr(terminal, "check_confirmable", lambda *_, **__: None)
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    monkeypatch.setattr("sys.argv", ["gpunodes", "power", *words, "-i", "hosts.yml"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ExitCode.WRONG_INPUT
    assert message in " ".join(capsys.readouterr().err.split())


class Bare:
    """The machine w1 of a fleet, off and without a node; ``lines`` are the messages of `power on --wait`."""

    def __init__(self, place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = place
        self.machine, self.control = place.machines["w1"], place.controls["w1"]
        self.machine.off = True
        self.machine.use = self.boots
        self.node = place.api.nodes.pop("w1")
        self.registers = False
        self.lines: list[str] = []
        self.locked: list[str] = []
        monkeypatch.setattr(power, "locked", self.lock)

    @contextlib.contextmanager
    def lock(self, _: Any, machine: Entry, action: power.PowerAction, __: Any) -> Iterator[Callable[[], None]]:
        self.locked.append(f"{action.value} {machine.name}")
        yield lambda: None

    def boots(self, _: str) -> None:
        self.machine.boot, self.machine.sick = 2, False
        if self.registers:
            self.node["status"]["nodeInfo"]["bootID"] = self.machine.boot_id
            self.place.api.nodes["w1"] = self.node

    def on(self) -> Any:
        return switch(self.place, "on", lines=self.lines)


@pytest.fixture
def bare(place: Any, monkeypatch: pytest.MonkeyPatch) -> Bare:
    return Bare(place, monkeypatch)


def test_a_machine_that_never_joined_is_waited_for_over_ssh(bare: Bare) -> None:
    done = bare.on()
    assert (done.state, done.waited, bare.locked) == ("on", "ssh", ["on w1"])
    assert bare.lines[-1] == "it responds over SSH; it is no member of a cluster: `gpunodes join w1` makes it one"


def test_a_machine_whose_files_cannot_be_read_is_not_called_no_member(bare: Bare) -> None:
    bare.control.member = Membership.UNKNOWN
    assert bare.on().waited == "ssh"
    assert bare.lines[-1] == "it responds over SSH; if it is no member of a cluster, `gpunodes join w1` makes it one"


def test_a_machine_whose_node_was_deleted_registers_it_again(bare: Bare) -> None:
    bare.control.member, bare.registers = Membership.MEMBER, True
    done = bare.on()
    assert (done.state, done.waited) == ("on", "node")
    assert "its kubelet is a member of a cluster: waiting until its node is ready" in bare.lines[-1]


def test_a_machine_of_a_pool_that_scales_is_waited_for_until_its_node_is_ready(bare: Bare) -> None:
    bare.control.member, bare.registers = Membership.UNKNOWN, True
    bare.place.api.switched = {"w1": json.dumps({"phase": "off", "since": 1.0, "reason": "no pod needs it"})}
    assert bare.on().waited == "node"
    assert "its pool scales" in bare.lines[-1]


def test_a_node_that_does_not_register_in_time_is_an_error_with_its_remedy(bare: Bare) -> None:
    bare.control.member = Membership.MEMBER
    with pytest.raises(GpunodesError, match="w1 is on, but after 0 s its node has not registered") as caught:
        bare.on()
    assert "`gpunodes join w1`" in caught.value.problem.remedy


def test_a_certificate_that_has_ended_is_not_waited_for(bare: Bare) -> None:
    """The next command is `gpunodes join`: the kubelet does not start before."""
    bare.control.member = Membership.ENDED
    assert bare.on().waited == "ssh"
    assert "the certificate of its kubelet has ended: `gpunodes join w1`" in bare.lines[-1]


def test_a_machine_that_does_not_respond_is_an_error(bare: Bare) -> None:
    bare.machine.sshd = False
    with pytest.raises(GpunodesError, match="after 0 s it does not respond over SSH"):
        bare.on()


def test_without_a_cluster_ssh_is_waited_for(bare: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def none(*_: Any) -> Iterator[None]:
        raise NoCluster("no control plane has a cluster")
        yield

    monkeypatch.setattr(switching, "connected", none)
    assert bare.on().waited == "ssh"
    assert "there is no cluster" in bare.lines[-1]


def test_a_machine_with_a_node_says_that_it_was_waited_for(place: Any) -> None:
    switch(place, "off")
    assert switch(place, "on").waited == "node"


# Machines that are off on purpose


def recorded(place: Any, phase: str = "off", name: str = "w1") -> None:
    place.api.switched = {name: json.dumps({"phase": phase, "since": 1.0, "reason": "a reason"}), "w9": "{}"}


def left_by_the_autoscaler(place: Any, name: str = "w1", provider: str = "") -> Any:
    """The node of a machine that was switched off, or given up; ``provider`` is its provider id."""
    node = place.api.nodes[name]
    taints = [f"gpunodes.dev/{each}" for each in ("starting", "stopping", "yours")]
    node["spec"] |= {"providerID": provider or f"gpunodes://{name}", "taints": []}
    node["spec"]["taints"] = [{"key": each, "effect": "NoSchedule"} for each in taints]
    return node


def taints_of(node: Any) -> list[str]:
    return [each["key"].rpartition("/")[2] for each in node["spec"]["taints"]]


@pytest.fixture(params=["with --wait", "without --wait"])
def switches(request: pytest.FixtureRequest, place: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Switches w1 on or off; returns the messages."""

    @contextlib.contextmanager
    def lock(*_: Any) -> Iterator[Callable[[], None]]:
        yield lambda: None

    monkeypatch.setattr(power, "locked", lock)

    def call(action: str) -> list[str]:
        lines: list[str] = []
        if request.param == "with --wait":
            switch(place, action, lines=lines)
        else:
            machine = next(each for each in place.all_machines() if each.name == "w1")
            power.power(place, machine, power.PowerAction(action), report=lambda _, text: lines.append(text))
        return lines

    return call


@pytest.mark.parametrize("phase", ["off", "failed", "by-hand", "stopping", "starting", "giving-up"])
def test_a_machine_that_is_switched_on_is_off_on_purpose_no_longer(
    place: Any, switches: Callable[[str], list[str]], phase: str
) -> None:
    recorded(place, phase)
    node = left_by_the_autoscaler(place)
    place.machines["w1"].off = True
    lines = switches("on")
    assert place.api.switched == {"w9": "{}"}
    assert taints_of(node) == ["yours"]
    assert "it is off on purpose no longer" in lines
    assert any("left on its node are removed" in line for line in lines)
    assert not [line for line in switches("on") if "off on purpose" in line], "again: nothing to say"


@pytest.mark.parametrize(
    ("phase", "wanted"), [("off", "takes it into service when its node is ready"), ("stopping", "it does not stay on")]
)
def test_where_there_is_an_autoscaler_it_ends_that_itself(
    place: Any, switches: Callable[[str], list[str]], phase: str, wanted: str
) -> None:
    recorded(place, phase)
    node = left_by_the_autoscaler(place)
    place.api.scales = place.machines["w1"].off = True
    before = dict(place.api.switched)
    assert any(wanted in line for line in switches("on"))
    assert (place.api.switched, len(taints_of(node))) == (before, 3)


def test_a_machine_that_is_switched_off_keeps_its_state(place: Any, switches: Callable[[str], list[str]]) -> None:
    recorded(place)
    switches("off")
    assert "w1" in place.api.switched


def test_a_machine_that_is_switched_off_is_left_off_by_the_autoscaler(
    place: Any, switches: Callable[[str], list[str]]
) -> None:
    """The record of who switched it off is there until it is switched on."""
    states = {name: MachineState(Phase.ON, 1.0).text() for name in ("w1", "w9")}
    place.api.switched, place.api.scales = states, True
    assert "the autoscaler leaves it off until `gpunodes power w1 on`" in switches("off")
    [made] = kept_off.parse(place.api.kept_off).values()
    assert (made.by, made.boot_id) == (user_at_host(), place.api.nodes["w1"]["status"]["nodeInfo"]["bootID"])
    assert states == place.api.switched, "its state is the power server's"
    place.machines["w1"].off = True
    switches("on")
    assert place.api.kept_off == {}


@pytest.mark.parametrize("without", ["an autoscaler", "a pool that scales"])
def test_nothing_is_recorded_of_a_machine_that_nothing_switches_on(
    place: Any, switches: Callable[[str], list[str]], without: str
) -> None:
    place.api.switched = {"w9" if without == "a pool that scales" else "w1": MachineState(Phase.ON, 1.0).text()}
    place.api.scales = without != "an autoscaler"
    assert not [line for line in switches("off") if "autoscaler" in line]
    assert place.api.kept_off is None


@pytest.mark.parametrize("how", ["no response", "refused", "a node of another name"])
def test_a_machine_that_may_be_switched_on_again_is_an_error(
    place: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Who reserves a machine may work in it: without a record the next pod that waits switches it on."""
    monkeypatch.setattr(switched_on, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(place, "pool_label", lambda _: "h100", raising=False)
    settings = {**place.settings(), "gpunodes_pools": {"h100": {"max": 3}}}
    monkeypatch.setattr(place, "settings", lambda: settings, raising=False)
    # The autoscaler keeps it off: it has no node.
    del place.api.nodes["w1"]
    place.machines["w1"].off = place.api.scales = True
    node = "rack1-u3" if how == "a node of another name" else "w1"
    place.api.switched = {node: MachineState(Phase.OFF, 1.0).text()}
    answer = place.api._config_map

    def config_map(method: str, path: str, body: Any) -> Any:
        fails = how != "a node of another name" and method in {"PATCH", "POST"}
        return ((0, "no") if how == "no response" else (403, "no")) if fails else answer(method, path, body)

    monkeypatch.setattr(place.api, "_config_map", config_map)
    monkeypatch.setattr(power, "locked", lambda *_: contextlib.nullcontext(lambda: None))
    machine = next(each for each in place.all_machines() if each.name == "w1")
    with pytest.raises(GpunodesError, match="w1 is off, and the autoscaler may switch it on again"):
        power.power(place, machine, power.PowerAction.OFF)


def test_only_the_own_node_and_the_own_state_are_changed(place: Any, switches: Callable[[str], list[str]]) -> None:
    recorded(place, name="w2")
    node = left_by_the_autoscaler(place, provider="gpunodes://w2")
    place.machines["w1"].off = True
    assert not [line for line in switches("on") if "off on purpose" in line]
    assert "w2" in place.api.switched
    assert len(taints_of(node)) == 3


def test_a_state_that_cannot_be_forgotten_is_reported(place: Any, switches: Callable[[str], list[str]]) -> None:
    recorded(place)
    place.machines["w1"].off = True
    answer = place.api._answer

    def refuses(method: str, path: str, *more: Any) -> Any:
        return (422, "no") if "configmaps" in path and method == "PATCH" else answer(method, path, *more)

    place.api._answer = refuses
    assert any("may still count as off on purpose" in line for line in switches("on"))


def test_a_node_that_registers_anew_is_given_back_when_it_is_ready(bare: Bare) -> None:
    """Without an autoscaler nobody else removes the taint that its kubelet registers it with."""
    bare.control.member, bare.registers = Membership.MEMBER, True
    recorded(bare.place)
    left_by_the_autoscaler(bare.place, "w0")
    bare.node["spec"] |= {"providerID": "gpunodes://w1"}
    bare.node["spec"]["taints"] = [{"key": "gpunodes.dev/starting", "effect": "NoSchedule"}]
    assert bare.on().waited == "node"
    assert bare.node["spec"]["taints"] == []
    assert any("left on its node are removed" in line for line in bare.lines)
    assert bare.place.api.switched == {"w9": "{}"}
    assert len(taints_of(bare.place.api.nodes["w0"])) == 3


def test_without_a_node_it_says_what_is_left_to_do(bare: Bare) -> None:
    recorded(bare.place)
    machine = next(each for each in bare.place.all_machines() if each.name == "w1")
    power.power(bare.place, machine, power.PowerAction.ON, report=lambda _, text: bare.lines.append(text))
    [line] = bare.lines
    assert line.startswith("it is off on purpose no longer; a node that registers anew waits with the taint")
    assert "`gpunodes power w1 on --wait` or `gpunodes join w1`" in line
    assert bare.place.api.switched == {"w9": "{}"}


# Before a roll-out: --wake


def test_machines_that_are_off_on_purpose_are_woken_upgraded_and_left_on(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout_fleet.hurry(monkeypatch, tmp_path)
    switch(place, "off", "w1")
    before = rollout_fleet.roll_out(place, rollout_fleet.MemoryWork(place), max_unavailable=Budget(2))
    assert rollout_fleet.outcomes(before)["w1"] is RolloutOutcome.SKIPPED, "without --wake, as before"
    place.inventory = None
    scaled = {"w2": Switched("off", 1.0), "w0": Switched("failed", 1.0)}
    monkeypatch.setattr(switched_off, "read", lambda _: scaled)
    off = waking.asleep(place, place.all_machines())
    assert [each.name for each in off] == ["w1", "w2"], "not w0, which the autoscaler gave up"
    assert waking.wake(place, off[:1], lambda *_: None) == []
    work = rollout_fleet.MemoryWork(place)
    assert set(rollout_fleet.outcomes(rollout_fleet.roll_out(place, work)).values()) == {RolloutOutcome.DONE}
    assert work.stages("w1") == ["prepare", "apply", "verify"]
    assert (place.controls["w1"].bmc.orders, place.machines["w1"].off) == (["on"], False)
    rollout_fleet.clean(place)


def test_an_error_of_one_machine_does_not_end_the_command(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    for name in ("w0", "w1"):
        switch(place, "off", name)
    control = place.machine_control
    broken = OSError(errno.ENOSPC, "No space left on device", "/var/x")

    def machine_control(machine: Entry, **more: Any) -> Any:
        if machine.name == "w0":
            raise broken
        return control(machine, **more)

    monkeypatch.setattr(place, "machine_control", machine_control)
    machines = place.all_machines()[:2]
    assert waking.wake(place, machines, lambda name, text: lines.append(f"{name}: {text}")) == ["w0"]
    assert "w0: it is not upgraded: /var/x: No space left on device" in lines
    assert not place.machines["w1"].off


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("has_node", [True, False])
def test_a_stop_ends_the_waiting_at_once_and_says_what_is_left(
    monkeypatch: pytest.MonkeyPatch, *, has_node: bool
) -> None:
    """As Ctrl-C does: of six machines two were not begun, and are not switched on any more."""
    wide: Any = Place(repair_fleet.fleet(6))
    names = list(wide.machines)
    for name in names:
        wide.machines[name].off = True
        wide.machines[name].sshd = False
        wide.machines[name].use = lambda _: None
        if not has_node:
            del wide.api.nodes[name]
    monkeypatch.setattr(
        switching, "time_limits", lambda _: switching.TimeLimits(drain=1, verify=600.0, shutdown=1, poll=300.0)
    )

    @contextlib.contextmanager
    def lock(*_: Any) -> Iterator[Callable[[], None]]:
        yield lambda: None

    monkeypatch.setattr(power, "locked", lock)
    lines: list[str] = []
    waiting = threading.Semaphore(0)

    def report(name: str, text: str) -> None:
        lines.append(f"{name}: {text}")
        if "waiting until" in text:
            waiting.release()

    class Interrupting(concurrent.futures.ThreadPoolExecutor):
        def submit(self, *given: Any, **more: Any) -> Any:
            found: Any = super().submit(*given, **more)
            found.result = interrupted
            return found

    def interrupted() -> None:
        for _ in range(4):
            assert waiting.acquire(timeout=20)
        raise KeyboardInterrupt

    monkeypatch.setattr(waking, "ThreadPoolExecutor", Interrupting)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        waking.wake(wide, wide.all_machines(), report)
    assert time.monotonic() - began < 60
    assert [name for name in names if wide.controls[name].bmc.orders] == names[:4]
    assert lines.count(": stopping: no further machine is switched on, and those that are on stay on") == 1
    assert sum("is not waited for: the command was stopped" in line for line in lines) == 4


def test_a_machine_that_does_not_start_is_named_and_the_others_are_woken(place: Any) -> None:
    lines: list[str] = []
    for name in ("w0", "w1"):
        switch(place, "off", name)
    place.controls["w0"].own = False
    machines = place.all_machines()[:2]
    assert waking.wake(place, machines, lambda name, text: lines.append(f"{name}: {text}")) == ["w0"]
    assert any(line.startswith("w0: it is not upgraded: the BMC belongs to another machine") for line in lines)
    assert place.controls["w0"].bmc.orders == []
    assert not place.machines["w1"].off
