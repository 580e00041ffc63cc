"""What asking 200 machines costs the machine that asks: `python -m tests.bench.probing`, or as a part of `make bench`.

The machines are SSH servers of our own on loopback addresses, so they share the processors with who asks: only
processor time says something, elapsed time does not. It is that of the whole command with all its children, start-up,
inventory and judgement included. Needs root and the package openssh-server; clush is compared with where it is
installed (`pip install clustershell`), or named in $CLUSH.
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
"""How many of them never answer in the second round: 5 %."""
PARALLEL = 64
DEADLINE_S = 180
GPUNODES = os.environ.get("GPUNODES", "gpunodes")
CLUSH = os.environ.get("CLUSH", "clush")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a command took, in seconds, and what it printed."""

    cpu_s: float
    wall_s: float
    code: int
    output: str


def cost(words: Sequence[str], folder: Path, **environment: str) -> Cost:
    """Run a command to its end, all its children counted."""
    print("$", *words, file=sys.stderr, flush=True)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        words,
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
    found = Cost(cpu, time.monotonic() - began, done.returncode, done.stdout)
    print(f"  {found.cpu_s:.2f} s of processor, {found.wall_s:.0f} s, exit {found.code}", file=sys.stderr, flush=True)
    return found


def measure(folder: Path) -> list[Row]:
    """All rows; ``folder`` is private and empty."""
    if sshd.SSHD is None or os.geteuid() != 0:
        return [Row("asking 200 machines", "-", "-", "needs root and the package openssh-server")]
    port = sshd.free_ports(1, "127.0.1.1")[0]
    addresses = [f"127.0.1.{number}" for number in range(1, MACHINES + 1)]
    with sshd.serving(folder, [{(address, port): ""} for address in addresses]) as servers:
        hosts: dict[str, dict[str, object]] = {
            f"gpu-{number:03d}": {"ansible_host": address} for number, address in enumerate(addresses, 1)
        }
        inventory = _inventory(folder / "hosts.json", hosts, port, servers)
        health = [GPUNODES, "health", "-i", str(inventory), "--json", "--parallel", str(PARALLEL)]
        # Once to learn the keys and warm the disk's cache, for each alike.
        cost([*health, "gpu-00?"], folder)
        asked = cost([*health, "--deadline", str(DEADLINE_S)], folder)
        ansible = _ansible(folder, inventory)
        clush = _clush(folder, addresses, port, servers)
        with _dead(DEAD) as places:
            for number, (address, dead) in enumerate(places, 1):
                hosts[f"gpu-{number:03d}"] = {"ansible_host": address, "ansible_port": dead}
            _inventory(inventory, hosts, port, servers)
            partly = cost([*health, "--deadline", str(DEADLINE_S)], folder)
    return [*_rows(asked, ansible, clush), _row_of_dead(partly)]


def _rows(asked: Cost, ansible: Cost, clush: Cost | None) -> list[Row]:
    each = 1000 * asked.cpu_s / MACHINES
    answered = sum(machine["state"] != "unreachable" for machine in json.loads(asked.output)["machines"])
    rows = [
        Row(
            f"processor time of `health` for each of {MACHINES} machines",
            f"{each:.1f} ms",
            "10 ms",
            f"{answered} answered",
        ),
        Row(
            "`ansible -m ping` against `health`, processor time",
            f"{ansible.cpu_s / asked.cpu_s:.1f}",
            "15",
            f"{1000 * ansible.cpu_s / MACHINES:.0f} ms against {each:.1f} ms a machine; exit {ansible.code}",
        ),
    ]
    if clush is None:
        return [*rows, Row("`clush true` against `health`, processor time", "-", "1", f"{CLUSH} is not installed")]
    how = f"{1000 * clush.cpu_s / MACHINES:.1f} ms against {each:.1f} ms a machine; exit {clush.code}"
    return [*rows, Row("`clush true` against `health`, processor time", f"{clush.cpu_s / asked.cpu_s:.1f}", "1", how)]


def _row_of_dead(partly: Cost) -> Row:
    found = json.loads(partly.output)["machines"]
    unreachable = sum(machine["state"] == "unreachable" for machine in found)
    return Row(
        f"`health` where {DEAD} of {MACHINES} never answer, against its deadline",
        f"{partly.wall_s / DEADLINE_S:.2f}",
        "1",
        f"{partly.wall_s:.0f} s of {DEADLINE_S} s; {len(found) - unreachable} answered",
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
    """Ansible as it comes. Its shared connections are not counted, which is to its favour: they outlive it, briefly."""
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
    """Places that never answer: half of them take the connection and never speak, half do not even take it."""
    with contextlib.ExitStack() as stack:
        places = []
        for position in range(number):
            listener = stack.enter_context(socket.socket())
            listener.bind((f"127.0.2.{position + 1}", 0))
            listener.listen(64 if position % 2 else 0)
            place: tuple[str, int] = listener.getsockname()
            places.append(place)
            for _ in range(0 if position % 2 else 4):
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(place)
        yield places


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="gpunodes-bench-") as folder:
        show(measure(Path(folder)))


if __name__ == "__main__":
    main()
