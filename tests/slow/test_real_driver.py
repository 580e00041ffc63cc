"""NVIDIA's own driver from Debian's non-free archive, with the same role: built, held and removed.

The machine's boards are stand-ins, which the real module refuses: a machine without a GPU gets no further. The build
takes more than twenty minutes without KVM.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import yaml

from tests.machines.conftest import BARE, NAME, LabSpec, Operator, lines
from tests.slow import archive

LAB = LabSpec("debian13", workers=0, gpu_workers=1, up_options=("--cpus", "2"))
SUITE = "trixie"
LIMIT_S = 3 * 3600.0
# Build tools of the packages, whose own dependencies do not choose a kernel's headers.
TOOLS = ("dkms", "gcc", "libc6-dev", "make")

_bare: list[str] = []


@pytest.fixture(scope="module")
def debian(operator: Operator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The needed part of Debian's archive, served inside the lab; its address."""
    plan = operator.document("gpu", "plan", "gpu-1", "--driver-source", "distribution")["machines"][0]["plan"]
    packages = [one["name"] for one in plan["packages"] if one["source"] == "distribution" and one["group"] == "driver"]
    folder = tmp_path_factory.mktemp("archive")
    archive.make(folder, tmp_path_factory.mktemp("apt"), SUITE, [*packages, *TOOLS])
    listen = operator.ssh("gpu-1", "ip route show default").split()[2] + ":8081"
    server = [sys.executable, "-m", "gpunodes.lab.mirror.serve", "--root", str(folder), "--listen", listen]
    with subprocess.Popen(["ip", "netns", "exec", f"gpunodes-{NAME}", *server]) as process:
        yield f"http://{listen}/debian"
        process.terminate()


def test_the_real_driver_is_built_and_held(operator: Operator, debian: str) -> None:
    _bare.extend(lines(operator.ssh("gpu-1", BARE)))
    own = operator.folder / "inventory" / "host_vars" / "gpu-1.yml"
    own.parent.mkdir()
    own.write_text(
        yaml.safe_dump({"gpunodes_driver_source": "distribution", "gpunodes_debian_packages_url": debian}),
    )
    done = operator.gpunodes("gpu", "install", "gpu-1", code=1, limit_s=LIMIT_S)
    assert "the module nvidia does not load" in done.stdout + done.stderr
    assert "NVRM: " in done.stdout + done.stderr
    version = operator.ssh("gpu-1", "dpkg-query -W -f '${Version}' nvidia-smi").partition("-")[0]
    built = operator.ssh("gpu-1", "find /lib/modules -name 'nvidia-current.ko*' -exec modinfo -F version {} +")
    assert built.split() == [version]
    assert "nvidia-smi" in operator.ssh("gpu-1", "apt-mark showhold").split()
    assert operator.ssh("gpu-1", "lsmod | grep -c ^nouveau", code=None).strip() == "0"


def test_removal_leaves_nothing(operator: Operator) -> None:
    operator.gpunodes("gpu", "remove", "--yes", "gpu-1", limit_s=LIMIT_S)
    assert lines(operator.ssh("gpu-1", BARE)) == _bare
