"""`report`, `preflight` and `gpu plan` of machines whose control planes are not in the inventory.

Stand-ins: Ansible, the scan over SSH, and an API server with a real kubeconfig and client library.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from gpunodes import cli
from gpunodes.engine import control_planes, runner
from gpunodes.engine.scans import ScanTarget
from gpunodes.health.model import Action, State, Verdict
from gpunodes.model import Event, Outcome, TaskEnded
from gpunodes.operations import scan

from tests import tls_api
from tests.stand_ins import gpu_machine

pytest.importorskip("kubernetes", reason="the extra gpunodes[kubeconfig] is not installed")

H100 = {"address": "0000:3b:00.0", "vendor": "10de", "device": "2330", "class": "030200", "driver": "nvidia"}
MACHINES = {"gpu-1": "10.0.0.2", "gpu-2": "10.0.0.3"}
MAINTENANCE = json.dumps({"reason": "new fans", "by": "ann@desk", "since": 1795650000})


def node(name: str, address: str, ready: str = "True", **annotations: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": f"u-{name}", "annotations": annotations},
        "spec": {"unschedulable": True} if annotations else {},
        "status": {
            "addresses": [{"type": "InternalIP", "address": address}],
            "conditions": [{"type": "Ready", "status": ready, "reason": "r", "message": "PLEG is not healthy"}],
            "nodeInfo": {
                "kubeletVersion": "v1.34.2+rke2r1",
                "containerRuntimeVersion": "containerd://2.1.4-k3s1",
                "bootID": f"{name}-boot",
                "machineID": "",
                "systemUUID": "",
            },
        },
    }


@pytest.fixture
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tls_api.Server]:
    nodes = [
        node("gpu-1", "10.0.0.2", **{"gpunodes.dev/maintenance": MAINTENANCE}),
        node("gpu-2", "10.0.0.3", ready="False"),
        node("other", "10.0.0.7"),
    ]
    with tls_api.serving(tls_api.certificate(tmp_path_factory.mktemp("pki"))) as made:
        bodies = {"/version": {"gitVersion": "v1.34.2+rke2r1"}, "/nodes": {"items": nodes}}

        def answer(path: str) -> tuple[int, dict[str, str], bytes]:
            found = next((body for end, body in bodies.items() if path.partition("?")[0].endswith(end)), None)
            return (200, {}, json.dumps(found).encode()) if found else (404, {}, b'{"message": "no"}')

        made.answer = answer
        yield made


class Place:
    """An inventory of GPU nodes of another cluster, whose machines Ansible and a scan read."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "hosts.yml"
        self.plays: list[runner.Play] = []
        self.own = {name: {"role": "worker", "ca_hash": None, "server": "10.0.0.1:6443"} for name in MACHINES}
        self.write()

    def write(self, *, group: str = "workers", **variables: Any) -> None:
        hosts = {name: {"ansible_host": address} for name, address in MACHINES.items()}
        self.path.write_text(yaml.safe_dump({"all": {"vars": variables}, group: {"hosts": hosts}}))

    def play(self, play: runner.Play, folder: Path, on_event: Callable[[Event], None], *_: Any) -> runner.PlayResult:
        self.plays.append(play)
        for name in play.machines:
            found = gpu_machine(H100, hostname=name, packages={"kubelet": "1.34.2-1.1"}, time=time.time())
            found["kubernetes"] |= self.own[name]
            result = {"host_facts": found}
            on_event(TaskEnded(name, "settings", "Read the machine", Outcome.UNCHANGED, 1.0, result))
        return runner.PlayResult(ok=True, interrupted=False, log=folder / "stdout")

    def run(self, *words: str) -> Result:
        return CliRunner().invoke(cli.root, [*words, "-i", str(self.path)], standalone_mode=False)

    def report(self) -> dict[str, Any]:
        done = self.run("report", "--json")
        assert done.exception is None, done.exception
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["exit_code"] == done.return_value
        return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(control_planes, "_CONFIRMED", {})
    found = Place(tmp_path)

    def healthy(targets: Sequence[ScanTarget], *_: Any, **__: Any) -> list[Verdict]:
        return [Verdict(each.target.name, "live", State.HEALTHY, Action.NONE) for each in targets]

    monkeypatch.setattr(runner, "run", found.play)
    monkeypatch.setattr(scan, "run", healthy)
    return found


def missing(document: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    return {each["section"]: (each["why"], each["failed"]) for each in document["missing"]}


NO_CONTROL_PLANE = ("the inventory has no control plane", False)


def test_a_report_by_kubeconfig_has_machines_nodes_and_maintenance(place: Place, api: tls_api.Server) -> None:
    place.write(gpunodes_api_kubeconfig=str(api.kubeconfig()))
    found = place.report()
    assert missing(found) == dict.fromkeys(("certificates", "rollout", "autoscale"), NO_CONTROL_PLANE)
    assert found["findings"] is not None
    assert [
        (each["name"], each["node_state"], each["kubernetes"], each["kernel"], each["gpus"])
        for each in found["machines"]
    ] == [
        ("gpu-1", "ready", "v1.34.2+rke2r1", "6.12.1", {"H100 SXM5 80GB": 1}),
        ("gpu-2", "not ready", "v1.34.2+rke2r1", "6.12.1", {"H100 SXM5 80GB": 1}),
    ]
    assert found["machines"][1]["node_reason"] == "PLEG is not healthy"
    assert [(each["node"], each["machine"], each["reason"]) for each in found["maintenance"]] == [
        ("gpu-1", "gpu-1", "new fans")
    ]
    assert [each["name"] for each in found["cluster"]["nodes"] if not each["machine"]] == ["other"]
    assert found["exit_code"] == 3, "a node is not ready"
    page = place.run("report", "-o", "-").stdout
    assert "Its members are unknown: they are read over SSH, on control planes in the inventory." in page
    assert "Endpoint" not in page


def test_an_api_that_does_not_respond_is_a_failure_of_its_sections(place: Place, api: tls_api.Server) -> None:
    path = api.kubeconfig()
    path.write_text(path.read_text().replace(str(api.port), "1"))
    place.write(gpunodes_api_kubeconfig=str(path))
    found = place.report()
    assert {name for name, (_, failed) in missing(found).items() if failed} == {"cluster", "maintenance"}
    assert [each["kernel"] for each in found["machines"]] == ["6.12.1", "6.12.1"]
    assert found["exit_code"] == 3


@pytest.mark.parametrize("group", ["workers", "gpu_hosts"])
def test_a_report_without_a_cluster_has_the_machines_and_is_no_failure(place: Place, group: str) -> None:
    place.own = {name: {"role": None} for name in MACHINES}
    place.write(group=group)
    found = place.report()
    sections = ("cluster", "certificates", "rollout", "maintenance", "autoscale")
    assert missing(found) == dict.fromkeys(sections, NO_CONTROL_PLANE)
    assert [each["os"] for each in found["machines"]] == ["Debian GNU/Linux 13 (trixie)"] * 2
    assert [play.playbook for play in place.plays] == ["facts.yml"]


def test_a_node_of_another_cluster_is_checked_by_itself(place: Place) -> None:
    """That it is a node is no conflict, and its cluster's version is not that of the settings."""
    done = place.run("preflight", "--json")
    assert done.exception is None, done.exception
    found = json.loads(done.stdout)["findings"]
    assert not {"cluster", "version", "machine_id", "product_uuid"} & {each["check"] for each in found}, found
    assert "warning: " in done.stderr
    assert "no machine in the group control_plane" in done.stderr
    [play] = place.plays
    assert (play.playbook, play.control, play.machines) == ("facts.yml", "", list(MACHINES))


def test_a_gpu_host_is_still_no_node(place: Place) -> None:
    place.write(group="gpu_hosts")
    done = place.run("preflight", "--json")
    assert {each["check"] for each in json.loads(done.stdout)["findings"]} >= {"cluster"}
    assert "warning: " not in done.stderr


def test_the_plan_for_gpus_needs_no_control_plane(place: Place, api: tls_api.Server) -> None:
    place.write(gpunodes_api_kubeconfig=str(api.kubeconfig()))
    done = place.run("gpu", "plan", "--output", "json")
    assert done.exception is None, done.exception
    assert [each["name"] for each in json.loads(done.stdout)["machines"]] == list(MACHINES)
    assert "warning: " not in done.stderr
    assert api.asked == []
