"""Lines of the kernel that another program quotes, or imitates."""

from __future__ import annotations

from collections.abc import Iterator

from gpunodes.health.model import Action, Finding, LineKind
from gpunodes.health.rules.rule import Rule, RuleInput


def quotation(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    records = data.of_kinds(LineKind.QUOTED, LineKind.IMITATED)
    # The probe reads only what the kernel wrote.
    if records and data.facts is None:
        found = dict.fromkeys(f"{record.detail} {record.code or ''}".strip() for record in records)
        message = f"A program quotes the kernel ({', '.join([*found][:5])}): only that machine's own kernel log counts."
        yield rule.finding(Action.NONE, message, *records)
