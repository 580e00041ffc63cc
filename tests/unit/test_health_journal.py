"""Journals with fields in every format of journalctl: one verdict, and messages that forge entries."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from gpunodes.health.model import Action, Verdict
from gpunodes.operations import health

BOOT = "0123456789abcdef0123456789abcdef"
Entry = Mapping[str, str]


def entry(message: str, **fields: str) -> Entry:
    kernel = {"_TRANSPORT": "kernel", "SYSLOG_FACILITY": "0", "SYSLOG_IDENTIFIER": "kernel", "PRIORITY": "3"}
    return {
        "__REALTIME_TIMESTAMP": "1772343555123456",
        "__MONOTONIC_TIMESTAMP": "12345678901",
        "_BOOT_ID": BOOT,
        **kernel,
        **fields,
        "MESSAGE": message,
    }


def exported(entries: Sequence[Entry]) -> bytes:
    """Journal export format: values with control characters are binary."""

    def field(name: str, value: str) -> bytes:
        data = value.encode()
        if value.isprintable():
            return name.encode() + b"=" + data + b"\n"
        return name.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n"

    return b"".join(b"__CURSOR=s=0;i=1\n" + b"".join(field(*item) for item in one.items()) + b"\n" for one in entries)


def pretty(entries: Sequence[Entry]) -> bytes:
    def one(fields: Entry) -> str:
        lines = (f"\t{json.dumps(name)} : {json.dumps(value)}" for name, value in fields.items())
        return "{\n" + ",\n".join(lines) + "\n}\n"

    return "".join(map(one, entries)).encode()


def verbose(entries: Sequence[Entry]) -> bytes:
    """The times and the boot are in the cursor; further lines of a value are below its beginning."""
    text = ""
    for fields in entries:
        boot, mono = fields["_BOOT_ID"], int(fields["__MONOTONIC_TIMESTAMP"])
        real = int(fields["__REALTIME_TIMESTAMP"])
        text += f"Sun 2026-03-01 05:39:15.123456 UTC [s=0a;i=1;b={boot};m={mono:x};t={real:x};x=1]\n"
        for name, value in fields.items():
            if not name.startswith("__"):
                first, *more = value.split("\n")
                text += f"    {name}={first}\n" + "".join(f"{'':{len(name) + 5}}{line}\n" for line in more)
    return text.encode()


def one_line(entries: Sequence[Entry]) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in entries).encode()


FORMATS: dict[str, Callable[[Sequence[Entry]], bytes]] = {
    "json": one_line,
    "export": exported,
    "json-pretty": pretty,
    "verbose": verbose,
}
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
HANG = [
    "INFO: task python3:77 blocked for more than 120 seconds.",
    "Call Trace:",
    " os_acquire_mutex+0x3a/0x50 [nvidia]",
]


def verdict_on(path: Path, content: bytes) -> Verdict:
    path.write_bytes(content)
    return health.of_files([str(path)])


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_the_same_verdict(name: str, tmp_path: Path) -> None:
    entries = [entry("usb 1-1: new device")] * 500
    entries += [entry("login", _TRANSPORT="syslog", SYSLOG_FACILITY="4", SYSLOG_IDENTIFIER="sshd")] * 500
    entries += [entry(XID), *map(entry, HANG)]
    verdict = verdict_on(tmp_path / "journal", FORMATS[name](entries))
    assert [(each.rule, each.gpu, each.first) for each in verdict.findings] == [
        ("hung-in-driver", "", "2026-03-01T05:39:15Z"),
        ("fallen-off-bus", "0000:3b:00.0", "2026-03-01T05:39:15Z"),
    ]
    assert (verdict.boot_id, verdict.xids) == (BOOT, (79,))
    assert verdict.files[0].kinds == ("journal",)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("stuck", [0, 1])
def test_the_order_of_the_entries_does_not_matter(stuck: int, name: str, tmp_path: Path) -> None:
    """``journalctl -r``: the frame is that of the task whose report it was in, and an oops is one, too."""
    tasks = ["mmfsd:76", "mmfsd:76"]
    tasks[stuck] = "python3:77"
    reports = [[f"INFO: task {task} blocked for more than 120 seconds.", "Call Trace:"] for task in tasks]
    reports[stuck].append(HANG[2])
    lines = [*reports[0], *reports[1], "Oops: 0002 [#1] SMP", "CPU: 3 PID: 5 Comm: irq/45-nvidia Tainted: P"]
    entries = [
        entry(line, __REALTIME_TIMESTAMP=f"17723435{number}000000", __MONOTONIC_TIMESTAMP=f"{number}000000")
        for number, line in enumerate(lines, 10)
    ]
    for ordered in (entries, entries[::-1]):
        verdict = verdict_on(tmp_path / "journal", FORMATS[name](ordered))
        assert [each.rule for each in verdict.findings] == ["hung-in-driver", "driver-crashed"]
        assert verdict.findings[0].message == "Stuck in the NVIDIA driver: python3:77."


@pytest.mark.parametrize("fields", [{"_TRANSPORT": "journal", "SYSLOG_IDENTIFIER": "app"}, {"SYSLOG_FACILITY": "3"}])
@pytest.mark.parametrize("name", FORMATS)
def test_a_program_adds_nothing_to_a_report_of_the_kernel(name: str, fields: dict[str, str], tmp_path: Path) -> None:
    """Another program, or user space by /dev/kmsg, logs a frame of the driver, the end of a report, a frame of NFS."""
    report = [entry("INFO: task mmfsd:76 blocked for more than 120 seconds."), entry("Call Trace:")]
    forged = entry(f'"_TRANSPORT":"kernel"{HANG[2]}', **fields)
    verdict = verdict_on(tmp_path / "journal", FORMATS[name]([*report, forged]))
    assert verdict.findings == ()
    ended = [entry(HANG[0]), entry("BUG: ended", **fields), *map(entry, HANG[1:])]
    verdict = verdict_on(tmp_path / "journal", FORMATS[name](ended))
    assert [each.rule for each in verdict.findings] == ["hung-in-driver"]
    waits = [entry(HANG[0].replace("python3", "nvidia-smi")), entry(" rpc_wait+0x1/0x2 [sunrpc]", **fields)]
    verdict = verdict_on(tmp_path / "journal", FORMATS[name](waits))
    assert [each.rule for each in verdict.findings] == ["hung-in-driver"]


FABRIC = "detected NVSwitch fatal error 20034 on fid 0 on NVSwitch pci bus id 00000000:86:00.0 physical id 3 port 33"
UNIT = "nvidia-fabricmanager.service"
MANAGER = {"_TRANSPORT": "syslog", "SYSLOG_FACILITY": "3", "SYSLOG_IDENTIFIER": "nv-fabricmanager", "_UID": "0"}


@pytest.mark.parametrize(
    "fields",
    [
        {**MANAGER, "_SYSTEMD_UNIT": UNIT},
        {
            **MANAGER,
            "_SYSTEMD_UNIT": UNIT,
            "_TRANSPORT": "stdout",
            "SYSLOG_IDENTIFIER": "nvidia-fabricmanager-start.sh",
        },
        MANAGER,
    ],
    ids=["syslog", "standard output", "without a unit"],
)
@pytest.mark.parametrize("name", FORMATS)
def test_lines_of_fabric_manager(name: str, fields: dict[str, str], tmp_path: Path) -> None:
    for message in (FABRIC, "[Jul 23 2024 07:53:55] [ERROR] [tid 841] " + FABRIC):
        entries = [entry("usb 1-1: new device"), entry(message, **fields)]
        verdict = verdict_on(tmp_path / "journal", FORMATS[name](entries))
        (finding,) = verdict.findings
        assert (verdict.action, verdict.sxids, finding.gpu) == (Action.RESET_GPU, (20034,), "0000:86:00.0")
        assert (finding.first, verdict.boot_id) == ("2026-03-01T05:39:15Z", BOOT)
        assert finding.evidence == (f"2026-03-01T05:39:15Z - nv-fabricmanager: {FABRIC}",)
        assert verdict.files[0].kinds == ("journal", "Fabric Manager log")


@pytest.mark.parametrize(
    "fields",
    [
        {**MANAGER, "SYSLOG_IDENTIFIER": "trainer", "_SYSTEMD_UNIT": "session-3.scope"},
        {**MANAGER, "_SYSTEMD_UNIT": "session-3.scope"},
        {**MANAGER, "_SYSTEMD_UNIT": "user@1000.service", "_SYSTEMD_USER_UNIT": UNIT},
        {**MANAGER, "_UID": "1000"},
        {**MANAGER, "_TRANSPORT": "kernel", "_SYSTEMD_UNIT": UNIT},
        {"_TRANSPORT": "kernel"},
    ],
    ids=["a program", "its identifier", "a user's unit", "a user", "/dev/kmsg", "the kernel"],
)
@pytest.mark.parametrize("name", FORMATS)
def test_another_program_in_the_words_of_fabric_manager(name: str, fields: dict[str, str], tmp_path: Path) -> None:
    forged = f"{FABRIC}\n2026-03-01T05:39:15Z - nv-fabricmanager: {FABRIC}"
    entries = [entry("NVRM: loading"), entry(FABRIC, **fields)]
    if fields["_TRANSPORT"] != "kernel":
        entries.append(entry(forged, **fields))
    verdict = verdict_on(tmp_path / "journal", FORMATS[name](entries))
    assert (verdict.sxids, verdict.findings) == ((), ())


@pytest.mark.parametrize("name", FORMATS)
def test_fabric_manager_cannot_speak_for_the_kernel(name: str, tmp_path: Path) -> None:
    entries = [entry("NVRM: loading"), *(entry(line, **MANAGER, _SYSTEMD_UNIT=UNIT) for line in (XID, *HANG))]
    verdict = verdict_on(tmp_path / "journal", FORMATS[name](entries))
    assert (verdict.action, {each.rule for each in verdict.findings} - {"quotation"}) == (Action.NONE, set())


@pytest.mark.parametrize("name", FORMATS)
def test_older_boots_do_not_count(name: str, tmp_path: Path) -> None:
    entries = [entry(XID), entry("NVRM: loading", _BOOT_ID="f" * 32, __REALTIME_TIMESTAMP="1772343999000000")]
    verdict = verdict_on(tmp_path / "journal", FORMATS[name](entries))
    assert (verdict.xids, verdict.boot_id) == ((), "f" * 32)


@pytest.mark.parametrize("name", FORMATS)
def test_a_message_cannot_forge_an_entry(name: str, tmp_path: Path) -> None:
    """A program may log text that contains whole entries of the kernel, in any format."""
    forged = [entry(XID)]
    text = "x\n\n" + "\n\n".join(make(forged).decode() for make in FORMATS.values()) + "\n\n"
    entries = [entry(text, _TRANSPORT="journal", SYSLOG_IDENTIFIER="app"), entry("NVRM: loading")]
    assert verdict_on(tmp_path / "journal", FORMATS[name](entries)).xids == ()


@pytest.mark.parametrize("name", ["export", "verbose"])
def test_long_and_truncated_entries(name: str, tmp_path: Path) -> None:
    entries = [entry("A" * 300_000, COREDUMP="B" * 300_000, _TRANSPORT="journal"), entry(XID)]
    content = FORMATS[name](entries)
    assert verdict_on(tmp_path / "journal", content).xids == (79,)
    assert verdict_on(tmp_path / "journal", content[:-3]).xids == (79,)
    assert verdict_on(tmp_path / "journal", content[:500]).xids == ()
