"""The inventory of machines: a plain Ansible inventory, and the selection of machines from it."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpunodes.errors import WrongInput
from gpunodes.inventory.loader import BECOME_FILE, load, sudo_password
from gpunodes.inventory.names import NAME, check_pattern, is_address
from gpunodes.model import Machine, Role

SUDO_PASSWORDS = ("ansible_become_password", "ansible_become_pass", "ansible_sudo_pass")
"""The variables for sudo's password that Ansible's become plugin supports."""

_SHOWN = 10
"""Machines that an error lists."""

GROUPS: Mapping[Role, str] = {Role.CONTROL_PLANE: "control_plane", Role.WORKER: "workers"}


class Inventory:
    """The machines of an inventory file or folder, with their variables."""

    def __init__(self, path: Path) -> None:
        """Read the inventory at ``path``; raises WrongInput for a missing or malformed one."""
        self.path = path
        self._manager, self._variables = load(path)
        self._merged: dict[str, dict[str, Any]] = {}
        for host in self._manager.hosts.values():
            if not NAME.fullmatch(host.name):
                raise WrongInput(
                    f"{path}: {host.name!r} is not a machine name",
                    "letters, digits, dots, dashes and underscores",
                    "rename it, and give the address in ansible_host",
                )

    def variables(self, name: str) -> dict[str, Any]:
        """All variables of a machine, merged as Ansible merges them; templates are not rendered."""
        from ansible.errors import AnsibleError

        # Ansible needs a third of a millisecond for a machine.
        if name in self._merged:
            return dict(self._merged[name])
        host = self._manager.get_host(name)
        try:
            self._merged[name] = self._variables.get_vars(host=host, include_hostvars=False)
        except AnsibleError as error:
            raise WrongInput(
                f"the variables of {name} cannot be read: {str(error).splitlines()[0]}",
                "variables that Ansible can read",
                "correct them; for a vault, use --ask-vault-pass, or set ANSIBLE_VAULT_PASSWORD_FILE",
            ) from error
        return dict(self._merged[name])

    def machines(self, *roles: Role) -> list[Machine]:
        """The machines of these roles, by default of all roles, in the inventory's order."""
        found: dict[str, Machine] = {}
        for role in roles or tuple(Role):
            group = self._manager.groups.get(GROUPS[role])
            for host in group.get_hosts() if group else ():
                found.setdefault(host.name, self._machine(host.name, role))
        return list(found.values())

    @property
    def cluster(self) -> str:
        """The cluster's key in the history: its control plane's address."""
        found = self.machines(Role.CONTROL_PLANE)
        return found[0].address if found else str(self.path.absolute())

    def control_plane(self) -> Machine:
        """The control-plane machine; raises WrongInput unless the inventory has exactly one."""
        machines = self.machines(Role.CONTROL_PLANE)
        if not machines:
            raise WrongInput(
                f"{self.path} has no machine in the group control_plane",
                "one machine, which runs the cluster's API or is to run it",
                "add it to the inventory",
            )
        if len(machines) > 1:
            names = ", ".join(machine.name for machine in machines)
            raise WrongInput(
                f"{self.path} has {len(machines)} machines in the group control_plane ({names})",
                "one machine: a replicated control plane is not supported yet",
                "keep one of them",
            )
        return machines[0]

    def select(self, patterns: Sequence[str], *roles: Role) -> list[Machine]:
        """The machines that match ``patterns``: names, addresses, groups, shell or Ansible patterns.

        Without a pattern, all machines of ``roles``. Raises WrongInput for a pattern without a match, with the nearest
        names, and for a machine outside the groups of ``roles``.
        """
        candidates = self.machines(*roles)
        if not patterns:
            if not candidates:
                groups = " or ".join(GROUPS[role] for role in roles or tuple(Role))
                raise WrongInput(f"{self.path} has no machine in the group {groups}", "at least one", "add a machine")
            return candidates
        by_name = {machine.name: machine for machine in candidates}
        chosen: dict[str, Machine] = {}
        for pattern in patterns:
            if pattern.startswith(("!", "&")):
                raise WrongInput(
                    f"{pattern!r} alone names no machines",
                    "one pattern, such as 'workers:!gpu-3'",
                    "join it to the other patterns with a colon",
                )
            for name in self._matches(pattern):
                if name not in by_name:
                    groups = " or ".join(GROUPS[role] for role in roles or tuple(Role))
                    raise WrongInput(
                        f"{name} is not in the group {groups} of {self.path}",
                        "a machine of that group",
                        "move it to that group, or choose another machine",
                    )
                chosen[name] = by_name[name]
        return list(chosen.values())

    def rendered(self, name: str, prefix: str) -> dict[str, Any]:
        """The variables of a machine whose names start with ``prefix``, with rendered templates.

        Raises WrongInput for a template that cannot be rendered, without its value, which may be a secret.
        """
        from ansible.errors import AnsibleError
        from ansible.template import Templar

        variables = self.variables(name)
        templar = Templar(loader=self._manager._loader, variables=variables)
        found: dict[str, Any] = {}
        for key in [key for key in variables if key.startswith(prefix)]:
            try:
                value = templar.template(variables[key])
                found[key] = str(value) if isinstance(value, str) else value
            except AnsibleError as error:
                raise WrongInput(
                    f"{key} of {name} cannot be rendered",
                    "a value, or a template of defined variables",
                    "correct it; for a vault, use --ask-vault-pass, or set ANSIBLE_VAULT_PASSWORD_FILE",
                ) from error
        return found

    def connection(self, name: str) -> dict[str, Any]:
        """All variables of a machine, the connection variables rendered; raises WrongInput as ``rendered``.

        Without a sudo password in the variables, it is read from $ANSIBLE_BECOME_PASSWORD_FILE, as Ansible does.
        """
        found = self.variables(name) | self.rendered(name, "ansible_")
        file = os.environ.get(BECOME_FILE)
        if file and not any(found.get(each) for each in SUDO_PASSWORDS):
            found[SUDO_PASSWORDS[0]] = sudo_password(file)
        return found

    def knows(self, address: str) -> bool:
        """Whether a machine has this name or address."""
        return any(address in {machine.name, machine.address} for machine in self.machines())

    def _matches(self, pattern: str) -> list[str]:
        check_pattern(pattern)
        machines = self.machines()
        if exact := [machine.name for machine in machines if pattern in {machine.name, machine.address}]:
            return exact
        # A shell's [13] is a set of characters, Ansible's a subscript: a match as in a shell has priority.
        if matching := fnmatch.filter([machine.name for machine in machines], pattern):
            return matching
        # Ansible prints a warning for a pattern without a match; the error below is better.
        with contextlib.redirect_stderr(io.StringIO()):
            names = [host.name for host in self._manager.get_hosts(pattern)] if not is_address(pattern) else []
        if names:
            return names
        known = {machine.address: machine.name for machine in machines}
        known |= {name: name for name in known.values()}
        near = {known[name] for name in difflib.get_close_matches(pattern, known, n=3, cutoff=0.4)}
        names = sorted(near) or list(dict.fromkeys(known.values()))
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        listed = f"{'the nearest' if near else 'it has'}: {', '.join(names[:_SHOWN])}{more}"
        raise WrongInput(
            f"{pattern!r} matches no machine of {self.path}",
            f"a machine of this inventory; {listed}" if known else "an inventory with machines",
            "correct the name, or add the machine to the inventory",
        )

    def _machine(self, name: str, role: Role) -> Machine:
        return Machine(name=name, address=str(self.variables(name).get("ansible_host", name)), role=role)
