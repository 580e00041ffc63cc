"""CUDA toolkits side by side, and cuDNN. The packages are the lab's stand-ins: this tests the software around them."""

from __future__ import annotations

import pytest
from testinfra.host import Host

testinfra_hosts = ["gpu-1"]

PACKAGES = {"cuda-toolkit-13-0", "cuda-toolkit-13-1", "cudnn9-cuda-13"}


@pytest.mark.parametrize("version", ["13.0", "13.1"])
def test_each_requested_version_is_installed(host: Host, version: str) -> None:
    assert f"release {version}," in host.check_output(f"/usr/local/cuda-{version}/bin/nvcc --version")


@pytest.mark.parametrize("library", ["libcudart.so.13", "libcudnn.so.9"])
def test_programs_find_the_libraries(host: Host, library: str) -> None:
    host.check_output(f"python3 -c 'import ctypes; ctypes.CDLL(\"{library}\")'")


def test_exactly_the_requested_packages_are_held(host: Host) -> None:
    assert set(host.check_output("apt-mark showhold").splitlines()) == PACKAGES


def test_no_driver_is_installed(host: Host) -> None:
    """CUDA's other metapackages install a driver that they select themselves."""
    shown = host.check_output("dpkg-query --show --showformat '${db:Status-Status} ${Package}\n'").splitlines()
    assert [line for line in shown if line.startswith("installed ") and "nvidia" in line] == []
    assert not host.file("/sys/module/nvidia").exists
