"""What machines and the cluster report is data: it enters a play by one door, and is never a template there.

tests/trust walks every command and playbook with it; here is what can be seen in seconds.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible._internal._datatag._tags import TrustedAsTemplate
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.callback import CallbackBase
from gpunodes.ansible.callback.printable import sanitize
from gpunodes.ansible.filter.general import data
from gpunodes.ansible.filter.network import firewalled
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.cli import terminal
from gpunodes.engine import runner
from gpunodes.errors import WrongInput
from gpunodes.inventory import Inventory, addressed, edit
from gpunodes.model import Event, Machine, MachineResult, Outcome, PreflightFinding, Role, printable
from gpunodes.operations import phases
from gpunodes.views import health_map, text

from tests.hostile import ATTACKS, cluster_report, hostile, machine_report, machines
from tests.playbooks import roles_of
from tests.stand_ins import filtered, given

ROOT = Path(__file__).parents[2]
CONTENT = sorted(
    path
    for folder in ("playbooks", "roles")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".yml", ".j2"} and path.name != "argument_specs.yml"
)
# What JSON can hold and Ansible's loaders take for something of theirs, or cannot read.
MARKERS = [
    {"__ansible_unsafe": 5},
    {"__ansible_unsafe": ATTACKS[1]},
    {"__ansible_vault": ATTACKS[1]},
    {"__ansible_type": "_AnsibleTaggedStr", "value": ATTACKS[1], "tags": [{"__ansible_type": "TrustedAsTemplate"}]},
    {ATTACKS[1]: {ATTACKS[1]: ATTACKS[1]}},
    "\ud800 " + ATTACKS[1],
    float("nan"),
]


def entered(folder: Path, play: runner.Play) -> dict[str, Any]:
    """The extra variables of a play as ansible-playbook reads them."""
    path = folder / "extravars"
    path.write_text(json.dumps(runner._extra_variables(play)))
    loaded: dict[str, Any] = DataLoader().load_from_file(str(path), trusted_as_template=True)
    return loaded


def templates(value: Any) -> Iterator[str]:
    """The strings in ``value`` that Ansible would render."""
    if isinstance(value, str):
        if TrustedAsTemplate.is_tagged_on(value) and re.search(r"[{\[][{%#]|#jinja2|lookup", value):
            yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from (*templates(key), *templates(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from templates(inner)


@pytest.mark.parametrize("document", [hostile(["x"] * 9), *MARKERS], ids=lambda document: ascii(document)[:40])
def test_no_document_from_outside_enters_a_play_as_a_template(tmp_path: Path, document: Any) -> None:
    """Whatever a machine or the cluster reports, Ansible finds no template in it, and a filter gives it back whole."""
    play = runner.Play(
        "x.yml", Inventory(tmp_path), ["worker-1"], facts={"worker-1": [document]}, cluster={"nodes": document}
    )
    variables = entered(tmp_path, play)
    assert list(templates(variables)) == []
    assert repr(data(variables["gpunodes_facts"]["worker-1"])) == repr([document])
    assert repr(data(variables["gpunodes_cluster"])) == repr({"nodes": document})


def test_settings_of_a_run_are_no_templates_either(tmp_path: Path) -> None:
    """A value given on the command line is that value, whatever it looks like; half a character changes nothing."""
    settings = {"gpunodes_cuda_versions": list(ATTACKS), "gpunodes_pool": {"a": ATTACKS[1]}, "x": 5, "y": "\udcff"}
    variables = entered(tmp_path, runner.Play("x.yml", Inventory(tmp_path), [], variables=settings))
    assert list(templates(variables)) == []
    assert variables == {**settings, "y": "?"}


@pytest.mark.parametrize("key", ["__ansible_unsafe", "__ansible_vault", "__ansible_type"])
def test_a_key_that_ansible_reads_is_refused(tmp_path: Path, key: str) -> None:
    """An add-on's file may have it. Ansible would parse all variables as YAML, and their strings as templates."""
    objects = [{"data": {"x": {key: 5}, "y": ATTACKS[1]}}]
    with pytest.raises(WrongInput, match="is a key"):
        entered(tmp_path, runner.Play("x.yml", Inventory(tmp_path), [], variables={"addon_objects": objects}))


def test_half_a_character_in_a_key_changes_nothing_either(tmp_path: Path) -> None:
    objects = [{"data": {"\ud800": "1", "y": ATTACKS[1]}}]
    variables = entered(tmp_path, runner.Play("x.yml", Inventory(tmp_path), [], variables={"addon_objects": objects}))
    assert list(templates(variables)) == []
    assert variables == {"addon_objects": [{"data": {"?": "1", "y": ATTACKS[1]}}]}


def test_what_nobody_knows_stays_unset(tmp_path: Path) -> None:
    assert entered(tmp_path, runner.Play("x.yml", Inventory(tmp_path), [], variables={"x": None})) == {"x": None}
    assert data(None) is None


def test_a_desired_state_contains_no_template() -> None:
    """What a machine and its node report stays data in it, and so does a setting that was a template."""
    tagged = TrustedAsTemplate().tag(ATTACKS[1])
    facts = machine_report("worker-1", 1, kernel=ATTACKS[0])
    node = {"version": f"v1.36.3{ATTACKS[1]}"}
    settings = {
        "gpunodes_ready_image": tagged,
        "gpunodes_pools": {tagged: {}},
        "gpunodes_node_labels": {tagged: tagged},
    }
    made = filtered(given(facts, groups=(tagged,), node=node, **settings))
    assert made["labels"]["gpunodes.dev/pool"] == made["images"][2] == ATTACKS[1]
    assert f"/lib/modules/{ATTACKS[0]}/updates" in made["gpu"]["wanted"]["gpu_driver"]["directories"]
    assert list(templates(made)) == []


def test_one_file_alone_hands_variables_to_ansible() -> None:
    """The door is one function; what it sealed is opened by one filter, wherever a playbook reads it."""
    ways = re.compile(r"extravars|extra_vars|--extra|['\"]-e['\"]")
    users = [path.name for path in (ROOT / "bootstrap/gpunodes").rglob("*.py") if ways.search(path.read_text())]
    assert sorted(users) == ["loader.py", "passwords.py", "runner.py"]  # two read what the user gave
    sealed = re.compile(r"\{\{[^}]*(?:gpunodes_facts\[\w+\]|gpunodes_cluster\b)(?! \| gpunodes.bootstrap.data)")
    assert [path for path in CONTENT if sealed.search(path.read_text())] == []


def tasks(listed: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for task in listed:
        yield task
        yield from tasks([*task.get("block", []), *task.get("always", []), *task.get("rescue", [])])


def test_content_makes_variables_and_commands_in_known_ways_only() -> None:
    """No task loops over, includes, runs or looks up what a machine reported."""
    own = {f"gpunodes.bootstrap.{path.stem}" for path in (ROOT / "bootstrap/gpunodes/ansible/modules").glob("*.py")}
    words = {"name", "when", "register", "vars", "block", "always", "run_once", "become", "throttle", "diff", "no_log"}
    words |= {"delegate_to", "changed_when", "failed_when", "ignore_unreachable", "check_mode", "timeout"}
    listed = [
        (path.parts[-3], task)
        for path in (ROOT / "roles").glob("*/tasks/*.yml")
        for task in tasks(yaml.safe_load(path.read_text()))
    ]
    used = {(role, word) for role, task in listed for word in task if word not in own | words}
    assert all(isinstance(task.get("timeout", 0), int) for _, task in listed)
    calm = {"assert", "set_fact", "debug", "fail"}
    assert {(role, word) for role, word in used if word.removeprefix("ansible.builtin.") not in calm} == {
        # Over names of the inventory: control planes are tried in turn.
        *(("cluster", word) for word in ("loop", "loop_control", "ansible.builtin.include_tasks")),
        ("cluster", "ansible.builtin.import_tasks"),
        ("upgrade_undo", "ansible.builtin.import_tasks"),
        # One control plane that is not reset stops the reset of all.
        ("member", "any_errors_fatal"),
        ("gpu_driver", "ansible.builtin.reboot"),
        # What a change of a node needs first; the text of the reboot is not of the machine.
        *(("gpu_mig", f"ansible.builtin.{word}") for word in ("import_tasks", "reboot")),
        # Their stages are files of theirs, imported when the playbook is read, and selected by tags.
        *((role, word) for role in ("gpu_upgrade", "os_upgrade") for word in ("ansible.builtin.import_tasks", "tags")),
        *(("runtime_upgrade", word) for word in ("ansible.builtin.import_tasks", "tags")),
        *((role, "ansible.builtin.reboot") for role in ("gpu_upgrade", "os_upgrade")),
        # Over names of the inventory; what the nodes report among the rules is parsed as addresses below.
        *((role, word) for role in ("firewall", "endpoint") for word in ("loop", "loop_control")),
        # A command without a word from a machine; the servers are those of the settings.
        *(("nfs_server", f"ansible.builtin.{word}") for word in ("command", "include_tasks")),
        *(("storage_verified", word) for word in ("loop", "ansible.builtin.wait_for")),
        # What an interrupted upload left is deleted, whatever failed.
        ("certificates", "rescue"),
        # Parts of these roles, imported when the playbook is read.
        ("control_plane", "ansible.builtin.import_tasks"),
        # An archive of the controller, whose path the settings name.
        ("autoscaler", "ansible.builtin.copy"),
        ("control_plane_join", "ansible.builtin.import_role"),
        # The kubelet that an interrupted join left, by a constant name.
        ("worker", "ansible.builtin.systemd_service"),
        # Our own command, with machines and an inventory of the user's.
        ("health", "ansible.builtin.command"),
        ("health", "ansible.builtin.include_tasks"),
        *(("kubeconfig", f"ansible.builtin.{module}") for module in ("stat", "slurp", "file", "copy")),
    }
    looked_up = {
        (path.relative_to(ROOT / "roles").parts[0], name)
        for path in CONTENT
        for name in re.findall(r"\b(?:lookup|query|q)\((.*?),", path.read_text())
    }
    assert looked_up == {
        ("controller", "'ansible.builtin.config'"),
        # A result of another role by its name, so that Ansible records no key that is in it.
        ("control_plane_join", "'ansible.builtin.vars'"),
        ("settings", "'ansible.builtin.env'"),
        *((role, "'ansible.builtin.template'") for role in ("addon", "autoscaler", "device_plugin")),
        ("network", "'ansible.builtin.template'"),
        # Data of the collection.
        ("addon", "'ansible.builtin.file'"),
    }


def test_a_reboot_announces_itself_in_constant_words() -> None:
    """Its message becomes part of a shell's command on the machine."""
    messages = [
        task["ansible.builtin.reboot"]["msg"]
        for path in (ROOT / "roles").glob("*/tasks/*.yml")
        for task in tasks(yaml.safe_load(path.read_text()))
        if "ansible.builtin.reboot" in task
    ]
    assert set(messages) == {
        "gpunodes: the driver needs a reboot",
        "gpunodes: the MIG mode needs a reboot",
        "gpunodes: upgrades need a reboot",
    }


def test_tasks_are_delegated_to_names_of_the_inventory_only() -> None:
    """Who does a task is never what a machine reported: a control plane of the inventory, or this machine."""
    found = {
        target
        for path in (ROOT / "roles").glob("*/tasks/*.yml")
        for target in re.findall(r"delegate_to: (.*)", path.read_text())
    }
    defaults = {
        name: value
        for path in (ROOT / "roles").glob("*/defaults/main.yml")
        for name, value in (yaml.safe_load(path.read_text()) or {}).items()
    }
    wired = yaml.safe_load((ROOT / "playbooks/group_vars/all.yml").read_text())
    # Without a control plane the machine itself has a name that Ansible accepts; the tasks are skipped then.
    control = {
        "{{ groups['control_plane'] | first }}",
        "{{ groups['control_plane'] | default([inventory_hostname], true) | first }}",
    }
    # test_other_machines_are_names_of_the_inventory
    # The name that the command line gives, or one of the group: never an answer.
    assert wired["cluster_candidates"] == (
        "{{ [] if gpunodes_control_plane | default('') else groups['control_plane'] | default([]) }}"
    )
    choose, attempt = ((ROOT / f"roles/cluster/tasks/{name}.yml").read_text() for name in ("choose", "try"))
    assert (yaml.safe_load(choose)[0]["loop"], defaults["cluster_candidates"]) == ("{{ cluster_candidates }}", [])
    assert yaml.safe_load(attempt)[1]["ansible.builtin.set_fact"] == {"cluster_chosen": "{{ __cluster_candidate }}"}
    assert wired["wiring_control_plane"].split() == [
        *["{{", "gpunodes_control_plane", "|", "default('')", "or", "cluster_chosen", "|", "default('')"],
        *["or", "groups['control_plane']", "|", "default([inventory_hostname],", "true)", "|", "first", "}}"],
    ]
    for target in found - {"localhost", '"{{ item.name }}"', '"{{ __cluster_candidate }}"'}:
        name = target.strip('"{} ')
        assert defaults[name] in control
        assert wired[name] in {"{{ wiring_control_plane }}", "{{ wiring_other_control_plane }}"}


def test_other_machines_are_names_of_the_inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The role firewall works on machines that the inventory names, with rules of nothing but addresses."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    machines = {"control-1": "10.0.0.1", "gpu-1": "10.0.0.2"}
    for attack in ATTACKS:
        nodes = cluster_report({"control-1": 1, "gpu-1": 2, attack: 3})["nodes"]
        for node in nodes:
            node["managed"]["labels"]["gpunodes.dev/firewall"] = attack
        found = firewalled(nodes, machines, "10.0.0.1", [], addresses=[attack, "10.0.0.1"], pods=attack)
        assert {each["name"] for each in found} <= set(machines)
        assert found
        assert all(each["wanted"]["firewall"]["sources"] == ["10.0.0.1"] for each in found)
        assert attack not in json.dumps(found)
        assert all(each["wanted"]["firewall"]["pods"] == [] for each in found)


def test_plays_have_roles_of_ours_and_groups_of_the_inventory_only() -> None:
    """No task, file of variables, environment or machine comes into a play by a way of its own."""
    plays = [play for path in (ROOT / "playbooks").glob("*.yml") for play in yaml.safe_load(path.read_text())]
    words = {"name", "ansible.builtin.import_playbook", "hosts", "become", "vars", "roles", "tasks", "strategy"}
    words |= {"gather_facts", "module_defaults", "serial", "any_errors_fatal", "timeout"}
    assert {word for play in plays for word in play} == words
    groups = {
        "control_plane",
        "control_plane:workers",
        "control_plane:workers:gpu_hosts",
        "control_plane[0]",
        "workers:control_plane",
        "{{ gpunodes_control_plane | default('control_plane[0]', true) }}",
        "{{ gpunodes_control_plane | default('control_plane', true) }}",
        "workers",
        "storage",
    }
    assert {play["hosts"] for play in plays if "hosts" in play} == groups
    # A secret of the settings, which must not be in the desired state.
    options = {repr(each) for play in plays for each in play.get("module_defaults", {}).values()}
    assert options == {repr({"proxy_credentials": "{{ settings_proxy_credentials }}"})}
    # Facts that Ansible gathers are read by nothing; another controller's settings may ask for them.
    assert all(play["gather_facts"] is False for play in plays if "hosts" in play)
    imported = {play[word] for play in plays for word in play if "import" in word}
    assert imported == {"controller.yml"}
    tasks = [task for play in plays for task in play.get("tasks", ())]
    tasks += [task for path in (ROOT / "playbooks/tasks").iterdir() for task in yaml.safe_load(path.read_text())]
    imports = {"ansible.builtin.import_tasks", "ansible.builtin.import_role"}
    words = {"name", "tags", "when", "ignore_unreachable", "vars"}
    assert all(len(imports & set(task)) == 1 and set(task) - imports <= words for task in tasks)
    listed = [role for play in plays for role in roles_of(play)]
    assert {word for role in listed for word in role} <= {"role", "tags", "when", "vars"}
    assert {role["role"] for role in listed} <= {path.name for path in (ROOT / "roles").iterdir()}


def test_texts_become_documents_in_known_places_only() -> None:
    """What is read as YAML is a template of ours, with values of known form; as JSON, what our own command prints."""
    found = [
        (path.relative_to(ROOT / "roles").parts[0], line.strip())
        for path in CONTENT
        for line in path.read_text().splitlines()
        if re.search(r"\bfrom_(?:yaml|json)", line)
    ]
    assert {role for role, _ in found} == {"addon", "network", "device_plugin", "autoscaler", "health"}
    for role, line in found:
        opened = (
            "(__health_repair.stdout | from_json)" if role == "health" else "{{ lookup('ansible.builtin.template', "
        )
        assert opened in line


def test_inventories_hold_nothing_that_a_machine_reported(tmp_path: Path) -> None:
    """Four files alone write them: edit.py and addressed.py, of words of the user's, and the runner's, of ssh_config.

    snapshot.py copies a dynamic inventory, and marks what its source says (test_inventory_sources.py).

    `adopt` is the exception: what a cluster reports goes through planner/adoption.py, where each value has a pattern
    (test_adoption.py), and neither of the first two writes a template for it.
    """
    ways = re.compile(r"write_text|write_bytes|fdopen\([^)]*\"w")
    about = re.compile(r"group_vars|host_vars|\"hosts\"")
    package = ROOT / "bootstrap/gpunodes"
    texts = {
        path.relative_to(package).as_posix(): path.read_text()
        for path in package.rglob("*.py")
        if path.relative_to(package).parts[0] not in {"lab", "ansible"}
    }
    writers = {name for name, text in texts.items() if ways.search(text) and about.search(text)}
    assert writers == {"inventory/addressed.py", "inventory/edit.py", "inventory/snapshot.py", "engine/runner.py"}
    for write in (addressed.file_of, lambda document: edit.create(tmp_path / "new.yml", document)):
        for template in ("{{ x }}", "{% x %}", "{# x #}"):
            with pytest.raises(WrongInput, match="would have the template"):
                write({"workers": {"hosts": {"w1": {"ansible_host": template}}}})
    users = [name for name, text in texts.items() if re.search(r"addressed\.file_of|edit\.create", text)]
    assert users == ["operations/adopt.py"]
    inventory = tmp_path / "hosts.yml"
    inventory.write_text("control_plane: {hosts: {c1: {ansible_host: 127.0.0.1, ansible_port: 1}}}\n")
    given = []
    for number, words in enumerate((None, {"c1": list(ATTACKS)})):
        (tmp_path / str(number)).mkdir()
        play = runner.Play("x.yml", Inventory(inventory), ["c1"], facts=words, cluster=words)
        found = [Path(path) for path in runner.inventories(play.inventory, tmp_path / str(number))]
        given.append([(path.name, path.read_text()) for path in found])
    assert given[0] == given[1]


def test_answers_of_modules_never_become_variables() -> None:
    """Any module's answer may hold "ansible_facts": with injection they would win over the inventory and the wiring."""
    assert runner.environment(Path("/nowhere"))["ANSIBLE_INJECT_FACT_VARS"] == "False"
    assert "inject_facts_as_vars = False" in (ROOT / "ansible.cfg").read_text()


# The terminal


def test_output_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """No escape sequence, carriage return, C1 code or change of direction comes through; lines stay lines."""
    terminal.echo("one\ntwo\x1b[2J\r\x9b1m\u202e\x7f three", err=True)
    terminal.echo(json.dumps({"x": ATTACKS}))
    out, err = capsys.readouterr()
    assert err == "one\ntwo [2J  1m   three\n"
    assert json.loads(out) == {"x": list(ATTACKS)}


def test_commands_print_through_one_function() -> None:
    """In the commands only cli/terminal.py prints; a view writes what is printable through views/screen.py."""
    cli = ROOT / "bootstrap/gpunodes/cli"
    ways = re.compile(r"click\.(?:echo|secho|confirm|prompt)\(|\bprint\(|sys\.std\w+\.write\(")
    assert [path.name for path in cli.rglob("*.py") if ways.search(path.read_text())] == ["terminal.py"]
    ways = re.compile(r"\bprint\(|\.write\(|\bput\(")
    views = (ROOT / "bootstrap/gpunodes/views").glob("*.py")
    assert [path.name for path in views if ways.search(path.read_text())] == ["screen.py"]
    hostile = "".join(ATTACKS)
    stream = io.StringIO()
    live = text.Live(stream)
    live.begin(hostile, [Machine(hostile, "", Role.WORKER)])
    live.phase(hostile, phases.NODE)
    live.task(hostile, hostile)
    live.findings([PreflightFinding(hostile, hostile, Problem(hostile, hostile, hostile))])
    live.ended(MachineResult(hostile, Outcome.FAILED, cause=hostile))
    live.close()
    cells = health_map.Map(stream, colour=False)
    cells.begin([hostile, hostile])
    cells.close()
    moves = re.sub(r"\x1b\[\d+A\r\x1b\[J", "", stream.getvalue())
    assert all(printable(line) == line for line in moves.split("\n"))


def test_what_ansible_prints_keeps_only_its_lines() -> None:
    """Colours of a message come later; those within it may be a machine's, and conceal what follows."""
    assert sanitize("\nTASK [x] ***\n\x1b[0;31mfatal: [worker-1]\x1b[0m") == "\nTASK [x] ***\n  fatal: [worker-1]"
    assert sanitize("a\x1b[K\x1b]0;b\x07\x1b[8m\x1b[8Dc\r") == "a [K ]0;b  [8Dc "


def test_a_machine_writes_no_line_that_looks_like_ansible_s() -> None:
    text = "[WARNING]: x\nok: [worker-2]\n\n ok: [worker-2]\n\n\nPLAY RECAP ***\n"
    shown = sanitize(text)
    assert shown == "[WARNING]: x\n  ok: [worker-2]\n\n   ok: [worker-2]\n\n\n  PLAY RECAP ***\n"
    assert sanitize(shown) == shown
    assert CallbackBase()._get_diff({"prepared": "ok: [worker-2]\n"}) == "  ok: [worker-2]\n"
    assert CallbackBase()._get_diff([]) == ""


def forged(event: dict[str, Any]) -> str:
    """How ansible-runner's own callback marks an event in Ansible's output."""
    text = base64.b64encode(json.dumps(event).encode()).decode()
    return f"\x1b[K{text}\x1b[{len(text)}D\x1b[K"


@pytest.mark.long
def test_a_machine_cannot_forge_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose warnings, errors or keys hold ansible-runner's marks reports nothing in another's name."""
    fleet = machines(tmp_path, {"control_plane": ["worker-1"]}, {})
    for name, value in fleet.environment.items():
        monkeypatch.setenv(name, value)
    claim = {"cluster": {"forged": True}}
    event = {"uuid": "x", "event": "runner_on_ok", "event_data": {"host": "control-1", "role": "status", "res": claim}}
    for mark in (forged(event), forged({**event, "uuid": "\0"})):
        fleet.answer(
            "worker-1", "cluster_info", {"warnings": [mark], f"_ansible_{mark}": mark, "msg": mark, "failed": True}
        )
        seen: list[Event] = []
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        ended = runner.run(runner.Play("status.yml", Inventory(fleet.inventory), ["worker-1"]), folder, seen.append)
        assert {each.machine for each in seen} == {"worker-1"}
        assert "\x1b" not in ended.log.read_text()
        assert not ended.ok
