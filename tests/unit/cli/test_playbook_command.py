"""`gpunodes playbook`: real Ansible, which starts a program in the place of ssh."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.unit.test_host_keys import forwards, resolved_by_ssh

pytestmark = pytest.mark.long

_SSH = """#!{python}
import json, sys, time
with open({log!r}, "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
time.sleep({seconds})
sys.exit(255)
"""
MACHINES = ("gpu-1", "nas")


class Site:
    """An inventory with a worker and a machine that only serves storage; ``ssh`` logs its arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"
        self.path = folder / "hosts.yml"
        self.config = folder / "ssh_config"
        self.config.write_text(f"UserKnownHostsFile {folder}/cluster_hosts\nStrictHostKeyChecking yes\n")
        self.write()
        self.ssh()

    def ssh(self, seconds: float = 0) -> None:
        program = self.folder / "ssh"
        program.write_text(_SSH.format(python=sys.executable, log=str(self.log), seconds=seconds))
        program.chmod(0o700)

    def write(self, **variables: str) -> None:
        """The inventory, with variables of all machines; the last machine is the one of 127.0.0.2."""
        groups = {
            "workers": {"hosts": {"gpu-1": {"ansible_host": "127.0.0.1"}}},
            "storage": {"hosts": {"nas": {"ansible_host": "127.0.0.2"}}},
            "all": {"vars": variables},
        }
        self.path.write_text(yaml.safe_dump(groups))

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        state = {"XDG_STATE_HOME": str(self.folder / "state"), "TMPDIR": str(self.folder)}
        return subprocess.Popen(
            [sys.executable, "-c", "from gpunodes.cli import main; main()", "playbook", *words],
            env={**os.environ, **state, "ANSIBLE_SSH_EXECUTABLE": str(self.folder / "ssh"), **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
        )

    def run(self, *words: str, given: str = "", **variables: str) -> str:
        with self.start(*words, **variables) as process:
            return process.communicate(given, timeout=120)[0]

    def connection(self, *words: str, playbook: str = "facts", **variables: str) -> dict[str, str]:
        """What ssh resolves from the arguments of Ansible's first connection."""
        self.log.unlink(missing_ok=True)
        output = self.run("-i", str(self.path), playbook, *words, **variables)
        assert self.log.exists(), output
        return resolved_by_ssh(["ssh", *json.loads(self.log.read_text().splitlines()[0])])

    def leftovers(self) -> list[Path]:
        return list(self.folder.glob("gpunodes-*"))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    for name in ("ARGS", "COMMON_ARGS", "EXTRA_ARGS"):
        monkeypatch.delenv(f"ANSIBLE_SSH_{name}", raising=False)
    return Site(tmp_path)


def by_inventory(site: Site) -> dict[str, str]:
    site.write(ansible_ssh_common_args=f"-F {site.config}")
    return site.connection()


WAYS: dict[str, Callable[[Site], dict[str, str]]] = {
    "inventory": by_inventory,
    "environment": lambda site: site.connection(ANSIBLE_SSH_ARGS=f"-F {site.config}"),
    "argument": lambda site: site.connection("--ssh-common-args", f"-F {site.config}"),
    "argument with =": lambda site: site.connection(f"--ssh-extra-args=-F {site.config}"),
    "extra variable": lambda site: site.connection("-e", json.dumps({"ansible_ssh_common_args": f"-F {site.config}"})),
    "extra variable of ssh": lambda site: site.connection("-e", f"ansible_ssh_args='-F {site.config}'"),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_key_is_learned_where_the_user_s_ssh_learns_none(site: Site, way: str) -> None:
    """It accepted the key of whoever was in between, and read the wrong file of known hosts."""
    found = WAYS[way](site)
    assert found["stricthostkeychecking"] == "true"
    assert found["userknownhostsfile"] == f"{site.folder}/cluster_hosts"
    assert site.leftovers() == []


def test_other_machines_have_the_options_of_gpunodes(site: Site) -> None:
    found = site.connection()
    assert found["stricthostkeychecking"] == "accept-new"
    assert found["userknownhostsfile"].startswith(f"{site.folder}/state/")
    assert forwards(found) == set()


def test_nothing_is_forwarded(site: Site) -> None:
    """By the inventory's arguments, which went last."""
    site.write(ansible_ssh_common_args="-A -X")
    assert forwards(site.connection()) == set()


def test_a_machine_that_only_serves_storage_has_the_same_rules(site: Site) -> None:
    site.write(ansible_ssh_common_args=f"-A -F {site.config}")
    found = site.connection(playbook="storage_server")
    assert found["hostname"] == "127.0.0.2"
    assert (found["stricthostkeychecking"], forwards(found)) == ("true", set())


def test_the_user_s_ansible_cfg_does_not_apply(site: Site) -> None:
    """In neither half of a command: ssh_args there were ignored already."""
    (site.folder / "ansible.cfg").write_text("[defaults]\nremote_user = other\n")
    assert site.connection()["user"] != "other"


def test_an_inventory_may_follow_the_name_and_several_are_refused(site: Site) -> None:
    for words in (("-i", str(site.path)), (f"-i{site.path}",), (f"--inventory={site.path}",)):
        site.log.unlink(missing_ok=True)
        site.run("facts", *words)
        assert site.log.exists(), words
    site.log.unlink()
    assert "several inventories: hosts.yml, other" in site.run("facts", "-i", "hosts.yml", "-i", "other")
    assert "the list of machines gpu-1,;" in site.run("facts", "-i", "gpu-1,")
    assert "-i is abbreviated" in site.run("-i", str(site.path), "facts", "-vi", str(site.path))
    assert "there is no inventory at" in site.run("-i", "none.yml", "facts")
    assert not site.log.exists()


def test_a_plugin_s_machines_are_those_that_were_checked(site: Site) -> None:
    """Ansible reads a copy, which is removed: a plugin could list others the second time."""
    (site.folder / "inventory_plugins").mkdir()
    (site.folder / "inventory_plugins/ours.py").write_text(
        "from pathlib import Path\n"
        "from ansible.plugins.inventory import BaseInventoryPlugin\n"
        "class InventoryModule(BaseInventoryPlugin):\n"
        "    NAME = 'ours'\n"
        "    def verify_file(self, path): return True\n"
        "    def parse(self, inventory, loader, path, cache=True):\n"
        "        runs = Path(path).with_name('runs')\n"
        "        runs.write_text((runs.read_text() if runs.exists() else '') + 'x')\n"
        "        inventory.add_group('workers')\n"
        "        inventory.add_host('gpu-1', group='workers')\n"
        "        inventory.set_variable('gpu-1', 'ansible_host', '127.0.0.1')\n"
    )
    site.path.write_text("plugin: ours\n")
    assert site.connection()["hostname"] == "127.0.0.1"
    assert (site.folder / "runs").read_text() == "x"
    assert site.leftovers() == []


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """What these tests start does not ignore Ctrl-C, as it would where they run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_ansible_and_leaves_nothing(site: Site, number: signal.Signals) -> None:
    site.ssh(seconds=60)
    with site.start("-i", str(site.path), "facts") as process:
        deadline = time.monotonic() + 60
        while not site.log.exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode not in {0, 4}
    assert site.leftovers() == []


def test_the_exit_code_is_that_of_ansible(site: Site) -> None:
    with site.start("-i", str(site.path), "facts") as process:
        process.communicate(timeout=120)
    assert process.returncode == 4, "unreachable"


def test_typed_passwords_count_for_the_repair_command_too(site: Site) -> None:
    """`health -e health_repair=true -K` did not pass it on."""
    program = site.folder / "repair"
    seen = site.folder / "seen"
    program.write_text(f'#!/bin/sh\n("$ANSIBLE_BECOME_PASSWORD_FILE"; echo "$ANSIBLE_SSH_ARGS") >{seen}; exit 1\n')
    program.chmod(0o700)
    variables = json.dumps({"health_repair": True, "health_command": str(program)})
    output = site.run("-i", str(site.path), "health", "-e", variables, "-K", given="sesame\n")
    # What it gets as ssh's arguments would count as the user's.
    assert seen.read_text() == "sesame\n\n", output
    assert "sesame" not in output
    output = site.run("-i", str(site.path), "health", "-e", variables, "-e", "ansible_become_password=sesame")
    assert "`gpunodes playbook health` ask for it" in " ".join(output.split())


def encrypt(site: Site) -> None:
    """An argument of ssh in the inventory, encrypted with the password in the file key."""
    (site.folder / "key").write_text("opens it")
    program = str(Path(sys.executable).with_name("ansible-vault"))
    argv = [program, "encrypt_string", "--vault-password-file", "key", "--", f"-F {site.config}"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=site.folder)
    value = done.stdout.replace("\n", "\n    ")
    site.path.write_text(site.path.read_text().replace("vars: {}", f"vars:\n    ansible_ssh_common_args: {value}"))


@pytest.mark.parametrize("flags", ["-vJ", "-KJ", "-kJK"])
def test_joined_flags_ask_for_passwords(site: Site, flags: str) -> None:
    """Only Ansible asked: gpunodes itself could not read the inventory."""
    encrypt(site)
    asked = [letter for letter in flags if letter in "kKJ"]
    given = "".join("opens it\n" if letter == "J" else "sesame\n" for letter in asked)
    output = site.run("-i", str(site.path), "facts", flags, given=given)
    assert site.log.exists(), output
    assert str(site.config) in site.log.read_text()


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("--vault-password key", "--vault-password-file"),
        ("--become-password key", "--become-password-file"),
        ("--connection-pass key", "--connection-password-file"),
        ("--ask-become", "--ask-become-pass"),
        ("-KJe x=1", "--ask-vault-pass"),
    ],
)
def test_an_option_that_gpunodes_itself_needs_is_not_abbreviated(site: Site, words: str, option: str) -> None:
    """It went to Ansible alone."""
    (site.folder / "key").write_text("opens it")
    output = site.run("-i", str(site.path), "facts", *words.split(), ANSIBLE_BECOME_PASSWORD_FILE="~/none")
    assert f"{option} is abbreviated, or joined" in output
    assert not site.log.exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["-e", "@nope.yml"], "error: -e @{folder}/nope.yml: Unable to retrieve file contents"),
        (["-e", "a=1", "-e", "@nope.yml"], "error: -e: Unable to retrieve file contents. Could not find or access"),
        (["-e", "[1"], "error: -e: YAML parsing failed"),
        (["-e", "@key"], "for a vault, use --ask-vault-pass"),
    ],
)
def test_an_error_of_extra_variables_names_their_option(site: Site, words: list[str], error: str) -> None:
    """It told to correct the inventory."""
    (site.folder / "key").write_text("$ANSIBLE_VAULT;1.1;AES256\n6162\n")
    output = site.run("-i", str(site.path), "facts", *words)
    assert error.format(folder=site.folder) in output
    assert "hosts.yml" not in output


@pytest.mark.parametrize("words", ["--vault-password-file=key", "--vault-id own@key"])
def test_a_vault_opens_with_the_arguments_of_ansible(site: Site, words: str) -> None:
    encrypt(site)
    assert site.connection(*shlex.split(words))["stricthostkeychecking"] == "true"
