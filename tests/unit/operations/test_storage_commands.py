"""`gpunodes storage`: what it refuses, in which order it works, and what playbooks get. The cluster is a stand-in."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpunodes.cli import main
from gpunodes.engine import control_planes, runner
from gpunodes.engine.cluster.errors import Refused
from gpunodes.errors import ExitCode, GpunodesError
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, MachineResult, Outcome, Role, RunResult, TaskEnded
from gpunodes.operations.storage import commands, findings, leaving, server
from gpunodes.operations.storage.objects import Objects
from gpunodes.planner import storage

from tests.hostile import ATTACKS, is_plain, machine_report

INVENTORY = """
control_plane: {hosts: {control-1: {ansible_host: 127.0.0.1}}}
workers: {hosts: {w1: {ansible_host: 127.0.0.2}, w2: {ansible_host: 127.0.0.3}}}
storage: {hosts: {%s: {ansible_host: 127.0.0.9}}}
all:
  vars:
    gpunodes_storage:
      - {name: scratch, path: /srv/scratch, size: 1Ti}
      - {name: given, server: nas.example, path: /export, size: 1Gi, namespaces: [ml]}
"""


class Cluster(Objects):
    """Objects by path; ``steps`` are the playbooks and the server's runs, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.objects: dict[str, Any] = {f"/api/v1/namespaces/{name}": {"metadata": {}} for name in ("default", "ml")}
        self.pods: list[Any] = []
        self.steps: list[Any] = []
        self.outcome = Outcome.CHANGED
        monkeypatch.setattr(commands, "connected", self.connected)
        monkeypatch.setattr(commands, "carry_out", self.carry_out)
        monkeypatch.setattr(server, "run", self.serve)

    @contextlib.contextmanager
    def connected(self, *_: Any) -> Iterator[Cluster]:
        yield self

    def _call(self, method: str, path: str, *_: Any, **__: Any) -> Any:
        class Body:
            body: Any
            time = 0.0

        found = Body()
        path, query = path.partition("?")[::2]
        if path.endswith("/pods"):
            found.body = {"items": self.pods}
        elif query:
            kind = "PersistentVolumeClaim" if path.endswith("claims") else "PersistentVolume"
            found.body = {"items": [each for each in self.objects.values() if each.get("kind") == kind]}
        elif method == "DELETE":
            self.steps.append(f"delete {path}")
            del self.objects[path]
        elif path in self.objects:
            found.body = self.objects[path]
        else:
            raise Refused(404, "not found")
        return found

    def carry_out(self, operation: Any, _: Any, machines: Any, __: Any, options: Any) -> RunResult:
        self.steps.append((operation.name, [each.name for each in machines], options.variables))
        return RunResult(operation.name, [MachineResult(each.name, self.outcome) for each in machines])

    def serve(self, _: Any, machine: Machine, command: str, *, state: str, dry_run: bool) -> Any:
        self.steps.append((command, machine.name, state, dry_run))
        return {}, MachineResult(machine.name, Outcome.CHANGED)

    def applied(self) -> None:
        for each in storage.objects(
            Inventory(Path("hosts.yml")).variables("control-1")["gpunodes_storage"], "127.0.0.9"
        ):
            namespace = each["metadata"].get("namespace")
            kind = "persistentvolumes" if namespace is None else f"namespaces/{namespace}/persistentvolumeclaims"
            self.objects[f"/api/v1/{kind}/{each['metadata']['name']}"] = each


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cluster:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    Path("hosts.yml").write_text(INVENTORY % "nas-1")
    return Cluster(monkeypatch)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["gpunodes", "storage", *words, "-i", "hosts.yml"])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def test_the_server_comes_first_and_nodes_after_it(place: Cluster, run: Run) -> None:
    code, out, _ = run("up")
    assert code == ExitCode.DONE
    assert "nas-1" in out
    assert place.steps == [
        ("storage up", "nas-1", "present", False),
        ("storage up", ["control-1", "w1", "w2"], {}),
    ]


def test_a_dry_run_is_one_for_the_server_too(place: Cluster, run: Run) -> None:
    assert run("up", "--dry-run", "--json")[0] == ExitCode.DONE
    assert place.steps[0] == ("storage up", "nas-1", "present", True)


def test_a_released_volume_is_deleted_first_but_not_in_a_dry_run(place: Cluster, run: Run) -> None:
    place.applied()
    place.objects["/api/v1/persistentvolumes/gpunodes-scratch.default"]["status"] = {"phase": "Released"}
    run("up", "--dry-run")
    assert "delete" not in str(place.steps)
    run("up")
    assert "delete /api/v1/persistentvolumes/gpunodes-scratch.default" in place.steps


def test_given_servers_alone_need_no_group(place: Cluster, run: Run) -> None:
    lines = [line for line in (INVENTORY % "nas-1").splitlines() if "scratch" not in line and "storage: {h" not in line]
    Path("hosts.yml").write_text("\n".join(lines))
    assert run("up")[0] == ExitCode.DONE
    assert [step[0] for step in place.steps] == ["storage up"]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (("storage: {h", "other: {h"), "the group storage has no machine, and the share scratch names no server"),
        (("ansible_host: 127.0.0.9}", "ansible_host: 127.0.0.9}, nas-2: {}"), "the group storage has nas-1, nas-2"),
        (("namespaces: [ml]", "namespaces: [nowhere]"), "names the namespace nowhere, which the cluster does not have"),
        (("path: /srv/scratch", "path: /srv/../etc"), "gpunodes_storage of"),
        (("gpunodes_storage:", "gpunodes_storage_:"), ""),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_changed(
    place: Cluster, run: Run, change: tuple[str, str], found: str
) -> None:
    Path("hosts.yml").write_text((INVENTORY % "nas-1").replace(*change))
    code, _, err = run("up")
    assert code == ExitCode.WRONG_INPUT
    assert found in " ".join(err.split())
    assert place.steps == []


def test_an_object_of_others_is_refused(place: Cluster, run: Run) -> None:
    foreign = {"kind": "PersistentVolumeClaim", "metadata": {"name": "given", "namespace": "ml"}, "spec": {}}
    place.objects["/api/v1/namespaces/ml/persistentvolumeclaims/given"] = foreign
    code, _, err = run("up")
    assert code == ExitCode.WRONG_INPUT
    assert "the PersistentVolumeClaim ml/given exists, and is not of gpunodes" in err
    assert place.steps == []


OLD = {"name": "old", "path": "/srv/old", "size": "1Gi", "namespaces": ["ml"]}


def added(place: Cluster, namespace: str = "ml", server: str = "127.0.0.9") -> None:
    """A volume of a share that has left the setting."""
    volume = storage.objects([{**OLD, "namespaces": [namespace]}], server)[0]
    place.objects[f"/api/v1/persistentvolumes/{volume['metadata']['name']}"] = volume


@pytest.mark.parametrize("words", [("up",), ("up", "--dry-run")])
@pytest.mark.parametrize(
    ("namespace", "remedy"),
    [
        ("ml", "`kubectl delete pvc -n ml old`, then `kubectl delete pv gpunodes-old.ml`"),
        ("gpunodes-registry", "`gpunodes registry down`"),
    ],
)
def test_a_folder_is_served_while_a_volume_of_it_exists(
    place: Cluster, run: Run, words: tuple[str, ...], namespace: str, remedy: str
) -> None:
    """The export of a share that has left the setting was taken away under the pods that use it."""
    place.applied()
    added(place, namespace)
    code, _, err = run(*words)
    text = " ".join(err.split())
    assert code == ExitCode.WRONG_INPUT
    assert "no longer has the share of 127.0.0.9:/srv/old" in text
    assert remedy in text
    assert place.steps == []


def test_a_share_may_name_the_storage_machine_as_its_server() -> None:
    """An export that the user made on the same machine, beside those of gpunodes."""
    given = {**OLD, "server": "127.0.0.9"}
    shares = [{"name": "data", "path": "/srv/data", "size": "1Gi", "namespaces": ["ml"]}, given]
    volumes = [each for each in storage.objects(shares, "127.0.0.9") if each["kind"] == "PersistentVolume"]
    assert leaving.departed(shares, "127.0.0.9", volumes) == []
    assert len(leaving.departed(shares[:1], "127.0.0.9", volumes)) == 1


def test_a_share_of_another_server_may_leave_the_setting(place: Cluster, run: Run) -> None:
    place.applied()
    added(place, server="nas2.example")
    assert run("up")[0] == ExitCode.DONE


def test_down_ends_with_the_server_and_names_what_it_removes(place: Cluster, run: Run) -> None:
    place.applied()
    code, out, _ = run("down", "--yes")
    assert code == ExitCode.DONE
    assert "nas-1" in out
    (name, machines, variables), last = place.steps
    assert (name, machines) == ("storage down", ["control-1", "w1", "w2"])
    assert variables["storage_idle_shares"] == ["127.0.0.9:/srv/scratch", "nas.example:/export"]
    # They are deleted in reverse: the policy goes when nothing of the shares is left.
    assert [each["kind"] for each in variables["storage_objects"]] == [
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
        *["PersistentVolume"] * 2,
        *["PersistentVolumeClaim"] * 2,
    ]
    assert last == ("storage down", "nas-1", "absent", False)


@pytest.mark.parametrize("volume", [None, "pvc-0b1e", "gpunodes-given.ml"])
def test_down_leaves_a_copy_of_a_claim_for_another_volume(place: Cluster, run: Run, volume: str | None) -> None:
    """It has the label; with a storage class that deletes its volumes, its data would go."""
    place.applied()
    given = place.objects["/api/v1/namespaces/ml/persistentvolumeclaims/given"]
    copy = {
        **given,
        "metadata": {**given["metadata"], "name": "copy"},
        "spec": {**given["spec"], "storageClassName": "fast", "volumeName": volume},
    }
    place.objects["/api/v1/namespaces/ml/persistentvolumeclaims/copy"] = copy
    place.pods = [
        {
            "metadata": {"namespace": "ml", "name": "job"},
            "spec": {"volumes": [{"persistentVolumeClaim": {"claimName": "copy"}}]},
        }
    ]
    assert run("down", "--yes")[0] == ExitCode.DONE
    removed = place.steps[0][2]["storage_objects"]
    claims = [each["metadata"]["name"] for each in removed if each["kind"] == "PersistentVolumeClaim"]
    assert claims == ["scratch", "given"]


def test_mounts_of_shares_without_a_claim_are_looked_for(place: Cluster, run: Run) -> None:
    """As that of a registry, of a volume of somebody else, or after a run that deleted all volumes and was killed."""
    assert run("down", "--yes")[0] == ExitCode.DONE
    (_, _, variables), _ = place.steps
    assert variables["storage_idle_shares"] == ["127.0.0.9:/srv/scratch", "nas.example:/export"]


def test_without_the_setting_the_volumes_say_what_must_not_be_mounted(place: Cluster, run: Run) -> None:
    place.applied()
    Path("hosts.yml").write_text((INVENTORY % "nas-1").replace("gpunodes_storage:", "other:"))
    code, _, err = run("down", "--yes")
    assert code == ExitCode.DONE
    assert place.steps[0][2]["storage_idle_shares"] == ["127.0.0.9:/srv/scratch", "nas.example:/export"]
    assert "nas.example, which the group storage does not have" in " ".join(err.split())


def test_a_server_that_the_group_had_before_is_named(place: Cluster, run: Run) -> None:
    """`storage up` with another machine is refused, with the remedy `storage down`: that undoes those of the group."""
    place.applied()
    Path("hosts.yml").write_text((INVENTORY % "nas-2").replace("127.0.0.9", "127.0.0.8"))
    code, _, err = run("up")
    text = " ".join(err.split())
    assert code == ExitCode.WRONG_INPUT
    assert "with the machine that is 127.0.0.9 in the group storage if that served it" in text
    code, _, err = run("down", "--yes")
    text = " ".join(err.split())
    assert code == ExitCode.DONE
    assert "volumes are of 127.0.0.9, which the group storage does not have" in text
    assert "put it back into the group and run the command again" in text
    both = "storage: {hosts: {nas-2: {ansible_host: 127.0.0.8}, nas-1: {ansible_host: 127.0.0.9}}}"
    lines = [both if line.startswith("storage:") else line for line in Path("hosts.yml").read_text().splitlines()]
    Path("hosts.yml").write_text("\n".join(lines))
    place.steps.clear()
    code, _, err = run("down", "--yes")
    assert (code, "does not have" in err) == (ExitCode.DONE, False)
    assert [step[1] for step in place.steps[1:]] == ["nas-2", "nas-1"]
    assert set(place.steps[0][2]["storage_idle_shares"]) >= {f"127.0.0.{each}:/srv/scratch" for each in (8, 9)}


def test_a_server_that_is_a_node_is_locked_as_one(place: Cluster, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    Path("hosts.yml").write_text(INVENTORY % "w1")
    roles: list[Role] = []

    def serve(_: Any, machine: Machine, *_more: Any, **__: Any) -> Any:
        roles.append(machine.role)
        return {}, MachineResult(machine.name, Outcome.CHANGED)

    monkeypatch.setattr(server, "run", serve)
    run("up")
    out = run("down", "--yes", "--json")[1]
    assert roles == [Role.WORKER, Role.WORKER]
    assert out.count('"w1"') == 1
    assert len(place.steps) == 2


def test_what_a_server_says_is_in_its_result(place: Cluster, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """Why packages stay, or that the ports of a firewall open later."""
    note = "nfs-common stays: autofs, which gpunodes did not install, needs it"
    for machine in ("nas-1", "w1"):
        Path("hosts.yml").write_text(INVENTORY % machine)
        result = MachineResult(machine, Outcome.CHANGED, changes=["Remove"], notes=[note])
        monkeypatch.setattr(server, "run", lambda *_, result=result, **__: ({}, result))
        assert note in run("down", "--yes")[1]
        found = {each["name"]: each["notes"] for each in json.loads(run("down", "--yes", "--json")[1])["machines"]}
        assert {name: notes for name, notes in found.items() if notes} == {machine: [note]}
    assert place.steps


def test_what_changes_on_a_server_that_is_a_node_is_in_its_result(
    place: Cluster, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    Path("hosts.yml").write_text(INVENTORY % "w1")
    place.outcome = Outcome.UNCHANGED
    for changes, outcome in ((("Install the NFS server",), "changed"), ((), "unchanged")):
        result = MachineResult("w1", Outcome.CHANGED if changes else Outcome.UNCHANGED, changes=changes)
        monkeypatch.setattr(server, "run", lambda *_, result=result, **__: ({}, result))
        for words in (("up", "--dry-run", "--json"), ("down", "--yes", "--json")):
            found = {each["name"]: each for each in json.loads(run(*words)[1])["machines"]}
            assert list(found) == ["control-1", "w1", "w2"]
            assert (found["w1"]["outcome"], found["w1"]["changes"]) == (outcome, list(changes))
            assert found["w2"]["outcome"] == "unchanged"


def test_down_needs_a_confirmation(place: Cluster, run: Run) -> None:
    code, _, err = run("down")
    assert code == ExitCode.WRONG_INPUT
    assert "--yes" in err
    assert place.steps == []


@pytest.mark.parametrize("attack", ATTACKS, ids=ascii)
def test_down_is_refused_while_a_pod_uses_a_claim(place: Cluster, run: Run, attack: str) -> None:
    place.applied()
    volume = {"persistentVolumeClaim": {"claimName": "given"}}
    place.pods = [
        {"metadata": {"namespace": "ml", "name": f"job{attack}"}, "spec": {"volumes": [volume]}, "status": {}}
    ]
    code, _, err = run("down", "--yes")
    assert code == ExitCode.FAILED
    assert "uses shared storage" in err
    assert is_plain(err)
    assert place.steps == []


@pytest.mark.parametrize("attack", ATTACKS, ids=ascii)
def test_what_stands_in_the_cluster_is_shown_as_text(
    place: Cluster, run: Run, monkeypatch: pytest.MonkeyPatch, attack: str
) -> None:
    """The names of volumes and claims, what they serve, and what nodes and the server say."""
    paths: list[str] = []
    call = place._call

    def counted(method: str, path: str, *more: Any, **named: Any) -> Any:
        paths.append(path)
        return call(method, path, *more, **named)

    def carry_out(operation: Any, _: Any, machines: Any, __: Any, options: Any) -> RunResult:
        place.steps.append((operation.name, [each.name for each in machines], options.variables))
        results = [
            MachineResult(each.name, Outcome.FAILED, phase="", cause=attack, notes=(attack,)) for each in machines
        ]
        return RunResult(operation.name, results)

    def fails(*_: Any, **__: Any) -> Any:
        raise GpunodesError(attack, attack, attack)

    monkeypatch.setattr(place, "_call", counted)
    monkeypatch.setattr(commands, "carry_out", carry_out)
    place.applied()
    for each in list(place.objects.values()):
        if each.get("kind") == "PersistentVolumeClaim":
            each["metadata"] |= {"namespace": attack, "name": attack}
            each["spec"] |= {"volumeName": f"gpunodes-{attack}.{attack}"}
        elif each.get("kind") == "PersistentVolume":
            each["metadata"]["name"] = attack
            each["spec"] |= {"claimRef": {"namespace": attack, "name": attack}}
    for words in (("up",), ("down", "--yes"), ("down", "--yes", "--json"), ("down",)):
        _, out, err = run(*words)
        assert is_plain(out + err), words
    added(place)
    volume = place.objects["/api/v1/persistentvolumes/gpunodes-old.ml"]
    volume["metadata"]["name"] = attack
    volume["spec"]["claimRef"] = {"namespace": attack, "name": attack}
    spec = {"nfs": {"server": attack, "path": attack}}
    place.objects["x"] = {"kind": "PersistentVolume", "metadata": {"name": attack}, "spec": spec}
    for words in (("up",), ("down", "--yes")):
        _, out, err = run(*words)
        assert is_plain(out + err), words
    monkeypatch.setattr(server, "run", fails)
    place.objects = {name: each for name, each in place.objects.items() if "namespaces/" in name}
    _, out, err = run("up")
    assert is_plain(out + err)
    # A name is one part of a path, whatever it has in it.
    assert all(path.isprintable() and path.isascii() and " " not in path for path in paths)
    assert all(path.count("/") <= 6 for path in paths), "/api/v1/namespaces/NAME/KIND/NAME"


def test_down_keeps_the_server_while_a_node_may_have_it_mounted(place: Cluster, run: Run) -> None:
    place.applied()
    place.outcome = Outcome.FAILED
    assert run("down", "--yes")[0] == ExitCode.FAILED
    assert [step[0] for step in place.steps] == ["storage down"]
    assert place.steps[0][1] == ["control-1", "w1", "w2"]


@pytest.mark.usefixtures("place")
def test_a_server_that_is_a_worker_with_gpus_is_warned_about() -> None:
    Path("hosts.yml").write_text(INVENTORY % "w1")
    inventory = Inventory(Path("hosts.yml"))
    facts = machine_report("w1", 2)
    [warning] = findings.of_machines(inventory, {"w1": facts, "w2": facts})
    assert warning.machine == "w1"
    assert "it has GPUs and serves scratch: a repair or a roll-out that reboots it stalls every pod" in str(warning)
    without = {**facts, "gpu": {**facts["gpu"], "functions": []}}
    assert findings.of_machines(inventory, {"w1": without}) == []
    assert findings.of_server(inventory, Machine("c", "c", Role.CONTROL_PLANE), facts) == []


@pytest.mark.usefixtures("place")
def test_a_server_in_a_pool_that_scales_is_warned_about() -> None:
    """The power server switches machines off that pods do not need, and an NFS server is no pod."""
    cpu = "gpunodes_pools: {workers: {max: 2}}"
    Path("hosts.yml").write_text(f"{INVENTORY % 'w1'}    {cpu}\n")
    inventory = Inventory(Path("hosts.yml"))
    [warning] = findings.of_machines(inventory, {"w1": {}, "w2": {}})
    assert warning.machine == "w1"
    assert "it serves scratch, and its pool workers scales: the power server may switch it off" in str(warning)
    Path("hosts.yml").write_text(f"{INVENTORY % 'w1'}    {cpu.replace('{max: 2}', '{}')}\n")
    assert findings.of_machines(Inventory(Path("hosts.yml")), {"w1": {}}) == []


def test_a_failed_server_is_one_sentence(place: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # The server's own code runs. The working directory is restored, too.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(control_planes, "choose", lambda i: control_planes.Choice(i.control_planes()[0]))
    monkeypatch.setattr(server, "_claimed", lambda *_, **__: contextlib.nullcontext())
    Path("hosts.yml").write_text(INVENTORY % "nas-1")
    plays = []

    def play(given: runner.Play, folder: Path, on_event: Any, *_: Any) -> runner.PlayResult:
        plays.append((given.playbook, list(given.machines), given.variables))
        result = {"msg": "exportfs: /srv/scratch does not support NFS export"}
        on_event(TaskEnded("nas-1", "nfs_server", "Export the shares", Outcome.FAILED, 1.0, result))
        return runner.PlayResult(False, False, folder / "stdout")

    monkeypatch.setattr(runner, "run", play)
    inventory = Inventory(Path("hosts.yml"))
    machine = inventory.machines(Role.STORAGE)[0]
    with pytest.raises(Exception, match=r"nas-1: .*does not support NFS export; wanted: a machine that serves"):
        server.run(inventory, machine, "storage up", state="present", dry_run=True)
    assert plays == [("storage_server.yml", ["control-1", "nas-1"], {"nfs_server_state": "present"})]
    assert place.steps == []


def test_the_notes_of_the_server_s_modules_are_its_own(
    place: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(control_planes, "choose", lambda i: control_planes.Choice(i.control_planes()[0]))
    monkeypatch.setattr(server, "_claimed", lambda *_, **__: contextlib.nullcontext())
    Path("hosts.yml").write_text(INVENTORY % "nas-1")

    def play(_: runner.Play, folder: Path, on_event: Any, *__: Any) -> runner.PlayResult:
        for name, notes in (("nas-1", ["it stays"]), ("control-1", ["another's"]), ("nas-1", "no list")):
            on_event(TaskEnded(name, "nfs_server", "Remove", Outcome.UNCHANGED, 1.0, {"notes": notes}))
        return runner.PlayResult(True, False, folder / "stdout")

    monkeypatch.setattr(runner, "run", play)
    inventory = Inventory(Path("hosts.yml"))
    _, result = server.run(inventory, inventory.machines(Role.STORAGE)[0], "storage down", state="absent", dry_run=True)
    assert (list(result.notes), result.outcome) == (["it stays"], Outcome.UNCHANGED)
    assert place.steps == []
