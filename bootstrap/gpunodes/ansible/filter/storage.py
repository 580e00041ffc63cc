"""Filters of the roles for shared storage."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import gpunodes.planner.tables as _  # noqa: F401 - checks whether the package is installed
except ModuleNotFoundError:
    # From a checkout, or from the built collection, which brings the parts of the package that this file imports.
    _HERE = Path(__file__).resolve()
    sys.path[:0] = [str(_HERE.parents[3]), str(_HERE.parents[1] / "plugin_utils")]

from ansible.errors import AnsibleFilterError


def _checked(function: Callable[..., Any], *given: Any) -> Any:
    """What a function of planner/storage.py returns, as plain data; fails with its sentence for a wrong setting."""
    from gpunodes.errors import WrongInput

    try:
        return json.loads(json.dumps(function(*given), default=dataclasses.asdict))
    except WrongInput as error:
        raise AnsibleFilterError(str(error)) from error


def storage_servers(shares: Sequence[Mapping[str, Any]], group: Sequence[str]) -> list[str]:
    """The machines in the group storage, if they serve a share."""
    from gpunodes.planner import storage

    return list(group) if _checked(storage.serves, shares, [storage.GROUP]) else []


def storage_address(node_address: str, reached: str) -> str:
    """The address at which nodes mount from the machine of the group storage."""
    from gpunodes.planner import storage

    return storage.address(reached, node_address)


def storage_objects(shares: Sequence[Mapping[str, Any]], server: str) -> list[dict[str, Any]]:
    """The policy for pods, volumes and claims; ``server`` is the address of the machine of the group storage."""
    from gpunodes.planner import storage, storage_access

    found: list[dict[str, Any]] = _checked(storage.objects, shares, server)
    # First: it is deleted last.
    return [*storage_access.policy(storage.LABELS), *found] if shares else found


def storage_claims(shares: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The claims of the shares, with namespace and name."""
    from gpunodes.planner import storage

    found: list[dict[str, str]] = _checked(storage.claims, shares)
    return found


def storage_hosts(shares: Sequence[Mapping[str, Any]], server: str) -> list[str]:
    """The NFS servers of the shares, each once."""
    from gpunodes.planner import storage

    found: list[str] = _checked(storage.servers, shares, server)
    return found


def storage_folders(shares: Sequence[Mapping[str, Any]], server: str) -> list[str]:
    """SERVER:PATH of the shares, as mounts have it."""
    from gpunodes.planner import storage

    found: list[str] = _checked(storage.folders, shares, server)
    return found


def nfs_server(
    facts: Mapping[str, Any], shares: Sequence[Mapping[str, Any]], addresses: Sequence[str]
) -> dict[str, Any]:
    """What the machine of the group storage gets: ``software``, ``exports``, ``firewall`` and ``folders``."""
    from gpunodes.planner import storage

    found: dict[str, Any] = _checked(storage.server, facts["package_manager"], shares, addresses)
    return found


class FilterModule:
    """The filters, as Ansible looks them up."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "nfs_server": nfs_server,
            "storage_address": storage_address,
            "storage_claims": storage_claims,
            "storage_folders": storage_folders,
            "storage_hosts": storage_hosts,
            "storage_objects": storage_objects,
            "storage_servers": storage_servers,
        }
