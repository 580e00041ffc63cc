"""Mutual exclusion (docs/repair.md) on a real API server, each controller a separate process: roll-outs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpunodes.engine.leases.errors import Held
from gpunodes.operations import maintenance

from . import exclusion
from .apiserver import ApiServer
from .autoscaling import wait
from .exclusion import LEASES, LIMIT_S, command, held, kubectl, outcome, repair, results, roll_out, spec, started, used

ROLLOUT = "`gpunodes rollout apply` of "


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with exclusion.cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def machines(tmp_path: Path, server: ApiServer) -> Path:
    """All are healthy."""
    folder = exclusion.prepare(server, tmp_path / "machines")
    exclusion.change(folder, "n1", sick=False)
    return folder


def version(machines: Path, machine: str) -> str:
    return str(exclusion.read(machines, machine)["version"])


def is_waiting(server: ApiServer) -> None:
    """Wait until the roll-out has looked some times without an end: it writes into its Lease each time."""
    path, seen = f"{LEASES}?fieldSelector=metadata.name=gpunodes-rollout", set[str]()

    def looked() -> bool:
        seen.update(each["metadata"]["resourceVersion"] for each in server.call("GET", path)["items"])
        return len(seen) > 9

    wait(looked, LIMIT_S)


def is_applying(machines: Path, machine: str) -> None:
    """Wait until the roll-out has cordoned a machine, and prepared it."""
    wait(lambda: exclusion.read(machines, machine)["prepared"], LIMIT_S)


def ended(process: subprocess.Popen[str], tmp_path: Path) -> dict[str, str]:
    """The outcome of each machine of a roll-out."""
    return {name: each["outcome"] for name, each in results(process, tmp_path).items()}


@pytest.mark.parametrize(
    ("words", "other", "budget", "meanwhile"),
    [
        ("gpu install", "n1", 2, {"n2"}),
        ("gpu install", "n5", 2, {"n1", "n2"}),
        ("gpu install", "n5", 1, set()),
        ("reset", "c0", 2, set()),
    ],
    ids=["its machine", "another machine", "the whole budget", "a control plane"],
)
def test_a_roll_out_beside_a_command(
    server: ApiServer, machines: Path, tmp_path: Path, words: str, other: str, budget: int, meanwhile: set[str]
) -> None:
    with command(server, words, other) as (_, first):
        assert first.startswith("held")
        process = roll_out(server, machines, tmp_path, "n1", "n2", budget=budget)
        wait(lambda: {name for name in ("n1", "n2") if version(machines, name) == "2"} == meanwhile, LIMIT_S)
        if meanwhile != {"n1", "n2"}:
            is_waiting(server)
            assert {name for name in ("n1", "n2") if exclusion.read(machines, name)["prepared"]} == meanwhile
    assert ended(process, tmp_path) == {"n1": "done", "n2": "done"}
    assert held(server) == []


def test_what_a_roll_out_excludes(server: ApiServer, machines: Path, tmp_path: Path) -> None:
    with exclusion.in_work(machines, "n1"), exclusion.opened(server, machines) as fleet:
        process = roll_out(server, machines, tmp_path, "n1")
        is_applying(machines, "n1")
        for words, name in (("remove", "n1"), ("reset", "c0")):
            with command(server, words, name) as (_, message):
                assert message.startswith(f"n1 is locked by {ROLLOUT}"), words
        with command(server, "join", "n5") as (_, message):
            assert message.startswith("held"), "another machine"
        with pytest.raises(Held, match=ROLLOUT):
            maintenance.begin(fleet, [each for each in fleet.all_machines() if each.name == "n1"], "disk", None)
        found = outcome(repair(server, machines, tmp_path, name="n1"), tmp_path)
        assert found["decision"] == "refuse"
        assert ROLLOUT in found["why"]
        second = roll_out(server, machines, tmp_path, "n2")
        assert second.wait(LIMIT_S) != 0
        assert "the roll-out of this cluster is locked by" in (tmp_path / "controller.log").read_text()
    assert ended(process, tmp_path) == {"n1": "done"}
    assert used(machines) == []
    assert held(server) == []


def test_a_roll_out_on_a_control_plane_and_a_command_on_a_worker(
    server: ApiServer, machines: Path, tmp_path: Path
) -> None:
    with exclusion.in_work(machines, "c0"):
        with command(server, "join", "n5"):
            process = roll_out(server, machines, tmp_path, "c0")
            is_waiting(server)
            assert exclusion.read(machines, "c0")["prepared"] == 0
        is_applying(machines, "c0")
        with command(server, "join", "n5") as (_, message):
            assert message.startswith(f"c0 is locked by {ROLLOUT}")
    assert ended(process, tmp_path) == {"c0": "done"}
    assert held(server) == []


def test_a_roll_out_waits_for_a_repair(server: ApiServer, machines: Path, tmp_path: Path) -> None:
    """It reads the machine again then: before, it was sick."""
    exclusion.change(machines, "n1", sick=True)
    with exclusion.in_work(machines, "n1"):
        repairing = repair(server, machines, tmp_path)
        started(machines, "n1")
        process = roll_out(server, machines, tmp_path, "n1")
        is_waiting(server)
        assert exclusion.read(machines, "n1")["prepared"] == 0
    assert outcome(repairing, tmp_path)["outcome"] == "repaired"
    assert ended(process, tmp_path) == {"n1": "done"}
    assert held(server) == []


def test_an_unfinished_repair_and_an_unfinished_roll_out_keep_each_other_away(
    server: ApiServer, machines: Path, tmp_path: Path
) -> None:
    """Both were killed."""
    exclusion.change(machines, "n1", sick=True)
    with exclusion.in_work(machines, "n1"), exclusion.in_work(machines, "n2"):
        killed = [repair(server, machines, tmp_path), roll_out(server, machines, tmp_path, "n2")]
        started(machines, "n1")
        is_applying(machines, "n2")
        for each in killed:
            each.kill()
            each.wait()
    found = outcome(repair(server, machines, tmp_path, 2, name="n2"), tmp_path, "n2")
    assert found["decision"] == "refuse"
    assert "rollout resume" in found["why"]
    assert ended(roll_out(server, machines, tmp_path, what="resume"), tmp_path) == {"n2": "done"}
    exclusion.change(machines, "n1", sick=False)
    [skipped] = results(roll_out(server, machines, tmp_path, "n1"), tmp_path).values()
    assert skipped["outcome"] == "skipped"
    assert "an unfinished repair left it cordoned" in skipped["why"]
    assert version(machines, "n1") == "1"
    exclusion.change(machines, "n1", sick=True)
    assert outcome(repair(server, machines, tmp_path), tmp_path)["outcome"] == "repaired"
    assert held(server) == []


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("annotate node n1 gpunodes.dev/maintenance{}", "it is in maintenance: x"),
        ("{}cordon n1", "a user or another program cordoned it"),
    ],
)
def test_a_roll_out_skips_what_others_keep(
    server: ApiServer, machines: Path, tmp_path: Path, words: str, why: str
) -> None:
    is_cordon = words.endswith("cordon n1")
    kubectl(server, *words.format("" if is_cordon else "=x").split())
    try:
        found = results(roll_out(server, machines, tmp_path, "n1", "n2"), tmp_path)
        assert {name: each["outcome"] for name, each in found.items()} == {"n1": "skipped", "n2": "done"}
        assert why in found["n1"]["why"]
        assert version(machines, "n1") == "1"
        assert bool(spec(server, "n1").get("unschedulable")) == is_cordon, "the cordon stays"
    finally:
        kubectl(server, *words.format("un" if is_cordon else "-").split())
    assert held(server) == []


def test_a_cordon_that_a_user_makes_during_a_roll_out_stays(server: ApiServer, machines: Path, tmp_path: Path) -> None:
    with exclusion.in_work(machines, "n1"):
        process = roll_out(server, machines, tmp_path, "n1")
        is_applying(machines, "n1")
        kubectl(server, "uncordon", "n1")
        kubectl(server, "cordon", "n1")
    try:
        assert ended(process, tmp_path) == {"n1": "done"}
        assert spec(server, "n1")["unschedulable"]
    finally:
        kubectl(server, "uncordon", "n1")
    assert held(server) == []
