"""What a rule is: its description, the data that it checks, and the findings that it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpunodes.health.evidence import EVIDENCE_LINES, clean
from gpunodes.health.model import Action, Finding, LineKind, LogRecord, SiteRules, State, Time

if TYPE_CHECKING:
    from gpunodes.health.facts import Facts
    from gpunodes.health.smi import SmiGpu


@dataclass(frozen=True, slots=True)
class RuleInput:
    """The data of one machine: log records, nvidia-smi's output, the probe's facts, the site's rules."""

    records: Sequence[LogRecord] = ()
    gpus: Sequence[SmiGpu] = ()
    facts: Facts | None = None
    site: SiteRules = field(default_factory=SiteRules)

    def of_kinds(self, *kinds: LineKind) -> list[LogRecord]:
        """The records of these kinds."""
        return [record for record in self.records if record.kind in kinds]

    def xids(self, *codes: int) -> list[LogRecord]:
        """The records of these Xids; without arguments, of all Xids."""
        return [record for record in self.of_kinds(LineKind.XID) if not codes or record.code in codes]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule. ``action`` describes the actions it may request, ``evidence`` the data it checks."""

    name: str
    title: str
    evidence: str
    action: str
    source: str
    check: Callable[[Rule, RuleInput], Iterator[Finding]]

    def finding(
        self,
        action: Action,
        message: str,
        *records: LogRecord,
        gpu: str | None = None,
        watch: bool = False,
        state: State | None = None,
        evidence: Sequence[str] = (),
        code: int | None = None,
        source: str = "",
        hung: bool = False,
    ) -> Finding:
        """A finding of this rule, based on records or on other evidence."""
        lines = [line for record in records for line in record.evidence] + [
            clean(line.encode(errors="replace")) for line in evidence
        ]
        return Finding(
            self.name,
            gpu if gpu is not None else next((record.gpu for record in records), ""),
            action,
            state or state_of(action, watch=watch),
            sum(record.count for record in records) or 1,
            min((record.first for record in records), key=_time_key).text if records else "",
            max((record.last for record in records), key=_time_key).text if records else "",
            tuple(lines[:EVIDENCE_LINES]),
            source or self.source,
            clean(message.encode(errors="replace")),
            code,
            hung,
        )


def _time_key(time: Time) -> tuple[float, float]:
    return (time.epoch or 0.0, time.monotonic or 0.0)


def state_of(action: Action, *, watch: bool = False) -> State:
    """The best state that a machine which needs this action can have."""
    if action in {Action.REBOOT, Action.REPAIR}:
        return State.SICK
    return State.DEGRADED if watch or action is not Action.NONE else State.HEALTHY


def by_gpu(records: Iterable[LogRecord]) -> dict[str, list[LogRecord]]:
    """Records by the address of their GPU, empty where a line names none."""
    groups: dict[str, list[LogRecord]] = {}
    for record in records:
        groups.setdefault(record.gpu, []).append(record)
    return groups
