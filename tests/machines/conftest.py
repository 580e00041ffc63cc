"""Machines for the end-to-end tests: a lab of virtual machines, and the command as it was installed from the wheel.

The tests of a module share one lab and run in the order in which they stand: each goes on from the state that the one
before it left, as an operator's day does. A failure therefore stops the module (``-x`` in the Makefile).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

# What helpers assert is told in full, too.
pytest.register_assert_rewrite(f"{__package__}.sick")

GPUNODES = os.environ.get("GPUNODES", "gpunodes")
CHECKOUT = Path(__file__).parents[2]
# A lab of their own, beside one that somebody tries things on.
NAME = "tests"
# Emulated machines under load are slow; these bounds only end what hangs.
LONG = 1500.0
"""Seconds that a run of the command may take."""
SHORT = 240.0
"""Seconds that a single command on a machine may take."""
TOKEN = r"\b[a-z0-9]{6}\.[a-z0-9]{16}\b"
"""A bootstrap token of kubeadm's."""


@dataclass(slots=True)
class Operator:
    """Somebody at a shell in a folder: types `gpunodes ...`, and ssh to the lab's machines."""

    folder: Path
    environment: dict[str, str]
    said: list[str] = field(default_factory=list)
    """Everything that the commands printed; the search for secrets reads it."""

    def gpunodes(self, *words: str, code: int | None = 0, limit_s: float = LONG) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; asserts its exit code unless ``code`` is None."""
        done = subprocess.run(
            [GPUNODES, *words],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        self.said += [done.stdout, done.stderr]
        print(f"$ gpunodes {' '.join(words)} -> {done.returncode}\n{done.stdout}{done.stderr}")
        if code is not None:
            assert done.returncode == code, done.stdout + done.stderr
        return done

    def document(self, *words: str, code: int | None = 0) -> dict[str, Any]:
        """Run a command with --json; returns its document, which must be all of standard output."""
        document: dict[str, Any] = json.loads(self.gpunodes(*words, "--json", code=code).stdout)
        return document

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command; its progress comes on standard error."""
        return subprocess.Popen(
            [GPUNODES, *words],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, process: subprocess.Popen[str], words: str, limit_s: float = LONG) -> None:
        """Read a started command's progress until a line holds ``words``."""
        deadline = time.monotonic() + limit_s
        assert process.stderr
        for line in process.stderr:
            self.said.append(line)
            print(line, end="")
            if words in line:
                return
            assert time.monotonic() < deadline, f"{words!r} did not come"
        pytest.fail(f"the command ended before {words!r}")

    def ssh(self, machine: str, command: str, code: int | None = 0) -> str:
        """Run a shell command on a machine as root; returns what it printed."""
        done = self.lab("ssh", machine, f"sudo sh -c {shlex.quote(command)}")
        if code is not None:
            assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def each(self, machines: Sequence[str], command: str, code: int | None = 0) -> dict[str, list[str]]:
        """Run a shell command on several machines side by side, as root; returns the lines that each printed."""
        with ThreadPoolExecutor(len(machines)) as pool:
            said = pool.map(lambda machine: self.ssh(machine, command, code), machines)
            return {machine: lines(text) for machine, text in zip(machines, said, strict=True)}

    def lab(self, *words: str, limit_s: float = SHORT) -> subprocess.CompletedProcess[str]:
        """Run a command of the lab; what it prints is not searched for secrets."""
        return subprocess.run(
            [GPUNODES, "lab", "--name", NAME, *words],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def playbook(self, name: str, machine: str) -> None:
        """Run a playbook of the checkout on a machine by plain Ansible."""
        program = shutil.which("ansible-playbook")
        assert program
        done = subprocess.run(
            [program, "-i", str(self.folder / "inventory"), str(CHECKOUT / f"playbooks/{name}.yml"), "-l", machine],
            cwd=CHECKOUT,
            env={**os.environ, "ANSIBLE_HOST_KEY_CHECKING": "False"},
            capture_output=True,
            text=True,
            timeout=LONG,
            check=False,
        )
        self.said += [done.stdout, done.stderr]
        assert done.returncode == 0, done.stdout + done.stderr

    def kubectl(self, *words: str, code: int | None = 0) -> str:
        """kubectl on the control plane."""
        return self.ssh("control-1", f"kubectl --kubeconfig /etc/kubernetes/admin.conf {shlex.join(words)}", code)

    def tokens(self) -> list[str]:
        """The bootstrap tokens that the cluster holds now."""
        return self.kubectl("-n", "kube-system", "get", "secrets", "-o", "name").count("bootstrap-token-") * ["token"]


def kill(process: subprocess.Popen[str]) -> None:
    """kill -9 of the command itself, as the kernel's memory killer would; what it started is left to itself."""
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@dataclass(frozen=True, slots=True)
class Kind:
    """Which lab a module's tests want."""

    system: str = "debian13"
    workers: int = 2
    kubernetes: str = "1.36"
    gpu_workers: int = 0
    """Machines with stand-in GPUs, two each."""
    more: tuple[str, ...] = ()
    """More words for `lab up`."""


@pytest.fixture(scope="module")
def operator(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """An operator with a lab of bare machines as the module's LAB says; all of it is gone afterwards."""
    kind: Kind = getattr(request.module, "LAB", Kind())
    folder = tmp_path_factory.mktemp("operator")
    state = tmp_path_factory.mktemp("state")
    operator = Operator(folder, {**os.environ, "XDG_STATE_HOME": str(state), "KUBECONFIG": str(folder / "kube/config")})
    up = (
        "up",
        "--workers",
        str(kind.workers),
        "--os",
        kind.system,
        "--kubernetes-version",
        kind.kubernetes,
        *kind.more,
    )
    if kind.gpu_workers:
        up += ("--gpu-workers", str(kind.gpu_workers), "--gpus", "2")
    done = operator.lab(*up, limit_s=3600)
    assert done.returncode == 0, done.stderr
    try:
        yield operator
    finally:
        operator.lab("down")


# What a second run must leave as it is: packages, holds, every file's time, size and mode, and when services started.
STATE = r"""
dpkg-query -W -f '${Package} ${Version} ${Status}\n'; apt-mark showhold
find /etc /opt /usr/local /var/lib/gpunodes /var/lib/kubelet/config.yaml /var/lib/kubelet/kubeadm-flags.env \
  -xdev -type f ! -path /etc/resolv.conf -printf '%p %m %s %T@\n' 2>/dev/null | sort
systemctl show -p ActiveEnterTimestampMonotonic kubelet containerd
"""

# What a reset must bring back: the same without times, with interfaces, mounts, rules and settings. Files such as
# group- and passwd- are copies that the system keeps of earlier states.
BARE = r"""
dpkg-query -W -f '${Package} ${Version} ${db:Status-Status}\n' | sort; apt-mark showhold
find /etc /opt /usr/local /var/lib -maxdepth 6 -xdev ! -path '/var/lib/dpkg/*' ! -path '/var/lib/apt/*' \
  ! -path '/var/lib/systemd/*' ! -path /etc/resolv.conf ! -path /etc/ld.so.cache ! -path '/var/lib/dhcp/*' \
  ! -path '/var/lib/private*' ! -path /etc/group- ! -path /etc/gshadow- -printf '%y %p %m\n' | sort
cd /etc && find . -xdev -type f ! -name 'ld.so.cache' ! -name 'resolv.conf' ! -name group- ! -name gshadow- \
  ! -name passwd- ! -name shadow- -exec sha256sum {} + | sort -k2
ip -o link | cut -d' ' -f2; ip route
iptables-save 2>/dev/null | grep '^-A'; nft list tables 2>/dev/null | grep -v 'ip6\? \(filter\|nat\|mangle\)$'
findmnt -rn -o TARGET | grep -v -e ^/proc -e ^/sys -e ^/run -e ^/dev | sort
sysctl -n net.ipv4.ip_forward; cat /proc/swaps; ls /run | grep -e gpunodes -e flannel; true
"""


def lines(text: str) -> list[str]:
    """The lines of a state, for a readable difference."""
    return [line for line in text.splitlines() if line.strip()]


def search_for_secrets(operator: Operator, machines: Sequence[str]) -> None:
    """Assert that no token, key or kubeconfig lies in what was said, in a log, or in a file that others may read."""
    state = Path(operator.environment["XDG_STATE_HOME"])
    said = "\n".join(operator.said)
    logs = "\n".join(path.read_text(errors="replace") for path in state.rglob("*") if path.is_file())
    for text in (said, logs):
        assert re.findall(TOKEN, text) == []
        assert "PRIVATE KEY" not in text
        assert "key-data" not in text
    for path in (state / "gpunodes").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0 or path.parent.stat().st_mode & 0o077 == 0
    folders = "/etc /run /tmp /var/tmp /root /home /var/lib/gpunodes /var/lib/kubelet"
    wide = f"find {folders} -xdev -type f -perm /077 -size -200k"
    pattern = f"-e '{TOKEN}' -e 'PRIVATE KEY-----' -e 'client-key-data: .'"
    search = f"{wide} ! -path '/run/udev/*' -print0 | xargs -0 grep -lE {pattern}"
    for listed in operator.each(machines, search, code=None).values():
        # The mounts of pods hold what the kubelet gave them; a token of a service account is no secret of ours.
        assert [name for name in listed if "/var/lib/kubelet/pods/" not in name] == []
    counted = operator.each(machines, f"journalctl -b --no-pager | grep -cE '{TOKEN}'", code=None)
    assert counted == {machine: ["0"] for machine in machines}
