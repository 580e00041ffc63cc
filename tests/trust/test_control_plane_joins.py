"""Several control planes: joins and removals with stand-in machines, and where their secrets go.

Ansible is real; the machines are stand-ins (tests/hostile.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from gpunodes.engine import runner
from gpunodes.inventory import Inventory
from gpunodes.model import Event, Outcome, TaskEnded

from tests.hostile import PIN, Machines, cluster_report, machine_report, machines

NUMBERS = {"cp-1": 1, "cp-2": 2, "cp-3": 3, "worker-1": 4}
MORE = {"cp-4": 5, "cp-5": 6, "cp-6": 7}
GROUPS = {"control_plane": ["cp-1", "cp-2", "cp-3"], "workers": ["worker-1"]}
KEY = "5ec7e7" * 11
TOKEN = "abcdef.5ec7e75ec7e75ec7"
ENCRYPTION = '{"kind": "EncryptionConfiguration", "secret": "5ec7e7-of-etcd"}'
SECRETS = (KEY, TOKEN, "5ec7e7-of-etcd")


def facts(name: str, role: str | None = None, **kubernetes: Any) -> dict[str, Any]:
    found = machine_report(name, {**NUMBERS, **MORE}[name], ledger=False)
    found["gpu"] = {**found["gpu"], "functions": []}
    own = {"role": role, "ca_hash": PIN if role else None, "server": None, "etcd": role == "control_plane"}
    found["kubernetes"] = {**own, **kubernetes}
    return found


def cluster(*names: str) -> dict[str, Any]:
    made = cluster_report({name: {**NUMBERS, **MORE}[name] for name in names})
    for node in made["nodes"]:
        node["role"] = "worker" if node["name"].startswith("worker") else "control_plane"
    return {**made, "endpoint": "10.0.0.100:6443"}


def play(
    fleet: Machines,
    folder: Path,
    name: str,
    known: Mapping[str, Mapping[str, Any]],
    nodes: Mapping[str, Any] | None,
    *,
    check: bool = False,
) -> tuple[runner.PlayResult, list[TaskEnded]]:
    """Run a playbook as the command line does, on these machines with their facts."""
    seen: list[Event] = []
    folder.mkdir(parents=True)
    variables = {"worker_run": "me"}
    made = runner.Play(
        name,
        Inventory(fleet.inventory),
        list(known),
        ["preflight"],
        variables,
        facts=known,
        cluster=nodes or {},
        check=check,
    )
    ended = runner.run(made, folder, seen.append)
    return ended, [each for each in seen if isinstance(each, TaskEnded)]


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    return stand_ins(tmp_path, monkeypatch, GROUPS)


def stand_ins(folder: Path, monkeypatch: pytest.MonkeyPatch, groups: Mapping[str, list[str]]) -> Machines:
    made = machines(folder / "fleet", groups, {"gpunodes_control_plane_endpoint": "10.0.0.100:6443"})
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    done: dict[str, dict[str, Any]] = {
        "join_token": {"token": TOKEN},
        "join_certificates": {"key": KEY, "files": {"/etc/kubernetes/gpunodes/encryption.json": ENCRYPTION}},
        "kubeadm_join_control_plane": {"actions": ["kubeadm join"], "changed": True, "echo": list(SECRETS)},
        "kubeadm_join": {"actions": ["kubeadm join"]},
        **{name: {"actions": []} for name in ("etcd_member", "node_removed", "kubeadm_reset", "host_undo", "host")},
        "host_diff": {"pending": [], "versions": {}},
    }
    for name in [name for names in groups.values() for name in names]:
        for module, answer in done.items():
            made.answer(name, module, answer)
    return made


def asked(fleet: Machines, *modules: str) -> list[str]:
    return [line for line in fleet.asked if line.partition("/")[2] in modules]


GROWTH = (
    "etcd_member",
    "join_certificates",
    "join_token",
    "node_removed",
    "kubeadm_join_control_plane",
    "kubeadm_join",
)


def test_stand_in_control_planes_join_one_after_the_other_and_workers_last(fleet: Machines, tmp_path: Path) -> None:
    known = {name: facts(name) for name in ("cp-2", "cp-3", "worker-1")}
    ended, _ = play(fleet, tmp_path / "run", "join.yml", known, cluster("cp-1"))
    assert ended.ok, ended.log.read_text()
    one = [
        *("cp-1/etcd_member", "cp-1/join_certificates", "cp-1/join_token", "{}/kubeadm_join_control_plane"),
        *("cp-1/join_token", "cp-1/join_certificates", "{}/etcd_member"),
    ]
    both = [line.format(name) for name in ("cp-2", "cp-3") for line in one]
    assert asked(fleet, *GROWTH) == [*both, "cp-1/join_token", "worker-1/kubeadm_join", "cp-1/join_token"]


DELETIONS = ("Delete the token", "Delete the uploaded certificates")
"""Tasks whose real modules return no secrets; a stand-in cannot distinguish them from those that create some."""


def without_deletions(text: str) -> str:
    """Ansible's output without these tasks."""
    parts = re.split(r"(?m)^(?=(?:TASK|PLAY) \[)", text)
    return "".join(part for part in parts if not any(f": {title}]" in part.partition("\n")[0] for title in DELETIONS))


@pytest.mark.parametrize("fails", [False, True])
def test_secrets_of_stand_in_control_planes_stay_in_memory(
    fleet: Machines, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Neither files of ansible-runner nor events nor output hold the certificates' key, the token, or etcd's key."""
    # Ansible's output is as long as it can be: with each module's parameters.
    monkeypatch.setenv("ANSIBLE_VERBOSITY", "4")
    if fails:
        fleet.answer("cp-2", "kubeadm_join_control_plane", {"failed": True, "msg": "no etcd", "output": list(SECRETS)})
    folder = tmp_path / "run"
    _, events = play(fleet, folder, "join.yml", {"cp-2": facts("cp-2")}, cluster("cp-1"))
    assert "cp-2/kubeadm_join_control_plane" in fleet.asked
    written = [path for path in [*folder.rglob("*"), *(tmp_path / "fleet/state").rglob("*")] if path.is_file()]
    texts = [without_deletions(path.read_text(errors="replace")) for path in written]
    assert any("control_plane_join : Join the cluster]" in text for text in texts)
    texts += [*capfd.readouterr(), *(json.dumps(each.result) for each in events if each.task not in DELETIONS)]
    for secret in SECRETS:
        assert not [text for text in texts if secret in text], secret


def test_a_stand_in_control_plane_that_does_not_join_leaves_no_certificates(fleet: Machines, tmp_path: Path) -> None:
    fleet.answer("cp-2", "kubeadm_join_control_plane", {"failed": True, "msg": "kubeadm join: no etcd"})
    known = {name: facts(name) for name in ("cp-2", "cp-3", "worker-1")}
    ended, events = play(fleet, tmp_path / "run", "join.yml", known, cluster("cp-1"))
    assert not ended.ok
    assert [event.result["msg"] for event in events if event.outcome is Outcome.FAILED] == ["kubeadm join: no etcd"]
    assert asked(fleet, "join_certificates") == ["cp-1/join_certificates"] * 2
    # The run ends here.
    assert not asked(fleet, "kubeadm_join")
    assert "cp-3/kubeadm_join_control_plane" not in fleet.asked


def test_certificates_are_deleted_although_the_token_is_not(fleet: Machines, tmp_path: Path) -> None:
    """The first deletion that failed ended the run, and the Secret stayed for two hours."""
    fleet.answer("cp-1", "join_token", {"failed": True, "msg": "the API does not respond"})
    ended, _ = play(fleet, tmp_path / "run", "join.yml", {"cp-2": facts("cp-2")}, cluster("cp-1"))
    assert not ended.ok
    assert asked(fleet, "join_certificates") == ["cp-1/join_certificates"] * 2


def test_certificates_that_a_stand_in_cannot_upload_are_deleted(fleet: Machines, tmp_path: Path) -> None:
    fleet.answer("cp-1", "join_certificates", {"failed": True, "msg": "another command joins a control plane"})
    ended, events = play(fleet, tmp_path / "run", "join.yml", {"cp-2": facts("cp-2")}, cluster("cp-1"))
    assert not ended.ok
    assert "another command joins a control plane" in [event.result.get("msg") for event in events]
    assert asked(fleet, "join_certificates") == ["cp-1/join_certificates"] * 2
    assert not asked(fleet, "kubeadm_join_control_plane")


LEFT: list[tuple[dict[str, Any], str, list[str]]] = [
    # In the learner window: etcd has data, the node has no role yet.
    ({"role": "control_plane", "unfinished": True}, "worker", ["cp-1/etcd_member", "cp-1/node_removed", "join"]),
    # Killed behind kubeadm: it keeps its member.
    ({"role": "control_plane", "unfinished": True}, "control_plane", ["join"]),
    # Reinstalled.
    ({"role": None, "etcd": False}, "control_plane", ["cp-1/etcd_member", "cp-1/node_removed", "join"]),
    # Complete.
    ({"role": "control_plane"}, "control_plane", []),
    # Complete once: the module refuses, and nothing is removed.
    ({"role": "control_plane"}, "worker", ["join"]),
]
"""What a machine and its node report after an interrupted join, and the steps that follow."""


def test_what_interrupted_joins_of_stand_ins_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They join one after the other, and each is verified in any case."""
    names = [f"cp-{number}" for number in range(1, len(LEFT) + 2)]
    fleet = stand_ins(tmp_path, monkeypatch, {"control_plane": names})
    known = cluster(*names)
    own: dict[str, dict[str, Any]] = {}
    steps: list[str] = []
    for node, (kubernetes, role, left) in zip(known["nodes"][1:], LEFT, strict=True):
        name = node["name"]
        node["role"] = role
        own[name] = facts(name, **kubernetes)
        own[name]["kubernetes"]["ca_hash"] = PIN if kubernetes["role"] else None
        steps += [f"{name}/kubeadm_join_control_plane" if step == "join" else step for step in left]
        steps += [f"{name}/etcd_member"]
    play(fleet, tmp_path / "run", "join.yml", own, known)
    assert asked(fleet, "etcd_member", "node_removed", "kubeadm_join_control_plane") == steps


def test_up_with_stand_ins_creates_the_first_control_plane_and_joins_the_others(
    fleet: Machines, tmp_path: Path
) -> None:
    fleet.answer("cp-1", "kubeadm_init", {"actions": ["kubeadm init"], "changed": True})
    fleet.answer("cp-1", "cluster_info", {"cluster": cluster("cp-1")})
    ended, _ = play(fleet, tmp_path / "run", "up.yml", {name: facts(name) for name in NUMBERS}, {})
    assert ended.ok, ended.log.read_text()
    order = asked(fleet, "kubeadm_init", "kubeadm_join_control_plane", "kubeadm_join")
    joins = ["cp-2/kubeadm_join_control_plane", "cp-3/kubeadm_join_control_plane", "worker-1/kubeadm_join"]
    assert order == ["cp-1/kubeadm_init", *joins]


def test_a_dry_run_with_stand_ins_needs_no_cluster(fleet: Machines, tmp_path: Path) -> None:
    """Nothing was created, so there is no cluster to ask: what would join it is shown all the same."""
    fleet.answer("cp-1", "kubeadm_init", {"actions": ["kubeadm init"], "changed": True})
    fleet.answer("cp-1", "cluster_info", {"failed": True, "msg": "/etc/kubernetes/admin.conf does not exist"})
    fleet.answer("cp-1", "join_token", {"token": ""})
    fleet.answer("cp-1", "join_certificates", {"key": "", "files": {}, "required": []})
    known = {name: facts(name) for name in NUMBERS}
    ended, _ = play(fleet, tmp_path / "run", "up.yml", known, {}, check=True)
    assert ended.ok, ended.log.read_text()
    order = asked(fleet, "kubeadm_init", "kubeadm_join_control_plane", "kubeadm_join")
    joins = ["cp-2/kubeadm_join_control_plane", "cp-3/kubeadm_join_control_plane", "worker-1/kubeadm_join"]
    assert order == ["cp-1/kubeadm_init", *joins]


def test_a_stand_in_control_plane_leaves(fleet: Machines, tmp_path: Path) -> None:
    known = {"cp-1": facts("cp-1", "control_plane")}
    ended, _ = play(fleet, tmp_path / "run", "remove.yml", known, cluster("cp-1", "cp-2", "cp-3"))
    assert ended.ok, ended.log.read_text()
    # Another one does it, and checks etcd before the node is drained.
    assert asked(fleet, "etcd_member", "node_removed", "kubeadm_reset") == [
        *("cp-2/etcd_member", "cp-2/node_removed", "cp-2/etcd_member", "cp-2/node_removed", "cp-1/kubeadm_reset"),
    ]


def test_etcd_that_would_stop_keeps_the_stand_in(fleet: Machines, tmp_path: Path) -> None:
    fleet.answer("cp-2", "etcd_member", {"failed": True, "msg": "without cp-1, 1 of 2 members of etcd would work"})
    known = {"cp-1": facts("cp-1", "control_plane")}
    ended, events = play(fleet, tmp_path / "run", "remove.yml", known, cluster("cp-1", "cp-2", "cp-3"))
    assert not ended.ok
    failed = next(event for event in events if event.outcome is Outcome.FAILED)
    assert "1 of 2 members" in failed.result["msg"]
    assert not asked(fleet, "node_removed", "kubeadm_reset", "host_undo")


@pytest.mark.parametrize(
    ("selected", "required"),
    [(["cp-2"], True), (["cp-1", "cp-2", "cp-3", "worker-1"], False), (["worker-1"], None)],
    ids=["one of several", "the whole cluster", "a worker"],
)
def test_a_reset_of_stand_ins_asks_etcd_whether_members_stay(
    fleet: Machines, tmp_path: Path, selected: list[str], required: bool | None
) -> None:
    """The inventory may know fewer control planes than the cluster has."""
    known = {name: facts(name, "worker" if name == "worker-1" else "control_plane") for name in selected}
    ended, _ = play(fleet, tmp_path / "run", "reset.yml", known, cluster(*NUMBERS))
    assert ended.ok, ended.log.read_text()
    asking = [] if required is None else [name for name in selected if name.startswith("cp-")]
    assert sorted(asked(fleet, "etcd_member")) == [f"{name}/etcd_member" for name in asking]
    for name in asking:
        given = fleet.given(name, "etcd_member")
        assert given["required"] == required
        assert {f"10.0.0.{NUMBERS[each]}" for each in asking} | set(asking) <= set(given["leaving"])
        assert not {"cp-1", "10.0.0.1"} & set(given["leaving"]) or "cp-1" in selected
    assert len(asked(fleet, "kubeadm_reset")) == len(selected)


def test_what_a_worker_says_of_itself_lets_no_stand_in_go(fleet: Machines, tmp_path: Path) -> None:
    known = {"cp-1": facts("cp-1", "control_plane"), "worker-1": facts("worker-1", "worker")}
    known["worker-1"]["hostname"] = "cp-2"
    known["worker-1"]["kubernetes"]["advertised"] = "10.0.0.2"
    play(fleet, tmp_path / "run", "reset.yml", known, cluster("cp-1", "cp-3"))
    assert set(fleet.given("cp-1", "etcd_member")["leaving"]) == {"cp-1", "10.0.0.1"}


def test_one_stand_in_that_is_refused_stops_the_reset_of_all(fleet: Machines, tmp_path: Path) -> None:
    fleet.answer("cp-2", "etcd_member", {"failed": True, "msg": "its cluster has others"})
    known = {name: facts(name, "control_plane") for name in ("cp-1", "cp-2", "cp-3")}
    ended, _ = play(fleet, tmp_path / "run", "reset.yml", known, cluster(*NUMBERS))
    assert not ended.ok
    assert not asked(fleet, "kubeadm_reset", "host_undo")


@pytest.mark.parametrize("restored", [False, True])
def test_stand_ins_start_with_their_old_data_unless_one_was_restored(
    fleet: Machines, tmp_path: Path, restored: bool
) -> None:
    """The others would be a quorum of the old cluster beside the restored one."""
    for name in GROUPS["control_plane"]:
        fleet.answer(name, "etcd_restore_aborted", {"actions": [], "notes": []})
    known = {name: facts(name, "control_plane", restore="unfinished") for name in GROUPS["control_plane"]}
    known["cp-1"] = facts("cp-1", "control_plane", restore="done" if restored else "")
    ended, _ = play(fleet, tmp_path / "run", "etcd_restore_abort.yml", known, {})
    assert ended.ok is not restored
    # Each is waited for only when all were started.
    each = [f"{name}/etcd_restore_aborted" for name in GROUPS["control_plane"]]
    found = asked(fleet, "etcd_restore_aborted")
    assert (sorted(found[:3]), sorted(found[3:])) == (([], []) if restored else (each, each))


def test_a_stand_in_that_is_a_member_is_not_reset(fleet: Machines, tmp_path: Path) -> None:
    fleet.answer("cp-2", "etcd_member", {"failed": True, "msg": "its cluster has others"})
    known = {"cp-2": facts("cp-2", "control_plane")}
    ended, _ = play(fleet, tmp_path / "run", "reset.yml", known, cluster(*NUMBERS))
    assert not ended.ok
    assert not asked(fleet, "kubeadm_reset", "host_undo")
