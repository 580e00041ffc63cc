"""What opens a vault where gpunodes reads the inventory opens it in Ansible too, and nothing else does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

BIN = Path(sys.executable).parent
# In a process of its own: Ansible reads its configuration, and opens vaults, once in a process.
_READ = """
import json, os, subprocess, sys
from pathlib import Path
from gpunodes.engine import runner
from gpunodes.inventory import Inventory
path = Path("hosts.yml")
found = Inventory(path).connection("gpu-1")
env = {**os.environ, **runner.environment(path)}
words = [sys.argv[1], "-i", str(path), "gpu-1", "-m", "debug", "-a", "msg={{ [ansible_become_pass, settings] }}"]
shown = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout
print(json.dumps([[found["ansible_become_pass"], found["settings"]], json.loads(shown.partition("=>")[2])["msg"]]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "key").write_text("opens it")
    words = [str(BIN / "ansible-vault"), "encrypt_string", "--vault-password-file", "key", "hidden"]
    value = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    (tmp_path / "hosts.yml").write_text("workers: {hosts: {gpu-1: {}}}\n")
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/all.yml").write_text(f"ansible_become_pass: {value}\nsettings: {{one: 1}}\n")
    (tmp_path / "group_vars/workers.yml").write_text("settings: {two: 2}\n")
    return tmp_path


def read(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """What our own connections and Ansible read of the machine: sudo's password, and a variable of two groups."""
    words = [sys.executable, "-c", _READ, str(BIN / "ansible")]
    env = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_VAULT")}
    return subprocess.run(words, env={**env, **variables}, capture_output=True, text=True, check=False, cwd=folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ANSIBLE_VAULT_PASSWORD_FILE", "key"),
        ("ANSIBLE_VAULT_IDENTITY_LIST", "key"),
        ("ANSIBLE_VAULT_IDENTITY_LIST", "other@other, own@key"),
    ],
)
def test_environment_variables_count_in_both(folder: Path, name: str, value: str) -> None:
    """A list of vaults counted in Ansible only."""
    (folder / "other").write_text("opens another")
    done = read(folder, **{name: value})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == 2 * [["hidden", {"two": 2}]]


def test_ansible_cfg_counts_in_neither(folder: Path) -> None:
    """Its vault password counted on our own connections only: `health` worked, and `join` failed in Ansible."""
    (folder / "ansible.cfg").write_text("[defaults]\nvault_password_file = key\nhash_behaviour = merge\n")
    for variables in ({}, {"ANSIBLE_CONFIG": "ansible.cfg"}):
        done = read(folder, **variables)
        assert done.returncode != 0
        assert "or set ANSIBLE_VAULT_PASSWORD_FILE: your ansible.cfg does not apply" in done.stderr
        done = read(folder, ANSIBLE_VAULT_PASSWORD_FILE="key", **variables)
        assert json.loads(done.stdout) == 2 * [["hidden", {"two": 2}]], done.stderr


def test_a_prompt_is_refused_before_ansible_would_wait_for_it(folder: Path) -> None:
    done = read(folder, ANSIBLE_VAULT_IDENTITY_LIST="own@prompt")
    assert "ANSIBLE_VAULT_IDENTITY_LIST asks for a password" in done.stderr
