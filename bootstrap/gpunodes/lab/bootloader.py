"""Machines that start the kernel on their own disk: GRUB on a small disk of its own, as on a server's boot device.

The root file system has no partitions, so it has no place for a boot loader. BIOS firmware loads the first sector of
the boot disk, which loads GRUB's core image from the sectors behind it (GRUB manual, "Images"); the core image finds
the root file system by its label and reads the configuration that Debian's update-grub writes there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gpunodes.errors import GpunodesError

PACKAGES = ("grub-pc-bin", "grub2-common", "initramfs-tools")
"""Further packages of such a machine's image: updates of the kernel run their hooks."""

_SECTOR = 512
_DISK_BYTES = 1 << 20
_FOLDER = "boot/grub/i386-pc"
_BOOT, _CORE = f"{_FOLDER}/boot.img", f"{_FOLDER}/core.img"
_MODULES = "biosdisk ext2 search search_label configfile normal linux serial terminal"

# Runs in the finished tree; grub-install would look for the disks of this host. Only what the disk needs is in the
# initial ramdisks that updates make: emulated, each of Debian's default size takes minutes.
SCRIPT = f"""install -d {_FOLDER} etc/default/grub.d
cp usr/lib/grub/i386-pc/*.mod usr/lib/grub/i386-pc/*.lst usr/lib/grub/i386-pc/boot.img {_FOLDER}
printf '%s\\n' 'search --no-floppy --label root --set root' 'set prefix=($root)/boot/grub' > early.cfg
chroot . grub-mkimage --format i386-pc --config /early.cfg --prefix /boot/grub --output /{_CORE} {_MODULES}
rm early.cfg
printf '%s\\n' MODULES=list COMPRESS=zstd COMPRESSLEVEL=1 > etc/initramfs-tools/conf.d/lab
printf '%s\\n' virtio_pci virtio_blk ext4 crc32c > etc/initramfs-tools/modules
"""


def boot_disk(tree: Path) -> bytes:
    """The boot disk's content, from the files that :data:`SCRIPT` made in ``tree``.

    Raises:
        GpunodesError: GRUB's files are not what they must be.
    """
    boot, core = (tree / _BOOT).read_bytes(), (tree / _CORE).read_bytes()
    if len(boot) != _SECTOR or boot[-2:] != b"\x55\xaa" or len(core) > _DISK_BYTES - _SECTOR:
        raise GpunodesError(f"GRUB's boot sector has {len(boot)} bytes, and its core image {len(core)}")
    return (boot + core).ljust(_DISK_BYTES, b"\0")


def configuration(kernel: str, options: Sequence[str]) -> Mapping[str, str]:
    """The machine's files by path: GRUB's first configuration, which starts ``kernel``, and what update-grub reads."""
    line = " ".join(options).replace("$", "\\$")
    first = [
        "serial --unit=0 --speed=115200",
        "terminal_output serial",
        f"linux /boot/vmlinuz-{kernel} root=/dev/vda {line}",
        f"initrd /boot/initrd.img-{kernel}",
        "boot",
    ]
    defaults = [
        "GRUB_TIMEOUT=0",
        "GRUB_TERMINAL=serial",
        "GRUB_DISABLE_OS_PROBER=true",
        "GRUB_CMDLINE_LINUX_DEFAULT=",
        f"GRUB_CMDLINE_LINUX='{line}'",
    ]
    return {
        "/boot/grub/grub.cfg": "\n".join(first) + "\n",
        "/etc/default/grub.d/lab.cfg": "\n".join(defaults) + "\n",
    }
