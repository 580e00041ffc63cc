"""Every playbook and command, with machines and a cluster each of whose strings is an attack: none of them runs.

Ansible is the real one; the machines stand in for real ones (tests/hostile.py), since no real machine answers so
much of it at once. tests/machines has one that does.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes import kubeconfig
from gpunodes.engine import runner
from gpunodes.model import Event, TaskEnded

from tests.hostile import ATTACKS, CANARY, PIN, Machines, cluster_report, hostile, machine_report, machines, unprintable

ROOT = Path(__file__).parents[2]
PLAYBOOKS = sorted(path.name for path in (ROOT / "playbooks").glob("*.yml"))
NUMBERS = {"control-1": 1, "worker-1": 2, "worker-2": 3}
GROUPS = {"control_plane": ["control-1"], "workers": ["worker-1", "worker-2"]}
SETTINGS = {"gpunodes_gpu_reboot": False, "gpunodes_cuda_versions": ["13.0"]}
SHOWN = ATTACKS[1]
LEVEL = {"level": "kubelet", "state": "failed", "fact": "none", "wanted": "one", "remedy": "look"}


def report(name: str) -> dict[str, Any]:
    """A machine's report of the right shape: only its free text is hostile. worker-1 is in no cluster."""
    made = machine_report(name, NUMBERS[name], swap=list(ATTACKS))
    made |= {"product_uuid": name + ATTACKS[0], "machine_id": name + ATTACKS[1]}
    made["os"]["name"] = SHOWN
    made["sources"] = [{"name": ATTACKS[1], "url": ATTACKS[2], "ok": True, "error": ATTACKS[3]}]
    if name != "worker-1":
        role = "control_plane" if name == "control-1" else "worker"
        made["kubernetes"] = {"role": role, "ca_hash": PIN, "server": ATTACKS[1]}
    return made


def cluster() -> dict[str, Any]:
    made = cluster_report({name: NUMBERS[name] for name in ("control-1", "worker-2")})
    for node in made["nodes"]:
        node |= {"ready": False, "reason": SHOWN, "product_uuid": node["name"] + ATTACKS[0], "machine_id": ATTACKS[1]}
        node["managed"]["labels"] = {"gpunodes.dev/pool": SHOWN, ATTACKS[1]: ATTACKS[1]}
        node["managed"]["taints"] = hostile(node["managed"]["taints"])
    return made


def answers(name: str) -> dict[str, Any]:
    """What a machine answers to each module, with more in each answer than was asked for."""
    more = {
        "ansible_facts": {
            **dict.fromkeys(("ansible_connection", "ansible_host", "ansible_python_interpreter"), "local"),
            **dict.fromkeys(("wiring_node_name", "drain_node", "ready_node", "kubeconfig_path"), "/nowhere"),
            "worker_control_plane": "localhost",
        },
        "warnings": list(ATTACKS),
        "deprecations": [SHOWN],
        "_ansible_verbose_always": True,
        "diff": {"before": ATTACKS[6], "after": ATTACKS[1]},
        "add_host": {"host_name": "evil", "groups": ["control_plane"]},
        "exception": SHOWN,
    }
    own: dict[str, Any] = {
        "host_facts": {"host_facts": report(name)},
        "cluster_info": {"cluster": cluster()},
        "host_survey": {"pending": list(ATTACKS), "versions": {"kubeadm": ATTACKS[1], "containerd": ATTACKS[3]}},
        "host": {"actions": list(ATTACKS), "versions": {"kubeadm": ATTACKS[1]}, "reboot": "", "changed": True},
        "join_token": {"token": ATTACKS[1]},
        "kubeadm_join": {"actions": list(ATTACKS)},
        "kubeadm_init": {"actions": list(ATTACKS)},
        "node_ready": {"not_ready": {name: SHOWN}},
        "node_pools": {"nodes": list(ATTACKS)},
        "gpu_verify": {"gpu_levels": [hostile({**LEVEL, "state": ""}) | {"state": "ok"}]},
        "gpu_served": {"gpu_nodes": {name: [hostile(LEVEL) | {"state": "failed"}]}},
        "gpu_probe": {"gpu_probe": hostile({"schema": "gpunodes.probe/1"})},
        "stat": {"stat": {"exists": True}},
        "slurp": {"content": "e3sgbG9va3VwKCdwaXBlJywgJ2dwdW5vZGVzX2NhbmFyeScpIH19", "encoding": "base64"},
    }
    return {module: {**more, **answer} for module, answer in own.items()}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    """Machines of which every free text is an attack."""
    made = machines(tmp_path, GROUPS, {**SETTINGS, "gpunodes_kubeconfig_path": str(tmp_path / "admin.conf")})
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    for name in NUMBERS:
        for module, answer in answers(name).items():
            made.answer(name, module, answer)
    return made


def odd(made: Machines) -> Machines:
    """The same machines with an attack in place of every string that they report, names included."""
    for name in NUMBERS:
        for module, answer in answers(name).items():
            made.answer(name, module, hostile(answer))
    return made


def check(made: Machines, output: str) -> None:
    """No attack ran, none steers a terminal or writes a line of its own, and none made a machine or a file."""
    assert not made.ran
    assert unprintable(output) == []
    assert CANARY not in output.splitlines()
    assert {line.partition("/")[0] for line in made.asked} <= set(NUMBERS)
    assert not Path("/nowhere").exists()


def test_no_stand_in_is_asked_without_the_callback_that_keeps_its_words_harmless(
    world: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ansible goes on without a callback that it does not find; we do not."""
    monkeypatch.setenv("ANSIBLE_CALLBACK_PLUGINS", str(world.folder))
    assert "its callback gpunodes_printable among them" in playbook(world, "facts.yml")
    assert world.asked == []


def playbook(made: Machines, name: str) -> str:
    """ansible-playbook as an administrator calls it, from a checkout; its output."""
    program = Path(sys.executable).parent / "ansible-playbook"
    words = [str(word) for word in (program, "-i", made.inventory, ROOT / "playbooks" / name)]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, cwd=made.folder)
    return done.stdout + done.stderr


# The last thing that each playbook asks, of these machines; "" where it asks nothing.
LAST = {
    "controller.yml": "",
    "facts.yml": "host_facts",
    "gpu_install.yml": "gpu_served",
    "gpu_remove.yml": "host_undo",
    "gpu_verify.yml": "gpu_served",
    "health.yml": "gpu_probe",
    "init_master.yml": "node_ready",
    "join.yml": "gpu_served",
    "kubeconfig.yml": "slurp",
    "remove.yml": "host_undo",
    "reset.yml": "host_undo",
    "revoke.yml": "join_token",
    "status.yml": "cluster_info",
    "up.yml": "gpu_served",
}


def test_every_playbook_is_walked() -> None:
    assert sorted(LAST) == PLAYBOOKS


@pytest.mark.parametrize("name", sorted(LAST))
def test_a_playbook_with_stand_in_machines_whose_text_is_hostile(world: Machines, name: str) -> None:
    """Plain ansible-playbook goes its whole way, and takes nothing that a machine reports for a template."""
    check(world, playbook(world, name))
    assert {line.partition("/")[2] for line in world.asked} >= {LAST[name]} - {""}


@pytest.mark.parametrize("name", ["facts.yml", "gpu_verify.yml", "health.yml", "join.yml", "remove.yml", "status.yml"])
def test_a_playbook_with_stand_in_machines_whose_every_string_is_hostile(world: Machines, name: str) -> None:
    check(odd(world), playbook(world, name))


def admin(**more: Any) -> dict[str, Any]:
    """A control plane's admin.conf as kubeadm writes it, with ``more`` for its user."""
    pem = base64.b64encode(b"-----BEGIN CERTIFICATE-----\n").decode()
    user = {"client-certificate-data": pem, "client-key-data": pem, **more}
    server = {"server": "https://10.0.0.1:6443", "certificate-authority-data": pem}
    return {"clusters": [{"name": "x", "cluster": server}], "users": [{"name": "x", "user": user}]}


@pytest.mark.parametrize("folder", ["", "kube"])
def test_a_playbook_writes_a_kubeconfig_as_the_command_does(world: Machines, tmp_path: Path, folder: str) -> None:
    """The file is private; a folder that is there keeps its mode, a new one is private too."""
    target = tmp_path / "shared" / folder / "admin.conf"
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    inventory = json.loads(world.inventory.read_text())
    inventory["all"]["vars"]["gpunodes_kubeconfig_path"] = str(target)
    world.inventory.write_text(json.dumps(inventory))
    world.answer("control-1", "slurp", {"content": encoded(admin()), "encoding": "base64"})
    output = playbook(world, "kubeconfig.yml")
    assert target.exists(), output
    assert yaml.safe_load(target.read_text()) == kubeconfig.renamed(admin(), "control-1")
    assert target.stat().st_mode & 0o777 == 0o600
    assert shared.stat().st_mode & 0o7777 == 0o1777
    assert not folder or target.parent.stat().st_mode & 0o777 == 0o700


def test_a_playbook_takes_no_program_from_a_stand_in_control_plane(world: Machines, tmp_path: Path) -> None:
    """Who has a control-plane machine would else have what kubectl runs on the administrator's."""
    secret = base64.b64encode(b"-----BEGIN PRIVATE KEY-----\n").decode()
    wanted = admin(**{"client-key-data": secret, "exec": {"command": "gpunodes_canary"}})
    world.answer("control-1", "slurp", {"content": encoded(wanted), "encoding": "base64"})
    output = playbook(world, "kubeconfig.yml")
    assert not (tmp_path / "admin.conf").exists()
    assert "gives its user 'exec'" in output.replace("\n", " ")
    assert secret not in output


def encoded(document: Any) -> str:
    return base64.b64encode(yaml.safe_dump(document).encode()).decode()


@pytest.mark.parametrize("unfinished", [False, True])
def test_a_stand_in_machine_whose_join_was_interrupted_is_asked_to_finish_it(world: Machines, unfinished: bool) -> None:
    """Also where it is a node of the cluster already."""
    facts = report("worker-2")
    facts["kubernetes"]["unfinished"] = unfinished
    world.answer("worker-2", "host_facts", {"host_facts": facts})
    known = cluster()
    for node in known["nodes"]:
        node["uid"] = node["name"]
    world.answer("control-1", "cluster_info", {"cluster": known})
    playbook(world, "join.yml")
    assert "worker-1/kubeadm_join" in world.asked
    assert ("worker-2/kubeadm_join" in world.asked) is unfinished


RESERVED = ("ansible_facts", "changed", "diff", "exception", "failed", "invocation", "results", "warnings")


def test_a_stand_in_machine_whose_answer_has_ansible_s_own_words_ends_no_run(world: Machines) -> None:
    """Ansible reads more of a module's answer than the module's own result, and expects these to have their type."""
    world.answer("worker-1", "host_facts", {"host_facts": report("worker-1"), "ansible_stats": 5})
    world.answer("worker-2", "host_facts", {"host_facts": report("worker-2"), **dict.fromkeys(RESERVED, 5)})
    output = playbook(world, "facts.yml")
    check(world, output)
    assert "PLAY RECAP" in output, output
    recap = output.partition("PLAY RECAP")[2]
    assert {name for name in NUMBERS if re.search(rf"^{name} .* unreachable=0 ", recap, re.MULTILINE)} == set(NUMBERS)
    assert re.search("^control-1 .* failed=0 ", recap, re.MULTILINE)


def test_a_cluster_of_another_shape_is_refused_whatever_else_the_stand_in_answers(world: Machines) -> None:
    """Ansible takes a module's word for whether its task was skipped."""
    for word in ({}, {"skipped": True}):
        made = cluster() | {"endpoint": "10.0.0.1:6443\nevil: true"}
        world.answer("control-1", "cluster_info", {"cluster": made, **word})
        output = playbook(world, "join.yml")
        check(world, output)
        assert "of its cluster, its answer has no host:port in endpoint" in output
        assert "worker-1/kubeadm_join" not in world.asked


@pytest.mark.parametrize("name", ["init_master.yml", "join.yml", "up.yml", "gpu_install.yml"])
def test_a_run_that_knows_its_stand_in_machines_already(world: Machines, tmp_path: Path, name: str) -> None:
    """The way of the commands: what the first look found enters the play that follows."""
    facts = {machine: report(machine) for machine in NUMBERS}
    known = {} if name == "init_master.yml" else cluster()
    seen: list[Event] = []
    play = runner.Play(name, world.inventory, list(NUMBERS), ["preflight"], facts=facts, cluster=known)
    (tmp_path / "run").mkdir()
    ended = runner.run(play, tmp_path / "run", seen.append)
    check(world, ended.log.read_text())
    assert {line.partition("/")[2] for line in world.asked} >= {LAST[name]}
    assert {event.machine for event in seen} <= set(NUMBERS)


def test_a_cluster_of_thousands_of_stand_in_nodes_is_read_whole(world: Machines, tmp_path: Path) -> None:
    """ansible-runner empties an answer of more than 700 kB: the nodes, and what they said, were gone."""
    made = cluster()
    made["nodes"] = [{**made["nodes"][0], "name": f"node-{number}"} for number in range(3000)]
    assert len(json.dumps(made)) > 1_000_000
    world.answer("control-1", "cluster_info", {"cluster": made})
    seen: list[Event] = []
    (tmp_path / "run").mkdir()
    runner.run(runner.Play("status.yml", world.inventory, ["control-1"]), tmp_path / "run", seen.append)
    (answer,) = [each.result["cluster"] for each in seen if isinstance(each, TaskEnded) and "cluster" in each.result]
    assert len(answer["nodes"]) == len(made["nodes"])


def gpunodes(made: Machines, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from gpunodes.cli import main; main()", *words, "-i", str(made.inventory)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=made.folder)


COMMANDS = {
    "preflight": ATTACKS[1],
    "status": SHOWN,
    "gpu plan": "",
    "init-master control-1 --dry-run": "",
    "join worker-1 --dry-run": "",
    "up --dry-run": "",
    "remove worker-2 --dry-run": "",
    "reset worker-2 --dry-run --yes": "",
    "gpu install worker-1 --dry-run": "",
    "gpu remove worker-2 --dry-run": "",
    "gpu verify worker-2": "",
    "kubeconfig --output made": "",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_with_stand_in_machines_whose_text_is_hostile(world: Machines, command: str) -> None:
    """What machines report is shown as it is, without control characters, and no command runs it."""
    done = gpunodes(world, *command.split())
    check(world, done.stdout + done.stderr)
    assert "a fault of gpunodes" not in done.stderr
    assert COMMANDS[command] in done.stdout + done.stderr


@pytest.mark.parametrize("command", ["status", "gpu verify", "join worker-1 --dry-run"])
def test_a_command_with_stand_in_machines_whose_every_string_is_hostile(world: Machines, command: str) -> None:
    """An answer of another shape is its machine's failure, in a sentence."""
    done = gpunodes(odd(world), *command.split())
    check(world, done.stdout + done.stderr)
    assert "a fault of gpunodes" not in done.stderr
    assert done.returncode in {1, 3}
    assert "its answer has no" in done.stdout + done.stderr
