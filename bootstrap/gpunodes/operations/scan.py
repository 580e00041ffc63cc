"""Scan live machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from gpunodes.engine import scans
from gpunodes.engine.scans import ScanTarget
from gpunodes.health.model import Verdict
from gpunodes.operations import switched_off
from gpunodes.repair.switched_off import Switched


class ScanView(Protocol):
    """A view of a running scan."""

    def begin(self, names: Sequence[str]) -> None:
        """The scan of these machines begins."""

    def scanned(self, verdict: Verdict) -> None:
        """The verdict on one machine is known."""


def run(
    machines: Sequence[ScanTarget],
    view: ScanView,
    *,
    deadline_s: float | None,
    parallel: int,
    cluster: str,
    off: Mapping[str, Switched],
) -> list[Verdict]:
    """The verdict on each machine, in their order; ends after ``deadline_s`` seconds.

    Their identities are recorded for ``cluster``, if given. Those in ``off`` are off on purpose.
    """
    view.begin([machine.target.name for machine in machines])

    def on_scan(verdict: Verdict) -> None:
        view.scanned(switched_off.marked(verdict, off))

    found = scans.scan(machines, deadline_s=deadline_s, parallel=parallel, cluster=cluster, on_scan=on_scan)
    return [switched_off.marked(seen.verdict, off) for seen in found.values()]
