"""Which machines of a roll-out are begun: the budget holds in any order of events; windows and durations."""

from __future__ import annotations

import dataclasses
import datetime as dt

import pytest
from gpunodes.errors import WrongInput
from gpunodes.repair.maintenance import Maintenance
from gpunodes.repair.policy import Budget, Node, pool_name
from gpunodes.rollout import policy, times
from gpunodes.rollout.options import RolloutOptions, parse
from gpunodes.rollout.policy import Decision, RolloutCandidate
from gpunodes.rollout.times import Window
from hypothesis import given, settings
from hypothesis import strategies as st

NOW = 1_800_000_000.0
STATES = st.sampled_from(["good", "good", "good", "down", "cordoned", "maintenance", "busy", "repair"])


def node(number: int, state: str, *, running: bool = False) -> Node:
    return Node(
        f"n{number}",
        ready=state != "down",
        control_plane=number < 3,
        pool=f"p{number % 2}",
        cordoned=running or state in {"cordoned", "busy", "repair"},
        cordoned_by_repair="r1" if state == "repair" else "",
        rollout="mine" if running else "",
        cordoned_by_rollout=running,
        maintenance=Maintenance("disks") if state == "maintenance" else None,
    )


@settings(max_examples=300, deadline=None)
@given(data=st.data(), budget=st.integers(1, 4), percent=st.booleans(), canary=st.sampled_from([None, 0, 1, 2]))
def test_in_any_schedule_no_pool_has_more_unavailable_than_its_budget(
    data: st.DataObject, budget: int, percent: bool, canary: int | None
) -> None:
    """Machines fail and recover while the roll-out goes on; the decision never adds to a pool that is at its limit."""
    limit = Budget(budget * 10, percent=True) if percent else Budget(budget)
    options = RolloutOptions(max_unavailable=limit)
    waiting, running = list(range(12)), set[int]()
    for _ in range(data.draw(st.integers(1, 12), label="rounds")):
        states = data.draw(st.lists(STATES, min_size=12, max_size=12), label="states")
        nodes = [node(number, states[number], running=number in running) for number in range(12)]
        candidates = [
            RolloutCandidate(
                f"n{number}", nodes[number], control_plane=number < 3, busy="x" * (states[number] == "busy")
            )
            for number in waiting
        ]
        busy = {f"n{number}" for number in running}
        decisions = policy.decide(candidates, nodes, options, NOW, busy, canary)
        begun = {int(each.machine[1:]) for each in decisions if each.decision is Decision.BEGIN}
        assert all(states[number] == "good" for number in begun)
        for pool in {pool_name(each) for each in nodes}:
            members = [number for number in range(12) if pool_name(nodes[number]) == pool]
            out = {number for number in members if states[number] != "good"} | (running | begun) & set(members)
            if begun & set(members):
                assert len(out) <= limit.limit(len(members)), (pool, begun, out)
        controls = {number for number in running | begun if number < 3}
        if controls and begun:
            assert len(running | begun) == 1, "control planes one at a time, and alone"
        if any(number < 3 for number in waiting) or controls:
            assert not {number for number in begun if number >= 3}, "control planes first"
        if canary is not None:
            assert len({number for number in begun if number >= 3}) <= canary
        running |= begun
        ended = data.draw(st.sets(st.sampled_from(sorted(running))), label="ended") if running else set()
        running -= ended
        skipped = {int(each.machine[1:]) for each in decisions if each.decision is Decision.SKIP}
        waiting = [number for number in waiting if number not in begun | skipped]


def test_each_machine_gets_one_decision_and_a_reason() -> None:
    nodes = [node(number, "good") for number in range(6)]
    decisions = policy.decide([RolloutCandidate(each.name, each) for each in nodes], nodes, RolloutOptions(), NOW)
    assert [each.machine for each in decisions] == [each.name for each in nodes]
    assert [each.decision for each in decisions] == [Decision.BEGIN] + [Decision.WAIT] * 5
    assert all(each.why for each in decisions[1:])


def test_a_node_given_back_counts_until_its_result_is_known() -> None:
    """Its result may stop the roll-out, so no other machine takes its place before."""
    nodes = [node(number, "good") for number in (3, 5, 7)]
    waiting = [RolloutCandidate(each.name, each) for each in nodes[1:]]
    options = RolloutOptions(max_unavailable=Budget(1))
    decisions = policy.decide(waiting, nodes, options, NOW, running={"n3"})
    assert [each.decision for each in decisions] == [Decision.WAIT, Decision.WAIT]
    assert "n3 of pool p1 unavailable" in decisions[0].why
    assert policy.decide(waiting, nodes, options, NOW)[0].decision is Decision.BEGIN


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (Node("n", rollout="theirs"), "rollout abandon"),
        (Node("n", needs_repair="xid 79"), "xid 79"),
        (Node("n", cordoned=True, cordoned_by_repair="r"), "repair --resume"),
        (Node("n", cordoned=True), "kubectl uncordon"),
        (Node("n", ready=False), "not ready"),
        (None, "no longer exists"),
    ],
)
def test_a_node_that_others_use_is_left_alone(found: Node | None, why: str) -> None:
    assert why in policy.forbidden(found, "mine", NOW)
    assert policy.forbidden(Node("n"), "mine", NOW) == ""
    own = Node("n", rollout="mine", cordoned=True, ready=False)
    assert policy.forbidden(own, "mine", NOW) == ""
    assert "disks" in policy.forbidden(dataclasses.replace(own, maintenance=Maintenance("disks")), "mine", NOW)


@pytest.mark.parametrize(
    ("since", "decision"),
    [(0.0, Decision.SKIP), (NOW - 500, Decision.SKIP), (NOW - 30, Decision.WAIT), (NOW + 30, Decision.SKIP)],
)
def test_a_node_that_just_stopped_being_ready_is_waited_for(since: float, decision: Decision) -> None:
    """Its kubelet may have lost the control plane that the roll-out restarts; a clock that is ahead bounds nothing."""
    found = Node("n", ready=False, changed=since)
    [made] = policy.decide([RolloutCandidate("n", found)], [found], RolloutOptions(), NOW)
    assert (made.decision, "ready" in made.why) == (decision, True)
    cordoned = dataclasses.replace(found, cordoned=True)
    [made] = policy.decide([RolloutCandidate("n", cordoned)], [cordoned], RolloutOptions(), NOW)
    assert made.decision is Decision.SKIP


@pytest.mark.parametrize(
    ("window", "inside", "outside", "opens"),
    [
        ("22:00-05:00", ["22:00", "23:59", "00:00", "04:59"], ["05:00", "12:00", "21:59"], "22:00"),
        ("01:00-02:30", ["01:00", "02:29"], ["00:59", "02:30", "23:00"], "01:00"),
    ],
)
def test_windows(window: str, inside: list[str], outside: list[str], opens: str) -> None:
    made = [times.window(window)]
    assert str(made[0]) == window
    assert all(times.is_open(made, dt.datetime.fromisoformat(f"2030-01-01T{each}")) for each in inside)
    assert not any(times.is_open(made, dt.datetime.fromisoformat(f"2030-01-01T{each}")) for each in outside)
    assert times.opens(made, dt.datetime.fromisoformat("2030-01-01T12:00")) == opens
    assert times.is_open([], dt.datetime.fromisoformat("2030-01-01T12:00"))


def test_the_next_of_several_windows() -> None:
    windows = [Window(60, 120), Window(13 * 60, 14 * 60)]
    assert times.opens(windows, dt.datetime.fromisoformat("2030-01-01T12:00")) == "13:00"
    assert times.opens(windows, dt.datetime.fromisoformat("2030-01-01T15:00")) == "01:00"


@pytest.mark.parametrize("text", ["", "22:00", "24:00-05:00", "22:60-05:00", "05:00-05:00", "{{ x }}", None, 5])
def test_a_wrong_window_is_one_sentence(text: object) -> None:
    with pytest.raises(WrongInput, match="is not a window"):
        times.window(text)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1d12h", 129600)])
def test_durations(text: str, seconds: int) -> None:
    assert times.duration(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "m", "-5m", "1w", "999999m", "10 m", "٣m"])
def test_a_wrong_duration_is_one_sentence(text: str) -> None:
    with pytest.raises(WrongInput, match="is not a duration"):
        times.duration(text)


def test_options_survive_their_record() -> None:
    options = RolloutOptions(Budget(10, percent=True), 2, 600.0, (Window(60, 120),), 30.0)
    assert parse(options.document()) == options
