"""The proof that the GPUs of a node that has just started work: a pod that gets all of them, before any other may."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from gpunodes.ansible.module_utils import devices
from gpunodes.ansible.module_utils.cluster.nodes import GPU_BOOT, pod_problem
from gpunodes.autoscale.nodes import SeenNode
from gpunodes.autoscale.store import Store
from gpunodes.errors import GpunodesError
from gpunodes.model import printable

NAMESPACE = "gpunodes-proof"
"""Its pods have no rights, and it has no Secrets: the power server's account may create pods only there."""
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
_LIMIT_S = 900
AT_ONCE = 2
"""Proofs at once. A kubelet may keep each waiting for a log; two of the session's four requests are left for others."""


class NotProven(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """The pod ended, and its GPUs did not work."""


def proven(store: Store, found: SeenNode, image: str) -> str:
    """Go on with the proof of a node; returns what it waits for, "" when its GPUs have worked in this boot.

    The pod is deleted then. Raises NotProven if it failed; the next call starts another one.
    """
    wanted, path = _limits(found), f"{_PODS}/{_name(found)}"
    if not wanted or found.annotations.get(GPU_BOOT) == found.node.boot_id:
        store.delete_pod(path)
        return ""
    item = store.pod(path)
    if item is None:
        store.create_pod(_PODS, pod(found, image))
        return "a pod that uses its GPUs has not started yet"
    if (item.get("spec") or {}).get("nodeName") != found.node.name:
        # Another node made it, as a mirror pod: it proves nothing of this one.
        store.delete_pod(path)
        return "a pod of its name is on another node"
    phase = (item.get("status") or {}).get("phase")
    if phase not in ("Succeeded", "Failed"):
        return printable(pod_problem(item)) or "a pod that uses its GPUs has not ended"
    # nvidia-smi lists slices below their GPU, with separate identities (MIG-...).
    count = len(re.findall(r"UUID: GPU-", store.log(path)))
    if phase == "Failed" or not count or (_is_whole(found) and count != sum(wanted.values())):
        store.delete_pod(path)
        what = printable(pod_problem(item)) if phase == "Failed" else f"its nvidia-smi lists {count} GPUs"
        raise NotProven(f"a pod that requests its {_text(wanted)} fails: {what}")
    store.change(found.node.name, lambda _: {"metadata": {"annotations": {GPU_BOOT: found.node.boot_id}}})
    store.delete_pod(path)
    return ""


def pod(found: SeenNode, image: str) -> dict[str, Any]:
    """A pod on a node, past the scheduler, that lists the GPUs it gets: all, or one share of each kind."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": _name(found), "labels": {"app.kubernetes.io/managed-by": "gpunodes"}},
        "spec": {
            "nodeName": found.node.name,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _LIMIT_S,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65534,
                "runAsGroup": 65534,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "proof",
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["nvidia-smi", "-L"],
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                    "resources": {"limits": {name: str(count) for name, count in _limits(found).items()}},
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }


def _offered(found: SeenNode) -> dict[str, int]:
    return {name: count for name, count in devices.counts(found.resources).items() if count}


def _limits(found: SeenNode) -> Mapping[str, int]:
    offered = _offered(found)
    # Plugins may refuse a pod that requests several shares of one GPU.
    return offered if _is_whole(found) else dict.fromkeys(offered, 1)


def _is_whole(found: SeenNode) -> bool:
    """Whether the node offers GPUs, not shares or slices of them."""
    offered = _offered(found)
    return set(offered) == {devices.GPU} and found.node.labelled in (None, offered[devices.GPU])


def _text(wanted: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in wanted.items())


def _name(found: SeenNode) -> str:
    """One for each boot: a pod of an earlier one proves nothing."""
    return f"proof-{hashlib.sha256(f'{found.node.name} {found.node.boot_id}'.encode()).hexdigest()[:20]}"
