"""A control plane joins a cluster of one; its join is killed while etcd has its learner; the leader leaves.

The lab gives them a virtual address, and lets them elect leaders. Three of them need more than two processors without
KVM: test_three_control_planes.py. Changed settings of two: test_control_plane_settings.py.
"""

from __future__ import annotations

from .conftest import BARE, LONG, LabSpec, Operator, kill, lines, search_for_secrets
from .etcd_members import FIRST, KUBECTL, SECOND, leader, leftovers, members, regroup, voters
from .waiting import until

LAB = LabSpec("debian13", workers=0, control_planes=2)
CONTROLS = (FIRST, SECOND)


def test_two_are_refused(operator: Operator) -> None:
    operator.bare = operator.each(CONTROLS, BARE)
    done = operator.gpunodes("up", code=1)
    assert "would have 2 control planes" in " ".join((done.stdout + done.stderr).split())
    regroup(operator, FIRST)
    operator.gpunodes("up")
    assert voters(operator) == {FIRST}


def test_a_killed_join_is_completed(operator: Operator) -> None:
    """Killed when etcd has the new member, as a learner that has started or not."""
    regroup(operator, *CONTROLS)
    running = operator.start("join", SECOND)
    operator.wait_for(running, f"{SECOND}: Join as a control plane")
    until("etcd has another member", lambda: len(members(operator)) > 1, limit_s=900)
    kill(running)
    print(f"killed when etcd had {members(operator)}")
    operator.gpunodes("join", SECOND, limit_s=2 * LONG)
    assert voters(operator) == set(CONTROLS)
    assert leftovers(operator) == []
    path = "/etc/kubernetes/gpunodes/encryption.json"
    assert len({tuple(each) for each in operator.each(CONTROLS, f"sha256sum {path}").values()}) == 1
    assert {tuple(each) for each in operator.each(CONTROLS, f"stat --format=%a {path}").values()} == {("600",)}


def test_one_of_several_is_not_reset(operator: Operator) -> None:
    done = operator.gpunodes("reset", "--yes", SECOND, code=1)
    assert "belongs to a cluster that has others" in " ".join(done.stdout.split())
    assert voters(operator) == set(CONTROLS)


def test_no_secret_leaks(operator: Operator) -> None:
    search_for_secrets(operator, CONTROLS)


def test_the_leader_leaves(operator: Operator) -> None:
    leaves = leader(operator)
    stays = next(name for name in CONTROLS if name != leaves)
    operator.gpunodes("remove", "--yes", leaves)
    assert voters(operator, stays) == {stays}
    assert f"node/{leaves}" not in lines(operator.ssh(stays, f"{KUBECTL} get nodes --output name"))
    assert lines(operator.ssh(leaves, BARE)) == operator.bare[leaves]


def test_a_reset_of_the_last_ends_the_cluster(operator: Operator) -> None:
    operator.gpunodes("reset", "--yes", *CONTROLS)
    assert operator.each(CONTROLS, BARE) == operator.bare
