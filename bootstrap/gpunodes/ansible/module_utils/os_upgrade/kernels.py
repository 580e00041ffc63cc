"""The kernels of a machine: which are installed, which of them can boot, and which the next boot chooses."""

from __future__ import annotations

import glob
import os
import platform
import re

from ..host import gpu_driver
from ..process import run

_BUILD_LIMIT_S = 3600
_PACKAGES = ("linux-image-", "linux-image-unsigned-", "linux-headers-")


def numbers(release: str) -> tuple[int, ...]:
    """The numbers of a kernel's release, for comparison: ``6.1.0-56-amd64`` is newer than ``6.1.0-9-amd64``."""
    return tuple(int(number) for number in re.findall(r"\d+", release.partition("+")[0]))


def flavour(release: str) -> str:
    """The kind of a kernel: ``amd64``, ``cloud-amd64``, ``generic``; a machine boots the newest one of its kind."""
    parts = [part for part in release.split("-")[1:] if not part[:1].isdigit()]
    return "-".join(parts)


def bootable() -> list[str]:
    """The installed kernels that can boot, oldest first: with image, modules, and an initramfs if others have one."""
    releases = [os.path.basename(path).partition("-")[2] for path in glob.glob(f"{gpu_driver.BOOT}/vmlinuz-*")]
    with_initramfs = [each for each in releases if _initramfs(each)]
    return sorted(
        (
            each
            for each in releases
            if os.path.exists(f"{gpu_driver.MODULES}/{each}/modules.dep") and (not with_initramfs or _initramfs(each))
        ),
        key=numbers,
    )


def _initramfs(release: str) -> bool:
    paths = (f"{gpu_driver.BOOT}/initrd.img-{release}", f"{gpu_driver.BOOT}/initramfs-{release}.img")
    return any(map(os.path.exists, paths))


def newest(running: str) -> str:
    """The newest kernel of the running one's kind that can boot; the running one if there is none."""
    return next((each for each in reversed(bootable()) if flavour(each) == flavour(running)), running)


def has_driver(release: str) -> bool:
    """Whether the driver's module exists for a kernel."""
    return bool(gpu_driver._version("nvidia", release))


def is_unpacked(release: str) -> bool:
    """Whether a kernel's image is on the disk: a split one is copied to /boot only when its last package is ready."""
    return any(map(os.path.exists, (f"{gpu_driver.BOOT}/vmlinuz-{release}", f"{gpu_driver.MODULES}/{release}/vmlinuz")))


def half_installed() -> list[str]:
    """The packages of kernels without the driver's module that dpkg could not configure; never of the running one.

    Of a split kernel those that it did configure, too: they are of no use alone.
    """
    listing = run(["dpkg-query", "-W", "-f=${db:Status-Status} ${Package}\n", "linux-*[0-9]*"])
    found: list[tuple[str, str]] = []
    for line in listing.out.splitlines():
        status, _, name = line.partition(" ")
        if status not in {"not-installed", "config-files"}:
            found.append((status, name))
    broken = set()
    for status, name in found:
        release = name.partition("-")[2].partition("-")[2].removeprefix("unsigned-")
        is_broken = status != "installed" and name.startswith(_PACKAGES)
        is_kernel = release[:1].isdigit() and not release.endswith(("-dbg", "-dbgsym"))
        if is_broken and is_kernel and not _of_running(release) and not has_driver(release):
            broken.add(release)
    return [name for _, name in found if any(name.endswith(f"-{release}") for release in broken)]


def _of_running(release: str) -> bool:
    """Whether a package's release is that of the running kernel, or of headers that it shares with other flavours."""
    # linux-headers-6.12.57+deb13-common of Debian, linux-headers-6.8.0-45 of Ubuntu.
    return f"{platform.release()}-".startswith(f"{release.removesuffix('-common')}-")


def build_driver(release: str) -> str:
    """Build the driver's module for a kernel with DKMS, if it does not exist; why that failed, "" if it did not."""
    if has_driver(release):
        return ""
    if not os.path.exists(f"{gpu_driver.MODULES}/{release}/build/Makefile"):
        return f"the headers of the kernel {release} are not installed"
    run(["dkms", "autoinstall", "-k", release], _BUILD_LIMIT_S)
    if has_driver(release):
        return ""
    problem = gpu_driver.build_problem("nvidia", release)
    return problem.problem.found if problem else f"DKMS built no module nvidia for the kernel {release}"
