"""What the tools of a burn-in report: ``dcgmi diag``, ``all_reduce_perf`` and the kernel log. Pure.

Sources: github.com/NVIDIA/DCGM, dcgmi/Diag.cpp and NvvsJsonStrings.h of 3.1, 3.3 and 4.6; github.com/NVIDIA/nccl-tests,
src/util.cu.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_STATES = {"pass": PASSED, "skip": SKIPPED, "skipped": SKIPPED, "not run": SKIPPED, "notrun": SKIPPED}
_NAMES = ("DCGM Diagnostic", "DCGM GPU Diagnostic")
"""The root of the document: DCGM 4, and 1 to 3."""
_TEXT = 300
_MANY = 4096
"""More results than the tests of any machine have."""
_SHOWN = 3


@dataclass(frozen=True)
class TestResult:
    """One test of one GPU; ``gpu`` is empty for a test of the whole machine."""

    test: str
    gpu: str
    state: str
    message: str = ""

    def __str__(self) -> str:
        return _text(f"{self.test}{f' on {self.gpu}' if self.gpu else ''}: {self.message or self.state}")


@dataclass(frozen=True)
class Diagnosis:
    """The report of ``dcgmi diag -j``; ``error`` is why it could not run, or why its report cannot be read."""

    version: str = ""
    results: Sequence[TestResult] = ()
    error: str = ""


def diagnosis(text: str, addresses: Mapping[str, str]) -> Diagnosis:
    """Parse the output of ``dcgmi diag -j``; ``addresses`` are the PCI addresses by DCGM's numbers of GPUs."""
    document = _document(text)
    if document is None:
        return Diagnosis(error=_text(_last(text)) or "it printed nothing")
    root = next((found for found in map(document.get, _NAMES) if isinstance(found, dict)), {})
    metadata = document.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    version = _text(str(metadata.get("version") or root.get("version") or ""))
    if error := root.get("runtime_error"):
        return Diagnosis(version, error=_text(str(error)))
    results = tuple(_results(root, addresses))[:_MANY]
    return Diagnosis(version, results, "" if results else "it reports no test")


def _document(text: str) -> dict[str, Any] | None:
    """The JSON object in a text that other lines may surround."""
    try:
        found = json.loads(text[text.find("{") : text.rfind("}") + 1])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _results(root: Mapping[str, Any], addresses: Mapping[str, str]) -> Iterator[TestResult]:
    for category in _objects(root.get("test_categories")):
        for test in _objects(category.get("tests")):
            name = _text(str(test.get("name") or "a test without a name"))
            found = [_result(name, each, addresses) for each in _objects(test.get("results"))]
            summary = test.get("test_summary")
            if isinstance(summary, dict):
                whole = _result(name, summary, addresses)
                # The summary repeats the failure of an entity, or is the only report of it.
                if whole.state == FAILED and not any(each.state == FAILED for each in found):
                    found.append(whole)
            yield from found


def _result(name: str, entry: Mapping[str, Any], addresses: Mapping[str, str]) -> TestResult:
    status = str(entry.get("status") or "").strip().lower()
    # A state that is not known is not a pass.
    state = _STATES.get(status, FAILED)
    message = "; ".join(_messages(entry.get("warnings"))) if state == FAILED else ""
    return TestResult(name, _entity(entry, addresses), state, _text(message))


def _entity(entry: Mapping[str, Any], addresses: Mapping[str, str]) -> str:
    """What was tested: one GPU with its PCI address, several, or another entity."""
    group = str(entry.get("entity_group") or "GPU")
    value = next((entry[key] for key in ("entity_id", "gpu_id", "gpu_ids") if entry.get(key) not in (None, "")), None)
    numbers = re.findall(r"\d{1,4}", str(value)) if value is not None else []
    if group.upper() != "GPU":
        return _text(f"{group} {', '.join(numbers)}".strip())
    named = [f"{number} ({addresses[number]})" if number in addresses else number for number in numbers]
    return _text(f"GPU{'s' if len(named) > 1 else ''} {', '.join(named)}") if named else ""


def _messages(warnings: Any) -> Iterator[str]:
    """The warnings of a result: texts, or objects whose text has one of two names."""
    for each in warnings if isinstance(warnings, list) else [warnings]:
        found = each.get("warning") or each.get("warnings") if isinstance(each, dict) else each
        if isinstance(found, str) and found.strip():
            yield found.strip()


def _objects(value: Any) -> list[Mapping[str, Any]]:
    """The objects of a list; DCGM 3 leaves null for tests that it did not run."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def addresses(text: str) -> dict[str, str]:
    """PCI addresses by DCGM's numbers of GPUs, from ``dcgmi discovery -l``."""
    found: dict[str, str] = {}
    number = ""
    for line in text.splitlines():
        row = re.match(r"\|\s*(\d{1,4})?\s*\|(.*)", line)
        if row:
            number = row.group(1) or number
            address = re.search(r"PCI Bus ID:\s*([0-9A-Fa-f]{4,8}(?::[0-9A-Fa-f]{2}){2}\.[0-7])", row.group(2))
            if number and address:
                found[number] = address.group(1).lower()[-12:]
    return found


def xids(messages: Iterable[str]) -> list[TestResult]:
    """The Xids in messages of the kernel, each code of each GPU once; a name in another message is none."""
    pattern = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]{4,16})[^)\n]{0,40}\): (\d{1,4})")
    found = [(match[1].lower(), match[2]) for match in map(pattern.match, messages) if match]
    return [
        TestResult("kernel log", f"GPU {address}", FAILED, f"Xid {code} during the burn-in")
        for address, code in dict.fromkeys(found)
    ]


@dataclass(frozen=True)
class Bandwidth:
    """The end of a report of ``all_reduce_perf``: the bus bandwidth in GB/s, and the number of wrong values."""

    gbs: float
    wrong: int


def bandwidth(text: str) -> Bandwidth | None:
    """The result of ``all_reduce_perf``; None if it did not come to its end."""
    gbs = re.search(r"^# Avg bus bandwidth\s+: ([0-9]{1,9}(?:\.[0-9]{1,9})?)(?:e[+-]?\d\d?)?\s", text, re.MULTILINE)
    wrong = re.search(r"^# Out of bounds values\s+: (\d{1,18})\s", text, re.MULTILINE)
    if gbs is None or wrong is None:
        return None
    return Bandwidth(float(gbs.group(0).rpartition(":")[2]), int(wrong.group(1)))


def failure(results: Sequence[TestResult]) -> str:
    """The failed tests as one sentence, "" if there are none."""
    failed = [str(each) for each in results if each.state == FAILED]
    more = f", and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
    return ", ".join(failed[:_SHOWN]) + more


def summary(results: Sequence[TestResult]) -> str:
    """How many tests passed and were skipped; tests of several GPUs count once."""
    by_test: dict[str, set[str]] = {}
    for each in results:
        by_test.setdefault(each.test, set()).add(each.state)
    skipped = [name for name, states in by_test.items() if states == {SKIPPED}]
    passed = [name for name, states in by_test.items() if FAILED not in states and states != {SKIPPED}]
    return f"{len(passed)} tests passed" + (f", skipped: {', '.join(skipped)}" if skipped else "")


def _last(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _text(text: str) -> str:
    """One printable line of limited length."""
    line = " ".join(text.split())
    return "".join(char for char in line if char.isprintable())[:_TEXT]
