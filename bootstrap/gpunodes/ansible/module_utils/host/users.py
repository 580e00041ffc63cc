"""Users and groups that exist on the machine."""

from __future__ import annotations

import grp
import pwd


def has_group(name: str) -> bool:
    """Whether the machine has a group of users."""
    return any(entry.gr_name == name for entry in grp.getgrall())


def has_user(name: str) -> bool:
    """Whether the machine has a user."""
    return any(entry.pw_name == name for entry in pwd.getpwall())
