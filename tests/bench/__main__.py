"""What a run costs, as ratios within one run on one machine, so that a slow or a busy machine does not change them.

`make bench` runs this with the installed command; it needs the lab, takes about half an hour without KVM, and prints
a table in Markdown. Nothing here is a test: a ratio above its goal is reported, not failed.
"""

from __future__ import annotations

import datetime as dt
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.bench import gpu, health_files, probing, waits
from tests.bench.table import Row, show

GPUNODES = os.environ.get("GPUNODES", "gpunodes")
HERE = Path(__file__).parent
NAME = "bench"
KUBECTL = "kubectl --kubeconfig /etc/kubernetes/admin.conf"


class Bench:
    """A lab in a folder of its own, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
        self._restored = 0

    def run(self, *words: str, stdin: str | None = None) -> str:
        """Run a command to its end; what it prints on standard output. Raises CalledProcessError when it fails."""
        print("$", *words, file=sys.stderr, flush=True)
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment,
            input=stdin or "",
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=3600,
        )
        return done.stdout

    def seconds(self, action: Callable[[], object]) -> float:
        """How long ``action`` takes."""
        begun = time.monotonic()
        action()
        took = time.monotonic() - begun
        print(f"  {took:.1f} s", file=sys.stderr, flush=True)
        return took

    def gpunodes(self, *words: str) -> str:
        return self.run(GPUNODES, *words)

    def join(self, *machines: str) -> float:
        return self.seconds(lambda: self.gpunodes("join", *machines))

    def bare_join(self) -> float:
        """The shell script on worker-1, with the steps that a person does by hand around it."""

        def act() -> None:
            line = self.on("control-1", "kubeadm token create --ttl 15m --print-join-command").split()
            words = f"{line[2]} {line[4]} {line[6]}\n"
            self.on("worker-1", "cat >/run/bare.sh", stdin=(HERE / "bare_join.sh").read_text())
            self.on("worker-1", "sh /run/bare.sh http://mirror.lab 1.36", stdin=words)
            # kubeadm may end before the kubelet has made its node.
            wait = f"{KUBECTL} wait --timeout=600s"
            probed = "--for=jsonpath='{.status.phase}'=Succeeded pod/probe"
            self.on(
                "control-1",
                f"{wait} --for=create node/worker-1 && {wait} --for=condition=Ready node/worker-1 && "
                f"{KUBECTL} apply -f - && {wait} {probed}",
                stdin=(HERE / "probe.yml").read_text(),
            )

        return self.seconds(act)

    def on(self, machine: str, command: str, stdin: str | None = None) -> str:
        """Run a shell command on a machine as root."""
        return self.lab("ssh", machine, f"sudo sh -c {shlex.quote(command)}", stdin=stdin)

    def lab(self, *words: str, stdin: str | None = None) -> str:
        return self.run(GPUNODES, "lab", "--name", NAME, *words, stdin=stdin)

    def restore(self, snapshot: str) -> None:
        """Bring all machines back. Connections that Ansible keeps for a while do not survive it: it gets new ones."""
        self.lab("restore", snapshot)
        self._restored += 1
        self.environment["ANSIBLE_SSH_CONTROL_PATH_DIR"] = str(self.folder / f"connections-{self._restored}")

    def down(self) -> None:
        """Take the lab away, if it is there."""
        self.lab("down")


def tasks_of(state: Path) -> int:
    """How many tasks the newest run's playbooks had, as Ansible printed them."""
    newest = max((state / "gpunodes/runs").iterdir())
    return sum(log.read_text().count("\nTASK [") for log in newest.rglob("stdout"))


def hosts_of(state: Path) -> int:
    """How many machines the newest run's playbooks worked on, delegated tasks included."""
    newest = max((state / "gpunodes/runs").iterdir())
    named: set[str] = set()
    for log in newest.rglob("stdout"):
        for line in log.read_text().splitlines():
            if line.startswith(("ok: [", "changed: [")):
                # `ok: [worker-1 -> control-1(10.0.0.1)]`: the second one did the work.
                name = line.split("[", 1)[1].split("]")[0]
                named.add(name.split(" -> ")[-1].split("(")[0])
    named.discard("localhost")
    return len(named)


def measure(folder: Path) -> Iterator[Row]:
    """The rows that need machines, each as soon as it is known; ``folder`` is empty."""
    bench = Bench(folder)
    try:
        yield from _rows(bench)
    finally:
        bench.down()


def _rows(bench: Bench) -> Iterator[Row]:
    help_s = statistics.median(bench.seconds(lambda: bench.gpunodes("--help")) for _ in range(9))
    yield Row("gpunodes --help", f"{help_s:.2f} s", "0.15 s", "median of 9")
    # What an interrupted bench left is no bare machine.
    bench.down()
    bench.lab("up", "--workers", "2")
    bench.lab("snapshot", "bare")
    init_s = bench.seconds(lambda: bench.gpunodes("init-master", "control-1"))
    bench.lab("snapshot", "cluster")
    bare_s = bench.bare_join()
    bench.restore("cluster")
    join_s = bench.join("worker-1")
    state = bench.folder / "state"
    yield Row(
        "join against a bare shell script",
        f"{join_s / bare_s:.2f}",
        "1.25",
        f"{join_s:.0f} s against {bare_s:.0f} s",
    )
    yield Row(
        "machines contacted by a join of one", f"{hosts_of(state)}", "2", "the one that joins and the control plane"
    )
    yield Row("tasks of a join", f"{tasks_of(state)}", "-", "as Ansible counts them, those on our own side included")
    again_s = bench.join("worker-1")
    yield Row(
        "second join against the first", f"{again_s / join_s:.2f}", "0.10", f"{again_s:.0f} s against {join_s:.0f} s"
    )
    second_s = bench.join("worker-2")
    bench.restore("bare")
    up_s = bench.seconds(lambda: bench.gpunodes("up"))
    yield Row(
        "up against its steps in sequence",
        f"{up_s / (init_s + join_s + second_s):.2f}",
        "0.70",
        f"{up_s:.0f} s against init-master {init_s:.0f} + join {join_s:.0f} + join {second_s:.0f} s",
    )
    bench.restore("cluster")
    both_s = bench.join("worker-1", "worker-2")
    yield Row(
        "up against init-master and one join of both",
        f"{up_s / (init_s + both_s):.2f}",
        "-",
        f"{up_s:.0f} s against {init_s:.0f} + {both_s:.0f} s",
    )


def main() -> int:
    """Measure all; each row is also said when it is known, so that what fails later takes nothing with it."""
    rows: list[Row] = []
    failed = False
    for part in (measure, gpu.measure, waits.measure, probing.measure, health_files.measure):
        try:
            with tempfile.TemporaryDirectory(prefix="gpunodes-bench-") as folder:
                for row in part(Path(folder)):
                    rows.append(row)
                    print(row, file=sys.stderr, flush=True)
        except Exception:
            failed = True
            traceback.print_exc()
    print(f"{dt.datetime.now(dt.UTC):%Y-%m-%d}, {os.cpu_count()} processors:\n")
    show(rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
