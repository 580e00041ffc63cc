"""The users of a cluster, as a table and as a JSON document."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any, Protocol

from gpunodes.views import document, text


class Binding(Protocol):
    """A role of a user; those of operations/users.py fit."""

    @property
    def namespace(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def users(self) -> Sequence[str]: ...
    @property
    def end(self) -> float | None: ...


def table(found: Sequence[Binding], columns: int | None) -> str:
    """A row for each role of each user."""
    rows = [("USER", "ROLE", "NAMESPACE", "CERTIFICATE ENDS")]
    rows += [(each.users[0], each.role, each.namespace or "all", date(each.end)) for each in found]
    return text.table(rows, columns)


def rows_of(found: Sequence[Binding]) -> list[dict[str, Any]]:
    """The same for a document."""
    return [
        {"user": each.users[0], "role": each.role, "namespace": each.namespace or None, "end": each.end}
        for each in found
    ]


def dump(found: Sequence[Binding], removed: Sequence[Binding] = ()) -> str:
    """``gpunodes.users/1``"""
    return document.dump({"schema": "gpunodes.users/1", "users": rows_of(found), "removed": rows_of(removed)})


def date(moment: float | None) -> str:
    """The end of a certificate."""
    return dt.datetime.fromtimestamp(moment, dt.UTC).strftime("%Y-%m-%d %H:%M UTC") if moment else "-"
