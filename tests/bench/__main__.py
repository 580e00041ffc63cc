"""Benchmarks. Most results are ratios within one run on one machine, so that a slow or busy machine does not matter.

`make bench` runs this with the installed command; it needs the lab, takes about half an hour without KVM, and prints
a table in Markdown. This is not a test: a ratio above its goal is reported, and does not fail.
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

from tests.bench import gpu, health_files, probing, selection, upgrade, waits
from tests.bench.table import Row, show

GPUNODES = os.environ.get("GPUNODES", "gpunodes")
HERE = Path(__file__).parent
NAME = "bench"
KUBECTL = "kubectl --kubeconfig /etc/kubernetes/admin.conf"


class Bench:
    """A lab in a separate folder, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
        self._restored = 0

    def run(self, *argv: str, stdin: str | None = None) -> str:
        """Run a command to its end; returns its standard output. Raises CalledProcessError when it fails."""
        print("$", *argv, file=sys.stderr, flush=True)
        done = subprocess.run(
            argv,
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
        """Run ``action``; returns its duration in seconds."""
        started = time.monotonic()
        action()
        duration = time.monotonic() - started
        print(f"  {duration:.1f} s", file=sys.stderr, flush=True)
        return duration

    def gpunodes(self, *arguments: str) -> str:
        return self.run(GPUNODES, *arguments)

    def join(self, *machines: str) -> float:
        return self.seconds(lambda: self.gpunodes("join", *machines))

    def bare_join(self) -> float:
        """The shell script on worker-1, with the manual steps before and after it."""

        def join() -> None:
            line = self.on("control-1", "kubeadm token create --ttl 15m --print-join-command").split()
            endpoint_token_hash = f"{line[2]} {line[4]} {line[6]}\n"
            self.on("worker-1", "cat >/run/bare.sh", stdin=(HERE / "bare_join.sh").read_text())
            self.on("worker-1", "sh /run/bare.sh http://mirror.lab 1.36", stdin=endpoint_token_hash)
            # kubeadm may end before the kubelet has created its node.
            wait = f"{KUBECTL} wait --timeout=600s"
            probed = "--for=jsonpath='{.status.phase}'=Succeeded pod/probe"
            self.on(
                "control-1",
                f"{wait} --for=create node/worker-1 && {wait} --for=condition=Ready node/worker-1 && "
                f"{KUBECTL} apply -f - && {wait} {probed}",
                stdin=(HERE / "probe.yml").read_text(),
            )

        return self.seconds(join)

    def on(self, machine: str, command: str, stdin: str | None = None) -> str:
        """Run a shell command on a machine as root."""
        return self.lab("ssh", machine, f"sudo sh -c {shlex.quote(command)}", stdin=stdin)

    def lab(self, *arguments: str, stdin: str | None = None) -> str:
        return self.run(GPUNODES, "lab", "--name", NAME, *arguments, stdin=stdin)

    def restore(self, snapshot: str) -> None:
        """Restore all machines. Ansible's persistent connections do not survive this: they get a new folder."""
        self.lab("restore", snapshot)
        self._restored += 1
        self.environment["ANSIBLE_SSH_CONTROL_PATH_DIR"] = str(self.folder / f"connections-{self._restored}")

    def down(self) -> None:
        """Remove the lab, if it exists."""
        self.lab("down")


def tasks_of(state: Path) -> int:
    """The number of tasks of the latest run's playbooks, from Ansible's output."""
    latest = max((state / "gpunodes/runs").iterdir())
    return sum(log.read_text().count("\nTASK [") for log in latest.rglob("stdout"))


def hosts_of(state: Path) -> int:
    """The number of machines with tasks in the latest run, delegated tasks included."""
    latest = max((state / "gpunodes/runs").iterdir())
    machines: set[str] = set()
    for log in latest.rglob("stdout"):
        for line in log.read_text().splitlines():
            if line.startswith(("ok: [", "changed: [")):
                # `ok: [worker-1 -> control-1(10.0.0.1)]`: the task ran on the second one.
                name = line.split("[", 1)[1].split("]")[0]
                machines.add(name.split(" -> ")[-1].split("(")[0])
    machines.discard("localhost")
    return len(machines)


def measure(folder: Path) -> Iterator[Row]:
    """The rows of joins and `up`, each as soon as it is measured; ``folder`` is empty."""
    bench = Bench(folder)
    try:
        yield from _rows(bench)
    finally:
        bench.down()


def _rows(bench: Bench) -> Iterator[Row]:
    help_s = statistics.median(bench.seconds(lambda: bench.gpunodes("--help")) for _ in range(9))
    yield Row("gpunodes --help", f"{help_s:.2f} s", "0.15 s", "median of 9")
    # The lab of an interrupted run is not bare.
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
        "join, relative to a shell script",
        f"{join_s / bare_s:.2f}",
        "1.25",
        f"{join_s:.0f} s, script {bare_s:.0f} s",
    )
    yield Row(
        "machines contacted by a join of one machine",
        f"{hosts_of(state)}",
        "2",
        "the joining machine and the control plane",
    )
    yield Row("tasks of a join", f"{tasks_of(state)}", "-", "as counted by Ansible, tasks on the controller included")
    again_s = bench.join("worker-1")
    yield Row(
        "second join, relative to the first",
        f"{again_s / join_s:.2f}",
        "0.10",
        f"{again_s:.0f} s, first {join_s:.0f} s",
    )
    second_s = bench.join("worker-2")
    bench.restore("bare")
    up_s = bench.seconds(lambda: bench.gpunodes("up"))
    yield Row(
        "`up`, relative to its steps in sequence",
        f"{up_s / (init_s + join_s + second_s):.2f}",
        "0.70",
        f"{up_s:.0f} s, init-master {init_s:.0f} + join {join_s:.0f} + join {second_s:.0f} s",
    )
    bench.restore("cluster")
    both_s = bench.join("worker-1", "worker-2")
    yield Row(
        "`up`, relative to init-master and one join of both workers",
        f"{up_s / (init_s + both_s):.2f}",
        "-",
        f"{up_s:.0f} s, init-master {init_s:.0f} + join {both_s:.0f} s",
    )


def main() -> int:
    """Run all benchmarks; each row is printed when it is measured, so that a later failure does not lose it."""
    rows: list[Row] = []
    failed = False
    for part in (
        measure,
        gpu.measure,
        upgrade.measure,
        waits.measure,
        probing.measure,
        health_files.measure,
        selection.measure,
    ):
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
