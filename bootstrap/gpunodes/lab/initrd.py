"""A small initial ramdisk: BusyBox, the disk's driver, the root file system, go.

Under emulation Debian's own initrd costs several seconds of every start; a virtual machine's one disk needs no search.
The format is cpio's "newc" (Documentation/driver-api/early-userspace/buffer-format.rst of the kernel).
"""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Iterable
from pathlib import Path

TRIAL = "gpunodes.trial"
"""On the kernel's command line: say :data:`TRIAL_PASSED` on the console and power off."""
TRIAL_PASSED = "gpunodes: this accelerator runs a stock kernel"

# crc32c_generic is what ext4's checksums ask the kernel's crypto layer for by name, so no dependency lists it.
_WANTED = ("crc32c_generic", "virtio_pci", "virtio_blk", "ext4")

_INIT = f"""#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
exec < /dev/console > /dev/console 2>&1
/bin/busybox mount -t proc proc /proc
case "$(/bin/busybox cat /proc/cmdline)" in
*{TRIAL}*)
    echo "{TRIAL_PASSED}"
    /bin/busybox poweroff -f
    ;;
esac
for module in $(/bin/busybox cat /modules/order); do
    /bin/busybox insmod "/modules/$module"
done
while ! [ -b /dev/vda ]; do
    /bin/busybox usleep 20000
done
/bin/busybox mount -t ext4 -o rw,noatime,discard /dev/vda /root
/bin/busybox umount /proc
/bin/busybox mount --move /dev /root/dev
exec /bin/busybox switch_root /root /sbin/init
"""


def cpio(entries: Iterable[tuple[str, int, bytes]]) -> bytes:
    """An archive of ``(path, mode with file type, content)``; parents come before their children."""
    archive = bytearray()
    for number, (path, mode, content) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        name = path.encode() + b"\0"
        #         inode   mode  uid gid links mtime size          device and rdev   name       checksum
        numbers = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name), 0)
        archive += b"070701" + b"".join(f"{value:08x}".encode() for value in numbers) + name
        archive += bytes(-len(archive) % 4)
        archive += content
        archive += bytes(-len(archive) % 4)
    return bytes(archive)


def load_order(wanted: Iterable[str], dependencies: str, builtin: str) -> list[str]:
    """Paths of the modules to load, in order, from the text of ``modules.dep`` and ``modules.builtin`` (depmod(8))."""
    after: dict[str, list[str]] = {}
    for line in dependencies.splitlines():
        module, _, needs = line.partition(":")
        after[module] = needs.split()
    paths = {_module_name(path): path for path in after}
    inside = {_module_name(path) for path in builtin.splitlines()}
    order: list[str] = []

    def add(path: str) -> None:
        for need in after[path]:
            add(need)
        if path not in order:
            order.append(path)

    for name in wanted:
        if name not in inside and name in paths:
            add(paths[name])
    return order


def _module_name(path: str) -> str:
    return path.rpartition("/")[2].partition(".ko")[0].replace("-", "_")


def build(modules: Path, busybox: Path) -> bytes:
    """The ramdisk for the kernel whose modules lie in ``modules`` (/lib/modules/VERSION of its tree)."""
    order = load_order(_WANTED, (modules / "modules.dep").read_text(), (modules / "modules.builtin").read_text())
    files = [(f"{_module_name(path)}.ko", _content(modules / path)) for path in order]
    directories = ("bin", "dev", "proc", "root", "modules")
    entries = [(name, 0o040755, b"") for name in directories]
    entries += [("bin/busybox", 0o100755, busybox.read_bytes()), ("init", 0o100755, _INIT.encode())]
    entries += [(f"modules/{name}", 0o100644, content) for name, content in files]
    entries += [("modules/order", 0o100644, "\n".join(name for name, _ in files).encode())]
    return gzip.compress(cpio(entries), mtime=0)


def _content(path: Path) -> bytes:
    return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
