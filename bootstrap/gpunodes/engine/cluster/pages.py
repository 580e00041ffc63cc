"""Lists of the API, requested in pages: a user of one namespace can make objects that fill a response."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from gpunodes.engine.cluster.connection import Response
from gpunodes.engine.cluster.errors import Refused, TooLarge, invalid

AT_ONCE = 500
"""Objects of one page, as kubectl has it."""
PODS_AT_ONCE = 50
"""Pods of one page: their users decide how large they are, up to some megabytes each as JSON."""
_FEWER = 4
_GONE = 410
_STARTS = 3
_MOST_PAGES = 20_000


class Listed(NamedTuple):
    """All objects of a list, and the control plane's time when they were so, in seconds since 1970."""

    items: list[dict[str, Any]]
    time: float


def field(*names: str) -> str:
    """The path of a field of an object, for the ``keep`` of a request; its names may have dots."""
    return ".".join(each.replace(".", r"\.") for each in names)


def read_all(read: Callable[[str], Response], path: str, at_once: int = AT_ONCE) -> Listed:
    """All objects of a list, with the time of the first page; ``read`` requests a path.

    If a page is too large, fewer objects are requested at once. All pages are of one moment: if the API server has
    forgotten it, the list is read again. Raises as ``read``, TooLarge only for a single object, and NoResponse for a
    list without an end.
    """
    for start in range(1, _STARTS + 1):
        try:
            return _read(read, path, at_once)
        except Refused as error:
            if error.status != _GONE or start == _STARTS:
                raise
    raise AssertionError  # the last attempt returns or raises


def _read(read: Callable[[str], Response], path: str, at_once: int) -> Listed:
    items: list[dict[str, Any]] = []
    moment, token = 0.0, ""
    for _ in range(_MOST_PAGES):
        try:
            page = read(_path(path, at_once, token))
        except TooLarge:
            if at_once == 1:
                raise
            at_once = max(1, at_once // _FEWER)
            continue
        moment = moment or page.time
        items += page.body["items"]
        token = _token(page.body)
        if not token:
            return Listed(items, moment)
    raise invalid(f"the list {path.partition('?')[0]} has no end")


def _path(path: str, at_once: int, token: str) -> str:
    more = f"{'&' if '?' in path else '?'}limit={at_once}"
    return f"{path}{more}&continue={quote(token, safe='')}" if token else f"{path}{more}"


def _token(body: Mapping[str, Any]) -> str:
    """What the API server needs to continue the list, "" at its end."""
    metadata = body.get("metadata")
    return str((metadata.get("continue") if isinstance(metadata, Mapping) else "") or "")
