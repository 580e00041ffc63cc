"""Write Debian binary packages (deb(5)) without dpkg's build tools."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpunodes.lab.mirror.tree import MTIME, TreeEntry, write_compressed_tar, write_tar

AR_HEADER_BYTES = 60


@dataclass(frozen=True)
class DebPackage:
    """A package's metadata; the fields are those of deb-control(5)."""

    name: str
    version: str
    architecture: str
    maintainer: str
    description: str
    section: str = "admin"
    depends: str = ""
    recommends: str = ""
    provides: str = ""
    conflicts: str = ""
    replaces: str = ""
    conffiles: tuple[str, ...] = ()
    scripts: tuple[tuple[str, str], ...] = ()
    """Maintainer scripts: (postinst, text) and so on."""

    @property
    def file_name(self) -> str:
        """NAME_VERSION_ARCHITECTURE.deb."""
        return f"{self.name}_{self.version}_{self.architecture}.deb"


def control(package: DebPackage, installed_kib: int) -> str:
    """The control file's text."""
    fields = {
        "Package": package.name,
        "Version": package.version,
        "Architecture": package.architecture,
        "Maintainer": package.maintainer,
        "Installed-Size": str(installed_kib),
        "Depends": package.depends,
        "Recommends": package.recommends,
        "Provides": package.provides,
        "Conflicts": package.conflicts,
        "Replaces": package.replaces,
        "Section": package.section,
        "Priority": "optional",
        "Description": package.description,
    }
    return "".join(f"{key}: {value}\n" for key, value in fields.items() if value)


def _bytes(content: bytes | Path) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def write(package: DebPackage, entries: Sequence[TreeEntry], target: Path) -> None:
    """Write the package to ``target``; its zstd compression needs dpkg of Debian 12 or later."""
    files = [(entry.path, _bytes(entry.content)) for entry in entries if entry.content is not None]
    sums = "".join(f"{hashlib.md5(data, usedforsecurity=False).hexdigest()}  {path[1:]}\n" for path, data in files)
    installed_kib = sum(-(-len(data) // 1024) for _, data in files)
    parts = [TreeEntry("/control", control(package, installed_kib).encode()), TreeEntry("/md5sums", sums.encode())]
    if package.conffiles:
        parts.append(TreeEntry("/conffiles", "".join(f"{path}\n" for path in package.conffiles).encode()))
    parts += [TreeEntry(f"/{name}", text.encode(), 0o755) for name, text in package.scripts]
    meta = io.BytesIO()
    write_tar(meta, parts, "./")
    with target.open("wb") as out:
        out.write(b"!<arch>\n")
        for name, data in (("debian-binary", b"2.0\n"), ("control.tar", meta.getvalue())):
            out.write(_ar_header(name, len(data)) + data + b"\n" * (len(data) % 2))
        start = out.tell()
        out.write(_ar_header("data.tar.zst", 0))
        write_compressed_tar(out, entries, "./")
        size = out.tell() - start - AR_HEADER_BYTES
        out.write(b"\n" * (size % 2))
        out.seek(start)
        out.write(_ar_header("data.tar.zst", size))


def _ar_header(name: str, size: int) -> bytes:
    return f"{name:<16}{MTIME:<12}{0:<6}{0:<6}{'100644':<8}{size:<10}`\n".encode()
