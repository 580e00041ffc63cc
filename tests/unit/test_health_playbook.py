"""playbooks/health.yml with health_repair, by real Ansible: this machine stands in for those of the inventory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpunodes.errors import WrongInput
from gpunodes.inventory import Inventory

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
DOCUMENT = {
    "schema": "gpunodes.repair/1",
    "machines": [
        {"name": "gpu-1", "decision": "repair", "outcome": "repaired", "why": "{{ lookup('pipe', 'id') }} it hung"},
        {"name": "gpu-2", "decision": "nothing", "outcome": None, "why": "it is well"},
    ],
}


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    path = tmp_path / "hosts.yml"
    path.write_text(
        "control_plane: {hosts: {c1: {ansible_host: 127.0.0.1, ansible_port: 1}}}\n"
        "workers: {hosts: {gpu-1: {}, gpu-2: {}}}\n"
        # Not the controller.
        "storage: {hosts: {localhost: {ansible_connection: ssh, ansible_host: 127.0.0.1, ansible_port: 1}}}\n"
        f"all: {{vars: {{ansible_connection: local, ansible_python_interpreter: {sys.executable}}}}}\n"
    )
    return path


def play(inventory: Path, command: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the playbook; ``command`` is a shell script in the place of `gpunodes`."""
    program = inventory.with_name("gpunodes")
    program.write_text(f"#!/bin/sh\n{command}\n")
    program.chmod(0o755)
    variables = json.dumps({"health_repair": True, "health_command": str(program), "ansible_become": False})
    return subprocess.run(
        [
            str(Path(sys.executable).with_name("ansible-playbook")),
            *("-i", str(inventory), "-e", variables, "playbooks/health.yml", *more),
        ],
        cwd=ROOT,
        env={**os.environ, "XDG_STATE_HOME": str(inventory.parent / "state"), "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.parametrize(("more", "word", "changed"), [((), "--yes", 1), (("--check",), "--dry-run", 0)])
def test_the_command_repairs_once_and_then_every_machine_is_judged(
    inventory: Path, more: tuple[str, ...], word: str, changed: int
) -> None:
    """One command for the machines of the play, then the verdicts; check mode only asks for the plan."""
    asked, document = inventory.with_name("asked"), inventory.with_name("document")
    document.write_text(json.dumps(DOCUMENT).replace('"repaired"', '"repaired"' if changed else "null"))
    done = play(inventory, f'echo "$@" >>{asked}; cat {document}; exit 3', "--limit", "gpu-1,gpu-2", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = f"health gpu-1 gpu-2 --reboot-hung --json --actions reboot --inventory {inventory} {word}\n"
    assert asked.read_text() == expected, "once, and not on each machine"
    assert "gpu-1: {{ lookup('pipe', 'id') }} it hung" in done.stdout, "what is reported is shown as it is"
    assert "gpu-2: it is well" not in done.stdout
    assert re.findall(r"changed=(\d)", done.stdout) == [str(changed), "0"]
    assert len(re.findall(r'"msg": "gpu-\d: ', done.stdout)) == 2


def test_what_the_limit_takes_out_is_not_repaired(inventory: Path) -> None:
    """Ansible's own meaning of it, by the command's own pattern; it was split into machines and repaired."""
    asked, document = inventory.with_name("asked"), inventory.with_name("document")
    document.write_text(json.dumps(DOCUMENT))
    done = play(inventory, f'echo "$@" >>{asked}; cat {document}; exit 3', "--limit", "workers:!gpu-2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert asked.read_text().startswith("health workers:!gpu-2 --reboot-hung ")
    chosen = Inventory(inventory).select(["workers:!gpu-2"])
    assert [machine.name for machine in chosen] == ["gpu-1"]
    with pytest.raises(WrongInput, match="alone names no machines"):
        Inventory(inventory).select(["workers", "!gpu-2"])


def stops(done: subprocess.CompletedProcess[str]) -> Any:
    """The message of the one task that failed; the play ended there."""
    assert done.returncode != 0
    assert "from_json" not in done.stdout + done.stderr
    assert "Evaluate the probe's result" not in done.stdout
    (message,) = re.findall(r'fatal: \[c1\]: FAILED! => \{.*?"msg": "(.*?)"', done.stdout, re.DOTALL)
    return message


def test_a_control_plane_that_is_down_is_said_in_a_sentence(inventory: Path) -> None:
    """The real command, and no control plane: its sentence is the play's error."""
    program = f"exec {sys.executable} -c 'from gpunodes.cli import main; main()' \"$@\""
    message = stops(play(inventory, program))
    assert message.startswith("error: the control plane does not respond: "), message
    assert message.endswith("restore the control plane first, or skip the cluster with --without-cluster"), message


@pytest.mark.parametrize(
    ("more", "variable"),
    [
        (("--become-password-file", "secret"), "ANSIBLE_BECOME_PASSWORD_FILE"),
        (("-e", "ansible_ssh_pass=sesame"), "ANSIBLE_CONNECTION_PASSWORD_FILE"),
    ],
)
def test_a_password_that_the_command_would_not_have_is_refused(
    inventory: Path, more: tuple[str, ...], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It scanned without root, and its steps failed."""
    asked, secret = inventory.with_name("asked"), inventory.with_name("secret")
    secret.write_text("sesame\n")
    words = [str(secret) if word == "secret" else word for word in more]
    command = f"echo >{asked}; exit 1"
    message = stops(play(inventory, command, *words))
    assert f"name that in the environment variable {variable}, or let" in message
    assert not asked.exists()
    monkeypatch.setenv(variable, str(secret))
    play(inventory, command, *words)
    assert asked.exists()


def test_a_command_that_is_not_there_is_named(inventory: Path) -> None:
    """Without gpunodes on PATH the play says so."""
    message = stops(play(inventory, "exit 3", "-e", "health_command=/nowhere/gpunodes"))
    assert message == "/nowhere/gpunodes cannot be run; install gpunodes on the controller, or set health_command"
