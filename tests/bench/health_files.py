"""Benchmark of a verdict on a saved log, relative to grep on the same file: `python -m tests.bench.health_files`.

Needs no lab. The log is 100 MB of harmless lines with floods of Xids between them; grep searches for the same strings.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpunodes.health.lines import ANCHORS

from tests.bench.table import Row, show

SIZE = 100 << 20
FLOOD = 190_000
RUNS = 5
FINDINGS = 3
"""Exit code of `health` for an unhealthy machine: every log here has Xids."""
GPUNODES = shlex.split(os.environ.get("GPUNODES", f"{sys.executable} -c 'from gpunodes.cli import main; main()'"))
HARMLESS = (
    "usb 1-1: new high-speed USB device number %d using xhci_hcd",
    "IPv6: ADDRCONF(NETDEV_CHANGE): cali%08x: link becomes ready",
    'audit: type=1400 audit(1700000000.%03d:42): apparmor="STATUS" operation="profile_load" name="docker-default"',
    "EXT4-fs (sda%d): mounted filesystem with ordered data mode. Opts: (null)",
    "cni0: port %d(veth12ab34cd) entered blocking state",
    "mce: [Hardware Error]: Machine check events logged %d",
    "NFS: server 10.0.0.%d not responding, still trying",
)
XID = (
    "NVRM: Xid (PCI:0000:3b:00): 31, pid=%d, name=python3, Ch %08x, intr 00000000. MMU Fault: ENGINE GRAPHICS "
    "GPCCLIENT_T1_0 faulted @ 0x7f92_9a53d000."
)


@dataclass(frozen=True, slots=True)
class Run:
    """A command's elapsed time in seconds, peak memory in MiB, and output."""

    seconds: float
    memory: float
    output: bytes


def lines(chance: random.Random) -> Iterator[str]:
    """An endless kernel log."""
    second = 0.0
    while True:
        second += chance.random() * 0.01
        flood = 600 if chance.random() < 1e-4 else 0
        for number in range(flood):
            yield f"[{second + number * 1e-4:12.6f}] {XID % (chance.randrange(99999), number)}\n"
        yield f"[{second:12.6f}] {chance.choice(HARMLESS) % chance.randrange(1000)}\n"


def write_log(path: Path) -> None:
    """A log of `SIZE` bytes, the same in every run."""
    size = 0
    with path.open("w") as log:
        for line in lines(random.Random(1)):  # noqa: S311 - the log must be the same in every run
            size += log.write(line)
            if size >= SIZE:
                return


def run(command: Sequence[str], code: int) -> Run:
    """Run and measure a command once. Raises CalledProcessError for an exit code other than ``code``."""
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != code:
        raise subprocess.CalledProcessError(process.returncode, command, output)
    return Run(time.monotonic() - started, usage.ru_maxrss / 1024, output)


def best(command: Sequence[str], code: int) -> Run:
    """The fastest of `RUNS` runs: other load on the machine only makes them slower."""
    return min((run(command, code) for _ in range(RUNS)), key=lambda one: one.seconds)


def judge(path: Path) -> list[str]:
    return [*GPUNODES, "health", "--json", "--from", str(path)]


def measure(folder: Path) -> list[Row]:
    """All rows of the table."""
    log, packed, flood, small = (folder / name for name in ("log", "log.gz", "flood", "small"))
    write_log(log)
    # This process must stay small: the kernel's peak memory of a child starts with that of its parent.
    with log.open("rb") as plain, gzip.open(packed, "wb", 1) as target:
        shutil.copyfileobj(plain, target)
    with flood.open("w") as target_log:
        target_log.writelines(f"[{number / 1000:12.6f}] {XID % (number, number)}\n" for number in range(FLOOD))
    small.write_text(f"[1.0] {XID % (1, 1)}\n")
    pattern = "|".join(re.sub(r"[\[(]", r"\\\g<0>", anchor.marker.decode()) for anchor in ANCHORS)
    grep, verdict = best(["grep", "-acE", pattern, str(log)], 0), best(judge(log), FINDINGS)
    unpacked, flooded = run(judge(packed), FINDINGS), run(judge(flood), FINDINGS)
    quick = best(judge(small), FINDINGS)
    (machine,) = json.loads(flooded.output)["machines"]
    counted = next(finding["count"] for finding in machine["findings"] if finding["rule"] == "xid")
    return [
        Row(
            "`health --from`, 100 MB, relative to grep -E",
            f"{verdict.seconds / grep.seconds:.2f}",
            "3",
            f"{verdict.seconds:.2f} s, grep {grep.seconds:.2f} s for the same strings",
        ),
        Row("its peak memory", f"{verdict.memory:.0f} MiB", "200 MiB", f"compressed log: {unpacked.memory:.0f} MiB"),
        Row(
            f"log flood of {FLOOD} lines",
            f"counted {counted}",
            f"counted {FLOOD}",
            f"{flooded.seconds:.2f} s, one finding",
        ),
        Row("`health --from`, a small log", f"{quick.seconds:.2f} s", "0.25 s", f"fastest of {RUNS}"),
    ]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="gpunodes-bench-") as folder:
        show(measure(Path(folder)))


if __name__ == "__main__":
    main()
