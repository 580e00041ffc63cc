"""The certificates of machines, as a table and as a JSON document."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from gpunodes.model import MachineCertificates, printable
from gpunodes.views import document, text


def table(found: Sequence[MachineCertificates], columns: int | None) -> str:
    """A row for each certificate, the first to end first; then what to do about those that end soon."""
    rows: list[tuple[str, ...]] = [("MACHINE", "CERTIFICATE", "ENDS", "DAYS", "RENEWED BY")]
    by = {"renew": "gpunodes certs renew", "kubelet": "the kubelet", "none": "-"}
    messages = []
    for machine in found:
        for each in machine.certificates:
            days = "-" if each.days is None else str(each.days)
            rows.append((machine.machine, each.name, _date(each.not_after), days, by[each.renewal]))
        messages += [f"{machine.machine}: {warning}" for warning in machine.warnings]
        messages += [f"{machine.machine}: {machine.cause}"] if machine.cause else []
    return "\n".join([text.table(rows, columns), *map(printable, messages)])


def first_ends(found: Sequence[MachineCertificates]) -> str:
    """A line for each machine: its certificate that ends first."""
    lines = []
    for machine in found:
        known = [each for each in machine.certificates if each.days is not None]
        if known:
            first = min(known, key=lambda each: each.days or 0)
            says = f"{first.name} ends first, on {_date(first.not_after)} UTC ({first.days} days)"
        else:
            says = f"unknown: {machine.cause or 'none was found'}"
        lines.append(printable(f"certificates of {machine.machine}: {says}"))
    return "\n".join(lines)


def _date(seconds: int | None) -> str:
    try:
        return "unreadable" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))
    except (OverflowError, OSError, ValueError):
        return "unreadable"


def dump(found: Sequence[MachineCertificates], exit_code: int) -> str:
    """``gpunodes.certs/1``"""
    machines = [dataclasses.asdict(each) for each in found]
    return document.dump({"schema": "gpunodes.certs/1", "exit_code": exit_code, "machines": machines})
