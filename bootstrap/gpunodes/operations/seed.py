"""Seeds: what an installer or cloud-init must know to make a bare machine ready for gpunodes.

Each has one user with SSH keys and passwordless sudo, Python 3 and an SSH server, and neither a password nor swap. All
values are checked here. Keys have comments with any characters: they enter shell commands as base64.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import yaml

from gpunodes.engine import whole_file
from gpunodes.errors import WrongInput

_TAKEN = frozenset((
    "_apt", "adm", "audio", "backup", "bin", "cdrom", "daemon", "dialout", "dip", "disk", "fax", "floppy",
    "ftp", "games", "halt", "irc", "kmem", "list", "lock", "lp", "mail", "man", "mem", "news", "nobody",
    "nogroup", "operator", "plugdev", "proxy", "sasl", "shadow", "shutdown", "src", "staff", "sudo", "sync",
    "sys", "tape", "tty", "users", "utempter", "utmp", "uucp", "video", "voice", "wheel", "www-data",
))  # fmt: skip
"""Users and groups of every system: useradd(8) makes no user whose name a user or group has, nor do installers.

Sources: Debian's base-passwd 3.6, passwd.master and group.master; the package setup of the RHEL family.
"""


class Format(StrEnum):
    """The reader of a seed."""

    CLOUD_INIT = "cloud-init"
    PRESEED = "preseed"
    """Debian's installer."""
    KICKSTART = "kickstart"
    """Anaconda, of the RHEL family."""


@dataclass(frozen=True, slots=True)
class Seed:
    """The values of a seed, checked by ``check``."""

    user: str
    keys: Sequence[str]
    """Lines of authorized_keys, without options."""
    hostname: str = ""
    """"" leaves the name to DHCP, or to the image."""
    disk: str = ""
    """The disk that an installer erases: a path below /dev."""


def check(seed: Seed, kind: Format) -> None:
    """Raise WrongInput for a value that is invalid, or that does not fit the format."""
    if not re.fullmatch(r"[a-z_][a-z0-9_-]{0,31}", seed.user):
        raise WrongInput(
            f"{seed.user!r} is not a user name",
            "1 to 32 lower-case letters, digits, dashes and underscores, beginning with a letter (useradd(8))",
            "correct --user",
        )
    if seed.user == "root":
        raise WrongInput("the user is root", "a user with sudo: root gets no login", "choose another --user")
    if seed.user in _TAKEN:
        raise WrongInput(
            f"{seed.user} is a user or a group of the system itself",
            "a name that no system uses: no such user would be made, and nobody could log in",
            "choose another --user",
        )
    if seed.hostname and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", seed.hostname):
        raise WrongInput(
            f"{seed.hostname!r} is not a host name",
            "1 to 63 lower-case letters, digits and dashes, without a domain: it is also the node's name",
            "correct --hostname",
        )
    if seed.hostname == "localhost":
        raise WrongInput("the host name is localhost", "a name of its own", "correct --hostname")
    if kind is Format.CLOUD_INIT and seed.disk:
        raise WrongInput("--disk with cloud-init", "a system that is installed already", "leave --disk out")
    if kind is not Format.CLOUD_INIT and not re.fullmatch(r"/dev(/[A-Za-z0-9][A-Za-z0-9._:+-]*){1,3}", seed.disk):
        found = f"{seed.disk!r} is not a disk" if seed.disk else "no disk is named"
        raise WrongInput(
            found,
            "the disk that the installer erases, such as /dev/sda or /dev/disk/by-id/NAME",
            "correct --disk" if seed.disk else "use --disk",
        )


def render(seed: Seed, kind: Format) -> dict[str, str]:
    """The files of a seed by name; the first is the main one. Raises WrongInput as ``check``."""
    check(seed, kind)
    if kind is Format.CLOUD_INIT:
        user_data = _user_data(seed)
        return {"user-data": user_data, "meta-data": _meta_data(seed, user_data)}
    if kind is Format.PRESEED:
        return {"preseed.cfg": _preseed(seed)}
    return {"ks.cfg": _kickstart(seed)}


def write(folder: Path, files: Mapping[str, str]) -> list[Path]:
    """Write the files into ``folder``, which is made, with mode 0600; returns their paths.

    Raises WrongInput if ``folder`` is something else, or cannot be made or written, and GpunodesError if a file cannot.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise WrongInput(f"{folder} is not a folder", "a folder, or a name that does not exist", "correct --output")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise WrongInput(
            f"the folder {folder} cannot be written: {error.strerror}",
            "a folder that this user can write",
            "give this user access to it, or correct --output",
        ) from error
    paths = [folder / name for name in files]
    for path in paths:
        whole_file.check(path, "--output")
    for path, text in zip(paths, files.values(), strict=True):
        whole_file.write(path, text, 0o600, "the seed")
    return paths


# cloud-init (cloudinit.readthedocs.io, "Module reference" and "NoCloud")


def _user_data(seed: Seed) -> str:
    document = {
        # Without the entry "default", the image's own user is not created.
        "users": [
            {
                "name": seed.user,
                "gecos": "gpunodes",
                "shell": "/bin/bash",
                "lock_passwd": True,
                "sudo": "ALL=(ALL) NOPASSWD:ALL",
                "ssh_authorized_keys": list(seed.keys),
            }
        ],
        "disable_root": True,
        "ssh_pwauth": False,
        # No swap file; gpunodes turns off swap that the image has.
        "swap": {"size": 0},
        "packages": list(_PACKAGES),
        # sudo looks the host's name up.
        **({"hostname": seed.hostname, "manage_etc_hosts": "localhost"} if seed.hostname else {}),
    }
    return "#cloud-config\n" + yaml.safe_dump(document, sort_keys=False, width=_LONGEST)


def _meta_data(seed: Seed, user_data: str) -> str:
    """The id follows from the content: cloud-init applies a changed seed again, and an unchanged one only once."""
    document = {
        "instance-id": f"gpunodes-{hashlib.sha256(user_data.encode()).hexdigest()[:16]}",
        **({"local-hostname": seed.hostname} if seed.hostname else {}),
    }
    return yaml.safe_dump(document, sort_keys=False)


_LONGEST = 1 << 20
"""Width of a YAML line: none is folded."""
_PACKAGES = ("openssh-server", "python3", "sudo")


# What an installer runs in the installed system. No word of it contains a quote or a dollar sign.


def _login(seed: Seed) -> list[str]:
    keys = base64.b64encode("".join(f"{key}\n" for key in seed.keys).encode()).decode()
    home = f"/home/{seed.user}"
    return [
        f"install -d -m 0700 {home}/.ssh",
        f"echo {keys} | base64 -d >{home}/.ssh/authorized_keys",
        f"chmod 0600 {home}/.ssh/authorized_keys",
        f"chown -R {seed.user}: {home}/.ssh",
        f'echo "{seed.user} ALL=(ALL) NOPASSWD:ALL" >/etc/sudoers.d/gpunodes',
        "chmod 0440 /etc/sudoers.d/gpunodes",
        "mkdir -p /etc/ssh/sshd_config.d",
        # The first value counts: before the distribution's files.
        'echo "PasswordAuthentication no" >/etc/ssh/sshd_config.d/01-gpunodes.conf',
        'echo "KbdInteractiveAuthentication no" >>/etc/ssh/sshd_config.d/01-gpunodes.conf',
    ]


# The first two partitions exist on disks with GPT only: for firmware of both kinds. There is none for swap.
# Source: partman-auto, recipes and recipes-amd64-efi (atomic).
_RECIPE = (
    "gpunodes ::"
    " 1 1 1 free $iflabel{ gpt } $reusemethod{ } method{ biosgrub } ."
    " 538 538 1075 free $iflabel{ gpt } $reusemethod{ } method{ efi } format{ } ."
    " 4096 10000 -1 ext4 $primary{ } $bootable{ } method{ format } format{ } use_filesystem{ } filesystem{ ext4 }"
    " mountpoint{ / } ."
)


def _preseed(seed: Seed) -> str:
    """Source: debian.org, Installation Guide, appendix B."""
    command = "; ".join(["set -e", *_login(seed)])
    name = seed.hostname or "debian"
    answers = (
        "debian-installer/locale string en_US.UTF-8",
        "keyboard-configuration/xkb-keymap select us",
        "netcfg/choose_interface select auto",
        f"netcfg/get_hostname string {name}",
        "netcfg/get_domain string",
        # Overrides the name that DHCP or DNS gives.
        *((f"netcfg/hostname string {name}",) if seed.hostname else ()),
        "hw-detect/load_firmware boolean true",
        "mirror/country string manual",
        "mirror/http/hostname string deb.debian.org",
        "mirror/http/directory string /debian",
        "mirror/http/proxy string",
        "passwd/root-login boolean false",
        "passwd/user-fullname string gpunodes",
        f"passwd/username string {seed.user}",
        "passwd/user-password-crypted password !",
        "clock-setup/utc boolean true",
        "time/zone string UTC",
        "clock-setup/ntp boolean true",
        f"partman-auto/disk string {seed.disk}",
        "partman-auto/method string regular",
        "partman-lvm/device_remove_lvm boolean true",
        "partman-md/device_remove_md boolean true",
        f"partman-auto/expert_recipe string {_RECIPE}",
        "partman-auto/choose_recipe select gpunodes",
        "partman-basicfilesystems/no_swap boolean false",
        "partman-partitioning/confirm_write_new_label boolean true",
        "partman/choose_partition select finish",
        "partman/confirm boolean true",
        "partman/confirm_nooverwrite boolean true",
        "grub-installer/only_debian boolean true",
        f"grub-installer/bootdev string {seed.disk}",
        "apt-setup/cdrom/set-first boolean false",
        f"pkgsel/include string {' '.join(_PACKAGES)}",
        "finish-install/reboot_in_progress note",
        f"preseed/late_command string in-target sh -c '{command}'",
    )
    lines = ["#_preseed_V1", f"# Made by `gpunodes provision seed`. It erases {seed.disk}."]
    lines += [f"d-i {answer}" for answer in answers]
    lines += [
        "tasksel tasksel/first multiselect ssh-server",
        "popularity-contest popularity-contest/participate boolean false",
    ]
    return "\n".join(lines) + "\n"


def _kickstart(seed: Seed) -> str:
    """Source: pykickstart.readthedocs.io, "Kickstart Documentation"."""
    disk = seed.disk.removeprefix("/dev/")
    lines = [
        f"# Made by `gpunodes provision seed`. It erases {seed.disk}.",
        "text",
        "lang en_US.UTF-8",
        "keyboard us",
        "timezone UTC --utc",
        f"network --bootproto=dhcp --device=link --activate{f' --hostname={seed.hostname}' if seed.hostname else ''}",
        "rootpw --lock",
        f"user --name={seed.user} --gecos=gpunodes --lock",
        "services --enabled=sshd",
        "firstboot --disable",
        "eula --agreed",
        f"ignoredisk --only-use={disk}",
        "zerombr",
        f"clearpart --all --initlabel --drives={disk}",
        f"bootloader --boot-drive={disk}",
        # The partitions that the firmware needs.
        "reqpart",
        "part / --fstype=xfs --size=4096 --grow",
        "reboot",
        "",
        "%packages",
        "@core",
        *_PACKAGES,
        "%end",
        "",
        "%post --erroronfail",
        "set -e",
        *_login(seed),
        f"restorecon -RF /home/{seed.user}/.ssh /etc/sudoers.d /etc/ssh",
        "%end",
    ]
    return "\n".join(lines) + "\n"
