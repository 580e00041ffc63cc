"""When the pods of an add-on count as running: all of them are well for a while, and no container ends meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

SETTLE_S = 20.0
"""How long all must be well: the kubelet reports every 10 s that a device plugin's GPUs are gone. A program that ends
is started again at once, at first, and then its pod looks ready."""


class Settling:
    """What several looks at the same pods have shown."""

    def __init__(self) -> None:
        self._restarts: dict[tuple[str, str], int] = {}
        self._since: float | None = None

    def problem(self, why: str, pods: Iterable[Mapping[str, Any]]) -> str:
        """``why`` they are not well now; if they are, which pod had a container that ended since the last look."""
        again = [found for pod in pods for found in self._again(pod)]
        return why or (again[0] if again else "")

    def is_over(self, why: str, now: float) -> bool:
        """Whether all has been well long enough at the time ``now`` in seconds; ``why`` is what is not well."""
        if why:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= SETTLE_S

    def _again(self, pod: Mapping[str, Any]) -> Iterable[str]:
        status = pod.get("status") or {}
        for container in [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]:
            key = (str(pod["metadata"].get("uid")), str(container.get("name")))
            count = int(container.get("restartCount") or 0)
            if count > self._restarts.get(key, count):
                ended = (container.get("lastState") or {}).get("terminated") or {}
                reason = f": exit code {ended.get('exitCode')}: {ended.get('message') or ended.get('reason')}"
                yield f"pod {pod['metadata']['name']}: a container was started again{reason if ended else ''}"
            self._restarts[key] = count
