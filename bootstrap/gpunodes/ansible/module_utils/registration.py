"""What changes at a node whose machine registers it by itself: its providerID, and the starting taint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import kube_api, kubeconfig
from .kube_api import ApiError
from .problem import MachineProblem
from .report import Difference

STARTING = "gpunodes.dev/starting"
"""Key of the taint with which such a node registers, until it is verified (planner/registration.py)."""
_CONFLICT = 409


def identify(name: str, provider_id: str, check: bool) -> list[Difference]:
    """Set a node's providerID; returns the differences, none if it has that already, or if the node does not exist.

    Raises MachineProblem if it has another one: the API allows the change from an empty one only.
    """

    def change(spec: Mapping[str, Any]) -> tuple[dict[str, Any], Difference] | None:
        found = spec.get("providerID") or ""
        if found == provider_id:
            return None
        if found:
            raise MachineProblem(
                f"the node {name} has the providerID {str(found)[:100]}",
                f"none, or {provider_id}: the API never changes it",
                "take the machine out of the pools with max, or remove it from the cluster and join it again",
            )
        title, before = f"Node {name}", {"providerID": ""}
        return {"providerID": provider_id}, Difference(title, before, {"providerID": provider_id})

    return _patch(name, change, check)


def start(name: str, check: bool) -> list[Difference]:
    """Remove the starting taint; returns the differences, none if the node does not have it, or does not exist."""

    def change(spec: Mapping[str, Any]) -> tuple[dict[str, Any], Difference] | None:
        taints = spec.get("taints") or []
        kept = [taint for taint in taints if taint.get("key") != STARTING]
        if len(kept) == len(taints):
            return None
        difference = Difference(f"Node {name}", {"taints": [{"key": STARTING, "effect": "NoSchedule"}]}, {"taints": []})
        return {"taints": kept or None}, difference

    return _patch(name, change, check)


def is_starting(node: Mapping[str, Any]) -> bool:
    """Whether a Node object has the starting taint."""
    return any(taint.get("key") == STARTING for taint in (node.get("spec") or {}).get("taints") or ())


def _patch(
    name: str, change: Callable[[Mapping[str, Any]], tuple[dict[str, Any], Difference] | None], check: bool
) -> list[Difference]:
    if check and kubeconfig.load(kubeconfig.ADMIN) is None:
        return []
    client = kube_api.admin()
    while True:
        node = client.find(f"/api/v1/nodes/{name}")
        made = change(node.get("spec") or {}) if node is not None else None
        if node is None or made is None:
            return []
        spec, difference = made
        # The patch replaces the whole list of taints: it must fail if the node was changed meanwhile.
        patch = {"metadata": {"resourceVersion": node["metadata"]["resourceVersion"]}, "spec": spec}
        try:
            if not check:
                client.call("PATCH", f"/api/v1/nodes/{name}", patch, {"fieldManager": kube_api.MANAGER}, kube_api.MERGE)
        except ApiError as error:
            if error.status != _CONFLICT:
                raise
        else:
            return [difference]
