"""A frozen NFS server is not a hung NVIDIA driver, whatever the program is called that waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpunodes.health.model import Action, State, Verdict
from gpunodes.repair import policy
from gpunodes.repair.policy import Decision, Node, RepairCandidate, RepairLimits

from tests.unit.test_health_classes import FRAME, log, verdict_on
from tests.unit.test_health_facts import judged, task, with_

# Stacks of Linux 6.12, as its hung-task reports and /proc/PID/stack have them: a write, an open, an unmount.
WRITES = [
    "rpc_wait_bit_killable+0x11/0x70 [sunrpc]",
    "__rpc_execute+0x112/0x4f0 [sunrpc]",
    "nfs4_proc_write_rpc_prepare+0x1c/0x30 [nfsv4]",
    "nfs_writepage_locked+0x8a/0x160 [nfs]",
]
OPENS = [
    "rpc_wait_bit_killable+0x11/0x70 [sunrpc]",
    "nfs4_do_open+0x2f1/0xa80 [nfsv4]",
    "nfs4_atomic_open+0xf8/0x110 [nfsv4]",
]
UNMOUNTS = [
    "rpc_wait_bit_killable+0x11/0x70 [sunrpc]",
    "nfs_sync_inode+0x15/0x20 [nfs]",
    "nfs_kill_super+0x2a/0x40 [nfs]",
]
CLOSES = [
    "folio_wait_bit_common+0x13d/0x350",
    "folio_wait_writeback+0x2b/0x90",
    "__filemap_fdatawait_range+0x80/0x110",
    "filemap_write_and_wait_range+0x5e/0xb0",
    "nfs_wb_all+0x27/0xf0 [nfs]",
    "nfs4_file_flush+0x73/0xb0 [nfsv4]",
    "filp_flush+0x37/0x80",
]
# Another task holds the lock of the folder, and waits for the server.
OF_FOLDER = [
    "rwsem_down_write_slowpath+0x2a4/0x640",
    "down_write+0x5b/0x70",
    "open_last_lookups+0x1b8/0x3f0",
    "path_openat+0x8e/0x290",
    "do_filp_open+0xc4/0x170",
]
LOOKS_UP = [
    "rwsem_down_read_slowpath+0x27f/0x500",
    "down_read+0x48/0xb0",
    "lookup_slow+0x1e/0x50",
    "path_lookupat+0x70/0x1a0",
]
BUILT_IN = ["io_schedule+0x46/0x70", "nfs_wait_bit_killable+0x1e/0x90", "nfs4_run_open_task+0x141/0x1b0"]
NAMES = ("nvidia-smi", "nvidia-persiste", "dcgm-exporter", "python3", "kubelet", "umount.nfs4")


def hung(name: str, stack: list[str]) -> str:
    frames = "".join(f" {frame}\n" for frame in ["schedule+0x2c/0x80", *stack])
    return (
        f"INFO: task {name}:4242 blocked for more than 122 seconds.\n"
        "      Tainted: P           OE      6.12.48+deb13-amd64 #1\n"
        '"echo 0 > /proc/sys/kernel/hung_task_timeout_secs" disables this message.\n'
        f"task:{name:<15} state:D stack:0     pid:4242  tgid:4242  ppid:1      flags:0x00004002\n"
        f"Call Trace:\n <TASK>\n{frames} </TASK>\n"
    )


def decision(verdict: Verdict) -> Decision:
    candidate = RepairCandidate("w0", verdict, Node("w0"))
    [found] = policy.decide([candidate], [Node(f"w{index}") for index in range(20)], RepairLimits(), 1_800_000_000.0)
    return found.decision


def asleep(name: str, stack: list[str], **changes: Any) -> dict[str, Any]:
    return {**task(name, stack[0]), "stack": stack, "pid": 4242, "age_s": 300.0, **changes}


@pytest.mark.parametrize(
    "stack",
    [WRITES, OPENS, UNMOUNTS, CLOSES, OF_FOLDER, LOOKS_UP, BUILT_IN],
    ids=["write", "open", "unmount", "close", "lock of a folder", "lock of a lookup", "built in"],
)
@pytest.mark.parametrize("name", NAMES)
def test_a_hung_task_that_waits_for_nfs_is_not_in_the_driver(tmp_path: Path, name: str, stack: list[str]) -> None:
    found = verdict_on(tmp_path, log("nfs: server 10.0.0.5 not responding, still trying\n" + hung(name, stack)))
    assert found.findings == ()
    assert not found.hung_in_driver
    assert decision(found) is Decision.NOTHING


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("status", ["ok", "stuck", "timeout"])
def test_a_thread_that_waits_for_nfs_is_not_in_the_driver(name: str, status: str) -> None:
    """nvidia-smi in state D counts as stuck in the driver, except when its stack says that it waits for NFS."""
    smi = {"status": status, "pid": 4242, "task_state": "D", "still_s": 20.0, "xml": None} if status != "ok" else {}
    # A stuck nvidia-smi is the same thread, by whatever name.
    facts = with_(tasks=[asleep(name, WRITES)], smi=smi, log={"text": log(hung(name, WRITES)).decode()})
    found = judged(facts)
    assert found.state is not State.HUNG
    assert found.action is Action.NONE
    assert decision(found) in {Decision.NOTHING, Decision.REFUSE}
    if status != "ok":
        assert any("waits for an NFS server" in each.message for each in found.findings)


def test_another_nvidia_smi_in_the_driver_is_hung_beside_a_hang_of_nfs() -> None:
    smi = {"status": "stuck", "pid": 77, "task_state": "D", "still_s": 20.0, "xml": None}
    found = judged(with_(tasks=[asleep("nvidia-smi", WRITES), asleep("nvidia-smi", [FRAME], pid=77)], smi=smi))
    assert (found.state, found.action) == (State.HUNG, Action.REBOOT)
    # Without a stack nobody knows what it waits for: as before.
    found = judged(with_(tasks=[asleep("nvidia-smi", WRITES)], smi=smi))
    assert (found.state, found.action) == (State.HUNG, Action.REBOOT)


def test_a_program_that_is_in_the_driver_on_its_way_to_nfs_is_hung_in_the_driver(tmp_path: Path) -> None:
    """GPUDirect reads files by the driver: a frame of it is in the stack, too."""
    found = verdict_on(tmp_path, log(hung("python3", [*WRITES, FRAME])))
    assert found.hung_in_driver


def test_a_short_wait_in_the_driver_is_no_hang_only_because_nvidia_smi_waits_for_nfs() -> None:
    smi = {"status": "stuck", "pid": 4242, "task_state": "D", "still_s": 20.0, "xml": None}
    facts = with_(tasks=[asleep("nvidia-smi", WRITES), asleep("python3", [FRAME], pid=9, age_s=1.0)], smi=smi)
    found = judged(facts)
    assert found.state is not State.HUNG
    assert found.action is Action.NONE


# cudaHostRegister of a file on NFS that is mapped: its server is frozen.
NEEDS_A_PAGE = ["folio_wait_bit_common+0x13d/0x350", "filemap_fault+0x5c6/0x9e0", "__do_fault+0x31/0x150"]
NEEDS_A_PAGE += ["asm_exc_page_fault+0x22/0x30", "os_copy_from_user+0x1/0x2 [nvidia]", FRAME]
OF_UNIFIED_MEMORY = ["down_read+0x48/0xb0", "uvm_page_fault+0x6c/0x100 [nvidia_uvm]", "handle_mm_fault+0x1/0x2"]


@pytest.mark.parametrize(("stack", "hangs"), [(NEEDS_A_PAGE, False), (OF_UNIFIED_MEMORY, True)])
@pytest.mark.parametrize("name", ["python3", "nvidia-smi"])
def test_a_page_that_the_driver_needs_is_no_hang_of_the_driver(
    name: str, stack: list[str], hangs: bool, tmp_path: Path
) -> None:
    owner = "INFO: task cat:7 is blocked on a mutex likely owned by task {}:4242.\n"
    report = hung(name, ["? exc_page_fault+0x1/0x2", *stack])  # old data on the stack
    for text in (report, owner.format(name) + report.split("\n", 1)[1]):
        found = verdict_on(tmp_path, log(text))
        assert (found.hung_in_driver, found.action is Action.REBOOT) == (hangs, hangs)
    smi = {"status": "stuck", "pid": 4242, "task_state": "D", "still_s": 20.0, "xml": None, "stack": stack}
    for facts in (with_(tasks=[asleep(name, stack)]), with_(smi=smi)):
        assert judged(facts).hung_in_driver is hangs


def test_a_crash_within_the_driver_leaves_its_locks_whatever_it_needed(tmp_path: Path) -> None:
    begin = (
        "Oops: 0002 [#1] PREEMPT SMP NOPTI\nCPU: 3 PID: 4242 Comm: python3 Tainted: P           OE      6.12.48 #1\n"
    )
    text = begin + "Call Trace:\n" + "".join(f" {frame}\n" for frame in NEEDS_A_PAGE)
    assert verdict_on(tmp_path, log(text)).action is Action.REBOOT


@pytest.mark.parametrize("stack", [CLOSES, OF_FOLDER, LOOKS_UP], ids=["close", "lock of a folder", "lock of a lookup"])
def test_an_nvidia_smi_that_waits_for_files_is_not_repaired(stack: list[str]) -> None:
    smi = {"status": "stuck", "pid": 4242, "task_state": "D", "still_s": 20.0, "xml": None}
    found = judged(with_(tasks=[asleep("nvidia-smi", stack)], smi=smi))
    assert found.state is not State.HUNG
    assert found.action is Action.NONE


def test_an_xid_beside_a_hang_of_nfs_is_judged_alone(tmp_path: Path) -> None:
    xid = "NVRM: Xid (PCI:0000:3b:00): 79, pid=77, name=python3, GPU has fallen off the bus.\n"
    alone = verdict_on(tmp_path, log(xid))
    both = verdict_on(tmp_path, log(hung("nvidia-smi", WRITES) + xid + hung("kubelet", UNMOUNTS)))
    assert (both.state, both.action, both.hung_in_driver) == (alone.state, alone.action, False)
    assert {each.rule for each in both.findings} == {each.rule for each in alone.findings}


def test_a_driver_that_hangs_beside_nfs_is_hung(tmp_path: Path) -> None:
    found = verdict_on(tmp_path, log(hung("python3", WRITES) + hung("nvidia-smi", [FRAME])))
    assert found.hung_in_driver
    # The kernel gave no stack: the name decides, as before.
    assert verdict_on(tmp_path, log("INFO: task nvidia-smi:78 blocked for more than 122 seconds.\n")).hung_in_driver
