"""The probe on the local machine, on simulated machines in a folder, and on drivers that hang."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils import gpu_verify, sent
from gpunodes.ansible.module_utils.probe import document, threads
from gpunodes.ansible.module_utils.probe import smi as smi_run
from gpunodes.ansible.module_utils.probe.deduplicator import Deduplicator
from gpunodes.ansible.module_utils.probe.options import TEXT_BYTES, ProbeOptions
from gpunodes.engine.remote import answers, programs
from gpunodes.health import judge, shape
from gpunodes.health.model import SiteRules, State

SOURCES = [
    *programs.sources("probe.document").values(),
    *programs.sources("escalate").values(),
    Path(sent.__file__).read_text(),
]
XML = '<?xml version="1.0" ?>\n<nvidia_smi_log><attached_gpus>1</attached_gpus></nvidia_smi_log>\n'


class Root:
    """A simulated machine: a folder that the probe takes as the file system root."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("proc/uptime", "1000.5 2000.0\n")
        self.write("proc/sys/kernel/random/boot_id", "6b1c1f0e-8f5a-4f43-9a43-3d1d5c8a3a11\n")
        self.write("proc/sys/kernel/osrelease", "6.12.0\n")
        self.write("dev/kmsg", "6,0,0,-;Linux version 6.12.0\n")
        (folder / "run").mkdir()

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def program(self, name: str, script: str) -> Path:
        path = self.write(f"usr/bin/{name}", f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def smi(self, script: str) -> Path:
        """nvidia-smi, with the kernel module loaded."""
        (self.folder / "sys/module/nvidia").mkdir(parents=True, exist_ok=True)
        return self.program("nvidia-smi", script)

    def real_proc(self) -> None:
        """The processes of the local machine."""
        shutil.rmtree(self.folder / "proc")
        (self.folder / "proc").symlink_to("/proc")

    def thread(
        self,
        pid: int,
        comm: str,
        state: str,
        *,
        kthread: bool = False,
        stack: str = "",
        cpu: int = 0,
        ran_s: float = 0,
        wchan: str = "rwsem_down_write",
    ) -> None:
        """``ran_s``: when it last ran, by the clock of its CPU."""
        flags = threads.PF_KTHREAD if kthread else 0
        fields = [state, *"11100", str(flags), *["0"] * 29, str(cpu), "0"]
        folder = f"proc/{pid}/task/{pid}"
        self.write(f"{folder}/stat", f"{pid} ({comm}) {' '.join(fields)}\n")
        self.write(f"{folder}/status", "Name: x\nvoluntary_ctxt_switches:\t7\n")
        self.write(f"{folder}/sched", f"se.exec_start : {ran_s * 1000:.3f}\n" if ran_s else "")
        self.write(f"{folder}/wchan", wchan)
        self.write(f"{folder}/stack", stack)

    def read(self, deadline_s: float = 8.0, smi_s: float = 20.0) -> dict[str, Any]:
        facts = document.read(ProbeOptions(root=str(self.folder), deadline_s=deadline_s, smi_s=smi_s))
        assert shape.violation(json.loads(json.dumps(facts))) == ""
        return facts


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are killed after the test."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def kmsg(lines: list[tuple[float, str]], first: int = 0) -> str:
    return "".join(
        f"4,{first + number},{int(seconds * 1e6)},-;{text}\n" for number, (seconds, text) in enumerate(lines)
    )


# --- as a program ----------------------------------------------------------------------------------------------------


def test_syntax_is_valid_in_python_3_6() -> None:
    for text in SOURCES:
        ast.parse(text, feature_version=(3, 6))


def test_imports_exist_in_python_3_6() -> None:
    imported = {
        name.partition(".")[0]
        for text in SOURCES
        for node in ast.walk(ast.parse(text))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
    }
    assert imported <= {
        *("collections", "contextlib", "ctypes", "errno", "fcntl", "glob", "importlib", "json", "os", "re", "select"),
        *("signal", "stat", "struct", "subprocess", "sys", "time", "typing", "zlib"),
    }


def run_sent(arguments: dict[str, Any], name: str = "probe", python: str = sys.executable, **keywords: Any) -> Any:
    """Run the probe as a scan does: unpacked from standard input. ``name`` is in the command line of its processes."""
    program = programs.pack("probe.document", arguments)
    done = subprocess.run(
        [*program.argv({"ansible_python_interpreter": f"/usr/bin/env {python}"}), name],
        input=program.packed,
        capture_output=True,
        check=True,
        timeout=30,
        **keywords,
    )
    assert done.stderr == b""
    size, packed = (answers.unframed(done.stdout) or b"").split(b"\n", 1)
    assert len(packed) == int(size)
    return json.loads(zlib.decompress(packed))


def test_the_verification_of_gpus_judges_a_hang_as_the_probe_does(root: Root) -> None:
    """A program may have any name, also bytes that are no UTF-8, and wait for anything: only its stack counts."""
    driver = "[<0>] rm_ioctl+0x10/0x20 [nvidia]\n"
    root.thread(2, "ksoftirqd/0", "S", kthread=True, ran_s=100)
    root.thread(7, "nvidia-smi", "D", stack="[<0>] kernel_clone+0x10/0x20\n", ran_s=10)
    root.thread(8, "nvidia-smi", "D", stack=driver, ran_s=90)
    root.write("proc/9/task/9/stat", b"9 (a\xff) D 1 1 1 0 0\n")
    assert gpu_verify._stuck(str(root.folder)) == ""
    root.thread(10, "nvidia-smi", "D", stack=driver, ran_s=50)
    assert gpu_verify._stuck(str(root.folder)) == "10"


def test_local_machine_is_probed_and_no_process_is_left() -> None:
    name = f"probe-{uuid.uuid4()}"  # other tests run probes at the same time
    facts = run_sent({"deadline_s": 15}, name)
    assert shape.violation(facts) == ""
    assert facts["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert facts["took_s"] < 10
    assert [path for path in Path("/proc").glob("[0-9]*") if name.encode() in read_bytes(path / "cmdline")] == []


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can switch to another user")
def test_missing_root_privilege_is_reported() -> None:
    facts = probe_as_nobody()
    assert shape.violation(facts) == ""
    assert any(error["what"] == "privilege" for error in facts["errors"])


def probe_as_nobody() -> Any:
    # The system's Python: the user nobody may have no access to the one that runs the tests.
    return run_sent({"deadline_s": 15}, python="/usr/bin/python3", user=65534, cwd="/")


# --- the log ---------------------------------------------------------------------------------------------------------


def test_journal_is_not_read_when_the_ring_buffer_is_complete(root: Root) -> None:
    root.program("journalctl", f"touch {root.folder}/journal-read")
    root.write("dev/kmsg", kmsg([(0, "Linux version"), (3.25, "NVRM: hello")]))
    log = root.read()["log"]
    assert log == {
        "source": "kmsg",
        "cut": False,
        "text": "[    0.000000] Linux version\n[    3.250000] NVRM: hello\n",
        "repeats": [],
    }
    assert not (root.folder / "journal-read").exists()


def test_lines_of_user_space_are_ignored(root: Root) -> None:
    forged = "12,1,5000000,-;NVRM: Xid (PCI:0000:3b:00): 79, forged\n SUBSYSTEM=pci\n"
    root.write("dev/kmsg", "6,0,0,-;Linux version\n" + forged + "4,2,6000000,c;real\n")
    assert root.read()["log"]["text"].splitlines() == ["[    0.000000] Linux version", "[    6.000000] real"]


LOST = "NVRM: The NVIDIA GPU 0000:3b:00.0 (PCI ID: 10de:2330)", "NVRM: installed in this system has", "NVRM: fallen off"
CRASHED = "NVRM: The NVID[7]: segfault at 0 ip 0 sp 0 error 6 in x", "NVRM: Xid (PCI:0000:3b:00): 79, x[0+1]"
"""What the kernel writes when a program crashes whose name, and the name of whose file, has a line break."""


@pytest.mark.parametrize("source", ["kmsg", "journal"])
def test_only_the_drivers_messages_have_several_lines(root: Root, source: str) -> None:
    if source == "kmsg":
        root.write("dev/kmsg", kmsg([(0, "Linux version"), (3.0, "\\x0a".join(LOST)), (4.0, "\\x0a".join(CRASHED))]))
    else:
        root.write("dev/kmsg", kmsg([(50.0, "newest")], first=900))
        lines = [f"{'[    3.000000] host kernel: ':<28}{LOST[0]}", *(f"{'':28}{line}" for line in LOST[1:])]
        lines += [f"{'[    4.000000] host kernel: ':<28}{CRASHED[0]}", f"{'':28}{CRASHED[1]}"]
        root.program("journalctl", "cat <<'END'\n" + "\n".join(lines) + "\nEND")
    facts = root.read()
    texts = [line[15:] for line in facts["log"]["text"].splitlines()]
    assert [text for text in texts if text in LOST] == list(LOST)
    assert not [text for text in texts if text.startswith("NVRM: Xid")]
    assert judge.judge_facts("gpu-1", facts, SiteRules()).xids == ()


@pytest.mark.parametrize("source", ["kmsg", "journal"])
@pytest.mark.parametrize("forged", ["NVRM: Xid (PCI:0000:3b:00): 79, x", "Linux version 5"])
def test_the_version_that_a_process_reports_is_no_line(root: Root, source: str, forged: str) -> None:
    """The driver writes the client's version as it is, line breaks included."""
    xid = "NVRM: Xid (PCI:0000:5e:00): 119, pid=7, name=x"
    first = "NVRM: API mismatch: the client 'x' (pid 7) has the version 1.5"
    more = [forged + ", but", "NVRM: this kernel module has the version 2.1."]
    if source == "kmsg":
        lines = [(0, "Linux version"), (3.0, xid), (4.0, "\\x0a".join([first, *more]))]
        root.write("dev/kmsg", kmsg(lines))
    else:
        root.write("dev/kmsg", kmsg([(50.0, "newest")], first=900))
        text = [f"[    3.000000] host kernel: {xid}", f"[    4.000000] host kernel: {first}"]
        text += [f"{'':28}{line}" for line in more]
        root.program("journalctl", "cat <<'END'\n" + "\n".join(text) + "\nEND")
    facts = root.read()
    texts = [line[15:] for line in facts["log"]["text"].splitlines()]
    assert [text for text in texts if "NVRM" in text] == [xid, " ".join([first, *more])]
    verdict = judge.judge_facts("gpu-1", facts, SiteRules())
    assert verdict.xids == (119,)
    assert any(finding.rule == "version-mismatch" for finding in verdict.findings)


def test_journal_completes_an_overflowed_ring_buffer(root: Root) -> None:
    root.write("dev/kmsg", kmsg([(50.0, "newest"), (51.0, "newer still")], first=900))
    root.program(
        "journalctl",
        'case "$*" in *SYSLOG_FACILITY=0*) ;; *) exit 1;; esac\n'
        "echo '[    0.000000] host kernel: Linux version'\n"
        "echo '[   12.500000] host kernel:  indented+0x1/0x2'\n"
        "echo '[   50.000000] host kernel: newest'",
    )
    log = root.read()["log"]
    assert log["source"] == "journal"
    assert log["cut"] is False
    assert log["text"].splitlines() == [
        "[    0.000000] Linux version",
        "[   12.500000]  indented+0x1/0x2",
        "[   50.000000] newest",
        "[   51.000000] newer still",
    ]


def test_hanging_journal_costs_only_its_own_lines(root: Root) -> None:
    root.write("dev/kmsg", kmsg([(50.0, "newest")], first=900))
    root.program("journalctl", "exec sleep 60")
    began = time.monotonic()
    facts = root.read(deadline_s=8)
    assert time.monotonic() - began < 9
    assert facts["log"]["source"] == "kmsg"
    assert facts["log"]["cut"] is True
    assert "newest" in facts["log"]["text"]
    assert any("journalctl" in error["error"] for error in facts["errors"])


@pytest.mark.parametrize("script", ["", "echo '[   50.000000] host kernel: newest'"], ids=["no journal", "later lines"])
def test_a_ring_buffer_that_no_journal_completes_is_an_error(root: Root, script: str) -> None:
    root.write("dev/kmsg", kmsg([(50.0, "newest")], first=900))
    if script:
        root.program("journalctl", script)
    facts = root.read()
    assert (facts["log"]["source"], facts["log"]["cut"]) == ("kmsg", True)
    assert [error["error"] for error in facts["errors"] if error["what"] == "journal"] == [
        "it has none of the lines that the ring buffer lost"
    ]
    assert judge.judge_facts("gpu-1", facts, SiteRules()).state is State.UNKNOWN


def test_expected_gpus_come_from_the_boot_log(root: Root) -> None:
    root.write(
        "dev/kmsg",
        kmsg(
            [
                (0.5, "pci 0000:3b:00.0: [10de:2330] type 00 class 0x030200 PCIe Endpoint"),
                (0.6, "pci 0000:5e:00.0: [10de:2330] type 00 class 0x030200"),
                (0.7, "pci 0000:5e:00.1: [10de:22a3] type 00 class 0x040300"),
                (0.8, "pci 0000:01:00.0: [8086:1533] type 00 class 0x020000"),
            ]
        ),
    )
    assert root.read()["expected"] == {"gpus": 2, "from": "boot log"}


def deduplicator(lines: list[tuple[float, str]]) -> tuple[str, list[dict[str, Any]], bool]:
    found = Deduplicator()
    for seconds, text in lines:
        found.add(seconds, text)
    text, cut = found.text()
    return text, found.repeats(), cut


@pytest.mark.long
def test_log_flood_is_counted_and_other_errors_stay() -> None:
    flood = [(float(n), f"NVRM: Xid (PCI:0000:3b:00): 31, pid={n}, name=python, Ch {n:08x}") for n in range(190_000)]
    flood.insert(100_000, (100_000.0, "NVRM: Xid (PCI:0000:5e:00): 79, GPU has fallen off the bus."))
    flood.insert(120_000, (120_000.0, "NVRM: Xid (PCI:0000:3b:00): 119, Timeout after 45s of waiting for RPC"))
    began = time.process_time()
    text, repeats, cut = deduplicator(flood)
    assert time.process_time() - began < 15
    assert not cut
    assert len(text) < 50_000
    assert "): 79, GPU has fallen off the bus." in text
    assert "): 119, Timeout" in text
    assert sum(repeat["count"] for repeat in repeats) > 189_000
    assert min(repeat["first"] for repeat in repeats) == pytest.approx(0, abs=100)
    assert max(repeat["last"] for repeat in repeats) == pytest.approx(189_999, abs=2)


def test_hung_task_reports_stay_complete() -> None:
    lines = []
    for n in range(60):
        name = "kworker/2:3" if n != 40 else "nvidia-smi"
        lines += [
            (n * 120.0, f"INFO: task {name}:{n + 100} blocked for more than 120 seconds."),
            (n * 120.0, "      Tainted: P           O      5.15.0"),
            (n * 120.0, '"echo 0 > /proc/sys/kernel/hung_task_timeout_secs" disables this message.'),
            (n * 120.0, "Call Trace:"),
            (n * 120.0, " __schedule+0x2e4/0x8c0"),
            (n * 120.0, " os_acquire_mutex+0x37/0x40 [nvidia]" if n == 40 else " gpfs_wait+0x1/0x2 [mmfs]"),
        ]
    text, _, cut = deduplicator(lines)
    assert not cut
    assert text.count("\n") == len(lines)
    block = text[text.index("INFO: task nvidia-smi:140") :]
    assert "[nvidia]" in block[: block.index("INFO: task", 5)]


def test_a_report_of_the_driver_stays_however_many_wait_for_files() -> None:
    lines = []
    for n in range(300):
        lines += [f"INFO: task python3:{n} blocked for more than 120 seconds.", "Call Trace:", " schedule+0x1/0x2"]
        lines += [" os_acquire_mutex+0x37/0x40 [nvidia]"] * 2 if n == 250 else [" nfs_wait+0x1/0x2 [nfs]"]
    text, _, cut = deduplicator([(float(n), line) for n, line in enumerate(lines)])
    assert cut
    assert text.count("[nvidia]") == 1
    assert text.count("INFO: task python3:250 ") == 1
    verdict = judge.judge_files("log", [[text.encode()]], SiteRules())
    assert "python3:250." in verdict.findings[0].message


@pytest.mark.parametrize(
    "first",
    [
        "INFO: task cat:7 blocked in I/O wait for more than 122 seconds.",
        "INFO: task cat:7 can't die for more than 143 seconds.",
        "INFO: task cat:7 <writer> blocked on an rw-semaphore likely owned by task python3:8 <reader>",
        "Freezing of tasks failed after 20.002 seconds (1 tasks refusing to freeze, wq_busy=0):",
        "Oops: 0002 [#1] PREEMPT SMP NOPTI",
    ],
)
def test_other_reports_of_stuck_tasks_stay_complete(first: str) -> None:
    """Their stacks consist of lines that a log flood would leave out."""
    hung = "INFO: task cat:7 blocked for more than 120 seconds."
    report = [*([hung] if "owned" in first else []), first, "Call Trace:", " os_acquire_mutex+0x37/0x40 [nvidia]"]
    text, _, cut = deduplicator([(float(n), line) for n in range(60) for line in report])
    assert (cut, text.count("[nvidia]")) == (False, 60)


CRASH = "{0}[{1}]: segfault at 0 ip 000056264eafb132 sp 00007fffd0f082e0 error 6 in {0}[56264eafb000+1000]"


@pytest.mark.parametrize(
    ("line", "before"),
    [
        (CRASH.replace("{0}", "nvidia-{0}"), 14_000),
        (CRASH.replace("{0}", "NVRM: {0}"), 14_000),
        ("NVRM: API mismatch: the client '{0}' (pid {1}) has the version 1.{0}, but this module has 580.1.", 14_000),
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid={1}, name={0}, Ch 00000007, intr 00000000. MMU Fault: ENGINE x", 14_000),
        (CRASH, 6_000),
    ],
    ids=["the driver's name", "the driver's prefix", "versions", "Xids", "more patterns than are counted"],
)
def test_lines_that_a_pod_causes_do_not_push_out_the_drivers(
    monkeypatch: pytest.MonkeyPatch, line: str, before: int
) -> None:
    """Its processes have any names. The driver's lines among them were lost, and the GPU counted as healthy."""
    monkeypatch.setattr(Deduplicator, "_MAX_PATTERNS", max(5_000, before))
    names = ("".join(chr(103 + (n >> shift) % 16) for shift in range(0, 16, 4)) for n in range(20_000))
    lines = [(float(n), line.format(name, n) + "x" * 80) for n, name in enumerate(names)]
    xid = "NVRM: Xid (PCI:0000:5e:00): 79, pid=7, name=x, GPU has fallen off the bus."
    lines.insert(before, (float(before), xid))
    text, _, _ = deduplicator(lines)
    assert xid in text
    assert len(text) <= TEXT_BYTES


@pytest.mark.long
def test_log_of_different_lines_is_bounded_and_keeps_driver_lines() -> None:
    words = ["".join(chr(103 + (n >> shift) % 16) for shift in range(0, 20, 4)) for n in range(60_000)]
    lines = [(float(n), f"{word} " * 12) for n, word in enumerate(words)]
    lines.insert(10, (10.0, "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."))
    text, _, cut = deduplicator(lines)
    assert cut
    assert len(text) <= TEXT_BYTES
    assert "fallen off the bus" in text
    assert words[-1] in text


# --- threads ---------------------------------------------------------------------------------------------------------


def test_stuck_threads_are_reported_with_their_stacks(root: Root) -> None:
    root.thread(41, "kworker/2:3", "D", kthread=True, stack="[<0>] os_acquire_mutex+0x37/0x40 [nvidia]\n")
    root.thread(42, "nvidia-persiste", "S")
    root.thread(43, "nv_queue", "R", kthread=True, stack="[<0>] spin+0x1/0x2 [nvidia]\n")
    root.thread(44, "nv_queue", "S", kthread=True)
    root.thread(45, "odd) D (name", "D")
    root.thread(46, "bash", "S")
    tasks = {task["pid"]: task for task in root.read(smi_s=1)["tasks"]}
    assert set(tasks) == {41, 42, 43, 45}
    # It is watched for a second, since it waits in the driver.
    assert 1.5 <= tasks[41].pop("age_s") < 5
    assert tasks[45]["age_s"] == 0.5
    assert tasks[41] == {
        "pid": 41,
        "comm": "kworker/2:3",
        "state": "D",
        "kthread": True,
        "wchan": "rwsem_down_write",
        "stack": ["os_acquire_mutex+0x37/0x40 [nvidia]"],
    }
    assert tasks[43]["stack"] == ["spin+0x1/0x2 [nvidia]"]
    assert tasks[45]["comm"] == "odd) D (name"


def test_a_thread_in_the_driver_that_wakes_does_not_hang(root: Root) -> None:
    """A real H200 with 400 programs that start: each of them waits for the driver's lock, for a second or two."""
    for pid, ran_s in ((41, 90.0), (42, 98.0), (43, 95.0)):
        root.thread(pid, "python3", "D", stack=IN_DRIVER, ran_s=ran_s)
    root.thread(9, "migration/0", "S", kthread=True, ran_s=100)

    def wake() -> None:
        root.write("proc/41/task/41/status", "Name: x\nvoluntary_ctxt_switches:\t8\n")
        shutil.rmtree(root.folder / "proc/43")

    timer = threading.Timer(1.2, wake)
    timer.start()
    facts = root.read(smi_s=3)
    timer.join()
    ages = {task["pid"]: task["age_s"] for task in facts["tasks"]}
    assert ages[41] < 12
    assert ages[43] < 7
    assert 5 <= ages[42] < 8
    assert not judge.judge_facts("gpu-1", facts, SiteRules()).hung_in_driver


def test_the_watch_of_a_hanging_thread_ends_when_the_hang_is_certain(root: Root) -> None:
    root.thread(41, "python3", "D", stack=IN_DRIVER, ran_s=81.5)
    root.thread(9, "migration/0", "S", kthread=True, ran_s=100)
    facts = root.read()
    assert 20 <= facts["tasks"][0]["age_s"] < 24
    assert judge.judge_facts("gpu-1", facts, SiteRules()).hung_in_driver


def test_at_most_200_threads_are_reported(root: Root) -> None:
    for pid in range(90, 340):
        root.thread(pid, "stuck", "D")
    facts = root.read()
    assert [task["pid"] for task in facts["tasks"]] == list(range(90, 290))
    assert {"what": "threads", "error": "250 threads are in uninterruptible sleep"} in facts["errors"]


def test_every_thread_in_the_driver_is_reported_however_many_wait_for_files(root: Root) -> None:
    for pid in range(100, 330):
        root.thread(pid, "python3", "D", stack="[<0>] nfs_wait_bit_killable+0x1e/0x90 [nfs]\n")
    root.thread(330, "python3", "D", stack="[<0>] os_acquire_mutex+0x37/0x40 [nvidia]\n")
    root.thread(331, "python3", "D", stack="[<0>] uvm_ioctl+0x37/0x40 [nvidia_uvm]\n")
    facts = root.read(smi_s=1)
    assert len(facts["tasks"]) == 202
    assert [(task["pid"], task["stack"]) for task in facts["tasks"][200:]] == [
        (330, ["os_acquire_mutex+0x37/0x40 [nvidia]"]),
        (331, ["uvm_ioctl+0x37/0x40 [nvidia_uvm]"]),
    ]


# --- nvidia-smi ------------------------------------------------------------------------------------------------------


def test_nvidia_smi_does_not_run_without_the_kernel_module(root: Root) -> None:
    root.program("nvidia-smi", f"touch {root.folder}/ran")
    smi = root.read()["smi"]
    assert smi["status"] == "absent"
    assert smi["message"] == "the kernel module nvidia is not loaded"
    assert not (root.folder / "ran").exists()


def test_nvidia_smi_succeeds(root: Root) -> None:
    root.smi(f"cat <<'END'\n{XML}END")
    smi = root.read()["smi"]
    assert (smi["status"], smi["rc"], smi["xml"], smi["pid"]) == ("ok", 0, XML, None)


def test_nvidia_smi_fails(root: Root) -> None:
    root.smi("echo 'NVIDIA-SMI has failed'; exit 9")
    smi = root.read()["smi"]
    assert (smi["status"], smi["rc"], smi["xml"]) == ("failed", 9, None)
    assert smi["message"] == "NVIDIA-SMI has failed\n"


@pytest.mark.parametrize(
    "script",
    ["trap '' TERM HUP INT; while :; do sleep 1; done", "exec sleep 1000", "exec >&- 2>&-; exec sleep 1000"],
    ids=["ignores-signals", "sleeps", "closes-output"],
)
def test_nvidia_smi_is_killed_at_its_deadline(root: Root, script: str) -> None:
    root.smi(f"echo $$ >{root.folder}/pid; echo begins; {script}")
    began = time.monotonic()
    facts = root.read(deadline_s=6, smi_s=2)
    assert time.monotonic() - began < 6
    assert facts["smi"]["status"] == "timeout"
    assert facts["smi"]["pid"] is None
    assert facts["smi"]["message"] == "begins\n"
    assert 1.9 < facts["smi"]["took_s"] < 3.5  # the wait may end a millisecond before its time
    assert not Path("/proc", (root.folder / "pid").read_text().strip()).exists()


@pytest.mark.parametrize(
    ("slept_s", "module", "waits"), [(60, "nvidia", False), (60, "nfs", True), (6, "nvidia", True)]
)
def test_nvidia_smi_gets_less_time_while_the_driver_hangs(
    root: Root, monkeypatch: pytest.MonkeyPatch, slept_s: float, module: str, waits: bool
) -> None:
    stack = f"[<0>] os_acquire_mutex+0x3b/0x50 [{module}]\n"
    root.thread(20, "kworker/u2:0", "D", kthread=True, stack=stack, ran_s=100)
    root.thread(9, "migration/0", "S", kthread=True, ran_s=100 + slept_s)
    monkeypatch.setattr(smi_run, "HOPELESS_S", 0.5)
    root.smi("exec sleep 1000")
    smi = root.read(smi_s=3)["smi"]
    assert smi["status"] == "timeout"
    assert (smi["took_s"] > 2) is waits


@pytest.mark.parametrize(
    ("script", "moves"),
    [("exec sleep 1000", False), ("while :; do sleep 0.1; done", True), ("sleep 2; exec yes", True)],
)
def test_how_long_nvidia_smi_has_not_moved(root: Root, script: str, moves: bool) -> None:
    """In a driver that many programs use it waits for their locks, but it wakes in between, and writes."""
    root.real_proc()
    (root.folder / "tmp").mkdir()
    root.smi(script)
    smi = root.read(smi_s=4)["smi"]
    assert smi["status"] == "timeout"
    assert (smi["still_s"] < 1.5) is moves
    assert (smi["still_s"] > 2.5) is not moves


def test_endless_output_of_nvidia_smi_is_bounded(root: Root) -> None:
    root.smi("exec yes '<nvidia_smi_log>'")
    facts = root.read(deadline_s=8, smi_s=3)
    assert facts["smi"]["status"] == "timeout"
    assert len(facts["smi"]["message"]) <= smi_run.MESSAGE_BYTES


def test_nvidia_smi_that_cannot_be_killed_is_reported(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal without effect is the stand-in for a process that no signal reaches."""
    root.real_proc()
    (root.folder / "tmp").mkdir()
    root.smi(f"echo $$ >{root.folder}/pid; exec sleep 1000")
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda *_: None)
        facts = root.read(deadline_s=7, smi_s=1)
    pid = int((root.folder / "pid").read_text())
    try:
        assert facts["smi"]["status"] == "timeout"
        assert (facts["smi"]["pid"], facts["smi"]["task_state"]) == (pid, "S")
        assert facts["smi"]["still_s"] > 0.9  # the second that the kill waits, too
        assert {"what": "smi", "error": f"process {pid} cannot be killed and is left behind"} in facts["errors"]
        again = root.read(deadline_s=7, smi_s=1)
        assert (again["smi"]["status"], again["smi"]["pid"]) == ("stuck", pid)
        assert again["smi"]["still_s"] > 0.5
        if os.geteuid() == 0:
            assert all(any("nanosleep" in line for line in each["smi"]["stack"]) for each in (facts, again))
    finally:
        os.kill(pid, 9)


@pytest.mark.parametrize("owner", [4711, 0])
def test_without_root_a_lock_of_the_same_user_tells_of_an_earlier_nvidia_smi(
    root: Root, monkeypatch: pytest.MonkeyPatch, owner: int
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files to others")
    path = root.write("tmp/gpunodes-nvidia-smi-4711.lock", "17")
    os.chown(path, owner, owner)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    root.smi(f"cat <<'END'\n{XML}END")
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        smi = root.read(smi_s=1)["smi"]
    assert (smi["status"], smi["pid"]) == (("stuck", 17) if owner else ("ok", None))


IN_DRIVER = "[<0>] os_acquire_mutex+0x3b/0x50 [nvidia]\n[<0>] nvidia_ioctl+0x6cd/0x830 [nvidia]\n"


@pytest.mark.parametrize(
    ("stack", "slept_s", "starts"),
    [
        (IN_DRIVER, 60, False),
        # The driver starts.
        (IN_DRIVER, 2, True),
        ("[<0>] nfs_wait_bit_killable+0x1e/0x90 [nfs]\n", 60, True),
        ("[<0>] wait_for_vfork_done+0x41/0x60\n", 60, True),
        # The driver needs a page of a file: a frozen NFS server does not give it.
        ("[<0>] filemap_fault+0x1/0x2\n[<0>] asm_exc_page_fault+0x22/0x30\n" + IN_DRIVER, 60, True),
        ("[<0>] uvm_va_block+0x1/0x2 [nvidia_uvm]\n[<0>] handle_mm_fault+0x1/0x2\n", 60, False),
        ("[<0>] nvfs_io_wait+0x1/0x2 [nvidia_fs]\n", 60, True),
        # A kernel that shows no stack.
        ("", 60, True),
    ],
    ids=[
        "in the driver",
        "in the driver, recent",
        "NFS",
        "vfork",
        "page",
        "page, unified memory",
        "nvidia_fs",
        "no stack",
    ],
)
def test_no_second_nvidia_smi_starts_while_one_hangs_in_the_driver(
    root: Root, stack: str, slept_s: float, starts: bool
) -> None:
    root.thread(20, "nvidia-smi", "D", stack=stack, ran_s=100)
    root.thread(9, "migration/0", "S", kthread=True, ran_s=100 + slept_s)
    root.smi(f"cat <<'END'\n{XML}END")
    smi = root.read(smi_s=1)["smi"]
    if starts:
        assert (smi["status"], smi["pid"], smi["stack"]) == ("ok", None, [])
    else:
        lines = [line.removeprefix("[<0>] ") for line in stack.splitlines()]
        assert (smi["status"], smi["pid"], smi["task_state"], smi["stack"]) == ("stuck", 20, "D", lines)


@pytest.mark.parametrize(("slept_s", "hangs"), [(1, False), (60, True)])
def test_how_long_a_thread_sleeps_is_told_by_the_clock_of_its_cpu(root: Root, slept_s: float, hangs: bool) -> None:
    """The other CPU's clock is minutes ahead, or behind: it has other interrupts."""
    for cpu, now in ((0, 5000), (1, 1000), (2, 500)):
        root.thread(10 + cpu, f"ksoftirqd/{cpu}", "S", kthread=True, cpu=cpu, ran_s=now)
    root.thread(20, "nvidia-smi", "D", stack=IN_DRIVER, cpu=1, ran_s=1000 - slept_s)
    # Any process can take the name.
    root.thread(21, "ksoftirqd/1", "S", cpu=1, ran_s=5000)
    root.smi(f"cat <<'END'\n{XML}END")
    facts = root.read(smi_s=1)
    assert (facts["smi"]["status"] == "stuck") is hangs
    assert slept_s <= facts["tasks"][0]["age_s"] < slept_s + 4
    assert judge.judge_facts("gpu-1", facts, SiteRules()).hung_in_driver is hangs


@pytest.mark.parametrize("name", ["nvidia-smi", "nvidia-persiste", "nv_queue"])
def test_a_process_that_takes_the_name_of_the_driver_starts_nothing(
    root: Root, processes: list[subprocess.Popen[bytes]], name: str
) -> None:
    """Any pod can do this: it sleeps like a thread that hangs in the driver, until its vfork()ed child ends."""
    if not shutil.which("gcc"):
        pytest.skip("needs a C compiler")
    program = root.folder / "pod"
    code = (
        "#include <unistd.h>\n#include <sys/prctl.h>\n"
        f'int main(void) {{ prctl(PR_SET_NAME, "{name}"); if (vfork() == 0) {{ sleep(60); _exit(0); }} return 0; }}\n'
    )
    subprocess.run(["gcc", "-w", "-x", "c", "-o", program, "-"], input=code.encode(), check=True)
    processes.append(subprocess.Popen([program], start_new_session=True))
    stuck = processes[0].pid
    children = Path(f"/proc/{stuck}/task/{stuck}/children")
    time.sleep(0.5)
    root.real_proc()
    root.smi(f"cat <<'END'\n{XML}END")
    try:
        facts = root.read()
        assert facts["smi"]["status"] == "ok"
        task = next(task for task in facts["tasks"] if task["pid"] == stuck)
        assert (task["comm"], task["state"]) == (name, "D")
        assert task["age_s"] >= 0.5
        if os.geteuid() == 0:
            assert any("vfork" in line or "clone" in line for line in task["stack"])
        verdict = judge.judge_facts("gpu-1", facts, SiteRules())
        assert (verdict.hung_in_driver, verdict.action.value) == (False, "none")
    finally:
        for child in children.read_text().split():
            os.kill(int(child), 9)


# --- what blocks -----------------------------------------------------------------------------------------------------


def test_hanging_read_costs_only_its_own_collector(root: Root) -> None:
    """A pipe without a writer is the stand-in for a file of a driver that hangs."""
    root.write("sys/module/nvidia/version", "580.65.06\n")
    (root.folder / "proc/driver/nvidia/gpus/0000:3b:00.0").mkdir(parents=True)
    os.mkfifo(root.folder / "proc/driver/nvidia/gpus/0000:3b:00.0/information")
    root.smi(f"cat <<'END'\n{XML}END")
    began = time.monotonic()
    facts = root.read(deadline_s=4)
    assert time.monotonic() - began < 4
    assert facts["driver"]["module"] == "580.65.06"
    assert facts["driver"]["gpus"] == []
    assert facts["smi"]["status"] == "ok"
    assert any(error["what"] == "driver" and "did not finish" in error["error"] for error in facts["errors"])


@pytest.mark.parametrize("sleepers", [0, 230])
def test_a_stack_that_blocks_hides_no_hang(root: Root, sleepers: int) -> None:
    """Before Linux 5.7 that of a thread that executes a file on a frozen server does; a pipe is the stand-in."""
    root.thread(9, "migration/0", "S", kthread=True, ran_s=160)
    for pid in range(20, 21 + sleepers):
        root.thread(pid, "sh", "D", ran_s=100, wchan="rpc_wait_bit_killable")
        (root.folder / f"proc/{pid}/task/{pid}/stack").unlink()
        os.mkfifo(root.folder / f"proc/{pid}/task/{pid}/stack")
    root.smi(f"cat <<'END'\n{XML}END")
    assert root.read(deadline_s=4)["smi"]["status"] == "ok"
    root.thread(300, "nvidia-smi", "D", stack=IN_DRIVER, ran_s=100)
    facts = root.read(deadline_s=4)
    assert (facts["smi"]["status"], facts["smi"]["pid"]) == ("stuck", 300)
    task = next(task for task in facts["tasks"] if task["pid"] == 300)
    assert (len(task["stack"]), task["age_s"]) == (2, 60.0)


# --- devices, driver, services ---------------------------------------------------------------------------------------


def test_devices_driver_and_services(root: Root) -> None:
    device = "sys/bus/pci/devices/0000:3b:00.0"
    for name, text in {
        "vendor": "0x10de\n",
        "device": "0x2330\n",
        "class": "0x030200\n",
        "current_link_speed": "16.0 GT/s PCIe\n",
        "max_link_speed": "32.0 GT/s PCIe\n",
        "current_link_width": "8\n",
        "max_link_width": "16\n",
        "aer_dev_correctable": "RxErr 3\nTOTAL_ERR_COR 3\n",
        "aer_dev_nonfatal": "TOTAL_ERR_NONFATAL 0\n",
        "aer_dev_fatal": "TOTAL_ERR_FATAL 1\n",
    }.items():
        root.write(f"{device}/{name}", text)
    root.write(f"{device}/config", b"\xde\x10\x30\x23" + bytes(60))
    (root.folder / "sys/bus/pci/drivers/nvidia").mkdir(parents=True)
    (root.folder / device / "driver").symlink_to("../../drivers/nvidia")
    gone = "sys/bus/pci/devices/0000:5e:00.0"
    for name, text in {"vendor": "0x10de\n", "device": "0x2330\n", "class": "0x030200\n"}.items():
        root.write(f"{gone}/{name}", text)
    root.write(f"{gone}/config", b"\xff" * 256)
    root.write("sys/bus/pci/devices/0000:00:1f.0/vendor", "0x8086\n")
    root.write("sys/module/nvidia/version", "580.65.06\n")
    root.write(
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n",
    )
    root.write("proc/driver/nvidia/gpus/0000:3b:00.0/information", "Model: \t\t NVIDIA H100\nDevice Minor: \t 0\n")
    root.write("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.575.57.08", "")
    (root.folder / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.575.57.08")
    (root.folder / "run/systemd/system").mkdir(parents=True)
    root.program(
        "systemctl",
        "printf 'Id=nvidia-persistenced.service\\nLoadState=loaded\\nActiveState=failed\\n\\n'\n"
        "printf 'Id=nvidia-fabricmanager.service\\nLoadState=not-found\\nActiveState=inactive\\n'",
    )
    facts = root.read()
    responding, lost = facts["pci"]
    assert responding == {
        "address": "0000:3b:00.0",
        "vendor": "10de",
        "device": "2330",
        "class": "030200",
        "driver": "nvidia",
        "responds": True,
        "link": {"speed": "16.0 GT/s PCIe", "width": 8, "max_speed": "32.0 GT/s PCIe", "max_width": 16},
        "aer": {"correctable": 3, "nonfatal": 0, "fatal": 1},
    }
    assert (lost["address"], lost["responds"], lost["link"], lost["aer"]) == ("0000:5e:00.0", False, None, None)
    assert facts["driver"] == {
        "loaded": True,
        "module": "580.65.06",
        "library": "575.57.08",
        "open": True,
        "gpus": [{"address": "0000:3b:00.0", "minor": 0, "model": "NVIDIA H100"}],
    }
    assert facts["services"] == {"nvidia-persistenced": "failed", "nvidia-fabricmanager": "absent"}
