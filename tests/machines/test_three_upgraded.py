"""Three control planes go from Kubernetes 1.36 to 1.37, and etcd from 3.6 to 3.7, while clients use the API.

etcd's members must be of 3.6.11 or newer first: the plan refuses, and its remedy is followed to the word.
"""

from __future__ import annotations

import json
import time

import yaml

from . import availability
from .conftest import LONG, LabSpec, Operator
from .etcd_members import CONTROLS, FIRST, KUBECTL, voters

LAB = LabSpec(
    "debian13",
    workers=0,
    kubernetes="1.36",
    up_options=("--kubernetes-version", "1.37"),
    cluster=("--kubernetes-version", "1.36"),
    control_planes=3,
    # A kubelet of another minor starts its static pods again, all at once, and etcd's member among them.
    settings={"gpunodes_ready_timeout": 1800, "gpunodes_rollout_verify_timeout": 1800},
)
STEP = "3.6.16-0"
UPGRADE = ("upgrade", "1.37", "--yes", "--no-backup")
FOLDER = "/run/by-hand"
# kubeadm gives a runtime two seconds and its job a minute, which are too few under load, and has changed nothing then.
KUBEADM = f"""
left=5
until kubeadm upgrade {{verb}} --config={FOLDER}/kubeadm.yaml >{FOLDER}/log 2>&1; do
    left=$((left - 1))
    grep -Eq 'could not connect to the container runtime|CreateJob.: .* did not complete in' {FOLDER}/log || left=0
    if [ $left -eq 0 ]; then tail -n 50 {FOLDER}/log >&2; exit 1; fi
    sleep 5
done
"""
ETCD = "grep -o 'etcd:[0-9.-]*' /etc/kubernetes/manifests/etcd.yaml"


def image_tag(operator: Operator, tag: str) -> None:
    """Set etcd's tag in kubeadm's configuration; "" removes it."""
    where = (KUBECTL, "--namespace kube-system", "get configmap kubeadm-config --output json")
    stored = json.loads(operator.ssh(FIRST, " ".join(where)))["data"]["ClusterConfiguration"]
    document = yaml.safe_load(stored)
    local = document.setdefault("etcd", {}).setdefault("local", {})
    local.pop("imageTag", None)
    document["etcd"]["local"] = {**local, **({"imageTag": tag} if tag else {})}
    patch = json.dumps({"data": {"ClusterConfiguration": yaml.safe_dump(document)}})
    operator.ssh(FIRST, f"cat >/run/patch.json <<'END'\n{patch}\nEND")
    operator.ssh(
        FIRST, f"{KUBECTL} --namespace kube-system patch configmap kubeadm-config --patch-file /run/patch.json"
    )


def kubeadm(operator: Operator, machine: str, version: str) -> None:
    """Upgrade a control plane by hand, with the limits and patches of the lab's settings: some labs are slow."""
    common = {"patches": {"directory": f"{FOLDER}/patches"}}
    document = {
        "apiVersion": "kubeadm.k8s.io/v1beta4",
        "kind": "UpgradeConfiguration",
        "apply": {"kubernetesVersion": version, **common},
        "node": common,
        "timeouts": operator.setting("gpunodes_kubeadm_timeouts"),
    }
    files = {f"patches/{name}.json": patch for name, patch in operator.setting("gpunodes_kubeadm_patches").items()}
    texts = {name: json.dumps(each) for name, each in {**files, "kubeadm.yaml": document}.items()}
    script = "".join(f"cat >{FOLDER}/{name} <<'END'\n{text}\nEND\n" for name, text in texts.items())
    operator.ssh(machine, f"mkdir -p {FOLDER}/patches\n{script}")
    verb = "apply --yes" if machine == FIRST else "node"
    operator.ssh(machine, KUBEADM.format(verb=verb), limit_s=2 * LONG)


def test_old_members_of_etcd_are_refused(operator: Operator) -> None:
    assert voters(operator) == set(CONTROLS)
    plan = operator.document("upgrade", "plan", "1.37", code=1)
    [finding] = [each for each in plan["findings"] if each["check"] == "etcd"]
    assert f"etcd.local.imageTag: {STEP}" in finding["remedy"]
    operator.gpunodes(*UPGRADE, code=2)
    assert {tag for tags in operator.each(CONTROLS, ETCD).values() for tag in tags} == {"etcd:3.6.8-0"}


def test_the_remedy_brings_them_forward(operator: Operator) -> None:
    version = operator.document("status")["version"]
    image_tag(operator, STEP)
    for machine in CONTROLS:
        kubeadm(operator, machine, version)
    image_tag(operator, "")
    assert operator.each(CONTROLS, ETCD) == {name: [f"etcd:{STEP}"] for name in CONTROLS}
    deadline = time.monotonic() + LONG
    while not (plan := operator.document("upgrade", "plan", "1.37", code=None))["possible"]:
        assert time.monotonic() < deadline, plan["findings"]
        time.sleep(10)


def test_one_after_the_other_and_the_api_answers(operator: Operator) -> None:
    vip = operator.setting("gpunodes_control_plane_vip")
    url = f"https://{vip}:6443/readyz"
    # Each request is a TLS handshake of an emulated machine, whose processor the upgrade needs.
    with availability.watched(url, interval_s=2.0, timeout_s=availability.SLOW_S) as prober:
        done = operator.document(*UPGRADE, limit_s=6 * LONG)
    outcomes = [{each["name"]: each["outcome"] for each in rollout["machines"]} for rollout in done["rollouts"]]
    # The last part, the add-ons, is no machine's.
    assert outcomes == [*([dict.fromkeys(CONTROLS, "done")] * 2), {}]
    status = operator.document("status")
    assert {node["version"].rpartition(".")[0] for node in status["nodes"]} == {"v1.37"}
    assert {tag.partition("-")[0] for tags in operator.each(CONTROLS, ETCD).values() for tag in tags} == {"etcd:3.7.0"}
    assert all(each["healthy"] for each in status["etcd"])
    found = prober.report()
    print(f"the API did not answer {found.failed} of {found.requests} requests")
    # The address moves once or more; three failed checks of 2 s each, and the lab's slowness.
    assert found.longest_gap_s < 120
    assert operator.document("upgrade", "plan", "1.37")["steps"] == []
    assert {each["outcome"] for each in operator.document("up", "--kubernetes-version", "1.37")["machines"]} == {
        "unchanged"
    }
