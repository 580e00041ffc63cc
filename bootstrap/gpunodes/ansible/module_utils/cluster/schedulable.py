"""Whether ordinary pods may run on a control-plane node: kubeadm's taint, removed and restored.

An annotation of the node records that gpunodes removed the taint. Only then does it restore it: a user who removed the
taint keeps that.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from .. import kube_api, pools
from ..kube_api import ApiError, Client
from ..problem import MachineProblem
from ..report import Difference

TAINT = "node-role.kubernetes.io/control-plane"
_EFFECT = "NoSchedule"
REMOVED = "gpunodes.dev/control-plane-taint"
"""Node annotation, ``removed``: gpunodes removed the taint."""
ACTIONS = {
    True: "let pods run on the control plane",
    False: "keep pods away from the control plane again",
}
"""What ``converge`` does, by ``schedulable``."""
_CONFLICT = 409
_PAUSE_S = 1.0


def converge(client: Client, name: str, *, schedulable: bool, check: bool) -> Difference | None:
    """Remove or restore a control-plane node's taint; the difference, None if nothing has to change.

    Raises MachineProblem if ``schedulable`` and the node is not registered in time.
    """
    deadline = time.monotonic() + pools.REGISTERS_S
    while True:
        node = client.find(f"/api/v1/nodes/{name}")
        if node is None:
            if check or not schedulable:
                return planned() if schedulable else None
            if time.monotonic() > deadline:
                raise MachineProblem(
                    f"the cluster has no node {name}", "the control plane's node", "see `journalctl -u kubelet`"
                )
            time.sleep(_PAUSE_S)
            continue
        patch = patch_of(node, schedulable=schedulable)
        if patch is not None and not check:
            try:
                client.call("PATCH", f"/api/v1/nodes/{name}", patch, {"fieldManager": kube_api.MANAGER}, kube_api.MERGE)
            except ApiError as error:
                if error.status != _CONFLICT:
                    raise
                continue  # the node was changed meanwhile: read it again
        return None if patch is None else planned(schedulable=schedulable)


def planned(*, schedulable: bool = True) -> Difference:
    """The difference that ``converge`` makes."""
    tainted, free = {TAINT: _EFFECT}, {TAINT: "none"}
    return Difference("taint of the control plane", *((tainted, free) if schedulable else (free, tainted)))


def patch_of(node: Mapping[str, Any], *, schedulable: bool) -> dict[str, Any] | None:
    """The merge patch that removes or restores the taint, None if nothing has to change."""
    metadata, taints = node["metadata"], list(node.get("spec", {}).get("taints") or ())
    removed = (metadata.get("annotations") or {}).get(REMOVED) == "removed"
    others = [taint for taint in taints if (taint.get("key"), taint.get("effect")) != (TAINT, _EFFECT)]
    present = len(others) < len(taints)
    if not (present if schedulable else removed):
        return None
    wanted = others if schedulable else [*others, {"key": TAINT, "effect": _EFFECT}]
    return {
        # The patch replaces the whole list of taints: it must fail if the node was changed meanwhile.
        "metadata": {
            "resourceVersion": metadata["resourceVersion"],
            "annotations": {REMOVED: "removed" if schedulable else None},
        },
        "spec": {"taints": wanted or None},
    }
