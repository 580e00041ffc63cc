"""A part of Debian's archive with its signatures: the indices of a suite, and the requested packages."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gpunodes.lab.images import debian_archive
from gpunodes.lab.mirror.debian import KEYRING

COMPONENTS = ("main", "contrib", "non-free", "non-free-firmware")
INDICES = ("binary-amd64/Packages.xz", "i18n/Translation-en.xz")


def make(folder: Path, scratch: Path, suite: str, packages: Sequence[str]) -> None:
    """Fill ``folder``/debian with the files that ``suite`` needs to install ``packages``, dependencies included."""
    archive = debian_archive().rstrip("/")
    home = folder / "debian"
    apt = _apt(scratch, f"deb [signed-by={KEYRING}] {archive} {suite} {' '.join(COMPONENTS)}\n")
    _run(*apt, "update")
    listed = _run(*apt, "--print-uris", "install", *packages)
    for uri in re.findall(r"^'([^']+)'", listed, re.MULTILINE):
        _fetch(uri, home / "pool" / unquote(urlsplit(uri).path).partition("/pool/")[2])
    release = home / "dists" / suite / "InRelease"
    _fetch(f"{archive}/dists/{suite}/InRelease", release)
    # apt refuses a component whose Release file lists translations that are missing.
    for name in (f"{component}/{index}" for component in COMPONENTS for index in INDICES):
        file = release.parent / name
        _fetch(f"{archive}/dists/{suite}/{name}", file)
        found = re.search(rf"^ ([0-9a-f]{{64}}) +\d+ {re.escape(name)}$", release.read_text(), re.MULTILINE)
        assert found, f"{suite} has no {name}"
        # apt tries this path first.
        link = file.parent / "by-hash" / "SHA256" / found[1]
        link.parent.mkdir(parents=True)
        link.symlink_to(f"../../{file.name}")


def _apt(scratch: Path, source: str) -> list[str]:
    """apt-get with an empty root; proxies and certificates are this machine's."""
    for name in ("lists/partial", "archives/partial"):
        (scratch / name).mkdir(parents=True)
    (scratch / "status").touch()
    (scratch / "sources.list").write_text(source)
    settings = {
        "Dir::Etc::SourceList": scratch / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State": scratch,
        "Dir::State::Lists": scratch / "lists",
        "Dir::State::Status": scratch / "status",
        "Dir::Cache": scratch,
        "Dir::Cache::Archives": scratch / "archives",
        "APT::Architecture": "amd64",
        "APT::Sandbox::User": "",
        "APT::Install-Recommends": "false",
        "Acquire::Languages": "none",
    }
    return ["apt-get", "--quiet", "--assume-yes", *(f"-o{key}={value}" for key, value in settings.items())]


def _fetch(uri: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    _run("/usr/lib/apt/apt-helper", "-oAPT::Sandbox::User=", "download-file", uri, str(target))


def _run(*argv: str) -> str:
    return subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, timeout=1800).stdout
