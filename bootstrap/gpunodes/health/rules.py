"""The rules: each takes what was seen of a machine and says what follows.

`RULES` is the whole list; ``gpunodes health rules`` and the table in docs/health.md are made from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpunodes.health import catalog, forms, scan
from gpunodes.health.model import Action, Finding, LineKind, LogRecord, SiteRules, State, Time

if TYPE_CHECKING:
    from gpunodes.health.facts import Facts
    from gpunodes.health.smi import SmiGpu

CATALOG = "NVIDIA Xid catalog, docs.nvidia.com/deploy/xid-errors"
FABRIC_GUIDE = "NVIDIA Fabric Manager user guide, appendix D"
NVRM = "NVIDIA open-gpu-kernel-modules, kernel-open/nvidia"
SMI = "nvidia-smi(1); NVML API reference"
MEMORY = "NVIDIA GPU memory error management, docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt"
HUNG_TASK = "Linux kernel/hung_task.c; NVIDIA's reset needs every client of the GPU gone, and a stuck one cannot go"
AER = "Linux Documentation/PCI/pcieaer-howto.rst"

STUCK_S = 20.0
"""Seconds in uninterruptible sleep from which a task is stuck; the driver starts all GPUs of a machine in less."""
MANY_APPS = 3
"""From so many different processes with the same fault on one GPU, the GPU is suspect and not the applications."""
CORRECTED_MANY = 1000
"""Corrected PCIe errors are part of a link's life; so many are not."""


@dataclass(frozen=True, slots=True)
class RuleInput:
    """What was seen of one machine."""

    records: Sequence[LogRecord] = ()
    gpus: Sequence[SmiGpu] = ()
    facts: Facts | None = None
    site: SiteRules = field(default_factory=SiteRules)

    def of(self, *kinds: LineKind) -> list[LogRecord]:
        """The records of some kinds."""
        return [record for record in self.records if record.kind in kinds]

    def xids(self, *codes: int) -> list[LogRecord]:
        """The records of these Xids, of all when none is named."""
        return [record for record in self.of(LineKind.XID) if not codes or record.code in codes]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule. ``action`` says in words what it may ask for, ``evidence`` what it looks at."""

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
        """A finding of this rule, resting on records or on other evidence."""
        lines = [line for record in records for line in record.evidence] + [
            scan.clean(line.encode(errors="replace")) for line in evidence
        ]
        return Finding(
            self.name,
            gpu if gpu is not None else next((record.gpu for record in records), ""),
            action,
            state or state_of(action, watch=watch),
            sum(record.count for record in records) or 1,
            min((record.first for record in records), key=_when).text if records else "",
            max((record.last for record in records), key=_when).text if records else "",
            tuple(lines[: scan.EVIDENCE_LINES]),
            source or self.source,
            scan.clean(message.encode(errors="replace")),
            code,
            hung,
        )


def _when(time: Time) -> tuple[float, float]:
    return (time.epoch or 0.0, time.monotonic or 0.0)


def state_of(action: Action, *, watch: bool = False) -> State:
    """The best state of a machine that needs this."""
    if action in {Action.REBOOT, Action.REPAIR}:
        return State.SICK
    return State.DEGRADED if watch or action is not Action.NONE else State.HEALTHY


def _by_gpu(records: Iterable[LogRecord]) -> dict[str, list[LogRecord]]:
    groups: dict[str, list[LogRecord]] = {}
    for record in records:
        groups.setdefault(record.gpu, []).append(record)
    return groups


# --- a task stuck in the driver --------------------------------------------------------------------------------------


def _hung_in_driver(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    records = seen.of(LineKind.HUNG_TASK)
    if records:
        tasks = ", ".join(record.detail for record in records[:5])
        yield rule.finding(
            Action.REBOOT, f"Stuck inside the NVIDIA driver: {tasks}.", *records, state=State.HUNG, hung=True
        )


def _task_in_driver(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    facts = seen.facts
    asleep = [
        task
        for task in (facts.tasks if facts else ())
        if task.state == "D" and forms.NVIDIA_FRAME.search("\n".join(task.stack).encode(errors="replace"))
    ]
    if not facts or not asleep:
        return
    task = max(asleep, key=lambda one: one.age_s)
    name = f"{scan.clean(task.name.encode(errors='replace'))} ({task.pid})"
    if task.age_s >= STUCK_S or facts.smi.status in {"stuck", "timeout"} or _silently_hung(seen):
        message = f"{name} sleeps inside the NVIDIA driver and cannot be killed."
        yield rule.finding(Action.REBOOT, message, evidence=task.stack, state=State.HUNG, hung=True)
    else:
        message = f"{name} has waited inside the NVIDIA driver for {task.age_s:.1f} s: look again."
        yield rule.finding(Action.NONE, message, evidence=task.stack, watch=True)


def _smi_stuck(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    smi = seen.facts.smi if seen.facts else None
    if smi is None or smi.status not in {"stuck", "timeout"}:
        return
    if smi.task_state == "D":
        message = f"nvidia-smi ({smi.pid}) is in uninterruptible sleep; no second one is started beside it."
        yield rule.finding(Action.REBOOT, message, state=State.HUNG, hung=True)
    else:
        message = f"nvidia-smi did not end within {smi.took_s:.0f} s."
        yield rule.finding(Action.RESET_GPU, message, state=State.SICK)


def _silently_hung(seen: RuleInput) -> int:
    """How many hung tasks the kernel has counted, where its log has none, of the driver or of others."""
    count = seen.facts.hung_detected if seen.facts else None
    return 0 if seen.of(LineKind.HUNG_TASK, LineKind.OTHER_HUNG_TASK) else count or 0


def _silent_hung_tasks(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    if count := _silently_hung(seen):
        message = f"The kernel has counted {count} hung tasks; its log no longer says which."
        yield rule.finding(Action.NONE, message, watch=True)


def _soft_lockup(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    records = seen.of(LineKind.SOFT_LOCKUP)
    if records:
        yield rule.finding(Action.REBOOT, "A CPU spins inside the NVIDIA driver.", *records)


# --- GPUs that are gone ----------------------------------------------------------------------------------------------


def _fallen_off_bus(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    for gpu, records in _by_gpu([*seen.xids(catalog.FALLEN_OFF_BUS), *seen.of(LineKind.OFF_BUS)]).items():
        code = catalog.FALLEN_OFF_BUS if any(record.code for record in records) else None
        action = _site(seen.site.xids, code, Action.REBOOT)
        yield rule.finding(action, "The GPU no longer answers on PCIe.", *records, gpu=gpu, code=code)
    for shown in seen.gpus:
        if shown.values.get("lost") == "GPU is lost":
            gpu = scan.address(shown.address.encode())
            yield rule.finding(Action.REBOOT, "nvidia-smi says that the GPU is lost.", gpu=gpu)


def _no_answer(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    for function in seen.facts.functions if seen.facts else ():
        if not function.answers:
            message = "The PCI function reads as all ones: it does not answer."
            yield rule.finding(Action.REBOOT, message, gpu=function.address)


def _gpus_missing(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    if seen.facts is None or seen.facts.expected is None:
        return
    there = sum(function.is_gpu for function in seen.facts.functions)
    if there < seen.facts.expected:
        message = f"{there} of {seen.facts.expected} GPUs are on the PCI bus."
        yield rule.finding(Action.REBOOT, message)


def _gpus_unused(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    facts = seen.facts
    if facts is None or not facts.driver_loaded or facts.driver_gpus is None:
        return
    bound = sum(function.is_gpu and function.driver == "nvidia" for function in facts.functions)
    shown = len(seen.gpus) if facts.smi.status == "ok" else facts.driver_gpus
    if min(shown, facts.driver_gpus) < bound:
        message = f"The driver has {bound} GPUs, {min(shown, facts.driver_gpus)} of them came up."
        yield rule.finding(Action.REBOOT, message)


# --- Xid and SXid ----------------------------------------------------------------------------------------------------


def _site(marked: object, code: int | None, action: Action) -> Action:
    """The site's word on a code, or ours."""
    return marked.get(code, action) if isinstance(marked, dict) else action


def _xid(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    groups: dict[tuple[str, int], list[LogRecord]] = {}
    for record in seen.xids():
        if record.code not in {catalog.FALLEN_OFF_BUS, catalog.RECOVERY_CHANGED}:
            groups.setdefault((record.gpu, record.code), []).append(record)
    for (gpu, code), records in groups.items():
        advice = _xid_advice(code, records)
        title = f"Xid {code}, {advice.title}: {advice.advice}" if advice else f"Xid {code} is not in the catalog."
        action = advice.action if advice else Action.NONE
        watch = advice.watch if advice else True
        if code == catalog.CLEANUP and len(groups) > 1:
            action, title = Action.NONE, f"Xid {catalog.CLEANUP} beside other codes: it follows them."
        if code in seen.site.xids:
            action, watch = seen.site.xids[code], False
            title += f" This site has marked it: {action.value}."
        yield rule.finding(
            action, title, *records, gpu=gpu, watch=watch, code=code, source=advice.source if advice else ""
        )


def _xid_advice(code: int, records: Sequence[LogRecord]) -> catalog.Advice | None:
    """The strongest that the lines of one code say."""
    advice = catalog.xid(code)
    if code not in catalog.NVLINK5 or advice is None:
        return advice
    decoded = [_nvlink5(code, record.detail, advice) for record in records]
    return max(decoded, key=lambda one: one.action.rank)


def _nvlink5(code: int, detail: str, advice: catalog.Advice) -> catalog.Advice:
    """What one line's registers say; where they are missing or unknown, its word Fatal asks for a reset."""
    registers = [int(word, 16) for word in detail.split() if word.startswith("0x")]
    if len(registers) > 1 and (decoded := catalog.nvlink5(code, *registers[:2])):
        return catalog.Advice(
            f"{advice.title}, {decoded.title}", decoded.action, decoded.watch, decoded.advice, decoded.source
        )
    if "fatal" in detail:
        return catalog.Advice(
            advice.title, Action.RESET_GPU, True, "The line says Fatal: reset the GPU.", advice.source
        )
    return advice


def _xid_recovery(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    for gpu, records in _by_gpu(seen.xids(catalog.RECOVERY_CHANGED)).items():
        # The last change holds; of changes without a time, the strongest.
        asked = [(record, catalog.recovery(int(record.detail or "-1"))) for record in records]
        latest = [
            (record, advice) for record, advice in asked if not any(record.last.before(other.last) for other in records)
        ]
        record, advice = max(latest, key=lambda one: one[1].action.rank if one[1] else -1)
        message = advice.advice if advice else "The driver's recovery number is cut off, or not known."
        action = _site(seen.site.xids, catalog.RECOVERY_CHANGED, advice.action if advice else Action.NONE)
        yield rule.finding(action, message, record, gpu=gpu, watch=advice is None, code=catalog.RECOVERY_CHANGED)


def _xid_repeated(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    for gpu, records in _by_gpu(seen.xids(*catalog.APP_FAULTS)).items():
        processes = max(record.processes for record in records)
        if processes >= MANY_APPS and not all(record.code in seen.site.xids for record in records):
            message = (
                f"{processes} or more applications failed alike on this GPU: run NVIDIA's field diagnostics on it."
            )
            yield rule.finding(Action.RESTART_APP, message, *records, gpu=gpu)


def _sxid(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    groups: dict[tuple[str, int], list[LogRecord]] = {}
    for record in seen.of(LineKind.SXID):
        groups.setdefault((record.gpu, record.code), []).append(record)
    for (gpu, code), records in groups.items():
        advice = catalog.sxid(code)
        severities = {record.detail for record in records}
        action = advice.action if advice else Action.NONE
        if "fatal" in severities:
            action = max(action, Action.RESET_GPU, key=lambda one: one.rank)
        elif "non-fatal" in severities:
            action = Action.NONE
        message = f"SXid {code}" + (f", {advice.title}: {advice.advice}" if advice else " is not in the guide.")
        if code in seen.site.sxids:
            action = seen.site.sxids[code]
            message += f" This site has marked it: {action.value}."
        watch = advice is None or advice.watch
        yield rule.finding(action, message, *records, gpu=gpu, watch=watch, code=code)


# --- the driver ------------------------------------------------------------------------------------------------------


def _start_up(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    if not seen.of(LineKind.INIT_CAUSE):
        for gpu, records in _by_gpu(seen.of(LineKind.INIT_FAILED)).items():
            message = (
                "The driver could not start the GPU. A warm reboot may not be enough: power the machine off and on."
            )
            yield rule.finding(Action.REBOOT, message, *records, gpu=gpu)


def _start_up_cause(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    records = seen.of(LineKind.INIT_CAUSE)
    if records:
        message = (
            "The driver cannot start the GPU for a reason that no reboot removes: firmware, module flavour or BIOS."
        )
        yield rule.finding(Action.REPAIR, message, *records, *seen.of(LineKind.INIT_FAILED))


def _mismatch(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    for record in seen.of(LineKind.MISMATCH):
        client, version, module = record.detail.split(" ")
        named = client != "-" and not forms.NVIDIA_TASK.fullmatch(client.encode())
        if named and _numbers(version) < _numbers(module):
            message = f"{client} still uses the libraries of {version}, the driver is {module}: restart that program."
            yield rule.finding(Action.NONE, message, record, watch=True)
        else:
            message = f"A program has the libraries of {version}, the loaded driver is {module}."
            yield rule.finding(Action.REBOOT, message, record)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall("[0-9]{1,9}", version)]


def _versions_differ(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    facts = seen.facts
    if facts and facts.module and facts.library and facts.module != facts.library:
        message = f"The loaded driver is {facts.module}, its libraries are {facts.library}."
        yield rule.finding(Action.REBOOT, message)


def _not_loaded(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    facts = seen.facts
    if facts is None or facts.driver_loaded is not False:
        return
    gpus = [function for function in facts.functions if function.is_gpu and function.driver in {"", "nouveau"}]
    if gpus:
        message = "No NVIDIA driver is loaded: install it, or see why the kernel refuses it."
        yield rule.finding(Action.REPAIR, message, gpu=gpus[0].address)


def _gsp(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    records = seen.of(LineKind.GSP_TIMEOUT)
    if records:
        message = (
            "The GPU's system processor does not answer; each call waits for it, so that nvidia-smi can take minutes."
        )
        yield rule.finding(Action.RESET_GPU, message, *records)


def _reset_required(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    records = seen.of(LineKind.RESET_REQUIRED)
    if records:
        yield rule.finding(Action.RESET_GPU, "The driver says that the GPU must be reset.", *records)
    for shown in seen.gpus:
        recovery = shown.values.get("recovery", "").lower()
        action = _SMI_RECOVERY.get(recovery, Action.NONE)
        if (
            shown.yes("reset_required")
            or shown.yes("drain_and_reset")
            or shown.values.get("lost") == "GPU requires reset"
        ):
            action = max(action, Action.RESET_GPU, key=lambda one: one.rank)
        if action is not Action.NONE:
            message = f"nvidia-smi asks for it: {recovery or 'reset required'}."
            yield rule.finding(action, message, gpu=scan.address(shown.address.encode()))


_SMI_RECOVERY = {
    "reset": Action.RESET_GPU,
    "gpu reset": Action.RESET_GPU,
    "reboot": Action.REBOOT,
    "node reboot": Action.REBOOT,
    "drain p2p": Action.RESTART_APP,
    "drain and reset": Action.RESET_GPU,
}


def _uvm(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    records = seen.of(LineKind.UVM_FATAL)
    if records:
        message = "Unified memory is off until nvidia-uvm is loaded anew, with every client of the GPUs gone."
        yield rule.finding(Action.RESET_GPU, message, *records)


_MESSAGES: tuple[tuple[str, Action, str], ...] = (
    (r"Driver/library version mismatch", Action.REBOOT, "The libraries are not those of the loaded driver."),
    (r"[Rr]equires reset|reset required|ERR!", Action.RESET_GPU, "A GPU must be reset."),
    (r"GPU is lost|^device handle: ", Action.REBOOT, "A GPU is lost."),
    (
        r"couldn't communicate with the NVIDIA driver|couldn't find libnvidia|Driver Not Loaded",
        Action.REPAIR,
        "The driver, or its libraries, are not there.",
    ),
    (r"No devices were found", Action.REBOOT, "The driver runs and has no GPU."),
)
_VALUES = {"GPU is lost", "GPU requires reset"}
# A container whose cgroup was rewritten: github.com/NVIDIA/nvidia-container-toolkit, troubleshooting.
_NVML_UNKNOWN = "Failed to initialize NVML: Unknown Error"


def _smi_message(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    text = [(record.detail, record.gpu, record.evidence) for record in seen.of(LineKind.SMI_MESSAGE)]
    if seen.facts and seen.facts.smi.status == "failed":
        text.append((seen.facts.smi.message, "", tuple(seen.facts.smi.message.splitlines())))
    shown = any("lost" in one.values for one in seen.gpus)
    for message, gpu, evidence in text:
        if shown and message in _VALUES:
            continue  # the same value, which nvidia-smi's fields have told with its GPU
        if _NVML_UNKNOWN in message:
            meaning = "NVML has no access to the GPUs, as in a container that lost its devices: restart that."
            yield rule.finding(Action.RESTART_APP, meaning, gpu=gpu, evidence=evidence, state=State.SICK)
            continue
        for pattern, action, meaning in _MESSAGES:
            if re.search(pattern, message):
                yield rule.finding(action, meaning, gpu=gpu, evidence=evidence, state=State.SICK)
                break
        else:
            meaning = "nvidia-smi failed with a message that no rule knows."
            yield rule.finding(Action.NONE, meaning, gpu=gpu, evidence=evidence, watch=True)


def _fabric_manager(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    facts = seen.facts
    if facts and any(function.is_switch for function in facts.functions):
        state = (facts.services or {}).get("nvidia-fabricmanager", "")
        if state in {"failed", "inactive", "absent"}:
            message = f"The machine has NVSwitches and its fabric manager is {state}: CUDA does not start."
            yield rule.finding(Action.RESTART_APP, message, state=State.SICK)


# --- PCIe, memory, clocks --------------------------------------------------------------------------------------------


def _pcie(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    for record in seen.of(LineKind.AER):
        if record.detail == "fatal":
            yield rule.finding(Action.REBOOT, "A fatal PCIe error: the link was reset under the GPU.", record)
        else:
            watch = record.detail == "non-fatal" or record.count >= CORRECTED_MANY
            yield rule.finding(Action.NONE, f"PCIe errors, {record.detail}.", record, watch=watch)
    for function in seen.facts.functions if seen.facts else ():
        if function.aer_fatal or function.aer_nonfatal:
            message = f"PCIe errors since boot: {function.aer_fatal} fatal, {function.aer_nonfatal} non-fatal."
            yield rule.finding(Action.NONE, message, gpu=function.address, watch=True)


def _link_width(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    for function in seen.facts.functions if seen.facts else ():
        if function.is_gpu and function.width and function.max_width and function.width < function.max_width:
            message = f"The PCIe link has {function.width} of {function.max_width} lanes."
            yield rule.finding(Action.NONE, message, gpu=function.address, watch=True)


def _memory(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    for shown in seen.gpus:
        gpu = scan.address(shown.address.encode())
        for name, action, message in _MEMORY:
            if shown.yes(name):
                yield rule.finding(action, message, gpu=gpu)
        if count := shown.number("ecc_volatile"):
            message = f"{count} uncorrectable memory errors since the driver was loaded."
            yield rule.finding(Action.RESET_GPU, message, gpu=gpu)
        elif count := shown.number("ecc_aggregate"):
            message = f"{count} uncorrectable memory errors in the GPU's life, none since the driver was loaded."
            yield rule.finding(Action.NONE, message, gpu=gpu)


_MEMORY = (
    ("remap_failure", Action.REPAIR, "A row of the memory cannot be remapped: replace the board."),
    ("unrepairable_memory", Action.REPAIR, "The memory cannot be repaired: replace the board."),
    ("sram_threshold", Action.REPAIR, "More uncorrectable SRAM errors than NVIDIA allows: replace the board."),
    ("remap_pending", Action.RESET_GPU, "A row of the memory waits for a reset to be remapped."),
    ("pages_pending", Action.RESET_GPU, "A page of the memory waits for a reset to be retired."),
    ("channel_repair", Action.RESET_GPU, "A repair of a memory channel waits for a reset."),
    ("tpc_repair", Action.RESET_GPU, "A repair of a TPC waits for a reset."),
)


def _slowed(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    braked = [shown for shown in seen.gpus if shown.yes("power_brake")]
    if len(braked) > 1 and len(braked) == len(seen.gpus):
        message = "The power brake is on for all GPUs at once: look at the power supply of the machine or the site."
        yield rule.finding(Action.NONE, message, watch=True)
        return
    for shown in seen.gpus:
        reasons = [text for name, text in _SLOWED.items() if shown.yes(name)]
        if reasons:
            message = f"The hardware slows the GPU: {', '.join(reasons)}. No reboot helps."
            yield rule.finding(Action.NONE, message, gpu=scan.address(shown.address.encode()), watch=True)


_SLOWED = {"power_brake": "power brake", "hw_thermal": "too hot", "hw_slowdown": "hardware slowdown"}


def _persistence(rule: Rule, seen: RuleInput) -> Iterator[Finding]:
    off = [shown for shown in seen.gpus if shown.values.get("persistence") == "Disabled"]
    if off:
        yield rule.finding(Action.NONE, f"Persistence mode is off on {len(off)} GPUs: each first use is slow.")


RULES: tuple[Rule, ...] = (
    Rule(
        "hung-in-driver",
        "A task hangs inside the NVIDIA driver",
        "the kernel's report of a hung task: a frame of an nvidia module in its own block, or a thread of the driver's",
        "reboot",
        HUNG_TASK,
        _hung_in_driver,
    ),
    Rule(
        "task-in-driver",
        "A thread sleeps uninterruptibly inside the NVIDIA driver",
        f"threads in state D for {STUCK_S:.0f} s, or beside a stuck nvidia-smi or hung tasks that no log tells of",
        "reboot; watch where it has just begun",
        HUNG_TASK,
        _task_in_driver,
    ),
    Rule(
        "smi-stuck",
        "nvidia-smi does not come back",
        "nvidia-smi past its deadline; in state D it is stuck in the driver",
        "reboot, or reset_gpu where it is not in state D",
        HUNG_TASK,
        _smi_stuck,
    ),
    Rule(
        "silent-hung-tasks",
        "Hung tasks of which the log says nothing",
        "kernel.hung_task_detect_count, and a log without them (hung_task_warnings runs out)",
        "none; watch",
        "Linux Documentation/admin-guide/sysctl/kernel.rst",
        _silent_hung_tasks,
    ),
    Rule(
        "soft-lockup-in-driver",
        "A CPU spins inside the NVIDIA driver",
        "a soft lockup with a frame of an nvidia module in its block, or in a thread of the driver's",
        "reboot",
        "Linux kernel/watchdog.c",
        _soft_lockup,
    ),
    Rule(
        "fallen-off-bus",
        "A GPU has fallen off the bus",
        "Xid 79, the driver's lines that say so with or without it, nvidia-smi's \"GPU is lost\"",
        "reboot",
        CATALOG,
        _fallen_off_bus,
    ),
    Rule(
        "no-answer",
        "A PCI function does not answer",
        "the configuration space of NVIDIA's functions reads as all ones",
        "reboot",
        "PCI Express base specification, completion without data",
        _no_answer,
    ),
    Rule(
        "gpus-missing",
        "Fewer GPUs on the PCI bus than expected",
        "PCI functions against the setting, else the boot log",
        "reboot",
        "the number is the site's or the machine's own",
        _gpus_missing,
    ),
    Rule(
        "gpus-unused",
        "GPUs that the driver has and cannot use",
        "functions bound to the driver against /proc/driver/nvidia and nvidia-smi",
        "reboot",
        NVRM,
        _gpus_unused,
    ),
    Rule(
        "xid",
        "The driver reports an error (Xid)",
        "lines `NVRM: Xid`; 48 with or without 63 and 64, 45 alone or following another, 144 to 150 by their registers",
        "what the catalog says of the code; the site may mark codes",
        CATALOG,
        _xid,
    ),
    Rule(
        "xid-recovery",
        "The driver asks for a recovery (Xid 154)",
        "the number in the line, the last one of each GPU",
        "none, restart_app, reset_gpu or reboot",
        "NVIDIA open-gpu-kernel-modules, GPU recovery action",
        _xid_recovery,
    ),
    Rule(
        "xid-repeated",
        "The same application fault from several applications on one GPU",
        f"Xid 13 or 31 from {MANY_APPS} or more processes",
        "restart_app, and field diagnostics",
        CATALOG,
        _xid_repeated,
    ),
    Rule(
        "sxid",
        "An NVSwitch reports an error (SXid)",
        "lines `SXid`; their severity first, the table for lines without one and for what takes the whole fabric along",
        "none, reset_gpu or reboot; the site may mark codes",
        FABRIC_GUIDE,
        _sxid,
    ),
    Rule(
        "start-up-failed",
        "The driver cannot start a GPU",
        "`RmInitAdapter failed`, `rm_init_adapter failed`, `probe routine failed`",
        "reboot",
        NVRM,
        _start_up,
    ),
    Rule(
        "start-up-impossible",
        "The driver cannot start a GPU, and a reboot changes nothing",
        "lines that name missing firmware, the wrong flavour of module, or a BIOS that gave no memory regions",
        "repair",
        NVRM,
        _start_up_cause,
    ),
    Rule(
        "version-mismatch",
        "Libraries and driver are of different versions",
        "`NVRM: API mismatch`; one named program that is older than the driver is only a program to restart",
        "reboot, or none for one stale program",
        NVRM,
        _mismatch,
    ),
    Rule(
        "versions-differ",
        "The loaded driver is not the installed one",
        "the version of the module against that of the libraries",
        "reboot",
        NVRM,
        _versions_differ,
    ),
    Rule(
        "driver-not-loaded",
        "GPUs without an NVIDIA driver",
        "PCI functions that no driver, or nouveau, has",
        "repair",
        NVRM,
        _not_loaded,
    ),
    Rule(
        "gsp-timeout",
        "The GPU's system processor does not answer",
        "`Timeout ... waiting for RPC ... from GSP` without an Xid",
        "reset_gpu",
        NVRM,
        _gsp,
    ),
    Rule(
        "reset-required",
        "A GPU must be reset",
        "`NV_ERR_RESET_REQUIRED` in the log; nvidia-smi's recovery action and reset status",
        "what it names",
        SMI,
        _reset_required,
    ),
    Rule(
        "uvm-fatal",
        "Unified memory has given up",
        "`Encountered a global fatal error` of nvidia-uvm",
        "reset_gpu",
        "NVIDIA open-gpu-kernel-modules, kernel-open/nvidia-uvm/uvm_global.c",
        _uvm,
    ),
    Rule(
        "smi-message",
        "nvidia-smi fails",
        "its message",
        "by the message: restart_app, reset_gpu, reboot or repair",
        SMI,
        _smi_message,
    ),
    Rule(
        "fabric-manager",
        "No fabric manager on a machine with NVSwitches",
        "PCI functions of NVSwitches, and the state of the service",
        "restart_app",
        FABRIC_GUIDE,
        _fabric_manager,
    ),
    Rule(
        "pcie-error",
        "PCIe errors at a GPU",
        "AER lines of an nvidia function, or of a port above one that could not recover; AER counters in sysfs",
        "reboot when fatal, else none; corrected ones count from many on",
        AER,
        _pcie,
    ),
    Rule(
        "link-width",
        "A PCIe link with fewer lanes than it could have",
        "the link's width in sysfs",
        "none; watch",
        AER,
        _link_width,
    ),
    Rule(
        "memory",
        "Memory errors of a GPU",
        "nvidia-smi's ECC counters, remapped rows, retired pages and pending repairs",
        "reset_gpu where a repair waits for it, repair where none is possible",
        MEMORY,
        _memory,
    ),
    Rule(
        "slowed",
        "The hardware slows GPUs down",
        "nvidia-smi's clock event reasons: power brake, heat, hardware slowdown",
        "none; watch",
        SMI,
        _slowed,
    ),
    Rule("persistence-off", "Persistence mode is off", "nvidia-smi", "none", SMI, _persistence),
)


def check(seen: RuleInput) -> list[Finding]:
    """Every finding of every rule."""
    return [finding for rule in RULES for finding in rule.check(rule, seen)]
