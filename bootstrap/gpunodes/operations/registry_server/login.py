"""The login at the registry of the cluster, which its Secret has."""

from __future__ import annotations

import re

from gpunodes.engine import control_planes
from gpunodes.engine.registry.objects import RegistryServer
from gpunodes.inventory import Inventory
from gpunodes.operations.registry_server.commands import credentials
from gpunodes.planner.registry import PORT

_OWN = re.compile(rf"(\d{{1,3}}\.){{3}}\d{{1,3}}:{PORT}")
"""The form of its address: the cluster is not asked about other registries."""


def stored(inventory: Inventory, server: str) -> tuple[str, str] | None:
    """User and password of the cluster's registry; None if ``server`` is another one."""
    if not _OWN.fullmatch(server):
        return None
    with control_planes.connected(inventory, RegistryServer) as api:
        public = api.public() if api.has_namespace() else None
        if public is None or public.address != server:
            return None
        own = credentials(api)
    return own.user, own.password
