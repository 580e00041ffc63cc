"""Turns the data of a machine into a verdict."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from gpunodes.ansible.module_utils.probe.known import FLOOD_FIRST, FLOOD_LAST
from gpunodes.health import rules, scan
from gpunodes.health.evidence import clean
from gpunodes.health.model import Action, Finding, LineKind, LogRecord, SiteRules, State, Time, Verdict
from gpunodes.health.rules.rule import RuleInput

if TYPE_CHECKING:
    from gpunodes.health import facts as probe

MANY_FINDINGS = 200
"""The most findings of a verdict; the worst are kept."""


def judge_facts(name: str, facts: Mapping[str, object], site: SiteRules) -> Verdict:
    """The verdict on a live machine from the probe's facts. Log lines from before a GPU reset do not count."""
    from gpunodes.health import smi
    from gpunodes.health.facts import read

    found = read(facts)
    since = Time(monotonic=found.gpus_reset_s)
    log = _scanned([found.log], since)
    gpus = None
    if found.smi.xml:
        reader = smi.Reader()
        reader.feed(found.smi.xml.encode())
        gpus = reader.finish()
    data = RuleInput(_with_floods(log.records, found.repeats, since), gpus or (), found, site)
    lines = found.log.count("\n") + sum(max(0, repeat.count - FLOOD_FIRST - FLOOD_LAST) for repeat in found.repeats)
    present = sum(function.is_gpu for function in found.functions)
    return _verdict(
        name,
        "live",
        data,
        _wanted_live(found),
        kernel_lines=lines,
        boot_id=found.boot_id,
        expected=found.expected if found.expected is not None else present,
        seen_gpus=len(gpus) if gpus is not None else sum(each.is_gpu and each.responds for each in found.functions),
    )


def judge_files(
    name: str,
    streams: Iterable[Iterable[bytes]],
    site: SiteRules,
    since: Time = scan.NO_TIME,
    on_log: Callable[[scan.Log], None] = lambda _: None,
) -> Verdict:
    """The verdict on a machine from its saved logs; each stream is the content of one file, in pieces and unpacked.

    ``on_log`` gets the result of each stream before the next one is read.
    """
    logs = []
    for stream in streams:
        scanner = scan.Scanner(since)
        for piece in stream:
            scanner.feed(piece)
        logs.append(scanner.finish())
        on_log(logs[-1])
    gpus = {gpu.address: gpu for log in logs for gpu in log.gpus or ()}
    has_smi_output = any(log.gpus is not None for log in logs)
    data = RuleInput(_of_last_boot(logs), tuple(gpus.values()), None, site)
    return _verdict(
        name,
        "file",
        data,
        _wanted(logs),
        kernel_lines=sum(log.kernel_lines for log in logs),
        boot_id=next((log.boot_id for log in logs if log.boot_id), None),
        seen_gpus=len(gpus) if has_smi_output else None,
    )


_LOGS = "the kernel log since the boot (journalctl -k -b), and the output of nvidia-smi -q"
_LOG_ERRORS = {"log", "kmsg", "journal"}
"""The names under which the probe reports why it could not read the kernel log.

Without the ring buffer (kmsg) the journal has the whole log.
"""


def _wanted_live(found: probe.Facts) -> str:
    """What is missing for a verdict on a live machine; empty if its kernel log was read.

    A driver that responds does not replace the log: most errors of a GPU, and tasks that hang, are only there.
    """
    if found.log_source:
        why = next((error for what, error in found.errors if what in _LOG_ERRORS - {"kmsg"}), "")
        return why and f"the kernel log was read in part only ({clean(why.encode())}): pass {_LOGS} to --from"
    is_other_read = found.smi.status == "ok" or found.functions
    missing = "the kernel log" if is_other_read else "neither the kernel log nor nvidia-smi nor the PCI bus"
    why = next((f" ({clean(error.encode())})" for what, error in found.errors if what in _LOG_ERRORS and error), "")
    advice = "give the probe root (ansible_become; -K if sudo asks for a password), or "
    root = advice if found.lacks("privilege") else ""
    return f"{missing} could {'not ' if is_other_read else ''}be read{why}: {root}pass {_LOGS} to --from"


def _wanted(logs: Sequence[scan.Log]) -> str:
    """What is missing in saved logs for a verdict; empty if they show that the machine has NVIDIA's driver."""
    if any(log.has_driver for log in logs):
        return ""
    if not any(log.recognised for log in logs):
        return f"no kernel log and no output of nvidia-smi was recognised: supply {_LOGS}"
    lines = sum(log.kernel_lines for log in logs)
    if not lines:
        return f"no kernel line and no values of a GPU were found: supply {_LOGS}"
    return f"none of the {lines:,} kernel lines comes from an NVIDIA driver: supply {_LOGS}"


def unreachable(name: str, how: str, message: str) -> Verdict:
    """The verdict on a machine without facts; ``how`` is the reason as an identifier, ``message`` explains it."""
    finding = Finding(
        f"unreachable-{how.replace('_', '-')}",
        "",
        Action.NONE,
        State.UNREACHABLE,
        evidence=(clean(message.encode()),) if message else (),
        source="the connection",
        message="The machine did not respond.",
    )
    return Verdict(name, "live", State.UNREACHABLE, Action.NONE, findings=(finding,))


def _scanned(texts: Iterable[str], since: Time) -> scan.Log:
    scanner = scan.Scanner(since)
    for text in texts:
        scanner.feed(text.encode(errors="replace"))
    return scanner.finish()


def _with_floods(records: Sequence[LogRecord], floods: Sequence[probe.Repeat], since: Time) -> tuple[LogRecord, ...]:
    """Records, with the lines of log floods added: the probe counts those and keeps only a few in its log."""
    missing: Counter[tuple[object, ...]] = Counter()
    for flood in floods:
        for record in _scanned([f"[{flood.last:.6f}] {flood.line}\n"], since).records:
            missing[_identity(record)] += max(0, flood.count - FLOOD_FIRST - FLOOD_LAST)
    return tuple(dataclasses.replace(record, count=record.count + missing[_identity(record)]) for record in records)


def _identity(record: LogRecord) -> tuple[object, ...]:
    return (record.kind, record.gpu, record.code, record.detail)


def _of_last_boot(logs: Sequence[scan.Log]) -> tuple[LogRecord, ...]:
    """The records of the last boot in any of the logs."""
    booted = scan.NO_TIME
    for log in logs:
        if booted == scan.NO_TIME or booted.before(log.booted):
            booted = log.booted
    # Monotonic times restart at each boot: only dates distinguish boots.
    booted = Time(epoch=booted.epoch, dated=booted.dated)
    return tuple(record for log in logs for record in log.records if not record.last.before(booted))


def _verdict(
    name: str,
    source: str,
    data: RuleInput,
    wanted: str,
    *,
    kernel_lines: int,
    boot_id: str | None = None,
    expected: int | None = None,
    seen_gpus: int | None = None,
) -> Verdict:
    """``wanted`` is what is missing for the state healthy."""
    findings = sorted(rules.check(data), key=lambda each: (-each.state.rank, -each.action.rank))[:MANY_FINDINGS]
    worst = max((finding.state for finding in findings), key=lambda state: state.rank, default=State.HEALTHY)
    if worst is State.HEALTHY and wanted:
        worst = State.UNKNOWN
    return Verdict(
        name,
        source,
        worst,
        max((finding.action for finding in findings), key=lambda action: action.rank, default=Action.NONE),
        any(finding.hung for finding in findings),
        _codes(data, LineKind.XID),
        _codes(data, LineKind.SXID),
        boot_id,
        expected,
        seen_gpus,
        tuple(findings),
        kernel_lines=kernel_lines,
        wanted=wanted if worst is State.UNKNOWN else "",
    )


def _codes(data: RuleInput, kind: LineKind) -> tuple[int, ...]:
    """The codes in lines of the kernel, quoted ones too."""
    quoted = (record for record in data.of_kinds(LineKind.QUOTED) if record.detail == kind.value)
    return tuple(sorted({record.code for record in (*data.of_kinds(kind), *quoted)}))
