"""The login at the registry of the cluster, which its Secret has."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

from gpunodes.engine import control_planes
from gpunodes.engine.registry.objects import RegistryServer
from gpunodes.inventory import Inventory
from gpunodes.operations.registry_server import logins
from gpunodes.operations.registry_server.commands import credentials
from gpunodes.planner.registry import PORT

_OWN = re.compile(rf"(\d{{1,3}}\.){{3}}\d{{1,3}}:{PORT}")
"""The form of its address: the cluster is not asked about other registries."""


def stored(inventory: Inventory, server: str) -> tuple[str, str] | None:
    """User and password of the cluster's registry; None if ``server`` is another one."""
    with _at(inventory, server) as api:
        if api is None:
            return None
        own = credentials(api)
    return own.user, own.password


def record(inventory: Inventory, server: str, namespaces: Sequence[str]) -> None:
    """Record that namespaces got a login at the cluster's registry; nothing if ``server`` is another one."""
    with _at(inventory, server) as api:
        if api is not None:
            logins.record(api, server, namespaces)


def forget(inventory: Inventory, server: str, namespaces: Sequence[str]) -> bool:
    """Delete the records of these namespaces, of all by default; False if ``server`` is another registry."""
    with _at(inventory, server) as api:
        if api is not None:
            logins.forget(api, namespaces)
        return api is not None


@contextlib.contextmanager
def _at(inventory: Inventory, server: str) -> Iterator[RegistryServer | None]:
    """The registry of the cluster; None if ``server`` is another one."""
    if not _OWN.fullmatch(server):
        yield None
        return
    with control_planes.connected(inventory, RegistryServer) as api:
        public = api.public() if api.has_namespace() else None
        yield api if public is not None and public.address == server else None
