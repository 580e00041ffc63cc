"""Logins at image registries, as a table and as a JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gpunodes.views import document, text

UNTIL_RESTART = "pods with its images run until a container restarts: from Kubernetes 1.35 on that needs the login"
STILL_VALID = "who has read the password there can still use it: `gpunodes registry up --new-password` ends it"


class Login(Protocol):
    """A login in one namespace."""

    @property
    def namespace(self) -> str: ...
    @property
    def secret(self) -> str: ...
    @property
    def server(self) -> str: ...
    @property
    def user(self) -> str: ...
    @property
    def is_used(self) -> bool: ...


def table(found: Sequence[Login], columns: int | None) -> str:
    """A row for each namespace of each registry."""
    rows = [("REGISTRY", "NAMESPACE", "USER", "SECRET", "DEFAULT ACCOUNT")]
    rows += [
        (each.server, each.namespace, each.user, each.secret, "uses it" if each.is_used else "does not use it")
        for each in found
    ]
    return text.table(rows, columns)


def dump(found: Sequence[Login], removed: Sequence[Login] = ()) -> str:
    """``gpunodes.registries/1``"""
    return document.dump({"schema": "gpunodes.registries/1", "logins": _rows(found), "removed": _rows(removed)})


def _rows(found: Sequence[Login]) -> list[dict[str, Any]]:
    return [
        {
            "registry": each.server,
            "namespace": each.namespace,
            "user": each.user,
            "secret": each.secret,
            "used": each.is_used,
        }
        for each in found
    ]
