"""The last look at a node before its machine is switched off.

The autoscaler drained it. But an autoscaler that starts anew takes its taints away, and pods may be back by then.
"""

from __future__ import annotations

from gpunodes.autoscale import nodes, proof
from gpunodes.autoscale.store import Store
from gpunodes.errors import GpunodesError
from gpunodes.operations.drain import must_leave

_SHOWN = 3
"""Pods that a reason names."""


class StillUsed(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """A machine that was to be switched off is in use, or others work on it."""


def keep_empty(store: Store, name: str) -> None:
    """Keep new pods off a node, and check that none is left; raises StillUsed if pods run there."""
    store.change(name, nodes.stopping)
    pods = [pod.full_name for pod in store.pods_on(name) if must_leave(pod) and pod.namespace != proof.NAMESPACE]
    if pods:
        raise StillUsed(f"pods run on it: {', '.join(pods[:_SHOWN])}")
