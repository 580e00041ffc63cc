"""Dynamic inventories: machines that an inventory plugin of Ansible lists."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import is_trusted_as_template
from gpunodes.cli import complete
from gpunodes.engine import runner
from gpunodes.errors import WrongInput
from gpunodes.inventory import Inventory, edit, plugins
from gpunodes.model import Role
from gpunodes.operations import checked

from tests.command import run

pytestmark = pytest.mark.long

PLUGIN = '''\
import os, sys, time
from ansible.plugins.inventory import BaseInventoryPlugin

DOCUMENTATION = """
name: __plugin__
short_description: machines of a test
options:
  plugin: {required: true}
"""

class InventoryModule(BaseInventoryPlugin):
    NAME = "__plugin__"

    def parse(self, inventory, loader, path, cache=True):
        super().parse(inventory, loader, path)
        config = loader.load_from_file(path, cache="none")
        exec(str(config.get("code", "")))
        for group, hosts in config.get("groups", {}).items():
            inventory.add_group(group)
            for host, variables in hosts.items():
                inventory.add_host(host, group=group)
                for key, value in variables.items():
                    inventory.set_variable(host, key, str(value) if isinstance(value, str) else value)
'''
"""A plugin that lists what its file says, as it would list what it got from a cloud."""
GROUPS = {
    "control_plane": {"c1": {"ansible_host": "10.0.0.1"}},
    "workers": {"gpu-1": {"ansible_host": "10.0.0.11"}, "gpu-2": {"ansible_host": "10.0.0.12"}},
}
UNSAFE = "__ansible_unsafe"


def dynamic(folder: Path, groups: Mapping[str, object] = GROUPS, code: str = "", file: str = "cloud.yml") -> Path:
    """The file of a plugin in ``folder``; the plugin itself is beside it. Ansible keeps plugins by their names."""
    # Not a counter: another test file imports this one under another name.
    name = f"cloud{secrets.token_hex(8)}"
    beside = folder / "inventory_plugins"
    beside.mkdir(parents=True, exist_ok=True)
    (beside / f"{name}.py").write_text(PLUGIN.replace("__plugin__", name))
    path = folder / file
    path.write_text(yaml.safe_dump({"plugin": name, "groups": groups, **({"code": code} if code else {})}))
    return path


def gpunodes(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", "from gpunodes.cli import main; main()", *arguments]
    given = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), **environment}
    return subprocess.run(argv, cwd=folder, env=given, capture_output=True, text=True, check=False)


def names(inventory: Inventory, *roles: Role) -> list[str]:
    return [machine.name for machine in inventory.machines(*roles)]


def test_machines_of_a_plugin_beside_the_inventory(tmp_path: Path) -> None:
    found = checked.inventory(dynamic(tmp_path))
    assert found.control_plane().address == "10.0.0.1"
    assert [machine.name for machine in found.select(["gpu-*:!gpu-2"], Role.WORKER)] == ["gpu-1"]


def test_machines_of_ansible_s_own_plugins(tmp_path: Path) -> None:
    """`generator` makes machines, and `constructed` puts those of a static file into groups."""
    (tmp_path / "a.yml").write_text(
        "plugin: generator\nhosts: {name: 'gpu-{{ number }}', parents: [{name: workers}]}\n"
        "layers: {number: ['1', '2']}\n"
    )
    (tmp_path / "b.yml").write_text("control_plane: {hosts: {c1: {}}}\nall: {vars: {rack: r7}}\n")
    (tmp_path / "c.yml").write_text(
        "plugin: constructed\nstrict: true\ngroups: {h100: inventory_hostname == 'gpu-1'}\n"
        "compose: {ansible_host: \"inventory_hostname ~ '.example'\"}\n"
    )
    found = checked.inventory(tmp_path)
    assert names(found) == ["c1", "gpu-1", "gpu-2"]
    assert [machine.address for machine in found.select(["h100"])] == ["gpu-1.example"]


def test_a_plugin_of_an_installed_collection(tmp_path: Path) -> None:
    folder = tmp_path / "collections/ansible_collections/amazon/aws/plugins/inventory"
    folder.mkdir(parents=True)
    (folder / "aws_ec2.py").write_text(PLUGIN.replace("__plugin__", "aws_ec2"))
    groups = {**GROUPS, "workers": {"gpu-1": {"gpunodes_pod_subnet": "banana"}}}
    (tmp_path / "aws_ec2.yml").write_text(yaml.safe_dump({"plugin": "amazon.aws.aws_ec2", "groups": groups}))
    collections = str(tmp_path / "collections")
    done = gpunodes(tmp_path, "gpu", "plan", "-i", "aws_ec2.yml", ANSIBLE_COLLECTIONS_PATH=collections)
    assert "gpunodes_pod_subnet of gpu-1 is 'banana'" in done.stderr
    done = gpunodes(tmp_path, "gpu", "plan", "-i", "aws_ec2.yml")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: aws_ec2.yml: the inventory plugin amazon.aws.aws_ec2 cannot be loaded: No module named "
    )
    assert "hint: install its collection" in done.stderr


def test_playbooks_find_the_plugin_beside_the_inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANSIBLE_INVENTORY_PLUGINS", "/site")
    path = dynamic(tmp_path)
    environment = runner.environment(path)
    assert environment["ANSIBLE_INVENTORY_PLUGINS"] == f"{tmp_path}/inventory_plugins:/site"
    argv = [str(Path(sys.executable).parent / "ansible-inventory"), "-i", str(path), "--list"]
    done = subprocess.run(argv, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["workers"]["hosts"] == ["gpu-1", "gpu-2"]
    assert "ANSIBLE_INVENTORY_PLUGINS" not in runner.environment(tmp_path / "elsewhere" / "hosts.yml")


def test_playbooks_use_the_address_that_was_checked(tmp_path: Path) -> None:
    """The plugin may list another address later, or more: Ansible does not run it again."""
    inventory = checked.inventory(dynamic(tmp_path))
    changed = {**GROUPS, "workers": {"gpu-1": {"ansible_host": "-oProxyCommand=id", "team": "x"}}}
    config = yaml.safe_load(inventory.path.read_text())
    inventory.path.write_text(yaml.safe_dump({**config, "groups": changed}))
    found = listed(runner.inventories(inventory, tmp_path), inventory.path)
    assert found["gpu-1"]["ansible_host"] == "10.0.0.11"
    assert "team" not in found["gpu-1"]


def test_a_rendered_value_is_no_template_for_ansible(tmp_path: Path) -> None:
    """What a template of the user's takes from a plugin was a template in the file for Ansible."""
    groups = {"workers": {"gpu-1": {"tags": {"options": "-o User={{ lookup('pipe','id') }}"}}}}
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "workers.yml").write_text("ansible_ssh_extra_args: '{{ tags.options }}'\n")
    inventory = checked.inventory(dynamic(tmp_path, groups))
    runner.inventories(inventory, tmp_path)
    loaded = DataLoader().load_from_file(str(tmp_path / "ssh/host_vars/gpu-1.json"), trusted_as_template=True)
    assert "lookup" in loaded["ansible_ssh_extra_args"]
    assert not is_trusted_as_template(loaded["ansible_ssh_extra_args"])


def listed(sources: Sequence[str], inventory: Path) -> dict[str, dict[str, object]]:
    """The variables of machines by Ansible's own command."""
    program = str(Path(sys.executable).parent / "ansible-inventory")
    argv = [program, "--list", *(word for source in sources for word in ("-i", source))]
    environment = {**os.environ, **runner.environment(inventory)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    # It marks the strings that it does not take for templates.
    document = json.loads(done.stdout, object_hook=lambda each: each.get(UNSAFE, each))
    found: dict[str, dict[str, object]] = document["_meta"]["hostvars"]
    return found


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"workers": {"../../etc/x": {}}}, "'../../etc/x' is not a machine name"),
        ({"workers": {"a/b": {}}}, "'a/b' is not a machine name"),
        ({"workers": {"a\x1b[2J": {}}}, r"'a\x1b[2J' is not a machine name"),
        ({"workers": {"{{ lookup('pipe', 'id') }}": {}}}, "is not a machine name"),
        ({"workers": {"-oProxyCommand=id": {}}}, "'-oProxyCommand=id' is not a machine name"),
        ({"workers": {"a" * 300: {}}}, "is not a machine name"),
        ({"../../evil": {"a": {}}}, "'../../evil' is not a group name"),
        ({"..": {"a": {}}}, "'..' is not a group name"),
        ({"{{ x }}": {"a": {}}}, "'{{ x }}' is not a group name"),
        ({"-x": {"a": {}}}, "'-x' is not a group name"),
        ({"workers": {"workers": {}, "gpu-1": {}}}, "workers is the name of a machine and of a group"),
        ({"workers": {"all": {}, "gpu-1": {}}}, "all is the name of a machine and of a group"),
        ({"workers": {"a": {"ansible_host": "-oProxyCommand=id"}}}, "ansible_host of a is '-oProxyCommand=id'"),
        ({"workers": {"a": {"ansible_host": "10.0.0.1\n-x"}}}, r"ansible_host of a is '10.0.0.1\n-x'"),
        ({"workers": {"a": {"ansible_host": "10.0.0.1 x"}}}, "ansible_host of a is '10.0.0.1 x'"),
        ({"workers": {"a": {"ansible_host": "../x"}}}, "ansible_host of a is '../x'"),
        ({"workers": {"a": {"ansible_ssh_host": "$(id)"}}}, "ansible_ssh_host of a is '$(id)'"),
        ({"workers": {"a": {"ansible_host": "{{ lookup('pipe', 'id') }}"}}}, "ansible_host of a contains a template"),
        (
            {"workers": {"a": {"gpunodes_pod_subnet": "{% x %}"}}},
            "gpunodes_pod_subnet of a contains a template",
        ),
        (
            {"workers": {"a": {"gpunodes_node_labels": {"x": "{{ y }}"}}}},
            "gpunodes_node_labels of a contains a template",
        ),
        ({"workers": {"a": {"gpunodes_pool": "a b"}}}, "gpunodes_pool of a is 'a b'"),
    ],
)
def test_what_a_plugin_lists_is_data(tmp_path: Path, groups: dict[str, object], message: str) -> None:
    path = dynamic(tmp_path, groups)
    evil = tmp_path.parent / "evil.yml"
    evil.write_text("read: true\n")
    with pytest.raises(WrongInput) as raised:
        checked.inventory(path)
    assert message in str(raised.value)
    assert len(str(raised.value)) < 600
    assert "\n" not in str(raised.value)


def test_templates_of_files_and_passwords_stay_usable(tmp_path: Path) -> None:
    """Ansible trusts templates in group_vars, and a password may contain braces."""
    path = dynamic(tmp_path, {"workers": {"a": {"ansible_password": "x{{y", "tags": {"Name": "{{ z }}"}}}})
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "workers.yml").write_text("rack: r7\nansible_user: '{{ rack }}'\n")
    connection = checked.inventory(path).connection("a")
    assert (connection["ansible_user"], connection["ansible_password"]) == ("r7", "x{{y")
    assert connection["tags"] == {"Name": "{{ z }}"}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "raise ValueError('no answer\\nfrom the cloud')",
            r"cloud.yml: the inventory plugin cloud[0-9a-f]+ failed: no answer;",
        ),
        ("raise KeyError('region')", "failed: 'region';"),
        ("raise ValueError('<html>' + 9999 * 'x')", r"failed: <html>x{294}; wanted"),
        ("sys.exit(7)", "ended gpunodes with exit code 7"),
        ("time.sleep(60)", "did not end within 1 s"),
        ("try:\n  time.sleep(60)\nexcept BaseException:\n  time.sleep(60)", "did not end within 1 s"),
    ],
)
def test_a_broken_or_slow_plugin_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    monkeypatch.setattr(plugins, "DEADLINE_S", 1.0)
    # Its failure is not hidden by another file of the folder.
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory" / "hosts.yml").write_text("workers: {hosts: {a: {}}}\n")
    dynamic(tmp_path, code=code).rename(tmp_path / "inventory" / "cloud.yml")
    with pytest.raises(WrongInput, match=message) as raised:
        Inventory(tmp_path / "inventory")
    assert "\n" not in str(raised.value)


def test_a_plugin_that_cannot_be_imported_is_one_sentence(tmp_path: Path) -> None:
    path = dynamic(tmp_path)
    plugin = next((tmp_path / "inventory_plugins").glob("*.py"))
    plugin.write_text("import boto9\n")
    with pytest.raises(WrongInput, match=r"cannot be loaded: No module named 'boto9'.*into .*inventory_plugins"):
        Inventory(path)


def test_a_dynamic_inventory_is_not_edited(tmp_path: Path) -> None:
    path = dynamic(tmp_path)
    before = path.read_bytes()
    for command in ("join 10.0.0.99", "init-master 10.0.0.99", "join gpu-1 --user x", "init-master --user x"):
        done = run(tmp_path, *command.split(), "-i", "cloud.yml", variables={"XDG_STATE_HOME": str(tmp_path / "state")})
        assert (done.returncode, done.stderr.count("error:"), done.stderr.count("hint:")) == (2, 1, 1), done.stderr
        assert "Traceback" not in done.stderr
        hint = done.stderr.splitlines()[1]
        assert "the inventory plugin cloud" in hint or "group_vars" in hint
    assert path.read_bytes() == before
    assert not (tmp_path / "state" / "gpunodes" / "runs").exists()


def test_of_a_folder_only_the_static_file_is_edited(tmp_path: Path) -> None:
    folder = tmp_path / "inventory"
    edit.add(folder / "hosts.yml", Role.CONTROL_PLANE, ["10.0.0.50"], {"ansible_user": "admin"})
    groups = {"workers": GROUPS["workers"]}
    dynamic(tmp_path, groups).rename(folder / "cloud.yml")
    before = (folder / "cloud.yml").read_bytes()
    with edit.tentative(folder, dry_run=False):
        edit.add(folder, Role.WORKER, ["10.0.0.51"], {})
    found = checked.inventory(folder)
    assert sorted(names(found)) == ["10.0.0.50", "10.0.0.51", "gpu-1", "gpu-2"]
    assert found.variables("10.0.0.51")["ansible_user"] == "admin"
    edit.reconnect(folder, found.select(["10.0.0.51"]), {"ansible_user": "other"})
    assert checked.inventory(folder).variables("10.0.0.51")["ansible_user"] == "other"
    with pytest.raises(WrongInput, match=r"did not create the file that lists gpu-1,.*group_vars"):
        edit.reconnect(folder, found.select(["gpu-1"]), {"ansible_user": "other"})
    with edit.tentative(folder, dry_run=True):
        edit.add(folder, Role.WORKER, ["10.0.0.52"], {})
    assert "10.0.0.52" not in names(checked.inventory(folder))
    assert (folder / "cloud.yml").read_bytes() == before
    edit.add(folder / "more.yml", Role.WORKER, ["10.0.0.53"], {})
    with pytest.raises(WrongInput, match=r"created .*hosts\.yml and .*more\.yml; wanted: one file"):
        edit.add(folder, Role.WORKER, ["10.0.0.54"], {})


def test_vaulted_variables_of_a_dynamic_inventory(tmp_path: Path) -> None:
    dynamic(tmp_path, {"workers": {"a": {}}})
    (tmp_path / "password").write_text("secret\n")
    vault = [str(Path(sys.executable).parent / "ansible-vault"), "encrypt", "--vault-password-file", "password"]
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "workers.yml").write_text("gpunodes_pod_subnet: banana\n")
    subprocess.run([*vault, "group_vars/workers.yml"], cwd=tmp_path, check=True, capture_output=True)
    done = gpunodes(tmp_path, "health", "-i", "cloud.yml", ANSIBLE_VAULT_PASSWORD_FILE="password")
    assert "gpunodes_pod_subnet of a is 'banana'" in done.stderr
    done = gpunodes(tmp_path, "health", "-i", "cloud.yml")
    assert done.returncode == 2
    assert "--ask-vault-pass" in done.stderr


def test_completion_offers_no_options_of_a_plugin(tmp_path: Path) -> None:
    assert complete._names(dynamic(tmp_path)) == []
