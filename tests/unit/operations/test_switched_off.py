"""Machines that the autoscaler keeps off: no repair touches them, roll-outs skip them, health and status say why."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpunodes.cli import common
from gpunodes.cli import status as status_command
from gpunodes.engine import identities, scans
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.fleet import InventoryFleet
from gpunodes.errors import ExitCode
from gpunodes.health.model import Action, State, Verdict
from gpunodes.identity.matcher import Match
from gpunodes.identity.model import MachineIdentity, NodeIdentity
from gpunodes.inventory import Inventory
from gpunodes.model import Role
from gpunodes.operations import cluster_state, preflight, scan, switched_off, upgrade_plan
from gpunodes.operations.repair import scanning
from gpunodes.operations.status import ClusterStatus
from gpunodes.planner.candidates import MachineFacts
from gpunodes.repair.policy import Budget, Decision, RepairLimits
from gpunodes.repair.record import RepairOutcome
from gpunodes.repair.switched_off import Switched, of_machines, parse
from gpunodes.rollout.record import RolloutOutcome
from gpunodes.views import health as health_view
from gpunodes.views import health_map

from tests import repair_fleet, rollout_fleet
from tests.repair_fleet import Fleet, fleet, outcomes, run
from tests.rollout_fleet import MemoryWork, roll_out

SINCE = 1_800_000_000
WORDS = "switched off by the autoscaler since 2027-01-15 08:00 UTC (no pod needs it)"
INCLUDE = "to include it: `gpunodes power w1 on --wait`, then the same command again"


@pytest.fixture(autouse=True)
def quick(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own state folder, and very short time limits."""
    repair_fleet.hurry(monkeypatch, tmp_path)
    rollout_fleet.hurry(monkeypatch, tmp_path)


def text(phase: str = "off", **more: Any) -> str:
    return json.dumps({"phase": phase, "since": SINCE, "reason": "no pod needs it", "error": "", "used": 0, **more})


def scaled(number: int, off: tuple[str, ...], sick: tuple[str, ...] = ()) -> Fleet:
    """Workers, of which some are off and have no node."""
    place = fleet(number, sick)
    for name in off:
        del place.api.nodes[name]
        place.machines[name].off = True
    place.api.switched = {name: text() for name in off}
    place.pool_label = lambda name: ""  # type: ignore[method-assign]  # of a machine without a node
    return place


def decided(place: Fleet, name: str, **request: Any) -> tuple[Decision, str]:
    (found,) = [each for each in run(place, **request).machines if each.machine == name]
    return found.decision, found.why


# The ConfigMap


def test_only_what_is_a_state_counts() -> None:
    data = {
        "w0": text(),
        "w1": text("stopping"),
        "w2": text("on"),
        "w3": text("by-hand"),
        "w4": text(saved={"labels": {}}),
        "Not A Node": text(),
        "a": "{",
        "b": "[]",
        "c": text(since="now"),
        "d": text(since=float("nan")),
        "e": text(since=1e300),
        "f": text(since=-1),
        "g": json.dumps({"phase": ["off"], "since": SINCE}),
        "h": text(reason=5),
        "i": "[" * 100_000,
        "j": json.dumps({"phase": "off"}),
    }
    assert {name: each.on_purpose for name, each in parse(data).items()} == {
        "w0": True,
        "w1": True,
        "w2": False,
        "w3": True,
        "w4": True,
    }
    assert list(map(parse, (None, [], "x", {"w": 1}))) == [{}, {}, {}, {}]


def test_a_state_is_described_in_one_printable_line() -> None:
    assert Switched("off", SINCE, "no pod needs it").described == f"off on purpose: {WORDS}"
    assert "is switching it off since" in Switched("stopping", SINCE).described
    hostile = Switched("off", SINCE, "x\n\x1b[31m" + "y" * 1000).described
    assert hostile.isprintable()
    assert len(hostile) < 300


def test_a_machine_is_found_by_the_host_name_that_it_reported() -> None:
    states = {"gpu-1": Switched("off", SINCE), "w2": Switched("off", SINCE)}
    machines = {
        "rack-7": MachineIdentity("rack-7", hostname="gpu-1"),
        "W2": MachineIdentity("W2"),
        "w3": MachineIdentity("w3"),
    }
    assert set(of_machines(states, machines)) == {"rack-7", "W2"}
    clone = {**machines, "rack-8": MachineIdentity("rack-8", hostname="gpu-1")}
    assert set(of_machines(states, clone)) == {"W2"}, "of two machines with one name neither is known to be off"


@pytest.mark.parametrize("match", [Match(NodeIdentity("w")), Match(), Match(contradiction="its boot id differs")])
def test_no_machine_takes_the_state_of_another_whose_name_it_reports(match: Match) -> None:
    """Root on W reported the name of V: V, which is kept off, counted as unreachable, and nothing left it out."""
    states = {"v": Switched("off", SINCE)}
    machines = {"w": MachineIdentity("w", hostname="v"), "V": MachineIdentity("V", hostname="v")}
    assert set(of_machines(states, machines, {"w": match, "V": Match()})) == {"V"}
    by_record = {"w": MachineIdentity("w", hostname="v"), "rack-7": MachineIdentity("rack-7", hostname="v")}
    found = set(of_machines(states, by_record, {"w": match, "rack-7": Match()}))
    assert found == ({"rack-7"} if match != Match() else set()), "without any node, either may have had that one"


def test_the_state_of_a_machine_that_stops_is_found_by_its_node() -> None:
    states = {"v": Switched("stopping", SINCE)}
    machines = {"rack-7": MachineIdentity("rack-7", hostname="x"), "v": MachineIdentity("v")}
    assert set(of_machines(states, machines, {"rack-7": Match(NodeIdentity("v"))})) == {"rack-7"}


def test_a_scan_finds_that_a_machine_is_off_although_another_reports_its_name() -> None:
    place = scaled(3, ("w1",))
    identities.remember(place.cluster_name, {"w0": {"hostname": "w1"}, "w1": {"hostname": "w1"}})
    command: Any = SimpleNamespace(fleet=place, cluster=Cluster(place.session(), patience_s=0))
    gone = scans.MachineScan(unreachable("w1"), {})
    assert scanning._marked(command, {"w1": gone})["w1"].verdict.state is State.OFF


def test_it_is_read_with_one_request_and_is_empty_without_an_autoscaler() -> None:
    place = fleet(1)
    cluster = Cluster(place.session(), patience_s=0)
    assert cluster.switched_off() == {}
    place.api.switched = {"w0": text(), "w1": text("on")}
    calls = place.api.calls
    assert set(cluster.switched_off()) == {"w0"}
    assert place.api.calls == calls + 1


# Repairs


def test_no_repair_touches_a_machine_that_is_off() -> None:
    place = scaled(4, ("w1", "w2"))
    found = run(place)
    assert [(each.decision, each.why) for each in found.machines if each.machine == "w1"] == [
        (Decision.NOTHING, f"off on purpose: {WORDS}")
    ]
    assert found.exit_code is ExitCode.DONE, "a timer that repairs hung machines finds nothing wrong"
    assert all(machine.done == [] for machine in place.machines.values())
    assert place.api.leases == {}


@pytest.mark.parametrize("first", ["", "bmc"])
def test_nor_if_the_user_names_it(first: str) -> None:
    place = scaled(3, ("w1",))
    limits = RepairLimits(by_hand=True)
    decision, why = decided(place, "w1", limits=limits, named=frozenset({"w1"}), **({"first": first} if first else {}))
    assert decision is Decision.REFUSE
    assert why == f"off on purpose: {WORDS}; `gpunodes power w1 on` ends that"
    assert place.machines["w1"].done == []


def test_machines_that_are_off_count_neither_as_sick_nor_as_unavailable() -> None:
    """Six of ten are off: the pool has four machines, and one of these is repaired within its budget."""
    off = tuple(f"w{index}" for index in range(4, 10))
    place = scaled(10, off, sick=("w0",))
    assert outcomes(run(place, limits=RepairLimits(max_unavailable=Budget(1))))["w0"] is RepairOutcome.REPAIRED
    many = scaled(10, off, sick=("w0", "w1"))
    decision, why = decided(many, "w0")
    assert decision is Decision.REFUSE
    assert why.startswith("2 of 4 machines of pool GPU workers are unhealthy at the same time")


def test_a_machine_that_stops_still_has_a_node_which_counts_no_more() -> None:
    place = fleet(4, ["w0"])
    place.machines["w1"].off = True
    place.api.nodes["w1"]["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]
    place.api.switched = {"w1": text("stopping")}
    assert outcomes(run(place))["w0"] is RepairOutcome.REPAIRED
    assert place.machines["w1"].done == []
    place.api.switched = None
    place.machines["w0"].sick = True
    assert decided(place, "w0")[0] is not Decision.REPAIR, "without the autoscaler w1 is unavailable"


def test_the_cluster_state_says_why_a_machine_has_no_node() -> None:
    place = scaled(2, ("w1",))
    cluster = Cluster(place.session(), patience_s=0)

    class Command:
        fleet = place
        leases = type("Leases", (), {"observe": staticmethod(lambda **_: [])})()

    Command.cluster = cluster  # type: ignore[attr-defined]  # as the protocol has it
    found = cluster_state.read(Command(), {})  # type: ignore[arg-type]  # as above
    assert found.machines["w1"] == (None, f"off on purpose: {WORDS}")
    assert set(found.off) == {"w1"}


# Roll-outs


def test_a_roll_out_skips_it_and_says_how_to_include_it() -> None:
    place = scaled(3, ("w1",))
    work = MemoryWork(place)
    result = roll_out(place, work)
    assert {each.machine: (each.outcome, each.why) for each in result.machines} == {
        "w0": (RolloutOutcome.DONE, ""),
        "w1": (
            RolloutOutcome.SKIPPED,
            f"off on purpose: {WORDS}; {INCLUDE}, or --wake --only w1 with the roll-out",
        ),
        "w2": (RolloutOutcome.DONE, ""),
    }
    assert result.finished
    assert work.stages("w1") == []


# Commands


INVENTORY = (
    "all: {vars: {gpunodes_pools: {h100: %s}}}\n"
    "control_plane: {hosts: {c1: {ansible_host: 10.0.0.1}}}\n"
    "workers: {children: {h100: {hosts: {w0: {ansible_host: 10.0.0.2}, w1: {ansible_host: 10.0.0.3}}}}}\n"
)


def inventory(tmp_path: Path, pool: str = "{max: 2}") -> Inventory:
    path = tmp_path / "hosts.yml"
    path.write_text(INVENTORY % pool)
    return Inventory(path)


def test_the_cluster_is_asked_only_if_there_are_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = scaled(2, ("w1",))
    asked: list[int] = []

    def session(_: Any) -> Any:
        asked.append(1)
        return place.session()

    monkeypatch.setattr(InventoryFleet, "session", session)
    none = tmp_path / "none.yml"
    none.write_text(INVENTORY.replace("{h100: %s}", "{}"))
    assert switched_off.read(Inventory(none)) == {}
    assert asked == []
    # After `gpunodes autoscale down` the pool scales no longer; repairs see the record, too.
    assert set(switched_off.read(inventory(tmp_path, "{}"))) == {"w1"}
    found = inventory(tmp_path)
    assert set(switched_off.read(found)) == {"w1"}
    on, off = switched_off.split(found, found.machines())
    assert ([each.name for each in on], off) == (
        ["c1", "w0"],
        {"w1": f"off on purpose: {WORDS}; {INCLUDE}"},
    )
    place.api.down = True
    assert switched_off.read(found) == {}, "without an API its machines count as any others"


def unreachable(name: str) -> Verdict:
    return Verdict(name, "live", State.UNREACHABLE, Action.NONE)


def test_health_says_that_it_is_off_on_purpose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    off = {"w1": Switched("off", SINCE, "no pod needs it")}
    assert switched_off.marked(unreachable("w0"), off).state is State.UNREACHABLE
    healthy = Verdict("w1", "live", State.HEALTHY, Action.NONE)
    assert switched_off.marked(healthy, off) is healthy, "someone has switched it on"
    verdict = switched_off.marked(unreachable("w1"), off)
    lines = health_view.listing([verdict, Verdict("w0", "live", State.HEALTHY, Action.NONE)]).splitlines()
    assert lines == [f"w1: off on purpose: {WORDS}", "1 of 2 healthy, 1 off on purpose."]
    (entry,) = health_view.document([verdict])["machines"]
    assert (entry["state"], entry["action"], entry["wanted"]) == ("off", "none", WORDS)
    with (tmp_path / "lines").open("w+") as stream:
        view = health_map.HealthLines(stream)
        monkeypatch.setattr(scans, "scan", lambda *_, on_scan, **__: on_scan(unreachable("w1")) or {})
        scan.run([], view, deadline_s=None, parallel=1, cluster="", off=off)
        stream.seek(0)
        assert f"w1: off: {WORDS}" in stream.read()


def test_status_lists_it_beside_the_missing_machines() -> None:
    found = ClusterStatus("e", "v1.36.3", (), ("w0",), off={"w1": f"off on purpose: {WORDS}"})
    table = status_command._table(found, None)
    assert "no node" in next(line for line in table.splitlines() if "w0" in line)
    assert f"off on purpose: {WORDS}" in next(line for line in table.splitlines() if "w1" in line)


def test_the_plan_of_an_upgrade_does_not_contact_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(switched_off, "read", lambda _: {"w1": Switched("off", SINCE, "no pod needs it")})

    class Stop(Exception):  # noqa: N818 - it ends the test here
        pass

    def inspect(_: Any, machines: Any, *__: Any, **___: Any) -> Any:
        read.extend(machine.name for machine in machines)
        raise Stop

    monkeypatch.setattr(preflight, "inspect", inspect)
    with pytest.raises(Stop):
        upgrade_plan.run(inventory(tmp_path), "1.37", type("View", (), {"begin": lambda *_: None})())
    assert read == ["c1", "w0"]


@pytest.mark.parametrize(
    ("phase", "ready", "is_off"),
    [
        ("off", None, True),
        ("off", False, False),  # its node is newer than this record
        ("failed", True, False),
        ("stopping", True, True),
        ("starting", False, True),
        ("by-hand", False, True),
        ("by-hand", True, False),
        ("on", None, False),
        ("on", True, False),
    ],
)
def test_a_node_in_service_ends_what_was_recorded(phase: str, ready: bool | None, is_off: bool) -> None:
    assert parse({"w0": text(phase)})["w0"].is_off(ready=ready) is is_off


def test_commands_for_many_machines_leave_out_those_that_are_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = inventory(tmp_path)
    machines = found.machines(Role.WORKER)
    first = machines[0].name
    monkeypatch.setattr(switched_off, "read", lambda _: {first: Switched("off", SINCE, "nothing needs it")})
    assert [each.name for each in common.without_off(found, machines)] == [each.name for each in machines[1:]]
    assert f"skipped: {first}: off on purpose" in capsys.readouterr().err
    assert common.without_off(found, machines, [first]) == machines, "the user named it"


def test_a_preflight_says_that_a_machine_is_off_on_purpose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switched_off, "read", lambda _: {"w1": Switched("off", SINCE, "no pod needs it")})
    machines = {machine.name: machine for machine in inventory(tmp_path).machines()}
    silent = MachineFacts("w1", machines["w1"].role, facts=None, unreachable="timed out")
    other = MachineFacts("w0", machines["w0"].role, facts=None, unreachable="timed out")
    found = preflight._explained(inventory(tmp_path), [silent, other])
    assert [each.unreachable for each in found] == [
        f"off on purpose: {WORDS}; `gpunodes power w1 on` ends that",
        "timed out",
    ]
