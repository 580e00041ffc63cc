"""Xids, the error codes of the driver's log lines: 79 (fallen off the bus), 154 (recovery action), all others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpunodes.health import catalog
from gpunodes.health.evidence import address
from gpunodes.health.model import Action, Finding, LineKind, LogRecord
from gpunodes.health.rules.rule import Rule, RuleInput, by_gpu

MANY_APPS = 3
"""If this many different processes have the same fault on one GPU, the GPU is the suspect, not the applications."""


def fallen_off_bus(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    for gpu, records in by_gpu([*data.xids(catalog.FALLEN_OFF_BUS), *data.of_kinds(LineKind.OFF_BUS)]).items():
        code = catalog.FALLEN_OFF_BUS if any(record.code for record in records) else None
        action = _site_action(data.site.xids, code, Action.REBOOT)
        yield rule.finding(action, "The GPU no longer responds on PCIe.", *records, gpu=gpu, code=code)
    for shown in data.gpus:
        if shown.values.get("lost") == "GPU is lost":
            gpu = address(shown.address.encode())
            yield rule.finding(Action.REBOOT, "nvidia-smi reports that the GPU is lost.", gpu=gpu)


def _site_action(marked: object, code: int | None, action: Action) -> Action:
    """The site's action for a code; ``action`` if the site sets none."""
    return marked.get(code, action) if isinstance(marked, dict) else action


def xid(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    groups: dict[tuple[str, int], list[LogRecord]] = {}
    for record in data.xids():
        if record.code not in {catalog.FALLEN_OFF_BUS, catalog.RECOVERY_CHANGED}:
            groups.setdefault((record.gpu, record.code), []).append(record)
    for (gpu, code), records in groups.items():
        advice = _xid_advice(code, records)
        title = f"Xid {code}, {advice.title}: {advice.advice}" if advice else f"Xid {code} is not in NVIDIA's catalog."
        action = advice.action if advice else Action.NONE
        watch = advice.watch if advice else True
        if code == catalog.CLEANUP and _has_cause(gpu, data):
            action, title = Action.NONE, f"Xid {catalog.CLEANUP} is a consequence of the GPU's other codes."
        if code in data.site.xids:
            action, watch = data.site.xids[code], False
            title += f" This site's action for it: {action.value}."
        yield rule.finding(
            action, title, *records, gpu=gpu, watch=watch, code=code, source=advice.source if advice else ""
        )


def _has_cause(gpu: str, data: RuleInput) -> bool:
    """Whether a GPU has another code than the clean-up of its channels; lines without an address may be any GPU's."""
    return any(
        record.code != catalog.CLEANUP and (gpu == record.gpu or not gpu or not record.gpu) for record in data.xids()
    )


def _xid_advice(code: int, records: Sequence[LogRecord]) -> catalog.Advice | None:
    """The strongest advice for the lines of one code."""
    advice = catalog.xid(code)
    if code not in catalog.NVLINK5 or advice is None:
        return advice
    decoded = [_nvlink5(code, record.detail, advice) for record in records]
    return max(decoded, key=lambda each: each.action.rank)


def _nvlink5(code: int, detail: str, advice: catalog.Advice) -> catalog.Advice:
    """The advice for one line by its registers; if they are missing or unknown, "Fatal" means a reset."""
    registers = [int(part, 16) for part in detail.split() if part.startswith("0x")]
    if len(registers) > 1 and (decoded := catalog.nvlink5(code, *registers[:2])):
        return catalog.Advice(
            f"{advice.title}, {decoded.title}", decoded.action, decoded.watch, decoded.advice, decoded.source
        )
    if "fatal" in detail:
        return catalog.Advice(
            advice.title, Action.RESET_GPU, True, "The line contains Fatal: reset the GPU.", advice.source
        )
    return advice


def xid_recovery(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    for gpu, records in by_gpu(data.xids(catalog.RECOVERY_CHANGED)).items():
        # The last change counts; of changes without a time, the strongest.
        requests = [(record, catalog.recovery(int(record.detail or "-1"))) for record in records]
        latest = [
            (record, advice)
            for record, advice in requests
            if not any(record.last.before(other.last) for other in records)
        ]
        record, advice = max(latest, key=lambda each: each[1].action.rank if each[1] else -1)
        message = advice.advice if advice else "The recovery action in the line is cut off or unknown."
        action = _site_action(data.site.xids, catalog.RECOVERY_CHANGED, advice.action if advice else Action.NONE)
        yield rule.finding(action, message, record, gpu=gpu, watch=advice is None, code=catalog.RECOVERY_CHANGED)


def xid_repeated(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    for gpu, records in by_gpu(data.xids(*catalog.APP_FAULTS)).items():
        processes = max(record.processes for record in records)
        if processes >= MANY_APPS and not all(record.code in data.site.xids for record in records):
            message = (
                f"{processes} or more applications had the same fault on this GPU: run NVIDIA's field diagnostics."
            )
            yield rule.finding(Action.RESTART_APP, message, *records, gpu=gpu)
