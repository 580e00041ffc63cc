"""Machines as they are, the rest: ufw and firewalld, no time service, a system that no row knows, a disk that fills up
while packages install, and one machine as the whole cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from . import pods
from .conftest import BARE, LONG, STATE, LabSpec, Operator, lines

LAB = LabSpec("debian13", workers=1)
MACHINES = ("control-1", "worker-1")
IMAGE = "registry.k8s.io/e2e-test-images/busybox:1.37.0-1"
# A derivative of Debian: its packages are Debian's, its name and version are its own.
DERIVATIVE = """PRETTY_NAME="Tux 7"
NAME="Tux"
VERSION_ID="7"
VERSION_CODENAME=trixie
ID=tux
ID_LIKE=debian
"""
_bare: dict[str, list[str]] = {}


def write(operator: Operator, path: str, settings: Mapping[str, Any]) -> None:
    """Settings beside those of the lab, in a file of the inventory."""
    file = operator.folder / "inventory" / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(yaml.safe_dump(dict(settings)))


def states(operator: Operator, machine: str, *services: str) -> list[str]:
    return operator.ssh(machine, f"systemctl is-active {' '.join(services)}", code=None).split()


def test_the_machines_as_their_administrator_left_them(operator: Operator) -> None:
    install = (
        "{ apt-get -qq update && apt-get -qqy install %s && apt-get -qqy purge systemd-timesyncd; } >/run/apt.log 2>&1"
        " || { tail -n 30 /run/apt.log >&2; exit 1; }"
    )
    operator.ssh("control-1", install % "ufw", limit_s=LONG)
    operator.ssh("control-1", "ufw allow 22/tcp && ufw default deny incoming && ufw --force enable")
    operator.ssh("worker-1", install % "firewalld", limit_s=LONG)
    operator.ssh("worker-1", "systemctl enable --now firewalld && firewall-cmd --list-services | grep -w ssh")
    operator.ssh("worker-1", f"rm /etc/os-release && cat >/etc/os-release <<'END'\n{DERIVATIVE}END")
    _bare.update(operator.each(MACHINES, BARE))
    lab = operator.folder / "inventory" / "group_vars" / "all.yml"
    given = yaml.safe_load(lab.read_text())
    write(operator, "group_vars/all.yml", given | {"gpunodes_time_service": "install"})
    write(operator, "host_vars/control-1.yml", {"gpunodes_control_plane_schedulable": True})


def test_one_machine_behind_ufw_is_a_cluster(operator: Operator) -> None:
    operator.gpunodes("init-master", "control-1")
    pods.start(operator, "alone", IMAGE, "nslookup kubernetes.default.svc.cluster.local", {})
    node, log = pods.ended(operator, "alone")
    assert node == "control-1"
    assert "Address" in log
    rules = operator.ssh("control-1", "ufw status")
    assert "Status: active" in rules
    assert "6443/tcp" in rules
    assert rules.count("# gpunodes") >= 3
    assert states(operator, "control-1", "systemd-timesyncd") == ["active"]


def test_a_system_that_no_row_knows_is_refused_or_treated_as_the_nearest(operator: Operator) -> None:
    done = operator.gpunodes("join", "worker-1", code=1)
    assert "--unsupported-os" in done.stdout + done.stderr
    assert "nothing was changed" in done.stdout
    assert lines(operator.ssh("worker-1", BARE)) == _bare["worker-1"]
    write(operator, "host_vars/worker-1.yml", {"gpunodes_unsupported_os": True})
    found = operator.document("preflight", "worker-1", code=None)["findings"]
    assert any("is treated as Debian 13" in finding["fact"] for finding in found)


def test_a_disk_that_fills_up_is_the_first_cause(operator: Operator) -> None:
    """The folder into which kubernetes-cni unpacks is full: dpkg itself reports the package, and an exit code."""
    operator.ssh("worker-1", "mkdir -p /opt/cni && mount -t tmpfs -o size=64k tmpfs /opt/cni")
    done = operator.gpunodes("join", "worker-1", code=1)
    operator.ssh("worker-1", "umount /opt/cni && rmdir /opt/cni")
    assert "No space left on device" in done.stdout
    assert "/opt/cni" in done.stdout


def test_a_worker_joins_behind_firewalld(operator: Operator) -> None:
    """After dpkg unpacked the kubelet without the package that it depends on."""
    operator.gpunodes("join", "worker-1")
    policies = operator.ssh("worker-1", "firewall-cmd --get-policies").split()
    assert {"gpunodes-input", "gpunodes-forward"} <= {*policies}
    assert states(operator, "worker-1", "systemd-timesyncd", "firewalld") == ["active", "active"]
    script = "nslookup kubernetes.default.svc.cluster.local && wget -qO- --no-check-certificate https://kubernetes.default/livez"
    pods.start(operator, "reach", IMAGE, script, {}, nodeName="worker-1")
    node, log = pods.ended(operator, "reach")
    assert node == "worker-1"
    assert "Address" in log
    pods.start(operator, "exec", IMAGE, "sleep 600", {}, nodeName="worker-1")
    operator.kubectl("wait", "--for=condition=Ready", "pod/exec", "--timeout=180s")
    assert operator.kubectl("exec", "exec", "--", "echo", "through", "10250").strip() == "through 10250"
    operator.kubectl("delete", "pod", "exec", "--wait=true")


def test_a_second_run_changes_nothing(operator: Operator) -> None:
    before = operator.each(MACHINES, STATE)
    document = operator.document("up")
    assert {machine["outcome"] for machine in document["machines"]} == {"unchanged"}
    assert operator.each(MACHINES, STATE) == before


def test_reset_restores_the_machines(operator: Operator) -> None:
    operator.gpunodes("reset", "--yes", "worker-1", "control-1")
    for machine in MACHINES:
        assert lines(operator.ssh(machine, BARE)) == _bare[machine]
    assert "gpunodes" not in operator.ssh("control-1", "ufw status")
    assert "gpunodes" not in operator.ssh("worker-1", "firewall-cmd --get-policies")
