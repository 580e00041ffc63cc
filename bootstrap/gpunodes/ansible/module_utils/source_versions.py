"""The versions of packages in a package source that the machine may not have configured yet, from the source's index.

What the source lists is not verified: it can only make gpunodes refuse a version. apt and dnf verify what they install.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from . import packages
from .problem import MachineProblem
from .process import run
from .proxies import Proxies, opener, within

_LIMIT_S = 60
_LISTS_S = 180
"""For all lists of a machine's own sources."""
_WHOLE_S = 180
_MOST_FETCHED = 64 << 20
"""Bytes of an index that are fetched; NVIDIA's have less than two million."""
_MOST_UNPACKED = 256 << 20
MOST = 200
"""Versions of one package that are reported, the newest ones."""
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+:~^_-]{0,127}")
_INDICES = ("Packages.xz", "Packages.gz", "Packages")


def of_sources(
    sources: Sequence[Mapping[str, Any]],
    wanted: Mapping[str, Sequence[str]],
    installed: Mapping[str, object],
    proxies: Proxies | None,
) -> dict[str, dict[str, list[str]]]:
    """The versions of packages by source; ``wanted`` are their names, of which ``installed`` ones stay.

    ``sources`` are those that a machine uses, with their addresses. A source that cannot be read is left out, and one
    of which nothing is missing.
    """
    missing = {source: [name for name in names if not installed.get(name)] for source, names in wanted.items()}
    found: dict[str, dict[str, list[str]]] = {}
    for source in sources:
        if names := missing.get(source["name"]):
            with contextlib.suppress(MachineProblem):
                found[source["name"]] = read(str(source["url"]), names, proxies, str(source.get("index") or ""))
    uses_docker = installed.get("containerd.io") or any(source["name"] == packages.DOCKER_SOURCE for source in sources)
    if sources and missing.get(packages.SYSTEM_SOURCES) and not uses_docker:
        with contextlib.suppress(MachineProblem):
            found[packages.SYSTEM_SOURCES] = of_system(missing[packages.SYSTEM_SOURCES])
    return found


def of_system(names: Sequence[str]) -> dict[str, list[str]]:
    """The versions of packages in the sources that the machine has; its own lists of packages may be old.

    Raises MachineProblem if they cannot be read, and on systems without apt.
    """
    if not isinstance(packages.detect(), packages.Apt):
        raise MachineProblem("its packages do not come by apt")
    with packages.other_lists() as options:
        updated = run(["apt-get", *options, "update"], _LISTS_S)
        # apt only warns about a source that it cannot reach.
        if not updated.ok or "Failed to fetch" in updated.text:
            raise MachineProblem("its package sources cannot be read")
        return newest_first(packages.parse_madison(run(["apt-cache", *options, "madison", *names]).out))


def read(url: str, names: Collection[str], proxies: Proxies | None = None, folder: str = "") -> dict[str, list[str]]:
    """The versions of the packages ``names`` in a source, newest first; ``url`` is its InRelease or its repomd.xml.

    ``folder`` is that of the index beside InRelease, ``stable/binary-amd64/``. Raises MachineProblem if the source
    cannot be read.
    """
    base, _, file = url.rpartition("/")
    try:
        first = _text(_fetch(url, proxies), file)
        if file == "repomd.xml":
            found = re.search(r'<data type="primary">.*?<location href="([A-Za-z0-9._/-]+)"', first, re.DOTALL)
            if not found or ".." in found[1]:
                raise MachineProblem(f"{url} lists no packages", "a package source")
            # The index's path is relative to the folder above repodata/.
            path = f"{base.rpartition('/')[0]}/{found[1]}"
            pairs = _rpms(_text(_fetch(path, proxies), path))
        else:
            paths = [f"{folder}{name}" for name in _INDICES]
            listed = next(
                (path for path in paths if re.search(rf"(?m)^ \S+ +\d+ (\./)?{re.escape(path)}$", first)), paths[-1]
            )
            pairs = _debs(_text(_fetch(f"{base}/{listed}", proxies), listed))
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise MachineProblem(f"{url} cannot be read: {error}", "a package source that responds") from error
    versions: dict[str, set[str]] = {}
    for name, version in pairs:
        if name in names and _VERSION.fullmatch(version):
            versions.setdefault(name, set()).add(version)
    return newest_first(versions)


def newest_first(versions: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    """The versions of each package, by their numbers."""
    return {name: sorted(each, key=_numbers, reverse=True)[:MOST] for name, each in sorted(versions.items())}


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.rpartition(":")[2])]


def _fetch(url: str, proxies: Proxies | None) -> bytes:
    if not url.startswith(("http://", "https://")):
        raise OSError("it is not an http or https address")

    def read() -> bytes:
        with opener(proxies).open(url, timeout=_LIMIT_S) as response:
            content: bytes = response.read(_MOST_FETCHED + 1)
            return content

    content = within(_WHOLE_S, read)
    if len(content) > _MOST_FETCHED:
        raise OSError("it is larger than the index of a package source")
    return content


def _text(content: bytes, name: str) -> str:
    if name.endswith(".gz"):
        with gzip.open(io.BytesIO(content)) as file:
            content = file.read(_MOST_UNPACKED)
    elif name.endswith(".xz"):
        content = lzma.LZMADecompressor().decompress(content, _MOST_UNPACKED)
    elif name.endswith((".zst", ".bz2")):
        raise OSError(f"{name.rpartition('.')[2]} is not supported")
    return content.decode(errors="replace")


def _debs(text: str) -> Iterator[tuple[str, str]]:
    """Name and version of each paragraph of a Packages file."""
    name = ""
    for line in text.splitlines():
        if line.startswith("Package: "):
            name = line[9:].strip()
        elif line.startswith("Version: "):
            yield name, line[9:].strip()


_RPM = re.compile(
    r"<name>([^<]{1,200})</name>\s*<arch>[^<]{0,20}</arch>\s*<version(?=[^>]*\bver=\"([^\"]{1,60})\")"
    r"(?=[^>]*\brel=\"([^\"]{1,60})\")"
)


def _rpms(text: str) -> Iterator[tuple[str, str]]:
    """Name and version of each package in a primary.xml (createrepo_c); no XML parser, which would expand entities."""
    for name, version, release in _RPM.findall(text):
        yield name, f"{version}-{release}"
