"""Which machines may be repaired now: actions, budget, control planes, unhealthy pools, loop guard, order."""

from __future__ import annotations

import dataclasses

import pytest
from gpunodes.errors import WrongInput
from gpunodes.health.model import Action, Finding, State, Verdict
from gpunodes.repair import escalation, policy
from gpunodes.repair.policy import Budget, Decision, MachineDecision, Node, RepairCandidate, RepairLimits
from hypothesis import given, settings
from hypothesis import strategies as st

NOW = 1_800_000_000.0
HOUR = 3600.0


def verdict(name: str, action: Action = Action.REBOOT, *, hung: bool = False, state: State | None = None) -> Verdict:
    default = State.HEALTHY if action is Action.NONE else State.SICK
    return Verdict(name, "live", state or (State.HUNG if hung else default), action, hung_in_driver=hung)


def candidate(name: str, action: Action = Action.REBOOT, **changes: object) -> RepairCandidate:
    made = RepairCandidate(name, verdict(name, action), Node(name))
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]  # the tests' own keywords


def workers(number: int, **special: Node) -> list[Node]:
    return [special.get(f"w{index}", Node(f"w{index}")) for index in range(number)]


def decided(decisions: list[MachineDecision]) -> dict[str, Decision]:
    return {decision.machine: decision.decision for decision in decisions}


def decide(
    candidates: list[RepairCandidate], nodes: list[Node], limits: RepairLimits | None = None
) -> list[MachineDecision]:
    return policy.decide(candidates, nodes, limits or RepairLimits(), NOW)


def test_only_machines_that_need_a_reboot_are_repaired() -> None:
    decisions = decide(
        [
            candidate("w0"),
            candidate("w1", Action.RESET_GPU),
            candidate("w2", Action.RESTART_APP),
            candidate("w3", Action.NONE),
        ],
        workers(20),
    )
    assert decided(decisions) == {
        "w0": Decision.REPAIR,
        "w1": Decision.NOTHING,
        "w2": Decision.NOTHING,
        "w3": Decision.NOTHING,
    }


def test_more_actions_allow_a_gpu_reset_too() -> None:
    limits = RepairLimits(actions=frozenset({Action.RESET_GPU, Action.REBOOT}), max_unavailable=Budget(2))
    decisions = decide([candidate("w0"), candidate("w1", Action.RESET_GPU)], workers(20), limits)
    assert set(decided(decisions).values()) == {Decision.REPAIR}


def test_machines_for_manual_repair_and_unreachable_ones_are_not_rebooted() -> None:
    far = RepairCandidate("w1", verdict("w1", Action.NONE, state=State.UNREACHABLE), Node("w1", ready=False))
    decisions = decide([candidate("w0", Action.REPAIR), far], workers(20))
    assert decided(decisions) == {"w0": Decision.NEEDS_REPAIR, "w1": Decision.REFUSE}
    (refused,) = [each.why for each in decisions if each.machine == "w1"]
    assert refused == "it is unreachable and may still be healthy; it has no BMC that could reset it"
    (refused,) = [each.why for each in decide([dataclasses.replace(far, bmc=True)], workers(20))]
    assert refused.endswith("`gpunodes repair w1 --from bmc` resets it")
    by_hand = RepairLimits(by_hand=True)
    assert decided(decide([far], workers(20), by_hand)) == {"w1": Decision.REPAIR}


def test_the_budget_counts_unavailable_machines() -> None:
    down = Node("w5", ready=False)
    cordoned = Node("w6", cordoned=True)
    assert decided(decide([candidate("w0")], workers(9, w5=down))) == {"w0": Decision.WAIT}
    assert decided(decide([candidate("w0")], workers(9, w6=cordoned))) == {"w0": Decision.WAIT}
    two = RepairLimits(max_unavailable=Budget(2))
    assert decided(decide([candidate("w0")], workers(9, w5=down), two)) == {"w0": Decision.REPAIR}
    assert decided(decide([candidate("w0")], workers(9, w5=down, w6=cordoned), two)) == {"w0": Decision.WAIT}


def test_one_at_a_time_and_unavailable_machines_first() -> None:
    lost = candidate("w7", node=Node("w7", ready=False), verdict=verdict("w7", hung=True))
    decisions = decide([candidate("w0"), lost], workers(20, w7=Node("w7", ready=False)))
    assert [(decision.machine, decision.decision) for decision in decisions] == [
        ("w7", Decision.REPAIR),
        ("w0", Decision.WAIT),
    ]


def test_an_unavailable_machine_counts_for_all_others() -> None:
    """A node that is not ready, or cordoned, is unavailable for the repair of every other machine of its pool."""
    nodes = workers(20, w1=Node("w1", ready=False), w2=Node("w2", ready=False))
    both = [candidate("w1", node=nodes[1]), candidate("w2", node=nodes[2])]
    assert set(decided(decide(both, nodes)).values()) == {Decision.WAIT}
    assert set(decided(decide(both, nodes, RepairLimits(max_unavailable=Budget(2)))).values()) == {Decision.REPAIR}
    assert decided(decide(both[:1], workers(20, w1=nodes[1]))) == {"w1": Decision.REPAIR}
    cordoned = workers(20, w1=nodes[1], w2=Node("w2", cordoned=True))
    assert decided(decide(both[:1], cordoned)) == {"w1": Decision.WAIT}


def test_a_selection_does_not_reduce_the_unhealthy_count() -> None:
    """One selected of three unhealthy machines is not a single case: the whole pool counts, by nodes and verdicts."""
    lost = workers(4, **{f"w{index}": Node(f"w{index}", ready=False) for index in range(3)})
    (decision,) = decide([candidate("w0", node=lost[0])], lost, RepairLimits(max_unavailable=Budget(4)))
    assert (decision.decision, decision.why[:6]) == (Decision.REFUSE, "3 of 4")
    ready = workers(4)
    others = [candidate("w1"), candidate("w2"), candidate("w3", Action.NONE)]
    (decision,) = policy.decide([candidate("w0")], ready, RepairLimits(), NOW, others)
    assert (decision.decision, decision.why[:6]) == (Decision.REFUSE, "3 of 4")


def test_gpu_workers_are_a_separate_pool() -> None:
    """Sixteen CPU nodes do not dilute three unhealthy GPU nodes of four."""
    nodes = [*workers(4), *(Node(f"cpu{index}", pool=policy.pool_of("", gpus=False)) for index in range(16))]
    decisions = decide([candidate(f"w{index}") for index in range(3)], nodes)
    assert set(decided(decisions).values()) == {Decision.REFUSE}
    assert "3 of 4 machines of pool GPU workers" in decisions[0].why
    assert policy.pool_of("a100", gpus=True) == "a100"


@pytest.mark.parametrize("busy", ["", "join of ann@desk"])
def test_machines_without_a_node_are_no_part_of_a_pool(busy: str) -> None:
    """Sixteen GPU hosts, or machines that have not joined yet, neither dilute nor fill the pool of four nodes."""
    bare = [
        candidate(f"h{index}", Action.NONE, node=None, unmatched="no node matches it", busy=busy) for index in range(16)
    ]
    sick, nodes = [candidate(f"w{index}") for index in range(3)], workers(4)
    for decisions in (decide([*sick, *bare], nodes), policy.decide(sick, nodes, RepairLimits(), NOW, bare)):
        assert {each.decision for each in decisions if each.machine in {"w0", "w1", "w2"}} == {Decision.REFUSE}
        assert "3 of 4 machines of pool GPU workers" in next(each.why for each in decisions if each.machine == "w0")
    quarter = RepairLimits(max_unavailable=policy.budget("25%"), unhealthy_percent=100)
    counted = list(decided(policy.decide(sick, nodes, quarter, NOW, bare)).values())
    assert (counted.count(Decision.REPAIR), counted.count(Decision.WAIT)) == (1, 2)


def test_unhealthy_machines_without_a_node_do_not_stop_repairs() -> None:
    bare = [candidate(f"h{index}", node=None, unmatched="no node matches it") for index in range(16)]
    decisions = decided(decide([candidate("w0"), *bare], workers(4)))
    assert decisions.pop("w0") is Decision.REPAIR
    assert set(decisions.values()) == {Decision.REFUSE}


def test_a_repair_dated_by_a_fast_clock_counts() -> None:
    """A repair that another controller's clock dates to tomorrow has already happened."""
    ahead = candidate("w0", repairs=(NOW + HOUR, NOW + 40 * HOUR))
    assert decided(decide([ahead], workers(9))) == {"w0": Decision.NEEDS_REPAIR}


NODES = st.builds(
    Node,
    name=st.sampled_from([f"n{index}" for index in range(24)]),
    ready=st.booleans(),
    cordoned=st.booleans(),
    control_plane=st.sampled_from([False, False, False, True]),
    pool=st.sampled_from(["a", policy.GPU_POOL, policy.WORKER_POOL]),
)
VERDICTS = st.sampled_from(
    [
        verdict("", Action.NONE),
        verdict("", Action.NONE),
        verdict("", Action.RESET_GPU),
        verdict("", Action.REBOOT),
        verdict("", Action.REBOOT, hung=True),
        verdict("", Action.NONE, state=State.UNREACHABLE),
    ]
)
LIMITS = st.builds(
    RepairLimits,
    actions=st.sampled_from([frozenset({Action.REBOOT}), frozenset({Action.REBOOT, Action.RESET_GPU})]),
    max_unavailable=st.one_of(
        st.builds(Budget, st.integers(1, 6)), st.builds(Budget, st.integers(1, 100), st.just(True))
    ),
    unhealthy_percent=st.integers(0, 100),
    by_hand=st.booleans(),
)


@given(
    st.lists(NODES, unique_by=lambda node: node.name, max_size=24),
    st.data(),
    LIMITS,
)
@settings(max_examples=300, deadline=None)
def test_no_selection_exceeds_budget_and_percentage(
    nodes: list[Node], data: st.DataObject, limits: RepairLimits
) -> None:
    """For any selection, no pool has more unavailable or unhealthy machines than allowed."""
    machines = [
        RepairCandidate(node.name, dataclasses.replace(data.draw(VERDICTS), name=node.name), node, named=True)
        for node in nodes
    ]
    chosen = data.draw(st.sets(st.sampled_from(machines).map(lambda each: each.name))) if machines else set()
    decisions = policy.decide(
        [each for each in machines if each.name in chosen],
        nodes,
        limits,
        NOW,
        [each for each in machines if each.name not in chosen],
    )
    started = {decision.machine for decision in decisions if decision.decision is Decision.REPAIR}
    for pool in {policy.pool_name(node) for node in nodes}:
        members = [each for each in machines if policy.pool_name(each.node or Node("")) == pool]
        if not {each.name for each in members} & started:
            continue
        down = {each.name for each in members if each.node and not each.node.available} | started & {
            each.name for each in members
        }
        assert len(down) <= limits.max_unavailable.limit(len(members))
        assert pool != policy.CONTROL_PLANE_POOL or len(down) == 1
        unhealthy = sum(policy.is_unhealthy(each.verdict) or not (each.node and each.node.ready) for each in members)
        assert limits.by_hand or unhealthy <= 1 or unhealthy * 100 <= limits.unhealthy_percent * len(members)


def test_pools_have_budgets_of_their_own() -> None:
    nodes = [Node(f"{pool}{index}", pool=pool) for pool in "ab" for index in range(10)]
    unhealthy = [candidate("a0", node=nodes[0]), candidate("a1", node=nodes[1]), candidate("b0", node=nodes[10])]
    assert decided(decide(unhealthy, nodes)) == {"a0": Decision.REPAIR, "a1": Decision.WAIT, "b0": Decision.REPAIR}


def test_a_percentage_is_of_the_pool() -> None:
    nodes = workers(50)
    ten = RepairLimits(max_unavailable=policy.budget("10%"))
    unhealthy = [candidate(f"w{index}", node=nodes[index]) for index in range(8)]
    counted = list(decided(decide(unhealthy, nodes, ten)).values())
    assert counted.count(Decision.REPAIR) == 5
    assert counted.count(Decision.WAIT) == 3


def test_control_planes_must_be_named_and_go_one_by_one() -> None:
    nodes = [*workers(3), Node("c0", control_plane=True), Node("c1", control_plane=True)]
    first, second = (candidate(name, node=Node(name, control_plane=True)) for name in ("c0", "c1"))
    assert decided(decide([first], nodes)) == {"c0": Decision.REFUSE}
    both = [dataclasses.replace(each, named=True) for each in (first, second)]
    generous = RepairLimits(max_unavailable=Budget(5), unhealthy_percent=100)
    assert decided(decide(both, nodes, generous)) == {"c0": Decision.REPAIR, "c1": Decision.WAIT}


def test_a_mostly_unhealthy_pool_is_not_repaired() -> None:
    nodes = workers(4)
    decisions = decide([candidate(f"w{index}", node=nodes[index]) for index in range(3)], nodes)
    assert set(decided(decisions).values()) == {Decision.REFUSE}
    assert "3 of 4" in decisions[0].why
    assert decided(decide([candidate("w0")], workers(2))) == {"w0": Decision.REPAIR}, (
        "a single machine never exceeds the limit"
    )


def test_unreachable_machines_count_as_unhealthy() -> None:
    nodes = workers(10)
    far = [
        RepairCandidate(f"w{i}", verdict(f"w{i}", Action.NONE, state=State.UNREACHABLE), nodes[i]) for i in range(1, 5)
    ]
    assert decided(decide([candidate("w0"), *far], nodes))["w0"] is Decision.REFUSE


def test_the_loop_guard_counts_history_and_node_once() -> None:
    once = candidate("w0", repairs=(NOW - HOUR,), node=Node("w0", repairs=(NOW - HOUR,)))
    assert decided(decide([once], workers(9))) == {"w0": Decision.REPAIR}
    twice = candidate("w0", repairs=(NOW - HOUR,), node=Node("w0", repairs=(NOW - 2 * HOUR,)))
    decisions = decide([twice], workers(9))
    assert decided(decisions) == {"w0": Decision.NEEDS_REPAIR}
    assert "2 times in 24 h" in decisions[0].why
    long_ago = candidate("w0", repairs=(NOW - 25 * HOUR, NOW - HOUR))
    assert decided(decide([long_ago], workers(9))) == {"w0": Decision.REPAIR}


@pytest.mark.parametrize("where", ["history", "node"])
def test_a_machine_marked_as_needing_repair_is_not_rebooted_again(where: str) -> None:
    given_up = (
        candidate("w0", needs_repair="GPU lost")
        if where == "history"
        else candidate("w0", node=Node("w0", cordoned=True, needs_repair="GPU lost"))
    )
    for limits in (RepairLimits(), RepairLimits(by_hand=True)):
        decisions = decide([given_up], workers(9), limits)
        assert decided(decisions) == {"w0": Decision.NEEDS_REPAIR}
        assert "gpunodes uncordon w0" in decisions[0].why


def test_a_machine_locked_by_another_command_is_refused() -> None:
    assert decided(decide([candidate("w0", busy="ann@desk")], workers(9))) == {"w0": Decision.REFUSE}


@pytest.mark.parametrize("text", ["0", "-1", "101%", "ten", "", "1.5", "%"])
def test_an_invalid_budget_is_refused(text: str) -> None:
    with pytest.raises(WrongInput):
        policy.budget(text)


def test_the_starting_step() -> None:
    assert escalation.start(verdict("w0")).step.name == "reboot"
    assert [step.name for step in escalation.start(verdict("w0")).skipped] == ["gpu-reset"]
    assert escalation.start(verdict("w0", Action.RESET_GPU)).step.name == "gpu-reset"
    assert escalation.start(verdict("w0"), "sysrq").step.name == "sysrq"
    lost = dataclasses.replace(verdict("w0"), findings=(Finding("gpus-missing", "", Action.REBOOT, State.SICK),))
    assert escalation.start(lost).step.name == "reboot"
    assert escalation.start(lost, faults=["missing-since-boot"]).step.name == "cold"
    with pytest.raises(WrongInput):
        escalation.start(verdict("w0"), "prayer")


def test_steps_that_a_machine_performs_by_itself() -> None:
    assert escalation.armed("reboot", hung=True) == [(10.0, "force"), (15.0, "sysrq")]
    assert escalation.armed("force", hung=False) == [(20.0, "sysrq")]
    assert escalation.armed("sysrq", hung=True) == []
    assert escalation.next_step("sysrq", ()) == escalation.step("bmc")
    assert escalation.next_step("cold", ()) is None
