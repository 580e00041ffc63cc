"""What nvidia-smi reports: its error messages, requests for a reset, persistence mode."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from gpunodes.health.evidence import address
from gpunodes.health.model import Action, Finding, LineKind, State
from gpunodes.health.rules.rule import Rule, RuleInput
from gpunodes.health.smi_table import FIELDS_OF_GPU

_MESSAGES: tuple[tuple[str, Action, str], ...] = (
    (r"Driver/library version mismatch", Action.REBOOT, "The libraries and the loaded driver have different versions."),
    (r"[Rr]equires reset|reset required|ERR!", Action.RESET_GPU, "A GPU must be reset."),
    (r"GPU is lost|^device handle: ", Action.REBOOT, "A GPU is lost."),
    (
        r"couldn't communicate with the NVIDIA driver|couldn't find libnvidia|Driver Not Loaded",
        Action.REPAIR,
        "The driver or its libraries are not installed, or the driver is not loaded.",
    ),
    (r"No devices were found", Action.REBOOT, "The driver is loaded, but has no GPU."),
)
_VALUES = {"GPU is lost", "GPU requires reset", "ERR!"}
_CANNOT_READ = "cannot read: "
# A container whose cgroup was rewritten: github.com/NVIDIA/nvidia-container-toolkit, troubleshooting.
_NVML_UNKNOWN = "Failed to initialize NVML: Unknown Error"


def smi_message(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    messages = [(record.detail, record.gpu, record.evidence) for record in data.of_kinds(LineKind.SMI_MESSAGE)]
    if data.facts and data.facts.smi.status == "failed":
        text = data.facts.smi.message
        messages.append((text, "", tuple(line for line in text.splitlines() if line.strip())))
    has_values = any("lost" in each.values or each.unread for each in data.gpus)
    for message, gpu, evidence in messages:
        if has_values and message in _VALUES:
            continue  # nvidia-smi's fields have the same value, with its GPU
        if message.startswith(_CANNOT_READ):
            unread = message.removeprefix(_CANNOT_READ).split(", ")
            action, meaning = _unread(unread)
            yield rule.finding(action, meaning, evidence=evidence, watch=True, state=_state(action))
            continue
        if _NVML_UNKNOWN in message:
            meaning = "NVML cannot access the GPUs; a container that lost its devices must be restarted."
            yield rule.finding(Action.RESTART_APP, meaning, gpu=gpu, evidence=evidence, state=State.SICK)
            continue
        for pattern, action, meaning in _MESSAGES:
            if re.search(pattern, message):
                yield rule.finding(action, meaning, gpu=gpu, evidence=evidence, state=State.SICK)
                break
        else:
            meaning = "nvidia-smi failed with an unknown message."
            yield rule.finding(Action.NONE, meaning, gpu=gpu, evidence=evidence, watch=True)


def row_missing(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    """``nvidia-smi -i 0,2`` shows no row of GPU 1 either: only with other evidence of further GPUs is one lost."""
    missing = data.of_kinds(LineKind.ROW_MISSING)
    shown = {address(each.address.encode()) for each in data.gpus}
    numbers = sorted({record.code for record in missing})
    # Other output shows as many GPUs as the numbers of the table require.
    if not numbers or len(shown) > numbers[-1] + 1:
        return
    listed = data.of_kinds(LineKind.GPU_LISTED)
    named = [record for record in data.records if record.kind in _NAMING and record.gpu and record.gpu not in shown]
    others = {record.gpu for record in named}
    row = f"nvidia-smi's table has no row {', '.join(map(str, numbers))}"
    if max(len({record.code for record in listed}), len(shown | others)) > len(shown):
        proof = named or [record for record in listed if record.code in numbers] or listed
        message = f"{row}, but the machine has more GPUs than it shows: one is lost, unless the table was limited (-i)."
        gpu = others.pop() if len(others) == 1 else ""
        yield rule.finding(Action.REBOOT, message, *proof, gpu=gpu)
    else:
        message = f"{row}: it is lost, or was not requested (-i). Supply the output of `nvidia-smi` for all GPUs."
        yield rule.finding(Action.NONE, message)


_NAMING = frozenset(LineKind) - {
    LineKind.SXID, LineKind.QUOTED, LineKind.IMITATED, LineKind.SMI_MESSAGE, LineKind.GPU_LISTED, LineKind.ROW_MISSING
}  # fmt: skip
"""Lines that name a GPU which the machine has."""


def unreadable(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    for shown in data.gpus:
        if shown.unread:
            action, message = _unread(shown.unread)
            gpu = address(shown.address.encode())
            yield rule.finding(action, message, gpu=gpu, watch=True, state=_state(action))


def _unread(kinds: Sequence[str]) -> tuple[Action, str]:
    """The action for a GPU of which nvidia-smi cannot read these values, and why."""
    values = ", ".join(kinds)
    if set(kinds) == {"fan"}:
        return Action.NONE, "nvidia-smi cannot read the fan: check it."
    if "name" in kinds or "performance" in kinds or len(set(kinds) - {"fan"}) >= FIELDS_OF_GPU:
        return Action.REBOOT, f"nvidia-smi cannot read the GPU ({values}): it does not respond, and cannot be reset."
    return Action.RESET_GPU, f"nvidia-smi cannot read some values of the GPU ({values}): reset it."


def _state(action: Action) -> State | None:
    return State.SICK if action is Action.REBOOT else None


def reset_required(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    records = data.of_kinds(LineKind.RESET_REQUIRED)
    if records:
        yield rule.finding(Action.RESET_GPU, "The driver reports that the GPU must be reset.", *records)
    for shown in data.gpus:
        recovery = shown.values.get("recovery", "").lower()
        action = _SMI_RECOVERY.get(recovery, Action.NONE)
        if (
            shown.yes("reset_required")
            or shown.yes("drain_and_reset")
            or shown.values.get("lost") == "GPU requires reset"
        ):
            action = max(action, Action.RESET_GPU, key=lambda each: each.rank)
        if action is not Action.NONE:
            message = f"nvidia-smi requests: {recovery or 'reset required'}."
            yield rule.finding(action, message, gpu=address(shown.address.encode()))


_SMI_RECOVERY = {
    "reset": Action.RESET_GPU,
    "gpu reset": Action.RESET_GPU,
    "reboot": Action.REBOOT,
    "node reboot": Action.REBOOT,
    "drain p2p": Action.RESTART_APP,
    "drain and reset": Action.RESET_GPU,
}


def persistence_off(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    off = [shown for shown in data.gpus if shown.values.get("persistence") == "Disabled"]
    if off:
        yield rule.finding(
            Action.NONE, f"Persistence mode is off on {len(off)} GPUs: the first use after idle time is slow."
        )
