"""Changed settings of two control planes are drift, and are rolled out; what does not start is undone.

test_control_planes.py has their joins and their removal.
"""

from __future__ import annotations

import json

import yaml

from .conftest import LONG, SLOW_RESTARTS, LabSpec, Operator, lines
from .etcd_members import CRICTL, FIRST, KUBECTL, SECOND, regroup, voters

LAB = LabSpec("debian13", workers=0, control_planes=2, settings=SLOW_RESTARTS)
CONTROLS = (FIRST, SECOND)


def test_a_second_control_plane_joins(operator: Operator) -> None:
    regroup(operator, FIRST)
    operator.gpunodes("up")
    regroup(operator, *CONTROLS)
    operator.gpunodes("join", SECOND, limit_s=2 * LONG)
    assert voters(operator) == set(CONTROLS)


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
        done = operator.document("rollout", "apply", "--yes", limit_s=2 * LONG)
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
        failed = operator.document("rollout", "apply", "--yes", FIRST, code=3, limit_s=2 * LONG)
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
    # What left the settings differs, too: unit tests apply that.
    assert operator.document("rollout", "apply", "--dry-run")["pending"] == list(CONTROLS)
