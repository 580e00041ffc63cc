"""The volumes and claims of shared storage in the cluster, and the pods that use them; read over the session."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from gpunodes.ansible.module_utils.cluster.storage import is_leftover
from gpunodes.engine import control_planes
from gpunodes.engine.cluster.api import Api
from gpunodes.engine.cluster.pages import PODS_AT_ONCE
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.planner import storage

_VOLUMES = "/api/v1/persistentvolumes"
_POD_FIELDS = (
    "metadata.name",
    "metadata.namespace",
    "metadata.labels",
    "spec.volumes.persistentVolumeClaim",
    "status.phase",
)
_RELEASED = ("Released", "Failed")
_GONE_S = 60.0


class Objects(Api):
    """The cluster as `gpunodes storage` sees it. The methods raise as those of ``Api``."""

    def present(self, wanted: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], Any]:
        """Those of the ``wanted`` objects that exist, by kind, namespace and name."""
        found = {}
        for each in wanted:
            meta = each["metadata"]
            namespace = str(meta.get("namespace") or "")
            if (old := self._find(path_of(each["kind"], namespace, meta["name"]))) is not None:
                found[each["kind"], namespace, meta["name"]] = old
        return found

    def check_namespaces(self, names: Sequence[str]) -> None:
        """Raise WrongInput for namespaces that do not exist."""
        if missing := [name for name in names if self._find(f"/api/v1/namespaces/{name}") is None]:
            raise WrongInput(
                f"{storage.SETTING} names the namespace {missing[0]}, which the cluster does not have",
                "namespaces that exist",
                f"`kubectl create namespace {missing[0]}`, or correct the setting",
            )

    def own(self) -> tuple[list[Any], list[Any]]:
        """The volumes and the claims of gpunodes."""
        query = f"labelSelector={quote(storage.SELECTOR)}"
        claims = [each for each in self._list(f"/api/v1/persistentvolumeclaims?{query}") if storage.is_claim(each)]
        return self._list(f"{_VOLUMES}?{query}"), claims

    def users(self, claims: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[Any]]:
        """The pods that use these claims, NAMESPACE/NAME, and those that an interrupted verification left."""
        used = {(str(each["metadata"].get("namespace")), str(each["metadata"]["name"])) for each in claims}
        pods = []
        for namespace in sorted({namespace for namespace, _ in used}):
            path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods"
            pods += self._list(path, _POD_FIELDS, PODS_AT_ONCE)
        left = [each for each in pods if is_leftover(each)]
        return storage.users((each for each in pods if each not in left), used), left

    def delete_released(self, present: Mapping[tuple[str, str, str], Any]) -> list[str]:
        """Delete volumes whose claim was deleted: they bind none again. The data stays. Returns their names.

        Raises GpunodesError if one is not gone after a minute: an object that is applied meanwhile would go with it.
        """
        names = [
            name
            for (kind, _, name), each in present.items()
            if kind == "PersistentVolume" and (each.get("status") or {}).get("phase") in _RELEASED
        ]
        for name in names:
            self._call("DELETE", path_of("PersistentVolume", "", name))
        deadline = time.monotonic() + _GONE_S
        while left := [name for name in names if self._find(path_of("PersistentVolume", "", name)) is not None]:
            if time.monotonic() > deadline:
                raise GpunodesError(
                    f"the PersistentVolume {left[0]} is being deleted, and is still there after {_GONE_S:.0f} s",
                    "a volume that is gone",
                    f"see `kubectl describe pv {left[0]}`, then run the same command again",
                )
            time.sleep(1)
        return names


def connected(inventory: Inventory) -> contextlib.AbstractContextManager[Objects]:
    """A session with the API while inside; raises NoResponse without one."""
    return control_planes.connected(inventory, Objects)


def path_of(kind: str, namespace: str, name: str) -> str:
    """The path of a volume or a claim in the API."""
    if kind == "PersistentVolume":
        return f"{_VOLUMES}/{quote(name, safe='')}"
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/persistentvolumeclaims/{quote(name, safe='')}"
