"""The packages that apt would upgrade, from the output of ``apt-get --simulate``. Pure."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

_INST = re.compile(
    r"^Inst (?P<name>\S+) (?:\[(?P<old>[^\]]*)\] )?\((?P<new>\S+) (?P<origins>.*?) \[(?P<arch>[^\]]*)\]\)"
)
# Not its debug symbols.
_IMAGE = re.compile(r"linux-image-(?:unsigned-)?(\d+\.\d+\.\d+\S*)(?<!-dbg)(?<!-dbgsym)")
_META = re.compile(
    r"linux-(?!libc-dev|base(?:-sgx)?$|sysctl-defaults|firmware|perf|doc|kbuild|compiler|tools|cpupower)[a-z]"
)


@dataclass(frozen=True)
class Package:
    """A package that would be installed; ``old`` is "" for a new one."""

    name: str
    old: str
    new: str
    origins: Sequence[str] = ()
    """Where the new version comes from, as apt shows it: ``Debian-Security:12/oldstable-security``."""

    @property
    def security(self) -> bool:
        """Whether a source of security updates has the new version.

        Debian: label Debian-Security; Ubuntu: jammy-security, and jammy-infra-security of ESM. Source: the default
        origins of unattended-upgrades 2.9.
        """
        return any(
            origin.startswith("Debian-Security:") or origin.rpartition("/")[2].endswith("-security")
            for origin in self.origins
        )

    @property
    def kernel(self) -> str:
        """The release of the kernel that the package is, "" for another package."""
        found = _IMAGE.fullmatch(self.name)
        return found[1] if found else ""

    @property
    def is_kernel_meta(self) -> bool:
        """Whether it only depends on the newest kernel, or on a part of it: linux-image-amd64, linux-generic.

        Of a kernel that is split, as Debian's 7.3 (trixie-backports), linux-base-amd64, linux-modules-amd64 and
        linux-image-amd64 need each other in one version: each of them brings the kernel.
        """
        return bool(_META.match(self.name)) and not re.search(r"\d+\.\d+\.\d+", self.name)


@dataclass(frozen=True)
class Pending:
    """What an upgrade would do."""

    upgrades: Sequence[Package]
    new: Sequence[Package]
    """Dependencies that are not installed yet, such as a new kernel."""
    kept_back: Sequence[str]
    """Packages whose upgrade would remove others, or that are held."""
    held: Sequence[str] = ()
    """Packages of ``upgrades`` that gpunodes holds, because they would bring a kernel without a driver."""

    def kernels(self) -> list[str]:
        """The releases of the new kernels."""
        return [package.kernel for package in self.new if package.kernel]

    def of_kernel(self, release: str) -> list[Package]:
        """The new packages of a kernel: its image, its headers, its modules."""
        return [package for package in self.new if package.name.endswith(f"-{release}")]

    def chosen(self, keep: Sequence[str], *, security: bool) -> list[Package]:
        """The packages to upgrade, without kernels' metapackages and without those that match a pattern of ``keep``."""
        return [
            package
            for package in self.upgrades
            if not package.is_kernel_meta
            and not any(fnmatch.fnmatchcase(package.name, pattern) for pattern in keep)
            and (package.security or not security)
        ]


def parse(listing: str) -> Pending:
    """Parse the output of ``apt-get --simulate upgrade --with-new-pkgs``."""
    found = []
    for line in listing.splitlines():
        if match := _INST.match(line):
            # A foreign architecture is part of the name in apt's arguments, too.
            origins = tuple(origin.strip() for origin in match["origins"].split(","))
            found.append(Package(match["name"], match["old"] or "", match["new"], origins))
    kept = re.search(r"^The following packages have been kept back:\n((?:  .*\n)+)", listing, re.MULTILINE)
    return Pending(
        [package for package in found if package.old],
        [package for package in found if not package.old],
        kept[1].split() if kept else [],
    )


def kept_files(output: str) -> list[str]:
    """The configuration files of which dpkg kept the machine's version, from its output."""
    found = re.findall(
        r"^Configuration file '([^'\n]+)'\n(?:(?! \*\*\*|Configuration)[^\n]*\n){0,12}? ==> Keeping old config file",
        output,
        re.MULTILINE,
    )
    return list(dict.fromkeys(found))
