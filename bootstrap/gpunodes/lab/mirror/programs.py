"""Run the programs that the mirror is built with."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpunodes.errors import GpunodesError

REQUIRED_PACKAGES: Mapping[str, str] = {
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
    "gcc": "gcc",
    "gpg": "gpg",
    "gpg-agent": "gpg-agent",
    "gpgv": "gpgv",
    "nice": "coreutils",
    "pkg-config": "pkg-config",
    "zstd": "zstd",
}
"""Programs that a build runs, and the Debian package of each."""

REQUIRED_FILES: Mapping[str, str] = {
    "/usr/include/seccomp.h": "libseccomp-dev",
    "/usr/include/stdlib.h": "libc6-dev",
    "/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring",
}
"""Files that a build reads, and the Debian package of each."""


def missing_packages() -> list[str]:
    """Missing Debian packages for a build, sorted."""
    missing = {package for program, package in REQUIRED_PACKAGES.items() if shutil.which(program) is None}
    missing |= {package for path, package in REQUIRED_FILES.items() if not Path(path).exists()}
    return sorted(missing)


def require() -> None:
    """Raise an error that lists every missing Debian package."""
    if missing := missing_packages():
        raise GpunodesError(
            f"this machine cannot build the lab's mirror: missing {', '.join(missing)}",
            remedy=f"apt-get install {' '.join(missing)}",
        )


def run(
    argv: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    limit_s: int = 300,
) -> str:
    """Standard output of a program; GpunodesError with its last lines when it fails or runs longer than ``limit_s``."""
    command = [str(argument) for argument in argv]
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C.UTF-8", **(env or {})},
            input=stdin,
            capture_output=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise GpunodesError(
            f"{command[0]} did not end within {limit_s} s", remedy=f"run it by hand: {' '.join(command)}"
        ) from late
    if done.returncode:
        output = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()[-8:]
        raise GpunodesError(
            f"{' '.join(command[:3])} failed with status {done.returncode}: " + "\n".join(output),
            remedy=f"run it by hand: {' '.join(command)}",
        )
    return done.stdout.decode()
