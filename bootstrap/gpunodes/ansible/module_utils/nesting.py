"""How deeply a document from elsewhere is nested. Shared with the controller."""

from __future__ import annotations

from typing import Any

LEVELS = 50
"""Levels that a document may have; the configuration of a kubelet has fewer than ten, DMTF's schemas a dozen."""


def is_deep(document: dict[str, Any]) -> bool:
    """Whether an object of JSON has more than ``LEVELS`` levels.

    ``json`` raises RecursionError only where the stack ends: what it has read may be too deep to be written later.
    """
    level: list[dict[str, Any] | list[Any]] = [document]
    depth = 0
    while level and depth <= LEVELS:
        depth += 1
        level = [
            each
            for one in level
            for each in (one.values() if isinstance(one, dict) else one)
            if isinstance(each, (dict, list))
        ]
    return depth > LEVELS
