#!/usr/bin/env python3
"""Write the kubectl of the image to a file: bootstrap/kubectl.py FILE [--from URL|FILE|none] [--sha256 HEX].

kubectl.toml has its version, its publisher and its checksums. Nothing is written before the checksum is verified. Where
the publisher is not reachable, the file is empty, and the image is built without kubectl: builds work without the
Internet. A source that the caller names must have it.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.lab.mirror import debian

_PINNED = Path(__file__).with_name("kubectl.toml")
_LIMIT_S = 60
"""Seconds without an answer of the server."""


@dataclass(frozen=True)
class Pin:
    """kubectl.toml. ``sha256``: the checksum for each of Debian's architectures."""

    version: str
    url: str
    sha256: Mapping[str, str]


def pinned() -> Pin:
    """The kubectl that an image has unless its builder names another."""
    return Pin(**tomllib.loads(_PINNED.read_text(encoding="utf-8")))


def name(program: Path) -> str:
    """The version of a pinned kubectl, ``sha256:HEX`` of another, ``none`` of an empty file."""
    if not program.stat().st_size:
        return "none"
    digest, pin = hashlib.sha256(program.read_bytes()).hexdigest(), pinned()
    return pin.version if digest in pin.sha256.values() else f"sha256:{digest}"


def read(source: str) -> bytes:
    """The content of a URL or a file; GpunodesError if it cannot be read."""
    try:
        if source.startswith(("https://", "http://")):
            with urllib.request.urlopen(source, timeout=_LIMIT_S) as response:  # noqa: S310 - one of these two
                content: bytes = response.read()
                return content
        return Path(source).read_bytes()
    except (OSError, http.client.HTTPException, ValueError) as error:
        cause = error.reason if type(error) is urllib.error.URLError else error
        raise GpunodesError(f"{source} cannot be read: {cause}", remedy="name another with KUBECTL") from None


def obtain(source: str, digest: str, architecture: str, present: bytes = b"") -> bytes:
    """kubectl from ``source``, or from its publisher; empty if that is not reachable, or ``source`` is ``none``.

    ``digest``: its SHA-256, empty for that of the pinned version. ``present``: an earlier one, used if it is the same.
    """
    pin = pinned()
    wanted = digest.lower() or pin.sha256.get(architecture, "")
    if source == "none":
        return b""
    if not wanted:
        raise WrongInput(f"no checksum of kubectl for {architecture}", "its SHA-256", "KUBECTL_SHA256, or KUBECTL=none")
    if hashlib.sha256(present).hexdigest() == wanted:
        return present
    place = source or pin.url.format(version=pin.version, architecture=architecture)
    try:
        data = read(place)
    except GpunodesError as error:
        if source:
            raise
        sys.stdout.write(f"kubectl {pin.version} is left out: {error.problem.found}\n")
        return b""
    found = hashlib.sha256(data).hexdigest()
    if found != wanted:
        raise WrongInput(f"{place} has the SHA-256 {found}", wanted, "set KUBECTL_SHA256 to what its publisher names")
    return data


def main() -> int:
    """Write the file that the command line names, unless it is right already: make compares its time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--from", dest="source", default="", metavar="URL|FILE|none", help="instead of its publisher")
    parser.add_argument("--sha256", default="", metavar="HEX", help="its checksum, if it is another version")
    given = parser.parse_args()
    if given.sha256 and given.source in {"", "none"}:
        parser.error("--sha256 belongs to a URL or a file of --from")
    present = given.file.read_bytes() if given.file.exists() else None
    try:
        program = obtain(given.source, given.sha256, debian.architecture(), present or b"")
    except GpunodesError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    if program != present:
        given.file.write_bytes(program)
        given.file.chmod(0o755 if program else 0o644)
    return 0


if __name__ == "__main__":
    sys.exit(main())
