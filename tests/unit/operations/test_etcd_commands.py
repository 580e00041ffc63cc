"""`etcd restore`, `certs`, `certs renew` and the members of etcd in `status`: what the commands decide and show."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from gpunodes.cli import common, root, status, terminal
from gpunodes.cli.certs import renew as renew_command
from gpunodes.engine.remote import stream
from gpunodes.errors import ExitCode, GpunodesError, WrongInput
from gpunodes.identity import matcher
from gpunodes.identity.model import NodeIdentity
from gpunodes.inventory import Inventory
from gpunodes.model import MachineResult, Outcome, Role, RunResult, printable
from gpunodes.operations import kubeconfig, nodes, preflight
from gpunodes.operations import status as cluster_status
from gpunodes.operations.certs import ends, renew
from gpunodes.operations.etcd import restore
from gpunodes.planner.candidates import MachineFacts
from gpunodes.views import certificates as view

from tests.hostile import ATTACKS, is_plain
from tests.unit.operations.test_etcd_archive import ABOUT, made, snapshot

SHA = hashlib.sha256(snapshot()).hexdigest()


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hosts.yml"
    path.write_text("control_plane: {hosts: {control-1: {}}}\nworkers: {hosts: {gpu-1: {}}}\n")
    (tmp_path / "b.tar").write_bytes(made())
    return Inventory(path)


def run(inventory: Inventory, *words: str) -> Result:
    return CliRunner().invoke(root, [*words, "-i", str(inventory.path)], standalone_mode=False)


# Restore

RECEIVES = f"""
import hashlib, sys
out = sys.stdout
print(); print("gpunodes-answer-follows", flush=True)
sys.stdin.buffer.readline()
print('{{"state": "send"}}', flush=True)
data = sys.stdin.buffer.read({len(snapshot())})
open("received", "wb").write(data)
print('{{"state": "present"}}', flush=True)
"""
# It reads its start first, as the program on a machine does: one that has ended takes no data.
ANSWERS = """
import sys; sys.stdin.readline(); print(); print("gpunodes-answer-follows"); print({!r}, flush=True)
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The program that runs in the place of that on the machine; the options of each exchange follow it."""
    programs = [RECEIVES]

    def started(name: str, _: str, __: Any, program: str, options: Any) -> stream.Stream:
        assert program == "etcd_upload"
        programs.append(json.dumps(options))
        (tmp_path / "machine.py").write_text(programs[0])
        return stream.Stream(name, [sys.executable, str(tmp_path / "machine.py")], b"\n")

    monkeypatch.setattr(stream, "over_ssh", started)
    return programs


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options with which the playbook would run."""
    done: list[Any] = []

    def carry_out(operation: Any, _: Any, machines: Any, __: Any, options: Any) -> RunResult:
        done.append(options)
        results = [MachineResult(each.name, Outcome.CHANGED) for each in machines]
        return RunResult(operation.name, results, dry_run=options.dry_run)

    seen = preflight.Inspection((), "control-1", None, None, "", False, Path())
    monkeypatch.setattr(common, "carry_out", carry_out)
    monkeypatch.setattr(nodes, "choose", lambda *_, **__: nodes.Chosen(seen, {}))
    return done


def test_a_restore_needs_a_confirmation(inventory: Inventory, machine: list[str], carried: list[Any]) -> None:
    assert "is not confirmed" in str(run(inventory, "etcd", "restore", "b.tar").exception)
    assert len(machine) == 1
    assert carried == []


def test_a_confirmed_restore_sends_the_snapshot(inventory: Inventory, machine: list[str], carried: list[Any]) -> None:
    done = run(inventory, "etcd", "restore", "b.tar", "--yes")
    assert done.return_value == ExitCode.DONE, done.exception
    assert Path("received").read_bytes() == snapshot()
    options = {"size": len(snapshot()), "sha256": SHA, "ca_hash": ABOUT["ca_hash"], "etcd": "3.6.8"}
    assert json.loads(machine[1]) == options
    assert carried[0].variables["etcd_restored_snapshot"] == SHA
    assert carried[0].variables["etcd_restored_revision"] == 7
    assert carried[0].variables["etcd_stopped_version"] == "3.6.8"


def test_a_dry_run_sends_nothing(inventory: Inventory, machine: list[str], carried: list[Any]) -> None:
    assert run(inventory, "etcd", "restore", "b.tar", "--dry-run").return_value == ExitCode.DONE
    assert len(machine) == 1
    assert carried[0].dry_run


def test_a_damaged_file_is_refused_before_any_machine_is_contacted(
    inventory: Inventory, machine: list[str], carried: list[Any]
) -> None:
    data = bytearray(made())
    data[2000] ^= 1
    Path("b.tar").write_bytes(data)
    error = run(inventory, "etcd", "restore", "b.tar", "--yes").exception
    assert isinstance(error, WrongInput)
    assert len(machine) == 1
    assert carried == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ('{"error": {"found": "another CA", "wanted": "this", "remedy": "that"}}', "control-1: another CA"),
        ('{"error": "x"}', "its report is invalid"),
        ('{"state": "x"}', "its report is invalid"),
        ("[]", "something else than the program's output"),
    ],
)
def test_an_error_of_the_machine_ends_the_restore(
    inventory: Inventory, machine: list[str], carried: list[Any], answer: str, message: str
) -> None:
    machine[0] = ANSWERS.format(answer)
    assert message in str(run(inventory, "etcd", "restore", "b.tar", "--yes").exception)
    assert carried == []


def test_a_snapshot_that_is_there_is_not_sent_again(
    inventory: Inventory, machine: list[str], carried: list[Any]
) -> None:
    machine[0] = ANSWERS.format('{"state": "present"}')
    assert run(inventory, "etcd", "restore", "b.tar", "--yes").return_value == ExitCode.DONE
    assert not Path("received").exists()
    assert carried


def test_a_file_that_changes_after_its_check_is_refused(inventory: Inventory, machine: list[str]) -> None:
    assert machine
    source = restore.Source(Path("b.tar"))
    backup = source.check()
    Path("b.tar").write_bytes(made({"etcd/snapshot.db": snapshot(400 << 10)}))
    with pytest.raises(GpunodesError, match="has changed"):
        restore.upload(inventory, source, backup, lambda _: None)


def test_control_planes_that_do_not_respond_stop_a_restore_before_anything(
    inventory: Inventory, machine: list[str], carried: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy is the way out of a lost quorum: what is gone for good leaves the inventory."""
    read = [
        MachineFacts("control-1", Role.CONTROL_PLANE, {}),
        MachineFacts("control-2", Role.CONTROL_PLANE, None, "no route to host"),
    ]
    seen = preflight.Inspection(read, "control-1", None, None, "", False, Path())
    monkeypatch.setattr(nodes, "choose", lambda *_, **__: nodes.Chosen(seen, {}))
    error = run(inventory, "etcd", "restore", "b.tar", "--yes").exception
    assert isinstance(error, GpunodesError)
    assert error.problem.found == "control-2 cannot be read: control-2: no route to host"
    assert "take them out of the inventory, and run the same command again" in error.problem.remedy
    assert carried == []
    assert len(machine) == 1, "nothing was sent"


@pytest.mark.parametrize("ready", [True, False])
def test_a_control_plane_that_the_inventory_does_not_know_stops_a_restore(
    inventory: Inventory, machine: list[str], carried: list[Any], monkeypatch: pytest.MonkeyPatch, ready: bool
) -> None:
    """An old copy of the inventory: the others would go on with the cluster's old state."""
    listed = [
        {"name": "cp-1", "role": "control_plane", "ready": True},
        {"name": "cp-2", "role": "control_plane", "ready": ready},
        {"name": "w-1", "role": "worker", "ready": True},
    ]
    seen = preflight.Inspection((), "control-1", {"nodes": listed}, None, "", False, Path())
    matched = {"control-1": matcher.Match(NodeIdentity("cp-1"), "boot id")}
    monkeypatch.setattr(nodes, "choose", lambda *_, **__: nodes.Chosen(seen, matched))
    done = run(inventory, "etcd", "restore", "b.tar", "--yes")
    if ready:
        assert isinstance(done.exception, GpunodesError)
        assert "control planes that are not in the inventory: cp-2" in done.exception.problem.found
        assert carried == []
        assert len(machine) == 1, "nothing was sent"
    else:
        # Only its kubelet may have stopped.
        assert "warning: the control plane cp-2 is not in the inventory" in done.stderr
        assert done.return_value == ExitCode.DONE


@pytest.mark.parametrize("attack", ATTACKS, ids=ascii)
@pytest.mark.parametrize("ready", [True, False])
def test_what_a_restore_hears_is_shown_as_text(
    inventory: Inventory,
    machine: list[str],
    carried: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ready: bool,
    attack: str,
) -> None:
    """The names of nodes, and what a machine says of the snapshot, or of its facts."""

    def shown(*words: str) -> str:
        done = run(inventory, "etcd", "restore", *words, "--yes")
        if isinstance(done.exception, GpunodesError):
            terminal.error(done.exception)
        return done.stdout + done.stderr + capsys.readouterr().err

    machine[0] = ANSWERS.format(json.dumps({"error": dict.fromkeys(("found", "wanted", "remedy"), attack)}))
    listed = [{"name": attack, "role": "control_plane", "ready": ready}]
    seen = preflight.Inspection((), "control-1", {"nodes": listed}, None, "", False, Path())
    matched = {"control-1": matcher.Match(NodeIdentity(f"x{attack}"), attack)}
    monkeypatch.setattr(nodes, "choose", lambda *_, **__: nodes.Chosen(seen, matched))
    said = shown("b.tar")
    assert "not in the inventory" in said
    assert is_plain(said)
    assert ready or f"control-1: {printable(attack)}".strip() in said, "the machine's error"
    read = [MachineFacts("control-1", Role.CONTROL_PLANE, None, attack)]
    silent = preflight.Inspection(read, "control-1", None, None, "", False, Path())
    monkeypatch.setattr(nodes, "choose", lambda *_, **__: nodes.Chosen(silent, {}))
    for words in (("b.tar",), ("--abort",)):
        said = shown(*words)
        assert "control-1 cannot be read" in said
        assert is_plain(said)
    assert carried == []


@pytest.mark.usefixtures("machine", "carried")
def test_a_restore_goes_on_whatever_the_snapshot_says_of_nodes(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restored API server has the nodes of control planes that are gone, ready as they were."""
    listed = [{"name": "cp-2", "role": "control_plane", "ready": True}]
    seen = dataclasses.replace(restores(control_1="unfinished"), cluster={"nodes": listed})
    monkeypatch.setattr(nodes, "choose", lambda *_, **__: nodes.Chosen(seen, {}))
    done = run(inventory, "etcd", "restore", "b.tar", "--yes")
    assert done.return_value == ExitCode.DONE
    assert "warning: the control plane cp-2 is not in the inventory" in done.stderr


def restores(**states: str) -> preflight.Inspection:
    """What control planes report of restores of etcd."""
    read = [
        MachineFacts(name.replace("_", "-"), Role.CONTROL_PLANE, {"kubernetes": {"restore": state}})
        for name, state in states.items()
    ]
    return preflight.Inspection(read, "control-1", None, None, "", False, Path())


@pytest.mark.parametrize(
    ("states", "refusal"),
    [
        ({"control_1": "unfinished"}, ""),
        # The stop has failed on one: it runs with the old data.
        ({"control_1": "", "control_2": "unfinished"}, ""),
        # An abort that was interrupted; the first one had been restored once before.
        ({"control_1": "done", "control_2": "aborted"}, ""),
        ({"control_1": "unfinished", "control_2": "aborted"}, ""),
        ({"control_1": "done", "control_2": "unfinished"}, "a restore has ended on control-1"),
        ({"control_1": "done", "control_2": ""}, "no restore of etcd is unfinished"),
        ({"control_1": ""}, "no restore of etcd is unfinished"),
    ],
)
def test_an_abort_never_makes_a_second_cluster(
    inventory: Inventory, carried: list[Any], monkeypatch: pytest.MonkeyPatch, states: dict[str, str], refusal: str
) -> None:
    """With the old data, what the restored control plane left stopped would be a quorum of the old cluster."""
    monkeypatch.setattr(nodes, "choose", lambda *_, **__: nodes.Chosen(restores(**states), {}))
    done = run(inventory, "etcd", "restore", "--abort", "--yes")
    assert (done.return_value == ExitCode.DONE) is not bool(refusal)
    if refusal:
        assert refusal in str(done.exception)
    assert len(carried) == (0 if refusal else 1)


@pytest.mark.parametrize("words", [[], ["b.tar", "--abort"], ["--abort", "--identity", "b.tar"]])
def test_a_restore_has_a_file_and_an_abort_has_none(inventory: Inventory, words: list[str]) -> None:
    assert isinstance(run(inventory, "etcd", "restore", *words, "--yes").exception, WrongInput)


def test_the_other_control_planes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "h.yml"
    path.write_text("control_plane: {hosts: {a: {}, b: {}, c: {}}}\n")
    steps = restore.next_steps(Inventory(path))
    assert steps == ["gpunodes reset b && gpunodes join b", "gpunodes reset c && gpunodes join c"]


# Certificates


def row(days: float, **changes: Any) -> dict[str, Any]:
    return {
        "name": "apiserver",
        "path": "/etc/x",
        "subject": "kube-apiserver",
        "not_after": int(days * 86400),
        "problem": "",
        "renewal": "renew",
        **changes,
    }


def test_certificates_are_shown_the_first_to_end_first() -> None:
    report = [row(300, name="ca", renewal="none"), row(10), row(5, name="admin.conf", not_after=None, problem="x")]
    found = [ends.assemble("control-1", report, "", 0.0), ends.assemble("gpu-1", None, "unreachable", 0.0)]
    assert [each.name for each in found[0].certificates] == ["admin.conf", "apiserver", "ca"]
    text = view.table(found, None)
    assert "1970-01-11 00:00  10    gpunodes certs renew" in text
    assert "control-1: the certificate apiserver ends 1970-01-11" in text
    assert "gpu-1: unreachable" in text
    assert ends.exit_code(found) == ExitCode.PARTLY
    document = json.loads(view.dump(found, 3))
    assert document["machines"][0]["certificates"][1]["days"] == 10


def test_the_exit_code_says_whether_a_person_must_act() -> None:
    good, soon = ends.assemble("a", [row(100)], "", 0.0), ends.assemble("b", [row(29)], "", 0.0)
    lost = ends.assemble("c", [{"name": "\x1b[2J"}], "", 0.0)
    assert lost.certificates == ()
    assert "invalid" in lost.cause
    assert [ends.exit_code(each) for each in ([good], [good, soon], [good, lost], [lost])] == [0, 3, 3, 1]


@pytest.mark.parametrize("words", [["certs", "-i", "x.yml", "renew"], ["certs", "--json", "renew"]])
def test_options_before_the_sub_command_are_refused(inventory: Inventory, words: list[str]) -> None:
    """`certs -i OTHER renew` must not renew the certificates of the default inventory."""
    error = run(inventory, *words).exception
    assert isinstance(error, WrongInput)
    assert "options before the sub-command" in str(error)


def test_a_sub_command_has_its_own_inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`certs renew -i OTHER` read the default inventory first, and contacted its machines."""
    monkeypatch.chdir(tmp_path)
    error = CliRunner().invoke(root, ["certs", "renew", "-i", "other.yml"], standalone_mode=False).exception
    assert isinstance(error, WrongInput)
    assert "no inventory at other.yml" in str(error)


def test_a_control_plane_that_does_not_respond_is_named_with_what_to_do(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory.path.write_text("control_plane: {hosts: {control-1: {}, control-2: {}, control-3: {}}}\n")
    off = MachineResult("control-2", Outcome.UNREACHABLE, cause="no route to host")
    done = [MachineResult(f"control-{number}", Outcome.CHANGED) for number in (1, 3)]
    monkeypatch.setattr(renew_command, "carry_out", lambda *_: RunResult("certs renew", [off, *done], log="log"))
    monkeypatch.setattr(renew, "refresh", lambda _: "fetched")
    found = run(inventory, "certs", "renew")
    assert found.return_value == ExitCode.PARTLY
    assert "control-2  UNREACHABLE  no route to host" in found.stdout
    assert found.stderr.splitlines()[-1] == (
        "control-2 has its old certificates: start it, then run `gpunodes certs renew control-2`"
    )


def config(ca: str) -> dict[str, Any]:
    cluster = {"name": "c", "cluster": {"certificate-authority-data": ca, "server": "https://x"}}
    return {"clusters": [cluster], "users": [], "contexts": [], "current-context": "c"}


@pytest.mark.parametrize(
    ("own", "written"),
    [(config("ours"), True), (config("theirs"), False), ([], False), ({"clusters": [1]}, False), (None, False)],
)
def test_only_this_cluster_s_kubeconfig_is_fetched_again(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: Any, written: bool
) -> None:
    path = tmp_path / ".kube/gpunodes.conf"
    if own is not None:
        path.parent.mkdir()
        path.write_text(yaml.safe_dump(own))
    monkeypatch.setattr(kubeconfig, "fetch", lambda _: {**config("ours"), "users": ["new"]})
    said = renew.refresh(inventory)
    assert ("has the new certificate" in said) is written
    assert "`gpunodes kubeconfig`" in said
    assert path.exists() is (own is not None)
    assert not path.exists() or ("new" in path.read_text()) is written
    if written:
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_kubeconfig_that_cannot_be_fetched_is_said_to_be_stale(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(_: Inventory) -> None:
        raise GpunodesError("no connection")

    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube/gpunodes.conf").write_text(yaml.safe_dump(config("ours")))
    monkeypatch.setattr(kubeconfig, "fetch", fails)
    assert "is stale: no connection" in renew.refresh(inventory)


def test_preflight_warns_of_certificates_of_the_control_plane() -> None:
    cluster = {"version": "v1.36.3", "nodes": [], "ca_hash": "", "endpoint": "", "certificates": [row(1)]}
    seen = preflight.Inspection((), "control-1", cluster, None, "", False, Path())
    found = preflight.judge(seen, "1.36")
    assert [(each.machine, each.check, each.severity) for each in found] == [("control-1", "certificates", "warning")]


# Members of etcd

MEMBER = {
    "id": "8e9e",
    "name": "control-1",
    "learner": False,
    "leader": True,
    "healthy": True,
    "db_size": 3 << 20,
}


def test_status_shows_the_members_of_etcd() -> None:
    dead = {**MEMBER, "id": "1", "name": "", "leader": False, "healthy": False, "learner": True}
    members, problem = cluster_status.members({"problem": "", "members": [MEMBER, dead]})
    found = cluster_status.ClusterStatus("e", "v1.36.3", (), (), etcd=members, etcd_problem=problem, warnings=["w"])
    text = status._table(found, None)
    assert "control-1    leader   healthy        3.0 MiB" in text
    assert "1            learner  never started  -" in text
    assert text.endswith("warning: w")


def test_members_that_the_control_plane_in_use_does_not_know_are_those_of_another_one() -> None:
    unknown, known = {"problem": "etcd does not run", "members": []}, {"problem": "", "members": [MEMBER]}
    members, problem = cluster_status.known_members({"cp-3": {}, "cp-2": known, "cp-1": unknown}, "cp-1")
    assert ([each.name for each in members], problem) == (["control-1"], "")
    assert cluster_status.known_members({"cp-1": unknown, "cp-2": unknown}, "cp-1") == ([], "etcd does not run")
    assert cluster_status.known_members({}, "cp-1") == ((), "they were not reported")


@pytest.mark.parametrize("report", [{}, {"problem": "", "members": [{**MEMBER, "id": "x y"}]}, {"members": []}])
def test_an_invalid_report_of_members_is_a_sentence(report: Any) -> None:
    members, problem = cluster_status.members(report)
    assert members == ()
    found = cluster_status.ClusterStatus("e", "v1", (), (), etcd=members, etcd_problem=problem)
    assert "etcd: its members are unknown: its answer is invalid" in status._table(found, None)
