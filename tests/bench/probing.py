"""Benchmark of a scan of 200 machines: `python -m tests.bench.probing`, or as a part of `make bench`.

The machines are SSH servers on loopback addresses, which share the processors with the command: only the command's
processor time is meaningful, elapsed time is not. It includes all child processes, start-up, inventory and verdicts.
Needs root and the package openssh-server; clush is included if it is installed (`pip install clustershell`) or named in
$CLUSH.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import sshd
from tests.bench.table import Row, show

MACHINES = 200
DEAD = 10
"""How many of them never respond in the second round: 5 %."""
PARALLEL = 64
DEADLINE_S = 180
GPUNODES = os.environ.get("GPUNODES", "gpunodes")
CLUSH = os.environ.get("CLUSH", "clush")


@dataclass(frozen=True, slots=True)
class Cost:
    """A command's processor time and elapsed time, in seconds, exit code and output."""

    cpu_s: float
    wall_s: float
    code: int
    output: str


def cost(argv: Sequence[str], folder: Path, **environment: str) -> Cost:
    """Run a command to its end and measure it, child processes included."""
    print("$", *argv, file=sys.stderr, flush=True)
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        argv,
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "XDG_STATE_HOME": str(folder / "state"), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=1800,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = Cost(cpu, time.monotonic() - started, done.returncode, done.stdout)
    print(f"  {found.cpu_s:.2f} s of processor, {found.wall_s:.0f} s, exit {found.code}", file=sys.stderr, flush=True)
    return found


def measure(folder: Path) -> list[Row]:
    """All rows; ``folder`` is private and empty."""
    if sshd.SSHD is None or os.geteuid() != 0:
        return [Row(f"scan of {MACHINES} machines", "-", "-", "needs root and the package openssh-server")]
    port = sshd.free_ports(1, "127.0.1.1")[0]
    addresses = [f"127.0.1.{number}" for number in range(1, MACHINES + 1)]
    with sshd.serving(folder, [{(address, port): ""} for address in addresses]) as servers:
        hosts: dict[str, dict[str, object]] = {
            f"gpu-{number:03d}": {"ansible_host": address} for number, address in enumerate(addresses, 1)
        }
        inventory = _inventory(folder / "hosts.json", hosts, port, servers)
        health = [GPUNODES, "health", "-i", str(inventory), "--json", "--parallel", str(PARALLEL)]
        # A first scan, for all commands: it stores the host keys and fills the page cache.
        cost([*health, "gpu-00?"], folder)
        scan = cost([*health, "--deadline", str(DEADLINE_S)], folder)
        ansible = _ansible(folder, inventory)
        clush = _clush(folder, addresses, port, servers)
        with _dead(DEAD) as addresses_and_ports:
            for number, (address, dead) in enumerate(addresses_and_ports, 1):
                hosts[f"gpu-{number:03d}"] = {"ansible_host": address, "ansible_port": dead}
            _inventory(inventory, hosts, port, servers)
            partly = cost([*health, "--deadline", str(DEADLINE_S)], folder)
    return [*_rows(scan, ansible, clush), _row_of_dead(partly)]


def _rows(scan: Cost, ansible: Cost, clush: Cost | None) -> list[Row]:
    each = 1000 * scan.cpu_s / MACHINES
    responded = sum(machine["state"] != "unreachable" for machine in json.loads(scan.output)["machines"])
    rows = [
        Row(
            f"processor time of `health`, per machine, for {MACHINES} machines",
            f"{each:.1f} ms",
            "10 ms",
            f"{responded} responded",
        ),
        Row(
            "`ansible -m ping`, processor time relative to `health`",
            f"{ansible.cpu_s / scan.cpu_s:.1f}",
            "15",
            f"{1000 * ansible.cpu_s / MACHINES:.0f} ms per machine, `health` {each:.1f} ms; exit {ansible.code}",
        ),
    ]
    if clush is None:
        return [*rows, Row("`clush true`, processor time relative to `health`", "-", "1", f"{CLUSH} is not installed")]
    how = f"{1000 * clush.cpu_s / MACHINES:.1f} ms per machine, `health` {each:.1f} ms; exit {clush.code}"
    return [
        *rows,
        Row("`clush true`, processor time relative to `health`", f"{clush.cpu_s / scan.cpu_s:.1f}", "1", how),
    ]


def _row_of_dead(partly: Cost) -> Row:
    found = json.loads(partly.output)["machines"]
    unreachable = sum(machine["state"] == "unreachable" for machine in found)
    return Row(
        f"`health` with {DEAD} of {MACHINES} machines unresponsive, relative to its deadline",
        f"{partly.wall_s / DEADLINE_S:.2f}",
        "1",
        f"{partly.wall_s:.0f} s of {DEADLINE_S} s; {len(found) - unreachable} responded",
    )


def _inventory(path: Path, hosts: Mapping[str, Mapping[str, object]], port: int, servers: sshd.Servers) -> Path:
    """The machines for gpunodes and Ansible; JSON is YAML."""
    variables = {
        "ansible_port": port,
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(servers.login),
        "ansible_python_interpreter": "/usr/bin/python3",
    }
    path = path.with_suffix(".yml")
    path.write_text(json.dumps({"workers": {"hosts": hosts, "vars": variables}}))
    return path


def _ansible(folder: Path, inventory: Path) -> Cost:
    """Ansible with its defaults. Its shared connections outlive it and are not counted, which is in its favour."""
    command = Path(shutil.which(GPUNODES) or sys.executable).resolve().with_name("ansible")
    program = str(command) if command.exists() else str(Path(sys.executable).with_name("ansible"))
    return cost(
        [program, "all", "-i", str(inventory), "-m", "ping", "-f", str(PARALLEL), "-o"],
        folder,
        ANSIBLE_SSH_ARGS="-C -o ControlMaster=auto -o ControlPersist=5s "
        f"-o UserKnownHostsFile={folder}/state/gpunodes/known_hosts",
        ANSIBLE_TIMEOUT="120",
        PATH=os.pathsep.join([str(Path(program).parent), os.environ.get("PATH", os.defpath)]),
    )


def _clush(folder: Path, addresses: Sequence[str], port: int, servers: sshd.Servers) -> Cost | None:
    program = shutil.which(CLUSH)
    if program is None:
        return None
    options = (
        f"-p {port} -i {servers.login} -o UserKnownHostsFile={folder}/state/gpunodes/known_hosts -o LogLevel=ERROR"
    )
    return cost(
        [program, "-q", "-S", "-l", "root", "-f", str(PARALLEL), "-o", options, "-w", ",".join(addresses), "true"],
        folder,
    )


@contextlib.contextmanager
def _dead(number: int) -> Iterator[list[tuple[str, int]]]:
    """Addresses and ports that never respond: half accept connections and send nothing, half do not accept any."""
    with contextlib.ExitStack() as stack:
        unresponsive = []
        for position in range(number):
            listener = stack.enter_context(socket.socket())
            listener.bind((f"127.0.2.{position + 1}", 0))
            listener.listen(64 if position % 2 else 0)
            address: tuple[str, int] = listener.getsockname()
            unresponsive.append(address)
            for _ in range(0 if position % 2 else 4):
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(address)
        yield unresponsive


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="gpunodes-bench-") as folder:
        show(measure(Path(folder)))


if __name__ == "__main__":
    main()
