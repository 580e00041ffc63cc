"""The locks that commands hold while they work on machines, and what happens when they may be lost."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpunodes.ansible.module_utils import command_lock
from gpunodes.ansible.module_utils.cluster import tokens as bootstrap_tokens
from gpunodes.ansible.module_utils.sent import MARK
from gpunodes.engine import control_planes, identities, locks, runner
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.connection import Response
from gpunodes.engine.cluster.errors import NoSession
from gpunodes.engine.leases.errors import Held
from gpunodes.engine.leases.held import Leases
from gpunodes.engine.leases.holders import identity
from gpunodes.engine.locks import NoLock, Taken
from gpunodes.engine.remote import commands, shell
from gpunodes.engine.remote.commands import Become, RemoteCommand
from gpunodes.errors import GpunodesError
from gpunodes.model import Machine, MachineResult, Outcome, PreflightFinding, Role
from gpunodes.operations import claims, preflight
from gpunodes.operations import run as running
from gpunodes.operations.remove import OPERATION as REMOVE

from tests.repair_fleet import Api
from tests.stand_ins import Silent

ANN = "ann@desk/repair/another-boot/7/7/7"
CONTROL = Machine("c0", "addr-c0", Role.CONTROL_PLANE)
WORKERS = [Machine(f"w{index}", f"addr-w{index}", Role.WORKER) for index in range(3)]


@pytest.fixture(autouse=True)
def quick(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state folder of the test's own, and locks of a second."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(Leases.__init__, "__defaults__", (1.0,))
    monkeypatch.setattr(claims, "PATIENCE_S", 0.5)


class Place:
    """A cluster, the connection to it, and the locks over SSH that are taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.api = Api()
        for machine in (CONTROL, *WORKERS):
            self.api.add_node(machine.name)
        self.status: int | None = None
        self.by_ssh: list[str] = []
        self.waits: list[PreflightFinding] = []
        self.machine, self.responded = "c0", False
        self.closed = 0
        monkeypatch.setattr(control_planes, "session", lambda *_: self)
        monkeypatch.setattr(locks, "hold", self._hold)
        self.inventory: Any = SimpleNamespace(
            kubeconfig=None,
            control_planes=lambda: [CONTROL],
            connection=lambda _: {},
            machines=lambda *_: [CONTROL, *WORKERS],
            cluster="test",
        )

    @contextlib.contextmanager
    def _hold(self, address: str, variables: Any, command: str, holder: str, *, restarts: bool) -> Iterator[Any]:
        if self.api.by_ssh:
            raise Taken(self.api.by_ssh)
        self.api.by_ssh = {"who": "us", "command": command, "holder": holder}
        self.by_ssh.append(command)
        yield SimpleNamespace(lost=lambda: None)
        self.api.by_ssh = None

    def request(self, method: str, path: str, *more: Any, **named: Any) -> Response:
        if self.status is not None:
            return Response(self.status, None, "nobody answers", 0.0)
        return self.api.request(method, path, *more, **named)

    def close(self) -> None:
        self.closed += 1

    def claimed(self, machines: Sequence[Machine], command: str = "join") -> Any:
        return claims.claimed(self.inventory, machines, command, self.waits.append)

    @property
    def locked(self) -> list[str]:
        return sorted(name.removeprefix("gpunodes-machine-") for name in self.api.leases)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(monkeypatch)


def test_a_command_holds_the_leases_of_its_machines_and_no_other_lock(place: Place) -> None:
    with place.claimed(WORKERS[:2]) as claim:
        assert place.locked == ["w0", "w1"]
        assert claim.lost() is None
        with place.claimed(WORKERS[2:], "gpu-install"):
            assert place.locked == ["w0", "w1", "w2"]
        with (
            pytest.raises(Held, match=r"w1 is locked by `gpunodes join` of .*, since 20"),
            place.claimed(WORKERS[1:]),
        ):
            pass
        assert place.locked == ["w0", "w1"]
    assert place.locked == []
    assert place.by_ssh == []


def test_a_command_on_the_control_plane_excludes_others_and_holds_the_lock_over_ssh(place: Place) -> None:
    with place.claimed([CONTROL], "reset"):
        assert place.by_ssh == ["reset"]
        with pytest.raises(Held, match="c0"), place.claimed(WORKERS):
            pass
        # The API goes with the cluster, and what comes then finds the lock.
        place.status = -1
        with pytest.raises(Taken, match="reset of us"), place.claimed([CONTROL], "init-master"):
            pass
        place.status = None
    with place.claimed(WORKERS), pytest.raises(Held, match="w0"), place.claimed([CONTROL], "reset"):
        pass


def test_the_lock_over_ssh_of_a_command_without_api_excludes_others_also_when_the_api_is_up(place: Place) -> None:
    place.status = -1
    with place.claimed([CONTROL, *WORKERS], "up") as claim:
        assert (place.by_ssh, place.locked, list(claim.findings)) == (["up"], [], [])
        # It has come so far that there is an API: a join would take Leases.
        place.status = None
        with pytest.raises(Taken, match="another command works on this cluster: up of us"), place.claimed(WORKERS[:1]):
            pass
        assert place.locked == []


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command without an API looks for one very often."""
    monkeypatch.setattr(claims, "_LATE_S", 0.05)


@pytest.mark.usefixtures("soon")
def test_a_command_that_began_without_api_takes_its_leases_as_soon_as_there_is_one(place: Place) -> None:
    """The power server of pools sees Leases only: it switched machines off on which such a command still worked."""
    place.status = -1
    del place.api.nodes["w1"]
    with place.claimed([CONTROL, *WORKERS[:2]], "up") as claim:
        claim.take_more({"w1": {"hostname": "rack7-u3", "boot_id": "x"}})
        closed = place.closed
        until(lambda: place.closed > closed)  # the program there knows no kubeconfig that was made after it began
        assert place.locked == []
        place.status = None
        until(lambda: place.locked == ["c0", "rack7-u3", "w0", "w1"])
        claim.take_more({"w0": {"hostname": "rack7-u2", "boot_id": "y"}})
        assert "rack7-u2" in place.locked
        assert claim.lost() is None
        with pytest.raises(Held, match="w0 is locked by `gpunodes up`"):
            Leases(Cluster(place.api), "power server").take("w0")  # type: ignore[arg-type]  # stands in for a session
    assert place.locked == []


@pytest.mark.usefixtures("soon")
def test_a_command_that_began_without_api_ends_if_another_one_works_on_its_machine(place: Place) -> None:
    place.status = 0
    with place.claimed(WORKERS[:2], "up") as claim:
        other = Leases(Cluster(place.api), "power server")  # type: ignore[arg-type]  # as above
        other.holder = ANN
        place.api.by_ssh = None  # the power server cannot see it
        try:
            other.take("w0")
            place.status = None
            until(claim.lost)
            other.release_all()
            time.sleep(0.2)
            assert "w0 is locked by `gpunodes repair` of ann@desk" in str(claim.lost()), "until the run has ended"
            assert place.locked == []
        finally:
            other.close()


@pytest.mark.usefixtures("soon")
def test_a_command_on_a_control_plane_that_began_without_api_waits_for_work_on_other_machines(place: Place) -> None:
    place.status = 0
    with place.claimed([CONTROL], "up") as claim:
        other = Leases(Cluster(place.api), "power server")  # type: ignore[arg-type]  # as above
        other.holder = ANN
        place.api.by_ssh = None
        try:
            other.take("w0")
            place.status = None
            time.sleep(0.5)
            assert claim.lost() is None
            other.release_all()
            until(lambda: place.locked == ["c0"])
        finally:
            other.close()


@pytest.mark.usefixtures("soon")
def test_an_incomplete_attempt_to_take_leases_late_neither_ends_the_run_nor_leaves_leases(place: Place) -> None:
    place.status = -1
    begun, answer, request = threading.Event(), threading.Event(), place.request

    def slow(method: str, path: str, *more: Any, **named: Any) -> Response:
        if method == "POST" and place.locked:
            begun.set()
            answer.wait(10)
        return request(method, path, *more, **named)

    place.request = slow  # type: ignore[method-assign]  # a stand-in
    with place.claimed([CONTROL, *WORKERS[:2]], "up") as claim:
        place.status = None
        assert begun.wait(5)
        claim._worked -= 1000
        place.status = 0
        time.sleep(1.2)
        assert claim.lost() is None, "the first Lease has expired, and the lock over SSH is held"
        place.status = None
    answer.set()
    until(lambda: place.locked == [])
    time.sleep(0.3)
    assert place.locked == []


@pytest.mark.usefixtures("soon")
def test_the_end_of_a_command_does_not_wait_for_a_machine_that_hangs(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "PATIENCE_S", 60.0)
    place.status = -1
    begun, answer, began = threading.Event(), threading.Event(), 0.0

    def hang(*_: Any, **__: Any) -> Response:
        begun.set()
        answer.wait(60)
        return Response(-1, None, "nobody answers", 0.0)

    with place.claimed(WORKERS[:1], "up"):
        place.request = hang  # type: ignore[method-assign]  # a stand-in
        assert begun.wait(5)
        began = time.monotonic()
    assert time.monotonic() - began < 20
    answer.set()


@pytest.mark.usefixtures("soon")
def test_leases_taken_before_the_first_node_is_labelled_are_those_of_work_that_stops_the_api(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    controls = [Machine(f"c{index}", f"addr-c{index}", Role.CONTROL_PLANE) for index in range(3)]
    place.inventory.control_planes = lambda: controls
    place.inventory.machines = lambda *_: [*controls, *WORKERS]
    held = SimpleNamespace(lost=lambda: None)
    monkeypatch.setattr(locks, "hold", lambda *_, **__: contextlib.nullcontext(held))
    place.api.nodes.clear()
    place.status = -1
    with place.claimed(controls[:1], "init-master") as claim:
        place.status = None
        until(lambda: place.locked == ["c0"])
        time.sleep(0.2)
        place.status = 0
        until(lambda: claim.lost(at_work=True) is None and claim.unrenewed)


@pytest.mark.usefixtures("soon")
def test_a_command_that_replaces_the_objects_of_the_cluster_takes_no_leases(place: Place) -> None:
    place.status = 0
    with place.claimed([CONTROL], "etcd restore") as claim:
        claim.take_more({}, lock_only=True)
        place.status = None
        time.sleep(0.3)
        assert place.locked == []
        assert claim.lost() is None


def test_an_api_that_is_down_is_reported_and_waited_for(place: Place) -> None:
    place.status = 0
    began = time.monotonic()
    with place.claimed(WORKERS, "reset") as claim:
        assert time.monotonic() - began > 0.5, "as long as another one's Lease lasts"
        (wait,) = place.waits
        assert (wait.machine, wait.problem.remedy) == ("c0", "gpunodes waits at most 0 s for it")
        assert place.by_ssh == ["reset"]
        (finding,) = claim.findings
        assert "no Leases can be taken" in finding.problem.found
        assert finding.severity == "warning"


def test_without_a_login_on_the_control_plane_there_is_no_lock(place: Place) -> None:
    place.status = -2
    with pytest.raises(NoSession), place.claimed(WORKERS):
        pass


def test_a_node_with_another_name_is_locked_by_the_name_of_the_node(place: Place) -> None:
    """Two users may have different names for a machine: its node has one name."""
    node = place.api.nodes.pop("w0")
    node["metadata"]["name"] = "w0.example.com"
    node["status"]["nodeInfo"]["bootID"] = "11111111-2222-4333-8444-555555555555"
    place.api.nodes["w0.example.com"] = node
    with place.claimed(WORKERS[:1]) as claim:
        claim.take_more({"w0": {"hostname": "w0", "boot_id": "11111111-2222-4333-8444-555555555555"}})
        assert "w0.example.com" in place.locked


def test_a_dead_machine_is_locked_by_the_name_of_its_node(place: Place) -> None:
    """Its name in the inventory differs from that of its node: repairs and commands use its recorded identity."""
    boot = "11111111-2222-4333-8444-555555555555"
    place.api.add_node("rack7-u3")
    place.api.nodes["rack7-u3"]["status"]["nodeInfo"]["bootID"] = boot
    del place.api.nodes["w0"]
    identities.remember("test", {"w0": {"hostname": "rack7-u3", "boot_id": boot}})
    with place.claimed(WORKERS[:1], "power off"):
        assert place.locked == ["rack7-u3", "w0"]


def test_a_machine_whose_node_is_deleted_stays_locked(place: Place) -> None:
    """A removal deletes the node first, and then resets the machine: a join started in between."""
    boot = "11111111-2222-4333-8444-555555555555"
    node = place.api.nodes.pop("w0")
    node["metadata"]["name"] = "w0.example.com"
    node["status"]["nodeInfo"]["bootID"] = boot
    place.api.nodes["w0.example.com"] = node
    identities.remember("test", {"w0": {"hostname": "w0", "boot_id": boot}})
    with place.claimed(WORKERS[:1], "remove"):
        del place.api.nodes["w0.example.com"]
        with pytest.raises(Held, match="w0 is locked by `gpunodes remove`"), place.claimed(WORKERS[:1], "join"):
            pass


def test_leases_of_a_failed_take_are_ignored(place: Place) -> None:
    """The command holds the lock over SSH instead: they must not end the run."""
    posts = []
    request = place.api.request

    def asked(method: str, path: str, *more: Any, **named: Any) -> Response:
        if method == "POST":
            posts.append(path)
            place.status = 0 if len(posts) == 3 else place.status
        return (
            Response(0, None, "nobody answers", 0.0)
            if place.status is not None
            else request(method, path, *more, **named)
        )

    place.api.request = asked  # type: ignore[method-assign]  # a stand-in
    with place.claimed(WORKERS, "reset") as claim:
        assert place.by_ssh == ["reset"]
        time.sleep(1.2)
        assert claim.lost() is None


def test_a_joining_machine_is_also_locked_by_the_name_of_its_future_node(place: Place) -> None:
    del place.api.nodes["w0"]
    with place.claimed(WORKERS[:1]) as claim:
        assert place.locked == ["w0"]
        claim.take_more({"w0": {"hostname": "rack7-u3", "boot_id": "x"}})
        assert place.locked == ["rack7-u3", "w0"]


@pytest.mark.parametrize("other", ["c0", "w1", "w1.example.com", "node7", "rack-9"])
def test_a_machine_locks_none_whose_host_name_it_reports(place: Place, other: str) -> None:
    """Root on W reported the host name of V: every command on W refused repairs, roll-outs and power orders of V."""
    place.api.add_node("node7")
    identities.remember("test", {"w2": {"hostname": "rack-9"}})
    with place.claimed(WORKERS[:1]) as claim:
        claim.take_more({"w0": {"hostname": other, "boot_id": "x"}})
        assert place.locked == ["w0"]


@pytest.mark.parametrize(("changed", "continues"), [(1, False), (2, True), (3, True)])
def test_a_command_on_one_of_three_control_planes_ends_when_its_leases_may_be_lost(
    place: Place, monkeypatch: pytest.MonkeyPatch, changed: int, *, continues: bool
) -> None:
    """The others keep the API: only work on so many that etcd loses its majority may continue without."""
    controls = [Machine(f"c{index}", f"addr-c{index}", Role.CONTROL_PLANE) for index in range(3)]
    for machine in controls:
        place.api.add_node(machine.name, **{"node-role.kubernetes.io/control-plane": ""})
    place.inventory.control_planes = lambda: controls
    place.inventory.machines = lambda *_: [*controls, *WORKERS]
    held = SimpleNamespace(lost=lambda: None)
    monkeypatch.setattr(locks, "hold", lambda *_, **__: contextlib.nullcontext(held))
    with place.claimed(controls[:changed], "reset") as claim:
        assert claim.lost(at_work=True) is None
        place.status = 0
        deadline = time.monotonic() + 20
        while not claim.unrenewed and not claim.lost(at_work=True) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert bool(claim.unrenewed) is continues
        assert (claim.lost(at_work=True) is None) is continues


def test_a_lock_that_may_be_lost_ends_the_run_except_while_it_is_at_work_on_the_control_plane(
    place: Place,
) -> None:
    """The command may stop the API, and reports that. Work on workers stops: another command may hold them."""
    with place.claimed(WORKERS) as claim:
        place.status = -2
        time.sleep(1.0)
        assert "could not be renewed" in str(claim.lost())
        place.status = None
        time.sleep(0.3)
        assert "expired" in str(claim.lost()), "it ends although the API is back: another command may have begun"
    with place.claimed([CONTROL, *WORKERS]) as claim:
        place.status = -2
        time.sleep(1.2)
        place.status = None
        deadline = time.monotonic() + 10
        while claim.lost():  # its own work had stopped the API, and no other command has begun
            assert time.monotonic() < deadline
            time.sleep(0.05)
        place.status = -2
        time.sleep(1.2)
        assert claim.lost(at_work=True) is None
        assert "continuing without its locks" in str(claim.unrenewed)
        assert claim.lost() is None, "it has just been at work there"
        time.sleep(0.6)
        assert "could not be renewed" in str(claim.lost())
        assert claim.unrenewed is None
        place.status = None
        for lease in place.api.leases.values():
            lease["spec"]["holderIdentity"] = ANN
            lease["metadata"]["resourceVersion"] = "7"
        time.sleep(0.5)
        assert "was taken by `gpunodes repair` of ann@desk" in str(claim.lost())


def test_a_command_that_stopped_the_api_ends_if_another_one_began_meanwhile(place: Place) -> None:
    with place.claimed([CONTROL]) as claim:
        place.status = -2
        time.sleep(1.2)
        assert claim.lost(at_work=True) is None
        other = Leases(Cluster(place.api), "join")  # type: ignore[arg-type]  # stands in for a session
        other.holder = ANN
        place.api.by_ssh = None  # its machine restarts
        try:
            other.take("w1")
            place.status = None
            deadline = time.monotonic() + 10
            while not (lost := claim.lost(at_work=True)):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert "another command began meanwhile: w1 is locked by " in str(lost)
        finally:
            other.close()


def test_a_run_that_loses_its_locks_stops_and_reports_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lost: list[GpunodesError] = []
    taken: list[Any] = []

    @contextlib.contextmanager
    def claimed(*_: Any) -> Iterator[Any]:
        yield SimpleNamespace(
            lost=lambda **_: lost[0] if lost else None,
            unrenewed=None,
            findings=(),
            holder="me",
            take_more=lambda facts, **_: taken.append(facts),
        )

    def run(_: Any, __: Path, ___: Any, ends: Any = lambda: False) -> runner.PlayResult:
        assert not ends()
        lost.append(GpunodesError("the lock on w0 was taken by `gpunodes repair` of ann@desk"))
        assert ends()
        return runner.PlayResult(ok=False, interrupted=True, log=tmp_path / "log")

    monkeypatch.setattr(claims, "claimed", claimed)
    monkeypatch.setattr(runner, "run", run)
    reported = {"w0": {"hostname": "rack7-u3", "kubernetes": {"role": None}}}
    scan = SimpleNamespace(facts=reported, cluster=None, choice=None)
    monkeypatch.setattr(preflight, "inspect", lambda *_, **__: scan)
    monkeypatch.setattr(preflight, "requested_version", lambda *_, **__: "1.36.3")
    inventory: Any = SimpleNamespace(
        kubeconfig=None,
        cluster="test",
        controls_of=lambda _: [CONTROL],
        variables=lambda _: {},
        path=tmp_path,
    )
    result = running.carry_out(REMOVE, inventory, WORKERS[:1], Silent(), running.RunOptions())
    assert not result.interrupted
    assert result.exit_code == 1
    assert taken == [reported], "a machine that no preflight has asked is asked who it is"
    (found,) = result.machines
    assert isinstance(found, MachineResult)
    assert (found.outcome, found.cause) == (Outcome.FAILED, "the lock on w0 was taken by `gpunodes repair` of ann@desk")


def test_a_lost_lock_ends_ansible_like_ctrl_c(tmp_path: Path) -> None:
    """Within a second, and so before the next phase."""
    pid = tmp_path / "pid"
    with subprocess.Popen(["sleep", "60"]) as ansible:
        pid.write_text(str(ansible.pid))
        ended = False
        stop = runner._Stop(pid, lambda: ended)
        assert not stop.overdue()
        assert not stop.requested
        ended = True
        assert not stop.overdue(), "it gets its time"
        assert stop.requested
        assert ansible.wait(timeout=5) == -signal.SIGTERM


# The lock by SSH, its far side run here


@pytest.fixture
def lock_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The program that holds the lock, without SSH; the path of the lock file."""
    path = tmp_path / "lock"
    monkeypatch.setattr(command_lock, "PATH", str(path))
    monkeypatch.setattr(shell, "command", lambda *_: ["sh", "-c"])
    remote = commands.remote

    def without_root(argv: Sequence[str], _variables: object, _: Become, stdin: bytes, *, marks: bool) -> RemoteCommand:
        return remote([sys.executable, *argv[1:]], {}, Become.NEVER, stdin, marks=marks)

    monkeypatch.setattr(commands, "remote", without_root)
    return path


def test_one_command_holds_the_lock_over_ssh_and_others_get_its_name(lock_file: Path) -> None:
    assert command_lock.holder(str(lock_file)) is None
    with locks.hold("here", {}, "up", "me") as lock:
        assert lock.lost() is None
        assert command_lock.holder(str(lock_file))["command"] == "up"
        with (
            pytest.raises(Taken, match="another command works on this cluster: up of "),
            locks.hold("here", {}, "join"),
        ):
            pass
    assert command_lock.holder(str(lock_file)) is None
    with locks.hold("here", {}, "join"):
        pass


def test_a_lock_file_that_cannot_be_read_is_not_free(lock_file: Path) -> None:
    lock_file.mkdir()
    assert command_lock.holder(str(lock_file)) == {}
    lock_file.rmdir()
    lock_file.write_text("no JSON")
    with lock_file.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert command_lock.holder(str(lock_file)) == {}
    assert command_lock.holder(str(lock_file)) is None


@pytest.mark.parametrize(
    "line", ["no JSON", "5", "[]", "{}", '{"held_by": 5}', '{"held_by": {"who": ["x"]}}', "[" * 100_000]
)
def test_an_invalid_response_about_the_lock_is_one_sentence(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    message = f"print('\\n{MARK}\\n' + {line[:50]!r} * {max(1, len(line) // 50)}, flush=True); input()"
    monkeypatch.setattr(shell, "command", lambda *_: [sys.executable, "-c", message])
    with pytest.raises(NoLock, match=r"reports .* as holder of the cluster's lock"), locks.hold("here", {}, "up"):
        pass


@pytest.mark.usefixtures("lock_file")
def test_a_lock_over_ssh_is_lost_when_its_connection_ends() -> None:
    with locks.hold("here", {}, "up") as lock:
        os.kill(lock._process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while lock.lost() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "that holds the cluster's lock is lost" in str(lock.lost())


@pytest.mark.usefixtures("lock_file")
def test_a_lock_over_ssh_without_echoes_counts_as_lost_before_it_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(locks, "BEAT", 0.1)
    monkeypatch.setattr(locks, "PATIENCE", 1.0)
    monkeypatch.setattr(locks, "MARGIN", 0.4)
    for restarts in (False, True):
        with locks.hold("here", {}, "up", restarts=restarts) as lock:
            time.sleep(0.5)
            assert lock.lost() is None
            os.kill(lock._process.pid, signal.SIGSTOP)
            time.sleep(0.8)
            assert isinstance(lost := lock.lost(), locks.Unresponsive)
            assert "no response for" in str(lost)
            os.kill(lock._process.pid, signal.SIGCONT)


@pytest.mark.usefixtures("lock_file")
def test_a_lock_over_ssh_that_cannot_be_taken_again_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any error: the thread that keeps the lock must report it."""
    monkeypatch.setattr(locks, "_AGAIN", 0.1)
    with locks.hold("here", {}, "up", restarts=True) as lock:

        def start() -> Any:
            raise OSError(11, "Resource temporarily unavailable")

        monkeypatch.setattr(lock, "_start", start)
        os.kill(lock._process.pid, signal.SIGKILL)
        lock._thread.join(timeout=5)
        assert "Resource temporarily unavailable" in str(lock.lost())


@pytest.mark.usefixtures("lock_file")
def test_the_lock_on_a_restarted_machine_is_taken_again_or_reported_as_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(locks, "_AGAIN", 0.1)
    with locks.hold("here", {}, "up", restarts=True) as lock:
        first = lock._process.pid
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while lock._process.pid == first:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert lock.lost() is None
        monkeypatch.setattr(locks, "_AGAIN", 1.0)
        os.kill(lock._process.pid, signal.SIGKILL)
        with locks.hold("here", {}, "reset"):
            deadline = time.monotonic() + 5
            while lock.lost() is None:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert "reset of" in str(lock.lost())


@pytest.mark.usefixtures("lock_file")
def test_the_lock_over_ssh_of_a_command_that_was_suspended_is_not_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine had released it meanwhile: another command may have begun, and ended."""
    monkeypatch.setattr(locks, "_AGAIN", 0.1)
    monkeypatch.setattr(locks, "BEAT", 0.1)
    with locks.hold("here", {}, "up", restarts=True) as lock:
        running = threading.Event()

        def wake(*given: Any) -> Any:
            # As a process that sleeps in this call, while the machine ends the connection.
            if not running.is_set():
                running.set()
                monkeypatch.setattr(locks, "clock", lambda: time.monotonic() + 3600)
                os.kill(lock._process.pid, signal.SIGKILL)
            return select.select(*given)

        monkeypatch.setattr(locks, "select", SimpleNamespace(select=wake))
        deadline = time.monotonic() + 5
        while lock.lost() is None or isinstance(lock.lost(), locks.Unresponsive):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "this command was suspended" in str(lock.lost())


# Tokens


def test_the_tokens_of_a_running_join_stay_when_another_join_ends() -> None:
    ours = {"description": bootstrap_tokens._DESCRIPTION}
    tokens: list[dict[str, Any]] = [
        {"metadata": {"name": "mine", "annotations": {"gpunodes.dev/run": "me"}}, "data": ours},
        {"metadata": {"name": "anns", "annotations": {"gpunodes.dev/run": "ann"}}, "data": ours},
        {"metadata": {"name": "killed", "annotations": {"gpunodes.dev/run": "dead"}}, "data": ours},
        {"metadata": {"name": "old"}, "data": ours},
        {"metadata": {"name": "kubeadms"}, "data": {}},
    ]
    now = 1_800_000_000.0
    held: list[dict[str, Any]] = [
        {"spec": {"holderIdentity": "ann", "renewTime": "2027-01-15T07:59:30.000000Z", "leaseDurationSeconds": 60}},
        {"spec": {"holderIdentity": "dead", "renewTime": "2027-01-15T07:50:00.000000Z", "leaseDurationSeconds": 60}},
        {"spec": {}},
    ]
    assert bootstrap_tokens.unused(tokens, held, "me", now) == ["mine", "killed", "old"]
    assert bootstrap_tokens.unused(tokens, held, "", now) == ["mine", "killed", "old"]
    assert json.dumps(identity("join"))
