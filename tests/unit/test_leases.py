"""Locks in the cluster: their holders, their expiry, and that a command stops when its lock may be lost."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime as dt
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from gpunodes.engine import records
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.connection import Response
from gpunodes.engine.cluster.errors import NoResponse
from gpunodes.engine.cluster.listed import Listed
from gpunodes.engine.leases import expiry, holders
from gpunodes.engine.leases.errors import Held, Lost, Unsure
from gpunodes.engine.leases.held import Leases
from gpunodes.engine.leases.holders import dead_here, identity
from gpunodes.engine.leases.objects import lock_name
from gpunodes.errors import GpunodesError
from gpunodes.operations.repair import commands
from gpunodes.repair.policy import Budget, Decision, RepairLimits
from gpunodes.repair.record import RepairOutcome
from gpunodes.repair.request import RepairRequest
from gpunodes.repair.result import RepairResult

from tests import repair_fleet
from tests.repair_fleet import LEASES, Api, Fleet, fleet, hurry

ANN = "ann@desk/repair/another-boot/7/7/7"
ENDED = "/".join([identity("repair").rsplit("/", 3)[0], "1", "0", "x"])
"""A command on this host whose process has ended."""


@pytest.fixture(autouse=True)
def quick(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state folder of the test's own, locks of three seconds, and escalation steps with short waits."""
    hurry(monkeypatch, tmp_path)
    monkeypatch.setattr(Leases.__init__, "__defaults__", (3.0,))


class Connection:
    """One user's session with the API. When it is cut, its requests fail, while those of others succeed."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.cut = False
        self.ahead_s = 0.0
        """By how much the clock of its control plane is ahead."""

    def request(
        self, method: str, path: str, body: Any = None, kind: str = "application/json", keep: Sequence[str] = ()
    ) -> Response:
        if self.cut:
            return Response(0, None, "cut", 0.0)
        response = self._api.request(method, path, body, kind, keep)
        return dataclasses.replace(response, time=response.time + self.ahead_s)

    def close(self) -> None:
        pass


@contextlib.contextmanager
def operator(session: Any, holder: str = "", command: str = "repair") -> Iterator[Leases]:
    made = Leases(Cluster(session), command)
    made.holder = holder or made.holder
    yield made
    made.close()


def taken_by_ann(api: Api, name: str) -> None:
    """The state of a Lease that another user took after it expired."""
    api.version += 1
    lease = api.leases[name]
    lease["metadata"]["resourceVersion"] = str(api.version)
    lease["spec"] |= {"holderIdentity": ANN, "renewTime": dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")}


def run(place: Fleet, message: list[str] | None = None, **request: Any) -> RepairResult:
    made = RepairRequest("health", request.pop("limits", RepairLimits()), **request)
    told = message if message is not None else []
    return commands.run(place, place.all_machines(), made, lambda name, text: told.append(f"{name}: {text}"))


def before_the_reboot(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], None]) -> None:
    """Call ``act`` once, after a machine was drained and before it is rebooted."""
    boot, done = repair_fleet.StandInControl.boot, threading.Event()

    def boot_of(machine_control: repair_fleet.StandInControl) -> Any:
        if machine_control._machine.name == name and not done.is_set():
            done.set()
            act()
        return boot(machine_control)

    monkeypatch.setattr(repair_fleet.StandInControl, "boot", boot_of)


def with_connection(place: Fleet, monkeypatch: pytest.MonkeyPatch) -> Connection:
    line = Connection(place.api)
    monkeypatch.setattr(place, "session", lambda: line)
    return line


def test_a_disconnected_repair_does_not_reboot_a_machine_that_another_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    place = fleet(5, ["w1"])
    line = with_connection(place, monkeypatch)

    def cut() -> None:
        line.cut = True
        taken_by_ann(place.api, next(iter(place.api.leases)))

    before_the_reboot(monkeypatch, "w1", cut)
    (found,) = [each for each in run(place).machines if each.machine == "w1"]
    assert place.machines["w1"].done == []
    assert found.outcome is RepairOutcome.NOT_REPAIRED
    assert "could not be renewed" in found.why
    assert "--resume" in found.why
    assert set(records.read("test")) == {"w1"}, "it can be gone on with"


def test_a_repair_whose_lock_was_taken_stops_before_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a repair of the control plane, and well before the next renewal."""
    for control_planes in ((), ("w1",)):
        place = fleet(5, ["w1"])
        place._control_planes = control_planes
        before_the_reboot(monkeypatch, "w1", lambda: taken_by_ann(place.api, next(iter(place.api.leases))))  # noqa: B023 - run below
        (found,) = [each for each in run(place, named=frozenset({"w1"})).machines if each.machine == "w1"]
        assert place.machines["w1"].done == []
        assert "was taken by `gpunodes repair` of ann@desk" in found.why


def test_the_repair_of_the_control_plane_continues_without_its_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = fleet(5, ["w1"])
    place._control_planes = ("w1",)
    line, message = with_connection(place, monkeypatch), list[str]()

    def cut() -> None:
        line.cut = True
        threading.Timer(1.5, lambda: setattr(line, "cut", False)).start()

    before_the_reboot(monkeypatch, "w1", cut)
    (found,) = [each for each in run(place, message, named=frozenset({"w1"})).machines if each.machine == "w1"]
    assert found.outcome is RepairOutcome.REPAIRED
    assert [line for line in message if "without its lock" in line]
    assert place.api.leases == {}


def test_the_decision_lock_is_renewed_while_it_is_held() -> None:
    """Also before the first machine is locked: two commands must not spend the same budget."""
    api = Api()
    with operator(Connection(api)) as ours, operator(Connection(api), ANN) as anns, ours.deciding():
        time.sleep(4)
        with pytest.raises(Held), anns.deciding(patience_s=0):
            pass


def test_no_repair_starts_after_the_decision_lock_is_lost() -> None:
    place = fleet(10, ["w1"])
    with operator(Connection(place.api), ANN) as anns:
        # While we read the nodes, our lock is lost, and ann spends the budget on w0.
        def overtake(_: str, path: str) -> None:
            if path.startswith("/api/v1/nodes?") and place.api.leases:
                place.api.before = lambda *_: None
                taken_by_ann(place.api, next(iter(place.api.leases)))
                anns.take("w0", "")

        place.api.before = overtake
        (found,) = [each for each in run(place).machines if each.machine == "w1"]
    assert place.machines["w1"].done == []
    assert (found.decision, "w0" in found.why) == (Decision.WAIT, True)


def test_a_short_outage_of_the_control_plane_does_not_end_a_running_repair() -> None:
    """The next decision waits; no running repair is interrupted."""
    place = fleet(20, ["w1", "w2"])
    place.machines["w2"].deaf = frozenset({"reboot", "force"})
    asked = 0

    def away(method: str, path: str) -> None:
        nonlocal asked
        asked += method == "GET" and path.startswith("/api/v1/nodes?")
        if "w1" not in place.machines or asked < 1 or place.machines["w1"].sick or place.api.down:
            return
        if method == "POST" and path == LEASES:  # the second decision
            place.api.before = lambda *_: None
            place.api.down = True
            threading.Timer(0.3, lambda: setattr(place.api, "down", False)).start()

    place.api.before = away
    result = run(place, limits=RepairLimits(max_unavailable=Budget(2)))
    assert {each.machine: each.outcome for each in result.machines if each.outcome} == {
        "w1": RepairOutcome.REPAIRED,
        "w2": RepairOutcome.REPAIRED,
    }
    assert not result.interrupted


def test_a_late_release_does_not_delete_the_lock_of_the_new_holder() -> None:
    api = Api()
    with operator(Connection(api)) as ours:
        ours.take("w1", "")
        (name,) = api.leases

        def overtake(method: str, _: str) -> None:
            if method == "DELETE":
                api.before = lambda *_: None
                taken_by_ann(api, name)

        api.before = overtake
        ours.release("w1")
    assert api.leases[name]["spec"]["holderIdentity"] == ANN


def test_a_host_of_the_same_name_is_not_this_host() -> None:
    """Clones and containers share names: only a process that was visible to this one is known to be dead."""
    me = identity("repair").rsplit("/", 4)
    assert not dead_here("/".join(me))
    assert dead_here("/".join([*me[:3], "1", me[4]])), "its process ended, another has its number"
    assert not dead_here("/".join([me[0], "another-boot", "1", "1", me[4]]))
    assert not dead_here("/".join([me[0], "another-boot", str(os.getpid()), *me[3:]]))


def test_a_process_hidden_in_proc_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """hidepid hides the processes of other users: a live Lease of another user was taken."""
    me = identity("repair").rsplit("/", 4)
    monkeypatch.setattr(holders, "_start_time", lambda _: "")
    assert not dead_here("/".join(me))
    assert dead_here("/".join([*me[:2], str(2**22 + 1), *me[3:]])), "no process has that number"


def test_a_held_lock_reports_user_command_and_time() -> None:
    api = Api()
    with operator(Connection(api), ANN.replace("repair", "gpu install")) as anns, operator(Connection(api)) as ours:
        anns.take_all(["w1"])
        with pytest.raises(Held, match=r"^w1 is locked by `gpunodes gpu install` of ann@desk, since 20.* UTC; "):
            ours.take_all(["w0", "w1", "w2"])
        assert len(api.leases) == 1, "all of them or none"


def test_work_on_the_control_plane_excludes_other_commands() -> None:
    api = Api()
    with operator(Connection(api), ANN) as anns, operator(Connection(api)) as ours:
        anns.take("w1", "")
        with pytest.raises(Held, match="w1"):
            ours.take("control-1", "", alone=True)
        ours.take("w2", "")
        ours.release("w2")
        anns.release("w1")
        ours.take("control-1", "", alone=True)
        with pytest.raises(Held, match="control-1"):
            anns.take_all(["w1"])
        ours.release("control-1")
    assert api.leases == {}


def test_a_lock_survives_a_short_restart_of_the_control_plane() -> None:
    api = Api()
    line = Connection(api)
    with operator(line) as ours, operator(Connection(api), ANN) as anns:
        ours.take_all(["w1", "w2"])
        line.cut = True
        time.sleep(0.6)
        line.cut = False
        time.sleep(0.2)
        assert ours.lost() is None
        with pytest.raises(Held):
            anns.take("w2", "")
        line.cut = True
        time.sleep(3.5)
        assert isinstance(ours.lost(), Unsure)
        anns.take("w2", "")
        line.cut = False
        with pytest.raises(Lost, match="ann@desk"):
            ours.confirm("w2")
        assert not isinstance(ours.lost(), Unsure)


# Clocks of control planes


@pytest.mark.parametrize("ahead_s", [-10.0, 10.0])
@pytest.mark.parametrize(("theirs", "ours"), [("w1", "w1"), ("w1", "control-1"), ("control-1", "w2")])
def test_a_lock_is_held_whatever_the_clock_of_another_control_plane_shows(
    monkeypatch: pytest.MonkeyPatch, theirs: str, ours: str, ahead_s: float
) -> None:
    """Each command uses another control plane: the Lease of one looked expired to the other, and both worked."""
    monkeypatch.setattr(expiry, "WATCHED", 1 / 3)
    api = Api()
    ahead = Connection(api)
    ahead.ahead_s = ahead_s
    with operator(Connection(api), ANN) as anns, operator(ahead) as other:
        anns.take(theirs, alone=theirs == "control-1")
        with pytest.raises(Held, match=f"^{theirs} is locked by .* of ann@desk"):
            other.take(ours, alone=ours == "control-1")
        anns.confirm(theirs)
        assert [lease["spec"]["holderIdentity"] for lease in api.leases.values()] == [ANN]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long a command watched expired Leases, in seconds; the clock is that of the test."""
    slept: list[float] = []
    monkeypatch.setattr(expiry, "WATCHED", 1 / 3)
    monkeypatch.setattr(expiry, "clock", lambda: sum(slept))
    monkeypatch.setattr(expiry, "time", SimpleNamespace(sleep=slept.append))
    return slept


def expired(api: Api, *machines: str) -> None:
    """The Leases of a command on another controller that ended by `kill -9`."""
    with operator(Connection(api), ANN) as anns:
        anns.take_all(machines)
    for lease in api.leases.values():
        lease["spec"]["renewTime"] = "2020-01-01T00:00:00.000000Z"


def test_expired_locks_that_are_taken_together_are_watched_together(waits: list[float]) -> None:
    api = Api()
    expired(api, "w1", "w2", "w3")
    with operator(Connection(api)) as ours:
        ours.take_all(["w0", "w1", "w2", "w3"])
        assert sum(waits) == pytest.approx(1.0)
        ours.release_all()
        ours.take("control-1", alone=True)
    assert sum(waits) == pytest.approx(1.0)


@pytest.mark.parametrize("take", [lambda leases: leases.take("w1"), lambda leases: leases.take_rollout()])
def test_a_lock_of_the_future_that_nobody_renews_is_taken(take: Callable[[Leases], None], waits: list[float]) -> None:
    """Its holder ended, over a control plane whose clock was an hour ahead: it would be held for an hour."""
    api = Api()
    ahead = Connection(api)
    ahead.ahead_s = 3600.0
    with operator(ahead, ANN) as anns:
        take(anns)
        kept = copy.deepcopy(api.leases)
    api.leases = kept  # the end of a command releases its locks
    with operator(Connection(api)) as ours:
        take(ours)
    assert sum(waits) == pytest.approx(1.0)


def test_a_machine_is_in_the_budget_while_its_lock_only_looks_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder renews it, over a control plane whose clock is behind."""
    monkeypatch.setattr(expiry, "WATCHED", 1 / 3)
    api = Api()
    behind = Connection(api)
    behind.ahead_s = -120.0
    with operator(behind, ANN) as anns, operator(Connection(api)) as ours:
        anns.take("w1")
        assert [seen.live for seen in ours.observe()] == [False]
        assert [seen.live for seen in ours.observe(watched=True)] == [True]


@pytest.mark.parametrize("spec", [{}, {"holderIdentity": ENDED}])
def test_a_lock_without_a_holder_or_of_one_that_ended_here_is_not_watched(spec: Any, waits: list[float]) -> None:
    api = Api()
    expired(api, "w1")
    api.leases[lock_name("w1")]["spec"] = spec
    with operator(Connection(api)) as ours:
        ours.take("w1")
    assert waits == []


@pytest.mark.parametrize("released", [False, True])
def test_a_lock_that_changes_while_it_is_watched(
    monkeypatch: pytest.MonkeyPatch, waits: list[float], released: bool
) -> None:
    """Its holder renews it by a clock that is far behind, or ends."""
    api = Api()
    expired(api, "w1")

    def change(_: float) -> None:
        waits.append(1.0)
        if released:
            del api.leases[lock_name("w1")]
        else:
            api.version += 1
            api.leases[lock_name("w1")]["metadata"]["resourceVersion"] = str(api.version)

    monkeypatch.setattr(expiry, "time", SimpleNamespace(sleep=change))
    with operator(Connection(api)) as ours:
        if released:
            ours.take("w1")
        else:
            with pytest.raises(Held, match="ann@desk"):
                ours.take("w1")


# Commands that do not run for a while


def suspend(leases: Leases) -> None:
    """The command does not run until its locks have expired: it was stopped, or its controller slept."""
    leases._stop.set()
    time.sleep(3.5)


@pytest.mark.parametrize(("ours", "theirs"), [("w1", "control-1"), ("control-1", "w1"), ("w1", "w2")])
def test_a_lock_that_expired_does_not_come_back(ours: str, theirs: str) -> None:
    """Nobody took it, but others began what it excludes: work on the control plane, or within the same budget."""
    api = Api()
    with operator(Connection(api)) as first, operator(Connection(api), ANN) as second:
        first.take(ours, "how far it came", alone=ours == "control-1")
        suspend(first)
        second.take(theirs, "", alone=theirs == "control-1")
        with pytest.raises(Lost, match=f"the lock on {ours} expired: it was not renewed for [0-9]+ s") as raised:
            first.confirm(ours)
        assert not isinstance(raised.value, Unsure)
        assert not isinstance(first.lost(), Unsure)
        assert [seen.machine for seen in second.observe() if seen.live] == [theirs]
        first.release_unfinished(ours)
        assert "how far it came" in [seen.record for seen in second.observe()], "for `repair --resume`"
        second.confirm(theirs)


def test_the_renewals_of_a_command_that_was_suspended_report_that_its_lock_is_lost() -> None:
    """Not only ``confirm``: a run of Ansible is ended by ``lost``, whichever is first after the suspension."""
    with operator(Connection(Api())) as ours:
        ours.take("w1")
        ours._own[lock_name("w1")].renewed -= 5
        deadline = time.monotonic() + 10
        while isinstance(ours.lost(), Unsure):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "expired" in str(ours.lost())


def test_a_renewal_that_arrives_late_does_not_count() -> None:
    api = Api()
    with operator(Connection(api)) as ours:
        ours.take("w1")
        ours._stop.set()

        def wait(method: str, _: str) -> None:
            if method == "PUT":
                api.before = lambda *_: None
                time.sleep(3.5)

        api.before = wait
        with pytest.raises(Lost, match="expired"):
            ours.confirm("w1")
        ours.release("w1")
    assert api.leases == {}, "it stops nobody"


def test_work_that_stops_the_api_renews_its_lock_later_if_no_other_command_has_begun() -> None:
    api = Api()
    with operator(Connection(api)) as ours, operator(Connection(api), ANN) as anns:
        ours.take("control-1", "how far it came", alone=True, stops_api=True)
        suspend(ours)
        ours.confirm("control-1")
        assert ours.lost() is None
        with pytest.raises(Held, match="control-1"):
            anns.take("w1", "")
        suspend(ours)
        anns.take("w1", "")
        with pytest.raises(
            Lost, match="expired, and another command began meanwhile: w1 is locked by `gpunodes repair` of ann"
        ):
            ours.confirm("control-1")
        assert isinstance(ours.lost(), Lost)
        ours.release_unfinished("control-1")
        anns.take("w2", "")
        assert "how far it came" in [seen.record for seen in anns.observe() if not seen.live]


def test_work_that_stops_the_api_sees_the_lock_over_ssh_of_a_command_that_found_no_api() -> None:
    api = Api()
    with operator(Connection(api)) as ours:
        ours.take("control-1", alone=True, stops_api=True)
        suspend(ours)
        api.by_ssh = {"who": "ann@desk", "command": "up", "holder": ANN}
        with pytest.raises(Lost, match="another command works on this cluster: up of ann@desk"):
            ours.confirm("control-1")


def test_the_lock_of_a_rollout_lasts_while_it_reboots_the_only_control_plane() -> None:
    api = Api()
    with operator(Connection(api)) as ours, operator(Connection(api), ANN) as anns:
        ours.take_rollout()
        suspend(ours)
        ours.write_rollout("half of it")
        with pytest.raises(Held):
            anns.take_rollout()
        suspend(ours)
        assert anns.take_rollout() == "half of it"
        anns.release_rollout(keep=True)
        with pytest.raises(Lost):
            ours.write_rollout("more of it")


def test_a_repair_that_was_suspended_before_its_cordon_does_not_cordon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another command may have used the same budget for another machine meanwhile."""
    place, seen, used = fleet(5, ["w1"]), list[str](), list[Leases]()
    take = Leases.take

    def noted(leases: Leases, *given: Any, **more: Any) -> str:
        used.append(leases)
        return take(leases, *given, **more)

    def sleep(method: str, path: str) -> None:
        seen.append(f"{method} {path}")
        if seen.count("GET /api/v1/nodes/w1") == 2 and method == "GET":  # the first one was after the lock was taken
            for own in used[0]._own.values():
                own.renewed -= 5

    monkeypatch.setattr(Leases, "take", noted)
    place.api.before = sleep
    (found,) = [each for each in run(place).machines if each.machine == "w1"]
    assert found.outcome is RepairOutcome.NOT_REPAIRED
    assert "the lock on w1" in found.why
    assert "unschedulable" not in place.api.nodes["w1"]["spec"]
    (found,) = [each for each in run(place).machines if each.machine == "w1"]
    assert found.outcome is RepairOutcome.REPAIRED, "a second run converges"


def test_a_command_keeps_the_record_of_a_dead_repair() -> None:
    """For `repair --resume`: another user finds it only in the lock."""
    api = Api()
    with operator(Connection(api)) as dead:
        dead.take("w1", "how far it came")
    (lease,) = api.leases.values()
    parts = lease["spec"]["holderIdentity"].rsplit("/", 3)
    lease["spec"]["holderIdentity"] = "/".join([parts[0], "1", "0", parts[3]])
    with operator(Connection(api), command="gpu install") as ours:
        ours.take_all(["w1"])
        assert [(seen.live, seen.record) for seen in ours.observe()] == [(True, "how far it came")]
        ours.release_all()
        assert [(seen.live, seen.record) for seen in ours.observe()] == [(False, "how far it came")]
    with operator(Connection(api)) as next_one:
        assert next_one.take("w1", "goes on") == "how far it came"
        next_one.release("w1")
    assert api.leases == {}


@pytest.mark.parametrize(
    ("machine", "node", "same"),
    [
        ("gpu-3", "gpu-3.example.com", "gpunodes-machine-gpu-3.example.com"),
        ("GPU-3", "", "gpunodes-machine-gpu-3"),
        ("gpu_3", "", "gpunodes-machine-gpu-3-"),
        ("x" * 300, "", "gpunodes-machine-" + "x" * 40 + "-"),
        ("10.0.0.7", "", "gpunodes-machine-10.0.0.7"),
        ("fd00::7", "", "gpunodes-machine-fd00-7-"),
    ],
)
def test_the_name_of_a_lock_is_valid(machine: str, node: str, same: str) -> None:
    name = lock_name(machine, node)
    assert name.startswith(same)
    assert len(name) <= 253
    assert name == lock_name(machine.upper(), node), "however an inventory writes it"


@pytest.mark.parametrize("body", [None, [], "x", {}, {"items": 5}, {"items": [{}]}, {"items": [{"metadata": 5}]}])
def test_an_invalid_response_of_the_api_is_one_sentence(monkeypatch: pytest.MonkeyPatch, body: Any) -> None:
    place = fleet(2, ["w1"])
    monkeypatch.setattr(place.api, "request", lambda *_, **__: Response(200, body, "", 1.0))
    with pytest.raises(NoResponse, match=r"response of the control plane to GET .* is not valid"):
        Cluster(place.session()).nodes()
    with (
        pytest.raises(NoResponse, match=r"response of the control plane to (GET|POST) .* is not valid"),
        operator(Connection(place.api)) as ours,
    ):
        ours.take("w1")


def test_a_node_with_more_labels_than_any_other_does_not_invalidate_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubelet can give its own node as many as fit into an object."""
    place = fleet(2, ["w1"])
    info = dict.fromkeys(("kubeletVersion", "machineID", "systemUUID", "bootID"), "x")
    labels = {f"{number:x}": "" for number in range(150_000)}
    addresses = [{"type": "InternalIP", "address": "10.0.0.1"}] * 2000
    odd = {"metadata": {"name": "w1", "labels": labels}, "status": {"addresses": addresses, "nodeInfo": info}}
    nodes = [odd, {"metadata": {"name": "w2"}, "status": {"nodeInfo": info}}, {"metadata": {"name": "w3"}}]
    body = {"items": nodes, "gitVersion": "v1.36.3"}
    monkeypatch.setattr(place.api, "request", lambda *_, **__: Response(200, body, "", 1.0))
    assert [node.name for node in Cluster(place.session()).nodes()] == ["w1", "w2", "w3"]
    listed = Listed(place.session()).read()["nodes"]
    assert [node["name"] for node in listed] == ["w1", "w2", "w3"]
    assert "cannot be read" in listed[2]["reason"]


def test_an_invalid_lease_counts_as_free() -> None:
    api = Api()
    with operator(Connection(api), ANN) as anns, operator(Connection(api)) as ours:
        anns.take("w1", "")
        (lease,) = api.leases.values()
        for odd in ({"renewTime": None}, {"renewTime": "soon"}, {"leaseDurationSeconds": None}):
            lease["spec"] |= odd
            assert [seen.live for seen in ours.observe()] == [False]


def test_an_error_of_a_lock_is_one_sentence() -> None:
    assert isinstance(Held("w1", ""), GpunodesError)
    assert "an unknown user" in str(Held("w1", ""))
