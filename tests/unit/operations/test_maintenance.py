"""Nodes in maintenance: they are not repaired, and the reason is reported."""

from __future__ import annotations

import datetime as dt
import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from gpunodes.engine import records
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.connection import Response
from gpunodes.engine.cluster.errors import NoResponse, Refused
from gpunodes.engine.leases.errors import Held
from gpunodes.engine.leases.held import Leases
from gpunodes.errors import WrongInput
from gpunodes.health.model import Action
from gpunodes.operations import maintenance, power, status
from gpunodes.repair import maintenance as kept
from gpunodes.repair.maintenance import Maintenance
from gpunodes.repair.policy import Decision, RepairLimits
from gpunodes.repair.record import RepairOutcome, RepairRecord, Stage
from gpunodes.views import maintenance as views

from tests.hostile import cluster_report
from tests.repair_fleet import Fleet, clean, fleet, hurry, outcomes, resume, run

NOW = 1_800_000_000.0
MARK = "gpunodes.dev/maintenance"


@pytest.fixture(autouse=True)
def quick(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own state folder, and very short time limits."""
    hurry(monkeypatch, tmp_path)


def node(place: Fleet, name: str = "w1") -> dict[str, Any]:
    return place.api.nodes[name]


def entry(place: Fleet, name: str = "w1") -> Any:
    return next(each for each in place.all_machines() if each.name == name)


def on(place: Fleet, until: float | None = None, *, cordon: bool = True) -> None:
    maintenance.begin(place, [entry(place)], "disk swap", until, cordon=cordon)


def off(place: Fleet) -> list[maintenance.MaintainedNode]:
    return maintenance.end(place, [entry(place)])


def decision(place: Fleet, **request: Any) -> tuple[Decision, str]:
    (found,) = [each for each in run(place, **request).machines if each.machine == "w1"]
    return found.decision, found.why


def test_commands_report_that_they_wait_and_suggest_only_their_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(0.0, 20.0)
    clock = SimpleNamespace(monotonic=lambda: next(ticks), sleep=lambda _: None)
    monkeypatch.setattr("gpunodes.engine.cluster.api.time", clock)
    place, waits = fleet(2), list[str]()
    place.api.down = True
    commands: list[Callable[[], object]] = [
        lambda: maintenance.begin(place, [entry(place)], "disk", None, on_wait=waits.append),
        lambda: maintenance.end(place, [entry(place)], waits.append),
        lambda: maintenance.listed(place, waits.append),
    ]
    for command in commands:
        with pytest.raises(NoResponse) as raised:
            command()
        assert raised.value.problem.remedy == "restore the control plane first"
    with pytest.raises(NoResponse) as raised:
        power.clear(place, entry(place), without_cluster=False, on_wait=waits.append)
    assert raised.value.problem.remedy.endswith("or skip the cluster with --without-cluster")
    assert len(waits) == 4
    assert all("waiting up to" in wait for wait in waits)


def test_a_machine_in_maintenance_is_not_repaired_even_if_named() -> None:
    place = fleet(5, ["w1"])
    on(place)
    assert node(place)["spec"]["unschedulable"]
    for request in (
        {},
        {"named": frozenset({"w1"})},
        {"named": frozenset({"w1"}), "limits": RepairLimits(by_hand=True)},
    ):
        found, why = decision(place, **request)
        assert found is Decision.REFUSE
        assert "it is in maintenance: disk swap, by " in why
        assert "`gpunodes maintenance off w1`" in why
    assert place.machines["w1"].done == []
    assert [each.cordoned for each in off(place)] == [False]
    assert decision(place)[0] is Decision.REPAIR
    assert place.machines["w1"].done == ["reboot"]
    assert MARK not in node(place)["metadata"]["annotations"]


def test_a_healthy_machine_in_maintenance_is_not_reported() -> None:
    place = fleet(5)
    on(place)
    assert decision(place)[0] is Decision.NOTHING


def test_expired_maintenance_blocks_no_repair_although_its_cordon_stays() -> None:
    place = fleet(5, ["w1"])
    on(place, until=time.time() + 0.05)
    time.sleep(0.1)
    assert decision(place)[0] is Decision.REPAIR
    assert place.machines["w1"].done == ["reboot"]
    assert node(place)["spec"]["unschedulable"], "only `maintenance off` uncordons it"
    (found,) = maintenance.listed(place)
    assert "expired" in views.table([found])
    off(place)
    assert not node(place)["spec"]["unschedulable"]


def test_a_cordoned_machine_is_rebooted_only_if_named() -> None:
    """A timer does not repair a node that a user cordoned to work on it."""
    place = fleet(5, ["w1"])
    node(place)["spec"]["unschedulable"] = True
    found, why = decision(place)
    assert (found, place.machines["w1"].done) == (Decision.REFUSE, [])
    assert "a user or another program cordoned it" in why
    assert decision(place, named=frozenset({"w1"}))[0] is Decision.REPAIR
    assert place.machines["w1"].done == ["reboot"]
    assert node(place)["spec"]["unschedulable"]


def test_an_older_cordon_stays_after_maintenance() -> None:
    place = fleet(3)
    node(place)["spec"]["unschedulable"] = True
    on(place)
    on(place, until=time.time() + 3600)
    (ended,) = off(place)
    assert ended.cordoned
    assert node(place)["spec"]["unschedulable"]
    assert views.ended([ended]) == "w1: maintenance ended; it stays cordoned by a user or another program"
    (again,) = off(place)
    assert again.maintenance is None


@pytest.mark.parametrize("stage", [Stage.UNCORDON, Stage.UNDO])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_resumed_repair_leaves_the_cordon_to_the_maintenance_that_began_meanwhile(
    stage: Stage, by_hand: bool
) -> None:
    """The command was killed before the uncordon; then a person began to work on the machine."""
    place = fleet(5)
    place.cordon("w1", "r1")
    record = RepairRecord("r1", "w1", "test", time.time(), "sick", "reboot", node="w1", step="reboot")
    outcome = RepairOutcome.REPAIRED if stage is Stage.UNCORDON else RepairOutcome.NOT_REPAIRED
    records.write(record.to(stage, outcome=outcome))
    if by_hand:
        node(place)["metadata"]["annotations"][MARK] = "replacing the fans"
    else:
        on(place)
    resume(place)
    assert node(place)["spec"]["unschedulable"]
    assert "gpunodes.dev/cordoned-by" not in node(place)["metadata"]["annotations"]
    off(place)
    assert not node(place)["spec"].get("unschedulable"), "it ends with the maintenance"
    clean(place)


def test_the_maintenance_of_an_unfinished_repair_keeps_the_cordon_after_its_end() -> None:
    """The cordon stays until `off`; and after `off` the repair has it still."""
    place = fleet(5)
    place.cordon("w1", "r1")
    record = RepairRecord("r1", "w1", "test", time.time(), "sick", "reboot", node="w1", step="reboot")
    records.write(record.to(Stage.UNCORDON, outcome=RepairOutcome.REPAIRED))
    on(place, time.time() + 60)
    off(place)
    assert node(place)["spec"]["unschedulable"], "it is the repair's"
    on(place, time.time() - 60)
    resume(place)
    assert node(place)["spec"]["unschedulable"]
    off(place)
    clean(place)


def test_maintenance_lifts_its_cordon_although_a_repair_left_its_annotation() -> None:
    """`kubectl uncordon` had lifted that of the repair."""
    place = fleet(5)
    place.cordon("w1", "r1")
    place.uncordon("w1")
    on(place)
    assert outcomes(resume(place)) == {}
    off(place)
    clean(place)


def test_a_cordon_that_a_user_made_in_maintenance_stays() -> None:
    """The user lifted that of the maintenance before, with kubectl."""
    place = fleet(5, ["w1"])
    on(place, until=time.time() - 60)
    place.uncordon("w1")
    place.cordon("w1")
    assert decision(place)[0] is Decision.REFUSE, "the maintenance has expired; a user is at work"
    off(place)
    assert node(place)["spec"]["unschedulable"]


def test_expired_maintenance_without_a_cordon_does_not_keep_that_of_a_later_repair() -> None:
    place = fleet(5, ["w1"])
    on(place, time.time() - 60, cordon=False)
    assert outcomes(run(place))["w1"] is RepairOutcome.REPAIRED
    assert not node(place)["spec"].get("unschedulable")


def test_expired_maintenance_does_not_keep_the_cordon_of_a_repair_that_is_cleared() -> None:
    place = fleet(5, ["w1"], cures=frozenset())
    on(place, time.time() - 60, cordon=False)
    assert outcomes(run(place))["w1"] is RepairOutcome.NEEDS_REPAIR
    assert power.clear(place, entry(place), without_cluster=False).schedulable is True
    assert not node(place)["spec"].get("unschedulable")


def test_a_machine_whose_repair_is_cleared_in_maintenance_stays_cordoned() -> None:
    """By `gpunodes uncordon`, after it needed repair: maintenance is what keeps pods away now."""
    place = fleet(5, ["w1"], cures=frozenset())
    assert outcomes(run(place))["w1"] is RepairOutcome.NEEDS_REPAIR
    on(place)
    done = power.clear(place, entry(place), without_cluster=False)
    assert done.schedulable is False
    assert node(place)["spec"]["unschedulable"]
    assert not node(place)["spec"].get("taints")
    off(place)
    clean(place)


def test_maintenance_of_a_machine_that_needs_repair_leaves_it_cordoned() -> None:
    place = fleet(5, ["w1"], cures=frozenset())
    run(place)
    before = dict(node(place)["metadata"]["annotations"])
    on(place)
    off(place)
    assert node(place)["spec"]["unschedulable"]
    assert node(place)["metadata"]["annotations"] == before


def test_without_a_cordon_pods_are_scheduled_but_nothing_is_repaired() -> None:
    place = fleet(5, ["w1"])
    on(place, cordon=False)
    assert not node(place)["spec"].get("unschedulable")
    assert decision(place)[0] is Decision.REFUSE


def test_it_does_not_begin_while_another_command_works_on_the_machine() -> None:
    place = fleet(5)
    other = Leases(Cluster(place.session()), "join")
    other.holder = "ann@desk/join/x/1/1/1"
    other.take_all(["w1"])
    with pytest.raises(Held, match="`gpunodes join` of ann@desk"):
        on(place)
    assert MARK not in node(place)["metadata"]["annotations"]
    other.release_all()
    other.close()
    on(place)
    assert place.api.leases == {}


def test_an_unfinished_repair_is_not_resumed_in_maintenance() -> None:
    place = fleet(5)
    node(place)["spec"]["unschedulable"] = True
    node(place)["metadata"]["annotations"]["gpunodes.dev/cordoned-by"] = "some-repair"
    on(place)
    (found,) = resume(place).machines
    assert (found.decision, found.outcome) == (Decision.REFUSE, None)
    assert "maintenance" in found.why
    off(place)
    (found,) = resume(place).machines
    assert found.outcome is RepairOutcome.REPAIRED


def test_an_annotation_written_by_hand_counts() -> None:
    place = fleet(5, ["w1"])
    node(place)["metadata"]["annotations"][MARK] = "ann swaps the disk"
    assert "in maintenance: ann swaps the disk" in decision(place)[1]
    (found,) = maintenance.listed(place)
    assert found.maintenance == Maintenance("ann swaps the disk")


@pytest.mark.parametrize(
    "text",
    ["[]", "3", "{", '{"reason": ["x"]}', '{"until": "soon"}', '{"until": 7, "since": {}}', '{"cordoned": "y"}'],
)
def test_an_invalid_annotation_blocks_repairs_and_owns_no_cordon(text: str) -> None:
    found = kept.parse(text)
    assert found is not None
    assert found.holds(NOW)
    assert not found.cordoned
    assert found.described()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"reason":' * 100_000, "[" * 900 + "]" * 900, "x" * 1_000_000])
def test_an_unreadable_annotation_affects_only_its_node(text: str) -> None:
    """A writer of one node can block repairs of that node only, and long texts are cut."""
    found = kept.parse(text)
    assert found is not None
    assert len(found.described()) <= 2000
    place = fleet(5)
    node(place, "w2")["metadata"]["annotations"][MARK] = text
    assert [each.maintenance for each in Cluster(place.session()).nodes() if each.maintenance] == [found]


def test_an_unreadable_node_is_not_repaired_and_affects_no_other() -> None:
    place = fleet(5)
    node(place, "w2")["status"]["conditions"] = [{}]
    nodes = {each.name: each for each in Cluster(place.session()).nodes()}
    assert "cannot be parsed" in getattr(nodes["w2"].maintenance, "reason", "")
    assert not nodes["w2"].ready
    assert nodes["w1"].ready
    assert nodes["w1"].maintenance is None


@pytest.mark.parametrize("stamp", ["9999-12-31T23:59:59-05:00", "0001-01-01T00:00:00+05:00"])
def test_a_time_that_utc_cannot_represent_is_ignored(stamp: str) -> None:
    found = kept.parse(f'{{"reason": "r", "since": "{stamp}", "until": "{stamp}"}}')
    assert found == Maintenance("r")
    assert found.described() == "r"
    assert found.holds(NOW)


@pytest.mark.parametrize("text", ["9999-12-31T23:59:59-05:00", "99999d" * 40])
def test_an_end_that_utc_cannot_represent_is_refused(text: str) -> None:
    with pytest.raises(WrongInput, match="is not a time"):
        kept.end(text, NOW)


def test_changes_of_a_constantly_written_node_fail_after_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubelet that writes its node constantly makes every change a conflict: this ends with an error."""
    place = fleet(2)
    session = place.session()
    patches: list[Any] = []

    def request(method: str, *arguments: Any, **more: Any) -> Any:
        if method != "PATCH":
            return original(method, *arguments, **more)
        patches.append(arguments)
        return Response(409, None, "the API server says: conflict", 0.0)

    original = session.request
    monkeypatch.setattr(session, "request", request)
    with pytest.raises(Refused, match="another client changed the node w1 during every attempt for 0 s"):
        Cluster(session, patience_s=0.2).taint_temporarily("w1", "repair-1")
    assert 1 < len(patches) < 10


def test_an_annotation_is_restored_from_its_text() -> None:
    made = Maintenance("a 'reason', with \"signs\"", "ann@desk", NOW, NOW + 3600, cordoned=True)
    assert kept.parse(made.text()) == made
    assert made.described().endswith("until 2027-01-15 09:00 UTC")
    assert kept.parse("") is None


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("4h", NOW + 4 * 3600),
        ("1d12h", NOW + 36 * 3600),
        ("90m", NOW + 5400),
        ("2027-01-15T09:00:00Z", NOW + 3600),
        ("2027-01-15T10:00+01:00", NOW + 3600),
        ("2027-01-16", dt.datetime(2027, 1, 16).astimezone().timestamp()),
    ],
)
def test_times(text: str, moment: float) -> None:
    assert kept.end(text, NOW) == moment


@pytest.mark.parametrize("text", ["", "soon", "4", "-4h", "4h ago", "4w", "2020-01-01", "0m", "99999999d", "18:00"])
def test_invalid_or_past_times(text: str) -> None:
    with pytest.raises(WrongInput):
        kept.end(text, NOW)


def test_status_shows_it() -> None:
    entry_ = {"name": "w1", "address": "10.0.0.1", "role": "worker", "ready": True, "reason": "", "version": "v1.36.3"}
    entry_["maintenance"] = ""
    message = {**entry_, "schedulable": False, "maintenance": Maintenance("disk swap", "ann@desk").text()}
    over = {**message, "maintenance": Maintenance("disk swap", "ann@desk", until=NOW - 1e9).text()}
    reasons = [
        node.reason
        for found in (message, over, {**entry_, "schedulable": False})
        for node in status.assemble([], {"endpoint": "", "version": "", "nodes": [found]}).nodes
    ]
    assert reasons[0] == "in maintenance: disk swap, by ann@desk"
    assert reasons[1].startswith("its maintenance has expired, it is cordoned: disk swap")
    assert reasons[2] == "cordoned"


def test_status_names_a_node_whose_device_plugin_is_away() -> None:
    found = {**cluster_report({"gpu-1": 1})["nodes"][0], "plugin_away": True}
    [node] = status.assemble([], {"endpoint": "", "version": "", "nodes": [found]}).nodes
    assert node.reason.startswith("its GPUs are not offered while a command works on the driver; if none does")
    assert "`gpunodes uncordon gpu-1`" in node.reason


def test_the_plan_of_a_repair_shows_it() -> None:
    place = fleet(5, ["w1"], action=Action.REBOOT)
    on(place)
    plan = run(place, dry_run=True)
    assert next(each.why for each in plan.machines if each.machine == "w1").startswith("it is in maintenance")
