"""A worker with Docker behind firewalld, its data on a second disk, and that disk missing at boot."""

from __future__ import annotations

import yaml

from . import unhealthy
from .conftest import BARE, LONG, STATE, LabSpec, Operator, lines, wait_for_nodes

LAB = LabSpec("debian13", workers=1, up_options=("--data-disk", "--docker"))
MACHINES = ("control-1", "worker-1")
DATA = "LABEL=data"
"""The data disk in /etc/fstab."""
# systemd waits 90 s for the disk that is away; a socket may start its service again, which waits again.
WAIT = "timeout 150 sh -c 'while systemctl list-jobs --no-legend | grep -q absent; do sleep 3; done'"
UP_LIMIT_S = 3000.0
"""Docker unpacks the images on one emulated processor."""
BOOT_S = 900.0
_bare: dict[str, list[str]] = {}


def test_a_cluster_whose_worker_has_docker(operator: Operator) -> None:
    install = "{ apt-get -qq update && apt-get -qqy install firewalld; } >/dev/null 2>&1"
    operator.ssh("worker-1", install, limit_s=LONG)
    operator.ssh("worker-1", "systemctl enable --now firewalld && firewall-cmd --list-services | grep -w ssh")
    # As administrators write it: a machine without its data comes up.
    operator.each(
        MACHINES, "sed -i 's/noatime,discard 0 0/noatime,discard,nofail 0 0/' /etc/fstab && systemctl daemon-reload"
    )
    _bare.update(operator.each(MACHINES, BARE))
    inventory = operator.folder / "inventory"
    settings = inventory / "group_vars" / "all.yml"
    given = yaml.safe_load(settings.read_text())
    settings.write_text(yaml.safe_dump(given | {"gpunodes_data_directory": "/data"}))
    (inventory / "host_vars").mkdir(exist_ok=True)
    (inventory / "host_vars" / "worker-1.yml").write_text(yaml.safe_dump({"gpunodes_runtime": "docker"}))
    operator.gpunodes("up", limit_s=UP_LIMIT_S)


def test_the_data_of_docker_is_on_the_second_disk(operator: Operator) -> None:
    for folder in ("/var/lib/docker", "/var/lib/kubelet"):
        assert operator.ssh("worker-1", f"findmnt -no SOURCE --target {folder}").startswith("/dev/vdb"), folder
    # Docker still removes the container of a pod that has just ended: du exits with 1 when a folder goes meanwhile.
    assert int(operator.ssh("worker-1", "du -xsm /data", code=None).split()[0]) > 50


def test_a_second_run_changes_nothing(operator: Operator) -> None:
    before = operator.each(MACHINES, STATE)
    document = operator.document("up")
    assert {machine["outcome"] for machine in document["machines"]} == {"unchanged"}
    assert operator.each(MACHINES, STATE) == before


def test_without_its_data_disk_a_node_starts_nothing_on_the_root_disk(operator: Operator) -> None:
    fstab = operator.ssh("worker-1", "cat /etc/fstab")
    assert fstab.count(DATA) == 1
    operator.ssh("worker-1", f"sed -i s/{DATA}/LABEL=absent/ /etc/fstab")
    unhealthy.reboot(operator, "worker-1", BOOT_S)
    operator.ssh("worker-1", WAIT, code=None)
    assert not operator.ssh("worker-1", "findmnt -no SOURCE /data", code=None)
    states = operator.ssh("worker-1", "systemctl is-active kubelet docker cri-docker", code=None).split()
    assert "active" not in states
    for folder in ("/var/lib/docker", "/var/lib/kubelet"):
        assert not operator.ssh("worker-1", f"find {folder} -xdev -type f").split(), folder
    operator.ssh("worker-1", f"sed -i s/LABEL=absent/{DATA}/ /etc/fstab")
    assert operator.ssh("worker-1", "cat /etc/fstab") == fstab
    unhealthy.reboot(operator, "worker-1", BOOT_S)
    wait_for_nodes(operator, MACHINES)


def test_reset_restores_the_machines(operator: Operator) -> None:
    operator.gpunodes("reset", "--yes", "worker-1", "control-1")
    for machine in MACHINES:
        assert lines(operator.ssh(machine, BARE)) == _bare[machine]
    assert "gpunodes" not in operator.ssh("worker-1", "firewall-cmd --get-policies")
