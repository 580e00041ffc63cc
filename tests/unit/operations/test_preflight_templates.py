"""Templates in the inventory: preflight judges their values, and renders nothing that a machine reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from gpunodes import settings
from gpunodes.engine import runner
from gpunodes.errors import WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import Event, Machine, Only, Outcome, PreflightFinding, Role, TaskEnded
from gpunodes.operations import join, judged, power, preflight
from gpunodes.operations import run as running
from gpunodes.operations.run import RunOptions
from gpunodes.operations.tracker import Tracker

from tests.stand_ins import Silent, facts, gpu_machine

HOSTS = """
control_plane: {hosts: {control-1: {ansible_host: 10.0.0.1}}}
workers: {hosts: {gpu-1: {id: 11}, gpu-2: {id: 12}}}
"""
H100 = {"address": "3b:00.0", "vendor": "10de", "device": "2330", "class": "030200"}


def seen(
    monkeypatch: pytest.MonkeyPatch, folder: Path, group_vars: str, changes: Mapping[str, Any] | None = None
) -> preflight.Inspection:
    """The inspection of both workers, which have a GPU each and report ``changes``."""

    def run(_: runner.Play, folder: Path, on_event: Callable[[Event], None]) -> runner.PlayResult:
        for name in ("gpu-1", "gpu-2"):
            own = gpu_machine(H100, hostname=name, machine_id=name, product_uuid=name, time=time.time())
            report = {"host_facts": {**facts(), **own, **(changes or {})}}
            on_event(TaskEnded(name, "settings", "Read", Outcome.UNCHANGED, 1.0, report))
        return runner.PlayResult(ok=True, interrupted=False, log=folder / "stdout")

    monkeypatch.setattr(runner, "run", run)
    (folder / "hosts.yml").write_text(HOSTS)
    (folder / "group_vars").mkdir()
    (folder / "group_vars/all.yml").write_text(group_vars)
    inventory = Inventory(folder / "hosts.yml")
    machines = inventory.machines(Role.WORKER)
    return preflight.inspect(inventory, machines, folder, Silent(), {"gpunodes_kubernetes_version": "1.36"})


def of_gpu_1(*arguments: Any) -> list[PreflightFinding]:
    return [each for each in preflight.judge(seen(*arguments), "1.36") if each.machine == "gpu-1"]


def test_a_template_of_a_range_is_compared_with_the_machine_s_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    network = {
        "devices": [{"name": "eth0", "addresses": ["10.0.0.11/24"], "udp_port": None}],
        "routes": [{"to": "10.50.7.0/24", "device": "eth0", "gateway": "10.0.0.9"}],
        "docker_bridge": "",
    }
    variables = 'site_pods: 10.50.0.0/16\ngpunodes_pod_subnet: "{{ site_pods }}"\n'
    found = of_gpu_1(monkeypatch, tmp_path, variables, {"network": network})
    (one,) = [each for each in found if each.check == "ranges"]
    assert "gpunodes_pod_subnet 10.50.0.0/16 overlaps the route to 10.50.7.0/24" in one.problem.found


def test_templates_of_software_are_what_they_render_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variables = (
        'b: "580"\nr: docker\nc: ["12.8"]\nold: "false"\nno: a key that is a boolean\n'
        'gpunodes_driver_branch: "{{ b }}"\ngpunodes_runtime: "{{ r }}"\n'
        'gpunodes_cuda_versions: "{{ c }}"\ngpunodes_unsupported_os: "{{ old }}"\n'
        "gpunodes_time_service: '{% if r == \"docker\" %}leave{% else %}install{% endif %}'\n"
    )
    inspection = seen(monkeypatch, tmp_path, variables)
    requested = inspection.candidates[0].requested
    assert (requested.driver, requested.runtime, requested.cuda) == ("580", "docker", ("12.8",))
    assert requested.unsupported_os is False
    assert inspection.candidates[0].time_service == "leave"
    assert not [each for each in preflight.judge(inspection, "1.36") if "unknown" in each.problem.found]


def test_a_template_of_the_firewall_setting_keeps_its_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    closed = [{"name": "iptables", "open": ["22/tcp"], "writable": False, "chains": ["INPUT"]}]
    variables = 'f: open\ngpunodes_firewall: "{{ f }}"\n'
    found = of_gpu_1(monkeypatch, tmp_path, variables, {"firewalls": closed})
    assert [each.check for each in found if each.check == "firewall"] == ["firewall"]


def test_a_template_of_the_address_is_the_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without a default route has the address by which it is reached."""
    changes = {"default_address": None, "addresses": ["10.0.0.11", "10.0.0.12"]}
    inspection = seen(monkeypatch, tmp_path, 'ansible_host: "10.0.0.{{ id }}"\n', changes)
    assert [each.address for each in inspection.candidates] == ["10.0.0.11", "10.0.0.12"]
    assert not [each for each in preflight.judge(inspection, "1.36") if each.check == "address"]


def test_templates_see_other_machines_defaults_and_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variables = (
        "gpunodes_node_address: \"{{ '10.0.0.' ~ hostvars['gpu-1'].id }}\"\n"
        "gpunodes_service_subnet: 10.97.0.0/16\n"
        'gpunodes_pod_subnet: "{{ gpunodes_service_subnet | replace(97, 98) }}"\n'
        "gpunodes_network: \"{{ 'none' if gpunodes_kubernetes_version == '1.36' else gpunodes_firewall }}\"\n"
        'gpunodes_control_plane_endpoint: "{{ gpunodes_control_plane_vip }}"\n'
    )
    candidate = seen(monkeypatch, tmp_path, variables).candidates[0]
    assert candidate.node_address == "10.0.0.11"
    assert (candidate.network.pods, candidate.network.network) == ("10.98.0.0/16", "none")
    assert candidate.endpoint.endpoint == ""


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ('gpunodes_runtime: "{{ nowhere }}"\n', "gpunodes_runtime of gpu-1 cannot be rendered"),
        ('r: podman\ngpunodes_runtime: "{{ r }}"\n', "gpunodes_runtime of gpu-1, gpu-2 is 'podman'"),
        ('v: perhaps\ngpunodes_unsupported_os: "{{ v }}"\n', "gpunodes_unsupported_os of gpu-1, gpu-2 is 'perhaps'"),
    ],
)
def test_a_template_without_a_usable_value_is_wrong_input(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: str, sentence: str
) -> None:
    with pytest.raises(WrongInput) as raised:
        seen(monkeypatch, tmp_path, variables)
    assert sentence in str(raised.value)


def test_commands_without_preflight_do_not_need_the_templates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inspection = seen(monkeypatch, tmp_path, "x: 1\n")
    assert len(inspection.candidates) == 2
    (tmp_path / "group_vars/all.yml").write_text(
        'r: podman\ngpunodes_runtime: "{{ r }}"\ngpunodes_control_plane_vip_router_id: "{{ nowhere }}"\n'
    )
    inventory = Inventory(tmp_path / "hosts.yml")
    machines = inventory.machines(Role.WORKER)
    inspection = preflight.inspect(inventory, machines, tmp_path, Silent(), {}, sources=False)
    assert inspection.candidates[0].requested.runtime == "containerd"
    assert inspection.candidates[0].endpoint.router_id == 0


def test_what_a_machine_reports_is_never_rendered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor does a template of the inventory see it."""
    hostile = "{{ 7 * 191 }}"
    inspection = seen(monkeypatch, tmp_path, 'b: "580"\ngpunodes_driver_branch: "{{ b }}"\n', {"swap": [hostile]})
    (found,) = [each for each in preflight.judge(inspection, "1.36") if (each.machine, each.check) == ("gpu-1", "swap")]
    assert hostile in found.problem.found
    (tmp_path / "again").mkdir()
    with pytest.raises(WrongInput, match="gpunodes_driver_branch of gpu-1 cannot be rendered"):
        seen(monkeypatch, tmp_path / "again", 'gpunodes_driver_branch: "{{ settings_machine.swap[0] }}"\n')


def test_an_inventory_without_templates_renders_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Templates take milliseconds for each machine."""
    monkeypatch.setattr(Inventory, "rendered", lambda *_: pytest.fail("rendered"))
    assert seen(monkeypatch, tmp_path, 'other: "{{ nowhere }}"\ngpunodes_runtime: docker\n').candidates


class Spy(dict[str, Any]):
    """Settings that record which ones are read."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        pytest.fail("all settings are read")


def test_every_setting_that_preflight_reads_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Spy(settings.resolve({"gpunodes_gpu_serving": "dra"}))
    monkeypatch.setattr(settings, "resolve", lambda _: given)
    machine = Machine("gpu-1", "10.0.0.1", Role.CONTROL_PLANE)
    preflight._candidate(machine, Tracker([machine], preflight.PHASES, Silent()), {}, {})
    preflight._controls({}, given, None)
    assert given.read
    assert given.read - {*judged.JUDGED} == set()


def test_templates_decide_the_version_the_phases_and_the_kind_of_power(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variables = (
        'minor: "1.35"\nr: docker\nburns: false\nkind: wol\n'
        'gpunodes_kubernetes_version: "{{ minor }}"\ngpunodes_runtime: "{{ r }}"\n'
        'gpunodes_burn_in: "{{ burns }}"\ngpunodes_bmc_type: "{{ kind }}"\n'
    )
    seen(monkeypatch, tmp_path, variables)
    inventory = Inventory(tmp_path / "hosts.yml")
    machines = inventory.machines(Role.WORKER)
    assert preflight.requested_version(inventory, None, machines) == "1.35"
    assert power.only_wakes(inventory, machines[0])
    found = running._applicable(join.OPERATION, inventory, machines, RunOptions(), inventory.control_planes())
    assert found[Only.DOCKER] == {"gpu-1", "gpu-2"}
    assert found[Only.BURN_IN] == set()


def test_only_judged_settings_are_rendered_each_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without preflight a template that cannot be rendered stays, and hides no other: its phase applies."""
    variables = (
        'r: docker\ngpunodes_runtime: "{{ vars.r }}"\ngpunodes_burn_in_image: "{{ of_a_playbook }}"\n'
        'gpunodes_cuda_versions: "{{ of_a_playbook }}"\ngpunodes_control_plane_vip_router_id: "{{ of_a_playbook }}"\n'
    )
    with pytest.raises(WrongInput, match="router_id of gpu-1 cannot be rendered: 'of_a_playbook' is undefined"):
        seen(monkeypatch, tmp_path, variables)
    inventory = Inventory(tmp_path / "hosts.yml")
    machines = inventory.machines(Role.WORKER)
    found = judged.rendered(inventory, machines, {}, refuses=False)["gpu-1"]
    assert found["gpunodes_runtime"] == "docker"
    assert found["gpunodes_burn_in_image"] == found["gpunodes_cuda_versions"] == "{{ of_a_playbook }}"
    assert "gpunodes_control_plane_vip_router_id" not in found
    applicable = running._applicable(join.OPERATION, inventory, machines, RunOptions(), inventory.control_planes())
    assert applicable[Only.DOCKER] == applicable[Only.CUDA] == {"gpu-1", "gpu-2"}
