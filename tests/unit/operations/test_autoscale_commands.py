"""`gpunodes autoscale`: what it gathers, refuses and shows. The cluster is a stand-in, its playbook is not run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.autoscale import decisions
from gpunodes.autoscale.state import MachineState, Phase
from gpunodes.cli import main
from gpunodes.engine import control_planes, identities, runner
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.leases.errors import Lost
from gpunodes.engine.leases.held import Leases
from gpunodes.errors import ExitCode
from gpunodes.inventory import Inventory
from gpunodes.model import MachineResult, Outcome, PreflightFinding, Role, RunResult
from gpunodes.operations import preflight
from gpunodes.operations.autoscale import commands, registering
from gpunodes.planner.candidates import MachineFacts
from gpunodes.repair.maintenance import Maintenance

from tests import repair_fleet
from tests.hostile import ATTACKS, is_plain, unprintable
from tests.power_fleet import MemoryStore, document, machine_id, node_object, uuid

INVENTORY = """
control_plane: {hosts: {control-1: {ansible_host: 127.0.0.1}}}
h100: {hosts: {w1: {ansible_host: 127.0.0.2}, w2: {ansible_host: 127.0.0.3}}}
workers: {children: {h100: }}
all:
  vars:
    gpunodes_pools: {h100: {max: 2, spare: 1}}
    gpunodes_bmc_type: redfish
    gpunodes_bmc_address: "{{ inventory_hostname }}.bmc.example"
    gpunodes_bmc_password: hunter2
    gpunodes_power_image: registry.example/gpunodes:1
"""


class Objects(MemoryStore):
    """The cluster; ``written`` is the last plan with its passwords, ``runs`` are the playbooks with their variables."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.document: Any = None
        self.passwords: dict[str, str] = {}
        self.running = False
        self.runs: list[tuple[str, Any]] = []
        self.registered: list[str] = []
        self.failure = ""
        self.daemons: list[dict[str, Any]] = []
        self.dead: set[str] = set()
        """The machines that do not respond over SSH."""
        self.odd: set[str] = set()
        """Those of them that do respond, and on which something else fails."""
        self.api = repair_fleet.Api()
        self.ending: list[list[str]] = []
        """The nodes of its pods, by request from the last one on."""
        self.meanwhile: Callable[[], None] = lambda: None
        """What the power server does while the playbook runs."""
        monkeypatch.setattr(commands, "_connected", self.connected)
        monkeypatch.setattr(registering, "carry_out", self.register)
        monkeypatch.setattr(preflight, "inspect", self.inspect)
        monkeypatch.setattr(runner, "run", self.run)
        self.silent: list[tuple[str, str]] = []
        monkeypatch.setattr(control_planes, "choose", self.choose)

    def choose(self, found: Inventory, **_: Any) -> control_planes.Choice:
        return control_planes.Choice(found.control_planes()[0], self.silent)

    @contextlib.contextmanager
    def connected(self, _: Any, command: str) -> Iterator[tuple[Any, Leases]]:
        leases = Leases(Cluster(self.api), command)  # type: ignore[arg-type]  # an API in memory
        yield self, leases
        leases.close()

    def inspect(self, _: Inventory, machines: Any, folder: Path, *__: Any, **___: Any) -> preflight.Inspection:
        why = {each.name: "no route to host" if each.name in self.dead else "" for each in machines}
        found = [
            MachineFacts(
                name,
                Role.WORKER,
                facts=None if each else {},
                unreachable=each,
                silent=bool(each) and name not in self.odd,
            )
            for name, each in why.items()
        ]
        return preflight.Inspection(found, "control-1", {}, None, "", interrupted=False, log=folder)

    def register(self, operation: Any, _: Any, machines: Any, *more: Any) -> RunResult:
        if lost := [each.name for each in machines if each.name in self.dead]:
            finding = PreflightFinding(lost[0], "reachable", Problem("no route to host", "", ""))
            return RunResult(
                operation.name, [MachineResult(each.name, Outcome.SKIPPED) for each in machines], [finding]
            )
        self.registered += [each.name for each in machines]
        outcome = Outcome.FAILED if self.failure else Outcome.CHANGED
        for each in machines:
            self.objects[each.name]["spec"]["providerID"] = f"gpunodes://{each.name}"
        return RunResult(operation.name, [MachineResult(each.name, outcome, cause=self.failure) for each in machines])

    def run(self, play: runner.Play, folder: Path, _: Any, should_stop: Callable[[], bool]) -> runner.PlayResult:
        self.runs.append((play.playbook, play.variables))
        self.ran_on = list(play.machines)
        self.running = (play.variables or {})["autoscaler_state"] == "present"
        if self.running:
            # The power server sees no node that was not prepared.
            seen = {name for name, each in self.objects.items() if each["spec"]["providerID"]}
            new = seen & set(self.document["machines"]) - set(self.texts)
            self.texts |= {name: MachineState(Phase.ON, 1.0).text() for name in new}
        self.meanwhile()
        return runner.PlayResult(True, should_stop(), folder / "stdout")

    def nodes(self) -> list[Any]:
        return [each.node for each in self.seen_nodes().values()]

    def states(self, *, create: bool = True) -> dict[str, MachineState]:
        assert not create, "only the power server creates it"
        return super().states()

    def plan(self) -> Any:
        return self.document

    def is_running(self) -> bool:
        return self.running

    def is_installed(self) -> bool:
        return self.running

    def pod_nodes(self) -> list[str]:
        return self.ending.pop() if self.ending else []

    def write_plan(self, planned: Any, passwords: Any) -> None:
        self.document, self.passwords = planned, dict(passwords)

    def delete_plan(self) -> None:
        self.document = None

    def delete_passwords(self) -> None:
        self.passwords = {}

    def daemon_sets(self) -> list[dict[str, Any]]:
        return self.daemons

    def delete_states(self) -> None:
        self.texts = {}

    def delete_kept_off(self) -> None:
        self.off = {}


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Objects:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    Path("hosts.yml").write_text(INVENTORY)
    found = Objects(monkeypatch)
    for name in ("w1", "w2"):
        found.objects[name] = node_object(name, provider="")
    cluster = Inventory(Path("hosts.yml")).cluster
    known = {name: {"product_uuid": uuid(name), "machine_id": machine_id(name)} for name in ("w1", "w2")}
    identities.remember(cluster, {name: {"hostname": name, **ids} for name, ids in known.items()})
    return found


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["gpunodes", "autoscale", *words, "-i", "hosts.yml"])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def test_a_dry_run_shows_the_machines_and_changes_nothing(place: Objects, run: Run) -> None:
    code, out, _ = run("up", "--dry-run", "--json")
    found = json.loads(out)
    assert code == ExitCode.DONE
    assert found["pools"] == {"h100": {"min": 0, "max": 2, "machines": 2, "on": 2}}
    assert [each["phase"] for each in found["machines"]] == ["unknown", "unknown"]
    assert any("passwords" in each for each in found["changes"])
    assert (place.document, place.runs, place.registered) == (None, [], [])


def test_up_prepares_machines_first_and_keeps_passwords_out_of_the_playbook(place: Objects, run: Run) -> None:
    code, out, err = run("up", "--yes")
    assert code == ExitCode.DONE, err
    assert place.registered == ["w1", "w2"]
    assert place.passwords == {"w1": "hunter2", "w2": "hunter2"}
    [(playbook, variables)] = place.runs
    assert playbook == "autoscale.yml"
    limits = {"limits": {"nvidia.com/gpu": 2}}
    assert variables["autoscaler_pools"]["h100"] == {"priority": 0, "spare": 1, "resources": limits, "taints": []}
    assert "hunter2" not in f"{variables}{place.document}{out}{err}"
    assert place.document["machines"]["w1"]["bmc"]["gpunodes_bmc_address"] == "w1.bmc.example"
    known = place.document["machines"]["w1"]["identity"]
    assert (known["uuid"], known["machine_id"]) == (uuid("w1"), machine_id("w1"))


def test_a_machine_without_a_bmc_is_woken_by_the_address_that_it_reported(place: Objects, run: Run) -> None:
    Path("hosts.yml").write_text(INVENTORY.replace("bmc_type: redfish", "bmc_type: wol"))
    cluster = Inventory(Path("hosts.yml")).cluster
    for number, name in enumerate(("w1", "w2")):
        reported = {"hostname": name, "product_uuid": uuid(name), "macs": [f"52:54:00:00:00:0{number}"]}
        identities.remember(cluster, {name: reported})
    code, _, err = run("up", "--yes")
    assert code == ExitCode.DONE, err
    assert place.document["machines"]["w2"]["identity"]["macs"] == ["52:54:00:00:00:01"]
    assert place.passwords == {}, "Wake-on-LAN has none"


def test_no_machine_is_woken_by_an_address_of_another(place: Objects, run: Run) -> None:
    """The power server knows only machines that scale: the address may be one of another."""
    Path("hosts.yml").write_text(INVENTORY.replace("bmc_type: redfish", "bmc_type: wol"))
    cluster, shared = Inventory(Path("hosts.yml")).cluster, "52:54:00:00:00:09"
    identities.remember(cluster, {"control-1": {"macs": [shared]}})
    identities.remember(cluster, {"w1": {"hostname": "w1", "product_uuid": uuid("w1"), "macs": ["52:54:00:00:00:01"]}})
    about = {"hostname": "w2", "product_uuid": uuid("w2")}
    identities.remember(cluster, {"w2": {**about, "macs": [shared]}})
    code, _, err = run("up", "--yes")
    assert code == ExitCode.WRONG_INPUT
    assert f"w2 reported no MAC address of its own to wake: {shared} is one of control-1, too" in err
    assert "set gpunodes_bmc_mac of w2" in err
    identities.remember(cluster, {"w2": {**about, "macs": [shared, "52:54:00:00:00:02"]}})
    code, _, err = run("up", "--yes")
    assert code == ExitCode.DONE, err
    assert place.document["machines"]["w2"]["identity"]["macs"] == ["52:54:00:00:00:02"]


def test_a_machine_that_serves_shared_storage_is_no_machine_of_a_pool_that_scales(place: Objects, run: Run) -> None:
    share = "gpunodes_storage: [{name: data, path: /srv/data, size: 9Gi}]"
    Path("hosts.yml").write_text(f"{INVENTORY}    {share}\nstorage: {{hosts: {{w1: }}}}\n")
    code, _, err = run("up", "--yes")
    assert code == ExitCode.WRONG_INPUT
    assert "w1 of a pool that scales: it serves shared storage" in " ".join(err.split())
    assert (place.document, place.runs, place.registered) == (None, [], [])


def test_a_machine_that_cannot_be_prepared_ends_it_before_the_plan(place: Objects, run: Run) -> None:
    place.failure = "No space left on device"
    code, _, err = run("up", "--yes")
    assert code == ExitCode.FAILED
    assert "w1: No space left on device" in err
    assert (place.document, place.runs) == (None, [])


def test_a_machine_that_is_off_keeps_its_place_and_what_was_seen_of_it(place: Objects, run: Run) -> None:
    run("up", "--yes")
    saved = place.seen_nodes()["w2"].saved(4000)
    place.texts["w2"] = MachineState(Phase.OFF, 1.0, "nothing needs it", saved=saved).text()
    del place.objects["w2"]
    place.registered.clear()
    code, _, err = run("up", "--yes")
    assert code == ExitCode.DONE, err
    assert place.registered == ["w1"], "the other one is off"
    assert place.document["machines"]["w2"]["capacity"]["nvidia.com/gpu"] == "2"


DISK = Maintenance("a new disk", "ann", 1.0)


@pytest.mark.parametrize(
    ("why", "code", "place_of", "wanted"),
    [
        ("by-hand", ExitCode.DONE, "passed_over", "off on purpose: off, and not by the autoscaler, since 1970-01-01"),
        ("maintenance", ExitCode.DONE, "passed_over", "in maintenance: a new disk, by ann, since 1970-01-01 00:00 UTC"),
        ("dead", ExitCode.PARTLY, "left_out", "no route to host"),
    ],
)
@pytest.mark.parametrize("is_new", [False, True])
def test_a_machine_that_cannot_be_prepared_now_is_passed_over(
    place: Objects, run: Run, why: str, code: ExitCode, place_of: str, wanted: str, *, is_new: bool
) -> None:
    """One of them stopped all, and the passwords of the others were not written."""
    notes = {"gpunodes.dev/maintenance": DISK.text()} if why == "maintenance" else {}
    provider = "" if is_new else "gpunodes://w2"
    place.objects["w2"] = node_object("w2", ready=why == "maintenance", annotations=notes, provider=provider)
    place.dead = set() if why == "maintenance" else {"w2"}
    if why == "by-hand":
        place.texts["w2"] = MachineState(Phase.BY_HAND, 1.0, "ann@desk switched it off").text()
    elif not is_new:
        place.texts["w2"] = MachineState(Phase.ON, 1.0).text()
    for words in (["--dry-run"], ["--yes"]):
        ended, out, err = run("up", "--json", *words)
        assert ended == code, err
        found = json.loads(out)
        assert wanted in found[place_of]["w2"]
        assert [*found["passed_over"], *found["left_out"]] == ["w2"]
        assert not [each for each in found["changes"] if "w2" in each]
    assert place.registered == ["w1"]
    assert place.passwords == {"w1": "hunter2", "w2": "hunter2"}
    assert set(place.document["machines"]) == {"w1", "w2"}
    _, out, _ = run("up", "--yes")
    assert f"{place_of.replace('_', ' ')}: w2: {wanted}" in out
    # It is caught up.
    place.objects["w2"], place.dead = node_object("w2", provider=provider), set()
    place.registered.clear()
    ended, out, err = run("up", "--yes")
    assert (ended, place.registered) == (ExitCode.DONE, ["w1", "w2"]), err
    assert "w2: " not in out


def test_a_machine_that_the_autoscaler_switched_off_is_named_when_it_is_passed_over(place: Objects, run: Run) -> None:
    scales(place, run, Phase.OFF, gone=True)
    code, out, err = run("up", "--yes", "--json")
    assert code == ExitCode.DONE, err
    found = json.loads(out)["passed_over"]
    assert list(found) == ["w2"]
    assert "switched off by the autoscaler since" in found["w2"]
    assert "`gpunodes power w2 on --wait`, then the same command again" in found["w2"]


@pytest.mark.parametrize("phase", [Phase.ON, Phase.OFF])
def test_another_controller_keeps_what_the_cluster_knows_of_machines(
    place: Objects, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, phase: Phase
) -> None:
    """It has recorded no identities; the plan got empty ones, and then no BMC was verified as a machine's own."""
    cluster = Inventory(Path("hosts.yml")).cluster
    ids = {"product_uuid": uuid("w2"), "machine_id": machine_id("w2"), "macs": ["52:54:00:00:00:02"]}
    identities.remember(cluster, {"w2": {"hostname": "w2", **ids}})
    run("up", "--yes")
    place.texts["w2"] = MachineState(phase, 1.0).text()
    if phase is Phase.OFF:
        del place.objects["w2"]
    before = place.document["machines"]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    code, _, err = run("up", "--yes")
    assert code == ExitCode.DONE, err
    assert place.document["machines"] == before
    place.objects = {name: node_object(name) for name in ("w1", "w2")}
    place.document = None
    run("up", "--yes")
    assert place.document["machines"]["w2"]["identity"]["uuid"] == uuid("w2"), "of its node"


def test_a_machine_of_which_nobody_knows_the_hardware_is_refused(
    place: Objects, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run("up", "--yes")
    place.texts["w2"] = MachineState(Phase.OFF, 1.0).text()
    del place.objects["w2"]
    place.document = None
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    code, _, err = run("up", "--yes")
    assert code == ExitCode.WRONG_INPUT
    assert "w2 of a pool that scales: its hardware is unknown" in err


def test_spare_machines_without_gpus_are_free_but_for_daemonsets(place: Objects, run: Run) -> None:
    for each in place.objects.values():
        del each["status"]["allocatable"]["nvidia.com/gpu"]
    container = {"resources": {"requests": {"cpu": "100m", "memory": "50Mi"}}}
    place.daemons = [{"spec": {"template": {"spec": {"containers": [container]}}}}]
    code, _, err = run("up", "--yes")
    assert code == ExitCode.DONE, err
    variables = place.runs[0][1]
    assert variables["autoscaler_pools"]["h100"]["resources"] == {"requests": {"cpu": "7400m", "memory": "58318Mi"}}


@pytest.mark.usefixtures("place")
def test_two_pools_with_one_deployment_are_refused(run: Run) -> None:
    text = INVENTORY.replace("w2: {ansible_host: 127.0.0.3}}}", "}}\nH100: {hosts: {w2: {ansible_host: 127.0.0.3}}}")
    text = text.replace("children: {h100: }", "children: {h100: , H100: }")
    for spare, wanted in ((1, ExitCode.WRONG_INPUT), (0, ExitCode.DONE)):
        pools = f"{{h100: {{max: 2, spare: 1}}, H100: {{max: 1, spare: {spare}}}}}"
        Path("hosts.yml").write_text(text.replace("{h100: {max: 2, spare: 1}}", pools))
        code, _, err = run("up", "--yes")
        assert code == wanted, err
        assert ("the pools H100 and h100 of gpunodes_pools have spare machines" in err) == (spare > 0)


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("{h100: {max: 2, spare: 1}}", "{h100: {}}", "no pool scales"),
        ("gpunodes_bmc_type: redfish", "gpunodes_bmc_type: ''", "w1 of a pool that scales: it has no BMC"),
        ("gpunodes_bmc_type: redfish", "gpunodes_bmc_type: wol", "set gpunodes_bmc_mac"),
        (
            "gpunodes_bmc_type: redfish",
            "gpunodes_bmc_type: redfish\n    gpunodes_bmc_jump: ops@b",
            "gpunodes_bmc_jump_key",
        ),
        (
            "gpunodes_power_image: registry.example/gpunodes:1",
            "x: y",
            "no image of the power server at gpunodes-image-",
        ),
        (
            "127.0.0.3}",
            "127.0.0.3}, w9: {ansible_host: 127.0.0.9}",
            "w9 of a pool that scales: no node is",
        ),
        (
            "spare: 1}}",
            "spare: 1}}\n    gpunodes_node_taints: \"{{ [{'key': 'a'}, 3] }}\"",
            "w1 of a pool that scales: gpunodes_node_taints is no list of taints",
        ),
        ("{max: 2, spare: 1}", "{max: 2, min: 3}", "min"),
        (
            "spare: 1}}",
            "spare: 1}}\n    gpunodes_gpu_sharing: {mode: mps, replicas: 4}",
            "the pool h100 of gpunodes_pools has spare machines, and pods share the GPUs of w1 by MPS",
        ),
    ],
)
def test_what_cannot_work_is_one_sentence_and_changes_nothing(
    place: Objects, run: Run, old: str, new: str, wanted: str
) -> None:
    assert old in INVENTORY
    Path("hosts.yml").write_text(INVENTORY.replace(old, new))
    code, _, err = run("up", "--yes")
    assert code == ExitCode.WRONG_INPUT, err
    assert wanted in err
    assert (place.document, place.runs, place.registered) == (None, [], [])


def test_a_machine_that_someone_switched_off_is_not_counted_as_on(place: Objects, run: Run) -> None:
    """Its node stays."""
    scales(place, run, Phase.BY_HAND, ready=False)
    code, out, _ = run("status", "--json")
    assert code == ExitCode.DONE
    assert json.loads(out)["pools"]["h100"]["on"] == 1


def test_a_machine_that_is_on_with_an_error_is_no_success(place: Objects, run: Run) -> None:
    scales(place, run)
    place.texts["w2"] = MachineState(Phase.ON, 1.0, "switched on by someone else", "a pod fails").text()
    code, out, _ = run("status", "--json")
    assert code == ExitCode.PARTLY
    assert [each["reason"] for each in json.loads(out)["machines"]] == ["", "a pod fails"]


def test_a_machine_whose_node_is_not_certainly_its_own_is_not_usable(place: Objects, run: Run) -> None:
    scales(place, run, Phase.OFF, machine_id=machine_id("w7"))
    found = json.loads(run("status", "--json")[1])
    assert [each["unusable"] for each in found["machines"]] == ["", decisions.FOREIGN]


def test_machines_that_are_off_and_missed_an_upgrade_are_named(place: Objects, run: Run) -> None:
    scales(place, run, Phase.OFF, gone=True)
    place.texts["w2"] = MachineState(Phase.OFF, 1.0, kubelet="v1.34.1").text()
    found = json.loads(run("status", "--json")[1])
    wanted = "kubelets are older than the API server (1.36.3): w2; `gpunodes upgrade 1.36.3` upgrades them with --wake"
    assert found["behind"] == wanted
    assert wanted in run("status")[1]
    assert [each["unusable"] for each in found["machines"]] == ["", ""]
    place.texts["w2"] = MachineState(Phase.OFF, 1.0, kubelet="v1.32.9").text()
    found = json.loads(run("status", "--json")[1])
    assert found["machines"][1]["unusable"] == (
        "its kubelet is v1.32.9, more than 3 minors older than the control plane, v1.36.3: "
        "`gpunodes power w2 on --wait`, then `gpunodes upgrade`"
    )


def test_an_autoscaler_that_is_not_there(place: Objects, run: Run) -> None:
    for command in (("status",), ("down", "--yes")):
        code, _, err = run(*command)
        assert code == ExitCode.WRONG_INPUT
        assert "this cluster has no autoscaler" in err
    assert place.runs == []


STARTING, STOPPING = "gpunodes.dev/starting", "gpunodes.dev/stopping"
DISABLED = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
MARKED = {DISABLED: "true", "gpunodes.dev/autoscaler-disabled": "maintenance"}


def scales(place: Objects, run: Run, phase: Phase | None = None, **node: Any) -> None:
    """The machines of a pool that scales; w2 is in ``phase``, and its node has ``node``, ``gone`` if it has none."""
    run("up", "--yes")
    place.objects = {name: node_object(name) for name in ("w1", "w2")}
    if phase:
        place.texts["w2"] = MachineState(phase, 1.0, "a reason").text()
    if node.pop("gone", False):
        del place.objects["w2"]
        return
    taints = node.pop("taints", ())
    place.objects["w2"] = node_object("w2", **node)
    place.objects["w2"]["spec"]["taints"] = [{"key": key, "effect": "NoSchedule"} for key in taints]


def taints_of(place: Objects, name: str = "w2") -> list[str]:
    return [each["key"] for each in place.objects[name]["spec"]["taints"]]


def is_off(place: Objects, name: str = "w2") -> bool:
    """Whether other commands leave the machine alone."""
    node, state = place.seen_nodes().get(name), place.switched_off().get(name)
    return state is not None and state.is_off(ready=node.node.ready if node else None)


@pytest.mark.parametrize("command", ["up", "down"])
def test_control_planes_are_locked_while_they_are_changed(place: Objects, run: Run, command: str) -> None:
    """Not the machines that scale, nor all others: the autoscaler holds the locks of those that it switches."""
    run("up", "--yes")
    seen: list[tuple[str, str, bool]] = []
    place.meanwhile = lambda: seen.extend(
        (name, lease["spec"]["holderIdentity"].split("/")[1], "gpunodes.dev/alone" in lease["metadata"]["annotations"])
        for name, lease in place.api.leases.items()
    )
    assert run(command, "--yes")[0] == 0
    assert seen == [("gpunodes-machine-control-1", f"autoscale {command}", False)]
    assert place.api.leases == {}


@pytest.mark.parametrize("command", ["up", "down"])
def test_a_control_plane_that_another_command_works_on_is_not_changed(place: Objects, run: Run, command: str) -> None:
    run("up", "--yes")
    other = Leases(Cluster(place.api), "upgrade")  # type: ignore[arg-type]  # an API in memory
    other.holder = "ann@desk/upgrade/another-boot/7/7/7"
    other.take("control-1", alone=True)
    runs, before = len(place.runs), (place.document, place.passwords)
    code, _, err = run(command, "--yes")
    other.close()
    assert code == ExitCode.FAILED
    assert "control-1 is locked by `gpunodes upgrade` of ann@desk" in err
    assert (len(place.runs), (place.document, place.passwords)) == (runs, before)


def test_a_lock_that_is_lost_ends_the_playbook(place: Objects, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[Lost] = []
    monkeypatch.setattr(Leases, "lost", lambda _: lost[0] if lost else None)
    place.meanwhile = lambda: lost.append(Lost("the lock on control-1 was taken by ann@desk"))
    code, _, err = run("up", "--yes")
    assert code == ExitCode.FAILED
    assert "the lock on control-1 was taken by ann@desk" in err


def test_down_keeps_the_states_of_machines_that_are_off(place: Objects, run: Run) -> None:
    scales(place, run, Phase.OFF, gone=True)
    code, out, err = run("down", "--yes")
    assert code == ExitCode.DONE, err
    assert "not on: w2" in out
    assert place.runs[-1][1]["autoscaler_state"] == "absent"
    assert place.document is None
    assert list(place.texts) == ["w2"]
    scales(place, run)
    assert run("down", "--yes")[:2] == (ExitCode.DONE, "removed\n")
    assert not place.texts


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.STOPPING, Phase.GIVING_UP, Phase.BY_HAND, Phase.OFF])
def test_down_gives_a_ready_node_back_in_whatever_phase_it_is(place: Objects, run: Run, phase: Phase) -> None:
    notes = {**MARKED, "gpunodes.dev/power-off": "boot-w2", "yours": "stays"}
    taints = [STOPPING, "yours", STARTING, "ToBeDeletedByClusterAutoscaler"]
    scales(place, run, phase, taints=taints, annotations=notes)
    code, out, err = run("down", "--yes")
    assert (code, out) == (ExitCode.DONE, "removed\n"), err
    assert "w2: its node is that of any other machine" in err
    assert (place.texts, place.document, is_off(place)) == ({}, None, False)
    assert taints_of(place) == ["yours"]
    assert place.objects["w2"]["metadata"]["annotations"] == {"yours": "stays"}


def test_an_annotation_and_a_taint_of_a_user_stay(place: Objects, run: Run) -> None:
    scales(place, run, Phase.ON, taints=["gpunodes.dev/other"], annotations={DISABLED: "true"})
    assert run("down", "--yes")[0] == ExitCode.DONE
    assert taints_of(place) == ["gpunodes.dev/other"]
    assert place.objects["w2"]["metadata"]["annotations"] == {DISABLED: "true"}


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.STOPPING, Phase.GIVING_UP])
def test_a_machine_without_a_node_is_off_until_its_node_registers(place: Objects, run: Run, phase: Phase) -> None:
    scales(place, run, phase, gone=True)
    assert run("down", "--yes")[0] == ExitCode.DONE
    assert place.states(create=False)["w2"].phase is Phase.OFF
    assert "when the autoscaler was removed" in place.switched_off()["w2"].described
    assert is_off(place)
    place.objects["w2"] = node_object("w2", starting=True)
    assert not is_off(place)
    code, out, err = run("down", "--yes")
    assert (code, out, taints_of(place), place.texts) == (ExitCode.DONE, "removed\n", [], {}), err
    assert run("down", "--yes")[0] == ExitCode.WRONG_INPUT, "nothing is left"


@pytest.mark.parametrize(("phase", "off"), [(Phase.STARTING, False), (Phase.STOPPING, True), (Phase.GIVING_UP, True)])
def test_a_node_that_is_not_ready_keeps_no_taint(place: Objects, run: Run, phase: Phase, *, off: bool) -> None:
    """One that was being switched off is not repaired while it is not ready; afterwards it is as any other."""
    scales(place, run, phase, taints=[STOPPING, STARTING], ready=False)
    assert run("down", "--yes")[0] == ExitCode.DONE
    assert (taints_of(place), is_off(place)) == ([], off)
    place.objects["w2"] = node_object("w2")
    assert not is_off(place)


def test_down_decides_by_what_the_power_server_left(place: Objects, run: Run) -> None:
    scales(place, run, Phase.STARTING, gone=True)
    place.ending = [["c1"], ["c1"]]

    def ends() -> None:
        place.texts["w1"] = MachineState(Phase.STOPPING, 2.0, "nothing needs it").text()
        del place.objects["w1"]
        place.objects["w2"] = node_object("w2", starting=True)

    place.meanwhile = ends
    assert run("down", "--yes")[0] == ExitCode.DONE
    assert not place.ending, "its pods have ended"
    assert {name: each.phase for name, each in place.states(create=False).items()} == {"w1": Phase.OFF}
    assert taints_of(place) == []


def test_a_power_server_that_writes_last_is_read_again(
    place: Objects, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales(place, run, Phase.STOPPING, gone=True)
    write = place.write

    def late(changes: Any) -> None:
        monkeypatch.setattr(place, "write", write)
        place.texts["w2"] = MachineState(Phase.FAILED, 3.0, "no boot", "no boot").text()
        place.version += 1
        write(changes)

    monkeypatch.setattr(place, "write", late)
    assert run("down", "--yes")[0] == ExitCode.DONE
    assert place.states(create=False)["w2"].phase is Phase.FAILED


@pytest.mark.parametrize(
    "ends_at", ["run", "delete_passwords", "pod_nodes", "change", "write", "delete_states", "delete_plan"]
)
def test_down_that_was_killed_at_any_point_converges_when_it_is_run_again(
    place: Objects, run: Run, monkeypatch: pytest.MonkeyPatch, ends_at: str
) -> None:
    scales(place, run, Phase.STOPPING, taints=[STOPPING])

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        target: Any = runner if ends_at == "run" else place
        patched.setattr(target, ends_at, killed)
        assert run("down", "--yes")[0] == ExitCode.INTERRUPTED
    code, out, err = run("down", "--yes")
    assert (code, out) == (ExitCode.DONE, "removed\n"), err
    assert (place.texts, place.document, taints_of(place)) == ({}, None, [])


def test_what_an_earlier_down_left_behind_ends_without_a_plan(place: Objects, run: Run) -> None:
    scales(place, run, Phase.STOPPING, taints=[STOPPING])
    place.texts["w1"] = json.dumps({"phase": "giving-up", "since": 1.0})
    place.delete_plan()
    assert is_off(place)
    code, out, err = run("down", "--dry-run")
    assert code == ExitCode.DONE, err
    assert "w2" in out
    assert place.texts
    assert run("down", "--yes")[0] == ExitCode.DONE
    assert (place.texts, taints_of(place)) == ({}, []), "a state of another form, too"


@pytest.mark.parametrize("plan", [None, {}, {"machines": []}])
def test_an_autoscaler_whose_plan_was_damaged_is_removed(place: Objects, run: Run, plan: Any) -> None:
    scales(place, run, Phase.STARTING, taints=[STARTING])
    place.document = plan
    code, _, err = run("down", "--yes")
    assert code == ExitCode.DONE, err
    assert (place.running, place.texts, taints_of(place), place.document) == (False, {}, [], None)


@pytest.mark.parametrize("ids", [{"uuid": uuid("w7")}, {"machine_id": machine_id("w7")}])
def test_a_node_that_is_replaced_meanwhile_is_left_alone(place: Objects, run: Run, ids: dict[str, Any]) -> None:
    scales(place, run, Phase.STOPPING, taints=[STOPPING])
    change = place.change

    def replaced(name: str, make: Any) -> None:
        if name == "w2":
            place.objects["w2"] = node_object("w2", **ids)
            place.objects["w2"]["spec"]["taints"] = [{"key": STOPPING, "effect": "NoSchedule"}]
        change(name, make)

    place.change = replaced  # type: ignore[method-assign]  # as it happens then
    assert run("down", "--yes")[0] == ExitCode.DONE
    assert taints_of(place) == [STOPPING]


@pytest.mark.parametrize("wrong", ["provider", "uuid", "inventory"])
def test_the_node_of_another_machine_is_left_alone(place: Objects, run: Run, wrong: str) -> None:
    more = {"provider": {"provider": "gpunodes://w1"}, "uuid": {"uuid": uuid("w7")}}.get(wrong, {})
    scales(place, run, Phase.STOPPING, taints=[STOPPING], **more)
    if wrong == "inventory":
        place.delete_plan()
        Path("hosts.yml").write_text(INVENTORY.replace(", w2: {ansible_host: 127.0.0.3}", ""))
    code, _, err = run("down", "--yes")
    assert code == ExitCode.DONE, err
    assert "w2: a node of its name is not certainly its own" in err
    assert taints_of(place) == [STOPPING]
    assert not is_off(place), "the node is as any other"


def test_a_dry_run_of_down_shows_what_it_removes_and_changes_nothing(place: Objects, run: Run) -> None:
    scales(place, run, Phase.OFF, gone=True)
    before = (place.document, dict(place.passwords), dict(place.texts), list(place.runs))
    code, out, err = run("down", "--dry-run", "--json")
    found = json.loads(out)
    assert code == ExitCode.DONE, err
    assert any("passwords" in each for each in found["changes"])
    assert [each for each in found["changes"] if each.startswith("w2: it stays as it is, off")]
    assert not [each for each in found["changes"] if each.startswith("w1: ")]
    code, out, _ = run("down", "--dry-run")
    assert code == ExitCode.DONE
    assert "would change: the autoscaler and the power server are removed" in out
    assert (place.document, place.passwords, place.texts, place.runs) == before


@pytest.mark.parametrize(
    ("phase", "node", "wanted"),
    [
        (Phase.STARTING, {}, "its node is that of any other machine"),
        (Phase.STARTING, {"gone": True}, "it counts as off on purpose until its node registers"),
        (Phase.STOPPING, {"ready": False}, "it counts as off on purpose until its node is ready"),
        (Phase.FAILED, {"gone": True}, "it stays as it is, failed"),
    ],
)
def test_a_dry_run_of_down_says_what_becomes_of_each_machine(
    place: Objects, run: Run, phase: Phase, node: dict[str, Any], wanted: str
) -> None:
    scales(place, run, phase, **node)
    _, out, _ = run("down", "--dry-run", "--json")
    found = json.loads(out)
    assert any(each.startswith(f"w2: {wanted}") for each in found["changes"])
    assert [each["phase"] for each in found["machines"]] == ["on", phase.value], "as it is now"


STATE = json.loads(MachineState(Phase.BY_HAND, 1.0).text())
THREE = INVENTORY.replace(
    "{control-1: {ansible_host: 127.0.0.1}}",
    "{control-1: {ansible_host: 127.0.0.1}, control-2: {ansible_host: 127.0.0.4}, "
    "control-3: {ansible_host: 127.0.0.5}}",
)


@pytest.fixture
def one_is_dead(place: Objects, tmp_path: Path) -> Objects:
    """Three control planes, control-3 does not respond; the image is in an archive."""
    (tmp_path / "image.tar").touch()
    archive = f"gpunodes_power_archive: {tmp_path}/image.tar"
    Path("hosts.yml").write_text(THREE.replace("gpunodes_power_image: registry.example/gpunodes:1", archive))
    place.silent = [("control-3", f"no route {ATTACKS[0]}")]
    return place


def test_a_machine_that_responds_and_cannot_be_read_stops_up_before_anything_is_written(
    place: Objects, run: Run
) -> None:
    """Such as with a wrong password for sudo, which may be that of all machines."""
    place.objects["w2"], place.dead, place.odd = node_object("w2"), {"w2"}, {"w2"}
    code, _, errors = run("up", "--yes")
    assert code == ExitCode.FAILED
    assert "no route to host" in errors
    assert (place.document, place.passwords, place.runs) == (None, {}, [])


def test_up_leaves_a_dead_control_plane_out_and_says_so(one_is_dead: Objects, run: Run) -> None:
    code, out, err = run("up", "--yes")
    assert code == ExitCode.PARTLY, err
    assert one_is_dead.ran_on == ["control-1", "control-2"]
    assert "left out: control-3: no route" in out
    assert "it has no image of the power server" in out
    assert "run the same command again" in out
    assert not unprintable(out)
    code, out, _ = run("up", "--yes", "--json")
    assert code == ExitCode.PARTLY
    assert list(json.loads(out)["left_out"]) == ["control-3"]
    one_is_dead.silent = []
    code, out, _ = run("up", "--yes")
    assert (code, one_is_dead.ran_on) == (ExitCode.DONE, ["control-1", "control-2", "control-3"])
    assert "left out" not in out


def test_up_with_an_image_of_a_registry_lacks_nothing_on_a_dead_control_plane(one_is_dead: Objects, run: Run) -> None:
    Path("hosts.yml").write_text(THREE)
    code, out, err = run("up", "--yes", "--json")
    assert code == ExitCode.DONE, err
    assert json.loads(out)["left_out"] == {}
    assert one_is_dead.ran_on == ["control-1", "control-2"]


def test_down_leaves_a_dead_control_plane_out_and_another_run_completes_it(one_is_dead: Objects, run: Run) -> None:
    run("up", "--yes")
    code, out, err = run("down", "--yes")
    assert code == ExitCode.PARTLY, err
    assert out.startswith("removed\nleft out: control-3: no route")
    assert one_is_dead.passwords == {}, "no password waits for a machine that is dead"
    one_is_dead.silent = []
    code, out, err = run("down", "--yes")
    assert (code, out) == (ExitCode.DONE, "removed\n"), err
    assert one_is_dead.document is None
    code, _, err = run("down", "--yes")
    assert code == ExitCode.WRONG_INPUT
    assert "no autoscaler" in err


def test_what_the_cluster_says_is_shown_without_control_characters(place: Objects, run: Run) -> None:
    place.document = document({"w1": "h100", "w2": "h100"}, {"h100": (0, 2, 0)})
    for attack in ATTACKS:
        place.texts["w1"] = MachineState(Phase.FAILED, 1.0, attack, attack).text()
        for words in (("status",), ("status", "--json")):
            code, out, err = run(*words)
            assert code == ExitCode.PARTLY
            assert not unprintable(out + err)


@pytest.mark.parametrize("attack", ATTACKS, ids=ascii)
def test_what_becomes_of_machines_is_shown_as_text(place: Objects, run: Run, attack: str) -> None:
    """The reason of a state, and the name of a machine that has one: others may have written both."""
    place.document = document({"w1": "h100", "w2": "h100"}, {"h100": (0, 2, 0)})
    place.texts = {name: json.dumps({**STATE, "reason": attack, "error": attack}) for name in ("w1", attack)}
    place.ending = [[attack]]
    for words in (("status",), ("down", "--dry-run"), ("down", "--dry-run", "--json"), ("up", "--dry-run"), ("down",)):
        _, out, err = run(*words, *(() if words[0] == "status" else ("--yes",)))
        assert is_plain(out + err), words
    place.failure = attack
    for words in (("up", "--yes"), ("down", "--yes")):
        _, out, err = run(*words)
        assert is_plain(out + err), words


@pytest.mark.parametrize("found", [{}, {"machines": ATTACKS}, {"version": 1, "pools": {"../x": {}}}])
def test_a_plan_that_others_wrote_is_refused(place: Objects, run: Run, found: Any) -> None:
    place.document = found
    code, _, err = run("status")
    assert code == ExitCode.WRONG_INPUT
    assert "the plan of the power server is invalid" in err


def test_a_pod_that_does_not_start_is_an_error_with_its_remedy(
    place: Objects, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_READY_S", 0.0)
    monkeypatch.setattr(place, "is_running", lambda: False)
    code, _, err = run("up", "--yes")
    assert code == ExitCode.FAILED
    assert "its pod is not ready" in err
    assert "logs deployment/gpunodes-autoscaler" in err


def test_a_machine_that_is_off_and_whose_bmc_does_not_answer_is_named_with_the_cause(place: Objects, run: Run) -> None:
    """After 10 minutes `up` called the pod not ready, which it was; the BMC was named only in its log."""
    scales(place, run, Phase.OFF, gone=True)
    why = "Redfish at w2.bmc.example does not respond: no route to host"
    place.texts["w2"] = MachineState(Phase.LEFT_ALONE, 1.0, decisions.NOT_KNOWN, why).text()
    code, out, err = run("up", "--yes")
    assert code == ExitCode.PARTLY, err
    assert f"left out: w2: {why}; its BMC does not say whether it is on: it is not used until then" in out
    code, out, _ = run("status", "--json")
    assert code == ExitCode.PARTLY
    assert json.loads(out)["machines"][1]["reason"] == why


def test_a_power_server_that_never_knows_a_machine_is_not_called_a_pod_that_is_not_ready(
    place: Objects, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_READY_S", 0.0)

    def forgets() -> None:
        del place.texts["w2"]

    place.meanwhile = forgets
    code, _, err = run("up", "--yes")
    assert code == ExitCode.FAILED
    assert "the power server knows nothing of w2" in err
    assert "wanted: a look of the power server at each machine" in err
