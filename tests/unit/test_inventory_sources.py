"""What the source of a dynamic inventory may decide, and that a playbook gets the inventory that was checked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes import settings
from gpunodes.engine import runner
from gpunodes.engine.fleet import InventoryFleet
from gpunodes.errors import WrongInput
from gpunodes.inventory import Inventory, sources
from gpunodes.model import Event

from tests.unit.test_inventory_plugins import dynamic, listed

pytestmark = pytest.mark.long

REFUSED: Mapping[str, Any] = {
    # They run a command on the controller, or decide what does.
    "ansible_connection": "local",
    "ansible_ssh_args": "-o ProxyCommand=id",
    "ansible_ssh_common_args": "-o ProxyCommand=id",
    "ansible_ssh_extra_args": "-o ProxyCommand=id",
    "ansible_ssh_executable": "/tmp/x",
    "ansible_ssh_pkcs11_provider": "/tmp/x.so",
    "ansible_playbook_python": "/tmp/x",
    "ansible_become_method": "x",
    "ansible_become_exe": "x",
    "ansible_become_flags": "-x",
    "ansible_shell_type": "x",
    "ansible_shell_executable": "/tmp/x",
    "ansible_paramiko_proxy_command": "id",
    "ansible_scp_executable": "x",
    "ansible_control_path": "/tmp/x",
    "gpunodes_bmc_command": "id",
    "gpunodes_bmc_password_command": "id",
    "gpunodes_control_plane": "localhost",
    "wiring_control_plane": "localhost",
    "cluster_machine": "localhost",
    # They read something there.
    "ansible_ssh_private_key_file": "/etc/x",
    "ansible_private_key_file": "/etc/x",
    "gpunodes_bmc_password_env": "HOME",
    "gpunodes_bmc_jump_key": "/etc/x",
    "gpunodes_api_kubeconfig": "/etc/x",
    "gpunodes_kubernetes_packages_key": "/etc/x",
    "inventory_dir": "/etc",
    # They weaken a verification. Numbers and booleans have no mark of Ansible's.
    "ansible_host_key_checking": False,
    "ansible_ssh_host_key_checking": 0,
    "gpunodes_bmc_verify": False,
    "gpunodes_bmc_identity": "any",
    "gpunodes_bmc_address": "http://10.0.0.9",
    "gpunodes_nvidia_packages_fingerprint": "0" * 40,
    "gpunodes_cluster": "x",
    "ansible_facts": {"distribution": "x"},
    # A ProxyCommand of ssh_config may have them.
    "ansible_user": "$(id)",
    "ansible_ssh_user": "-x",
    "ansible_port": "22;id",
    "ansible_become_user": ["root"],
    "ansible_python_interpreter": "/bin/sh -c id #",
}
ACCEPTED: Mapping[str, Any] = {
    "ansible_host": "10.0.0.5",
    "ansible_port": 2222,
    "ansible_ssh_port": "2222",
    "ansible_user": "DOM\\user@example",
    "ansible_become": False,
    "ansible_become_user": "root",
    "ansible_python_interpreter": "/usr/bin/python3.11",
    "ansible_password": "a b; {{",
    "ansible_become_password": "$(id)",
    "gpunodes_bmc_type": "redfish",
    "gpunodes_bmc_address": "10.0.0.9",
    "gpunodes_bmc_user": "admin",
    "gpunodes_bmc_password": "secret",
    "gpunodes_pool": "h100",
    "gpunodes_node_labels": {"rack": "r7"},
    "tags": {"Name": "{{ x }}"},
}


def inventory_of(folder: Path, variables: Mapping[str, Any], file: str = "cloud.yml") -> Path:
    """The file of a plugin whose source sets these variables of the machine gpu-1."""
    return dynamic(folder, {"workers": {"gpu-1": dict(variables)}}, file=file)


def setting(owner: str, variables: Mapping[str, Any]) -> str:
    """The code of a plugin that sets variables of a machine or group."""
    return "".join(f"inventory.set_variable({owner!r}, {key!r}, {value!r})\n" for key, value in variables.items())


def places(variables: Mapping[str, Mapping[str, Any]]) -> str:
    """The code of a plugin that sets the variables of a case on a machine of its name, and on a group of another one.

    These machines are in no group of gpunodes.
    """
    code = ""
    for name, own in variables.items():
        group, member = f"group_{name}", f"{name}-member"
        code += (
            f"inventory.add_group({group!r})\ninventory.add_host({member!r}, {group!r})\ninventory.add_host({name!r})\n"
        )
        code += setting(name, own) + setting(group, own)
    return code


def test_a_source_makes_the_controller_do_nothing(tmp_path: Path) -> None:
    inventory = Inventory(dynamic(tmp_path, code=places({key: {key: value} for key, value in REFUSED.items()})))
    for key in REFUSED:
        for machine in (key, f"{key}-member"):
            wanted = rf"^{key} of {machine} comes from outside, by the inventory plugin cloud[0-9a-f]+[,;]"
            with pytest.raises(WrongInput, match=wanted):
                inventory.variables(machine)
    assert inventory.variables("gpu-1")["ansible_host"] == "10.0.0.11"
    text = inventory.copy(tmp_path / "copy").read_text()
    assert not [value for value in ("ProxyCommand", "/tmp/x", "/etc/x", "$(id)") if value in text]


def test_variables_of_all_machines_count(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match="ansible_connection of c1 comes from outside"):
        Inventory(dynamic(tmp_path, code=setting("all", {"ansible_connection": "local"})))


def test_a_source_decides_what_harms_only_its_machines(tmp_path: Path) -> None:
    inventory = Inventory(dynamic(tmp_path, code=places({"a": ACCEPTED})))
    for machine in ("a", "a-member"):
        found = inventory.variables(machine)
        assert {key: found[key] for key in ACCEPTED} == ACCEPTED


def test_no_command_of_a_source_runs(tmp_path: Path) -> None:
    """As it was: the scan ran the ProxyCommand, the access to the BMC the command for its password."""
    marker = tmp_path / "ran"
    given: tuple[Mapping[str, Any], ...] = (
        {
            "ansible_host": "127.0.0.1",
            "ansible_port": 1,
            "ansible_ssh_common_args": f"-o ProxyCommand='touch {marker}'",
        },
        {
            "gpunodes_bmc_type": "redfish",
            "gpunodes_bmc_address": "127.0.0.1:1",
            "gpunodes_bmc_password_command": f"touch {marker}",
        },
    )
    for number, variables in enumerate(given):
        path = inventory_of(tmp_path / str(number), variables)
        with pytest.raises(WrongInput, match="comes from outside"):
            scanned(path)
    assert not marker.exists()


def scanned(path: Path) -> None:
    fleet = InventoryFleet(Inventory(path))
    fleet.scan(fleet.all_machines())
    fleet.machine_control(fleet.all_machines()[0]).power()


def test_the_variable_of_the_users_files_counts(tmp_path: Path) -> None:
    """Also where the plugin sets it for the machine, and the user for a group: Ansible would prefer the plugin's."""
    for number, folder in enumerate(("group_vars/all", "group_vars/workers", "host_vars/gpu-1")):
        path = inventory_of(tmp_path / str(number), {"ansible_ssh_common_args": "-x", "gpunodes_bmc_verify": False})
        file = path.parent / f"{folder}.yml"
        file.parent.mkdir()
        file.write_text("ansible_ssh_common_args: -o ProxyJump={{ b }}\nb: bastion\ngpunodes_bmc_verify: true\n")
        inventory = Inventory(path)
        assert inventory.connection("gpu-1")["ansible_ssh_common_args"] == "-o ProxyJump=bastion"
        assert inventory.variables("gpu-1")["gpunodes_bmc_verify"] is True
        again = played(inventory, tmp_path / str(number))
        assert (again["ansible_ssh_common_args"], again["gpunodes_bmc_verify"]) == ("-o ProxyJump={{ b }}", True)


COMPOSED: Mapping[str, tuple[str, bool]] = {
    "a constant": ("'-o ProxyJump=bastion'", True),
    "a constant of a filter": ("'-o ProxyJump=BASTION' | lower | replace('proxyjump', 'ProxyJump')", True),
    "a part of the source": ("'-o ProxyJump=' ~ team", False),
    "all of the source": ("team", False),
    "a choice of the source": ("'-o ProxyJump=a' if team else ''", False),
}


@pytest.mark.parametrize("case", COMPOSED)
def test_constants_of_the_plugins_file_are_the_users(tmp_path: Path, case: str) -> None:
    """Ansible marks no result of an expression; a constant is the user's all the same."""
    expression, accepted = COMPOSED[case]
    inventory_of(tmp_path / "i", {"team": "-o ProxyJump=x"}, "a.yml")
    (tmp_path / "i" / "inventory_plugins").rename(tmp_path / "inventory_plugins")
    compose = {"ansible_ssh_common_args": expression}
    (tmp_path / "i" / "b.yml").write_text(yaml.safe_dump({"plugin": "constructed", "strict": True, "compose": compose}))
    if accepted:
        assert Inventory(tmp_path / "i").variables("gpu-1")["ansible_ssh_common_args"] == "-o ProxyJump=bastion"
    else:
        with pytest.raises(WrongInput, match="comes from outside, by the inventory plugin constructed"):
            Inventory(tmp_path / "i")


def test_texts_of_the_plugins_file_are_the_users(tmp_path: Path) -> None:
    path = tmp_path / "generator.yml"
    variables = {"ansible_ssh_common_args": "-o ProxyJump=bastion"}
    hosts = {"name": "gpu-1", "parents": [{"name": "workers", "vars": variables}]}
    path.write_text(yaml.safe_dump({"plugin": "generator", "hosts": hosts, "layers": {"x": ["1"]}}))
    assert Inventory(path).variables("gpu-1")["ansible_ssh_common_args"] == "-o ProxyJump=bastion"
    hosts["parents"] = [{"name": "workers", "vars": {"gpunodes_bmc_verify": False}}]
    path.write_text(yaml.safe_dump({"plugin": "generator", "hosts": hosts, "layers": {"x": ["1"]}}))
    with pytest.raises(WrongInput, match="gpunodes_bmc_verify of gpu-1 comes from outside"):
        Inventory(path)


def test_static_files_and_scripts_are_the_users(tmp_path: Path) -> None:
    """They may set what they like, also beside a dynamic file that lists the same machine or group."""
    variables = {"ansible_ssh_common_args": "-o ProxyJump=b", "gpunodes_bmc_verify": False}
    script = "#!/bin/sh\necho '" + json.dumps({"workers": {"hosts": ["gpu-1"], "vars": variables}}) + "'\n"
    texts = {
        "hosts.yml": yaml.safe_dump({"workers": {"hosts": {"gpu-1": variables}}}),
        "zhosts.yml": yaml.safe_dump({"workers": {"vars": variables, "hosts": {"gpu-1": {}}}}),
        "hosts.ini": "[workers]\ngpu-1 ansible_ssh_common_args='-o ProxyJump=b' gpunodes_bmc_verify=False\n",
        "script": script,
    }
    for file, text in texts.items():
        folder = tmp_path / file.replace(".", "-")
        path = inventory_of(folder / "i", {"team": "x"})
        static = folder / "i" / file
        static.write_text(text)
        static.chmod(0o700 if file == "script" else 0o600)
        (path.parent / "inventory_plugins").rename(folder / "inventory_plugins")
        for each in (static, path.parent):
            found = Inventory(each).variables("gpu-1")
            assert {key: found[key] for key in variables} == variables
        again = played(Inventory(path.parent), tmp_path / file.replace(".", "-"))
        assert {key: again[key] for key in (*variables, "team")} == {**variables, "team": "x"}


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_a_source_does_not_name_the_controller(tmp_path: Path, name: str) -> None:
    """Ansible would run what is delegated to such a control plane on the controller, without SSH."""
    path = dynamic(tmp_path, {"control_plane": {name: {}}})
    with pytest.raises(WrongInput, match=f"lists the machine {name}, which is the controller"):
        Inventory(path)


def played(inventory: Inventory, folder: Path) -> dict[str, object]:
    """The variables of gpu-1 in a playbook; the plugin is not asked again."""
    config = inventory.path if inventory.path.is_file() else inventory.path / "cloud.yml"
    hostile = "inventory.add_host('gpu-1')\n" + setting("gpu-1", REFUSED)
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "code": hostile}))
    return listed(runner.inventories(inventory, folder), inventory.path)["gpu-1"]


def test_a_playbook_gets_the_inventory_that_was_checked(tmp_path: Path) -> None:
    """What was refused, or appeared since, is not in it; data stays data, templates and vaults of files stay."""
    (tmp_path / "password").write_text("secret\n")
    program = Path(sys.executable).parent / "ansible-vault"
    argv = [
        str(program),
        "encrypt_string",
        "--vault-password-file",
        str(tmp_path / "password"),
        "hidden",
        "--name",
        "v",
    ]
    vault = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    folder = tmp_path / "inventory"
    path = inventory_of(folder, {"ansible_host": "10.0.0.5", "tags": {"a": "{{ x }}", "b": [1, None, 1.5, True]}})
    (folder / "inventory_plugins").rename(tmp_path / "inventory_plugins")
    (folder / "group_vars").mkdir()
    (folder / "group_vars" / "workers.yml").write_text("rack: '{{ inventory_dir }}'\n")
    indented = vault.replace("\n", "\n        ")
    (folder / "hosts.yml").write_text(
        f"workers:\n  vars:\n        t: '{{{{ rack }}}}'\n        {indented}\n"
        "  children: {h100: {hosts: {gpu-1: {}}, vars: {ansible_group_priority: 7, day: 2026-01-02}}}\n"
    )
    inventory = Inventory(folder)
    expected = listed([str(folder)], folder)["gpu-1"]
    found = played(inventory, tmp_path)
    assert found == {**expected, "day": "2026-01-02"}
    document = json.loads((tmp_path / "listed" / "hosts.json").read_text())
    assert document["workers"]["vars"]["t"] == "{{ rack }}"
    assert document["workers"]["vars"]["v"]["__ansible_vault"].startswith("$ANSIBLE_VAULT")
    assert document["h100"]["vars"]["ansible_group_priority"] == 7
    assert document["all"]["hosts"]["gpu-1"]["tags"]["a"] == {"__ansible_unsafe": "{{ x }}"}
    assert (tmp_path / "listed" / "hosts.json").stat().st_mode & 0o777 == 0o600
    assert path.exists()


def test_the_copy_ends_with_the_playbook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    groups = {"control_plane": {"c1": {"ansible_host": "127.0.0.1", "ansible_port": 1, "token": "hidden"}}}
    inventory = Inventory(dynamic(tmp_path, groups))
    folder = tmp_path / "run"
    folder.mkdir()
    seen: list[Event] = []
    assert not runner.run(runner.Play("status.yml", inventory, ["c1"]), folder, seen.append).ok
    assert {event.machine for event in seen if event.machine} == {"c1"}
    assert not [path for path in folder.rglob("*") if path.is_file() and b"hidden" in path.read_bytes()]


def test_each_setting_of_the_controller_is_named() -> None:
    """A new setting whose description speaks of the controller, a command or a verification needs a decision."""
    about = re.compile(r"on the controller|[Cc]ommand that|[Ee]nvironment variable|verif|[Ff]ingerprint|sets it to")
    harmless = {
        "gpunodes_repair_evidence_days",
        "gpunodes_repair_verify_timeout",
        "gpunodes_rollout_verify_timeout",
        "gpunodes_device_plugin_image",
        "gpunodes_ready_image",
        "gpunodes_serving_certificates",
    }
    options = settings._options()
    assert set(sources.CONTROLLER) <= set(options)
    named = {
        name
        for name, option in options.items()
        if name.startswith("gpunodes_") and (about.search(str(option.get("description"))) or option["type"] == "path")
    }
    assert named - set(sources.CONTROLLER) == harmless


def test_variables_of_roles_are_not_a_sources() -> None:
    own = sources.own_variables()
    assert {"wiring_reached", "worker_control_plane", "kubeconfig_path"} <= own
    # What plugins of clouds list.
    assert not own & {"network_interfaces", "storage_profile", "placement", "tags", "state", "cluster", "labels"}
