"""What a pod asks for that keeps a machine of a pool free for pods to come. Pure.

The scheduler lets any other pod take its place (its priority is negative), and the autoscaler switches a machine on
when it fits nowhere. So it must fit on a machine on which only DaemonSets have pods, and on no machine with other pods.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpunodes.ansible.module_utils import devices
from gpunodes.errors import WrongInput
from gpunodes.planner.node_templates import amount

_SLACK = 0.05
"""The part of its memory that a machine may have less after another boot."""
_MOST_OF_DAEMONS = 0.5
"""The part of a machine that is left to DaemonSets at most: many users may make one."""
_MIB = 1 << 20
_OF_KUBELET = ("kubernetes.io/", "beta.kubernetes.io/")
"""Labels that a kubelet sets on its node; not all of them are known of a node that is to come."""


def resources(
    pool: str, capacities: Sequence[Mapping[str, str]], daemons: Iterable[Mapping[str, Any]], labels: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """The resources of a container that fills the smallest machine of a pool: its GPUs, else its CPU and memory.

    ``capacities`` are what pods get of the pool's machines, ``daemons`` the DaemonSets of the cluster, ``labels`` those
    of the pool's next node. One that offers none now counts not. Raises WrongInput if nothing is known of any.
    """
    counts = [devices.counts(each).get(devices.GPU, 0) for each in capacities]
    if gpus := min(filter(None, counts), default=0):
        return {"limits": {devices.GPU: gpus}}
    pods = [pod for each in daemons if _runs(pod := each["spec"]["template"]["spec"], labels)]
    cpu = _left([amount(each.get("cpu", "")) for each in capacities], [_requested(pod, "cpu") for pod in pods])
    memory = _left(
        [amount(each.get("memory", "")) * (1 - _SLACK) for each in capacities],
        [_requested(pod, "memory") for pod in pods],
    )
    if not cpu or not memory:
        raise WrongInput(
            f"the pool {pool} of gpunodes_pools has spare machines, and CPU and memory of none of its machines are "
            "known",
            "a machine of it whose node was seen",
            "`gpunodes power NAME on --wait` for one of its machines, then the same command again; or set its spare "
            "to 0",
        )
    return {"requests": {"cpu": f"{math.floor(cpu * 1000 + 1e-6)}m", "memory": f"{math.floor(memory / _MIB)}Mi"}}


def _left(offered: Sequence[float], requested: Sequence[float]) -> float:
    """What DaemonSets leave of the smallest amount; 0 if none is known."""
    least = min(filter(None, offered), default=0.0)
    # One that requests more than there is does not run there.
    return max(least - sum(each for each in requested if each < least), least * (1 - _MOST_OF_DAEMONS))


def _runs(pod: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a pod of a DaemonSet may run on a node with these labels, by its node selector."""
    selector = pod.get("nodeSelector") or {}
    return all(
        labels.get(key) == text or (key not in labels and key.startswith(_OF_KUBELET)) for key, text in selector.items()
    )


def _requested(pod: Mapping[str, Any], name: str) -> float:
    """How much of a resource a pod requests (kubernetes.io, "Init Containers", "Sidecar Containers")."""
    first = pod.get("initContainers") or ()
    stay = [each for each in first if each.get("restartPolicy") == "Always"]
    together = sum(_of_container(each, name) for each in (*(pod.get("containers") or ()), *stay))
    return max([together, *(_of_container(each, name) for each in first)])


def _of_container(container: Mapping[str, Any], name: str) -> float:
    found = container.get("resources") or {}
    # A limit without a request is one.
    return amount(str((found.get("requests") or {}).get(name) or (found.get("limits") or {}).get(name) or ""))
