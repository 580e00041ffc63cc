"""Machines for the end-to-end tests: a lab of virtual machines, and the command as it was installed from the wheel.

The tests of a module share one lab and run in the order in which they stand: each goes on from the state that the one
before it left, as an operator's day does. A failure therefore stops the module (``-x`` in the Makefile).

A module's ``LAB`` is the lab that it needs. Where that includes a prepared cluster, all modules with the same ``LAB``
get it from one snapshot, so that none depends on another, or on the order. With ``GPUNODES_KEEP_LAB`` set the lab stays
after the tests, and the next run starts from its snapshot, whatever has changed in the product since: for those who
work on a test.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

# What helpers assert is told in full, too.
pytest.register_assert_rewrite(f"{__package__}.unhealthy")

GPUNODES = os.environ.get("GPUNODES", "gpunodes")
CHECKOUT = Path(__file__).parents[2]
# A lab of their own, beside one that somebody tries things on.
NAME = "tests"
# Emulated machines under load are slow; these bounds only end what hangs.
LONG = 1500.0
"""Seconds that a run of the command may take."""
SHORT = 240.0
"""Seconds that a single command on a machine may take."""
UNREACHED = 255
"""What ssh exits with when it does not reach a machine."""
TOKEN = r"\b[a-z0-9]{6}\.[a-z0-9]{16}\b"
"""A bootstrap token of kubeadm's."""


@dataclass(slots=True)
class Operator:
    """Somebody at a shell in a folder: types `gpunodes ...`, and ssh to the lab's machines."""

    folder: Path
    environment: dict[str, str]
    message: list[str] = field(default_factory=list)
    """Everything that the commands printed; the search for secrets reads it."""
    bare: dict[str, list[str]] = field(default_factory=dict)
    """``BARE`` of each machine before its cluster was prepared; empty where none is."""

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
        self.message += [done.stdout, done.stderr]
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
            self.message.append(line)
            print(line, end="")
            if words in line:
                return
            assert time.monotonic() < deadline, f"{words!r} did not come"
        pytest.fail(f"the command ended before {words!r}")

    def ssh(self, machine: str, command: str, code: int | None = 0) -> str:
        """Run a shell command on a machine as root; returns what it printed. Any exit code will do where that is None.

        A machine that is not reached has printed nothing either: that fails in any case.
        """
        done = self.lab("ssh", machine, f"sudo sh -c {shlex.quote(command)}")
        assert done.returncode != UNREACHED, done.stderr
        if code is not None:
            assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def each(self, machines: Sequence[str], command: str, code: int | None = 0) -> dict[str, list[str]]:
        """Run a shell command on several machines side by side, as root; returns the lines that each printed."""
        with ThreadPoolExecutor(len(machines)) as pool:
            message = pool.map(lambda machine: self.ssh(machine, command, code), machines)
            return {machine: lines(text) for machine, text in zip(machines, message, strict=True)}

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
            env={
                **os.environ,
                "ANSIBLE_HOST_KEY_CHECKING": "False",
                "ANSIBLE_SSH_CONTROL_PATH_DIR": self.environment["ANSIBLE_SSH_CONTROL_PATH_DIR"],
            },
            capture_output=True,
            text=True,
            timeout=LONG,
            check=False,
        )
        self.message += [done.stdout, done.stderr]
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
    cluster: tuple[str, ...] | None = None
    """Options of the `gpunodes up` that prepares a cluster for the tests; None leaves the machines bare."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Variables of control-1 in the inventory from then on."""

    @property
    def machines(self) -> tuple[str, ...]:
        """The names of its machines."""
        workers = [f"worker-{number + 1}" for number in range(self.workers)]
        return ("control-1", *workers, *(f"gpu-{number + 1}" for number in range(self.gpu_workers)))


class Labs:
    """The tests' lab. One is up at a time, with all that belongs to it in the folder ``root``."""

    SNAPSHOT = "cluster"

    def __init__(self, root: Path, *, keep: bool) -> None:
        self._root = root
        self._keep = keep
        self._folder, self._state, self._before = root / "folder", root / "state", root / "before"
        self._record = root / "lab.json"
        """Of which kind the lab is; there as soon as it has its snapshot."""
        self._connections = self._no_connections()
        if not (keep and self._record.exists()):
            self._down()

    def operator(self, kind: Kind) -> Operator:
        """An operator whose lab is as ``kind`` says: bare machines, or a cluster as it was when it was prepared."""
        wanted = json.dumps(asdict(kind), indent=1)
        if self._record.exists() and self._record.read_text() == wanted:
            return self._restored(kind)
        self._down()
        operator = self._new()
        up = ["up", "--workers", str(kind.workers), "--os", kind.system, "--kubernetes-version", kind.kubernetes]
        if kind.gpu_workers:
            up += ["--gpu-workers", str(kind.gpu_workers), "--gpus", "2"]
        done = operator.lab(*up, *kind.more, limit_s=3600)
        assert done.returncode == 0, done.stderr
        if kind.cluster is not None:
            self._prepare(operator, kind, kind.cluster)
            self._record.write_text(wanted)
        return operator

    def end(self) -> None:
        """Take the lab away, unless it is kept."""
        if not self._keep:
            self._down()

    @staticmethod
    def _no_connections() -> tempfile.TemporaryDirectory[str]:
        """A folder for the connections that Ansible keeps; not in ours, since a socket's path has 107 bytes at most."""
        return tempfile.TemporaryDirectory(prefix="gpunodes-ssh-", ignore_cleanup_errors=True)

    def _new(self) -> Operator:
        """An operator in the lab's folder, whose Ansible has no connections yet: a restored machine knows none."""
        for folder in (self._folder, self._state):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._connections = self._no_connections()
        environment = {
            "XDG_STATE_HOME": str(self._state),
            "KUBECONFIG": str(self._folder / "kube/config"),
            "ANSIBLE_SSH_CONTROL_PATH_DIR": self._connections.name,
        }
        return Operator(self._folder, {**os.environ, **environment})

    def _prepare(self, operator: Operator, kind: Kind, options: Sequence[str]) -> None:
        """Make a cluster, and keep it with all that the operator has of it."""
        operator.bare = operator.each(kind.machines, BARE)
        variables = self._folder / "inventory" / "host_vars" / "control-1.yml"
        variables.parent.mkdir(exist_ok=True)
        variables.write_text(yaml.safe_dump(dict(kind.settings)))
        operator.gpunodes("up", *options, limit_s=7200)
        done = operator.lab("snapshot", self.SNAPSHOT, limit_s=1200)
        assert done.returncode == 0, done.stderr
        for folder in (self._folder, self._state):
            shutil.copytree(folder, self._before / folder.name, symlinks=True)
        (self._before / "bare.json").write_text(json.dumps(operator.bare))

    def _restored(self, kind: Kind) -> Operator:
        for folder in (self._folder, self._state):
            shutil.rmtree(folder)
            shutil.copytree(self._before / folder.name, folder, symlinks=True)
        operator = self._new()
        operator.bare = json.loads((self._before / "bare.json").read_text())
        done = operator.lab("restore", self.SNAPSHOT, limit_s=1200)
        assert done.returncode == 0, done.stderr
        wait_for_nodes(operator, kind.machines)
        return operator

    def _down(self) -> None:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        done = Operator(self._root, dict(os.environ)).lab("down", limit_s=600)
        assert done.returncode == 0, done.stderr
        shutil.rmtree(self._root)


def wait_for_nodes(operator: Operator, machines: Sequence[str], limit_s: float = 600.0) -> None:
    """Wait until the nodes are Ready and their kubelets have said so since now: a snapshot has them Ready, too."""
    begun = operator.ssh("control-1", "date --utc +%FT%TZ").strip()
    leases = r"""jsonpath={range .items[*]}{.metadata.name} {.spec.renewTime}{"\n"}{end}"""
    ready = r"""jsonpath={range .items[*]}{.metadata.name} {.status.conditions[?(@.type=="Ready")].status}{"\n"}{end}"""
    deadline = time.monotonic() + limit_s
    while True:
        # The API server may be as late as the kubelets.
        renewed = operator.kubectl("-n", "kube-node-lease", "get", "leases", "-o", leases, code=None)
        states = operator.kubectl("get", "nodes", "-o", ready, code=None)
        alive = {name for name, _, when in map(_parted, lines(renewed)) if when > begun}
        if set(machines) <= alive & {name for name, _, state in map(_parted, lines(states)) if state == "True"}:
            return
        assert time.monotonic() < deadline, f"nodes after a restore: {states}, their kubelets: {renewed}"
        time.sleep(5)


def _parted(line: str) -> tuple[str, str, str]:
    return line.partition(" ")


@pytest.fixture(scope="session")
def labs() -> Iterator[Labs]:
    """The tests' lab; gone at the end."""
    labs = Labs(CHECKOUT / "build" / "machines", keep=bool(os.environ.get("GPUNODES_KEEP_LAB")))
    try:
        yield labs
    finally:
        labs.end()


@pytest.fixture(scope="module")
def operator(request: pytest.FixtureRequest, labs: Labs) -> Operator:
    """An operator with a lab as the module's LAB says."""
    return labs.operator(getattr(request.module, "LAB", Kind()))


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


CANARY = "canary.0123456789abcdef"
"""Has the form of a token. It lies where secrets are searched for: a search that misses it would miss them as well."""
SECRETS = rf"{TOKEN}|PRIVATE KEY-[-]---|client-key-data[:] ."
"""What secrets look like. The pattern does not match itself: sudo logs the command that searches."""
_CANARY_FILE = "/var/log/gpunodes-canary"
_SEARCH = f"""
set -e
export LC_ALL=C
{{ head -c 400000 /dev/zero | tr '\\0' '\\n'; echo {CANARY}; }} >{_CANARY_FILE}
chmod 644 {_CANARY_FILE}
logger {CANARY}
journalctl --sync
echo files
folders='/etc /run /tmp /var/tmp /var/log /root /home /var/lib/gpunodes /var/lib/kubelet'
find $folders -xdev -path /run/udev -prune -o -path '*/log/journal' -prune -o -path /var/lib/kubelet/pods -prune \
  -o -type f -perm /077 -print0 2>/run/find.errors | xargs -0 grep -lE '{SECRETS}' || test $? -eq 123
rm {_CANARY_FILE}
echo journal
journalctl --no-pager --output cat >/run/journal.text
grep -oE '{SECRETS}' /run/journal.text | sort -u
rm /run/journal.text /run/find.errors
echo boots
journalctl --list-boots --no-pager | grep -cE '^ *-?[0-9]+ '
"""


def search_for_secrets(operator: Operator, machines: Sequence[str], boots: Mapping[str, int] | None = None) -> None:
    """Assert that no token, key or kubeconfig lies in what was said, in a log, or in a file that others may read.

    The journals are searched from the first boot on, of which there must be so many as ``boots`` says, else one: a
    machine may have joined in one that it has left. Files may have any size. The mounts of pods are left out: a service
    account's token, which the kubelet puts there, is no secret of ours.
    """
    state = Path(operator.environment["XDG_STATE_HOME"])
    message = "\n".join(operator.message)
    logs = "\n".join(path.read_text(errors="replace") for path in state.rglob("*") if path.is_file())
    for text in (message, logs):
        assert text
        assert re.findall(TOKEN, text) == []
        assert "PRIVATE KEY" not in text
        assert "key-data" not in text
    for path in (state / "gpunodes").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0 or path.parent.stat().st_mode & 0o077 == 0
    for machine, found in operator.each(machines, _SEARCH).items():
        journal, end = found.index("journal"), found.index("boots")
        assert found[1:journal] == [_CANARY_FILE], machine
        assert found[journal + 1 : end] == [CANARY], machine
        assert int(found[-1]) >= (boots or {}).get(machine, 1), f"{machine} has lost the journal of a boot"
