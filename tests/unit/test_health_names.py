"""A name proves nothing: what a process calls itself, or a file, starts no repair of a live machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from gpunodes.health.model import Action, State, Verdict

from tests.unit.test_health_classes import FRAME, log, verdict_on
from tests.unit.test_health_facts import judged, with_
from tests.unit.test_health_nfs import WRITES, asleep

# Of a program that sleeps in a file system of its own (FUSE), as the kernel shows the whole stack.
OF_PROGRAM = [
    "request_wait_answer+0x13e/0x220 [fuse]",
    "fuse_simple_request+0x17e/0x2c0 [fuse]",
    "do_syscall_64+0x82/0x190",
    "entry_SYSCALL_64_after_hwframe+0x76/0x7e",
]
OF_KERNEL_THREAD = ["__down_common+0x1b/0x20", "kthread+0xe8/0x120", "ret_from_fork+0x34/0x50"]
NAMES = ("nvidia-smi", "nvidia-persiste", "nv-fabricmanage", "nv_queue", "irq/162-nvidia", "UVM GPU1 BH")


def frames(stack: list[str]) -> str:
    return "".join(f" {frame}\n" for frame in ["schedule+0x2c/0x80", *stack]) if stack else ""


def hung(name: str, stack: list[str]) -> str:
    return f"INFO: task {name}:4242 blocked for more than 122 seconds.\n{frames(stack)}"


def owner(name: str, stack: list[str]) -> str:
    first = "INFO: task cat:7 blocked for more than 122 seconds.\n" + frames(OF_PROGRAM)
    return f"{first}INFO: task cat:7 is blocked on a mutex likely owned by task {name}:4242.\n{frames(stack)}"


def unfrozen(name: str, stack: list[str]) -> str:
    begin = "Freezing user space processes failed after 20.008 seconds (1 tasks refusing to freeze, wq_busy=0):\n"
    return f"{begin}task:{name:<15} state:D stack:0     pid:4242  tgid:4242\n{frames(stack)}OOM killer enabled.\n"


def lockup(name: str, stack: list[str]) -> str:
    return f"watchdog: BUG: soft lockup - CPU#17 stuck for 26s! [{name}:4242]\n{frames(stack)}"


def oops(name: str, stack: list[str]) -> str:
    begin = (
        f"Oops: 0002 [#1] PREEMPT SMP NOPTI\nCPU: 3 PID: 4242 Comm: {name} Tainted: P           OE      6.12.48 #1\n"
    )
    return f"{begin}Call Trace:\n{frames(stack)}---[ end trace 0000000000000000 ]---\n"


def live(text: str, **parts: Any) -> Verdict:
    """The verdict on a live machine: threads that the kernel reported as hung still sleep, but for other ``tasks``."""
    reported = r":(\d+) (?:blocked (?:in I/O wait )?|can't die )for more than|state:D [^\n]* pid:(\d+)"
    still = [asleep("x", [""], pid=int("".join(pids))) for pids in re.findall(reported, text)]
    return judged(with_(**{"log": {"text": log(text).decode()}, "tasks": still, "uptime_s": 1060.0, **parts}))


REPORTS = pytest.mark.parametrize("report", [hung, owner, unfrozen, lockup, oops])
NAMED = pytest.mark.parametrize("name", NAMES)


@REPORTS
@NAMED
def test_a_stack_elsewhere_is_not_in_the_driver_whatever_the_name(report: Any, name: str, tmp_path: Path) -> None:
    for found in (live(report(name, OF_PROGRAM)), verdict_on(tmp_path, log(report(name, OF_PROGRAM)))):
        assert (found.action, found.hung_in_driver, found.findings) == (Action.NONE, False, ())


@REPORTS
@pytest.mark.parametrize("stack", [[*OF_PROGRAM, FRAME], OF_KERNEL_THREAD], ids=["frame", "thread of the kernel"])
def test_the_driver_in_a_stack_is_proof(report: Any, stack: list[str], tmp_path: Path) -> None:
    text = report("nv_queue", stack)
    for found in (live(text), verdict_on(tmp_path, log(text))):
        assert found.action is Action.REBOOT


@REPORTS
@NAMED
def test_without_a_stack_a_name_is_watched_on_a_live_machine(report: Any, name: str, tmp_path: Path) -> None:
    """Its kernel writes the stacks. A saved log may lack them, and nothing is repaired for it."""
    found = live(report(name, []))
    assert (found.action, found.state, found.hung_in_driver) == (Action.NONE, State.DEGRADED, False)
    assert f"{name}:4242" in found.findings[0].message
    assert verdict_on(tmp_path, log(report(name, []))).action is Action.REBOOT


def test_the_stack_of_another_thread_is_not_that_of_the_task() -> None:
    """What else the kernel writes, and the name of a file, after the stack or instead of it."""
    crashed = "pod[7]: segfault at 0 ip 0000 sp 0000 error 6 in kthread+0x1/0x2[1132,5626+1000]\n"
    assert live(hung("nvidia-smi", [*OF_PROGRAM, "", *OF_KERNEL_THREAD])).findings == ()
    assert live(hung("nvidia-smi", []) + crashed).action is Action.NONE


def test_the_name_of_a_group_is_no_end_of_a_stack() -> None:
    line = "cgroup: fork rejected by pids controller in /" + "x" * 400 + "/ kthread+0x1/0x2\n"
    assert live(hung("nvidia-smi", []) + line).action is Action.NONE


def test_a_thread_of_the_kernel_with_another_name_is_not_the_drivers() -> None:
    assert live(hung("kworker/2:3", OF_KERNEL_THREAD)).findings == ()


@pytest.mark.parametrize(
    "line",
    [
        "pod[7]: segfault at 0 ip 000056264eafb132 sp 00007fffd0f082e0 error 6 in x+0x1/0x2 [nvidia][1132,5626+1000]",
        "pod[7]: segfault at 0 ip 000056264eafb132 sp 00007fffd0f082e0 error 6 in x\\x0a x+0x1/0x2 [nvidia][1,56+10]",
        "traps: pod[7] trap divide error ip:401106 sp:7ffc error:0 in Workqueue: events x [nvidia][401000+1000]",
        # Longer than what is read before a frame.
        "pod[7]: segfault at 0 ip 0000 sp 0000 error 6 in " + "\\x01" * 110 + " Workqueue: e f [nvidia][401000+1000]",
        "cgroup: fork rejected by pids controller in /" + "x" * 400 + "/f+0x1/0x2 [nvidia]",
    ],
)
def test_the_name_of_a_file_is_no_frame(line: str, tmp_path: Path) -> None:
    """The kernel writes the name of a program that crashed as it is."""
    text = hung("mmfsd", OF_PROGRAM) + line + "\n"
    for found in (live(text), verdict_on(tmp_path, log(text))):
        assert (found.action, found.hung_in_driver) == (Action.NONE, False)


@pytest.mark.parametrize(
    "line",
    [
        " os_acquire_mutex+0x3a/0x50 [nvidia]",
        " ? os_acquire_mutex+0x3a/0x50 [nvidia]",
        " [<ffffffffc0a1b2c3>] ? os_acquire_mutex+0x3a/0x50 [nvidia]",
        "RIP: 0010:os_acquire_mutex+0x3a/0x50 [nvidia]",
        "RIP: 0010:[<ffffffffc0a1b2c3>]  [<ffffffffc0a1b2c3>] os_acquire_mutex+0x3a/0x50 [nvidia]",
        "pc : os_acquire_mutex+0x3a/0x50 [nvidia]",
        "[  T421]  os_acquire_mutex+0x3a/0x50 [nvidia 0f1e2d3c4b5a]",
        "Workqueue: events os_execute_work_item [nvidia]",
    ],
)
def test_frames_as_kernels_write_them(line: str) -> None:
    assert live("INFO: task cat:7 blocked for more than 122 seconds.\n" + line + "\n").hung_in_driver


@pytest.mark.parametrize("form", ["blocked for", "blocked in I/O wait for", "can't die for", "refusing to freeze"])
def test_a_hang_that_has_passed_is_watched(form: str, tmp_path: Path) -> None:
    """The kernel's report stays in the log, for days; the driver went on, as it does after a slow start of its GPUs."""
    stack = [*OF_PROGRAM, FRAME]
    text = hung("nv_queue", stack).replace("blocked for", form) if "for" in form else unfrozen("nv_queue", stack)
    assert live(text).hung_in_driver
    passed = live(text, tasks=[asleep("python3", ["pipe_read+0x1/0x2"], pid=7)])
    assert (passed.action, passed.state, passed.hung_in_driver) == (Action.NONE, State.DEGRADED, False)
    assert "nv_queue:4242" in passed.findings[0].message
    # The probe did not see all threads.
    for what in ("tasks", "threads", "privilege"):
        assert live(text, tasks=[], errors=[{"what": what, "error": "x"}]).hung_in_driver
    assert verdict_on(tmp_path, log(text)).hung_in_driver


def test_the_owner_of_a_lock_hangs_as_long_as_others_wait_for_it() -> None:
    """It may run. The kernel wakes those that wait when it releases the lock."""
    text = owner("nv_queue", [*OF_PROGRAM, FRAME])
    waits, owns = asleep("cat", [""], pid=7), asleep("nv_queue", [""], pid=4242)
    assert live(text, tasks=[waits]).hung_in_driver
    assert live(text, tasks=[owns]).hung_in_driver
    passed = live(text, tasks=[asleep("nv_queue", [""], pid=9)])
    assert (passed.action, passed.state, passed.hung_in_driver) == (Action.NONE, State.DEGRADED, False)
    assert "went on or ended since: nv_queue:4242" in passed.findings[0].message
    # More wait than the evidence names, or one whose number the kernel did not write.
    several = "".join(text.replace("cat:7", f"cat:{pid}") for pid in (7, 8, 8, 8, 11))
    assert live(several, tasks=[asleep("cat", [""], pid=11)]).hung_in_driver
    assert live(text.replace("cat:7 is", "cat is"), tasks=[]).hung_in_driver


@pytest.mark.parametrize("header", ["[   60.000001] kernel: ", "[   60.000001] gpu-1 kernel: [   60.000001] "])
def test_frames_behind_the_headers_of_journalctl(header: str, tmp_path: Path) -> None:
    """With --no-hostname, and of a kernel that writes its times."""
    text = "".join(f"{header}{line}\n" for line in hung("python3", [*OF_KERNEL_THREAD, FRAME]).splitlines())
    found = verdict_on(tmp_path, text.encode())
    assert (found.action, found.hung_in_driver) == (Action.REBOOT, True)


DAYS_S = 86400.0


@pytest.mark.parametrize(
    ("reported_s", "uptime_s", "action"),
    [
        (1000.0, 1290.0, Action.REBOOT),
        (1000.0, 1310.0, Action.NONE),
        (1000.0, 90 * DAYS_S, Action.NONE),
        # The clock of the log is not corrected: after months it may be minutes behind.
        (90 * DAYS_S - 600, 90 * DAYS_S, Action.REBOOT),
        (1000.0, 0.0, Action.REBOOT),
    ],
    ids=["just reported", "passed", "long passed", "the log's clock", "an unknown uptime"],
)
def test_a_soft_lockup_that_has_passed_is_watched(
    reported_s: float, uptime_s: float, action: Action, tmp_path: Path
) -> None:
    """One of 20 s stays in the log until the next boot. The kernel reports one that continues again."""
    lines = lockup("python3", [*OF_PROGRAM, FRAME]).splitlines()
    text = "".join(f"[{reported_s:.6f}] {line}\n" for line in lines)
    found = judged(with_(log={"text": text}, uptime_s=uptime_s))
    state = State.SICK if action is Action.REBOOT else State.DEGRADED
    assert [each.rule for each in found.findings] == ["soft-lockup-in-driver"]
    assert (found.action, found.state) == (action, state)
    assert verdict_on(tmp_path, text.encode()).action is Action.REBOOT


OWN: dict[str, Any] = {"status": "timeout", "pid": 4242, "task_state": "D", "still_s": 20.0, "xml": None}
CUT = {"what": "threads", "error": "2300 threads are in uninterruptible sleep"}


@pytest.mark.parametrize("status", ["stuck", "timeout"])
@pytest.mark.parametrize(
    ("stack", "errors", "state", "says"),
    [
        ([FRAME], [], State.HUNG, "does not start a second one"),
        ([FRAME], [CUT], State.HUNG, "does not start a second one"),
        (WRITES, [CUT], State.DEGRADED, "waits for an NFS server or a folder"),
        (["wait_for_vfork_done+0x41/0x60", "kernel_clone+0x9c/0x2f0"], [], State.DEGRADED, "waits for something else"),
        ([], [], State.HUNG, "does not start a second one"),
        ([], [CUT], State.DEGRADED, "waits for something unknown"),
    ],
    ids=["driver", "driver, cut", "NFS, cut", "elsewhere", "no stack", "no stack, cut"],
)
def test_an_nvidia_smi_that_hangs_is_judged_by_its_stack(
    status: str, stack: list[str], errors: list[Any], state: State, says: str
) -> None:
    """Also if the list of threads, cut at 200, does not have it."""
    others = [asleep("python3", WRITES, pid=pid) for pid in range(200)]
    found = judged(with_(smi={**OWN, "status": status, "stack": stack}, tasks=others if errors else [], errors=errors))
    assert (found.state, found.hung_in_driver) == (state, state is State.HUNG)
    assert found.action is (Action.REBOOT if state is State.HUNG else Action.NONE)
    assert says in found.findings[0].message


@pytest.mark.parametrize(
    ("wchans", "what", "hangs"),
    [
        (["rwsem_down_write_slowpath", "__down_common"], "threads", True),
        (["rwsem_down_write_slowpath", "rpc_wait_bit_killable"], "threads", False),
        (["folio_wait_bit_common"], "threads", False),
        (["", "0"], "threads", False),
        # The collector of the threads did not end: that says nothing of their number.
        ([""], "tasks", True),
    ],
)
def test_where_the_kernel_shows_no_stacks_the_functions_of_many_threads_tell(
    wchans: list[str], what: str, hangs: bool
) -> None:
    others = [{**asleep("python3", [""], pid=pid, wchan=wchan), "stack": []} for pid, wchan in enumerate(wchans)]
    found = judged(with_(smi={**OWN, "stack": []}, tasks=others, errors=[{**CUT, "what": what}]))
    assert (found.hung_in_driver, found.action is Action.REBOOT) == (hangs, hangs)


def test_a_short_wait_in_the_driver_is_no_hang_because_nvidia_smi_waits_elsewhere() -> None:
    short = asleep("python3", [FRAME], pid=9, age_s=1.0)
    assert judged(with_(smi={**OWN, "stack": [FRAME]}, tasks=[short])).hung_in_driver
    assert not judged(with_(smi={**OWN, "stack": OF_PROGRAM}, tasks=[short])).hung_in_driver
    assert not judged(with_(smi={**OWN, "stack": []}, tasks=[short], errors=[CUT])).hung_in_driver


MISMATCH = (
    "NVRM: API mismatch: the client '{}' (pid 7) has the version 999.1, but\n"
    "NVRM: this kernel module has the version {}.\n"
)


@pytest.mark.parametrize("name", ["nvidia-smi", "pod"])
def test_the_version_that_a_process_reports_is_no_mismatch_of_a_machine_whose_libraries_fit(name: str) -> None:
    text = MISMATCH.format(name, "580.65.06")
    assert live(text).action is Action.NONE
    broken = {"status": "failed", "xml": None, "message": "NVIDIA-SMI has failed"}
    assert live(text, smi=broken).action is Action.NONE
    assert live(text, smi=broken, driver={"library": None}).action is Action.REBOOT


@pytest.mark.parametrize("name", ["python3", "a to 0x2", ", to 0x2,", "x, y to 0x2, z"])
def test_the_name_of_a_process_is_no_recovery_action(name: str) -> None:
    for begin in (f"pid=7, name={name}", f"pid='<unknown>', name={name}"):
        text = f"NVRM: Xid (PCI:0000:3b:00): 154, {begin}, GPU recovery action changed from 0x0 (None) to 0x1 (Reset)\n"
        assert live(text).action is Action.RESET_GPU
