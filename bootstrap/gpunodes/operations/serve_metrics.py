"""Scan machines again and again, and serve the last scan as metrics."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpunodes.engine import metrics_server, scans
from gpunodes.errors import sentence
from gpunodes.health.model import ScanSummary
from gpunodes.inventory import Inventory
from gpunodes.operations import checked, scan_reports, switched_off


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What is scanned how often, and where it is served. Times are in seconds."""

    inventory: Path
    patterns: Sequence[str]
    listen: str
    interval_s: float
    deadline_s: float | None
    parallel: int


@dataclass(frozen=True, slots=True)
class MetricsFormat:
    """How metrics are written: their media type, and their text for a scan (None before the first), the number of
    scans that failed, and the time.
    """

    content_type: str
    text: Callable[[ScanSummary | None, int, float], str]


class _State:
    """The last scan; it is replaced while other threads read it."""

    def __init__(self) -> None:
        self.last: tuple[ScanSummary | None, int] = (None, 0)

    def succeeded(self, summary: ScanSummary) -> None:
        self.last = (summary, self.last[1])

    def failed(self) -> None:
        self.last = (self.last[0], self.last[1] + 1)


def run(options: ServeOptions, form: MetricsFormat, report: Callable[[str], None]) -> None:
    """Scan and serve until SIGTERM. A scan that fails is reported, and the last values stay.

    The inventory is read for each scan: machines are added to it. Raises WrongInput for one that is wrong at the
    beginning, and for an address that cannot be used.
    """
    at = metrics_server.address(options.listen)
    _targets(options)
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        _serve(options, at, form, report)
    except _Terminated:
        report("ended by SIGTERM")
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve(options: ServeOptions, at: tuple[str, int], form: MetricsFormat, report: Callable[[str], None]) -> None:
    state = _State()
    with metrics_server.serving(at, form.content_type, lambda: form.text(*state.last, time.time())) as shown:
        report(f"serving http://{shown}{metrics_server.PATH}")
        while True:
            began = time.monotonic()
            try:
                state.succeeded(_scan(options, began))
            except Exception as problem:
                # An inventory that is being edited, a full disk: the next scan may succeed.
                state.failed()
                report(f"the scan failed: {sentence(problem)}")
            time.sleep(max(0.0, began + options.interval_s - time.monotonic()))


class _Terminated(BaseException):
    """SIGTERM arrived; no handler of errors takes it for one."""


def _terminate(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Terminated


def _targets(options: ServeOptions) -> tuple[Inventory, Sequence[scans.ScanTarget]]:
    inventory = checked.inventory(options.inventory, checked.Needs.MACHINES)
    return inventory, scans.scan_targets(inventory, inventory.select(options.patterns))


def _scan(options: ServeOptions, began: float) -> ScanSummary:
    inventory, machines = _targets(options)
    found = scans.scan(machines, deadline_s=options.deadline_s, parallel=options.parallel, cluster=inventory.cluster)
    off = switched_off.read(inventory)
    verdicts = [switched_off.marked(seen.verdict, off) for seen in found.values()]
    return scan_reports.summary(verdicts, began, inventory.cluster)
