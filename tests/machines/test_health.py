"""Faults made in real kernels: each found by the sweep and by the role, told from what only looks like it.

Two machines, in no cluster, get their faults in rounds, one beside the other. What the kernel has logged stays true
until the next boot, so each machine goes from mild to worse: a live verdict is the worst of all its faults so far, and
the kernel's log of one round, saved, has the verdict of that fault alone.

``GPUNODES_CAPTURE=tests/unit/fixtures/captured`` saves each fault's log and facts with their verdicts.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gpunodes.health.model import Action, State

from .conftest import Kind, Operator

LAB = Kind("debian13", workers=0, gpu_workers=2)
CHECKOUT = Path(__file__).parents[2]
SEEN_S = 200
"""Seconds in which the kernel must have said it."""
LARGE = 64 << 10
"""Bytes from which a saved log is packed."""

# The kernel looks for hung tasks every 5 s and calls them so after 20, however often; it calls a processor locked up
# after 10 s.
# A console on an emulated serial line would take 3 ms for each line of a storm.
READY = """
set -e
sysctl -qw kernel.hung_task_timeout_secs=20 kernel.hung_task_check_interval_secs=5 kernel.hung_task_warnings=-1
sysctl -qw kernel.watchdog_thresh=5 kernel.printk_devkmsg=on
dmesg --console-level alert
: >/run/ticks
systemd-run --quiet --unit=ticker sh -c 'while sleep 1; do echo >>/run/ticks; done'
"""
# Anybody who may write to /dev/kmsg can say what the driver says; so much of it that the ring buffer, of 4096 lines at
# most, has nothing else, and what the driver did say is in the journal only.
FLOOD = """
set -e
lie='Xid (PCI:0001:10:00): 79, pid=1, name=x, GPU has fallen off the bus.'
for number in $(seq 2500); do
  echo "<3>NVRM: $lie"
  echo "<3>INFO: task nvidia-smi:$number blocked for more than 120 seconds."
done >/dev/kmsg
echo '<3>the last of many lies' >/dev/kmsg
! dmesg | grep -q 'Linux version'
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to a machine, and what its log and its verdict say of that alone."""

    name: str
    machine: str
    message: str
    """Words that the kernel's log has before anybody is asked."""
    faults: Sequence[str] = ()
    """`gpunodes lab fault MACHINE ...`; all but the first when it was seen to work."""
    script: str = ""
    """Or a shell script, as root."""
    state: State = State.HEALTHY
    action: Action = Action.NONE
    xids: tuple[int, ...] = ()
    rules: frozenset[str] = frozenset()
    seen: int = 2
    """How many GPUs are left to see."""


HEALTHY = [Fault("well", name, "NVRM: loading") for name in ("gpu-1", "gpu-2")]
ROUNDS = (
    (
        Fault("other-hang", "gpu-1", "INFO: task standin_hang:", ["other-hang"]),
        Fault(
            "xid-13",
            "gpu-2",
            "): 13, pid",
            ["xid 13"],
            state=State.DEGRADED,
            action=Action.RESTART_APP,
            xids=(13,),
            rules=frozenset({"xid"}),
        ),
    ),
    (
        Fault("lockup", "gpu-1", "soft lockup - CPU", ["lockup --seconds 16"]),
        Fault("full-ring", "gpu-2", "the last of many lies", script=FLOOD),
    ),
    (
        Fault(
            "xid-119-storm",
            "gpu-1",
            "): 119, pid",
            ["xid 119 --times 3000"],
            state=State.DEGRADED,
            action=Action.RESET_GPU,
            xids=(119,),
            rules=frozenset({"xid"}),
        ),
        Fault(
            "ecc",
            "gpu-2",
            "): 63, pid",
            ["ecc"],
            state=State.DEGRADED,
            action=Action.RESET_GPU,
            xids=(48, 63),
            rules=frozenset({"xid", "memory"}),
        ),
    ),
    (
        Fault(
            "hang",
            "gpu-1",
            "Workqueue: events os_execute_work_item [nvidia]",
            ["hang"],
            state=State.HUNG,
            action=Action.REBOOT,
            rules=frozenset({"hung-in-driver"}),
        ),
        Fault(
            "gone",
            "gpu-2",
            "GPU 0001:11:00.0: GPU has fallen off the bus",
            ["lost --gpu 1", "gone --gpu 1"],
            state=State.SICK,
            action=Action.REBOOT,
            xids=(79,),
            rules=frozenset({"fallen-off-bus", "gpus-missing"}),
            seen=1,
        ),
    ),
)
SMI_HANG = Fault(
    "smi-hang",
    "gpu-2",
    "INFO: task nvidia-smi:",
    ["smi-hang"],
    state=State.HUNG,
    action=Action.REBOOT,
    rules=frozenset({"hung-in-driver", "smi-stuck"}),
    seen=1,
)

_so_far: dict[str, list[Fault]] = {"gpu-1": [], "gpu-2": []}
_lines: dict[str, int] = dict.fromkeys(_so_far, 0)
"""How long the kernel's log of each machine was at the end of the round before."""


@dataclass(frozen=True, slots=True)
class Look:
    """What is on a machine."""

    ticks: int
    """How often its other work has come around."""
    processes: Sequence[str]
    """What a probe is or starts."""
    log: Sequence[str]
    """The kernel's log of this boot in the journal, others' lines in it included."""


@pytest.fixture(scope="module", autouse=True)
def machines(operator: Operator) -> None:
    operator.gpunodes("gpu", "install", "gpu-*", "--driver", "580", limit_s=3600)
    for machine in _so_far:
        operator.ssh(machine, READY)


def test_machines_that_are_well(operator: Operator) -> None:
    check(operator, HEALTHY)


@pytest.mark.parametrize("faults", ROUNDS, ids=lambda faults: "-and-".join(fault.name for fault in faults))
def test_faults(operator: Operator, faults: Sequence[Fault]) -> None:
    side_by_side(lambda fault: make(operator, fault), faults)
    check(operator, faults)
    if faults[0].name == "other-hang":
        # Else the log of all that comes later would be full of it.
        make(operator, Fault("clear", "gpu-1", "", ["clear"]))


def test_an_nvidia_smi_that_cannot_be_killed(operator: Operator) -> None:
    """The first sweep starts it, and tells; nobody starts a second one."""
    make(operator, SMI_HANG)
    found = sweep(operator)["gpu-2"]
    assert (found["state"], found["action"], found["hung_in_driver"]) == ("hung", "reboot", True)
    assert "smi-stuck" in rules(found)
    (stuck,) = look(operator, "gpu-2").processes
    assert "nvidia-smi" in stuck
    check(operator, [SMI_HANG], [stuck])


def side_by_side(do: Callable[[Fault], Any], faults: Sequence[Fault]) -> list[Any]:
    """The same on all machines at once."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(do, faults))


def make(operator: Operator, fault: Fault) -> None:
    """Do it, step by step, each when the one before is seen to work."""
    if fault.script:
        operator.ssh(fault.machine, fault.script)
    for step, words in enumerate(fault.faults):
        if step:
            wait_for(operator, fault)
        done = operator.lab("fault", fault.machine, *words.split())
        assert done.returncode == 0, done.stderr


def wait_for(operator: Operator, fault: Fault) -> int:
    """Wait until the kernel has said it; returns how often the machine's other work has come around."""
    message = f"until dmesg | grep -qF {shlex.quote(fault.message)}; do sleep 1; done"
    return int(operator.ssh(fault.machine, f"timeout {SEEN_S} sh -c {shlex.quote(message)} && wc -l </run/ticks"))


def check(operator: Operator, faults: Sequence[Fault], stay: Sequence[str] = ()) -> None:
    """The verdicts on machines that have these faults now; processes that ``stay`` are all that is left of a probe."""
    ticks = side_by_side(lambda fault: wait_for(operator, fault), faults)
    verdicts = sweep(operator)
    message = role(operator)
    found = side_by_side(lambda fault: look(operator, fault.machine), faults)
    for fault, before, after in zip(faults, ticks, found, strict=True):
        print(f"{fault.name} of {fault.machine}")
        live = verdicts[fault.machine]
        check_live(fault, live, message)
        if fault.name == "xid-119-storm":
            (flood,) = (each for each in live["findings"] if "): 119, " in "".join(each["evidence"]))
            assert flood["count"] > 100
        assert after.ticks > before
        assert after.processes == list(stay)
        # The log of this fault alone, as somebody saves it.
        log = operator.folder / "kernel.log"
        log.write_text("".join(f"{line}\n" for line in after.log[_lines[fault.machine] :]))
        _lines[fault.machine] = len(after.log)
        check_saved(fault, operator.document("health", "--from", str(log), code=None)["machines"][0])
        if folder := os.environ.get("GPUNODES_CAPTURE"):
            capture(operator, Path(folder) / fault.name, fault.machine, log, live)


def check_live(fault: Fault, live: dict[str, Any], message: str) -> None:
    """The verdict by the sweep and by the role: what the kernel has said stays true, so the worst so far counts."""
    so_far = _so_far[fault.machine]
    so_far.append(fault)
    state = max((each.state for each in so_far), key=lambda each: each.rank)
    action = max((each.action for each in so_far), key=lambda each: each.rank)
    assert (live["state"], live["action"]) == (state.value, action.value), live
    assert live["hung_in_driver"] == (state is State.HUNG)
    assert live["xids"] == sorted({xid for each in so_far for xid in each.xids})
    assert live["gpus"] == {"expected": 2, "seen": fault.seen}
    assert fault.rules <= rules(live), live
    asked = "" if action is Action.NONE else f", {action.value.replace('_', ' ')}"
    assert re.search(rf'"msg": "{fault.machine}: {state.value}{asked}[;"]', message), message


def check_saved(fault: Fault, saved: dict[str, Any]) -> None:
    assert (saved["state"], saved["action"]) == (fault.state.value, fault.action.value), saved
    assert saved["hung_in_driver"] == (fault.state is State.HUNG)
    assert saved["xids"] == list(fault.xids)


def sweep(operator: Operator) -> dict[str, dict[str, Any]]:
    """The verdict on each GPU machine, by `gpunodes health`."""
    document = operator.document("health", "gpu-*", code=None)
    return {machine["name"]: machine for machine in document["machines"]}


def rules(machine: dict[str, Any]) -> set[str]:
    return {finding["rule"] for finding in machine["findings"]}


def role(operator: Operator) -> str:
    """What plain Ansible says of them."""
    message = ansible(operator, "ansible-playbook", str(CHECKOUT / "playbooks" / "health.yml"), "-l", "gpu-*")
    assert message.count("changed=0") == len(_so_far), message
    return message


def ansible(operator: Operator, program: str, *words: str) -> str:
    path = shutil.which(program)
    assert path
    done = subprocess.run(
        [path, "-i", str(operator.folder / "inventory"), *words],
        cwd=CHECKOUT,
        env={**os.environ, "ANSIBLE_HOST_KEY_CHECKING": "False"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def look(operator: Operator, machine: str) -> Look:
    script = (
        "wc -l </run/ticks; ps -C python3,nvidia-smi,journalctl -o pid=,stat=,args=; echo --; "
        "journalctl --sync; journalctl -k -b -q --no-pager -o short-monotonic"
    )
    lines = operator.ssh(machine, script).splitlines()
    end = lines.index("--")
    return Look(int(lines[0]), lines[1:end], lines[end + 1 :])


def capture(operator: Operator, folder: Path, machine: str, log: Path, live: dict[str, Any]) -> None:
    """Save what a machine said, and the verdicts on it; tests/unit/fixtures/captured/README.md says in which files."""
    facts: dict[str, Any] = json.loads(
        ansible(operator, "ansible", machine, "--become", "-m", "gpu_probe").partition(" => ")[2]
    )["gpu_probe"]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text = log.read_bytes()
    if len(text) < LARGE:
        (folder / "kernel.log").write_bytes(text)
    else:
        (folder / "kernel.log.gz").write_bytes(gzip.compress(text, mtime=0))
    if xml := facts["smi"]["xml"]:
        (folder / "nvidia-smi.xml").write_text(xml)
    files = [word for path in sorted(folder.iterdir()) for word in ("--from", str(path))]
    saved = operator.document("health", *files, code=None)["machines"][0]
    (folder / "probe.json.gz").write_bytes(gzip.compress(json.dumps(facts, indent=1).encode(), mtime=0))
    (folder / "verdict.json").write_text(json.dumps({"live": live, "files": saved}, indent=2) + "\n")
