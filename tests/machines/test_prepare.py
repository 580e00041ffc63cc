"""Machines that are prepared before they join: one is no node, and then joins without another installation.

worker-1 is prepared as for an image, worker-2 stays bare. The reset of a prepared machine leaves nothing.
"""

from __future__ import annotations

import time

import yaml

from .conftest import BARE, STATE, LabSpec, Operator, lines

LAB = LabSpec("debian13", workers=2)
ALONE = "alone/hosts.yml"
KUBELET = "systemctl show -p ActiveState -p UnitFileState --value kubelet"
BOOT = "cat /proc/sys/kernel/random/boot_id"
# Otherwise ctr makes containerd's id, which prepare removes (prepared.IDS).
IMAGES = "CONTAINERD_SUPPRESS_DEPRECATION_WARNINGS=true ctr --namespace k8s.io images ls --quiet"
PACKAGES = "dpkg-query -W -f '${Package} ${Version} ${Status}\\n'; cat /var/log/dpkg.log | grep -c ' status installed '"

_bare: dict[str, list[str]] = {}
_packages: list[str] = []


def without_control_plane(operator: Operator) -> None:
    """An inventory with the same workers and settings, and no control plane."""
    source, target = operator.folder / "inventory", operator.folder / "alone"
    (target / "group_vars").mkdir(parents=True)
    hosts = yaml.safe_load((source / "hosts.yml").read_text())
    del hosts["all"]["children"]["control_plane"]
    (target / "hosts.yml").write_text(yaml.safe_dump(hosts))
    (target / "group_vars" / "all.yml").write_text((source / "group_vars" / "all.yml").read_text())


def test_a_dry_run_changes_nothing(operator: Operator) -> None:
    _bare.update(operator.each(("worker-1", "worker-2"), BARE))
    without_control_plane(operator)
    document = operator.document("prepare", "worker-1", "--dry-run", "-i", ALONE)
    assert [machine["outcome"] for machine in document["machines"]] == ["changed"]
    assert lines(operator.ssh("worker-1", BARE)) == _bare["worker-1"]


def test_a_machine_is_prepared_without_a_cluster(operator: Operator) -> None:
    operator.gpunodes("prepare", "worker-1", "-i", ALONE)
    assert operator.ssh("worker-1", KUBELET).split() == ["inactive", "disabled"]
    present = operator.ssh("worker-1", IMAGES)
    for name in ("pause", "kube-proxy", "flannel", "busybox"):
        assert name in present, name
    assert operator.ssh("worker-1", "ls /etc/kubernetes/kubelet.conf /var/lib/kubelet/pki", code=None) == ""
    assert operator.ssh("worker-1", "ls /var/lib/containerd/io.containerd.*introspection*/uuid", code=None) == ""


def test_nothing_of_gpunodes_identifies_the_machine(operator: Operator) -> None:
    """/etc/machine-id and the SSH host keys are removed by the user who makes the image."""
    identities = (
        "cat /etc/machine-id /sys/class/dmi/id/product_uuid /etc/hostname; cut -d' ' -f2 /etc/ssh/ssh_host_*.pub"
    )
    for identity in operator.ssh("worker-1", identities).split():
        folders = "/var/lib/gpunodes /etc/containerd /etc/gpunodes /etc/crictl.yaml /var/lib/kubelet"
        assert operator.ssh("worker-1", f"grep -rilF -e '{identity}' {folders}", code=None) == "", identity


def test_a_second_run_changes_nothing(operator: Operator) -> None:
    before = operator.ssh("worker-1", STATE, code=None)
    document = operator.document("prepare", "worker-1", "-i", ALONE)
    assert [machine["outcome"] for machine in document["machines"]] == ["unchanged"]
    assert operator.ssh("worker-1", STATE, code=None) == before


def test_plain_ansible_agrees(operator: Operator) -> None:
    output = operator.playbook("prepare", "--limit", "worker-1")
    assert "changed=0" in output


def test_a_prepared_machine_survives_a_boot(operator: Operator) -> None:
    """As a copy of its disk would: the kubelet stays off, and containerd has its images."""
    boot = operator.ssh("worker-1", BOOT)
    assert operator.lab("power", "worker-1", "cycle").returncode == 0
    deadline = time.monotonic() + 900
    while operator.lab("ssh", "worker-1", BOOT).stdout in {"", boot}:
        assert time.monotonic() < deadline
        time.sleep(3)
    # sshd responds before containerd does.
    while "kube-proxy" not in operator.ssh("worker-1", IMAGES, code=None):
        assert time.monotonic() < deadline
        time.sleep(3)
    assert operator.ssh("worker-1", KUBELET).split() == ["inactive", "disabled"]
    document = operator.document("prepare", "worker-1", "-i", ALONE)
    assert [machine["outcome"] for machine in document["machines"]] == ["unchanged"]
    _packages.extend(lines(operator.ssh("worker-1", PACKAGES)))


def test_it_joins_without_another_installation(operator: Operator) -> None:
    operator.gpunodes("init-master", "control-1")
    document = operator.document("join", "worker-1")
    [machine] = document["machines"]
    assert machine["outcome"] == "changed"
    assert "Install and configure containerd" not in machine["changes"]
    assert lines(operator.ssh("worker-1", PACKAGES)) == _packages
    assert {node["name"]: node["ready"] for node in operator.document("status")["nodes"]}["worker-1"]


def test_a_node_is_not_prepared(operator: Operator) -> None:
    before = operator.ssh("worker-1", STATE, code=None)
    for words in ((), ("--skip-phase", "preflight")):
        done = operator.gpunodes("prepare", "worker-1", *words, code=1)
        assert "it is already a worker" in done.stdout + done.stderr
    assert operator.ssh("worker-1", STATE, code=None) == before


def test_the_reset_of_a_prepared_machine_leaves_nothing(operator: Operator) -> None:
    operator.gpunodes("prepare", "worker-2")
    operator.gpunodes("reset", "worker-2", "--yes")
    assert lines(operator.ssh("worker-2", BARE)) == _bare["worker-2"]


def test_the_reset_of_the_node_leaves_nothing(operator: Operator) -> None:
    operator.gpunodes("remove", "worker-1", "--yes")
    assert lines(operator.ssh("worker-1", BARE)) == _bare["worker-1"]
