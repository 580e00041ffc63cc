"""Machines for the end-to-end tests: a lab of virtual machines, and the command installed from the wheel.

The tests of a module share one lab and run in the order of the file: each test continues with the state that the
previous one left. A failure therefore stops the module (``-x`` in the Makefile).

A module's ``LAB`` specifies the lab that it needs. If that includes a prepared cluster, all modules with the same
``LAB`` start from one snapshot of it, so that they depend neither on each other nor on the order. With
``GPUNODES_KEEP_LAB`` set the lab is kept after the tests, and the next run starts from its snapshot, even if gpunodes
has changed since: for work on a test.
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

from tests import collection

# Show the values of failed assertions in helpers as well.
pytest.register_assert_rewrite(f"{__package__}.unhealthy", f"{__package__}.availability")

GPUNODES = os.environ.get("GPUNODES", "gpunodes")
CHECKOUT = Path(__file__).parents[2]
# A separate lab: a developer's own lab may be up at the same time.
NAME = "tests"
# Emulated machines under load are slow; these limits only end commands that hang.
LONG = 1500.0
"""Seconds that a run of the command may take."""
SHORT = 240.0
"""Seconds that a single command on a machine may take."""
PATIENCE = 60.0
"""Seconds in which the SSH server of a machine that is up responds."""
UNREACHABLE = 255
"""Exit code of ssh for a machine that is unreachable."""
FORGOTTEN = {"ANSIBLE_HOST_KEY_CHECKING": "False", "ANSIBLE_SSH_COMMON_ARGS": "-o UserKnownHostsFile=/dev/null"}
"""The environment in which plain Ansible leaves host keys out of the files of the account that runs the tests."""
TOKEN = r"\b[a-z0-9]{6}\.[a-z0-9]{16}\b"
"""A bootstrap token of kubeadm."""


@dataclass(slots=True)
class Operator:
    """An administrator's shell in a folder: runs `gpunodes ...`, and ssh to the lab's machines."""

    folder: Path
    environment: dict[str, str]
    output: list[str] = field(default_factory=list)
    """The output of all commands; the search for secrets reads it."""
    bare: dict[str, list[str]] = field(default_factory=dict)
    """``BARE`` of each machine before the cluster was prepared; empty without a prepared cluster."""
    control_planes: tuple[str, ...] = ("control-1",)
    """The lab's control-plane machines; kubectl runs on the first that responds."""

    def gpunodes(
        self, *argv: str, code: int | None = 0, limit_s: float = LONG, given: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, ``given`` in its standard input; asserts its exit code unless ``code`` is None."""
        done = subprocess.run(
            [GPUNODES, *argv],
            cwd=self.folder,
            env=self.environment,
            input=given,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        self.output += [done.stdout, done.stderr]
        print(f"$ gpunodes {' '.join(argv)} -> {done.returncode}\n{done.stdout}{done.stderr}")
        if code is not None:
            assert done.returncode == code, done.stdout + done.stderr
        return done

    def document(self, *argv: str, code: int | None = 0, limit_s: float = LONG) -> dict[str, Any]:
        """Run a command with --json; returns its document, which must be the whole standard output."""
        document: dict[str, Any] = json.loads(self.gpunodes(*argv, "--json", code=code, limit_s=limit_s).stdout)
        return document

    def start(self, *argv: str) -> subprocess.Popen[str]:
        """Start a command in the background; it prints its progress to standard error."""
        return subprocess.Popen(
            [GPUNODES, *argv],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, process: subprocess.Popen[str], text: str, limit_s: float = LONG) -> None:
        """Read a started command's progress until a line contains ``text``."""
        deadline = time.monotonic() + limit_s
        assert process.stderr
        for line in process.stderr:
            self.output.append(line)
            print(line, end="")
            if text in line:
                return
            assert time.monotonic() < deadline, f"no line with {text!r}"
        pytest.fail(f"the command ended before {text!r}")

    def ssh(self, machine: str, command: str, code: int | None = 0, limit_s: float = SHORT) -> str:
        """Run a shell command on a machine as root; returns its output. With ``code`` None any exit code is accepted.

        An unreachable machine gives no output either, so it always fails the test.
        """
        done = self.lab("ssh", machine, f"sudo sh -c {shlex.quote(command)}", limit_s=limit_s)
        assert done.returncode != UNREACHABLE, done.stderr
        if code is not None:
            assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def each(self, machines: Sequence[str], command: str, code: int | None = 0) -> dict[str, list[str]]:
        """Run a shell command on several machines in parallel, as root; returns the lines of each machine's output."""
        with ThreadPoolExecutor(len(machines)) as pool:
            outputs = pool.map(lambda machine: self.ssh(machine, command, code), machines)
            return {machine: lines(text) for machine, text in zip(machines, outputs, strict=True)}

    def lab(self, *argv: str, limit_s: float = SHORT) -> subprocess.CompletedProcess[str]:
        """Run a command of the lab; its output is not searched for secrets."""
        return subprocess.run(
            [GPUNODES, "lab", "--name", NAME, *argv],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def playbook(self, name: str, *arguments: str) -> str:
        """Run a playbook of the built collection with Ansible alone; returns its output."""
        folder = self.folder / "ansible"
        folder.mkdir(exist_ok=True)
        (folder / "ansible.cfg").write_text(collection.CONFIG)
        sockets = "ANSIBLE_SSH_CONTROL_PATH_DIR"
        environment = {**FORGOTTEN, sockets: self.environment[sockets]}
        playbook = f"gpunodes.bootstrap.{name}"
        argv = ("ansible-playbook", "-i", str(self.folder / "inventory"), playbook, *arguments)
        done = collection.run(folder, *argv, environment=environment, limit_s=LONG)
        self.output += [done.stdout, done.stderr]
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def kubectl(self, *argv: str, code: int | None = 0, machine: str | None = None, limit_s: float = SHORT) -> str:
        """Run kubectl on ``machine``, by default the first control plane that has power and a network."""
        if machine is None:
            several = len(self.control_planes) > 1
            machine = self.responding_control_planes()[0] if several else self.control_planes[0]
        return self.ssh(machine, f"kubectl --kubeconfig /etc/kubernetes/admin.conf {shlex.join(argv)}", code, limit_s)

    def responding_control_planes(self) -> tuple[str, ...]:
        """The control planes whose SSH server responds; fails the test if none does.

        One that has power and a network is waited for: under load its server needs more than the lab's 3 seconds, and
        the next one may not be a control plane yet.
        """
        deadline = time.monotonic() + PATIENCE
        while True:
            machines = json.loads(self.lab("status", "--json").stdout)["machines"]
            own = [each for each in machines if each["name"] in self.control_planes]
            slow = [each for each in own if each["power"] == "on" and each["connected"] and not each["ssh"]]
            if not slow or time.monotonic() > deadline:
                break
            time.sleep(1)
        found = tuple(each["name"] for each in own if each["ssh"])
        assert found, own
        return found

    def network(self, machine: str, action: str) -> None:
        """Cut a machine off from the network (``off``), or connect it again (``on``)."""
        done = self.lab("network", machine, action)
        assert done.returncode == 0, done.stderr

    def setting(self, name: str) -> Any:
        """A variable of all machines in the lab's inventory, else the default of that setting."""
        defaults = (CHECKOUT / "roles/settings/defaults/main.yml").read_text()
        given = (self.folder / "inventory/group_vars/all.yml").read_text()
        return {**yaml.safe_load(defaults), **yaml.safe_load(given)}[name]

    def group(self, name: str, *machines: str, **variables: Any) -> None:
        """Let a group of the inventory have these machines and variables. Of its files of groups, commands read one."""
        path = self.folder / "inventory" / "hosts.yml"
        mark, _, text = path.read_text().partition("\n")
        found = yaml.safe_load(text)
        found["all"]["children"][name] = {"hosts": {machine: {} for machine in machines}, "vars": variables}
        path.write_text(f"{mark}\n{yaml.safe_dump(found, sort_keys=False)}")

    def tokens(self) -> list[str]:
        """One "token" for each bootstrap token in the cluster."""
        return self.kubectl("-n", "kube-system", "get", "secrets", "-o", "name").count("bootstrap-token-") * ["token"]


def kill(process: subprocess.Popen[str]) -> None:
    """Send SIGKILL to the command only, as the OOM killer does; its child processes continue."""
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@dataclass(frozen=True, slots=True)
class LabSpec:
    """The lab that a module's tests need."""

    system: str = "debian13"
    workers: int = 2
    kubernetes: str = "1.36"
    """A minor, or several with a space between them: the mirror offers all, the lab's tests choose."""
    control_planes: int = 1
    """One is called control-1; several are cp-1, cp-2, ..."""
    gpu_workers: int = 0
    """Machines with two stand-in GPUs each."""
    up_options: tuple[str, ...] = ()
    """Further options of `lab up`."""
    cluster: tuple[str, ...] | None = None
    """Options of the `gpunodes up` that prepares a cluster for the tests; None: the machines stay bare."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the control planes in the inventory."""

    @property
    def control_plane_names(self) -> tuple[str, ...]:
        """The names of its control planes."""
        several = range(1, self.control_planes + 1)
        return ("control-1",) if self.control_planes == 1 else tuple(f"cp-{number}" for number in several)

    @property
    def machines(self) -> tuple[str, ...]:
        """The names of its machines."""
        workers = [f"worker-{number + 1}" for number in range(self.workers)]
        return (*self.control_plane_names, *workers, *(f"gpu-{number + 1}" for number in range(self.gpu_workers)))


SLOW_RESTARTS = dict.fromkeys(
    ("etcd_restored_timeout", "certificates_renewed_timeout", "control_plane_restart_timeout"), 900
)
"""Settings of a cluster whose static pods are restarted: an emulated API server may need minutes to start."""


class Labs:
    """The tests' lab. One lab is up at a time; all its files are in the folder ``root``."""

    SNAPSHOT = "cluster"

    def __init__(self, root: Path, *, keep: bool) -> None:
        self._root = root
        self._keep = keep
        self._folder, self._state, self._before = root / "folder", root / "state", root / "before"
        self._record = root / "lab.json"
        """The specification of the lab; written when its snapshot exists."""
        self._connections = self._no_connections()
        if not (keep and self._record.exists()):
            self._down()

    def operator(self, spec: LabSpec) -> Operator:
        """An operator with the lab of ``spec``: bare machines, or the cluster as it was prepared."""
        record = json.dumps(asdict(spec), indent=1)
        if self._record.exists() and self._record.read_text() == record:
            return self._restored(spec)
        self._down()
        operator = self._new(spec)
        up = ["up", "--workers", str(spec.workers), "--os", spec.system]
        up += [argument for minor in spec.kubernetes.split() for argument in ("--kubernetes-version", minor)]
        if spec.control_planes > 1:
            up += ["--control-planes", str(spec.control_planes)]
        if spec.gpu_workers:
            up += ["--gpu-workers", str(spec.gpu_workers), "--gpus", "2"]
        done = operator.lab(*up, *spec.up_options, limit_s=3600)
        assert done.returncode == 0, done.stderr
        self._configure(spec)
        if spec.cluster is not None:
            self._prepare(operator, spec, spec.cluster)
            self._record.write_text(record)
        return operator

    def end(self) -> None:
        """Remove the lab, unless it is to be kept."""
        if not self._keep:
            self._down()

    @staticmethod
    def _no_connections() -> tempfile.TemporaryDirectory[str]:
        """A folder for Ansible's SSH control sockets, with a short path: a socket's path is limited to 107 bytes."""
        return tempfile.TemporaryDirectory(prefix="gpunodes-ssh-", ignore_cleanup_errors=True)

    def _new(self, spec: LabSpec) -> Operator:
        """An operator in the lab's folder without open SSH connections: they do not survive a restore."""
        for folder in (self._folder, self._state):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._connections = self._no_connections()
        environment = {
            "XDG_STATE_HOME": str(self._state),
            "KUBECONFIG": str(self._folder / "kube/config"),
            "ANSIBLE_SSH_CONTROL_PATH_DIR": self._connections.name,
        }
        return Operator(self._folder, {**os.environ, **environment}, control_planes=spec.control_plane_names)

    def _configure(self, spec: LabSpec) -> None:
        """Write the settings of the control planes into the inventory."""
        for name in spec.control_plane_names:
            variables = self._folder / "inventory" / "host_vars" / f"{name}.yml"
            variables.parent.mkdir(exist_ok=True)
            variables.write_text(yaml.safe_dump(dict(spec.settings)))

    def _prepare(self, operator: Operator, spec: LabSpec, options: Sequence[str]) -> None:
        """Make a cluster, and save it together with the operator's files."""
        operator.bare = operator.each(spec.machines, BARE)
        operator.gpunodes("up", *options, limit_s=7200)
        done = operator.lab("snapshot", self.SNAPSHOT, limit_s=1200)
        assert done.returncode == 0, done.stderr
        for folder in (self._folder, self._state):
            shutil.copytree(folder, self._before / folder.name, symlinks=True)
        (self._before / "bare.json").write_text(json.dumps(operator.bare))

    def _restored(self, spec: LabSpec) -> Operator:
        for folder in (self._folder, self._state):
            shutil.rmtree(folder)
            shutil.copytree(self._before / folder.name, folder, symlinks=True)
        operator = self._new(spec)
        operator.bare = json.loads((self._before / "bare.json").read_text())
        done = operator.lab("restore", self.SNAPSHOT, limit_s=1200)
        assert done.returncode == 0, done.stderr
        wait_for_nodes(operator, spec.machines)
        return operator

    def _down(self) -> None:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        done = Operator(self._root, dict(os.environ)).lab("down", limit_s=600)
        assert done.returncode == 0, done.stderr
        shutil.rmtree(self._root)


def wait_for_nodes(operator: Operator, machines: Sequence[str], limit_s: float = 600.0) -> None:
    """Wait until the nodes are Ready and have renewed their leases: after a restore stale nodes are Ready as well."""
    started = operator.ssh(operator.control_planes[0], "date --utc +%FT%TZ").strip()
    leases = r"""jsonpath={range .items[*]}{.metadata.name} {.spec.renewTime}{"\n"}{end}"""
    ready = r"""jsonpath={range .items[*]}{.metadata.name} {.status.conditions[?(@.type=="Ready")].status}{"\n"}{end}"""
    deadline = time.monotonic() + limit_s
    while True:
        # The API server may be as slow as the kubelets.
        renewed = operator.kubectl("-n", "kube-node-lease", "get", "leases", "-o", leases, code=None)
        states = operator.kubectl("get", "nodes", "-o", ready, code=None)
        alive = {name for name, _, when in map(_split, lines(renewed)) if when > started}
        if set(machines) <= alive & {name for name, _, state in map(_split, lines(states)) if state == "True"}:
            return
        assert time.monotonic() < deadline, f"nodes after a restore: {states}, their kubelets: {renewed}"
        time.sleep(5)


def _split(line: str) -> tuple[str, str, str]:
    return line.partition(" ")


@pytest.fixture(scope="session")
def labs() -> Iterator[Labs]:
    """The tests' lab; removed at the end."""
    labs = Labs(CHECKOUT / "build" / "machines", keep=bool(os.environ.get("GPUNODES_KEEP_LAB")))
    try:
        yield labs
    finally:
        labs.end()


@pytest.fixture(scope="module")
def operator(request: pytest.FixtureRequest, labs: Labs) -> Operator:
    """An operator with the lab of the module's LAB."""
    return labs.operator(getattr(request.module, "LAB", LabSpec()))


# State that a second run must not change: packages, holds, time, size and mode of each file, start times of services.
STATE = r"""
dpkg-query -W -f '${Package} ${Version} ${Status}\n'; apt-mark showhold
find /etc /opt /usr/local /var/lib/gpunodes /var/lib/kubelet/config.yaml /var/lib/kubelet/kubeadm-flags.env \
  -xdev -type f ! -path /etc/resolv.conf -printf '%p %m %s %T@\n' 2>/dev/null | sort
systemctl show -p ActiveEnterTimestampMonotonic kubelet containerd
"""

# State that a reset must restore: the same without times, with interfaces, mounts, rules and settings. Files such as
# group-, passwd- and those of ucf with a number are the system's backups of earlier versions.
BARE = r"""
dpkg-query -W -f '${Package} ${Version} ${db:Status-Status}\n' | sort; apt-mark showhold
find /etc /opt /usr/local /var/lib -maxdepth 6 -xdev ! -path '/var/lib/dpkg/*' ! -path '/var/lib/apt/*' \
  ! -path '/var/lib/systemd/*' ! -path /etc/resolv.conf ! -path /etc/ld.so.cache ! -path '/var/lib/dhcp/*' \
  ! -path '/var/lib/private*' ! -path '/var/lib/ucf/*.[0-9]' ! -path /etc/group- ! -path /etc/gshadow- \
  -printf '%y %p %m\n' | sort
cd /etc && find . -xdev -type f ! -name 'ld.so.cache' ! -name 'resolv.conf' ! -name group- ! -name gshadow- \
  ! -name passwd- ! -name shadow- -exec sha256sum {} + | sort -k2
ip -o link | cut -d' ' -f2; ip route
iptables-save 2>/dev/null | grep '^-A'; nft list tables 2>/dev/null | grep -v 'ip6\? \(filter\|nat\|mangle\)$'
findmnt -rn -o TARGET | grep -v -e ^/proc -e ^/sys -e ^/run -e ^/dev | sort
sysctl -n net.ipv4.ip_forward; cat /proc/swaps; ls /run | grep -e gpunodes -e flannel; true
"""


def lines(text: str) -> list[str]:
    """The lines of a state, for a readable diff."""
    return [line for line in text.splitlines() if line.strip()]


CANARY = "canary.0123456789abcdef"
"""Has the form of a token. It is placed where secrets are searched for: the search must find it."""
SECRETS = r"(^|[^-a-z0-9])[a-z0-9]{6}\.[a-z0-9]{16}\b|PRIVATE KEY-[-]---|client-key-data[:] ."
"""Pattern of secrets. It does not match itself: sudo logs the search command. A token has no dash before it: a slow API
server logs the names of events, as metrics-server.TIME."""
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
grep -oE '{SECRETS}' /run/journal.text | sed 's/^[^a-zA-Z0-9]//' | sort -u
rm /run/journal.text /run/find.errors
echo boots
journalctl --list-boots --no-pager | grep -cE '^ *-?[0-9]+ '
"""


def search_for_secrets(operator: Operator, machines: Sequence[str], boots: Mapping[str, int] | None = None) -> None:
    """Assert that no token, key or kubeconfig is in an output, in a log, or in a file that other users may read.

    The journals of all boots are searched; there must be at least as many as ``boots`` says (default: one), since a
    machine may have joined in an earlier boot. Files may have any size. The mounts of pods are skipped: the kubelet
    puts service account tokens there, which are not secrets of gpunodes.
    """
    state = Path(operator.environment["XDG_STATE_HOME"])
    output = "\n".join(operator.output)
    logs = "\n".join(path.read_text(errors="replace") for path in state.rglob("*") if path.is_file())
    for text in (output, logs):
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
        assert int(found[-1]) >= (boots or {}).get(machine, 1), f"the journal of a boot is missing on {machine}"
