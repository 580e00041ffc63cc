"""GPU hosts: machines of the group gpu_hosts, which have no cluster and are not meant to be nodes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from gpunodes.ansible.module_utils import command_lock
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.engine import locks, runner
from gpunodes.engine.remote import commands, shell
from gpunodes.engine.remote.commands import Become, RemoteCommand
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.inventory import Inventory, edit
from gpunodes.model import Machine, Only, PreflightFinding, Role
from gpunodes.operations import claims, gpu_install, nodes, phases, preflight, status
from gpunodes.operations import run as running
from gpunodes.planner.candidates import ClusterRequirements, MachineFacts
from gpunodes.planner.gpu import RequestedSoftware
from gpunodes.planner.preflight import judge

from tests.command import run as gpunodes
from tests.stand_ins import Silent, facts

HOSTS = [Machine(f"h{index}", f"addr-h{index}", Role.GPU_HOST) for index in range(3)]
WORKER = Machine("w0", "addr-w0", Role.WORKER)
MIXED = "control_plane: {hosts: {c0: }}\nworkers: {hosts: {w0: }}\ngpu_hosts: {hosts: {h0: , h1: }}\n"
NODE = {"role": "worker", "ca_hash": None, "server": "https://10.0.0.1:6443"}


def inventory(folder: Path, text: str = MIXED) -> Inventory:
    path = folder / "hosts.yml"
    path.write_text(text)
    return Inventory(path)


# The inventory


def test_the_group_decides_the_role(tmp_path: Path) -> None:
    found = inventory(tmp_path)
    assert [machine.name for machine in found.machines(Role.GPU_HOST)] == ["h0", "h1"]
    assert found.controls_of(found.machines(Role.GPU_HOST)) == []
    assert [control.name for control in found.controls_of(found.machines())] == ["c0"]
    alone = inventory(tmp_path, "gpu_hosts: {hosts: {h0: }}\n")
    assert alone.controls_of(alone.machines()) == []
    with pytest.raises(WrongInput, match="GPU machines without a cluster belong in the group gpu_hosts"):
        inventory(tmp_path, "workers: {hosts: {w0: }}\n").controls_of([WORKER])


@pytest.mark.parametrize("group", ["workers", "control_plane"])
def test_a_machine_is_a_gpu_host_or_a_machine_of_the_cluster(tmp_path: Path, group: str) -> None:
    with pytest.raises(WrongInput, match="h0 in the group gpu_hosts and in control_plane or workers"):
        inventory(tmp_path, f"gpu_hosts: {{hosts: {{h0: }}}}\n{group}: {{hosts: {{h0: }}}}\n")


@pytest.mark.parametrize("pattern", ["h0", "h*", "all", "gpu_hosts"])
@pytest.mark.parametrize("command", ["join", "remove"])
def test_no_command_takes_a_gpu_host_for_a_worker(tmp_path: Path, command: str, pattern: str) -> None:
    inventory(tmp_path, "workers: {hosts: {w0: }}\ngpu_hosts: {hosts: {h0: , h1: }}\n")
    done = gpunodes(tmp_path, command, pattern, "-i", "hosts.yml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "h0 is not in the group control_plane or workers of hosts.yml" in done.stderr


def test_up_does_not_take_gpu_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpunodes.cli import common, up

    inventory(tmp_path)
    chosen: list[str] = []

    def execute(_: Any, __: Any, machines: Any, *___: Any) -> int:
        chosen.extend(machine.name for machine in machines)
        return 0

    monkeypatch.setattr(common, "execute", execute)
    up.command.main(["-i", str(tmp_path / "hosts.yml")], standalone_mode=False)
    assert chosen == ["c0", "w0"]


def test_addresses_are_added_as_gpu_hosts_with_the_connection_of_those_before(tmp_path: Path) -> None:
    path = tmp_path / "inventory" / "hosts.yml"
    edit.add(path, Role.GPU_HOST, ["10.0.0.1"], {"ansible_user": "ann"})
    edit.add(path, Role.GPU_HOST, ["10.0.0.2"], {})
    assert yaml.safe_load(path.read_text()) == {
        "gpu_hosts": {
            "hosts": {address: {"ansible_host": address, "ansible_user": "ann"} for address in ("10.0.0.1", "10.0.0.2")}
        }
    }
    edit.add(path, Role.CONTROL_PLANE, ["10.0.0.3"], {"ansible_user": "bob"})
    edit.add(path, Role.WORKER, ["10.0.0.4"], {})
    assert yaml.safe_load(path.read_text())["workers"]["hosts"]["10.0.0.4"]["ansible_user"] == "bob"


# Bad input


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("gpu install h0 w0", "h0 is a GPU host, and w0 belongs to a cluster; wanted: GPU hosts, or machines of the"),
        ("gpu remove all --yes", "h0 is a GPU host, and c0 belongs to a cluster"),
        ("reset all --yes", "h0 is a GPU host, and c0 belongs to a cluster"),
        ("gpu install h0 --user ann", "gpunodes did not create hosts.yml"),
        ("gpu install 10.0.0.9 --runtime docker", "10.0.0.9 is not in hosts.yml; wanted: a machine of the inventory"),
        ("gpu install h9", "'h9' matches no machine of hosts.yml"),
        ("gpu install h0;id", "'h0;id' is not the name, address or pattern of a machine"),
    ],
)
def test_bad_input_is_a_sentence(tmp_path: Path, command: str, message: str) -> None:
    inventory(tmp_path)
    done = gpunodes(tmp_path, *command.split(), "-i", "hosts.yml")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert (tmp_path / "hosts.yml").read_text() == MIXED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpu-*",), "'gpu-*' is not an address"),
        (("10.0.0.300",), "'10.0.0.300' is not an address"),
        (("10.0.0.1", "--user", "a b"), "'a b' is not a user name"),
        (("10.0.0.1", "--driver", "1"), "the driver branch '1' is unknown"),
        (("10.0.0.1", "--skip-phase", "worker"), "worker"),
    ],
)
def test_bad_input_creates_no_inventory(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = gpunodes(tmp_path, "gpu", "install", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


def finding(check: str, machine: str) -> PreflightFinding:
    return PreflightFinding(machine, check, Problem("it is otherwise", "this", "do that"))


DOCKER = running.RunOptions(variables={"gpunodes_runtime": "docker"})


@pytest.mark.parametrize(
    ("found", "machine", "options", "refused"),
    [
        ("runtime", WORKER, DOCKER, True),
        # The setting of the inventory: an error of preflight, among others.
        ("runtime", WORKER, running.RunOptions(), False),
        ("cluster", HOSTS[0], running.RunOptions(), True),
        ("cluster", WORKER, DOCKER, False),
        ("disk", HOSTS[0], DOCKER, False),
    ],
)
def test_a_request_that_contradicts_a_machine_is_wrong_input(
    found: str, machine: Machine, options: running.RunOptions, refused: bool
) -> None:
    expected = pytest.raises(WrongInput, match="it is otherwise; wanted: this")
    with expected if refused else contextlib.nullcontext():
        running._check_request([finding(found, machine.name)], [machine], options)


# Preflight


def checks(changes: Mapping[str, Any], runtime: str = "containerd") -> list[str]:
    requested = RequestedSoftware("", runtime=runtime)
    candidate = MachineFacts("h0", Role.GPU_HOST, facts(**{"gpu": {"functions": []}, **changes}), requested=requested)
    return [each.check for each in judge([candidate], ClusterRequirements("1.36"))]


@pytest.mark.parametrize(
    "changes",
    [
        {"cpus": 0, "memory_mib": 100, "cgroup": 1, "swap": ["/dev/x"], "hostname": "gpu_1", "listening": [10250]},
        {"modules": {"overlay": "missing", "br_netfilter": "missing"}},
        {"packages": {"kubelet": "1.20.0-1", "kubeadm": None}},
        {"sources": [{"name": "kubernetes", "url": "http://m", "ok": False, "error": "no route"}]},
        {"sources": [{"name": "images of ghcr.io", "url": "http://m", "ok": False, "error": "no route"}]},
        {"sources": [{"name": "docker", "url": "http://m", "ok": False, "error": "no route"}]},
    ],
)
def test_what_only_nodes_need_is_not_checked(changes: Mapping[str, Any]) -> None:
    assert checks(changes) == []


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"os": {"id": "arch", "version": None, "codename": None, "name": "Arch Linux"}}, "os"),
        ({"disks": [{"path": "/usr", "device": 1, "mount": "/", "free_mib": 100}]}, "disk"),
        ({"kubernetes": NODE}, "cluster"),
        ({"sources": [{"name": "docker", "url": "http://m", "ok": False, "error": "no route"}]}, "sources"),
    ],
)
def test_what_a_gpu_host_needs_is_checked(changes: Mapping[str, Any], check: str) -> None:
    assert checks(changes, "docker") == [check]


def test_gpu_hosts_may_be_copies_of_each_other() -> None:
    candidates = [MachineFacts(name, Role.GPU_HOST, facts(gpu={"functions": []})) for name in ("h0", "h1")]
    assert judge(candidates, ClusterRequirements("1.36")) == []


# Commands


def seen(machine: Machine, kubernetes: Mapping[str, Any], control: str = "") -> preflight.Inspection:
    candidate = MachineFacts(machine.name, machine.role, facts(kubernetes=kubernetes))
    return preflight.Inspection([candidate], control, None, None, "", interrupted=False, log=Path("log"))


@pytest.mark.parametrize("needs_cluster", [False, True])
def test_a_gpu_host_that_is_a_node_is_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs_cluster: bool
) -> None:
    """Not even by reset: its cluster would not be asked, and other commands on its node not be excluded."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    host = inventory(tmp_path).machines(Role.GPU_HOST)[:1]
    monkeypatch.setattr(preflight, "inspect", lambda *_, **__: seen(host[0], NODE))
    with pytest.raises(GpunodesError, match=r"h0 is in the group gpu_hosts, and runs as a node of https://10\.0\.0\.1"):
        nodes.choose("reset", inventory(tmp_path), host, Silent(), needs_cluster=needs_cluster)
    free = {"role": None, "ca_hash": None, "server": None}
    monkeypatch.setattr(preflight, "inspect", lambda *_, **__: seen(host[0], free))
    chosen = nodes.choose("reset", inventory(tmp_path), host, Silent(), needs_cluster=needs_cluster)
    assert chosen.lines == ["h0: a GPU host, not a node"]


def test_only_the_hosts_themselves_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    plays: list[runner.Play] = []

    def run(play: runner.Play, *_: Any) -> runner.PlayResult:
        plays.append(play)
        return runner.PlayResult(ok=True, interrupted=False, log=tmp_path / "log")

    monkeypatch.setattr(runner, "run", run)
    found = inventory(tmp_path)
    seen = preflight.inspect(found, found.machines(Role.GPU_HOST), tmp_path, Silent(), {})
    assert (seen.control, seen.cluster) == ("", None)
    assert [play.machines for play in plays] == [["h0", "h1"]]


def test_phases_of_nodes_do_not_apply_to_hosts(tmp_path: Path) -> None:
    found = inventory(tmp_path)
    hosts = found.machines(Role.GPU_HOST)
    options = running.RunOptions(variables={"gpunodes_runtime": "docker"})
    applicable = running._applicable(gpu_install.OPERATION, found, hosts, options, [])
    skipped = phases.not_applicable(gpu_install.OPERATION.phases, {"h0", "h1"}, applicable)
    assert [name for name, names in skipped.items() if names] == [
        "cuda",
        "gpu_idle",
        "pool",
        "device_plugin",
        "gpu_node",
    ]
    # By facts: on a machine with Docker its users are still members of the group docker.
    there = facts(gpu={"functions": [], "runtimes": {"docker.io": "26.1"}})
    by_facts = running._by_facts({"h0": there, "h1": facts(gpu={"functions": []})}, {Only.DOCKER: set()})
    assert by_facts[Only.WITH_DOCKER] == {"h0"}
    assert by_facts[Only.NODES] == set()


@pytest.mark.parametrize("command", ["status", "kubeconfig", "etcd backup"])
def test_commands_of_a_cluster_name_an_inventory_without_one(command: str, tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text("gpu_hosts: {hosts: {h0: }}\n")
    done = gpunodes(tmp_path, *command.split(), "-i", "hosts.yml")
    assert done.returncode == 2
    assert (
        "has only GPU hosts (1), which have no cluster; wanted: an inventory with the group control_plane"
        in done.stderr
    )


def test_status_reports_gpu_hosts_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(WrongInput, match=r"has only GPU hosts \(1\), which have no cluster"):
        status.run(inventory(tmp_path, "gpu_hosts: {hosts: {h0: }}\n"), Silent())
    ended = runner.PlayResult(ok=True, interrupted=False, log=tmp_path / "log")
    monkeypatch.setattr(runner, "run", lambda *_: ended)
    report = {"endpoint": "10.0.0.1:6443", "version": "v1.36.3", "nodes": []}
    monkeypatch.setattr(status, "checked_cluster", lambda *_: report)
    found = status.run(inventory(tmp_path), Silent())
    assert (found.missing, found.gpu_hosts) == (["c0", "w0"], ["h0", "h1"])


# Locks


class Held:
    """The locks on the machines, by address."""

    def __init__(self) -> None:
        self.taken: dict[str, str] = {}
        self.lost: dict[str, GpunodesError] = {}

    @contextlib.contextmanager
    def hold(self, address: str, _: Any, command: str, *, restarts: bool, machine: str) -> Iterator[Any]:
        assert restarts, "the driver may need a reboot"
        if address in self.taken:
            raise locks.Taken({"command": self.taken[address]}, machine)
        self.taken[address] = command
        try:
            yield SimpleNamespace(lost=lambda: self.lost.get(machine))
        finally:
            del self.taken[address]


PLACE: Any = SimpleNamespace(connection=lambda _: {})


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    made = Held()
    monkeypatch.setattr(locks, "hold", made.hold)
    return made


def test_commands_on_gpu_hosts_exclude_each_other_on_the_same_machine(held: Held) -> None:
    with claims.claimed_hosts(PLACE, HOSTS[:2], "gpu install"):
        assert set(held.taken) == {"addr-h0", "addr-h1"}
        with claims.claimed_hosts(PLACE, HOSTS[2:], "reset"):
            assert set(held.taken) == {"addr-h0", "addr-h1", "addr-h2"}
        with (
            pytest.raises(locks.Taken, match="another command works on h1: gpu install"),
            claims.claimed_hosts(PLACE, HOSTS[1:], "reset"),
        ):
            pass
        assert set(held.taken) == {"addr-h0", "addr-h1"}, "what was taken is released again"
    assert held.taken == {}


def test_a_lost_lock_ends_the_command_and_a_reboot_does_not(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "PATIENCE_S", 0.0)
    with claims.claimed_hosts(PLACE, HOSTS[:2], "gpu install") as claim:
        assert claim.lost() is None
        held.lost["h1"] = locks.Unresponsive("no response for 50 s")
        monkeypatch.setattr(claims, "PATIENCE_S", 60.0)
        assert claim.lost(at_work=True) is None
        assert claim.unrenewed is not None
        assert claim.unrenewed.machine == "h1"
        monkeypatch.setattr(claims, "PATIENCE_S", 0.0)
        assert claim.lost() is held.lost["h1"]
        held.lost["h0"] = locks.Taken({"command": "reset"}, "h0")
        monkeypatch.setattr(claims, "PATIENCE_S", 60.0)
        assert claim.lost(at_work=True) is held.lost["h0"]


def test_the_lock_of_a_machine_is_named_in_its_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that holds it is run here, without SSH."""
    monkeypatch.setattr(command_lock, "PATH", str(tmp_path / "lock"))
    monkeypatch.setattr(shell, "command", lambda *_: ["sh", "-c"])
    remote = commands.remote

    def without_root(argv: Any, _variables: object, _: Become, stdin: bytes, *, marks: bool) -> RemoteCommand:
        return remote([sys.executable, *argv[1:]], {}, Become.NEVER, stdin, marks=marks)

    monkeypatch.setattr(commands, "remote", without_root)
    with claims.claimed_hosts(PLACE, HOSTS[:1], "gpu install") as claim:
        assert claim.lost() is None
        with (
            pytest.raises(locks.Taken, match="another command works on h0: gpu install of "),
            claims.claimed_hosts(PLACE, HOSTS[:1], "reset"),
        ):
            pass
    monkeypatch.setattr(shell, "command", lambda *_: ["false"])
    with (
        pytest.raises(locks.NoLock, match="cannot take the lock of h0 on the machine addr-h0: "),
        claims.claimed_hosts(PLACE, HOSTS[:1], "reset"),
    ):
        pass
