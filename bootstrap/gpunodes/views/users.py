"""The users of a cluster, as a table and as a JSON document."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any, Protocol

from gpunodes.model import printable
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


class Remains(Protocol):
    """What there is in a namespace where a user had rights; None: unknown."""

    @property
    def namespace(self) -> str: ...
    @property
    def workloads(self) -> int | None: ...
    @property
    def tokens(self) -> int | None: ...
    @property
    def bindings(self) -> int | None: ...


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


def remains(user: str, found: Sequence[Remains]) -> str:
    """What a user who was removed may have left in these namespaces."""
    lines = [f"{_counts(each)}: what {user} made there stays and acts as before" for each in found]
    last = (
        f"tokens that {user} requested for service accounts there are valid until their end, and passwords in Secrets "
        "until they are changed: see `gpunodes help --page users`"
    )
    return "\n".join(map(printable, (*lines, last)))


def _counts(found: Remains) -> str:
    where = f"the namespace {found.namespace}" if found.namespace else "all namespaces"
    if found.workloads is None or found.tokens is None or found.bindings is None:
        return f"the cluster did not say what is in {where}"
    secrets = f"{_number(found.tokens, 'Secret')} of the type kubernetes.io/service-account-token"
    bindings = f"{_number(found.bindings, 'RoleBinding')} that gpunodes did not make"
    return f"in {where} are {_number(found.workloads, 'workload')}, {secrets} and {bindings}"


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def dump(found: Sequence[Binding], removed: Sequence[Binding] = (), left: Sequence[Remains] = ()) -> str:
    """``gpunodes.users/1``"""
    stays = [
        {
            "namespace": each.namespace or None,
            "workloads": each.workloads,
            "tokens": each.tokens,
            "bindings": each.bindings,
        }
        for each in left
    ]
    rows = {"users": rows_of(found), "removed": rows_of(removed), "stays": stays}
    return document.dump({"schema": "gpunodes.users/1", **rows})


def date(moment: float | None) -> str:
    """The end of a certificate."""
    return dt.datetime.fromtimestamp(moment, dt.UTC).strftime("%Y-%m-%d %H:%M UTC") if moment else "-"
