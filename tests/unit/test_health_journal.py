"""Journals with fields in every format of journalctl: one verdict, and messages that forge entries."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from gpunodes.health.model import Verdict
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
