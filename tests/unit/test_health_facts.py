"""Verdicts on the probe's facts."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from gpunodes.health import judge, rules, shape, tables
from gpunodes.health.model import Action, SiteRules, State, Verdict
from gpunodes.operations import health
from gpunodes.views import health as view

FILES = Path(__file__).parent / "fixtures" / "health"
FRAME = "os_acquire_mutex+0x34/0x40 [nvidia]"
XML = '<nvidia_smi_log><gpu id="00000000:3B:00.0"><persistence_mode>Enabled</persistence_mode>{}</gpu></nvidia_smi_log>'
REMAP_FAILED = "<remapped_rows><remapped_row_failure>Yes</remapped_row_failure></remapped_rows>"
NO_SMI = {"status": "absent", "xml": None}
NO_LOG = {"source": None, "text": ""}
NOT_ROOT = [
    {"what": "privilege", "error": "not running as root: stacks, and possibly the kernel log, cannot be read"},
    {"what": "kmsg", "error": "Operation not permitted"},
]
GPU: Mapping[str, Any] = {
    "address": "0000:3b:00.0",
    "vendor": "10de",
    "device": "2330",
    "class": "030200",
    "driver": "nvidia",
    "responds": True,
    "link": {"speed": "32.0 GT/s", "width": 16, "max_speed": "32.0 GT/s", "max_width": 16},
    "aer": {"correctable": 3, "nonfatal": 0, "fatal": 0},
}
SWITCH = {**GPU, "address": "0000:c1:00.0", "device": "22a3", "class": "068000", "driver": "nvidia-nvswitch"}
HEALTHY: Mapping[str, Any] = {
    "schema": "gpunodes.probe/1",
    "time": 1772343555.0,
    "boot_id": "01234567-89ab-cdef-0123-456789abcdef",
    "uptime_s": 5000.0,
    "took_s": 0.4,
    "kernel": "6.12.0",
    "errors": [],
    "log": {"source": "journal", "cut": False, "text": "[1.000000] Booting\n", "repeats": []},
    "tasks": [],
    "hung_task": {"detect_count": 0, "timeout_s": 120, "warnings": 10},
    "smi": {
        "status": "ok",
        "pid": None,
        "rc": 0,
        "took_s": 1.0,
        "task_state": None,
        "still_s": 0.0,
        "xml": XML.format(""),
        "message": "",
    },
    "pci": [GPU],
    "driver": {
        "loaded": True,
        "module": "580.65.06",
        "library": "580.65.06",
        "open": True,
        "gpus": [{"address": "0000:3b:00.0", "minor": 0, "model": "NVIDIA H100"}],
    },
    "services": {"nvidia-persistenced": "active", "nvidia-fabricmanager": "absent"},
    "expected": {"gpus": 1, "from": "boot log"},
}


def with_(**parts: Any) -> dict[str, Any]:
    """The facts of a healthy machine with these parts changed."""
    return {
        name: {**value, **parts[name]}
        if name in parts and isinstance(value, dict) and isinstance(parts[name], dict)
        else parts.get(name, value)
        for name, value in HEALTHY.items()
    }


def judged(facts: Mapping[str, Any]) -> Verdict:
    assert shape.violation(facts) == ""
    return judge.judge_facts("gpu-1", facts, SiteRules())


def test_a_healthy_machine() -> None:
    verdict = judged(HEALTHY)
    assert (verdict.state, verdict.action, verdict.findings) == (State.HEALTHY, Action.NONE, ())
    assert (verdict.gpus_expected, verdict.gpus_seen, verdict.boot_id) == (1, 1, HEALTHY["boot_id"])


def test_a_live_verdict_says_what_was_read() -> None:
    facts = with_(log={"text": "[1.0] NVRM: loading\n[2.0] usb\n"})
    no_gpus = {"gpus": None, "from": None}
    assert view.listing([judged(facts)]).startswith("gpu-1: healthy: 2 kernel lines, 1 GPU responds\n")
    cpu = with_(log={"text": "[1.0] usb\n"}, pci=[], smi=NO_SMI, expected=no_gpus)
    assert view.listing([judged(cpu)]).startswith("gpu-1: healthy: 1 kernel line, no NVIDIA GPU\n")
    nothing = judged(with_(log=NO_LOG, pci=[], smi=NO_SMI, expected=no_gpus, errors=NOT_ROOT))
    assert (nothing.state, "ansible_become" in nothing.wanted) == (State.UNKNOWN, True)
    assert nothing.wanted.startswith("neither the kernel log nor nvidia-smi nor the PCI bus could be read (Operation")


@pytest.mark.parametrize(
    ("what", "cut", "state"),
    [
        ("journal", True, State.UNKNOWN),
        ("log", False, State.UNKNOWN),
        # The journal has the whole log then.
        ("kmsg", False, State.HEALTHY),
        # Long logs are bounded: what matters stays.
        ("", True, State.HEALTHY),
    ],
)
def test_a_kernel_log_that_was_read_in_part_is_unknown(what: str, cut: bool, state: State) -> None:
    """An Xid may be in the part that the ring buffer lost."""
    found = judged(with_(log={"cut": cut}, errors=[{"what": what, "error": "it took 15 s"}] if what else []))
    assert found.state is state
    assert found.wanted.startswith("the kernel log was read in part only (it took 15 s): pass ") is (
        state is State.UNKNOWN
    )


@pytest.mark.parametrize("parts", [{}, {"smi": NO_SMI}])
def test_a_machine_whose_kernel_log_could_not_be_read_is_unknown(parts: dict[str, Any]) -> None:
    """Whatever responds: the errors of a GPU, and tasks that hang, are in the log."""
    (line, count) = view.listing([judged(with_(log=NO_LOG, errors=NOT_ROOT, **parts))]).splitlines()
    assert line.startswith(
        "gpu-1: unknown: the kernel log could not be read (Operation not permitted): give the probe "
    )
    assert count == "0 of 1 healthy."
    late = judged(with_(log=NO_LOG, errors=[{"what": "log", "error": "did not finish within 8 s"}], **parts))
    assert (late.state, late.kernel_lines) == (State.UNKNOWN, 0)
    assert late.wanted.startswith("the kernel log could not be read (did not finish within 8 s): pass ")
    found = judged(with_(log=NO_LOG, errors=NOT_ROOT, tasks=[task("python3", FRAME)], **parts))
    assert (found.state, found.wanted) == (State.HUNG, "")


def test_without_root_a_machine_is_healthy_if_its_kernel_log_could_be_read() -> None:
    verdict = judged(with_(errors=NOT_ROOT[:1]))
    assert view.listing([verdict]).startswith("gpu-1: healthy: 1 kernel line, 1 GPU responds\n")


def test_the_evidence_of_a_stuck_thread_begins_with_the_frame_that_proves_it() -> None:
    stack = ("__schedule+0x1/0x2", "schedule+0x1/0x2", "rwsem_down_write_slowpath+0x1/0x2", FRAME)
    assert judged(with_(tasks=[task("python3", *stack)])).findings[0].evidence[0] == FRAME


def task(name: str, *stack: str, state: str = "D") -> dict[str, Any]:
    return {"pid": 7, "comm": name, "state": state, "kthread": False, "wchan": "", "stack": list(stack), "age_s": 60.0}


TROUBLES: Mapping[str, tuple[dict[str, Any], str, Action, State]] = {
    "log": (
        with_(log={"text": "[1.0] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"}),
        "fallen-off-bus",
        Action.REBOOT,
        State.SICK,
    ),
    "stack": (with_(tasks=[task("python3", FRAME)]), "task-in-driver", Action.REBOOT, State.HUNG),
    "stack, recent": (
        with_(tasks=[{**task("python3", FRAME), "age_s": 2.0}]),
        "task-in-driver",
        Action.NONE,
        State.DEGRADED,
    ),
    "smi stuck": (
        with_(smi={**NO_SMI, "status": "stuck", "pid": 7, "task_state": "D", "still_s": 20.0}),
        "smi-stuck",
        Action.REBOOT,
        State.HUNG,
    ),
    "smi slow": (
        with_(smi={"status": "timeout", "pid": 7, "task_state": "S", "still_s": 20.0, "xml": None}),
        "smi-stuck",
        Action.RESET_GPU,
        State.SICK,
    ),
    "smi moves": (
        with_(smi={"status": "timeout", "pid": 7, "task_state": "D", "took_s": 20.0, "still_s": 0.4, "xml": None}),
        "smi-stuck",
        Action.NONE,
        State.DEGRADED,
    ),
    "smi had a second": (
        with_(smi={"status": "timeout", "took_s": 1.0, "still_s": 1.0, "xml": None}),
        "smi-stuck",
        Action.NONE,
        State.DEGRADED,
    ),
    "smi failed": (
        with_(
            smi={
                "status": "failed",
                "xml": None,
                "message": "Failed to initialize NVML: Driver/library version mismatch",
            }
        ),
        "smi-message",
        Action.REBOOT,
        State.SICK,
    ),
    "smi odd": (
        with_(smi={"status": "failed", "xml": None, "message": "Segmentation fault"}),
        "smi-message",
        Action.NONE,
        State.DEGRADED,
    ),
    "silent": (with_(hung_task={"detect_count": 3}), "silent-hung-tasks", Action.NONE, State.DEGRADED),
    "no answer": (with_(pci=[{**GPU, "responds": False}]), "no-answer", Action.REBOOT, State.SICK),
    "gone": (with_(expected={"gpus": 2}), "gpus-missing", Action.REBOOT, State.SICK),
    "unused": (with_(pci=[GPU, {**GPU, "address": "0000:5e:00.0"}]), "gpus-unused", Action.REBOOT, State.SICK),
    "versions": (with_(driver={"library": "580.95.05"}), "versions-differ", Action.REBOOT, State.SICK),
    "no driver": (
        with_(
            driver={"loaded": False, "gpus": []}, pci=[{**GPU, "driver": None}], smi={"status": "absent", "xml": None}
        ),
        "driver-not-loaded",
        Action.REPAIR,
        State.SICK,
    ),
    "fabric": (
        with_(pci=[GPU, SWITCH], services={"nvidia-fabricmanager": "failed"}),
        "fabric-manager",
        Action.RESTART_APP,
        State.SICK,
    ),
    "aer": (with_(pci=[{**GPU, "aer": {**GPU["aer"], "fatal": 1}}]), "pcie-error", Action.NONE, State.DEGRADED),
    "link": (with_(pci=[{**GPU, "link": {**GPU["link"], "width": 4}}]), "link-width", Action.NONE, State.DEGRADED),
    "remap": (
        with_(
            smi={"xml": XML.format("<remapped_rows><remapped_row_failure>Yes</remapped_row_failure></remapped_rows>")}
        ),
        "memory",
        Action.REPAIR,
        State.SICK,
    ),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_trouble(name: str) -> None:
    facts, rule, action, state = TROUBLES[name]
    verdict = judged(facts)
    assert [finding.rule for finding in verdict.findings] == [rule]
    assert (verdict.action, verdict.state, verdict.hung_in_driver) == (action, state, state is State.HUNG)


def test_the_evidence_of_nvidia_smi_has_no_empty_lines() -> None:
    message = "\nNVIDIA-SMI has failed.\n  \nInstall the newest driver.\n\n"
    [finding] = judged(with_(smi={"status": "failed", "xml": None, "message": message})).findings
    assert finding.evidence == ("NVIDIA-SMI has failed.", "Install the newest driver.")


OTHER_HANG = (
    "[9.0] INFO: task mmfsd:77 blocked for more than 120 seconds.\n[9.1]  cxiWaitEventWait+0x1b/0x30 [mmfslinux]\n"
)


@pytest.mark.parametrize(
    "parts",
    [
        {"hung_task": {"detect_count": 3}},
        {"smi": {"status": "timeout", "took_s": 20.0, "still_s": 0.4, "xml": None}},
        {"log": {**HEALTHY["log"], "text": OTHER_HANG}, "hung_task": {"detect_count": 3}},
    ],
    ids=["hung tasks counted, none logged", "nvidia-smi is slow", "hung tasks elsewhere"],
)
def test_a_short_wait_in_the_driver_is_no_hang_whatever_else_is_seen(parts: dict[str, Any]) -> None:
    verdict = judged(with_(tasks=[{**task("python3", FRAME), "age_s": 2.0}], **parts))
    assert (verdict.state, verdict.action, verdict.hung_in_driver) == (State.DEGRADED, Action.NONE, False)


@pytest.mark.parametrize(
    "facts",
    [
        with_(log={"text": OTHER_HANG}, hung_task={"detect_count": 3}),
        with_(tasks=[task("python3", "nfs_wait_bit_killable+0x1e/0x90 [nfs]")]),
        with_(tasks=[task("nvidia-smi", FRAME, state="R")]),
        with_(tasks=[task("[nvidia]", "+0x1/0x1 nvidia")]),
        with_(pci=[GPU, {**GPU, "address": "0000:5e:00.0", "driver": "vfio-pci"}]),
        with_(pci=[GPU, SWITCH], services={"nvidia-fabricmanager": "active"}),
        # In a container.
        with_(pci=[GPU, SWITCH], tasks=[task("nv-fabricmanage", "do_sys_poll+0x1/0x2", state="S")]),
        # Collectors that did not end.
        with_(pci=[GPU, {**GPU, "address": "0000:5e:00.0"}], errors=[{"what": "driver", "error": "late"}]),
        with_(expected={"gpus": 2}, errors=[{"what": "pci", "error": "late"}]),
        with_(log={"text": "[1.0] worker: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"}),
    ],
)
def test_no_trouble(facts: dict[str, Any]) -> None:
    assert judged(facts).findings == ()


INIT_FAILED = "[9.0] NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0x0:2142)\n"
MINOR = "[9.0] NVRM: rm_init_adapter failed, device minor number 0\n"


@pytest.mark.parametrize(
    ("parts", "action"),
    [
        ({}, Action.NONE),
        ({"smi": {"xml": XML.format("").replace("3B:", "5E:")}}, Action.REBOOT),
        ({"smi": {"status": "failed"}}, Action.REBOOT),
        # Without an address it may be this one, which has no driver.
        ({"pci": [GPU, {**GPU, "address": "0000:5e:00.0", "driver": None}]}, Action.REBOOT),
    ],
    ids=["shown", "another is shown", "nvidia-smi fails", "not all are shown"],
)
def test_a_gpu_that_was_initialised_later_is_watched(parts: dict[str, Any], action: Action) -> None:
    """The first attempt stays in the log until the next boot."""
    found = judged(with_(log={"text": INIT_FAILED + MINOR}, **parts))
    assert "start-up-failed" in {each.rule for each in found.findings}
    assert found.action is action


def test_without_usable_data_the_state_is_unknown() -> None:
    facts = with_(
        log=NO_LOG,
        smi=NO_SMI,
        pci=[],
        driver={"loaded": False, "gpus": []},
        expected={"gpus": None},
    )
    assert judged(facts).state is State.UNKNOWN


def test_log_floods_are_counted() -> None:
    lines = [f"[{second}.0] NVRM: Xid (PCI:0000:3b:00): 31, pid=9, name=a, Ch 1\n" for second in range(25)]
    flood = {"line": lines[0].partition("] ")[2], "count": 190_000, "first": 0.0, "last": 24.0}
    (finding,) = judged(with_(log={"text": "".join(lines), "repeats": [flood]})).findings
    assert finding.count == 190_000


def test_lines_from_before_a_gpu_reset_do_not_count() -> None:
    facts = with_(
        log={"text": "[100.0] NVRM: Xid (PCI:0000:3b:00): 79, x\n[200.0] NVRM: Xid (PCI:0000:3b:00): 31, x\n"}
    )
    assert judged(facts).xids == (31, 79)
    assert judged({**facts, "gpus_reset_s": 150.0}).xids == (31,)


@pytest.mark.parametrize("kind", ["live", "file", "unreachable"])
def test_the_document_matches_its_schema(kind: str) -> None:
    schema = json.loads(resources.files("gpunodes.health").joinpath("health.schema.json").read_text())
    # Readers must ignore unknown names; here a name that the schema lacks is a mistake.
    for part in (schema, *schema["$defs"].values()):
        if part.get("type") == "object":
            part["additionalProperties"] = False
    verdicts = {
        "live": [judged(HEALTHY), *(judged(facts) for facts, *_ in TROUBLES.values())],
        "file": [health.of_files([str(path)]) for path in FILES.iterdir() if path.suffix != ".toml"],
        "unreachable": [judge.unreachable("gpu-2", "no_route", "ssh: \x1b[2Jno route")],
    }[kind]
    document = json.loads(view.dump(view.document(verdicts)))
    jsonschema.validate(document, schema)
    assert {machine["source"] for machine in document["machines"]} == {"file" if kind == "file" else "live"}
    assert "\x1b" not in json.dumps(document)


def test_reported_text_has_no_control_characters() -> None:
    escape = "\x1b[2J"
    facts = with_(driver={"library": escape}, pci=[{**GPU, "address": escape, "responds": False}], boot_id=escape)
    facts["tasks"] = [task(escape, FRAME + escape)]
    verdict = judged(facts)
    assert len(verdict.findings) == 3
    assert "\x1b" not in repr(verdict).replace("\\x1b", "\x1b")


def test_the_worst_machine_is_listed_first() -> None:
    text = view.listing([judged(HEALTHY), judged(TROUBLES["aer"][0]), judged(TROUBLES["stack"][0])])
    assert [line for line in text.splitlines() if not line.startswith(" ")] == [
        "gpu-1: hung, reboot",
        "gpu-1: degraded",
        "1 of 3 healthy.",
    ]


def test_every_rule_has_a_complete_description() -> None:
    names = [rule.name for rule in rules.RULES]
    assert len(set(names)) == len(names)
    assert all(rule.title and rule.evidence and rule.action and rule.source for rule in rules.RULES)
    assert [rule.check.__name__ for rule in rules.RULES] == [name.replace("-", "_") for name in names]


def test_every_rule_has_a_case() -> None:
    files = tomllib.loads((FILES / "verdicts.toml").read_text())
    cases = {rule for _, rule, *_ in TROUBLES.values()} | {
        rule for case in files.values() for rule in case.get("rules", ())
    }
    missing = {rule.name for rule in rules.RULES} - cases
    assert not missing, "add facts to TROUBLES, or a log and its verdict to tests/unit/fixtures/health"


def test_the_tables_are_complete() -> None:
    assert [int(row["code"]) for row in tables.read("xid")] == list(range(1, 177))
    buckets = {row["bucket"] for row in tables.read("actions")}
    assert {row["immediate"] for row in tables.read("xid")} - {""} <= buckets
    assert {row["action"] for row in tables.read("nvlink5")} <= buckets
    for row in tables.read("nvlink5"):
        assert {len(row[name]) for name in ("before_r575", "from_r575")} == {32}
    assert all(tables.source(name) for name in ("xid", "sxid", "nvlink5", "actions", "recovery"))
