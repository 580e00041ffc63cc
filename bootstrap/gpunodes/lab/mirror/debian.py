"""Debian's own packages, from the archive that this machine's apt is set up with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpunodes.errors import GpunodesError
from gpunodes.lab.mirror.programs import run

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


@dataclass(frozen=True)
class Archive:
    """Where this machine takes Debian from: the archive and, where it is set up, the security updates."""

    url: str
    security_url: str | None

    def sources(self, suite: str) -> list[str]:
        """sources.list lines for ``suite`` with its updates."""
        lines = [f"deb [signed-by={KEYRING}] {self.url} {name} main" for name in (suite, f"{suite}-updates")]
        if self.security_url:
            lines.append(f"deb [signed-by={KEYRING}] {self.security_url} {suite}-security main")
        return lines


def architecture() -> str:
    """This machine's Debian architecture; Go's name for amd64 and arm64 is the same."""
    return run(["dpkg", "--print-architecture"]).strip()


def parse_targets(listing: str) -> Archive | None:
    """The archive in lines of ``ORIGIN|URL|RELEASE``, or None."""
    url = security_url = None
    for line in listing.splitlines():
        origin, site, suite = line.split("|")
        if origin != "Debian":
            continue
        if suite.endswith("-security"):
            security_url = security_url or site
        elif "-" not in suite:
            url = url or site
    return Archive(url, security_url) if url else None


def host_archive() -> Archive:
    """The Debian archive of this machine's own apt sources, whatever form they are written in."""
    words = ["apt-get", "indextargets", "--format", "$(ORIGIN)|$(SITE)|$(RELEASE)", "Created-By: Packages"]
    archive = parse_targets(run(words))
    if archive is None:
        raise GpunodesError(
            "no Debian archive among this machine's apt sources",
            "the lab makes Debian machines from it",
            "run apt-get update; on another system, try the lab on Debian 12 or 13",
        )
    return archive


def download(suite: str, packages: Sequence[str], cache: Path, progress: Callable[[str], None]) -> list[Path]:
    """The .deb files of ``packages`` and of all that they depend on.

    apt works in a root of its own with nothing installed, so that the answer fits any node image. The archive moves on
    with its updates: what is here is what it had when ``cache`` was first filled.
    """
    root = cache / f"apt-{suite}"
    archives = root / "archives"
    for folder in (root / "lists" / "partial", archives / "partial", root / "etc"):
        folder.mkdir(parents=True, exist_ok=True)
    (root / "status").touch()
    (root / "etc" / "sources.list").write_text("\n".join(host_archive().sources(suite)) + "\n")
    settings = {
        "Dir::Etc": root / "etc",
        "Dir::Etc::SourceList": root / "etc" / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::Preferences": "/dev/null",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Dir::State": root,
        "Dir::State::Lists": root / "lists",
        "Dir::State::Status": root / "status",
        "Dir::Cache": root,
        "Dir::Cache::Archives": archives,
        "APT::Sandbox::User": "",
        "APT::Architecture": architecture(),
        "APT::Install-Recommends": "false",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
    }
    words = ["apt-get", "--quiet", "--assume-yes", *(f"-o{key}={value}" for key, value in settings.items())]
    progress(f"Debian {suite}: {len(packages)} packages and what they depend on")
    run([*words, "update"], limit_s=300)
    run([*words, "--download-only", "install", *packages], limit_s=900)
    return sorted(archives.glob("*.deb"))
