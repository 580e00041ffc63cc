"""`gpunodes upgrade` from 1.35 to 1.36: killed in every stage and resumed, a Service that answers throughout, a pod
that no budget lets go, a changed setting that stays, a missing image, and a worker that goes back.
"""

from __future__ import annotations

import json
import stat

import yaml

from . import unhealthy, web
from .conftest import LONG, SLOW_RESTARTS, LabSpec, Operator, kill

LAB = LabSpec(
    "debian13",
    workers=2,
    kubernetes="1.35",
    up_options=("--kubernetes-version", "1.36"),
    cluster=("--kubernetes-version", "1.35"),
    # A kubelet of another minor starts its static pods again, all at once: the controllers may be in a back-off.
    # A drain that a budget stops takes all of its time.
    settings={**SLOW_RESTARTS, "gpunodes_ready_timeout": 1800, "gpunodes_rollout_drain_timeout": 480},
)
UPGRADE = ("upgrade", "1.36", "--yes", "--no-backup")
CANARY = ("--canary", "1", "--soak", "1m")
CHANGED = "grep -c -e --v=4 /etc/kubernetes/manifests/kube-scheduler.yaml"
"""Whether the setting that was changed before the upgrade is there."""
STEPS = (
    "worker-1: cordoned",
    "worker-1: prepare: done",
    "worker-1: draining the node",
    "worker-1: applying kubernetes",
    "worker-1: verifying",
    "worker-1: uncordoned",
)
"""The command's message at the start of each stage, in order."""
STUBBORN = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: stubborn}
spec:
  selector: {matchLabels: {app: stubborn}}
  template:
    metadata: {labels: {app: stubborn}}
    spec:
      nodeSelector: {kubernetes.io/hostname: worker-2}
      terminationGracePeriodSeconds: 1
      containers: [{name: main, image: "IMAGE", command: [sh, -c, "exec sleep 100000"]}]
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: stubborn}
spec: {minAvailable: 1, selector: {matchLabels: {app: stubborn}}}
"""


def versions(operator: Operator) -> dict[str, str]:
    # A kubelet that has just started is not ready for some seconds: `status` then ends with 3.
    nodes = operator.document("status", code=None)["nodes"]
    return {node["name"]: node["version"].rpartition(".")[0] for node in nodes}


def outcomes(rollout: dict[str, object]) -> dict[str, str]:
    machines = rollout["machines"]
    assert isinstance(machines, list)
    return {each["name"]: each["outcome"] for each in machines}


def test_a_missing_image_is_refused_before_anything_is_touched(operator: Operator) -> None:
    before = operator.each(LAB.machines, "cat /var/lib/gpunodes/ledger.json")
    nowhere = {"registry.k8s.io": "http://mirror.lab/nowhere"}
    with unhealthy.with_variables(operator, "worker-1", gpunodes_image_mirrors=nowhere):
        plan = operator.document("upgrade", "plan", "1.36", code=1)
        operator.gpunodes(*UPGRADE, code=2)
    found = {(each["machine"], each["check"]): each["fact"] for each in plan["findings"]}
    assert "kube-proxy" in found["worker-1", "images"]
    assert operator.each(LAB.machines, "cat /var/lib/gpunodes/ledger.json") == before
    assert operator.document("rollout", "status")["rollout"] is None


def test_a_setting_is_changed_before(operator: Operator) -> None:
    given = operator.setting("gpunodes_component_arguments")
    changed = {**given, "scheduler": {**given.get("scheduler", {}), "v": "4"}}
    path = operator.folder / "inventory/group_vars/control_plane.yml"
    path.write_text(yaml.safe_dump({"gpunodes_component_arguments": changed}), encoding="utf-8")
    operator.gpunodes("rollout", "apply", "--yes")
    assert operator.ssh("control-1", CHANGED).strip() == "1"


def test_control_planes_come_first_and_a_killed_command_is_resumed(operator: Operator) -> None:
    web.serve(operator)
    unhealthy.apply(operator, STUBBORN.replace("IMAGE", web.IMAGE))
    operator.kubectl("rollout", "status", "deployment/stubborn", "--timeout=300s", limit_s=LONG)
    begin = ("upgrade", "1.36", "--yes", *CANARY)
    running = operator.start(*begin)
    operator.wait_for(running, "control-1: applying kubernetes-control-planes")
    kill(running)
    [backup] = operator.folder.glob("gpunodes-backup-*")
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    running = operator.start("upgrade", "--resume")
    operator.wait_for(running, "control-1: verifying")
    kill(running)


def test_killed_in_every_stage_the_kubelets_follow_and_what_cannot_leave_stays(operator: Operator) -> None:
    """Each command is the same: it ends the control plane, goes on with the canary, and is killed in each stage of it.

    The node whose pod may not be evicted is given back: exit code 3.
    """
    for step in STEPS:
        running = operator.start("upgrade", "--resume")
        # The first one ends the control plane, and upgrades its kubelet.
        operator.wait_for(running, step, 2 * LONG)
        kill(running)
        # Another command sees from the cluster alone where it stands, and what follows.
        status = operator.document("rollout", "status")
        assert status["rollout"]["work"] == "kubernetes", status
        assert [each["work"] for each in status["rollout"]["then"]] == ["add-ons"]
        assert status["rollout"]["options"]["canary"] == 1
    assert operator.document("status")["version"].startswith("v1.36")
    assert versions(operator)["worker-2"] == "v1.35"
    done = operator.document("rollout", "resume", code=3, limit_s=2 * LONG)
    assert outcomes(done) == {"control-1": "done", "worker-1": "done", "worker-2": "not-drained"}
    assert "default/stubborn-" in json.dumps(done)
    assert versions(operator) == {"control-1": "v1.36", "worker-1": "v1.36", "worker-2": "v1.35"}
    for name in LAB.machines:
        spec = unhealthy.node(operator, name)["spec"]
        assert not spec.get("unschedulable"), name
        assert "gpunodes.dev" not in json.dumps(spec.get("taints", [])), name
    operator.kubectl("rollout", "status", "deployment/stubborn", "--timeout=60s")


def test_the_rest_follows_when_the_budget_allows_it(operator: Operator) -> None:
    operator.kubectl("delete", "pdb", "stubborn")
    done = operator.document(*UPGRADE, limit_s=2 * LONG)
    # The last part, the add-ons, is no machine's.
    assert [outcomes(each) for each in done["rollouts"]] == [{"worker-2": "done"}, {}]
    assert set(versions(operator).values()) == {"v1.36"}
    assert operator.ssh("control-1", CHANGED).strip() == "1", "the setting that was rolled out before is still there"
    assert operator.document("status")["drift"] == []
    answers = web.answers(operator)
    lost = answers.count("failed")
    print(f"{lost} of {len(answers)} requests were lost")
    # The goal is none; kube-proxy of an emulated machine learns of an ended pod after seconds.
    assert len(answers) > 1000
    assert lost / len(answers) < 0.01
    assert operator.document("upgrade", "plan", "1.36")["steps"] == []
    assert operator.document("rollout", "status")["rollout"] is None
    assert unhealthy.leases(operator) == []


def test_a_worker_goes_back_and_forth(operator: Operator) -> None:
    operator.gpunodes("upgrade", "rollback", "control-1", "--yes", code=2)
    done = operator.document("upgrade", "rollback", "worker-1", "--yes", limit_s=2 * LONG)
    assert outcomes(done) == {"worker-1": "done"}
    assert versions(operator)["worker-1"] == "v1.35", "the roll-out waits until the node reports it"
    done = operator.document(*UPGRADE, limit_s=2 * LONG)
    assert [outcomes(each) for each in done["rollouts"]] == [{"worker-1": "done"}, {}]
    assert set(versions(operator).values()) == {"v1.36"}
