"""The package sources of apt on a machine, as its files say (sources.list(5))."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import disk

FOLDER = "/etc/apt"
_LINE = re.compile(r"\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)([^#\n]*)")
_OFF = {"no", "false", "without", "off", "disable", "0"}


@dataclass(frozen=True)
class AptSource:
    """One source of packages."""

    url: str
    suite: str
    components: Sequence[str] = ()
    signed_by: str = ""
    """Paths or a key, as it is written there; "" for apt's own keys."""


def find(url: str, suite: str, beside: str) -> AptSource | None:
    """The source of this address and suite in another file than ``beside``; None without one.

    apt reads none of its sources any more as soon as two files name different keys for one of them.
    """
    wanted = (_plain(url), suite)
    paths = [f"{FOLDER}/sources.list", *sorted(glob.glob(f"{glob.escape(FOLDER)}/sources.list.d/*"))]
    for path in paths:
        if path != beside and path.endswith((".list", ".sources")):
            for source in _parsed(disk.read(path) or "", path.endswith(".sources")):
                if (_plain(source.url), source.suite) == wanted:
                    return source
    return None


def _plain(url: str) -> str:
    return url.rstrip("/")


def _parsed(text: str, stanzas: bool) -> Iterator[AptSource]:
    return of_stanzas(text) if stanzas else of_lines(text)


def of_lines(text: str) -> Iterator[AptSource]:
    """The sources in a file of one line each: ``deb [signed-by=PATH] URL SUITE COMPONENT...``."""
    for line in text.splitlines():
        if found := _LINE.match(line):
            options = dict(each.partition("=")[::2] for each in (found.group(1) or "").split())
            yield AptSource(found.group(2), found.group(3), found.group(4).split(), options.get("signed-by", ""))


def of_stanzas(text: str) -> Iterator[AptSource]:
    """The sources in a file of deb822 stanzas, without those that are off."""
    for stanza in re.split(r"\n[ \t]*\n", text):
        fields = _fields(stanza)
        if "deb" in fields.get("types", "").split() and fields.get("enabled", "").lower() not in _OFF:
            for url in fields.get("uris", "").split():
                for suite in fields.get("suites", "").split():
                    components = fields.get("components", "").split()
                    yield AptSource(url, suite, components, fields.get("signed-by", ""))


def _fields(stanza: str) -> dict[str, str]:
    """The fields of a stanza, by their names in small letters; lines that continue a value begin with a space."""
    found: dict[str, str] = {}
    name = ""
    for line in stanza.splitlines():
        if line.startswith("#"):
            continue
        if line[:1] in {" ", "\t"} and name:
            found[name] += f"\n{line}"
        else:
            name, _, value = line.partition(":")
            name = name.strip().lower()
            found[name] = value.strip()
    return found
