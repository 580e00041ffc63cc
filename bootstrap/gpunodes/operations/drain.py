"""Empty a node by the Eviction API, within a limit. Disruption budgets are respected; pods of DaemonSets stay."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpunodes.engine.cluster import Cluster, Pod
from gpunodes.repair import flow
from gpunodes.repair.flow import DrainResult

_POLL_S = 2.0
_RETRY_S = 5.0
"""Between two attempts to evict a pod that a budget holds."""


def drain(
    cluster: Cluster,
    node: str,
    limit_s: float,
    *,
    force: bool,
    alive: Callable[[], None] = lambda: None,
) -> DrainResult:
    """Evict what can be evicted and wait for it, at most ``limit_s`` seconds.

    ``force`` deletes at the end what is left, without asking budgets or the node. ``alive`` is called in each round,
    and before that, and may raise to stop.
    """
    deadline = time.monotonic() + limit_s
    refused: dict[str, flow.RemainingPod] = {}
    asked: set[str] = set()
    retry = 0.0
    while True:
        alive()
        pods = [pod for pod in cluster.pods_on(node) if _leaves(pod)]
        going = [pod for pod in pods if pod.owner]
        alone = [flow.RemainingPod(pod.full_name, "it has no controller") for pod in pods if not pod.owner]
        waiting = [pod for pod in going if not pod.ending]
        if time.monotonic() >= retry:
            refused = {}
            for pod in waiting:
                if why := cluster.evict(pod):
                    refused[pod.uid] = flow.RemainingPod(pod.full_name, why)
                asked.add(pod.uid)
            retry = time.monotonic() + _RETRY_S
        if not going:
            return DrainResult(len(asked), alone=alone)
        if time.monotonic() > deadline:
            break
        time.sleep(min(_POLL_S, max(0.1, limit_s / 10)))
    held = {pod.uid: refused[pod.uid] for pod in going if pod.uid in refused and not pod.ending}
    ending = [flow.RemainingPod(pod.full_name, "it does not end") for pod in going if pod.uid not in held]
    if force:
        alive()
        for pod in going:
            cluster.delete_now(pod)
        return DrainResult(len(asked), deleted=[*held.values(), *ending], alone=alone)
    return DrainResult(len(asked - {pod.uid for pod in going}), list(held.values()), ending, alone=alone)


def _leaves(pod: Pod) -> bool:
    """Whether a pod has to leave: not those that belong to the node, nor those that have ended."""
    return not (pod.mirror or pod.finished or pod.owner == "DaemonSet")
