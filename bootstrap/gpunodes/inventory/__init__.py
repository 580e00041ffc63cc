"""The inventory of machines: a plain Ansible inventory, and the selection of machines from it."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import functools
import io
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpunodes import clusters, settings
from gpunodes.errors import WrongInput
from gpunodes.inventory import snapshot
from gpunodes.inventory.loader import BECOME_FILE, LOGIN_FILE, VAULT_REMEDY, load, password_of
from gpunodes.inventory.names import (
    canonical,
    check_destination,
    check_group,
    check_machine,
    check_pattern,
    is_address,
)
from gpunodes.inventory.plugins import template_from_outside
from gpunodes.model import Kubeconfig, Machine, Role

SUDO_PASSWORDS = ("ansible_become_password", "ansible_become_pass", "ansible_sudo_pass")
"""The variables for sudo's password that Ansible's become plugin supports."""

KUBECONFIG, CONTEXT = "gpunodes_api_kubeconfig", "gpunodes_api_context"
"""The settings for a cluster without control planes in the inventory; its nodes have the same."""
LOGIN_PASSWORDS = ("ansible_ssh_password", "ansible_ssh_pass", "ansible_password")
"""The variables for the login's password."""
_HOST_VARIABLES = ("ansible_host", "ansible_ssh_host")

_SHOWN = 10
"""Machines that an error lists."""

GROUPS: Mapping[Role, str] = {
    Role.CONTROL_PLANE: "control_plane",
    Role.WORKER: "workers",
    Role.GPU_HOST: "gpu_hosts",
    Role.STORAGE: "storage",
}
_MACHINES = (Role.CONTROL_PLANE, Role.WORKER, Role.GPU_HOST)
"""The roles of the machines that commands work on, unless they name others."""


class Inventory:
    """The machines of an inventory file or folder, with their variables."""

    def __init__(
        self,
        path: Path,
        kubeconfig: Kubeconfig | None = None,
        *,
        cluster: str = "",
        more: Mapping[str, Any] | None = None,
        given: str = "",
    ) -> None:
        """Read the inventory at ``path``; raises WrongInput for a missing or malformed one.

        ``kubeconfig`` is one that the user named for this command, instead of that of the settings; ``cluster`` the key
        of its history, by default its own; ``more`` has variables of all machines that are in no file; ``given`` is
        what the user typed instead of an inventory, which messages name then.
        """
        self.path = path
        self._given = given
        self.title = given or str(path)
        """How messages name it."""
        loaded = load(path)
        self.plugin = loaded.plugin
        """The inventory plugin that lists machines, "" in a static inventory."""
        self._manager, self._variables, self._withheld = loaded.manager, loaded.variables, loaded.withheld
        self._merged: dict[str, dict[str, Any]] = {}
        self._of_role: dict[Role, Sequence[Machine]] = {}
        self._cluster = cluster
        self._kubeconfig = kubeconfig
        for key, value in (more or {}).items():
            self._manager.groups["all"].set_variable(key, value)
        self._check_names()
        self._check_roles()

    def _check_names(self) -> None:
        for group in self._manager.groups.values():
            check_group(self.title, group.name)
        for name in self._manager.hosts:
            check_machine(self.title, name)
            # Ansible's --limit would select the group, too.
            group = self._manager.groups.get(name)
            if group and [host.name for host in group.get_hosts()] != [name]:
                raise WrongInput(
                    f"{self.title}: {name} is the name of a machine and of a group with other machines",
                    "different names",
                    "rename one of them",
                )

    def _check_roles(self) -> None:
        """Raise WrongInput for a machine that is meant to be a node, and not to be one."""
        nodes = {machine.name for machine in self.machines(Role.CONTROL_PLANE, Role.WORKER)}
        hosts = {machine.name for machine in self.machines(Role.GPU_HOST)}
        if both := sorted(hosts & {machine.name for machine in self.machines(Role.STORAGE)}):
            raise WrongInput(
                f"{self.title}: {', '.join(both[:_SHOWN])} in the groups {GROUPS[Role.GPU_HOST]} and "
                f"{GROUPS[Role.STORAGE]}",
                "one of these groups: shared storage is for the nodes of a cluster",
                "remove the machine from one of them",
            )
        if both := [host.name for host in self.machines(Role.GPU_HOST) if host.name in nodes]:
            raise WrongInput(
                f"{self.title}: {', '.join(both[:_SHOWN])} in the group {GROUPS[Role.GPU_HOST]} and in "
                f"{GROUPS[Role.CONTROL_PLANE]} or {GROUPS[Role.WORKER]}",
                f"one of these groups: machines in {GROUPS[Role.GPU_HOST]} never become nodes",
                "remove the machine from one of them",
            )

    def copy(self, folder: Path) -> Path:
        """The file of a static copy, as it was read and checked, in the new ``folder``; raises WrongInput."""
        return snapshot.write(self._manager, self.path if self.path.is_dir() else self.path.parent, folder)

    @property
    def groups(self) -> Collection[str]:
        """The names of all groups."""
        return list(self._manager.groups)

    def variables(self, name: str) -> dict[str, Any]:
        """All variables of a machine, merged as Ansible merges them; templates are not rendered."""
        return dict(self._variables_of(name))

    def _variables_of(self, name: str) -> Mapping[str, Any]:
        from ansible.errors import AnsibleError

        # Ansible needs a third of a millisecond for a machine.
        if name in self._merged:
            return self._merged[name]
        host = self._manager.get_host(name)
        try:
            found: dict[str, Any] = self._variables.get_vars(host=host, include_hostvars=False)
        except AnsibleError as error:
            raise WrongInput(
                f"the variables of {name} cannot be read: {str(error).splitlines()[0]}",
                "variables that Ansible can read",
                f"correct them; {VAULT_REMEDY}",
            ) from error
        self._withheld.check(host, found)
        if self.plugin and (key := template_from_outside(found)):
            raise WrongInput(
                f"{key} of {name} contains a template that comes from outside, by the inventory plugin {self.plugin}",
                "a plain value",
                "correct it where the plugin reads it, or set the variable in group_vars",
            )
        self._merged[name] = found
        return found

    def machines(self, *roles: Role) -> list[Machine]:
        """The machines of these roles, by default of all but storage, in the inventory's order."""
        found: dict[str, Machine] = {}
        for role in roles or _MACHINES:
            if role not in self._of_role:
                group = self._manager.groups.get(GROUPS[role])
                self._of_role[role] = [self._machine(host.name, role) for host in (group.get_hosts() if group else ())]
            for machine in self._of_role[role]:
                found.setdefault(machine.name, machine)
        return list(found.values())

    @property
    def cluster(self) -> str:
        """The cluster's key in the history, which stays when a control plane is replaced (clusters.py)."""
        if not self._cluster:
            found = self.machines(Role.CONTROL_PLANE)
            self._cluster = clusters.key([each.address for each in found]) if found else str(self.path.absolute())
        return self._cluster

    @functools.cached_property
    def kubeconfig(self) -> Kubeconfig | None:
        """The kubeconfig by which the API is reached, None if it is reached over the control planes.

        Raises WrongInput for both: commands exclude each other by locks that they find the same way.
        """
        found = self._kubeconfig or self._kubeconfig_of_settings()
        if found and (controls := self.machines(Role.CONTROL_PLANE)):
            raise WrongInput(
                f"{self.title} has the control plane {controls[0].name}, and {found.path} leads to the API, too",
                "one of them",
                f"leave {'--kubeconfig' if self._kubeconfig else KUBECONFIG} out, or empty the group control_plane",
            )
        return found

    def _kubeconfig_of_settings(self) -> Kubeconfig | None:
        machines = self.machines(Role.CONTROL_PLANE, Role.WORKER) or self.machines()
        named: dict[tuple[str, ...], str] = {}
        for each in machines:
            own = self._variables_of(each.name)
            named.setdefault(tuple(str(own.get(key) or "") for key in (KUBECONFIG, CONTEXT)), each.name)
        if len(named) > 1:
            first, other, *_ = named.values()
            raise WrongInput(
                f"{first} and {other} of {self.title} differ in {KUBECONFIG} or {CONTEXT}",
                "machines of one cluster in an inventory",
                "set the same for all nodes, or write an inventory for each cluster",
            )
        given = self.rendered(machines[0].name, KUBECONFIG, CONTEXT) if machines else {}
        if not given.get(KUBECONFIG):
            return None
        return Kubeconfig(Path(str(given[KUBECONFIG])).expanduser(), str(given.get(CONTEXT) or ""))

    def control_planes(self) -> list[Machine]:
        """The control-plane machines, in the inventory's order; raises WrongInput without one."""
        machines = self.machines(Role.CONTROL_PLANE)
        if not machines and self._given:
            raise WrongInput(
                f"{self._given}: of machines without an inventory the control plane is not known",
                "an inventory with the group control_plane",
                "use -i, or write one with `gpunodes adopt`; some commands take --kubeconfig instead",
            )
        if not machines and (found := self.kubeconfig):
            raise WrongInput(
                f"{self.title} has no machine in the group control_plane, only the kubeconfig {found.path}",
                "control planes that are reached by SSH: this command does not work with a kubeconfig",
                f"add them, and leave {KUBECONFIG} out, or use a command of `gpunodes help --page other-clusters`",
            )
        hosts = self.machines(Role.GPU_HOST)
        if hosts and not machines and not self.machines(Role.WORKER):
            raise WrongInput(
                f"{self.title} has only GPU hosts ({len(hosts)}), which have no cluster",
                "an inventory with the group control_plane",
                "`gpunodes health` and `gpunodes gpu verify` report on GPU hosts",
            )
        if not machines:
            raise WrongInput(
                f"{self.title} has no machine in the group control_plane",
                "a machine that runs the cluster's API or is to run it",
                f"add it to the inventory; GPU machines without a cluster belong in the group {GROUPS[Role.GPU_HOST]}",
            )
        return machines

    def control_plane(self) -> Machine:
        """The first control-plane machine, which creates the cluster; raises WrongInput without one."""
        return self.control_planes()[0]

    def controls_of(self, machines: Iterable[Machine]) -> list[Machine]:
        """The control-plane machines of the cluster of ``machines``; none if all of them are GPU hosts.

        Raises WrongInput as ``control_planes``.
        """
        return [] if all(machine.role is Role.GPU_HOST for machine in machines) else self.control_planes()

    def select(self, patterns: Sequence[str], *roles: Role) -> list[Machine]:
        """The machines that match ``patterns``: names, addresses, groups, shell or Ansible patterns.

        Without a pattern, all machines of ``roles``. Raises WrongInput for a pattern without a match, with the nearest
        names, and for a machine outside the groups of ``roles``.
        """
        candidates = self.machines(*roles)
        if not patterns:
            if not candidates:
                groups = " or ".join(GROUPS[role] for role in roles or _MACHINES)
                raise WrongInput(f"{self.title} has no machine in the group {groups}", "at least one", "add a machine")
            return candidates
        by_name = {machine.name: machine for machine in candidates}
        known = self._known()
        chosen: dict[str, Machine] = {}
        for pattern in patterns:
            if pattern.startswith(("!", "&")):
                raise WrongInput(
                    f"{pattern!r} alone names no machines",
                    "one pattern, such as 'workers:!gpu-3'",
                    "join it to the other patterns with a colon",
                )
            for name in self._matches(pattern, known):
                if name not in by_name:
                    groups = " or ".join(GROUPS[role] for role in roles or _MACHINES)
                    raise WrongInput(
                        f"{name} is not in the group {groups} of {self.title}",
                        "a machine of that group",
                        "move it to that group, or choose another machine",
                    )
                chosen[name] = by_name[name]
        return list(chosen.values())

    def rendered(self, name: str, *prefixes: str) -> dict[str, Any]:
        """The variables of a machine whose names start with one of ``prefixes``, with rendered templates.

        As in a playbook, templates see defaults of settings and other machines. Raises WrongInput for a template that
        cannot be rendered, without its value, which may be a secret.
        """
        return self._rendered(name, [key for key in self.variables(name) if str(key).startswith(prefixes)], {})

    def with_rendered(self, name: str, keys: Collection[str], more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """All variables of a machine, those of ``keys`` rendered that are templates; raises as ``rendered``.

        Templates see ``more`` before the inventory's own.
        """
        found = self.variables(name)
        # Ansible needs milliseconds for the templates of a machine.
        templates = [key for key in keys if key in found and settings.is_template(found[key])]
        return found | self._rendered(name, templates, more or {}) if templates else found

    def _rendered(self, name: str, keys: Iterable[str], more: Mapping[str, Any]) -> dict[str, Any]:
        from ansible.errors import AnsibleError
        from ansible.template import Templar
        from ansible.vars.hostvars import HostVars

        variables = {**_defaults(), **self.variables(name), **more}
        others = HostVars(self._manager, self._variables, self._manager._loader)
        templar = Templar(loader=self._manager._loader, variables={**variables, "hostvars": others, "vars": variables})
        found: dict[str, Any] = {}
        for key in keys:
            try:
                value = templar.template(variables[key])
            except AnsibleError as error:
                raise _not_rendered(key, name, error) from error
            found[key] = str(value) if isinstance(value, str) else value
        return found

    def connection(self, name: str) -> dict[str, Any]:
        """All variables of a machine, the connection variables rendered; raises WrongInput as ``rendered``.

        Without a password for the login or sudo in the variables, it is read from the files that Ansible's environment
        variables name, as Ansible does.
        """
        found = self.variables(name) | self.rendered(name, "ansible_")
        for variable, names in ((BECOME_FILE, SUDO_PASSWORDS), (LOGIN_FILE, LOGIN_PASSWORDS)):
            file = os.environ.get(variable)
            if file and not any(found.get(each) for each in names):
                found[names[0]] = password_of(file, variable)
        return found

    def unknown(self, addresses: Iterable[str]) -> list[str]:
        """Those of ``addresses`` that are neither the name nor the address of a machine."""
        known = self._known()
        return [address for address in addresses if canonical(address) not in known]

    def _known(self) -> Mapping[str, Sequence[str]]:
        """The names of machines by name and by canonical address: several machines may have one address."""
        found: dict[str, dict[str, None]] = {}
        for machine in self.machines():
            for each in (machine.name, machine.address):
                found.setdefault(canonical(each), {})[machine.name] = None
        return {each: list(names) for each, names in found.items()}

    def _matches(self, pattern: str, known: Mapping[str, Sequence[str]]) -> Sequence[str]:
        check_pattern(pattern)
        if canonical(pattern) in known:
            return known[canonical(pattern)]
        names = list(dict.fromkeys(name for each in known.values() for name in each))
        # A shell's [13] is a set of characters, Ansible's a subscript: a match as in a shell has priority.
        if matching := fnmatch.filter(names, pattern):
            return matching
        # Ansible prints a warning for a pattern without a match; the error below is better.
        with contextlib.redirect_stderr(io.StringIO()):
            selected = [host.name for host in self._manager.get_hosts(pattern)] if not is_address(pattern) else []
        if selected:
            return selected
        raise self._no_match(pattern, known, names)

    def _no_match(self, pattern: str, known: Mapping[str, Sequence[str]], names: Sequence[str]) -> WrongInput:
        near = {known[each][0] for each in difflib.get_close_matches(pattern, known, n=3, cutoff=0.4)}
        names = sorted(near) or names
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        listed = f"{'the nearest' if near else 'it has'}: {', '.join(names[:_SHOWN])}{more}"
        return WrongInput(
            f"{pattern!r} matches no machine of {self.title}",
            f"a machine of this inventory; {listed}" if known else "an inventory with machines",
            f"correct the name, or add the machine to {where_to_add(self.plugin)}",
        )

    def _machine(self, name: str, role: Role) -> Machine:
        # Records, locks of clusters and selections go by the address: a template would be the same in all inventories.
        variables = self.with_rendered(name, _HOST_VARIABLES)
        for variable in _HOST_VARIABLES:
            check_destination(name, variable, str(variables.get(variable) or name))
        return Machine(name=name, address=str(variables.get("ansible_host") or name), role=role)


@functools.cache
def _defaults() -> Mapping[str, Any]:
    """The defaults of settings; one that is a template itself is known to playbooks only."""
    return {name: value for name, value in settings.defaults().items() if not settings.is_template(value)}


def _not_rendered(key: str, name: str, error: Exception) -> WrongInput:
    from ansible.errors import AnsibleUndefinedVariable

    # Other messages may have the value, which may be a secret.
    why = f": {str(error).splitlines()[0]}" if isinstance(error, AnsibleUndefinedVariable) else ""
    wanted = "a value, or a template of variables that the inventory defines"
    return WrongInput(f"{key} of {name} cannot be rendered{why}", wanted, f"correct it; {VAULT_REMEDY}")


def where_to_add(plugin: str) -> str:
    """Where a user adds a machine to an inventory."""
    return (
        f"what the inventory plugin {plugin} lists, or to a static file beside its file" if plugin else "the inventory"
    )
