"""Classes of lines from reports of users: what each asks for, and what looks like it but asks for nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gpunodes.health.model import Action, State, Verdict
from gpunodes.operations import health
from gpunodes.views import health as view

STACK = """\
 schedule+0x2c/0x80
 rwsem_down_write_slowpath+0x2c0/0x5d0
 os_acquire_rwlock_write+0x3a/0x50 [nvidia]
 _nv042330rm+0x10/0x30 [nvidia]
"""
FRAME = "os_acquire_rwlock_write+0x3a/0x50 [nvidia]"
ELSEWHERE = """\
 schedule+0x2c/0x80
 nfs_wait_bit_killable+0x1e/0x90 [nfs]
"""
UNKNOWN = " schedule+0x2c/0x80\n"
LOADED = "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.65.06\n"


def log(text: str) -> bytes:
    """The lines with the kernel's times."""
    return "".join(f"[{1000 + number:5d}.000000] {line}\n" for number, line in enumerate(text.splitlines())).encode()


def verdict_on(folder: Path, content: bytes) -> Verdict:
    (folder / "log").write_bytes(content)
    return health.of_files([str(folder / "log")])


def oops(task: str, stack: str, what: str = "Oops: 0002 [#1] PREEMPT SMP NOPTI") -> str:
    return (
        "BUG: kernel NULL pointer dereference, address: 0000000000000020\n"
        f"{what}\n"
        f"CPU: 3 PID: 512 Comm: {task} Tainted: P           OE      6.12.48 #1\n"
        "Modules linked in: nvidia(POE) nfs\n"
        f"Call Trace:\n <TASK>\n{stack} </TASK>\n---[ end trace 0000000000000000 ]---\n"
    )


HANGS = {
    "I/O wait": ("INFO: task python3:77 blocked in I/O wait for more than 122 seconds.\n" + STACK, "python3:77"),
    "cannot die": ("INFO: task python3:77 can't die for more than 143 seconds.\n" + STACK, "python3:77"),
    "without pid": ("INFO: task python3 blocked for more than 120 seconds.\n" + STACK, "python3"),
    "udev's worker": ("INFO: task (udev-worker):569 blocked for more than 122 seconds.\n" + STACK, "(udev-worker):569"),
    "owner is the driver's thread, nothing else": (
        "INFO: task Xorg:77 is blocked on a mutex likely owned by task nv_queue:412.",
        "nv_queue:412",
    ),
    "owner is a thread of the driver with blanks in its name": (
        "INFO: task Xorg:77 is blocked on a mutex likely owned by task UVM GPU1 BH:412.",
        "UVM GPU1 BH:412",
    ),
    "owner is such a thread, a writer": (
        "INFO: task Xorg:77 <reader> blocked on an rw-semaphore likely owned by task UVM GPU1 BH:412 <writer>",
        "UVM GPU1 BH:412",
    ),
    "owner with a dot in its name, of which the stack follows": (
        "INFO: task Xorg:77 is blocked on a mutex likely owned by task python3.11:78.\n"
        "task:python3.11      state:D stack:0     pid:78    tgid:78\n" + STACK,
        "python3.11:78",
    ),
    "owner of a semaphore": (
        "INFO: task Xorg:77 blocked on a semaphore likely last held by task nvidia-smi:78",
        "nvidia-smi:78",
    ),
    "owner, of which the stack follows": (
        "INFO: task systemd:1 blocked for more than 122 seconds.\n"
        + ELSEWHERE
        + "INFO: task systemd:1 <writer> blocked on an rw-semaphore likely owned by task python3:78 <reader>\n"
        "task:python3         state:D stack:0     pid:78    tgid:78\n" + STACK,
        "python3:78",
    ),
    "suspend": (
        "Freezing user space processes failed after 20.008 seconds (2 tasks refusing to freeze, wq_busy=0):\n"
        "task:cat             state:D stack:0     pid:76    tgid:76\n"
        + ELSEWHERE
        + "task:python3         state:D stack:0     pid:77    tgid:77\n"
        + STACK
        + "OOM killer enabled.\n",
        "python3:77",
    ),
    "suspend, an older kernel": (
        "Freezing of tasks failed after 20.002 seconds (1 tasks refusing to freeze, wq_busy=0):\n"
        "task:nvidia-smi      state:D stack:    0 pid: 4711 ppid:     1 flags:0x00004006\n" + UNKNOWN,
        "nvidia-smi:4711",
    ),
}


def newest_first(content: bytes) -> bytes:
    """The same log as ``journalctl -r`` writes it."""
    return b"".join(reversed(content.splitlines(keepends=True)))


ORDERS = pytest.mark.parametrize("order", [lambda content: content, newest_first], ids=["as written", "newest first"])
Order = Callable[[bytes], bytes]


@ORDERS
@pytest.mark.parametrize("name", HANGS)
def test_hangs_in_the_driver(name: str, order: Order, tmp_path: Path) -> None:
    text, task = HANGS[name]
    verdict = verdict_on(tmp_path, order(log(LOADED + text)))
    assert (verdict.state, verdict.action, verdict.hung_in_driver) == (State.HUNG, Action.REBOOT, True)
    (finding,) = verdict.findings
    assert finding.message == f"Stuck in the NVIDIA driver: {task}."
    assert (FRAME in finding.evidence) == (FRAME in text), "the evidence lacks the frame that proves it"


def test_the_evidence_of_a_hang_begins_with_what_proves_it(tmp_path: Path) -> None:
    """A thread of the driver needs no frame; a task of another program does."""
    names = ["nv_queue:1", "irq/45-nvidia:2", "python3:3"]
    text = "".join(
        f"INFO: task {name} blocked for more than 120 seconds.\n" + (STACK if "p" in name else "") for name in names
    )
    verdict = verdict_on(tmp_path, log(text * 3))
    assert verdict.findings[0].evidence[:2] == (
        "[ 1002.000000] INFO: task python3:3 blocked for more than 120 seconds.",
        FRAME,
    )
    assert view.listing([verdict]).count("    | ") == 2


@ORDERS
def test_the_frame_is_evidence_whatever_was_logged_before_it(order: Order, tmp_path: Path) -> None:
    """The driver's thread is often known first as the owner of what several others wait for."""
    owner = "is blocked on a mutex likely owned by task nv_queue:412.\n"
    for waiting in (1, 5):
        text = "".join(f"INFO: task Xorg:{number} {owner}" for number in range(waiting))
        text += "INFO: task nv_queue:412 blocked for more than 122 seconds.\n" + STACK
        evidence = verdict_on(tmp_path, order(log(text))).findings[0].evidence
        assert (evidence[0][15:], evidence[1]) == ("INFO: task nv_queue:412 blocked for more than 122 seconds.", FRAME)
        assert FRAME in view.listing([verdict_on(tmp_path, order(log(text)))])


CRASHES = {
    "interrupt thread": oops("irq/45-nvidia", " __wake_up_common+0x2d/0x160\n"),
    "worker": oops("nv_open_q", STACK),
    "unbind": oops(
        "bash", STACK, "Oops: general protection fault, probably for non-canonical address: 0000 [#1] SMP PTI"
    ),
    "a bug check": oops("python3", STACK, "invalid opcode: 0000 [#1] SMP"),
    "arm64": oops("python3", STACK, "Internal error: Oops: 0000000096000004 [#1] SMP"),
}


@ORDERS
@pytest.mark.parametrize("name", CRASHES)
def test_crashes_in_the_driver(name: str, order: Order, tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path, order(log(LOADED + CRASHES[name])))
    assert [(each.rule, each.action) for each in verdict.findings] == [("driver-crashed", Action.REBOOT)]
    assert (FRAME in verdict.findings[0].evidence) == (STACK in CRASHES[name])


def test_a_driver_thread_in_a_soft_lockup_for_hours(tmp_path: Path) -> None:
    text = "watchdog: BUG: soft lockup - CPU#17 stuck for 10843s! [irq/238-nvidia:1622]\n"
    verdict = verdict_on(tmp_path, log(text))
    assert (verdict.findings[0].rule, verdict.action) == ("soft-lockup-in-driver", Action.REBOOT)


# By name: the log, the action, and the rules.
LINES: dict[str, tuple[str, Action, list[str]]] = {
    "no interrupt": ("NVRM: GPU 0000:3b:00.0: request_irq() failed (-22)", Action.REBOOT, ["start-up-failed"]),
    "no MSI-X": ("NVRM: GPU 0000:3b:00.0: Failed to enable MSI-X.", Action.REBOOT, ["start-up-failed"]),
    "no firmware": (
        "nvidia 0000:3b:00.0: Direct firmware load for nvidia/580.65.06/gsp_ga10x.bin failed with error -2",
        Action.REPAIR,
        ["start-up-impossible"],
    ),
    "no firmware, Debian": (
        "nvidia 0000:3b:00.0: firmware: failed to load nvidia/550.163.01/gsp_tu10x.bin (-2)",
        Action.REPAIR,
        ["start-up-impossible"],
    ),
    "another driver has all": (
        (
            "NVRM: The NVIDIA probe routine was not called for 2 device(s).\n"
            "NVRM: This can occur when another driver was loaded and\n"
            "NVRM: obtained ownership of the NVIDIA device(s).\n"
            "NVRM: No NVIDIA devices probed."
        ),
        Action.REPAIR,
        ["not-probed"],
    ),
    "another driver has some": (
        "NVRM: The NVIDIA probe routine was not called for 1 device(s).\n" + LOADED,
        Action.NONE,
        ["not-probed"],
    ),
    "lost, without an Xid": ("NVRM: GPU at PCI:0000:3b:00 has fallen off the bus", Action.REBOOT, ["fallen-off-bus"]),
    "lost, told in two lines": (
        (
            "NVRM: The NVIDIA GPU 0000:3b:00.0 (PCI ID: 10de:2330)\n"
            "NVRM: installed in this system has fallen off the bus and is not responding to commands."
        ),
        Action.REBOOT,
        ["fallen-off-bus"],
    ),
    "uncorrectable": (
        "nvidia 0000:3b:00.0: AER: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer",
        Action.REBOOT,
        ["pcie-error"],
    ),
    "contained": (
        (
            "pcieport 0000:3a:00.0: DPC: containment event, status:0x1f01 source:0x0000\n"
            "pcieport 0000:3a:00.0: DPC: unmasked uncorrectable error detected\n"
            "nvidia 0000:3b:00.0: AER: can't recover (no error_detected callback)"
        ),
        Action.REBOOT,
        ["pcie-error"],
    ),
    "contained by the firmware": (
        (
            "pcieport 0000:3a:00.0: EDR: EDR event received\n"
            "nvidia 0000:3b:00.0: AER: can't recover (no error_detected callback)"
        ),
        Action.REBOOT,
        ["pcie-error"],
    ),
    "SOE stopped": ("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 26006, SOE HALTED", Action.RESET_GPU, ["sxid"]),
    "SOE did not start": (
        "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 26002, SOE init failed(1)",
        Action.REBOOT,
        ["sxid"],
    ),
    "SOE timed out": (
        "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 26004, Fatal, Timed out while waiting for SOE command completion.",
        Action.RESET_GPU,
        ["sxid"],
    ),
    "a switch is hot": ("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 10004, Temperature 104C", Action.NONE, ["sxid"]),
    "only a follow-up line": (
        "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Data {0x10000000, 0x10000000}",
        Action.RESET_GPU,
        ["sxid"],
    ),
    "Fabric Manager, fatal": (
        (
            "[Jul 23 2024 07:53:55] [ERROR] [tid 841] detected NVSwitch fatal error 20034 on fid 0 on NVSwitch"
            " pci bus id 00000000:86:00.0 physical id 3 port 33"
        ),
        Action.RESET_GPU,
        ["sxid"],
    ),
    "Fabric Manager, non-fatal": (
        (
            "Jul 23 07:53:55 node-1 nv-fabricmanager[841]: detected NVSwitch non-fatal error 12028 on fid 0 on NVSwitch"
            " pci bus id 00000000:86:00.0 physical id 3 port 61"
        ),
        Action.NONE,
        ["sxid"],
    ),
    "bus in short form": ("NVRM: Xid (0001:00): 31, Ch 00000010", Action.RESTART_APP, ["xid"]),
    "number on the next line": (
        "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None)\nto 0x2 (Node Reboot Required)",
        Action.REBOOT,
        ["xid-recovery"],
    ),
    "cut by a pager": ("NVRM: Xid (PCI:0000:3b:00): 79, pid='<unkn>", Action.REBOOT, ["fallen-off-bus"]),
    "cut in the code": (LOADED + "NVRM: Xid (PCI:0000:3b:00): 7>", Action.NONE, []),
}


@ORDERS
@pytest.mark.parametrize("name", LINES)
def test_lines(name: str, order: Order, tmp_path: Path) -> None:
    text, action, rules = LINES[name]
    whole = text.startswith(("[Jul", "Jul"))
    verdict = verdict_on(tmp_path, order(text.encode() if whole else log(text)))
    assert (verdict.action, [each.rule for each in verdict.findings]) == (action, rules)


def test_a_wrapped_recovery_number(tmp_path: Path) -> None:
    text = (
        b"[1.0] NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery\naction changed from 0x0 (None) to\n0x2 (Node Reboot)\n"
    )
    assert verdict_on(tmp_path, text).action is Action.REBOOT
    # What has no time of its own is the rest of an entry, which `journalctl -r` leaves in its order.
    assert verdict_on(tmp_path, b"[3.0] usb 1-1\n[2.0] usb 1-1\n" + text).action is Action.REBOOT


def test_the_order_of_a_log_that_begins_with_a_flood_in_one_second(tmp_path: Path) -> None:
    flood = "".join(f"Mar  1 05:39:16 n kernel: usb {number}\n" for number in range(500)).encode()
    text = "".join(f"Mar  1 05:39:15 n kernel: {line}\n" for line in (LOADED + CRASHES["worker"]).splitlines())
    content = flood + newest_first(text.encode()) + b"Mar  1 05:39:14 n kernel: usb 1-1\n"
    assert [each.rule for each in verdict_on(tmp_path, content).findings] == ["driver-crashed"]


@pytest.mark.parametrize("name", ["no MSI-X", "no firmware, Debian"])
def test_what_the_driver_overcomes_asks_for_nothing_when_nvidia_smi_shows_the_gpu(name: str, tmp_path: Path) -> None:
    (tmp_path / "dmesg").write_bytes(log(LOADED + LINES[name][0]))
    shown = Path(__file__).parent / "fixtures" / "health" / "smi-well.txt"
    assert health.of_files([str(tmp_path / "dmesg"), str(shown)]).findings == ()
    dead = tmp_path / "dead.txt"
    dead.write_text(shown.read_text() + "    Performance State : Unknown Error\n")
    assert health.of_files([str(tmp_path / "dmesg"), str(dead)]).action is not Action.NONE


# What looks like the lines above, on a machine with the driver.
INNOCENT = {
    "owner outside the driver": "INFO: task cat:5 is blocked on a mutex likely owned by task kworker/u16:0:12.\n"
    + ELSEWHERE,
    "owner not found": "INFO: task modprobe:2342 is blocked on an rw-semaphore, but the owner is not found.",
    "a name that is the end of a name": "INFO: task cat:5 is blocked on a mutex likely owned by task x nv_queue:412.",
    "suspend without the driver": (
        "Freezing of tasks failed after 20.002 seconds (1 tasks refusing to freeze, wq_busy=0):\n"
        "task:cat             state:D stack:0     pid:76    tgid:76\n" + ELSEWHERE + "Restarting tasks ...\n" + STACK
    ),
    "I/O wait elsewhere": "INFO: task cat:5 blocked in I/O wait for more than 122 seconds.\n" + ELSEWHERE,
    "oops elsewhere": oops("cat", ELSEWHERE),
    "oops of old data on the stack": oops("cat", ELSEWHERE + " ? nvidia_ioctl+0x6cd/0x830 [nvidia]\n"),
    "oops in an interrupt of another driver": oops("cat", " <IRQ>\n mlx5e_poll+0x1/0x2 [mlx5_core]\n </IRQ>\n" + STACK),
    "KASAN": "BUG: KASAN: use-after-free in _nv042330rm+0x10/0x30 [nvidia]\nCall Trace:\n" + STACK,
    "might sleep": "BUG: sleeping function called from invalid context at mm/slab.h:1\nCall Trace:\n" + STACK,
    "DMA-API": "DMA-API: nvidia 0000:3b:00.0: device driver maps memory from kernel text\nCall Trace:\n" + STACK,
    "a warning": "WARNING: CPU: 3 PID: 77 at mm/memory.c:5 follow_pte+0x1/0x2\nCall Trace:\n" + STACK,
    "out of memory": "python3 invoked oom-killer: gfp_mask=0xcc0, order=0\nCPU: 1 PID: 7 Comm: python3\n" + STACK,
    "recovered by vfio": (
        "vfio-pci 0000:3b:00.0: AER: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer\n"
        "pcieport 0000:3a:00.0: AER: device recovery successful"
    ),
    "contained, another device": (
        "pcieport 0000:3a:00.0: DPC: containment event, status:0x1f01 source:0x0000\n"
        "nvme 0000:3b:00.0: AER: can't recover (no error_detected callback)"
    ),
    "nouveau's firmware": "nouveau 0000:3b:00.0: Direct firmware load for nvidia/ga102/gsp.bin failed with error -2",
    "firmware of logs": "nvidia 0000:3b:00.0: Direct firmware load for nvidia/580/gsp_log_ga10x.bin failed with error",
    "a fallback": "NVRM: GPU 0000:3b:00.0: Failed to enable MSI-X; falling back to PCIe virtual-wire interrupts.",
}


@ORDERS
@pytest.mark.parametrize("name", INNOCENT)
def test_what_asks_for_nothing(name: str, order: Order, tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path, order(log(LOADED + INNOCENT[name])))
    assert (verdict.state, verdict.action, verdict.findings) == (State.HEALTHY, Action.NONE, ())


# The formats of a syslog and of journalctl, without the writer.
SYSLOGS = {
    "short": "Jul 23 07:53:55 node-1 {}[841]: ",
    "priority": "<27>Jul 23 07:53:55 node-1 {}[841]: ",
    "RFC 5424": "<27>1 2026-07-23T07:53:55.123456+00:00 node-1 {} 841 - - ",
    "short-iso": "2026-07-23T07:53:55+0000 node-1 {}[841]: ",
    "short-full": "Thu 2026-07-23 07:53:55 UTC node-1 {}[841]: ",
    "short-unix": "1784793235.123456 node-1 {}[841]: ",
    "short-monotonic": "[ 1234.567890] node-1 {}[841]: ",
    "short-delta": "[ 1234.567890 <    1.234567 >] node-1 {}[841]: ",
}


@pytest.mark.parametrize("name", SYSLOGS)
def test_fabric_manager_in_a_syslog(name: str, tmp_path: Path) -> None:
    message = "detected NVSwitch fatal error 20034 on fid 0\n"
    for writer in ("nv-fabricmanager", "nvidia-fabricmanager-start.sh", "nvidia-fabricmanager.service"):
        verdict = verdict_on(tmp_path, (SYSLOGS[name].format(writer) + message).encode())
        assert (verdict.action, verdict.sxids) == (Action.RESET_GPU, (20034,))
    for writer in ("trainer", "kernel", "my-nv-fabricmanager", "user@1000.service/nvidia-fabricmanager.service"):
        assert verdict_on(tmp_path, (SYSLOGS[name].format(writer) + message).encode()).sxids == ()


# --- quotations ------------------------------------------------------------------------------------------------------

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=a, GPU has fallen off the bus."
QUOTATIONS = {
    "JSON": '{"host":"gpu-3","log":"Mar  1 05:39:15 gpu-3 kernel: [123.456789] ' + XID + '"}',
    "JSON, the message only": '{"level":"error","msg":"' + XID + '"}',
    "a tool": "gpu-3 | ERROR: nhc: Health check failed: check_gpu_xid: [ 3606.832215] " + XID,
    "a ticket": "Summary: the node reported kernel: [ 3606.832215] " + XID,
}


@pytest.mark.parametrize("name", QUOTATIONS)
def test_a_quotation_starts_nothing_but_is_reported(name: str, tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path, QUOTATIONS[name].encode() + b"\n")
    assert (verdict.state, verdict.action) == (State.UNKNOWN, Action.NONE)
    (finding,) = verdict.findings
    assert (finding.rule, "Xid 79" in finding.message) == ("quotation", True)
    assert "journalctl -k -b" in verdict.wanted


def test_the_log_of_the_machine_decides_beside_a_quotation(tmp_path: Path) -> None:
    quoted = f"Mar  1 05:39:16 node-1 trainer[5]: saw kernel: [1.5] {XID}\n".encode()
    verdict = verdict_on(tmp_path, b"Mar  1 05:39:15 node-1 kernel: " + LOADED.encode() + quoted)
    assert (verdict.state, [each.rule for each in verdict.findings]) == (State.HEALTHY, ["quotation"])
    own = f"Mar  1 05:39:15 node-1 kernel: {XID}\n".encode()
    verdict = verdict_on(tmp_path, own + quoted)
    assert (verdict.action, sorted(each.rule for each in verdict.findings)) == (
        Action.REBOOT,
        ["fallen-off-bus", "quotation"],
    )


# --- what was read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "state", "text"),
    [
        (log(LOADED + "usb 1-1: new\n" * 3811), State.HEALTHY, "log: healthy: 3,812 kernel lines"),
        (log(LOADED)[:-1], State.HEALTHY, "log: healthy: 1 kernel line\n"),
        (log("usb 1-1: new\n" * 20), State.UNKNOWN, "none of the 20 kernel lines comes from an NVIDIA driver: supply"),
        (log('audit: comm="NVRM: x"\n'), State.UNKNOWN, "none of the 1 kernel lines"),
        (b"hello\n", State.UNKNOWN, "no kernel log and no output of nvidia-smi was recognised: supply"),
        (
            b"".join(b"Mar  1 05:39:15 n %s: x\n" % name for name in (b"kernel", b"sshd[7]", b"sshd[7]"))
            + b"Mar  1 05:39:15 n kernel: nvidia 0000:3b:00.0: enabling device\n",
            State.HEALTHY,
            "log: healthy: 2 kernel lines",
        ),
        (b"2026-03-01T05:39:15,123456+00:00 usb 1-1: new\n" * 5, State.UNKNOWN, "none of the 5 kernel lines"),
    ],
)
def test_a_verdict_says_what_was_read(content: bytes, state: State, text: str, tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path, content)
    assert verdict.state is state
    assert text in view.listing([verdict]).replace(str(tmp_path), "")


def test_files_count_together(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(log("usb 1-1: new\n" * 4))
    table = Path(__file__).parent / "fixtures" / "health" / "smi-well.txt"
    verdict = health.of_files([str(tmp_path / "a"), str(table)])
    assert view.listing([verdict]).startswith(
        "a and 1 other file, taken as one machine: healthy: 4 kernel lines, 1 GPU responds"
    )
    document = view.document([verdict])["machines"][0]
    assert (document["kernel_lines"], document["wanted"], document["gpus"]["seen"]) == (4, None, 1)


# --- nvidia-smi ------------------------------------------------------------------------------------------------------

TABLE = """\
Tue Nov 24 10:00:00 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 610.57.04              KMD Version: 610.57.04     CUDA UMD Version: 13.3     |
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
"""
USAGE = "|      0MiB / 46068MiB |      0%      Default |"
# Name, errors, and the second line of the row.
GOOD = ("NVIDIA A40          On ", "0", "|  0%   30C    P8    14W / 300W " + USAGE)
OLD = ("Tesla K80           On ", "N/A", "| N/A   41C    P0    26W / 149W " + USAGE)
DEAD = ("ERR!                On ", "ERR!", "|ERR!  ERR! ERR!    ERR! / ERR! " + USAGE.replace("  0%", "ERR!"))
BLIND = ("Tesla T4            On ", "0", "| N/A   ERR!   P0   ERR! / ERR!" + USAGE)
NO_FAN = ("NVIDIA A40          On ", "0", "|ERR!   30C    P8    14W / 300W " + USAGE)
ECC = ("NVIDIA A40          On ", "2", "|  0%   30C    P8    14W / 300W " + USAGE)


def table(*rows: tuple[str, str, str], numbers: list[int] | None = None) -> bytes:
    text = TABLE
    for position, (name, errors, second) in enumerate(rows):
        number = numbers[position] if numbers else position
        text += f"|   {number}  {name} | 00000000:{0x40 + number:02X}:00.0 Off |  {errors} |\n{second}\n"
        text += "|                               |                      |   N/A |\n+------+\n"
    return text.encode()


@pytest.mark.parametrize(
    ("content", "action", "state", "gpus", "rules"),
    [
        (table(GOOD, OLD), Action.NONE, State.HEALTHY, 2, []),
        (table(GOOD, DEAD, GOOD), Action.REBOOT, State.SICK, 3, ["unreadable"]),
        (table(GOOD, BLIND), Action.RESET_GPU, State.DEGRADED, 2, ["unreadable"]),
        (table(GOOD, NO_FAN), Action.NONE, State.DEGRADED, 2, ["unreadable"]),
        (table(GOOD, ECC), Action.RESET_GPU, State.DEGRADED, 2, ["memory"]),
        (table(GOOD, GOOD, numbers=[0, 2]), Action.NONE, State.HEALTHY, 2, ["row-missing"]),
        (table(GOOD, GOOD, GOOD) + table(GOOD, GOOD, numbers=[0, 2]), Action.NONE, State.HEALTHY, 3, []),
        (table(GOOD, numbers=[3]), Action.NONE, State.HEALTHY, 1, []),
        (table(GOOD, GOOD) * 3, Action.NONE, State.HEALTHY, 2, []),
    ],
    ids=["healthy", "dead", "blind", "fan", "ECC", "some selected", "all, then some", "one selected", "repeated"],
)
def test_plain_tables(
    content: bytes, action: Action, state: State, gpus: int, rules: list[str], tmp_path: Path
) -> None:
    verdict = verdict_on(tmp_path, content)
    assert (verdict.action, verdict.state, verdict.gpus_seen) == (action, state, gpus)
    assert [each.rule for each in verdict.findings] == rules


SELECTED = table(GOOD, GOOD, numbers=[0, 2])
LISTED = "".join(
    f"GPU {number}: NVIDIA A40 (UUID: GPU-00000000-0000-0000-0000-00000000000{number})\n" for number in range(3)
)
FOUND = "pci 0000:{}:00.0: [10de:2235] type 00 class 0x030200\n"
SHOWN = FOUND.format("40") + FOUND.format("42")


@pytest.mark.parametrize(
    ("kernel", "listed", "lost"),
    [
        ("", LISTED, ""),
        (SHOWN + FOUND.format("41"), "", "0000:41:00.0"),
        (SHOWN + FOUND.format("41") + FOUND.format("43"), "", ""),
        ("NVRM: Xid (PCI:0000:41:00): 43, pid=1, name=a, Ch 1\n", "", "0000:41:00.0"),
    ],
    ids=["list", "bus", "bus with two more", "Xid"],
)
def test_a_missing_row_is_a_lost_gpu_if_other_evidence_shows_more_gpus(
    kernel: str, listed: str, lost: str, tmp_path: Path
) -> None:
    (tmp_path / "dmesg").write_bytes(log("usb 1-1: new\n" + kernel))
    (tmp_path / "smi").write_bytes(listed.encode() + SELECTED)
    verdict = health.of_files([str(tmp_path / "dmesg"), str(tmp_path / "smi")])
    assert (verdict.action, verdict.state, verdict.gpus_seen) == (Action.REBOOT, State.SICK, 2)
    (finding,) = [each for each in verdict.findings if each.rule == "row-missing"]
    assert finding.gpu == lost
    assert finding.evidence


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        (SHOWN, b""),
        # A switch, the audio function of a GPU, and another vendor's GPU.
        (SHOWN + "pci 0000:83:00.0: [10de:22a3] type 00 class 0x068000\n", b""),
        (SHOWN + "pci 0000:40:00.1: [10de:228e] type 00 class 0x040300\n", b""),
        (SHOWN + "pci 0000:05:00.0: [1a03:2000] type 00 class 0x030000\n", b""),
        # The second machine's kernel, in a ticket.
        (SHOWN + 'app[7]: {"log": "kernel: pci 0000:41:00.0: [10de:2235] type 00 class 0x030200"}\n', b""),
        # Fewer than the table shows; a list of slices; all GPUs in other output.
        (SHOWN, LISTED.splitlines()[0].encode() + b"\n  MIG 1g.5gb Device 0: (UUID: MIG-0)\n"),
        (SHOWN + FOUND.format("41"), LISTED.encode() + table(GOOD, GOOD, GOOD)),
    ],
    ids=["shown ones", "switch", "audio", "other vendor", "quoted", "short list", "all shown"],
)
def test_a_missing_row_alone_is_no_lost_gpu(kernel: str, text: bytes, tmp_path: Path) -> None:
    (tmp_path / "dmesg").write_bytes(log("usb 1-1: new\n" + kernel))
    (tmp_path / "smi").write_bytes(text + SELECTED)
    verdict = health.of_files([str(tmp_path / "dmesg"), str(tmp_path / "smi")])
    assert (verdict.action, verdict.state) == (Action.NONE, State.HEALTHY)


@pytest.mark.parametrize(
    "query", ["0, NVIDIA A40, 30\n2, NVIDIA A40, 31\n", "index, name\n0, NVIDIA A40\n2, NVIDIA A40\n"]
)
def test_a_gap_in_a_query_is_no_lost_gpu(query: str, tmp_path: Path) -> None:
    (tmp_path / "q.csv").write_text(query)
    (tmp_path / "dmesg").write_bytes(log(SHOWN + FOUND.format("41")))
    verdict = health.of_files([str(tmp_path / "dmesg"), str(tmp_path / "q.csv")])
    assert verdict.action is Action.NONE


def test_a_list_of_gpus_alone_is_no_verdict(tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path, LISTED.encode())
    assert (verdict.state, verdict.action) == (State.UNKNOWN, Action.NONE)
    assert verdict.wanted.startswith("no kernel line and no values of a GPU were found")


@pytest.mark.parametrize(
    ("content", "action"),
    [
        ("index, name, fan.speed [%]\n0, NVIDIA A40, [Unknown Error]\n", Action.NONE),
        ("index, name, power.draw [W], temperature.gpu\n0, NVIDIA A40, [Unknown Error], 30\n", Action.RESET_GPU),
        ("index, pstate, power.draw [W]\n0, [Unknown Error], 41.20 W\n", Action.REBOOT),
        ("0, [Unknown Error], [Unknown Error], [Unknown Error]\n", Action.REBOOT),
        ("[Unknown Error] is in no row\n", Action.NONE),
        ("pid, process_name, used_gpu_memory [MiB]\n77, [Unknown Error], 300 MiB\n", Action.NONE),
        ("index, serial, temperature.gpu\n0, [Unknown Error], 30\n", Action.NONE),
        ("index, name\n0, [GPU requires reset]\n", Action.RESET_GPU),
    ],
)
def test_rows_of_queries(content: str, action: Action, tmp_path: Path) -> None:
    assert verdict_on(tmp_path, content.encode()).action is action


@pytest.mark.parametrize(
    ("fields", "action"),
    [
        ("    Fan Speed                             : Unknown Error\n", Action.NONE),
        ("    GPU Power Readings\n        Power Draw                        : Unknown Error\n", Action.RESET_GPU),
        ("    Performance State                     : Unknown Error\n", Action.REBOOT),
        ("    Serial Number                         : Unknown Error\n", Action.NONE),
        ("    Processes\n        Process ID : 7\n            Name : Unknown Error\n", Action.NONE),
        ("    Temperature\n        GPU Current Temp : Unknown Error\n", Action.RESET_GPU),
    ],
)
def test_fields_of_the_long_output_and_a_new_heading(fields: str, action: Action, tmp_path: Path) -> None:
    head = "==============NVSMI LOG==============\n\nKMD Version                   : 610.57.04\nAttached GPUs : 1\n"
    verdict = verdict_on(tmp_path, f"{head}GPU 00000000:3B:00.0\n    Product Name : NVIDIA A40\n{fields}".encode())
    assert (verdict.gpus_seen, verdict.action) == (1, action)
