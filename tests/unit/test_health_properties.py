"""Properties of every log: it gets a verdict, in time proportional to its length, in any format and compression."""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import sys
from collections.abc import Callable, Iterator

import pytest
from gpunodes.errors import WrongInput
from gpunodes.health import judge, sources, unpack
from gpunodes.health.model import SiteRules, Verdict
from hypothesis import given, settings
from hypothesis import strategies as st

FABRIC_MANAGER = b"detected NVSwitch fatal error 20034 on fid 0 on NVSwitch pci bus id 00000000:86:00.0 physical id 3"
MESSAGES = (
    b"NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    b"NVRM: Xid (PCI:0000:5e:00): 31, pid=9, name=python3, Ch 00000010",
    b"NVRM: Xid (PCI:0000:5e:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
    b"nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 46 sourcetrack timeout error (First)",
    b"INFO: task nvidia-smi:77 blocked for more than 120 seconds.",
    b"INFO: task mmfsd:78 blocked for more than 120 seconds.",
    b"NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0x40:2393)",
    b"nvidia 0000:01:00.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Receiver ID)",
    b"usb 1-1: new high-speed USB device number 2 using xhci_hcd",
    b"INFO: task Xorg:79 is blocked on a mutex likely owned by task UVM GPU1 BH:412.",
    b"INFO: task cat:80 is blocked on a mutex likely owned by task python3.11:78.",
    # Reports of several lines.
    b"INFO: task python3:81 blocked for more than 120 seconds.\nCall Trace:\n os_acquire_mutex+0x3a/0x50 [nvidia]",
    b"Oops: 0002 [#1] PREEMPT SMP NOPTI\nCPU: 3 PID: 512 Comm: irq/45-nvidia Tainted: P\n---[ end trace 0 ]---",
    b"Oops: 0002 [#2] PREEMPT SMP NOPTI\nCPU: 3 PID: 513 Comm: cat Tainted: P\n---[ end trace 0 ]---",
    b"Freezing of tasks failed after 20.002 seconds (1 tasks refusing to freeze, wq_busy=0):\n%s\n%s"
    % (
        b"task:nvidia-smi      state:D stack:    0 pid: 4711 ppid:     1 flags:0x00004006",
        b"Restarting tasks ... done.",
    ),
    b"pcieport 0000:3a:00.0: DPC: containment event, status:0x1f01 source:0x0000\n%s"
    % b"nvidia 0000:3b:00.0: AER: can't recover (no error_detected callback)",
    b"NVRM: The NVIDIA probe routine was not called for 2 device(s).\nNVRM: No NVIDIA devices probed.",
    b"NVRM: The NVIDIA GPU 0000:5e:00.0 (PCI ID: 10de:2330)\n%s"
    % b"NVRM: installed in this system has fallen off the bus and is not responding to commands.",
    FABRIC_MANAGER,
)
HEADERS: tuple[Callable[[int], bytes], ...] = (
    lambda second: b"[%5d.000000] " % second,
    lambda second: b"[%5d.000000] [   T37] " % second,
    lambda second: b"<4>[%5d.000000] " % second,
    lambda second: b"kern  :warn  : [%5d.000000] " % second,
    lambda second: b"4,%d,%d000000,-;" % (second, second),
    lambda second: b"Mar  1 05:%02d:%02d node-1 kernel: " % divmod(second, 60),
    lambda second: b"2026-03-01T05:%02d:%02d+0000 node-1 kernel: " % divmod(second, 60),
    lambda second: b"Mar  1 05:%02d:%02d node-1 kernel: [%5d.000000] " % (*divmod(second, 60), second),
)
SYSLOG = HEADERS[5]
WRAPPINGS: tuple[Callable[[bytes], bytes], ...] = (
    lambda log: log,
    lambda log: log.replace(b"\n", b"\r\n"),
    gzip.compress,
    lzma.compress,
    lambda log: b"\n".join(reversed(log.splitlines())) + b"\n",
)
# Parts of the formats, to be combined wrongly.
PIECES = st.sampled_from(
    [part for message in MESSAGES for part in message.split(b" ")]
    + [b"\n", b"[1.0] ", b"<3>", b"(", b"0x", b'{"MESSAGE":"', b'"}', b"==NVSMI LOG==\n", b"<nvidia_smi_log>", b"<gpu>"]
    + [b"refusing to freeze", b"likely owned by task nvidia-smi:7", b" [#1] ", b"Oops: 0002", b"[Unknown Error], "]
    + [
        b"detected NVSwitch fatal error 1 ",
        b"| NVIDIA-SMI 1 |\n",
        b"|  0  A40  On | 00000000:3B:00.0 Off | 0 |\n",
        b"|ERR! ",
    ]
    + [
        b"GPU 00000000:3B:00.0\n",
        b"    ECC Errors\n",
        b"blocked for more than ",
        b"NVRM: ",
        b"Linux version 6",
        b" " * 300,
    ]
)


def verdict_on(content: bytes) -> Verdict:
    def no_zstd(_: object) -> Iterator[bytes]:
        raise unpack.BrokenArchive("zstd is not available")

    return judge.judge_files("log", sources.texts(io.BytesIO(content), "log", no_zstd), SiteRules())


@settings(deadline=None, max_examples=150)
@given(
    st.one_of(st.binary(max_size=3000), st.lists(st.one_of(PIECES, st.binary(max_size=8)), max_size=120).map(b"".join))
)
def test_any_bytes_get_a_verdict(content: bytes) -> None:
    with contextlib.suppress(WrongInput):
        for finding in verdict_on(content).findings:
            assert all(line.isprintable() and len(line) <= 400 for line in (*finding.evidence, finding.message))


def log_of(lines: list[bytes], header: Callable[[int], bytes]) -> bytes:
    headers = (header(second) for second in range(len(lines)))
    return b"".join(
        (head.replace(b" kernel:", b" nv-fabricmanager[841]:") if line == FABRIC_MANAGER else head) + line + b"\n"
        for head, line in zip(headers, lines, strict=True)
    )


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.sampled_from(MESSAGES), min_size=1, max_size=40),
    st.sampled_from(HEADERS),
    st.sampled_from(WRAPPINGS),
)
def test_the_format_does_not_change_the_verdict(
    messages: list[bytes], header: Callable[[int], bytes], wrap: Callable[[bytes], bytes]
) -> None:
    lines = [line for message in messages for line in message.split(b"\n")]
    if b"kernel:" not in header(0):
        # Only lines that name their writer can be those of a program.
        lines = [line for line in lines if line != FABRIC_MANAGER]
    plain = verdict_on(log_of(lines, SYSLOG))
    other = verdict_on(wrap(log_of(lines, header)))
    assert (other.state, other.action, other.hung_in_driver) == (plain.state, plain.action, plain.hung_in_driver)
    assert (other.xids, other.sxids) == (plain.xids, plain.sxids)
    assert {(each.rule, each.gpu, each.count) for each in other.findings} == {
        (each.rule, each.gpu, each.count) for each in plain.findings
    }


def work(content: bytes) -> int:
    """The number of calls of Python and C functions for a verdict."""
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        verdict_on(content)
    finally:
        sys.setprofile(None)
    return calls


HOSTILE: dict[str, Callable[[int], bytes]] = {
    "log flood": lambda n: b"".join(b"[%d.0] NVRM: Xid (PCI:0000:3b:00): 31, pid=%d, x\n" % (i, i) for i in range(n)),
    "one line": lambda n: b"NVRM: Xid (PCI:0000:3b:00): 31, " * n,
    "blanks": lambda n: (b" " * 399 + b"x NVRM: Xid\n") * n,
    "hung tasks": lambda n: b"".join(
        b"[%d.0] INFO: task a:%d blocked for more than 120 seconds.\n" % (i, i) for i in range(n)
    ),
    "hung tasks, newest first": lambda n: b"".join(
        b"[%d.0] INFO: task nvidia-smi:1 blocked for more than 120 seconds.\n" % (n - i) for i in range(n)
    ),
    "boots": lambda n: b"Mar  1 05:00:00 n kernel: Linux version 6.12.0\nMar  1 05:00:01 n kernel: NVRM: x\n" * n,
    "journal": lambda n: b'{"_TRANSPORT":"kernel","MESSAGE":"NVRM: Xid (PCI:0000:3b:00): 31, x"}\n' * n,
    "journal's long lines": lambda n: (b'{"MESSAGE":"' + b"NVRM: " * 200 + b'"}\n') * n,
    "crashes, newest first": lambda n: b"".join(
        b"[%d.0] CPU: 3 PID: 5 Comm: irq/45-nvidia Tainted: P\n[%d.0] Oops: 0002 [#1] SMP\n" % (n - i, n - i)
        for i in range(n)
    ),
    "journal, newest first": lambda n: b"".join(
        b'{"_TRANSPORT":"kernel","__REALTIME_TIMESTAMP":"%d000000","MESSAGE":"INFO: task a:1 blocked for more "}\n'
        % (n - i)
        for i in range(n)
    ),
    "owners": lambda n: b"[1.0] INFO: task a:1 is blocked on a mutex likely owned by task b:2.\n" * n,
    "crashes": lambda n: b"[1.0] Oops: 0002 [#1] SMP\n[1.0]  nvidia_ioctl+0x1/0x2 [nfs]\n" * n,
    "suspends": lambda n: b"[1.0] Freezing of tasks failed after 20 seconds (1 tasks refusing to freeze):\n" * n,
    "quotations": lambda n: b'{"log":"kernel: [1.0] NVRM: Xid (PCI:0000:3b:00): 79, x"}\n' * n,
    "nvidia-smi's tables": lambda n: (
        b"| NVIDIA-SMI 610\n|   0  NVIDIA A40  On | 00000000:3B:00.0 Off | 0 |\n| 0%  ERR! P8 1W / 3W | 0MiB | 0% |\n"
        * n
    ),
    "rows of queries": lambda n: b"index, name\n0, [Unknown Error]\n" * n,
    "nvidia-smi": lambda n: b"==NVSMI LOG==\nGPU 00000000:3B:00.0\n    ECC Errors\n        Volatile : 1\n" * n,
    "xml": lambda n: b"<nvidia_smi_log>\n<gpu id='00000000:3B:00.0'><a>1</a>\n</gpu></nvidia_smi_log>\n" * n,
}


@pytest.mark.long
@pytest.mark.parametrize("name", HOSTILE)
def test_twice_the_log_is_twice_the_work(name: str) -> None:
    make = HOSTILE[name]
    once, twice = work(make(3000)), work(make(6000))
    assert twice < 2.2 * once + 1000
