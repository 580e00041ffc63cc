"""Docker on the machine's containerd, and cri-dockerd in front of it. Each command takes a second or more."""

from __future__ import annotations

import json
from typing import Any

from testinfra.host import Host

testinfra_hosts = ["control-1"]

HELD = {"containerd", "docker.io", "docker-cli", "cri-dockerd"}
SERVICES = ("docker", "cri-docker")
CRICTL = "crictl --timeout=60s"
# Like a pod of the control plane, it uses the machine's network: the machine has no pod network.
SANDBOX = {
    "metadata": {"name": "sandbox", "namespace": "default", "uid": "1"},
    "linux": {"security_context": {"namespace_options": {"network": 2}}},
}


def test_packages_are_held(host: Host) -> None:
    assert set(host.check_output("apt-mark showhold").splitlines()) == HELD


def test_services_run_now_and_after_a_boot(host: Host) -> None:
    assert host.check_output(f"systemctl is-active {' '.join(SERVICES)}").split() == ["active", "active"]
    assert host.check_output(f"systemctl is-enabled {' '.join(SERVICES)}").split() == ["enabled", "enabled"]


def test_docker_uses_the_control_groups_of_systemd(host: Host) -> None:
    drivers = host.check_output("docker info --format '{{.CgroupDriver}} {{.CgroupVersion}}'")
    assert drivers.split() == ["systemd", "2"]


def test_its_containers_are_containers_of_the_machines_containerd(host: Host, defaults: dict[str, Any]) -> None:
    name = host.check_output(f"docker run --detach --network none {defaults['gpunodes_ready_image']} sleep 600")
    try:
        assert name in host.check_output("ctr --namespace moby containers list --quiet").splitlines()
    finally:
        host.check_output(f"docker rm --force {name}")


def test_the_runtime_is_ready_for_the_kubelet(host: Host) -> None:
    # Without an option crictl uses the socket in /etc/crictl.yaml.
    assert "docker" in host.check_output(f"{CRICTL} version")
    info = json.loads(host.check_output(f"{CRICTL} info"))
    conditions = {condition["type"]: condition["status"] for condition in info["status"]["conditions"]}
    assert conditions["RuntimeReady"]


def test_a_pods_sandbox_is_a_container_of_docker(host: Host) -> None:
    host.check_output(f"echo '{json.dumps(SANDBOX)}' >/run/sandbox.json")
    name = host.check_output(f"{CRICTL} runp /run/sandbox.json")
    try:
        found = host.check_output("docker inspect --format '{{.State.Running}} {{.Config.Image}}' " + name)
    finally:
        host.check_output(f"{CRICTL} rmp --force {name}; rm /run/sandbox.json")
    running, image = found.split()
    assert running == "true"
    # The image that gpunodes configures, which is that of the kubelet's minor.
    assert f"--pod-infra-container-image={image}" in host.check_output("systemctl cat cri-docker")
