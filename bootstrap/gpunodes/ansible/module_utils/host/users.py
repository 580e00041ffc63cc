"""Users and groups that exist on the machine, and members of groups."""

from __future__ import annotations

import grp
import pwd
from collections.abc import Sequence

from ..problem import MachineProblem
from ..process import must
from ..report import Difference
from .changes import Changes


def has_group(name: str) -> bool:
    """Whether the machine has a group of users."""
    return any(entry.gr_name == name for entry in grp.getgrall())


def has_user(name: str) -> bool:
    """Whether the machine has a user."""
    return any(entry.pw_name == name for entry in pwd.getpwall())


def members(group: str) -> list[str]:
    """The members of a group; none if it does not exist."""
    try:
        return list(grp.getgrnam(group).gr_mem)
    except KeyError:
        return []


def set_members(changes: Changes, group: str, wanted: Sequence[str]) -> None:
    """Add existing users to a group, and remove those that an earlier run added and that are not ``wanted`` any more.

    Raises MachineProblem for a user that does not exist; then the group is not changed.
    """
    if unknown := [name for name in wanted if not _exists(name)]:
        raise MachineProblem(
            f"the user {unknown[0]} does not exist",
            f"existing users: they become members of the group {group}",
            "create it, or correct gpunodes_docker_users",
        )
    present = members(group)
    ours = changes.ledger.members.get(group, [])
    for name in dict.fromkeys(wanted):
        if name not in present:
            changes.ledger.note_member(group, name)
            difference = Difference(f"members of the group {group}", {}, {name: "member"})
            if changes.step(f"add {name} to the group {group}", difference):
                must(["gpasswd", "--add", name, group])
    for name in [name for name in ours if name not in wanted]:
        difference = Difference(f"members of the group {group}", {name: "member"}, {})
        if name in present and changes.step(f"remove {name} from the group {group}", difference):
            must(["gpasswd", "--delete", name, group])
        if not changes.check:
            changes.ledger.forget_member(group, name)
            changes.save()


def _exists(name: str) -> bool:
    """Whether a user with this name exists, also one of a directory service whose users cannot be listed."""
    try:
        return pwd.getpwnam(name).pw_name == name
    except (KeyError, ValueError):
        return False
