"""Drain a node by the Eviction API, within a time limit. Disruption budgets are respected; pods of DaemonSets stay."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.pods import Pod
from gpunodes.repair import flow
from gpunodes.repair.flow import DrainResult

_POLL_S = 2.0
_RETRY_S = 5.0
"""Between two attempts to evict a pod that a disruption budget protects."""


def drain(
    cluster: Cluster,
    node: str,
    limit_s: float,
    *,
    force: bool,
    check: Callable[[], None] = lambda: None,
    chosen: Callable[[Pod], bool] = lambda _: True,
) -> DrainResult:
    """Evict the ``chosen`` pods and wait until they terminate, at most ``limit_s`` seconds.

    With ``force`` the remaining pods are then deleted, regardless of budgets and of the kubelet. ``check`` is called in
    each round and before that deletion; it may raise to stop.
    """
    deadline = time.monotonic() + limit_s
    refused: dict[str, flow.RemainingPod] = {}
    retry = 0.0
    while True:
        check()
        pods = _leaving(cluster, node, chosen)
        managed = [pod for pod in pods if pod.owner]
        alone = [_alone(pod) for pod in pods if not pod.owner]
        to_evict = [pod for pod in managed if not pod.ending]
        if time.monotonic() >= retry:
            refused = {}
            for pod in to_evict:
                if why := cluster.evict(pod):
                    refused[pod.uid] = flow.RemainingPod(pod.full_name, why)
            retry = time.monotonic() + _RETRY_S
        if not managed:
            return DrainResult(unmanaged=alone)
        if time.monotonic() > deadline:
            break
        time.sleep(min(_POLL_S, max(0.1, limit_s / 10)))
    protected = {pod.uid: refused[pod.uid] for pod in managed if pod.uid in refused and not pod.ending}
    terminating = [
        flow.RemainingPod(pod.full_name, "it does not terminate") for pod in managed if pod.uid not in protected
    ]
    if force:
        check()
        for pod in managed:
            cluster.delete_now(pod)
        return DrainResult(deleted=[*protected.values(), *terminating], unmanaged=alone)
    return DrainResult(list(protected.values()), terminating, unmanaged=alone)


def unmanaged(cluster: Cluster, node: str, chosen: Callable[[Pod], bool] = lambda _: True) -> list[flow.RemainingPod]:
    """The ``chosen`` pods that nothing would start elsewhere, without those that end already.

    A drain that does not count without them reads this first: otherwise it would evict all others in vain.
    """
    return [_alone(pod) for pod in _leaving(cluster, node, chosen) if not pod.owner and not pod.ending]


def _leaving(cluster: Cluster, node: str, chosen: Callable[[Pod], bool]) -> list[Pod]:
    return [pod for pod in cluster.pods_on(node) if must_leave(pod) and chosen(pod)]


def _alone(pod: Pod) -> flow.RemainingPod:
    return flow.RemainingPod(pod.full_name, "it has no controller")


def must_leave(pod: Pod) -> bool:
    """Whether a pod must leave: mirror pods, finished pods and pods of DaemonSets stay."""
    return not (pod.mirror or pod.finished or pod.owner == "DaemonSet")
