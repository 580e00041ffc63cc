"""What of the storage server would be taken away from volumes that exist, and what stays behind on an earlier one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpunodes.errors import WrongInput
from gpunodes.planner import registry, storage


def departed(value: Any, server: str, volumes: Sequence[Mapping[str, Any]]) -> list[WrongInput]:
    """Volumes of folders that ``server`` exports for shares which have left the setting: their pods would hang."""
    served = set(storage.folders(value, server))
    kept = [
        each
        for each in volumes
        for source in storage.sources([each])
        if source.startswith(f"{server}:") and source not in served
    ]
    return [
        WrongInput(
            f"{storage.SETTING} no longer has the share of {storage.sources([each])[0]}, and the cluster has the "
            f"PersistentVolume {each['metadata']['name']} of it",
            "a folder that is served while a volume of it exists",
            f"put the share back; or end what uses it: {_removal(each)}",
        )
        for each in kept
    ]


def _removal(volume: Mapping[str, Any]) -> str:
    """The commands that delete a volume and its claim; the claim stays while a pod uses it."""
    claim = volume["spec"].get("claimRef") or {}
    if claim.get("namespace") == registry.NAMESPACE:
        return "`gpunodes registry down`"
    name = volume["metadata"]["name"]
    return f"`kubectl delete pvc -n {claim.get('namespace')} {claim.get('name')}`, then `kubectl delete pv {name}`"


def folders(value: Any, addresses: Sequence[str]) -> list[str]:
    """SERVER:PATH of the shares of a setting; those of the group storage with each of its addresses."""
    return [folder for address in addresses or [""] for folder in storage.folders(value, address)]


def behind(value: Any, addresses: Sequence[str], volumes: Sequence[Mapping[str, Any]]) -> str:
    """What to do for servers of volumes that are neither in the group storage nor in the setting; "" for none.

    One of them may be a machine that was in the group before: `storage down` undoes those that are.
    """
    known = {*addresses, *(each.server for each in storage.shares(value))}
    left = dict.fromkeys(source.partition(":")[0] for source in storage.sources(volumes))
    names = ", ".join(name for name in left if name not in known)
    if not names:
        return ""
    return (
        f"warning: volumes are of {names}, which the group {storage.GROUP} does not have: if gpunodes made that machine"
        " serve, put it back into the group and run the command again, or its exports and NFS server stay"
    )
