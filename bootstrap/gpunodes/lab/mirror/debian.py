"""Debian's own packages, from the archive that this machine's apt uses."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from gpunodes.lab.mirror import store
from gpunodes.lab.mirror.programs import run

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def architecture() -> str:
    """This machine's Debian architecture; Go's name for amd64 and arm64 is the same."""
    return run(["dpkg", "--print-architecture"]).strip()


def sources(archive: str, suite: str, more: Sequence[str] = ()) -> str:
    """A sources.list of ``suite``, its updates and ``more`` suites."""
    suites = (suite, f"{suite}-updates", *more)
    return "".join(f"deb [signed-by={KEYRING}] {archive} {name} main\n" for name in suites)


def download(
    suite: str, packages: Sequence[str], cache: Path, progress: Callable[[str], None], more: Sequence[str] = ()
) -> list[Path]:
    """The .deb files of ``packages`` and all their dependencies, from ``suite`` and ``more`` suites.

    apt runs with an empty root, so that the result does not depend on what a node image has installed. The archive gets
    updates; the packages in ``cache`` stay as they were downloaded.
    """
    # Imported here: gpunodes.lab.images imports this package.
    from gpunodes.lab.images import debian_archive

    archive = debian_archive()

    def make(root: Path) -> None:
        progress(f"downloading {len(packages)} packages of Debian {suite} and their dependencies")
        for folder in ("lists/partial", "archives/partial", "etc"):
            (root / folder).mkdir(parents=True)
        (root / "status").touch()
        (root / "etc" / "sources.list").write_text(sources(archive, suite, more))
        # Proxies and certificates are those of this machine's apt.
        settings = {
            "Dir::Etc::SourceList": root / "etc" / "sources.list",
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::Etc::Preferences": "/dev/null",
            "Dir::Etc::PreferencesParts": "/dev/null",
            "Dir::State": root,
            "Dir::State::Lists": root / "lists",
            "Dir::State::Status": root / "status",
            "Dir::Cache": root,
            "Dir::Cache::Archives": root / "archives",
            "APT::Sandbox::User": "",
            "APT::Architecture": architecture(),
            "APT::Install-Recommends": "false",
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
        }
        command = ["apt-get", "--quiet", "--assume-yes", *(f"-o{key}={value}" for key, value in settings.items())]
        run([*command, "update"], limit_s=300)
        run([*command, "--download-only", "install", *packages], limit_s=900)
        shutil.rmtree(root / "lists")

    inputs = hashlib.sha256(repr((archive, sorted(packages))).encode()).hexdigest()[:16]
    return sorted((store.keep(cache / f"debian-{suite}-{inputs}", make) / "archives").glob("*.deb"))
