"""containerd 2.x, configured in its own format."""

from __future__ import annotations

import tomllib
from typing import Any

from testinfra.host import Host


def test_it_is_docker_s_package_held(host: Host, settings: dict[str, Any]) -> None:
    assert host.package("containerd.io").version.startswith("2.")
    assert not host.package("containerd").is_installed
    assert host.check_output("apt-mark showhold") == "containerd.io"
    source = host.file("/etc/apt/sources.list.d/gpunodes-docker.sources").content_string
    assert settings["gpunodes_docker_packages_url"] in source


def test_it_runs_and_will(host: Host) -> None:
    service = host.service("containerd")
    assert service.is_running
    assert service.is_enabled


def test_what_it_runs_with(host: Host) -> None:
    # The program's own view: our file over its defaults.
    plugins = tomllib.loads(host.check_output("containerd config dump"))["plugins"]
    runtime = plugins["io.containerd.cri.v1.runtime"]
    images = plugins["io.containerd.cri.v1.images"]
    assert runtime["containerd"]["runtimes"]["runc"]["options"]["SystemdCgroup"]
    assert runtime["cni"]["conf_dir"] == "/etc/cni/net.d"
    assert images["registry"]["config_path"] == "/etc/containerd/certs.d"
    assert images["pinned_images"]["sandbox"].startswith("registry.k8s.io/pause:")


def test_it_pulls_by_the_mirror(host: Host) -> None:
    images = tomllib.loads(host.check_output("containerd config dump"))["plugins"]["io.containerd.cri.v1.images"]
    host.check_output("ctr images pull --hosts-dir /etc/containerd/certs.d %s", images["pinned_images"]["sandbox"])
