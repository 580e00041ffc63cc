"""Preflight inspection: for which Kubernetes version machines check their package source; an API that is down."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes import cli
from gpunodes.ansible.module_utils import kube_api
from gpunodes.ansible.module_utils.cluster import nodes
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.engine import control_planes, runner
from gpunodes.engine.cluster.connection import Transport, here
from gpunodes.errors import GpunodesError
from gpunodes.inventory import Inventory
from gpunodes.model import Event, Outcome, Severity, TaskEnded
from gpunodes.operations import gpu_verify, preflight, status

from tests import tls_api
from tests.hostile import cluster_report, machine_report
from tests.stand_ins import Silent, facts

INVENTORY = """
control_plane: {hosts: {control-1: {ansible_host: 10.0.0.1}}}
workers: {hosts: {worker-1: {ansible_host: 10.0.0.2}}}
"""


def test_no_second_cluster_is_created_beside_one_that_does_not_respond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of the first control plane was replaced; the others have the cluster, or none, or do not respond."""
    stopped = tls_api.Server(tls_api.certificate(tmp_path), port=9).kubeconfig()
    silent = Transport(["sh", "-c", "echo 'ssh: connect to host: Connection refused' >&2; exit 255"], machine="none")
    programs = {
        "empty": here(sys.executable, tmp_path / "none", "empty"),
        "stopped": here(sys.executable, stopped, "stopped"),
        "silent": silent,
    }
    monkeypatch.setattr(control_planes, "over_ssh", lambda address, *_, **__: programs[address])
    hosts = {"new": {"ansible_host": "new"}, **{name: {"ansible_host": name} for name in programs}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"control_plane": {"hosts": hosts}}))
    inventory = Inventory(tmp_path / "hosts.yml")
    first = inventory.select(["new"])
    nothing = preflight.Inspection([], "new", None, None, "", interrupted=False, log=tmp_path)
    found = {each.machine: each for each in preflight.another_cluster(inventory, first, nothing)}
    assert set(found) == {"stopped", "silent"}
    assert "it has a cluster, whose API does not respond" in found["stopped"].problem.found
    assert "whether it has a cluster is not known" in found["silent"].problem.found
    assert {each.severity for each in found.values()} == {Severity.ERROR}
    # The same machine had it, and starts it again.
    own = dataclasses.replace(nothing, unresponsive="its API does not respond")
    assert preflight.another_cluster(inventory, first, own) == []
    assert preflight.another_cluster(inventory, inventory.machines(), nothing) == []


def checked_versions(
    monkeypatch: pytest.MonkeyPatch, folder: Path, cluster: Mapping[str, Any] | None, requested: str = "1.36"
) -> list[str]:
    """The versions of all inspections, in order, if ``cluster`` is found; "" is the version in the settings."""
    checked = []
    if cluster:
        cluster = {"endpoint": "10.0.0.1:6443", "ca_hash": "sha256:" + "a" * 64, "nodes": [], **cluster}

    def run(play: runner.Play, folder: Path, on_event: Callable[[Event], None]) -> runner.PlayResult:
        checked.append((play.variables or {}).get("gpunodes_kubernetes_version", ""))
        if cluster:
            result = {"cluster": cluster}
            on_event(TaskEnded("control-1", "cluster", "Read the cluster", Outcome.UNCHANGED, 1.0, result))
        on_event(
            TaskEnded(
                "worker-1", "settings", "Read", Outcome.UNCHANGED, 1.0, {"host_facts": facts(gpu={"functions": []})}
            )
        )
        return runner.PlayResult(ok=True, interrupted=False, log=folder / "stdout")

    monkeypatch.setattr(runner, "run", run)
    (folder / "hosts.yml").write_text(INVENTORY)
    inventory = Inventory(folder / "hosts.yml")
    workers = [machine for machine in inventory.machines() if machine.name == "worker-1"]
    variables = {"gpunodes_kubernetes_version": requested} if requested else {}
    inspection = preflight.inspect(inventory, workers, folder, Silent(), variables)
    assert inspection.cluster == cluster
    assert list(inspection.facts) == ["worker-1"]
    return checked


def test_the_requested_version_is_checked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert checked_versions(monkeypatch, tmp_path, None) == ["1.36"]


def test_the_requested_version_is_checked_once_if_the_cluster_has_that_minor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert checked_versions(monkeypatch, tmp_path, {"version": "v1.36.2"}) == ["1.36"]


def test_a_cluster_with_another_minor_is_checked_for_its_own_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert checked_versions(monkeypatch, tmp_path, {"version": "v1.35.4"}) == ["1.36", "1.35.4"]


def test_without_a_requested_version_the_cluster_s_version_is_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert checked_versions(monkeypatch, tmp_path, {"version": "v1.35.4"}, requested="") == ["", "1.35.4"]
    (tmp_path / "again").rmdir()
    assert checked_versions(monkeypatch, tmp_path, {"version": "v1.36.2"}, requested="") == [""]


DOWN = "the Kubernetes API does not respond: 10.0.0.1:6443: [Errno 111] Connection refused"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("join worker-1 --dry-run", 1),
        ("up --dry-run", 0),
        ("init-control-plane --dry-run", 0),
        ("preflight", 0),
        ("status", 1),
    ],
)
def test_a_stopped_api_is_named_and_leads_to_no_new_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, code: int
) -> None:
    def run(play: runner.Play, folder: Path, on_event: Callable[[Event], None], *_: Any) -> runner.PlayResult:
        if play.playbook == "status.yml":
            on_event(TaskEnded("control-1", "status", "Read the cluster", Outcome.FAILED, 1.0, {"msg": DOWN}))
            return runner.PlayResult(ok=False, interrupted=False, log=folder / "stdout")
        result = {"cluster": None, "unresponsive": DOWN}
        on_event(TaskEnded("control-1", "cluster", "Read the cluster", Outcome.UNCHANGED, 1.0, result))
        for name in ("control-1", "worker-1"):
            own = facts(gpu={"functions": []}, hostname=name, machine_id=name, product_uuid=name, time=time.time())
            on_event(TaskEnded(name, "settings", "Read", Outcome.UNCHANGED, 1.0, {"host_facts": own}))
        return runner.PlayResult(ok=True, interrupted=False, log=folder / "stdout")

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "hosts.yml").write_text(INVENTORY)
    monkeypatch.setattr("sys.argv", ["gpunodes", *command.split(), "-i", str(tmp_path / "hosts.yml")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert DOWN in err
    assert "creates one" not in out + err
    assert "`gpunodes init-" not in out + err
    assert ended.value.code == code, out + err


def test_a_machine_that_runs_no_cluster_is_told_from_one_whose_api_is_down() -> None:
    seen = preflight.Inspection([], "control-1", None, None, "", False, Path())
    assert seen.no_cluster().problem.remedy == "`gpunodes init-master control-1` creates one"
    problem = dataclasses.replace(seen, unresponsive=DOWN).no_cluster().problem
    assert problem.found == f"it has a cluster, but {DOWN}"
    assert "init-" not in problem.remedy


@pytest.mark.parametrize("required", [True, False])
def test_the_module_reports_why_an_api_does_not_respond(monkeypatch: pytest.MonkeyPatch, required: bool) -> None:
    def down(_: bool) -> None:
        raise kube_api.ApiError(0, "refused")

    monkeypatch.setattr(nodes, "info", down)
    if required:
        with pytest.raises(kube_api.ApiError):
            nodes.report(required)
    else:
        message = "the Kubernetes API does not respond: refused"
        assert nodes.report(required) == {"cluster": None, "unresponsive": message}


def commands(folder: Path) -> dict[str, Callable[[], object]]:
    """Each operation that only reads machines."""
    (folder / "hosts.yml").write_text(INVENTORY)
    inventory = Inventory(folder / "hosts.yml")
    return {
        "status": lambda: status.run(inventory, Silent()),
        "preflight": lambda: preflight.run(inventory, inventory.machines(), Silent()),
        "gpu verify": lambda: gpu_verify.run(inventory, inventory.machines(), Silent(), {}),
    }


@pytest.mark.parametrize("name", ["status", "preflight", "gpu verify"])
@pytest.mark.parametrize("by_role", [False, True])
def test_a_failure_of_the_controller_is_no_machine_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, *, by_role: bool
) -> None:
    def run(_: runner.Play, folder: Path, on_event: Callable[[Event], None]) -> runner.PlayResult:
        if by_role:
            result = {"msg": "this is ansible-core 2.16"}
            on_event(TaskEnded("control-1", "controller", "Check", Outcome.FAILED, 0.1, result))
        (folder / "stdout").write_text("[WARNING]: no\n[ERROR]: the Jinja2 of Ansible is too old\n")
        return runner.PlayResult(ok=False, interrupted=False, log=folder / "stdout")

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(GpunodesError) as raised:
        commands(tmp_path)[name]()
    assert raised.value.problem.found == (
        "this is ansible-core 2.16" if by_role else "the Jinja2 of Ansible is too old"
    )
    assert "correct that on the controller" in raised.value.problem.remedy
    assert "init-master" not in str(raised.value)


@pytest.mark.parametrize("problem", [Problem("admin.conf does not exist", "a control plane"), Problem("no answer")])
def test_a_control_plane_that_could_not_be_read_is_wanted_once(problem: Problem) -> None:
    result = {"msg": str(problem), **dataclasses.asdict(problem)}
    failure = TaskEnded("control-1", "status", "Read the cluster", Outcome.FAILED, 1.0, result)
    assert str(preflight.not_read(failure)).count("wanted: ") == 1


def test_gpu_verify_shows_what_the_cluster_says_of_a_machine_s_node_whatever_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nodes that kubeadm made with --node-name; each host has the name of the other machine's node."""
    numbers = {"control-1": 1, "gpu-1": 2, "gpu-2": 3}
    level = {"level": "kubelet", "fact": "", "wanted": "", "remedy": ""}

    def run(_: runner.Play, folder: Path, on_event: Callable[[Event], None]) -> runner.PlayResult:
        def report(machine: str, role: str, **result: Any) -> None:
            on_event(TaskEnded(machine, role, "Read", Outcome.UNCHANGED, 1.0, result))

        report("control-1", "cluster", cluster=cluster_report(numbers))
        for name, host in (("gpu-1", "gpu-2"), ("gpu-2", "gpu-1")):
            report(name, "settings", host_facts={**machine_report(name, numbers[name]), "hostname": host})
        served = {"gpu-1": [{**level, "state": "ok"}], "gpu-2": [{**level, "state": "failed"}]}
        report("gpu-2", "gpu_node", gpu_nodes=served)
        return runner.PlayResult(ok=True, interrupted=False, log=folder / "stdout")

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "hosts.yml").write_text(
        "control_plane: {hosts: {control-1: {ansible_host: 10.0.0.1}}}\n"
        "workers: {hosts: {gpu-1: {ansible_host: 10.0.0.2}, gpu-2: {ansible_host: 10.0.0.3}}}\n"
    )
    inventory = Inventory(tmp_path / "hosts.yml")
    found = gpu_verify.run(inventory, inventory.select(["gpu-1", "gpu-2"]), Silent(), {})
    assert {each.machine: each.healthy for each in found} == {"gpu-1": True, "gpu-2": False}
