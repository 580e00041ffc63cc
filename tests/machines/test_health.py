"""Faults in real kernels: each is found by `gpunodes health` and by the role, and distinguished from similar events.

Two machines outside of a cluster get faults in rounds, in parallel. Log lines stay valid until the next boot, so the
faults of a machine get worse with each round: its live verdict is that of its worst fault so far, and the saved log of
one round has the verdict of that fault only.

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

from .conftest import FORGOTTEN, LabSpec, Operator

LAB = LabSpec("debian13", workers=0, gpu_workers=2)
CHECKOUT = Path(__file__).parents[2]
SEEN_S = 200
"""Seconds until the kernel must have logged a fault."""
LARGE = 64 << 10
"""Size in bytes from which a saved log is compressed."""

# The kernel checks for hung tasks every 5 s, reports them after 20 s without a limit on their number, and reports a
# soft lockup after 10 s.
# A console on an emulated serial line would take 3 ms for each line of a log flood.
READY = """
set -e
sysctl -qw kernel.hung_task_timeout_secs=20 kernel.hung_task_check_interval_secs=5 kernel.hung_task_warnings=-1
sysctl -qw kernel.watchdog_thresh=5 kernel.printk_devkmsg=on
dmesg --console-level alert
: >/run/ticks
systemd-run --quiet --unit=ticker sh -c 'while sleep 1; do echo >>/run/ticks; done'
"""
# Any program that can write to /dev/kmsg can forge the driver's messages: here so many that the ring buffer, of at most
# 4096 lines, has nothing else, and the driver's own messages are in the journal only.
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
    """A fault of a machine, and the expected log line and verdict for this fault only."""

    name: str
    machine: str
    message: str
    """Text that the kernel's log must contain before the scan."""
    faults: Sequence[str] = ()
    """Arguments of `gpunodes lab fault MACHINE`; each one follows when the previous fault is in the log."""
    script: str = ""
    """Or a shell script that runs as root."""
    state: State = State.HEALTHY
    action: Action = Action.NONE
    xids: tuple[int, ...] = ()
    rules: frozenset[str] = frozenset()
    seen: int = 2
    """How many GPUs are still visible."""


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
"""The number of lines in each machine's kernel log at the end of the previous round."""


@dataclass(frozen=True, slots=True)
class MachineState:
    """Processes and kernel log of a machine."""

    ticks: int
    """How many times the ticker, a background process, has run."""
    processes: Sequence[str]
    """Processes of a probe and its children."""
    log: Sequence[str]
    """The kernel log of this boot in the journal, including lines that other programs wrote to it."""


@pytest.fixture(scope="module", autouse=True)
def machines(operator: Operator) -> None:
    operator.gpunodes("gpu", "install", "gpu-*", "--driver", "580", limit_s=3600)
    for machine in _so_far:
        operator.ssh(machine, READY)


def test_healthy_machines(operator: Operator) -> None:
    check(operator, HEALTHY)


@pytest.mark.parametrize("faults", ROUNDS, ids=lambda faults: "-and-".join(fault.name for fault in faults))
def test_faults(operator: Operator, faults: Sequence[Fault]) -> None:
    in_parallel(lambda fault: inject(operator, fault), faults)
    check(operator, faults)
    if faults[0].name == "other-hang":
        # Otherwise this hang would be in the log of all later rounds.
        inject(operator, Fault("clear", "gpu-1", "", ["clear"]))


def test_an_nvidia_smi_that_cannot_be_killed(operator: Operator) -> None:
    """The first scan starts nvidia-smi and reports it as stuck; later scans do not start another."""
    inject(operator, SMI_HANG)
    found = health_verdicts(operator)["gpu-2"]
    assert (found["state"], found["action"], found["hung_in_driver"]) == ("hung", "reboot", True)
    assert "smi-stuck" in rules(found)
    (stuck,) = machine_state(operator, "gpu-2").processes
    assert "nvidia-smi" in stuck
    check(operator, [SMI_HANG], [stuck])


def in_parallel(do: Callable[[Fault], Any], faults: Sequence[Fault]) -> list[Any]:
    """Run ``do`` for all faults at the same time."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(do, faults))


def inject(operator: Operator, fault: Fault) -> None:
    """Inject a fault step by step; each step waits for the log line of the previous one."""
    if fault.script:
        operator.ssh(fault.machine, fault.script)
    for step, arguments in enumerate(fault.faults):
        if step:
            wait_for_log(operator, fault)
        done = operator.lab("fault", fault.machine, *arguments.split())
        assert done.returncode == 0, done.stderr


def wait_for_log(operator: Operator, fault: Fault) -> int:
    """Wait for the fault's log line; returns how many times the ticker has run."""
    logged = f"until dmesg | grep -qF {shlex.quote(fault.message)}; do sleep 1; done"
    return int(operator.ssh(fault.machine, f"timeout {SEEN_S} sh -c {shlex.quote(logged)} && wc -l </run/ticks"))


def check(operator: Operator, faults: Sequence[Fault], remaining: Sequence[str] = ()) -> None:
    """Check the verdicts on machines with these faults; after the scan only ``remaining`` processes are left."""
    ticks = in_parallel(lambda fault: wait_for_log(operator, fault), faults)
    verdicts = health_verdicts(operator)
    output = run_role(operator)
    found = in_parallel(lambda fault: machine_state(operator, fault.machine), faults)
    for fault, before, after in zip(faults, ticks, found, strict=True):
        print(f"{fault.name} of {fault.machine}")
        live = verdicts[fault.machine]
        check_live(fault, live, output)
        if fault.name == "xid-119-storm":
            (flood,) = (each for each in live["findings"] if "): 119, " in "".join(each["evidence"]))
            assert flood["count"] > 100
        assert after.ticks > before
        assert after.processes == list(remaining)
        # The log of this fault only, as a user would save it.
        log = operator.folder / "kernel.log"
        log.write_text("".join(f"{line}\n" for line in after.log[_lines[fault.machine] :]))
        _lines[fault.machine] = len(after.log)
        check_saved(fault, operator.document("health", "--from", str(log), code=None)["machines"][0])
        if folder := os.environ.get("GPUNODES_CAPTURE"):
            capture(operator, Path(folder) / fault.name, fault.machine, log, live)


def check_live(fault: Fault, live: dict[str, Any], output: str) -> None:
    """Check the verdict of the command and of the role: that of the worst fault so far, as log lines stay valid."""
    so_far = _so_far[fault.machine]
    so_far.append(fault)
    state = max((each.state for each in so_far), key=lambda each: each.rank)
    action = max((each.action for each in so_far), key=lambda each: each.rank)
    assert (live["state"], live["action"]) == (state.value, action.value), live
    assert live["hung_in_driver"] == (state is State.HUNG)
    assert live["xids"] == sorted({xid for each in so_far for xid in each.xids})
    assert live["gpus"] == {"expected": 2, "seen": fault.seen}
    assert fault.rules <= rules(live), live
    suffix = "" if action is Action.NONE else f", {action.value}"
    assert re.search(rf'"msg": "{fault.machine}: {state.value}{suffix}[;"]', output), output


def check_saved(fault: Fault, saved: dict[str, Any]) -> None:
    """Check the verdict on the lines of one fault. They may lack any of the driver: then nothing is known about it."""
    healthy = {State.HEALTHY.value, State.UNKNOWN.value}
    assert saved["state"] in (healthy if fault.state is State.HEALTHY else {fault.state.value}), saved
    assert saved["action"] == fault.action.value, saved
    assert saved["hung_in_driver"] == (fault.state is State.HUNG)
    assert saved["xids"] == list(fault.xids)


def health_verdicts(operator: Operator) -> dict[str, dict[str, Any]]:
    """The verdict on each GPU machine, by `gpunodes health`."""
    document = operator.document("health", "gpu-*", code=None)
    return {machine["name"]: machine for machine in document["machines"]}


def rules(machine: dict[str, Any]) -> set[str]:
    return {finding["rule"] for finding in machine["findings"]}


def run_role(operator: Operator) -> str:
    """The output of the role on all GPU machines, run by plain Ansible."""
    output = ansible(operator, "ansible-playbook", str(CHECKOUT / "playbooks" / "health.yml"), "-l", "gpu-*")
    assert output.count("changed=0") == len(_so_far), output
    return output


def ansible(operator: Operator, program: str, *arguments: str) -> str:
    path = shutil.which(program)
    assert path
    done = subprocess.run(
        [path, "-i", str(operator.folder / "inventory"), *arguments],
        cwd=CHECKOUT,
        env={**operator.environment, **FORGOTTEN},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def machine_state(operator: Operator, machine: str) -> MachineState:
    script = (
        "wc -l </run/ticks; ps -C python3,nvidia-smi,journalctl -o pid=,stat=,args=; echo --; "
        "journalctl --sync; journalctl -k -b -q --no-pager -o short-monotonic"
    )
    lines = operator.ssh(machine, script).splitlines()
    end = lines.index("--")
    return MachineState(int(lines[0]), lines[1:end], lines[end + 1 :])


def capture(operator: Operator, folder: Path, machine: str, log: Path, live: dict[str, Any]) -> None:
    """Save a machine's log and facts with their verdicts, in the files of tests/unit/fixtures/captured/README.md."""
    facts: dict[str, Any] = json.loads(
        ansible(operator, "ansible", machine, "--become", "-m", "gpunodes.bootstrap.gpu_probe").partition(" => ")[2]
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
    files = [argument for path in sorted(folder.iterdir()) for argument in ("--from", str(path))]
    saved = operator.document("health", *files, code=None)["machines"][0]
    (folder / "probe.json.gz").write_bytes(gzip.compress(json.dumps(facts, indent=1).encode(), mtime=0))
    (folder / "verdict.json").write_text(json.dumps({"live": live, "files": saved}, indent=2) + "\n")
