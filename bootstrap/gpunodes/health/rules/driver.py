"""The driver: it is loaded, has one version, initialises all GPUs, and its GSP responds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from gpunodes.health import patterns
from gpunodes.health.evidence import address
from gpunodes.health.lines import OVERCOME
from gpunodes.health.model import Action, Finding, LineKind, LogRecord
from gpunodes.health.rules.rule import Rule, RuleInput, by_gpu


def start_up_failed(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    if not data.of_kinds(LineKind.INIT_CAUSE):
        for gpu, records in by_gpu(_not_overcome(data.of_kinds(LineKind.INIT_FAILED), data)).items():
            if _started_since(gpu, data):
                message = "The driver could not initialise the GPU at first, and did since."
                yield rule.finding(Action.NONE, message, *records, gpu=gpu, watch=True)
                continue
            message = (
                "The driver could not initialise the GPU. If a warm reboot does not help, power the machine off and on."
            )
            yield rule.finding(Action.REBOOT, message, *records, gpu=gpu)


def _not_overcome(records: Sequence[LogRecord], data: RuleInput) -> list[LogRecord]:
    """Records without those that the driver can overcome, of GPUs that nvidia-smi shows."""
    working = _working(data)
    return [record for record in records if record.detail != OVERCOME or record.gpu not in working]


def _working(data: RuleInput) -> set[str]:
    """The addresses of the GPUs that nvidia-smi shows."""
    return {address(shown.address.encode()) for shown in data.gpus if not shown.unread and "lost" not in shown.values}


def _started_since(gpu: str, data: RuleInput) -> bool:
    """Whether nvidia-smi, which initialises GPUs, shows this GPU of a live machine; without an address, all of them."""
    if data.facts is None or data.facts.smi.status != "ok":
        return False
    present = {function.address for function in data.facts.functions if function.is_gpu}
    return bool(present) and ({gpu} if gpu else present) <= _working(data)


def start_up_impossible(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    records = _not_overcome(data.of_kinds(LineKind.INIT_CAUSE), data)
    if records:
        message = (
            "The driver cannot initialise the GPU, and a reboot does not help:"
            " check the firmware, the module flavour and the BIOS."
        )
        yield rule.finding(Action.REPAIR, message, *records, *data.of_kinds(LineKind.INIT_FAILED))


def not_probed(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    for record in data.of_kinds(LineKind.NOT_PROBED):
        if record.detail == "all":
            message = "Another driver owns all GPUs: unload it and blacklist it (nouveau), then load NVIDIA's."
            yield rule.finding(Action.REPAIR, message, record)
        else:
            message = "Another driver owns some GPUs: vfio-pci, for virtual machines, or nouveau, which must not load."
            yield rule.finding(Action.NONE, message, record, watch=True)


def version_mismatch(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    facts = data.facts
    # The machine's own libraries fit. A pod may have others, and any process with a GPU can report any version.
    fits = facts is not None and (facts.smi.status == "ok" or (facts.module != "" and facts.module == facts.library))
    for record in data.of_kinds(LineKind.MISMATCH):
        client, version, module = record.detail.split(" ")
        named = client != "-" and not patterns.NVIDIA_TASK.fullmatch(client.encode())
        if fits:
            message = f"A program ({client}) uses libraries {version} that are not those of the machine: restart it."
            yield rule.finding(Action.NONE, message, record, watch=True)
        elif named and _numbers(version) < _numbers(module):
            message = f"{client} still uses libraries {version}, but the driver is {module}: restart that program."
            yield rule.finding(Action.NONE, message, record, watch=True)
        else:
            message = f"A program uses libraries {version}, but the loaded driver is {module}."
            yield rule.finding(Action.REBOOT, message, record)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall("[0-9]{1,9}", version)]


def versions_differ(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    facts = data.facts
    if facts and facts.module and facts.library and facts.module != facts.library:
        message = f"The loaded driver is {facts.module}, but the installed libraries are {facts.library}."
        yield rule.finding(Action.REBOOT, message)


def driver_not_loaded(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    facts = data.facts
    if facts is None or facts.driver_loaded:
        return
    gpus = [function for function in facts.functions if function.is_gpu and function.driver in {"", "nouveau"}]
    if gpus:
        message = "No NVIDIA driver is loaded: install it, or find out why the kernel does not load it."
        yield rule.finding(Action.REPAIR, message, gpu=gpus[0].address)


def gsp_timeout(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    records = data.of_kinds(LineKind.GSP_TIMEOUT)
    if records:
        message = (
            "The GPU System Processor (GSP) does not respond; every call waits for it, and nvidia-smi can take minutes."
        )
        yield rule.finding(Action.RESET_GPU, message, *records)


def uvm_fatal(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    records = data.of_kinds(LineKind.UVM_FATAL)
    if records:
        message = "Unified memory is off until nvidia-uvm is reloaded; all programs that use the GPUs must exit first."
        yield rule.finding(Action.RESET_GPU, message, *records)


def gpus_unused(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    facts = data.facts
    # The list of a collector that did not end lacks GPUs.
    if facts is None or not facts.driver_loaded or facts.lacks("driver"):
        return
    bound = sum(function.is_gpu and function.driver == "nvidia" for function in facts.functions)
    shown = len(data.gpus) if facts.smi.status == "ok" else facts.driver_gpus
    if min(shown, facts.driver_gpus) < bound:
        message = f"Only {min(shown, facts.driver_gpus)} of the {bound} GPUs that are bound to the driver work."
        yield rule.finding(Action.REBOOT, message)
