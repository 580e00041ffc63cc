"""Where the address of a machine in its cluster goes: kubeadm, the kubelet, the network add-on, and the matcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from gpunodes.ansible.module_utils import facts as machine_facts
from gpunodes.engine import identities
from gpunodes.identity.matcher import Matcher
from gpunodes.identity.model import described, reported
from gpunodes.operations import gpu_install, init_master, join, remove, reset, up
from gpunodes.planner import reports

from tests.hostile import machine_report
from tests.stand_ins import filtered, given, gpu_machine

ROOT = Path(__file__).parents[2]


def load(path: str) -> dict[str, Any]:
    found: dict[str, Any] = DataLoader().load_from_file(str(ROOT / path), trusted_as_template=True)
    return found


def rendered(name: str, *files: str, **more: Any) -> Any:
    """A variable of these files, with further variables."""
    variables = {key: value for file in files for key, value in load(file).items()} | more
    return Templar(DataLoader(), variables=variables).template(variables[name])


WIRING = "playbooks/group_vars/all.yml"
STATE = {"desired_state": {"node_address": "10.0.0.1", "socket": "unix:///run/s"}}


@pytest.mark.parametrize(
    ("endpoint", "vip", "expected"),
    [
        ("", "", "10.0.0.1:6443"),
        ("api.example:443", "", "api.example:443"),
        ("api.example", "", "api.example:6443"),
        ("", "10.0.0.10", "10.0.0.10:6443"),
    ],
)
def test_the_api_is_at_the_address_of_the_control_plane(endpoint: str, vip: str, expected: str) -> None:
    requested = {"gpunodes_control_plane_endpoint": endpoint, "gpunodes_control_plane_vip": vip}
    found = rendered("control_plane_endpoint", WIRING, **requested, **STATE)
    assert found.strip() == expected


def test_machines_try_the_api_servers_at_their_addresses_in_the_cluster() -> None:
    """SSH may use a network that the nodes have no part in."""
    own = {"ansible_host": "192.168.7.1", "gpunodes_node_address": "10.0.0.1"}
    others = {
        "c2": {"ansible_host": "192.168.7.2", "gpunodes_node_address": "10.0.0.0/24"},
        "c3": {"ansible_host": "10.0.0.3"},
    }
    every = {"c1": own, **others}
    hosts = {
        name: each | {"wiring_api_address": rendered("wiring_api_address", WIRING, **each, inventory_hostname=name)}
        for name, each in every.items()
    }
    found = rendered(
        "settings_api_servers",
        WIRING,
        inventory_hostname="w1",
        groups={"control_plane": ["c1", "c2", "c3"]},
        hostvars=hosts,
        gpunodes_control_plane_vip="10.0.0.10",
        gpunodes_control_plane_endpoint="",
        # What the cluster reports, where it was read before.
        wiring_control_nodes=[{"address": "10.0.0.1"}, {"address": "10.0.0.2"}, {"address": ""}],
    )
    assert found == ["10.0.0.1:6443", "192.168.7.2:6443", "10.0.0.3:6443", "10.0.0.2:6443"]


@pytest.mark.parametrize(
    ("host", "dead", "expected"),
    [
        ("cp-2.example", True, (True, "", "cp-2")),
        ("192.168.7.2", True, (True, "192.168.7.2", "cp-2")),
        ("cp-2.example", False, (False, "", "")),
        ("192.168.7.2", False, (True, "192.168.7.2", "")),
    ],
)
def test_the_member_of_a_dead_machine_is_looked_for_without_its_address(
    host: str, dead: bool, expected: tuple[bool, str, str]
) -> None:
    """Its node was deleted by hand, so that only the inventory knows it."""
    machine: dict[str, Any] = {"wiring_kubernetes": {"role": None}, "wiring_node": {}, "group_names": ["control_plane"]}
    machine |= {"inventory_hostname": "CP-2", "ansible_host": host, "drain_dead": dead}
    plays: Any = load("playbooks/remove.yml")
    variables = {**machine, **{name: plays[1]["vars"][name] for name in ("member_needed", "member_address")}}
    names = ("member_needed", "member_address", "member_dead_name")
    assert tuple(rendered(name, WIRING, **variables) for name in names) == expected
    drained = tuple(rendered(name, WIRING, **variables) for name in ("drain_member", "drain_member_name"))
    assert drained == expected[1:]


def test_kubeadm_gets_the_address() -> None:
    files = (f"roles/control_plane/{part}/main.yml" for part in ("defaults", "vars"))
    documents = rendered("_control_plane_documents", *files, control_plane_address="10.0.0.1")
    [init] = [each for each in documents if each["kind"] == "InitConfiguration"]
    assert init["localAPIEndpoint"] == {"advertiseAddress": "10.0.0.1"}
    assert init["nodeRegistration"]["kubeletExtraArgs"] == [{"name": "node-ip", "value": "10.0.0.1"}]
    files = (f"roles/worker/{part}/main.yml" for part in ("defaults", "vars"))
    settings = rendered("_worker_settings", *files, worker_address="10.0.0.2", groups={"control_plane": ["c"]})
    assert settings["nodeRegistration"]["kubeletExtraArgs"] == [{"name": "node-ip", "value": "10.0.0.2"}]


def test_a_network_of_the_settings_decides_the_address_of_the_kubelet_and_of_the_api() -> None:
    """From the setting to kubeadm, on a machine that SSH and the default route reach by another network."""
    machine = gpu_machine(addresses=["192.168.7.11", "10.0.0.11"], default_address="192.168.7.11")
    for requested, expected in (("10.0.0.0/24", "10.0.0.11"), ("", "192.168.7.11")):
        settings: dict[str, Any] = {"gpunodes_node_address": requested}
        state = {"desired_state": filtered(given(machine, joins=True, reached="192.168.7.11", **settings))}
        files = (f"roles/worker/{part}/main.yml" for part in ("defaults", "vars"))
        address = rendered("worker_address", WIRING, **state)
        joining = rendered("_worker_settings", *files, worker_address=address, groups={"control_plane": ["c"]})
        arguments = joining["nodeRegistration"]["kubeletExtraArgs"]
        assert {"name": "node-ip", "value": expected} in arguments
        files = (f"roles/control_plane/{part}/main.yml" for part in ("defaults", "vars"))
        address = rendered("control_plane_address", WIRING, **state)
        documents = rendered("_control_plane_documents", *files, control_plane_address=address)
        assert documents[0]["localAPIEndpoint"] == {"advertiseAddress": expected}
        endpoint = {"gpunodes_control_plane_endpoint": "", "gpunodes_control_plane_vip": ""}
        assert rendered("control_plane_endpoint", WIRING, **endpoint, **state).strip() == f"{expected}:6443"


def test_flannel_uses_the_interface_with_the_node_s_address() -> None:
    """One DaemonSet for all nodes: the kubelet replaces the variable by the address of its own node."""
    text = (ROOT / "roles/network/templates/flannel.yml.j2").read_text()
    text = text.replace("{{ network_images.daemon }}", "d").replace("{{ network_images.plugin }}", "p")
    [daemon] = [each for each in yaml.safe_load_all(text) if each["kind"] == "DaemonSet"]
    [container] = daemon["spec"]["template"]["spec"]["containers"]
    assert "--iface=$(HOST_ADDRESS)" in container["args"]
    sources = {each["name"]: each.get("valueFrom") for each in container["env"]}
    assert sources["HOST_ADDRESS"] == {"fieldRef": {"fieldPath": "status.hostIP"}}


def test_only_machines_that_are_to_be_nodes_need_an_address() -> None:
    operations = (init_master, join, up, gpu_install, remove, reset)
    assert [each.OPERATION.joins for each in operations] == [True, True, True, False, False, False]
    for name in ("init_master", "join", "up"):
        assert "wiring_joins: true" in (ROOT / f"playbooks/{name}.yml").read_text()
    assert "wiring_joins" not in (ROOT / "playbooks/gpu_install.yml").read_text()


def test_the_address_of_an_api_server() -> None:
    manifest = (
        "spec:\n  containers:\n  - command:\n    - kube-apiserver\n    - --advertise-address=10.0.0.1\n    - --x=1\n"
    )
    assert machine_facts.advertised_address(manifest) == "10.0.0.1"
    assert machine_facts.advertised_address("") is None
    assert machine_facts.advertised_address("    - --advertise-address={{ evil }}") is None


@pytest.mark.parametrize(
    "address", ["10.0.0.1; x", "10.0.0", "999.0.0.1", "010.0.0.1", "fd00::1", "{{ x }}", "", 7, None]
)
def test_a_report_with_another_address_is_refused(address: object) -> None:
    assert reports.machine_problem(machine_report("w", 1, addresses=["10.0.0.1", "10.255.0.250"])) == ""
    assert "addresses" in reports.machine_problem(machine_report("w", 1, addresses=["10.0.0.1", address]))


def test_the_matcher_knows_all_addresses_of_a_machine() -> None:
    """A join was interrupted: the node that it left has the address of the network that SSH does not use."""
    facts = machine_report("gpu-1", 2, default_address="192.168.7.2", addresses=["192.168.7.2", "10.0.0.2"])
    left = {key: facts[key] for key in ("machine_id", "product_uuid")}
    node = described({**left, "name": "gpu-1", "address": "10.0.0.2", "boot_id": "earlier"})
    one_address = {**facts, "addresses": ["192.168.7.2"]}
    assert Matcher([node], []).joining(reported("gpu-1", "gpu-1.example", facts)).node == node
    assert "has the address 10.0.0.2" in Matcher([node], []).joining(reported("gpu-1", "a", one_address)).contradiction


def test_addresses_of_a_machine_that_is_down_are_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    facts = machine_report("gpu-1", 2, default_address="192.168.7.2", addresses=["192.168.7.2", "10.0.0.2"])
    identities.remember("c", {"gpu-1": facts})
    # The probe reports no addresses.
    identities.remember("c", {"gpu-1": {"boot_id": "b", "machine_id": facts["machine_id"]}})
    assert identities.recall("c", "gpu-1", "a.example").addresses == ("a.example", "192.168.7.2", "10.0.0.2")
    identities.remember("c", {"gpu-1": {**facts, "addresses": ["192.168.7.2"]}})
    assert identities.recall("c", "gpu-1", "a.example").addresses == ("a.example", "192.168.7.2")


@pytest.mark.parametrize("addresses", [7, "10.0.0.2", {"a": 1}, [None, 7, ["x"]], ["10.0.0.2\x1b[2J"]])
def test_odd_addresses_identify_nothing(addresses: object) -> None:
    assert reported("gpu-1", "10.0.0.1", {"addresses": addresses}).addresses == ("10.0.0.1",)
    many = [f"10.0.{number // 250}.{number % 250}" for number in range(5000)]
    assert len(reported("gpu-1", "a", {"addresses": many}).addresses) <= 66


def test_a_node_that_is_ready_is_never_joined_anew() -> None:
    """Whatever the file of its kubelet's certificate says: pods may run there, and a join would reset the machine."""
    for ready, expected in ((True, [False, True, False]), (False, [True, False, True])):
        kubernetes = {"role": "worker", "ca_hash": "a", "ended": True}
        given = {
            "settings_machine": {"kubernetes": kubernetes},
            "wiring_node": {"name": "gpu-1", "ready": ready},
            "worker_ca_hash": "a",
        }
        names = ("worker_ended", "worker_joined", "worker_stale")
        assert [rendered(name, WIRING, **given) for name in names] == expected
    without = {**given, "wiring_node": {}}
    assert [rendered(name, WIRING, **without) for name in names] == [True, False, False]


@pytest.mark.parametrize(
    ("before", "after", "checked"),
    [
        ({}, {}, False),
        ({"gpunodes.dev/sharing": "mps-4"}, {"gpunodes.dev/sharing": "mps-4", "gpunodes.dev/pool": "p"}, False),
        ({"gpunodes.dev/sharing": "mps-4"}, {}, True),
        ({}, {"gpunodes.dev/sharing": "mps-4"}, True),
        ({"gpunodes.dev/sharing": "time-slicing-4"}, {"gpunodes.dev/sharing": "time-slicing-2"}, True),
        ({"gpunodes.dev/serving": "dra"}, {}, True),
        ({}, {"gpunodes.dev/serving": "dra"}, True),
    ],
)
def test_what_serves_gpus_changes_while_no_pod_has_one(
    before: dict[str, str], after: dict[str, str], checked: bool
) -> None:
    """Also while the plugin offers none: pods keep theirs. What then serves the GPUs is verified anew."""
    managed = {"labels": before, "taints": []}
    given = {
        "wiring_node": {"name": "gpu-1", "gpus": 0, "gpus_verified": True, "managed": managed},
        "worker_stale": False,
        "desired_state": {"labels": after},
        "wiring_offered": 0,
    }
    assert rendered("gpu_idle_node", WIRING, **given) == ("gpu-1" if checked else "")
    assert rendered("wiring_gpus_verified", WIRING, **given) is not checked
