"""A machine that is ready for kubeadm."""

from __future__ import annotations

import json
from typing import Any

import pytest
from testinfra.host import Host

HELD = {"containerd", "kubelet", "kubeadm", "kubectl"}


@pytest.mark.parametrize("name", ["overlay", "br_netfilter"])
def test_kernel_modules_are_loaded_and_will_be(host: Host, name: str) -> None:
    assert host.file(f"/sys/module/{name}").is_directory
    assert name in host.file("/etc/modules-load.d/gpunodes.conf").content_string.splitlines()


@pytest.mark.parametrize(
    "name", ["net.bridge.bridge-nf-call-iptables", "net.bridge.bridge-nf-call-ip6tables", "net.ipv4.ip_forward"]
)
def test_kernel_settings_are_in_force_and_will_be(host: Host, name: str) -> None:
    assert host.sysctl(name) == 1
    # systemd-sysctl's own view of all its files: the last line counts.
    files = host.check_output("/lib/systemd/systemd-sysctl --cat-config").splitlines()
    assert [line for line in files if line.startswith(name)][-1:] == [f"{name} = 1"]


def test_swap_is_off_and_stays_off(host: Host) -> None:
    assert host.check_output("swapon --show --noheadings") == ""
    # What the next boot would turn on.
    assert host.run("findmnt --fstab --types swap --noheadings").stdout == ""


def test_packages_are_of_the_wanted_minor_and_held(host: Host, defaults: dict[str, Any]) -> None:
    for name in ("kubelet", "kubeadm", "kubectl"):
        assert host.package(name).version.startswith(f"{defaults['gpunodes_kubernetes_version']}."), name
    assert set(host.check_output("apt-mark showhold").splitlines()) == HELD


def test_packages_come_from_a_signed_source_of_ours(host: Host, settings: dict[str, Any]) -> None:
    source = host.file("/etc/apt/sources.list.d/gpunodes-kubernetes.sources").content_string
    assert settings["gpunodes_kubernetes_packages_url"].partition("{")[0] in source
    key = next(line.split()[1] for line in source.splitlines() if line.startswith("Signed-By:"))
    assert host.file(key).content_string.strip() == settings["gpunodes_kubernetes_packages_key"].strip()


def test_containerd_runs_and_will(host: Host) -> None:
    service = host.service("containerd")
    assert service.is_running
    assert service.is_enabled


def test_the_kubelet_waits_for_kubeadm(host: Host) -> None:
    service = host.service("kubelet")
    assert service.is_enabled
    assert not service.is_running


def test_the_runtime_is_ready_for_the_kubelet(host: Host) -> None:
    info = json.loads(host.check_output("crictl info"))
    conditions = {condition["type"]: condition["status"] for condition in info["status"]["conditions"]}
    assert conditions["RuntimeReady"]
    assert info["config"]["containerd"]["runtimes"]["runc"]["options"]["SystemdCgroup"]
    assert info["config"]["registry"]["configPath"] == "/etc/containerd/certs.d"


def test_images_come_by_the_mirror_under_their_public_names(host: Host, settings: dict[str, Any]) -> None:
    for registry, mirror in settings["gpunodes_image_mirrors"].items():
        assert f'[host."{mirror}"]' in host.file(f"/etc/containerd/certs.d/{registry}/hosts.toml").content_string
    sandbox = json.loads(host.check_output("crictl info"))["config"]["sandboxImage"]
    assert sandbox.startswith("registry.k8s.io/pause:")
    host.check_output("crictl pull %s", sandbox)


def test_the_ledger_is_root_s_alone(host: Host) -> None:
    ledger = host.file("/var/lib/gpunodes/ledger.json")
    assert (ledger.user, ledger.mode) == ("root", 0o600)
