"""Passwords that a person types, or that a file holds: for Ansible and for our own connections alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from gpunodes import cli
from gpunodes.cli import options, playbook
from gpunodes.cli.etcd import timer
from gpunodes.errors import WrongInput
from gpunodes.inventory import Inventory
from gpunodes.inventory.loader import password_of

pytestmark = pytest.mark.long

PASSWORD = "pa ss\"w$x'"
BIN = Path(sys.executable).parent


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("BECOME", "CONNECTION", "VAULT"):
        # Set once, so that what a command sets is taken back.
        monkeypatch.setenv(f"ANSIBLE_{name}_PASSWORD_FILE", "")
        monkeypatch.delenv(f"ANSIBLE_{name}_PASSWORD_FILE")
        monkeypatch.setenv(f"GPUNODES_ANSIBLE_{name}_PASSWORD_FILE", "")
    password_of.cache_clear()
    return tmp_path / "state"


def hosts(folder: Path, text: str = "workers: {hosts: {gpu-1: {}, gpu-2: {ansible_become_pass: own}}}\n") -> Path:
    (folder / "hosts.yml").write_text(text)
    return folder / "hosts.yml"


@click.command()
@options.inventory_option
def show(inventory_path: Path) -> None:
    """Print sudo's password for each machine, and what others find in the files that the environment names."""
    found = Inventory(inventory_path)
    message = {name: found.connection(name) for name in ("gpu-1", "gpu-2")}
    words = [str(BIN / "ansible"), "-i", str(inventory_path), "gpu-1", "-m", "debug", "-a", "var=ansible_become_pass"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    file = os.environ.get("ANSIBLE_BECOME_PASSWORD_FILE", "")
    child = subprocess.run([file or "true"], capture_output=True, text=True, check=True)
    environment = Path("/proc/self/environ").read_text() + json.dumps(dict(os.environ))
    click.echo(json.dumps({"said": message, "ansible": done.stdout, "child": child.stdout, "environment": environment}))


def test_sudo_s_password_is_asked_for_and_lies_nowhere(tmp_path: Path, state: Path) -> None:
    """The inventory's own goes first, as with Ansible; a child process reads it, and no file on a disk holds it."""
    done = CliRunner().invoke(show, ["-K", "-i", str(hosts(tmp_path))], input=f"{PASSWORD}\n", catch_exceptions=False)
    found = json.loads(done.stdout)
    assert found["said"]["gpu-1"]["ansible_become_password"] == PASSWORD
    assert found["child"] == f"{PASSWORD}\n"
    assert "ansible_become_password" not in found["said"]["gpu-2"]
    assert PASSWORD not in found["environment"]
    assert PASSWORD not in done.stderr
    assert [path for path in state.rglob("*") if path.is_file() and PASSWORD in path.read_text()] == []


def test_the_login_s_password_is_asked_for_and_lies_nowhere(tmp_path: Path, state: Path) -> None:
    """As that of sudo."""
    text = "workers: {hosts: {gpu-1: {}, gpu-2: {ansible_password: own}}}\n"
    words = ["-k", "-i", str(hosts(tmp_path, text))]
    done = CliRunner().invoke(show, words, input=f"{PASSWORD}\n", catch_exceptions=False)
    found = json.loads(done.stdout)
    assert found["said"]["gpu-1"]["ansible_ssh_password"] == PASSWORD
    assert "ansible_ssh_password" not in found["said"]["gpu-2"]
    assert "ansible_become_password" not in found["said"]["gpu-1"]
    assert PASSWORD not in found["environment"]
    assert [path for path in state.rglob("*") if path.is_file() and PASSWORD in path.read_text()] == []


def test_the_vault_s_password_is_asked_for(tmp_path: Path) -> None:
    """Our own reading of the inventory and Ansible's open the same vault."""
    secret = tmp_path / "secret"
    secret.write_text("opens it")
    words = [str(BIN / "ansible-vault"), "encrypt_string", "--vault-password-file", str(secret), "hidden", "-n", "x"]
    vault = subprocess.run(words, capture_output=True, text=True, check=True).stdout.replace(
        "x: ", "ansible_become_pass: "
    )
    secret.unlink()
    body = vault.replace("\n", "\n        ")
    path = hosts(tmp_path, f"workers:\n  hosts:\n    gpu-2: {{}}\n    gpu-1:\n        {body}\n")
    # In a process of its own: Ansible opens vaults once in a process.
    code = "import sys; sys.path.insert(0, ''); from tests.unit.cli.test_passwords import show; show()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--ask-vault-pass", "-i", str(path)],
        input="opens it\n",
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["said"]["gpu-1"]["ansible_become_pass"] == "hidden"
    assert '"ansible_become_pass": "hidden"' in found["ansible"]


def test_a_file_or_a_program_gives_sudo_s_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ansible's variable names counts on our own connections as well."""
    found = Inventory(hosts(tmp_path))
    for name, text, mode in (("file", f"{PASSWORD}\n", 0o600), ("program", "#!/bin/sh\necho secret\n", 0o700)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
        monkeypatch.setenv("ANSIBLE_BECOME_PASSWORD_FILE", str(tmp_path / name))
        expected = PASSWORD if name == "file" else "secret"
        assert found.connection("gpu-1")["ansible_become_password"] == expected
    monkeypatch.setenv("ANSIBLE_BECOME_PASSWORD_FILE", str(tmp_path / "none"))
    with pytest.raises(WrongInput, match="no password could be read from"):
        found.connection("gpu-1")
    assert "ansible_become_password" not in found.connection("gpu-2")


def _commands(group: click.Group) -> list[click.Command]:
    context = click.Context(group)
    found: list[click.Command] = [group]
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found += _commands(command) if isinstance(command, click.Group) else [command]
    return found


def test_every_command_that_reads_an_inventory_asks() -> None:
    """The timer's units are for nobody who could be asked; `playbook` finds the flags after the playbook's name."""
    reading = [
        command
        for command in _commands(cli.root)
        if {"-i", "--inventory"} & {flag for parameter in command.params for flag in parameter.opts}
        and command.name != "timer"
        and command not in {playbook.command, timer.command}
    ]
    assert len(reading) > 12
    for command in reading:
        flags = {flag for parameter in command.params for flag in parameter.opts}
        wanted = {"-k", "--ask-pass", "-K", "--ask-become-pass", "-J", "--ask-vault-pass"}
        assert wanted <= flags, command.name
