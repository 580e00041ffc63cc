"""The report on a cluster as the JSON document ``gpunodes.report/1``; operations/report.py fits its protocols."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from gpunodes import __version__
from gpunodes.errors import ExitCode
from gpunodes.health.model import Verdict
from gpunodes.model import MachineCertificates, PreflightFinding
from gpunodes.repair.record import RepairOutcome
from gpunodes.views import autoscale, document, health, maintenance, rollout

SCHEMA = "gpunodes.report/1"
MOST_ENTRIES = 1000
"""Entries of the history in a report: the newest ones."""
DAYS = 30
"""Days for which repairs are counted, in the whole history."""
SECTIONS = ("cluster", "certificates", "findings", "health", "history", "rollout", "maintenance", "autoscale")
"""The parts of a report that may be missing."""

T_co = TypeVar("T_co", covariant=True)


class Section(Protocol, Generic[T_co]):
    """What one source reported, or None and why."""

    @property
    def value(self) -> T_co | None: ...
    @property
    def why(self) -> str: ...
    @property
    def failed(self) -> bool: ...


class Report(Protocol):
    """A report. Times are seconds since 1970; ``machines``, the cluster and the history are dataclasses."""

    @property
    def inventory(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def began(self) -> float: ...
    @property
    def ended(self) -> float: ...
    @property
    def exit_code(self) -> ExitCode: ...
    @property
    def machines(self) -> Sequence[Any]: ...
    @property
    def cluster(self) -> Section[Any]: ...
    @property
    def certificates(self) -> Section[Sequence[MachineCertificates]]: ...
    @property
    def findings(self) -> Section[Sequence[PreflightFinding]]: ...
    @property
    def health(self) -> Section[Sequence[Verdict]]: ...
    @property
    def history(self) -> Section[Sequence[Any]]: ...
    @property
    def rollout(self) -> Section[rollout.RolloutStatus]: ...
    @property
    def maintenance(self) -> Section[Sequence[maintenance.MaintainedNode]]: ...
    @property
    def autoscale(self) -> Section[autoscale.Status]: ...


def document_of(found: Report) -> dict[str, Any]:
    """``gpunodes.report/1``: the same for the page and for programs."""
    sections = {name: getattr(found, name) for name in SECTIONS}
    missing = {name: each for name, each in sections.items() if each.value is None}
    moment = dt.datetime.fromtimestamp(found.ended, dt.UTC)
    parts: Mapping[str, Callable[[Any], Any]] = {**_PARTS, "history": functools.partial(_history, now=moment)}
    return {
        "schema": SCHEMA,
        "version": __version__,
        "exit_code": int(found.exit_code),
        "time": moment.isoformat(timespec="seconds"),
        "seconds": round(found.ended - found.began, 1),
        "inventory": found.inventory,
        "name": found.name,
        "missing": [{"section": name, "why": each.why, "failed": each.failed} for name, each in missing.items()],
        "machines": [dataclasses.asdict(each) for each in found.machines],
        **{name: None if each.value is None else parts[name](each.value) for name, each in sections.items()},
    }


def _findings(found: Sequence[PreflightFinding]) -> list[dict[str, Any]]:
    return [
        {
            "machine": each.machine,
            "check": each.check,
            **document.conflict(each.problem),
            "severity": each.severity.value,
        }
        for each in found
    ]


def _history(entries: Sequence[Any], now: dt.datetime) -> dict[str, Any]:
    return {
        "total": len(entries),
        "repairs": _repairs(entries, now.date()),
        "entries": [dataclasses.asdict(each) for each in entries[-MOST_ENTRIES:]],
    }


def _repairs(entries: Sequence[Any], today: dt.date) -> list[dict[str, Any]]:
    """The repairs that ended on each of the last days, the oldest first: those that succeeded, and the others."""
    ended = [(dt.datetime.fromtimestamp(each.time, dt.UTC).date(), each) for each in entries if each.kind == "end"]
    total = Counter(day for day, _ in ended)
    good = Counter(day for day, each in ended if each.outcome == RepairOutcome.REPAIRED.value)
    dates = [today - dt.timedelta(days=number) for number in range(DAYS - 1, -1, -1)]
    return [{"day": day.isoformat(), "repaired": good[day], "other": total[day] - good[day]} for day in dates]


def _without_schema(made: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in made.items() if key != "schema"}


_PARTS: Mapping[str, Callable[[Any], Any]] = {
    "cluster": dataclasses.asdict,
    "certificates": lambda found: [dataclasses.asdict(each) for each in found],
    "findings": _findings,
    "health": lambda found: health.document(found)["machines"],
    "rollout": lambda found: _without_schema(rollout.status_document(found)),
    "maintenance": maintenance.entries,
    "autoscale": lambda found: _without_schema(autoscale.contents(found)),
}
"""What each section is in the document: the same as in the document of its own command."""
