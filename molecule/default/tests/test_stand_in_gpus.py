"""A machine whose containers get GPUs. The GPUs are the lab's stand-ins: this tests the software around them."""

from __future__ import annotations

import tomllib
from typing import Any

from testinfra.host import Host

testinfra_hosts = ["gpu-1"]

TOOLKIT = {
    "libnvidia-container-tools",
    "libnvidia-container1",
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
}


def test_the_driver_is_loaded_now_and_at_boot(host: Host) -> None:
    loaded = {line.split()[0] for line in host.file("/proc/modules").content_string.splitlines()}
    assert "nvidia" in loaded
    assert "nouveau" not in loaded
    assert host.file("/etc/modules-load.d/gpunodes-gpu.conf").content_string.splitlines()[-2:] == [
        "nvidia",
        "nvidia-uvm",
    ]


def test_driver_and_toolkit_have_one_version_each_and_are_held(host: Host) -> None:
    held = set(host.check_output("apt-mark showhold").splitlines())
    shown = host.check_output("dpkg-query --show --showformat '${db:Status-Status} ${Package} ${Version}\n' '*nvidia*'")
    versions = {fields[1]: fields[2] for line in shown.splitlines() if (fields := line.split())[0] == "installed"}
    assert len({versions[name] for name in TOOLKIT}) == 1
    assert held >= TOOLKIT
    driver = {name: version for name, version in versions.items() if version.startswith("580.")}
    assert driver
    assert len(set(driver.values())) == 1
    assert held >= set(driver)


def test_nvidia_smi_responds(host: Host) -> None:
    listed = host.check_output("nvidia-smi --query-gpu=index,persistence_mode --format=csv,noheader").splitlines()
    assert listed == ["0, Enabled"]


def test_containers_can_request_gpus(host: Host) -> None:
    # The effective configuration: the drop-in over config.toml over containerd's defaults.
    configuration: dict[str, Any] = tomllib.loads(host.check_output("containerd config dump"))
    plugins = configuration["plugins"]["io.containerd.grpc.v1.cri"]
    runtimes = plugins["containerd"]["runtimes"]
    assert {"runc", "nvidia"} <= set(runtimes)
    assert all(runtime["options"]["SystemdCgroup"] for runtime in runtimes.values())
    assert plugins["enable_cdi"]
    assert host.check_output("nvidia-ctk cdi list 2>/dev/null").splitlines()[-1].startswith("nvidia.com/gpu=")
    # systemd finds the devices by these links when it renews the device rules of containers.
    assert host.run("readlink /dev/char/195:0").stdout.strip() == "../nvidia0"
