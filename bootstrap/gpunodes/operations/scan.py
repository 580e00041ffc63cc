"""Scan live machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpunodes.engine import scans
from gpunodes.engine.scans import ScanTarget
from gpunodes.health.model import Verdict


class ScanView(Protocol):
    """A view of a running scan."""

    def begin(self, names: Sequence[str]) -> None:
        """The scan of these machines begins."""

    def scanned(self, verdict: Verdict) -> None:
        """The verdict on one machine is known."""


def run(
    machines: Sequence[ScanTarget], view: ScanView, *, deadline_s: float | None, parallel: int, cluster: str
) -> list[Verdict]:
    """The verdict on each machine, in their order; ends after ``deadline_s`` seconds.

    Their identities are recorded for ``cluster``, if given.
    """
    view.begin([machine.target.name for machine in machines])
    found = scans.scan(machines, deadline_s=deadline_s, parallel=parallel, cluster=cluster, on_scan=view.scanned)
    return [seen.verdict for seen in found.values()]
