"""Which machine has which MAC address: a machine can report that of another one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def of_others(name: str, known: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """The MAC addresses of all machines but ``name``, each with the machine's name; ``known`` has those of each.

    Locally administered ones count, too: they wake a machine as others do.
    """
    return {_plain(mac): other for other, macs in known.items() if other != name for mac in macs if mac}


def _plain(mac: str) -> str:
    return mac.strip().lower().replace("-", ":")
