"""containerd 2.x, with configuration version 3."""

from __future__ import annotations

import tomllib
from typing import Any

from testinfra.host import Host

testinfra_hosts = ["control-1"]


def test_dockers_package_is_installed_and_held(host: Host, settings: dict[str, Any]) -> None:
    shown = host.check_output(
        "dpkg-query --show --showformat '${db:Status-Abbrev} ${Package} ${Version}\n' 'containerd*'"
    )
    installed = [line.split() for line in shown.splitlines() if line[1] == "i"]
    assert [(state, name) for state, name, _ in installed] == [("hi", "containerd.io")]
    assert installed[0][2].startswith("2.")
    source = host.file("/etc/apt/sources.list.d/gpunodes-docker.sources").content_string
    assert settings["gpunodes_docker_packages_url"].partition("{")[0] in source


def test_it_runs_now_and_after_a_boot(host: Host) -> None:
    assert host.check_output("systemctl is-enabled containerd && systemctl is-active containerd").split() == [
        "enabled",
        "active",
    ]


def test_effective_configuration(host: Host, settings: dict[str, Any]) -> None:
    # The effective configuration: config.toml over containerd's defaults.
    plugins = tomllib.loads(host.check_output("containerd config dump"))["plugins"]
    runtime = plugins["io.containerd.cri.v1.runtime"]
    images = plugins["io.containerd.cri.v1.images"]
    assert runtime["containerd"]["runtimes"]["runc"]["options"]["SystemdCgroup"]
    assert runtime["cni"]["conf_dir"] == "/etc/cni/net.d"
    assert images["registry"]["config_path"] == "/etc/containerd/certs.d"
    # Images are pulled through the mirror under their public names.
    sandbox = images["pinned_images"]["sandbox"]
    assert sandbox.startswith("registry.k8s.io/pause:")
    hosts = host.file("/etc/containerd/certs.d/registry.k8s.io/hosts.toml").content_string
    assert f'[host."{settings["gpunodes_image_mirrors"]["registry.k8s.io"]}"]' in hosts
    host.check_output(f"ctr images pull --hosts-dir /etc/containerd/certs.d {sandbox}")
    # Like the kubelet: through the CRI, with the runtime's own configuration.
    host.check_output(f"crictl pull {sandbox}")
