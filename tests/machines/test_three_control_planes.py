"""One control plane becomes three in place, the leader leaves and joins again, a dead one is removed through another, a
restore.

The lab gives them a virtual address, and lets them elect leaders.
"""

from __future__ import annotations

import yaml

from .conftest import BARE, LONG, SLOW_RESTARTS, LabSpec, Operator, lines, search_for_secrets
from .etcd_members import CONTROLS, FIRST, KUBECTL, SECOND, THIRD, leader, leftovers, regroup, voters, with_vip

LAB = LabSpec("debian13", workers=0, control_planes=3)


def test_a_dry_run_changes_nothing(operator: Operator) -> None:
    operator.bare = operator.each(CONTROLS, BARE)
    operator.gpunodes("up", "--dry-run")
    assert operator.each(CONTROLS, BARE) == operator.bare


def test_one_becomes_three_in_place(operator: Operator) -> None:
    """Made with its own address as the endpoint, which moves. Other parts make three at once."""
    address = with_vip(operator, "")
    regroup(operator, FIRST)
    operator.gpunodes("up")
    with_vip(operator, address)
    operator.gpunodes("endpoint", "set", address, "--yes")
    regroup(operator, *CONTROLS)
    operator.gpunodes("up", limit_s=7200)
    assert voters(operator) == set(CONTROLS)
    assert leftovers(operator) == []
    assert {each["outcome"] for each in operator.document("up")["machines"]} == {"unchanged"}


def test_the_leader_leaves_and_joins_again(operator: Operator) -> None:
    leaves = leader(operator)
    operator.gpunodes("remove", "--yes", leaves)
    stays = next(name for name in CONTROLS if name != leaves)
    assert voters(operator, stays) == set(CONTROLS) - {leaves}
    assert f"node/{leaves}" not in lines(operator.ssh(stays, f"{KUBECTL} get nodes --output name"))
    assert lines(operator.ssh(leaves, BARE)) == operator.bare[leaves]
    operator.gpunodes("join", leaves, limit_s=2 * LONG)
    assert voters(operator) == set(CONTROLS)


def test_a_dead_one_is_removed_through_another(operator: Operator) -> None:
    assert operator.lab("power", THIRD, "off").returncode == 0
    operator.gpunodes("remove", "--yes", SECOND, "--dead", code=2)
    operator.gpunodes("remove", "--yes", SECOND, code=1)
    assert voters(operator) == set(CONTROLS), "etcd needs both"
    operator.gpunodes("remove", "--yes", THIRD, "--dead")
    assert voters(operator) == {FIRST, SECOND}
    assert f"node/{THIRD}" not in lines(operator.ssh(FIRST, f"{KUBECTL} get nodes --output name"))


def test_a_restore_leaves_one_and_the_other_joins_again(operator: Operator) -> None:
    regroup(operator, FIRST, SECOND)
    operator.kubectl("create", "configmap", "kept")
    operator.gpunodes("etcd", "backup", "--output", "two.tar")
    operator.kubectl("delete", "configmap", "kept")
    # Its controller manager also waits for the lease of the one that was stopped.
    (operator.folder / "inventory/group_vars/control_plane.yml").write_text(yaml.safe_dump(SLOW_RESTARTS))
    done = operator.gpunodes("etcd", "restore", "two.tar", "--yes", limit_s=2 * LONG)
    assert f"gpunodes reset {SECOND} && gpunodes join {SECOND}" in " ".join((done.stdout + done.stderr).split())
    assert voters(operator) == {FIRST}
    operator.gpunodes("reset", SECOND, "--yes")
    assert lines(operator.ssh(SECOND, BARE)) == operator.bare[SECOND]
    operator.gpunodes("join", SECOND, limit_s=2 * LONG)
    assert voters(operator) == {FIRST, SECOND}
    operator.kubectl("get", "configmap", "kept")


def test_no_secret_leaks(operator: Operator) -> None:
    search_for_secrets(operator, (FIRST, SECOND))
