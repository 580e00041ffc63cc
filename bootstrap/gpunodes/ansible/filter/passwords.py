"""A filter about the passwords of ansible-playbook itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

_KINDS = (
    (
        "ANSIBLE_BECOME_PASSWORD_FILE",
        "become_ask_pass",
        "become_password_file",
        ("ansible_become_password", "ansible_become_pass", "ansible_sudo_pass"),
    ),
    (
        "ANSIBLE_CONNECTION_PASSWORD_FILE",
        "ask_pass",
        "connection_password_file",
        ("ansible_password", "ansible_ssh_password", "ansible_ssh_pass"),
    ),
)
"""By kind: the environment variable for its file, Ansible's options for it, and its variables."""


def unshared_passwords(_: object) -> list[str]:
    """The environment variables of passwords that only this ansible-playbook has.

    They were typed, or given by an option, by ansible.cfg or as an extra variable. A command that a playbook runs on
    the controller has the environment alone.
    """
    from ansible import context
    from ansible.utils.vars import load_extra_vars

    extra = getattr(load_extra_vars, "extra_vars", None) or {}
    return [
        variable
        for variable, asked, file, names in _KINDS
        if not os.environ.get(variable)
        and (context.CLIARGS.get(asked) or context.CLIARGS.get(file) or any(extra.get(name) for name in names))
    ]


class FilterModule:
    """The filter, as Ansible looks it up."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"unshared_passwords": unshared_passwords}
