"""A control plane joins a cluster of one; its join is killed while etcd has its learner; the leader leaves.

The lab gives them a virtual address, and lets them elect leaders. Three of them need more than two processors without
KVM: test_three_control_planes.py.
"""

from __future__ import annotations

import json
import time

import yaml

from .conftest import BARE, LabSpec, Operator, kill, lines, search_for_secrets
from .etcd_members import CRICTL, FIRST, KUBECTL, SECOND, leader, leftovers, members, regroup, voters

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
    deadline = time.monotonic() + 900
    while len(found := members(operator)) == 1:
        assert time.monotonic() < deadline, "no member was added"
        time.sleep(1)
    kill(running)
    print(f"killed when etcd had {found}")
    operator.gpunodes("join", SECOND)
    assert voters(operator) == set(CONTROLS)
    assert leftovers(operator) == []
    path = "/etc/kubernetes/gpunodes/encryption.json"
    assert len({tuple(each) for each in operator.each(CONTROLS, f"sha256sum {path}").values()}) == 1
    assert {tuple(each) for each in operator.each(CONTROLS, f"stat --format=%a {path}").values()} == {("600",)}


def test_changed_settings_are_drift_and_rolled_out(operator: Operator) -> None:
    """Only what differs is restarted; kubeadm's configuration follows; the second roll-out has nothing to do."""
    path = operator.folder / "inventory/group_vars/control_plane.yml"
    given = operator.setting("gpunodes_component_arguments")
    changed = {**given, "scheduler": {**given.get("scheduler", {}), "v": "4"}}
    assert operator.document("status")["drift"] == []
    assert not path.exists()
    path.write_text(yaml.safe_dump({"gpunodes_component_arguments": changed}), encoding="utf-8")
    try:
        found = {each["machine"]: each["differences"] for each in operator.document("status")["drift"]}
        assert set(found) == set(CONTROLS)
        for differences in found.values():
            # The first machine that is brought to its settings writes kubeadm's configuration.
            assert [(each["component"], each["name"], each["wanted"]) for each in differences] == [
                ("kube-scheduler", "--v", "4")
            ]
        api = f"{CRICTL} ps --quiet --label io.kubernetes.container.name=kube-apiserver"
        before = operator.each(CONTROLS, api)
        assert operator.document("rollout", "apply", "--dry-run")["pending"] == list(CONTROLS)
        assert operator.each(CONTROLS, "grep -c -e --v=4 /etc/kubernetes/manifests/kube-scheduler.yaml || true") == {
            name: ["0"] for name in CONTROLS
        }
        done = operator.document("rollout", "apply", "--yes")
        assert {each["name"]: each["outcome"] for each in done["machines"]} == dict.fromkeys(CONTROLS, "done")
        assert operator.each(CONTROLS, "grep -c -e --v=4 /etc/kubernetes/manifests/kube-scheduler.yaml") == {
            name: ["1"] for name in CONTROLS
        }
        assert operator.each(CONTROLS, api) == before, "the API servers were not restarted"
        stored = operator.ssh(FIRST, f"{KUBECTL} --namespace kube-system get configmap kubeadm-config --output json")
        document = yaml.safe_load(json.loads(stored)["data"]["ClusterConfiguration"])
        assert {"name": "v", "value": "4"} in document["scheduler"]["extraArgs"]
        assert operator.document("status")["drift"] == []
        again = operator.document("rollout", "apply", "--yes")
        assert {each["outcome"] for each in again["machines"]} == {"unchanged"}
        kept = operator.each(CONTROLS, "ls -d /etc/kubernetes/gpunodes-settings || true")
        assert kept == {name: [] for name in CONTROLS}
        # A setting with which the scheduler does not start: everything is as before.
        broken = {**changed, "scheduler": {**changed["scheduler"], "no-such-flag": "1"}}
        path.write_text(yaml.safe_dump({"gpunodes_component_arguments": broken}), encoding="utf-8")
        failed = operator.document("rollout", "apply", "--yes", FIRST, code=3)
        assert {each["outcome"] for each in failed["machines"]} == {"undone"}
        assert "unknown flag" in failed["stopped"]
        assert lines(
            operator.ssh(FIRST, "grep -c no-such-flag /etc/kubernetes/manifests/kube-scheduler.yaml || true")
        ) == ["0"]
        operator.gpunodes("rollout", "abandon", "--yes")
        path.write_text(yaml.safe_dump({"gpunodes_component_arguments": changed}), encoding="utf-8")
        assert operator.document("status")["drift"] == [], "kubeadm's configuration is back, too"
    finally:
        path.unlink()
    operator.gpunodes("rollout", "apply", "--yes")
    assert operator.document("status")["drift"] == []


def test_one_of_several_is_not_reset(operator: Operator) -> None:
    done = operator.gpunodes("reset", "--yes", SECOND, code=1)
    assert "belongs to a cluster of several" in " ".join(done.stdout.split())
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
