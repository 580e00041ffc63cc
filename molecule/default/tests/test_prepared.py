"""A machine that is ready for kubeadm. Few commands, because each takes a second or more on an emulated machine."""

from __future__ import annotations

import json
from typing import Any

from testinfra.host import Host

testinfra_hosts = ["control-1"]

SYSCTLS = ("net.bridge.bridge-nf-call-iptables", "net.bridge.bridge-nf-call-ip6tables", "net.ipv4.ip_forward")
HELD = {"containerd.io", "kubelet", "kubeadm", "kubectl"}


def test_kernel_modules_are_loaded_now_and_at_boot(host: Host) -> None:
    loaded = {line.split()[0] for line in host.file("/proc/modules").content_string.splitlines()}
    at_boot = set(host.file("/etc/modules-load.d/gpunodes.conf").content_string.splitlines())
    assert {"overlay", "br_netfilter"} <= loaded & at_boot


def test_kernel_settings_are_set_now_and_at_boot(host: Host) -> None:
    assert host.check_output(f"sysctl --values {' '.join(SYSCTLS)}").split() == ["1", "1", "1"]
    # All settings in the order in which boot applies them: the last one counts.
    at_boot = host.check_output("/usr/lib/systemd/systemd-sysctl --cat-config").splitlines()
    for name in SYSCTLS:
        assert [line for line in at_boot if line.startswith(name)][-1:] == [f"{name} = 1"]


def test_limits_of_many_pods_are_raised(host: Host) -> None:
    least = {"fs.inotify.max_user_instances": 8192, "fs.inotify.max_user_watches": 524288, "kernel.pid_max": 4194304}
    values = host.check_output(f"sysctl --values {' '.join(least)}").split()
    assert all(int(value) >= limit for value, limit in zip(values, least.values(), strict=True))


def test_swap_is_off_and_stays_off(host: Host) -> None:
    assert host.check_output("swapon --show --noheadings") == ""
    # Swap that the next boot would turn on.
    assert host.run("findmnt --fstab --types swap --noheadings").stdout == ""


def test_packages_have_the_requested_minor_and_are_held(host: Host, defaults: dict[str, Any]) -> None:
    shown = host.check_output("dpkg-query --show --showformat '${Version}\n' kubelet kubeadm kubectl").splitlines()
    assert [version.rpartition(".")[0].rpartition(".")[0] for version in shown] == 3 * [
        defaults["gpunodes_kubernetes_version"]
    ]
    assert set(host.check_output("apt-mark showhold").splitlines()) == HELD


def test_packages_come_from_the_signed_source_in_the_settings(host: Host, settings: dict[str, Any]) -> None:
    source = host.file("/etc/apt/sources.list.d/gpunodes-kubernetes.sources").content_string
    assert settings["gpunodes_kubernetes_packages_url"].partition("{")[0] in source
    key = next(line.split()[1] for line in source.splitlines() if line.startswith("Signed-By:"))
    assert host.file(key).content_string.strip() == settings["gpunodes_kubernetes_packages_key"].strip()


def test_containerd_runs_and_the_kubelet_waits_for_kubeadm(host: Host) -> None:
    assert host.check_output("systemctl is-enabled containerd kubelet").split() == ["enabled", "enabled"]
    containerd, kubelet = host.run("systemctl is-active containerd kubelet").stdout.split()
    assert containerd == "active"
    assert kubelet != "active"


def test_the_runtime_is_ready_for_the_kubelet(host: Host) -> None:
    info = json.loads(host.check_output("crictl info"))
    conditions = {condition["type"]: condition["status"] for condition in info["status"]["conditions"]}
    assert conditions["RuntimeReady"]


def test_only_root_can_read_the_ledger(host: Host) -> None:
    assert host.check_output("stat --format '%U %a' /var/lib/gpunodes /var/lib/gpunodes/ledger.json").splitlines() == [
        "root 700",
        "root 600",
    ]
