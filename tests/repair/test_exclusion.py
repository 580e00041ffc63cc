"""Mutual exclusion (docs/repair.md) on a real API server, each controller a separate process: repairs and commands.

Roll-outs are in test_rollout_exclusion.py, the power server is in test_autoscale.py.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.connection import here
from gpunodes.engine.cluster.session import Session
from gpunodes.engine.leases.errors import Held, Lost
from gpunodes.engine.leases.held import Leases
from gpunodes.operations import maintenance, power

from . import exclusion
from .apiserver import ApiServer
from .exclusion import LEASES, command, held, kubectl, outcome, repair, spec, started, used


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with exclusion.cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def machines(tmp_path: Path, server: ApiServer) -> Path:
    return exclusion.prepare(server, tmp_path / "machines")


def test_two_commands_on_one_machine(server: ApiServer) -> None:
    with command(server, "gpu install", "n1", "n2") as (_, first):
        assert first.startswith("held")
        assert held(server) == ["gpunodes-machine-n1", "gpunodes-machine-n2"]
        with command(server, "remove", "n0", "n2", "n3") as (_, second):
            assert second.startswith("n2 is locked by `gpunodes gpu install` of ")
            assert ", since 2" in second
        assert held(server) == ["gpunodes-machine-n1", "gpunodes-machine-n2"], "all or none"
    assert held(server) == []


def test_two_commands_on_different_machines_run_in_parallel(server: ApiServer) -> None:
    with command(server, "join", "n1") as (_, first), command(server, "reset", "n2") as (_, second):
        assert first.startswith("held")
        assert second.startswith("held")


def test_a_command_on_the_control_plane_and_one_on_a_worker(server: ApiServer) -> None:
    with command(server, "join", "n1") as (_, first):
        assert first.startswith("held")
        with command(server, "reset", "c0") as (_, second):
            assert second.startswith("n1 is locked by `gpunodes join` of ")
    with command(server, "init-master", "c0") as (_, first):
        assert first.startswith("held")
        with command(server, "join", "n1") as (_, second):
            assert second.startswith("c0 is locked by `gpunodes init-master` of ")
    assert held(server) == []


def test_a_command_that_was_killed_is_followed_at_once_on_the_same_host(server: ApiServer) -> None:
    with command(server, "join", "n1") as (process, _):
        process.send_signal(signal.SIGKILL)
        process.wait()
        began = time.monotonic()
        with command(server, "join", "n1") as (_, second):
            assert second.startswith("held")
            assert time.monotonic() - began < 30
    assert held(server) == []


def test_a_machine_locked_by_a_command_is_not_repaired(server: ApiServer, machines: Path, tmp_path: Path) -> None:
    with command(server, "gpu install", "n1"):
        found = outcome(repair(server, machines, tmp_path), tmp_path)
        assert found["decision"] == "refuse"
        assert "`gpunodes gpu install` of " in found["why"]
        assert used(machines) == []
    assert outcome(repair(server, machines, tmp_path), tmp_path)["outcome"] == "repaired"
    assert used(machines) == ["reboot", "force"]
    assert held(server) == []


def test_a_command_refuses_a_machine_that_is_being_repaired(server: ApiServer, machines: Path, tmp_path: Path) -> None:
    with exclusion.in_work(machines, "n1"), exclusion.opened(server, machines) as fleet:
        process = repair(server, machines, tmp_path)
        started(machines, "n1")
        for words, name in (("remove", "n1"), ("power cycle", "n1"), ("reset", "c0")):
            with command(server, words, name) as (_, message):
                assert message.startswith("n1 is locked by `gpunodes health` of "), words
        machine = next(each for each in fleet.all_machines() if each.name == "n1")
        with pytest.raises(Held, match="`gpunodes health` of "):
            power.clear(fleet, machine, without_cluster=False)
        with pytest.raises(Held, match="`gpunodes health` of "):
            maintenance.begin(fleet, [machine], "replace GPU 5", None)
        assert spec(server, "n1")["unschedulable"]
        with command(server, "gpu install", "n5") as (_, message):
            assert message.startswith("held"), "another machine"
    assert outcome(process, tmp_path)["outcome"] == "repaired"
    assert held(server) == []


@pytest.mark.parametrize("locked", [("n5",), ("n5", "n6")])
def test_a_command_on_another_machine_counts_in_the_budget_of_repairs(
    server: ApiServer, machines: Path, tmp_path: Path, locked: tuple[str, ...]
) -> None:
    """Two machines may be unavailable."""
    with command(server, "gpu install", *locked) as (_, message):
        assert message.startswith("held")
        found = outcome(repair(server, machines, tmp_path), tmp_path)
    if len(locked) == 1:
        assert found["outcome"] == "repaired"
    else:
        assert "n5, n6 of pool p unavailable; the limit is 2" in found["why"]
        assert used(machines) == []
    assert held(server) == []


def test_two_repairs_of_one_machine(server: ApiServer, machines: Path, tmp_path: Path) -> None:
    operators = [repair(server, machines, tmp_path, number) for number in (1, 2)]
    found = [outcome(process, tmp_path) for process in operators]
    assert used(machines) == ["reboot", "force"], "once"
    assert sum(each["outcome"] == "repaired" for each in found) in (1, 2)
    assert held(server) == []


def test_a_machine_in_maintenance_is_not_repaired(server: ApiServer, machines: Path, tmp_path: Path) -> None:
    with exclusion.opened(server, machines) as fleet:
        entry = next(each for each in fleet.all_machines() if each.name == "n1")
        maintenance.begin(fleet, [entry], "replace GPU 5", time.time() + 3600)
        assert server.call("GET", "/api/v1/nodes/n1")["spec"]["unschedulable"]
        found = outcome(repair(server, machines, tmp_path), tmp_path)
        assert found["decision"] == "refuse"
        assert "it is in maintenance: replace GPU 5, by " in found["why"]
        assert used(machines) == []
        with command(server, "gpu install", "n1") as (_, message):
            assert message.startswith("held"), "commands are allowed in maintenance"
            with pytest.raises(Held):
                maintenance.end(fleet, [entry])
        assert [each.node for each in maintenance.listed(fleet)] == ["n1"]
        maintenance.end(fleet, [entry])
        assert not server.call("GET", "/api/v1/nodes/n1")["spec"].get("unschedulable")
    assert outcome(repair(server, machines, tmp_path), tmp_path)["outcome"] == "repaired"


def test_a_machine_in_maintenance_is_not_repaired_although_it_is_named(
    server: ApiServer, machines: Path, tmp_path: Path
) -> None:
    annotated = ("annotate", "node", "n1")
    kubectl(server, *annotated, "gpunodes.dev/maintenance=ann swaps the disk")
    try:
        found = outcome(repair(server, machines, tmp_path, name="n1"), tmp_path)
        assert found["decision"] == "refuse"
        assert "it is in maintenance: ann swaps the disk" in found["why"]
    finally:
        kubectl(server, *annotated, "gpunodes.dev/maintenance-")
    assert used(machines) == []


@pytest.mark.parametrize("words", ["annotate node c0 gpunodes.dev/maintenance{}", "{}cordon c0"])
def test_a_control_plane_in_maintenance_or_cordoned_is_worked_on(server: ApiServer, words: str) -> None:
    is_cordon = words.endswith("cordon c0")
    kubectl(server, *words.format("" if is_cordon else "=x").split())
    try:
        with command(server, "init-master", "c0") as (_, message):
            assert message.startswith("held")
            assert bool(spec(server, "c0").get("unschedulable")) == is_cordon, "the cordon stays"
    finally:
        kubectl(server, *words.format("un" if is_cordon else "-").split())


def test_a_cordon_by_others(server: ApiServer, machines: Path, tmp_path: Path) -> None:
    kubectl(server, "cordon", "n1")
    try:
        found = outcome(repair(server, machines, tmp_path), tmp_path)
        assert found["decision"] == "refuse"
        assert "a user or another program cordoned it" in found["why"]
        with command(server, "gpu install", "n1") as (_, message):
            assert message.startswith("held"), "commands are allowed"
        assert used(machines) == []
        assert outcome(repair(server, machines, tmp_path, name="n1"), tmp_path)["outcome"] == "repaired"
        assert spec(server, "n1")["unschedulable"], "the cordon stays"
    finally:
        kubectl(server, "uncordon", "n1")


@pytest.mark.parametrize("again", [False, True])
def test_a_repair_whose_cordon_a_user_lifts(server: ApiServer, machines: Path, tmp_path: Path, again: bool) -> None:
    """By `kubectl uncordon`, which takes no lock; ``again``: then the user cordons it to work there."""
    process = repair(server, machines, tmp_path)
    started(machines, "n1")
    try:
        kubectl(server, "uncordon", "n1")
        if again:
            kubectl(server, "cordon", "n1")
        found = outcome(process, tmp_path)
        assert found["outcome"] == "not-repaired"
        assert "its node was uncordoned in the meantime" in found["why"]
        assert used(machines) == ["reboot"], "the next step was not ordered"
        assert bool(spec(server, "n1").get("unschedulable")) == again
        if again:
            assert outcome(repair(server, machines, tmp_path), tmp_path)["decision"] == "refuse"
            assert used(machines) == ["reboot"]
    finally:
        kubectl(server, "uncordon", "n1")
    assert outcome(repair(server, machines, tmp_path), tmp_path)["outcome"] == "repaired"
    assert held(server) == []


def test_the_repair_of_a_control_plane_excludes_commands_on_all_machines(
    server: ApiServer, machines: Path, tmp_path: Path
) -> None:
    exclusion.change(machines, "c0", sick=True)
    with command(server, "join", "n2"):
        found = outcome(repair(server, machines, tmp_path, name="c0"), tmp_path, "c0")
        assert found["decision"] == "refuse"
        assert "n2 is locked by `gpunodes join` of " in found["why"]
    assert used(machines, "c0") == []
    with exclusion.in_work(machines, "c0"):
        process = repair(server, machines, tmp_path, name="c0")
        started(machines, "c0")
        with command(server, "join", "n2") as (_, message):
            assert message.startswith("c0 is locked by `gpunodes repair` of ")
    assert outcome(process, tmp_path, "c0")["outcome"] == "repaired"
    assert held(server) == []


def test_two_repair_decisions(server: ApiServer) -> None:
    """The decision lock is renewed as long as it is held."""
    sessions = [Session(here(sys.executable, server.kubeconfig)) for _ in range(2)]
    first, second = (Leases(Cluster(session), "health", duration_s=6.0) for session in sessions)
    try:
        with first.deciding():
            time.sleep(4.5)
            with pytest.raises(Held, match="the choice of machines to repair"), second.deciding(patience_s=0):
                pass
        with second.deciding(patience_s=0):
            pass
    finally:
        for each in (first, second):
            each.close()
        for session in sessions:
            session.close()
    assert held(server) == []


def once_expired(take: Callable[[], object]) -> None:
    """Call ``take`` until the lock in its way has expired: its times are whole seconds, and a renewal may be late."""
    deadline = time.monotonic() + 60
    while True:
        try:
            take()
        except Held:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
        else:
            return


def test_a_lock_that_expired_is_taken_by_one_and_lost_to_the_other(server: ApiServer) -> None:
    """By resource versions: a late renewal does not overwrite the new holder."""
    sessions = [Session(here(sys.executable, server.kubeconfig)) for _ in range(2)]
    first, second = (Leases(Cluster(session), "repair", duration_s=6.0) for session in sessions)
    try:
        first.take("n1", "")
        first._stop.set()  # as a process that the kernel does not let run
        once_expired(lambda: second.take("n1", ""))
        assert "could not be renewed" in str(first.lost())
        with pytest.raises(Exception, match="was taken by `gpunodes repair` of "):
            first.confirm("n1")
        first.release("n1")
        second.confirm("n1")
        second.release("n1")
        calls = sessions[1].calls
        second.take_all(["n2", "n3"])
        second.release_all()
        print(f"\nAPI calls to lock two machines and let them go: {sessions[1].calls - calls}")
        assert sessions[1].calls - calls <= 8
    finally:
        for each in (first, second):
            each.close()
        for session in sessions:
            session.close()
    assert held(server) == []


@pytest.mark.parametrize("suspended", ["n1", "c0"])
def test_a_lock_that_expired_does_not_come_back_although_nobody_took_it(server: ApiServer, suspended: str) -> None:
    """Others began meanwhile what it excludes: work on the control plane, or on any machine."""
    other = {"n1": "c0", "c0": "n1"}[suspended]
    sessions = [Session(here(sys.executable, server.kubeconfig)) for _ in range(2)]
    first, second = (Leases(Cluster(session), "repair", duration_s=6.0) for session in sessions)
    try:
        first.take(suspended, "", alone=suspended == "c0")
        first._stop.set()  # as a process that the kernel does not let run
        once_expired(lambda: second.take(other, "", alone=other == "c0"))
        with pytest.raises(Lost, match=f"the lock on {suspended} expired"):
            first.confirm(suspended)
        assert "expired" in str(first.lost())
        second.confirm(other)
        second.release(other)
    finally:
        for each in (first, second):
            each.close()
        for session in sessions:
            session.close()
        server.call("DELETE", f"{LEASES}/gpunodes-machine-{suspended}")
    assert held(server) == []
