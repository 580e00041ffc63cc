"""What happens to a node while a roll-out drains, watches or verifies it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpunodes.autoscale.state import MachineState, Phase
from gpunodes.errors import ExitCode
from gpunodes.operations.rolling.work import Target

from tests.repair_fleet import control_planes, fleet
from tests.rollout_fleet import MemoryWork, hurry, known, outcomes, roll_out


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch, tmp_path)


@pytest.mark.parametrize("what", ["uncordon", "maintenance"])
def test_a_node_that_a_person_takes_back_during_the_drain_is_skipped(what: str) -> None:
    """kubectl takes no lock: new pods would be killed by the reboot, or hands be in the machine."""
    place = fleet(2)
    place.api.add_pod("train", "w0")
    work = MemoryWork(place)
    applied: list[str] = []

    def before(_: str, path: str) -> None:
        if path.endswith("/eviction"):
            node = place.api.nodes["w0"]
            if what == "uncordon":
                node["spec"].pop("unschedulable", None)
            else:
                node["metadata"]["annotations"]["gpunodes.dev/maintenance"] = "hands in it"

    def during(stage: str, target: Target) -> None:
        if stage == "apply":
            applied.append(target.name)

    place.api.before, work.during = before, during
    result = roll_out(place, work, machines=["w0"])
    assert (applied, outcomes(result)["w0"]) == ([], "skipped")
    assert bool(place.api.nodes["w0"]["spec"].get("unschedulable")) is (what == "maintenance")


def test_a_canary_that_the_autoscaler_switches_off_when_it_is_idle_is_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is empty after its drain."""
    place = fleet(3)
    place.api.switched = {}
    work = known(monkeypatch, MemoryWork(place))

    def before(*_: str) -> None:
        node = place.api.nodes.get("w0")
        if ("w0", "verify") in work.done and node and not node["metadata"]["annotations"].get("gpunodes.dev/rollout"):
            del place.api.nodes["w0"]
            place.machines["w0"].off = True
            place.api.switched = {"w0": MachineState(Phase.OFF, 1.0, "nothing needs it").text()}

    place.api.before = before
    result = roll_out(place, work, canary=1, soak_s=0.2)
    assert result.exit_code is ExitCode.DONE, result.stopped
    assert "apply" in work.stages("w1")


def test_no_second_control_plane_is_rebooted_while_the_etcd_of_the_first_is_away() -> None:
    """Its kubelet comes back, and its node is ready; its member of etcd does not."""
    place = fleet(4)
    control_planes(place, "w0", "w1", "w2")
    work = MemoryWork(place)

    def works(name: str) -> dict[str, Any]:
        found: dict[str, Any] = place.api.pods[f"etcd-{name}"]["status"]["conditions"][0]
        return found

    least: list[int] = []

    def during(stage: str, target: Target) -> None:
        if stage == "apply" and target.name != "w3":
            works(target.name)["status"] = "False"
            least.append(sum(works(name)["status"] == "True" for name in ("w0", "w1", "w2")))

    work.during = during
    result = roll_out(place, work)
    assert least == [2]
    assert "its member of etcd is not ready" in result.stopped
