"""Lines of programs between the lines of a report of the kernel, in each format of a log that names the writer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from gpunodes.operations import health

KERNEL, PROGRAM = "the kernel", "a program"
FORMATS = {
    "syslog": ("Mar  1 05:39:{:02} gpu-1 kernel: [12.5] ", "Mar  1 05:39:{:02} gpu-1 app[5]: "),
    "syslog, no pid": ("Mar  1 05:39:{:02} gpu-1 kernel: ", "Mar  1 05:39:{:02} gpu-1 app: "),
    "syslog, no host": ("Mar  1 05:39:{:02} kernel: ", "Mar  1 05:39:{:02} app[5]: kernel: "),
    "syslog, ISO": ("2026-03-01T05:39:{:02}+01:00 gpu-1 kernel: ", "2026-03-01T05:39:{:02}+01:00 gpu-1 app[5]: "),
    "RFC 3164": ("<3>Mar  1 05:39:{:02} gpu-1 kernel: ", "<13>Mar  1 05:39:{:02} gpu-1 kernel: "),
    "RFC 5424": ("<3>1 2026-03-01T05:39:{:02}Z gpu-1 kernel - - - ", "<13>1 2026-03-01T05:39:{:02}Z gpu-1 app 5 - - "),
    "short-monotonic": ("[   12.{:02}] gpu-1 kernel: ", "[   12.{:02}] gpu-1 app[5]: "),
    "dmesg -x": ("kern  :err   : [12.{:02}] ", "user  :err   : [12.{:02}] "),
    "dmesg -r": ("<3>[12.{:02}] ", "<11>[12.{:02}] "),
    "/dev/kmsg": ("3,1,12{:02},-;", "11,1,12{:02},-;"),
    "several lines": ("Mar  1 05:39:{:02} gpu-1 kernel: ", "Mar  1 05:39:{:02} gpu-1 app[5]: x\n" + " " * 30),
}
Line = tuple[str, str]
START: Sequence[Line] = [(KERNEL, "usb 1-1: new device")] * 5
REPORT: Sequence[Line] = [
    (KERNEL, "INFO: task python3:77 blocked for more than 120 seconds."),
    (KERNEL, "Workqueue: events work"),
    (KERNEL, "Call Trace:"),
]
FRAME = " os_acquire_mutex+0x3a/0x50 [nvidia]"
NFS = " rpc_wait+0x1/0x2 [sunrpc]"
PORT = "pcieport 0000:3a:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer"


def rules(path: Path, name: str, lines: Sequence[Line], *, newest_first: bool) -> list[str]:
    """The rules of the findings on a log with these lines."""
    formats = dict(zip((KERNEL, PROGRAM), FORMATS[name], strict=True))
    entries = [formats[writer].format(second) + text + "\n" for second, (writer, text) in enumerate([*START, *lines])]
    path.write_text("".join(entries[::-1] if newest_first else entries))
    return [each.rule for each in health.of_files([str(path)]).findings]


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_program_adds_nothing_to_a_report(name: str, newest_first: bool, tmp_path: Path) -> None:
    lost = "nvidia 0000:3b:00.0: AER: can't recover (no error_detected callback)"
    for lines in ([*REPORT, (PROGRAM, FRAME)], [(KERNEL, PORT), (PROGRAM, lost)]):
        assert rules(tmp_path / "log", name, lines, newest_first=newest_first) == []
        real = [*lines[:-1], (KERNEL, lines[-1][1])]
        (rule,) = rules(tmp_path / "log", name, real, newest_first=newest_first)
        assert rule in {"hung-in-driver", "pcie-error"}


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_program_hides_no_report(name: str, newest_first: bool, tmp_path: Path) -> None:
    """With the words that end a report, or with frames of NFS below a tool of the driver."""
    ended = [*REPORT, (PROGRAM, "BUG: x"), (KERNEL, FRAME)]
    waits = [(KERNEL, REPORT[0][1].replace("python3", "nvidia-smi")), (PROGRAM, NFS)]
    for lines in (ended, waits):
        assert rules(tmp_path / "log", name, lines, newest_first=newest_first) == ["hung-in-driver"]


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("begin", ["", "[   12.5] ", "kernel: "])
def test_the_further_lines_of_a_message_are_not_the_kernels(begin: str, newest_first: bool, tmp_path: Path) -> None:
    """journalctl indents them."""
    forged = ["NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", REPORT[0][1], FRAME]
    text = "x" + "".join(f"\n{'':30}{begin}{line}" for line in forged)
    for lines in ([(PROGRAM, text)], [(KERNEL, REPORT[0][1]), (PROGRAM, text)]):
        assert set(rules(tmp_path / "log", "syslog", lines, newest_first=newest_first)) <= {"quotation"}
        assert rules(tmp_path / "log", "syslog", [(KERNEL, text)], newest_first=newest_first)


@pytest.mark.parametrize("header", ["[   12.5] ", "2026-03-01T05:39:15,123456+00:00 ", "[Sun Mar  1 05:39:15 2026] "])
def test_where_no_line_names_its_writer_a_message_is_no_name(header: str, tmp_path: Path) -> None:
    """``Workqueue: x:`` looks like the name of a program."""
    lines = [text for _, text in [*START, *REPORT]] + ["Workqueue: nv_queue os_work [nvidia]"]
    (tmp_path / "log").write_text("".join(f"{header}{line}\n" for line in lines))
    assert [each.rule for each in health.of_files([str(tmp_path / "log")]).findings] == ["hung-in-driver"]
