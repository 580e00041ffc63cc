"""The health rules: each one turns the data of a machine into findings.

`RULES` is the whole list; ``gpunodes health rules`` and the table in docs/health.md are generated from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpunodes.ansible.module_utils.gpunodes.probe.known import STUCK_S
from gpunodes.health import catalog, patterns, scan
from gpunodes.health.model import Action, Finding, LineKind, LogRecord, SiteRules, State, Time

if TYPE_CHECKING:
    from gpunodes.health.facts import Facts
    from gpunodes.health.smi import SmiGpu

CATALOG = "NVIDIA Xid catalog, docs.nvidia.com/deploy/xid-errors"
FABRIC_GUIDE = "NVIDIA Fabric Manager user guide, appendix D"
NVRM = "NVIDIA open-gpu-kernel-modules, kernel-open/nvidia"
SMI = "nvidia-smi(1); NVML API reference"
MEMORY = "NVIDIA GPU memory error management, docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt"
HUNG_TASK = "Linux kernel/hung_task.c; a GPU reset needs every client of the GPU to exit, and a stuck one cannot"
AER = "Linux Documentation/PCI/pcieaer-howto.rst"

MANY_APPS = 3
"""If this many different processes have the same fault on one GPU, the GPU is the suspect, not the applications."""
CORRECTED_MANY = 1000
"""Some corrected PCIe errors are normal for a link; this many are not."""


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
            scan.clean(line.encode(errors="replace")) for line in evidence
        ]
        return Finding(
            self.name,
            gpu if gpu is not None else next((record.gpu for record in records), ""),
            action,
            state or state_of(action, watch=watch),
            sum(record.count for record in records) or 1,
            min((record.first for record in records), key=_time_key).text if records else "",
            max((record.last for record in records), key=_time_key).text if records else "",
            tuple(lines[: scan.EVIDENCE_LINES]),
            source or self.source,
            scan.clean(message.encode(errors="replace")),
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


def _by_gpu(records: Iterable[LogRecord]) -> dict[str, list[LogRecord]]:
    groups: dict[str, list[LogRecord]] = {}
    for record in records:
        groups.setdefault(record.gpu, []).append(record)
    return groups


# --- tasks stuck in the driver ---------------------------------------------------------------------------------------


def _hung_in_driver(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    records = data.of_kinds(LineKind.HUNG_TASK)
    if records:
        tasks = ", ".join(record.detail for record in records[:5])
        message = f"Stuck in the NVIDIA driver: {tasks}."
        yield rule.finding(Action.REBOOT, message, *records, state=State.HUNG, hung=True)


def _task_in_driver(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    facts = data.facts
    asleep = [
        task
        for task in (facts.tasks if facts else ())
        if task.state == "D" and patterns.NVIDIA_FRAME.search("\n".join(task.stack).encode(errors="replace"))
    ]
    if not facts or not asleep:
        return
    task = max(asleep, key=lambda each: each.age_s)
    name = f"{scan.clean(task.name.encode(errors='replace'))} ({task.pid})"
    if task.age_s >= STUCK_S or facts.smi.status in {"stuck", "timeout"} or _unlogged_hung_tasks(data):
        message = f"{name} is in uninterruptible sleep in the NVIDIA driver and cannot be killed."
        yield rule.finding(Action.REBOOT, message, evidence=task.stack, state=State.HUNG, hung=True)
    else:
        message = f"{name} has waited in the NVIDIA driver for {task.age_s:.1f} s: check again."
        yield rule.finding(Action.NONE, message, evidence=task.stack, watch=True)


def _smi_stuck(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    smi = data.facts.smi if data.facts else None
    if smi is None or smi.status not in {"stuck", "timeout"}:
        return
    if smi.task_state == "D":
        message = f"nvidia-smi ({smi.pid}) is in uninterruptible sleep; gpunodes does not start a second one."
        yield rule.finding(Action.REBOOT, message, state=State.HUNG, hung=True)
    else:
        message = f"nvidia-smi did not finish within {smi.took_s:.0f} s."
        yield rule.finding(Action.RESET_GPU, message, state=State.SICK)


def _unlogged_hung_tasks(data: RuleInput) -> int:
    """The number of hung tasks that the kernel has counted, if its log reports no hung task at all."""
    count = data.facts.hung_detected if data.facts else None
    return 0 if data.of_kinds(LineKind.HUNG_TASK, LineKind.OTHER_HUNG_TASK) else count or 0


def _silent_hung_tasks(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    if count := _unlogged_hung_tasks(data):
        message = f"The kernel has counted {count} hung tasks, but its log does not show them."
        yield rule.finding(Action.NONE, message, watch=True)


def _soft_lockup(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    records = data.of_kinds(LineKind.SOFT_LOCKUP)
    if records:
        yield rule.finding(Action.REBOOT, "A CPU is in a soft lockup in the NVIDIA driver.", *records)


# --- missing GPUs ----------------------------------------------------------------------------------------------------


def _fallen_off_bus(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    for gpu, records in _by_gpu([*data.xids(catalog.FALLEN_OFF_BUS), *data.of_kinds(LineKind.OFF_BUS)]).items():
        code = catalog.FALLEN_OFF_BUS if any(record.code for record in records) else None
        action = _site_action(data.site.xids, code, Action.REBOOT)
        yield rule.finding(action, "The GPU no longer responds on PCIe.", *records, gpu=gpu, code=code)
    for shown in data.gpus:
        if shown.values.get("lost") == "GPU is lost":
            gpu = scan.address(shown.address.encode())
            yield rule.finding(Action.REBOOT, "nvidia-smi reports that the GPU is lost.", gpu=gpu)


def _no_answer(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    for function in data.facts.functions if data.facts else ():
        if not function.answers:
            message = "The PCI function does not respond: its configuration space reads as all ones."
            yield rule.finding(Action.REBOOT, message, gpu=function.address)


def _gpus_missing(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    if data.facts is None or data.facts.expected is None:
        return
    present = sum(function.is_gpu for function in data.facts.functions)
    if present < data.facts.expected:
        message = f"Only {present} of {data.facts.expected} GPUs are on the PCI bus."
        yield rule.finding(Action.REBOOT, message)


def _gpus_unused(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    facts = data.facts
    if facts is None or not facts.driver_loaded or facts.driver_gpus is None:
        return
    bound = sum(function.is_gpu and function.driver == "nvidia" for function in facts.functions)
    shown = len(data.gpus) if facts.smi.status == "ok" else facts.driver_gpus
    if min(shown, facts.driver_gpus) < bound:
        message = f"Only {min(shown, facts.driver_gpus)} of the {bound} GPUs that are bound to the driver work."
        yield rule.finding(Action.REBOOT, message)


# --- Xid and SXid ----------------------------------------------------------------------------------------------------


def _site_action(marked: object, code: int | None, action: Action) -> Action:
    """The site's action for a code; ``action`` if the site sets none."""
    return marked.get(code, action) if isinstance(marked, dict) else action


def _xid(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    groups: dict[tuple[str, int], list[LogRecord]] = {}
    for record in data.xids():
        if record.code not in {catalog.FALLEN_OFF_BUS, catalog.RECOVERY_CHANGED}:
            groups.setdefault((record.gpu, record.code), []).append(record)
    for (gpu, code), records in groups.items():
        advice = _xid_advice(code, records)
        title = f"Xid {code}, {advice.title}: {advice.advice}" if advice else f"Xid {code} is not in NVIDIA's catalog."
        action = advice.action if advice else Action.NONE
        watch = advice.watch if advice else True
        if code == catalog.CLEANUP and len(groups) > 1:
            action, title = Action.NONE, f"Xid {catalog.CLEANUP} is a consequence of the other codes."
        if code in data.site.xids:
            action, watch = data.site.xids[code], False
            title += f" This site's action for it: {action.value}."
        yield rule.finding(
            action, title, *records, gpu=gpu, watch=watch, code=code, source=advice.source if advice else ""
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


def _xid_recovery(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    for gpu, records in _by_gpu(data.xids(catalog.RECOVERY_CHANGED)).items():
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


def _xid_repeated(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    for gpu, records in _by_gpu(data.xids(*catalog.APP_FAULTS)).items():
        processes = max(record.processes for record in records)
        if processes >= MANY_APPS and not all(record.code in data.site.xids for record in records):
            message = (
                f"{processes} or more applications had the same fault on this GPU: run NVIDIA's field diagnostics."
            )
            yield rule.finding(Action.RESTART_APP, message, *records, gpu=gpu)


def _sxid(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    groups: dict[tuple[str, int], list[LogRecord]] = {}
    for record in data.of_kinds(LineKind.SXID):
        groups.setdefault((record.gpu, record.code), []).append(record)
    for (gpu, code), records in groups.items():
        advice = catalog.sxid(code)
        severities = {record.detail for record in records}
        action = advice.action if advice else Action.NONE
        if "fatal" in severities:
            action = max(action, Action.RESET_GPU, key=lambda each: each.rank)
        elif "non-fatal" in severities:
            action = Action.NONE
        message = f"SXid {code}" + (f", {advice.title}: {advice.advice}" if advice else " is not in NVIDIA's guide.")
        if code in data.site.sxids:
            action = data.site.sxids[code]
            message += f" This site's action for it: {action.value}."
        watch = advice is None or advice.watch
        yield rule.finding(action, message, *records, gpu=gpu, watch=watch, code=code)


# --- the driver ------------------------------------------------------------------------------------------------------


def _start_up(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    if not data.of_kinds(LineKind.INIT_CAUSE):
        for gpu, records in _by_gpu(data.of_kinds(LineKind.INIT_FAILED)).items():
            message = (
                "The driver could not initialise the GPU. If a warm reboot does not help, power the machine off and on."
            )
            yield rule.finding(Action.REBOOT, message, *records, gpu=gpu)


def _start_up_cause(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    records = data.of_kinds(LineKind.INIT_CAUSE)
    if records:
        message = (
            "The driver cannot initialise the GPU, and a reboot does not help:"
            " check the firmware, the module flavour and the BIOS."
        )
        yield rule.finding(Action.REPAIR, message, *records, *data.of_kinds(LineKind.INIT_FAILED))


def _mismatch(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    for record in data.of_kinds(LineKind.MISMATCH):
        client, version, module = record.detail.split(" ")
        named = client != "-" and not patterns.NVIDIA_TASK.fullmatch(client.encode())
        if named and _numbers(version) < _numbers(module):
            message = f"{client} still uses libraries {version}, but the driver is {module}: restart that program."
            yield rule.finding(Action.NONE, message, record, watch=True)
        else:
            message = f"A program uses libraries {version}, but the loaded driver is {module}."
            yield rule.finding(Action.REBOOT, message, record)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall("[0-9]{1,9}", version)]


def _versions_differ(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    facts = data.facts
    if facts and facts.module and facts.library and facts.module != facts.library:
        message = f"The loaded driver is {facts.module}, but the installed libraries are {facts.library}."
        yield rule.finding(Action.REBOOT, message)


def _not_loaded(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    facts = data.facts
    if facts is None or facts.driver_loaded is not False:
        return
    gpus = [function for function in facts.functions if function.is_gpu and function.driver in {"", "nouveau"}]
    if gpus:
        message = "No NVIDIA driver is loaded: install it, or find out why the kernel does not load it."
        yield rule.finding(Action.REPAIR, message, gpu=gpus[0].address)


def _gsp(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    records = data.of_kinds(LineKind.GSP_TIMEOUT)
    if records:
        message = (
            "The GPU System Processor (GSP) does not respond; every call waits for it, and nvidia-smi can take minutes."
        )
        yield rule.finding(Action.RESET_GPU, message, *records)


def _reset_required(rule: Rule, data: RuleInput) -> Iterator[Finding]:
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
            yield rule.finding(action, message, gpu=scan.address(shown.address.encode()))


_SMI_RECOVERY = {
    "reset": Action.RESET_GPU,
    "gpu reset": Action.RESET_GPU,
    "reboot": Action.REBOOT,
    "node reboot": Action.REBOOT,
    "drain p2p": Action.RESTART_APP,
    "drain and reset": Action.RESET_GPU,
}


def _uvm(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    records = data.of_kinds(LineKind.UVM_FATAL)
    if records:
        message = "Unified memory is off until nvidia-uvm is reloaded; all programs that use the GPUs must exit first."
        yield rule.finding(Action.RESET_GPU, message, *records)


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
_VALUES = {"GPU is lost", "GPU requires reset"}
# A container whose cgroup was rewritten: github.com/NVIDIA/nvidia-container-toolkit, troubleshooting.
_NVML_UNKNOWN = "Failed to initialize NVML: Unknown Error"


def _smi_message(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    messages = [(record.detail, record.gpu, record.evidence) for record in data.of_kinds(LineKind.SMI_MESSAGE)]
    if data.facts and data.facts.smi.status == "failed":
        messages.append((data.facts.smi.message, "", tuple(data.facts.smi.message.splitlines())))
    has_lost_gpu = any("lost" in each.values for each in data.gpus)
    for message, gpu, evidence in messages:
        if has_lost_gpu and message in _VALUES:
            continue  # nvidia-smi's fields have the same value, with its GPU
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


def _fabric_manager(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    facts = data.facts
    if facts and any(function.is_switch for function in facts.functions):
        state = (facts.services or {}).get("nvidia-fabricmanager", "")
        if state in {"failed", "inactive", "absent"}:
            message = f"The machine has NVSwitches, but its fabric manager is {state}: CUDA cannot start."
            yield rule.finding(Action.RESTART_APP, message, state=State.SICK)


# --- PCIe, memory, clocks --------------------------------------------------------------------------------------------


def _pcie(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    for record in data.of_kinds(LineKind.AER):
        if record.detail == "fatal":
            yield rule.finding(Action.REBOOT, "Fatal PCIe error: the GPU's link was reset.", record)
        else:
            watch = record.detail == "non-fatal" or record.count >= CORRECTED_MANY
            yield rule.finding(Action.NONE, f"PCIe errors: {record.detail}.", record, watch=watch)
    for function in data.facts.functions if data.facts else ():
        if function.aer_fatal or function.aer_nonfatal:
            message = f"PCIe errors since boot: {function.aer_fatal} fatal, {function.aer_nonfatal} non-fatal."
            yield rule.finding(Action.NONE, message, gpu=function.address, watch=True)


def _link_width(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    for function in data.facts.functions if data.facts else ():
        if function.is_gpu and function.width and function.max_width and function.width < function.max_width:
            message = f"The PCIe link uses only {function.width} of {function.max_width} lanes."
            yield rule.finding(Action.NONE, message, gpu=function.address, watch=True)


def _memory(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    for shown in data.gpus:
        gpu = scan.address(shown.address.encode())
        for name, action, message in _MEMORY:
            if shown.yes(name):
                yield rule.finding(action, message, gpu=gpu)
        if count := shown.number("ecc_volatile"):
            message = f"{count} uncorrectable memory errors since the driver was loaded."
            yield rule.finding(Action.RESET_GPU, message, gpu=gpu)
        elif count := shown.number("ecc_aggregate"):
            message = f"{count} uncorrectable memory errors in the GPU's lifetime, none since the driver was loaded."
            yield rule.finding(Action.NONE, message, gpu=gpu)


_MEMORY = (
    ("remap_failure", Action.REPAIR, "A memory row cannot be remapped: replace the board."),
    ("unrepairable_memory", Action.REPAIR, "The memory cannot be repaired: replace the board."),
    ("sram_threshold", Action.REPAIR, "More uncorrectable SRAM errors than NVIDIA allows: replace the board."),
    ("remap_pending", Action.RESET_GPU, "A memory row is pending remapping: reset the GPU."),
    ("pages_pending", Action.RESET_GPU, "A memory page is pending retirement: reset the GPU."),
    ("channel_repair", Action.RESET_GPU, "A memory channel repair is pending: reset the GPU."),
    ("tpc_repair", Action.RESET_GPU, "A TPC repair is pending: reset the GPU."),
)


def _slowed(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    braked = [shown for shown in data.gpus if shown.yes("power_brake")]
    if len(braked) > 1 and len(braked) == len(data.gpus):
        message = "The power brake is active on all GPUs: check the power supply of the machine and the site."
        yield rule.finding(Action.NONE, message, watch=True)
        return
    for shown in data.gpus:
        reasons = [text for name, text in _SLOWED.items() if shown.yes(name)]
        if reasons:
            message = f"The hardware slows the GPU down: {', '.join(reasons)}. A reboot does not help."
            yield rule.finding(Action.NONE, message, gpu=scan.address(shown.address.encode()), watch=True)


_SLOWED = {"power_brake": "power brake", "hw_thermal": "too hot", "hw_slowdown": "hardware slowdown"}


def _persistence(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    off = [shown for shown in data.gpus if shown.values.get("persistence") == "Disabled"]
    if off:
        yield rule.finding(
            Action.NONE, f"Persistence mode is off on {len(off)} GPUs: the first use after idle time is slow."
        )


RULES: tuple[Rule, ...] = (
    Rule(
        "hung-in-driver",
        "A task hangs in the NVIDIA driver",
        "the kernel's hung-task report: an nvidia module's frame in its stack, or a thread of the driver",
        "reboot",
        HUNG_TASK,
        _hung_in_driver,
    ),
    Rule(
        "task-in-driver",
        "A thread is in uninterruptible sleep in the NVIDIA driver",
        f"threads in state D for {STUCK_S:.0f} s, or for less with a stuck nvidia-smi or hung tasks missing in the log",
        "reboot; watch if it has just begun",
        HUNG_TASK,
        _task_in_driver,
    ),
    Rule(
        "smi-stuck",
        "nvidia-smi does not finish",
        "nvidia-smi after its deadline; in state D it is stuck in the driver",
        "reboot; reset_gpu if it is not in state D",
        HUNG_TASK,
        _smi_stuck,
    ),
    Rule(
        "silent-hung-tasks",
        "Hung tasks that are not in the log",
        "kernel.hung_task_detect_count, and no hung task in the log (the kernel stops after hung_task_warnings)",
        "none; watch",
        "Linux Documentation/admin-guide/sysctl/kernel.rst",
        _silent_hung_tasks,
    ),
    Rule(
        "soft-lockup-in-driver",
        "A CPU is in a soft lockup in the NVIDIA driver",
        "the kernel's soft-lockup report: an nvidia module's frame in its stack, or a thread of the driver",
        "reboot",
        "Linux kernel/watchdog.c",
        _soft_lockup,
    ),
    Rule(
        "fallen-off-bus",
        "A GPU has fallen off the bus",
        'Xid 79, the driver\'s "fallen off the bus" lines, nvidia-smi\'s "GPU is lost"',
        "reboot",
        CATALOG,
        _fallen_off_bus,
    ),
    Rule(
        "no-answer",
        "A PCI function does not respond",
        "the configuration space of an NVIDIA function reads as all ones",
        "reboot",
        "PCI Express base specification, completion without data",
        _no_answer,
    ),
    Rule(
        "gpus-missing",
        "Fewer GPUs on the PCI bus than expected",
        "PCI functions compared with the setting, else with the boot log",
        "reboot",
        "the site's setting, or the machine's boot log",
        _gpus_missing,
    ),
    Rule(
        "gpus-unused",
        "GPUs that are bound to the driver but do not work",
        "PCI functions bound to the driver compared with /proc/driver/nvidia and nvidia-smi",
        "reboot",
        NVRM,
        _gpus_unused,
    ),
    Rule(
        "xid",
        "The driver reports an error (Xid)",
        "lines `NVRM: Xid`; 48 with or without 63 and 64, 45 alone or after another, 144 to 150 by their registers",
        "the catalog's action for the code; the site can set its own",
        CATALOG,
        _xid,
    ),
    Rule(
        "xid-recovery",
        "The driver requests a recovery action (Xid 154)",
        "the number in the last such line of each GPU",
        "none, restart_app, reset_gpu or reboot",
        "NVIDIA open-gpu-kernel-modules, GPU recovery action",
        _xid_recovery,
    ),
    Rule(
        "xid-repeated",
        "The same application fault from several applications on one GPU",
        f"Xid 13 or 31 from {MANY_APPS} or more processes",
        "restart_app, then field diagnostics",
        CATALOG,
        _xid_repeated,
    ),
    Rule(
        "sxid",
        "An NVSwitch reports an error (SXid)",
        "lines `SXid`: their severity; NVIDIA's table for lines without one and for errors that stop the whole fabric",
        "none, reset_gpu or reboot; the site can set its own",
        FABRIC_GUIDE,
        _sxid,
    ),
    Rule(
        "start-up-failed",
        "The driver cannot initialise a GPU",
        "`RmInitAdapter failed`, `rm_init_adapter failed`, `probe routine failed`",
        "reboot",
        NVRM,
        _start_up,
    ),
    Rule(
        "start-up-impossible",
        "The driver cannot initialise a GPU, and a reboot does not help",
        "lines about missing firmware, the wrong module flavour, or memory regions that the BIOS did not assign",
        "repair",
        NVRM,
        _start_up_cause,
    ),
    Rule(
        "version-mismatch",
        "Libraries and driver have different versions",
        "`NVRM: API mismatch`; a named program with libraries older than the driver only needs a restart",
        "reboot; none for one outdated program",
        NVRM,
        _mismatch,
    ),
    Rule(
        "versions-differ",
        "The loaded driver is not the installed one",
        "the version of the loaded module compared with that of the libraries",
        "reboot",
        NVRM,
        _versions_differ,
    ),
    Rule(
        "driver-not-loaded",
        "GPUs without an NVIDIA driver",
        "PCI functions that are bound to no driver, or to nouveau",
        "repair",
        NVRM,
        _not_loaded,
    ),
    Rule(
        "gsp-timeout",
        "The GPU System Processor (GSP) does not respond",
        "`Timeout ... waiting for RPC ... from GSP` without an Xid",
        "reset_gpu",
        NVRM,
        _gsp,
    ),
    Rule(
        "reset-required",
        "A GPU must be reset",
        "`NV_ERR_RESET_REQUIRED` in the log; nvidia-smi's recovery action and reset status",
        "the reported action",
        SMI,
        _reset_required,
    ),
    Rule(
        "uvm-fatal",
        "Fatal error of unified memory",
        "nvidia-uvm's `Encountered a global fatal error`",
        "reset_gpu",
        "NVIDIA open-gpu-kernel-modules, kernel-open/nvidia-uvm/uvm_global.c",
        _uvm,
    ),
    Rule(
        "smi-message",
        "nvidia-smi fails",
        "nvidia-smi's message",
        "depends on the message: restart_app, reset_gpu, reboot or repair",
        SMI,
        _smi_message,
    ),
    Rule(
        "fabric-manager",
        "Fabric manager does not run on a machine with NVSwitches",
        "PCI functions of NVSwitches, and the state of the service",
        "restart_app",
        FABRIC_GUIDE,
        _fabric_manager,
    ),
    Rule(
        "pcie-error",
        "PCIe errors of a GPU",
        "AER lines of an nvidia function, or of the port above one that could not recover; AER counters in sysfs",
        f"reboot if fatal, else none; watch non-fatal errors, and corrected ones from {CORRECTED_MANY} on",
        AER,
        _pcie,
    ),
    Rule(
        "link-width",
        "A PCIe link uses fewer lanes than it supports",
        "the link width in sysfs",
        "none; watch",
        AER,
        _link_width,
    ),
    Rule(
        "memory",
        "Memory errors of a GPU",
        "nvidia-smi's ECC counters, remapped rows, retired pages and pending repairs",
        "reset_gpu for pending repairs and new errors; repair if the board must be replaced",
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


def check(data: RuleInput) -> list[Finding]:
    """All findings of all rules."""
    return [finding for rule in RULES for finding in rule.check(rule, data)]
