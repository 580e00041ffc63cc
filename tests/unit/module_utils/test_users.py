"""Members of a group: added, removed again, and undone; only those that gpunodes added."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from gpunodes.ansible.module_utils import ledger, undo
from gpunodes.ansible.module_utils.host import users
from gpunodes.ansible.module_utils.host.changes import Changes
from gpunodes.ansible.module_utils.host.converge import converge
from gpunodes.ansible.module_utils.host.spec import Spec, spec_from
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.process import CommandResult

USERS = ("alice", "bob", "carol")


class Group:
    """The group docker, which gpasswd changes; ``present`` are its members."""

    def __init__(self, present: Sequence[str]) -> None:
        self.present = list(present)
        self.recorded: list[list[str]] = []
        """The ledger on disk at each change."""

    def gpasswd(self, argv: list[str], *_: object) -> CommandResult:
        program, verb, user, group = argv
        assert (program, group) == ("gpasswd", "docker")
        self.recorded.append(ledger.load().members.get("docker", []))
        if verb == "--add":
            self.present.append(user)
        else:
            self.present.remove(user)
        return CommandResult(argv, 0, "", "")


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Group:
    made = Group(["carol"])
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger/ledger.json"))
    monkeypatch.setattr(users, "members", lambda _: list(made.present))
    monkeypatch.setattr(users, "_exists", lambda name: name in USERS)
    monkeypatch.setattr(users, "must", made.gpasswd)
    monkeypatch.setattr(undo, "run", made.gpasswd)
    return made


def run(*wanted: str, check: bool = False) -> Changes:
    return converge(spec_from({"members": {"docker": list(wanted)}}), check)


def test_users_are_added_once_and_recorded_before(group: Group) -> None:
    assert run("alice", "carol", "alice").actions == ["add alice to the group docker"]
    assert group.present == ["carol", "alice"]
    assert group.recorded == [["alice"]], "the ledger comes first"
    assert run("alice", "carol").actions == []


def test_a_user_that_is_no_longer_listed_is_removed_if_gpunodes_added_them(group: Group) -> None:
    run("alice", "bob", "carol")
    assert run("bob").actions == ["remove alice from the group docker"]
    # carol was a member before.
    assert group.present == ["carol", "bob"]
    assert ledger.load().members == {"docker": ["bob"]}
    assert run().actions == ["remove bob from the group docker"]
    assert group.present == ["carol"]


def test_a_group_that_is_not_mentioned_keeps_its_members(group: Group) -> None:
    run("alice")
    assert converge(Spec()).actions == []
    assert group.present == ["carol", "alice"]


def test_an_interrupted_removal_is_completed(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    run("alice")

    def cut(*_: object) -> None:
        raise MachineProblem("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(users, "must", cut)
        with pytest.raises(MachineProblem):
            run()
    assert ledger.load().members == {"docker": ["alice"]}
    run()
    assert group.present == ["carol"]


@pytest.mark.parametrize("name", ["mallory", "-G", "alice bob", "alice\x00", "../alice", "$(id)"])
def test_a_user_that_does_not_exist_stops_before_the_first_change(group: Group, name: str) -> None:
    with pytest.raises(MachineProblem, match="does not exist; wanted: existing users"):
        run("alice", name)
    assert group.present == ["carol"]
    assert not group.recorded


@pytest.mark.parametrize("name", ["no-such-user-here", "-G", "a\x00b", ""])
def test_what_is_no_user_does_not_exist(name: str) -> None:
    assert not users._exists(name)
    assert users._exists("root")


def test_check_mode_changes_nothing(group: Group) -> None:
    run("alice")
    assert run("bob", check=True).actions == ["add bob to the group docker", "remove alice from the group docker"]
    assert group.present == ["carol", "alice"]
    assert ledger.load().members == {"docker": ["alice"]}


def test_reset_removes_only_those_that_were_added(group: Group) -> None:
    run("alice", "carol")
    assert undo.Undoer(check=True).run()[0] == "remove alice from the group docker"
    assert group.present == ["carol", "alice"]
    found = undo.Undoer()
    found._users()
    assert found.actions == ["remove alice from the group docker"]
    assert group.present == ["carol"]
    again = undo.Undoer()
    again._users()
    assert again.actions == []
