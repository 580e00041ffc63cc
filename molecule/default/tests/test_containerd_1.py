"""The distribution's containerd 1.7, with configuration version 2."""

from __future__ import annotations

import tomllib
from typing import Any

from testinfra.host import Host

testinfra_hosts = ["gpu-1"]


def test_effective_configuration(host: Host, settings: dict[str, Any]) -> None:
    assert host.package("containerd").version.startswith("1.7.")
    # The effective configuration: config.toml over containerd's defaults.
    cri = tomllib.loads(host.check_output("containerd config dump"))["plugins"]["io.containerd.grpc.v1.cri"]
    assert cri["containerd"]["runtimes"]["runc"]["options"]["SystemdCgroup"]
    assert cri["cni"]["conf_dir"] == "/etc/cni/net.d"
    # Images are pulled through the mirror under their public names.
    assert cri["registry"]["config_path"] == "/etc/containerd/certs.d"
    registry, _, name = cri["sandbox_image"].partition("/")
    assert (registry, name.partition(":")[0]) == ("registry.k8s.io", "pause")
    hosts = host.file(f"/etc/containerd/certs.d/{registry}/hosts.toml").content_string
    assert f'[host."{settings["gpunodes_image_mirrors"][registry]}"]' in hosts
    host.check_output(f"ctr images pull --hosts-dir /etc/containerd/certs.d {cri['sandbox_image']}")
