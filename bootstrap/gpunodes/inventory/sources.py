"""What the source of a dynamic inventory may decide: a cloud's account or a database, whose data a plugin lists.

A source decides which machines there are, and what harms only them. It does not decide what the controller runs, reads
or trusts. A variable beyond that is withheld from the inventory: the one of that name in the user's files counts, and a
machine without it there is refused. Texts of the plugin's own file are the user's, too: Ansible marks them, and the
constants of its ``compose`` are known.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpunodes import settings
from gpunodes.errors import WrongInput

if TYPE_CHECKING:
    from ansible.inventory.group import Group
    from ansible.inventory.host import Host
    from ansible.inventory.manager import InventoryManager

Form = tuple[str, str]
"""A regular expression for a whole value, and what it describes."""

_ANY: Form = (r"[\s\S]*", "a plain value")
# A ProxyCommand of ssh_config may have the user's name (%r), and a shell runs it.
_USER: Form = (r"[A-Za-z0-9_][A-Za-z0-9_.@+\\-]{0,63}\$?", "the name of a user")
_PORT: Form = (r"\d{1,5}", "a port")
_FLAG: Form = (r"(?i)true|false|yes|no|on|off|0|1", "true or false")

ALLOWED: Mapping[str, Form] = {
    "ansible_host": _ANY,  # names.py has its form
    "ansible_ssh_host": _ANY,
    "ansible_port": _PORT,
    "ansible_ssh_port": _PORT,
    "ansible_user": _USER,
    "ansible_ssh_user": _USER,
    "ansible_password": _ANY,
    "ansible_ssh_pass": _ANY,
    "ansible_ssh_password": _ANY,
    "ansible_become": _FLAG,
    "ansible_become_user": _USER,
    "ansible_become_pass": _ANY,
    "ansible_become_password": _ANY,
    "ansible_sudo_pass": _ANY,
    "ansible_python_interpreter": (r"/[A-Za-z0-9_./+-]{1,200}|auto(_\w+)?", "the path of an interpreter"),
}
"""The variables ``ansible_*`` that a source may set; all others may make Ansible run or read something."""

CONTROLLER: Mapping[str, Form | None] = {
    # They run something on the controller, or read it there.
    "gpunodes_api_context": None,
    "gpunodes_api_kubeconfig": None,
    "gpunodes_bmc_command": None,
    "gpunodes_bmc_jump_key": None,
    "gpunodes_bmc_password_command": None,
    "gpunodes_bmc_password_env": None,
    "gpunodes_kubeconfig_path": None,
    "gpunodes_power_archive": None,
    # They decide what is trusted, or who gets a secret of the controller.
    "gpunodes_bmc_address": (r"(?!\s*(?i:http:))[\s\S]*", "an address whose TLS certificate is verified"),
    "gpunodes_bmc_identity": None,
    "gpunodes_bmc_verify": None,
    "gpunodes_cri_dockerd_packages_fingerprint": None,
    "gpunodes_cri_dockerd_packages_key": None,
    "gpunodes_docker_packages_fingerprint": None,
    "gpunodes_docker_packages_key": None,
    "gpunodes_kubernetes_packages_fingerprint": None,
    "gpunodes_kubernetes_packages_key": None,
    "gpunodes_nvidia_packages_fingerprint": None,
    "gpunodes_nvidia_packages_key": None,
    "gpunodes_nvidia_toolkit_packages_fingerprint": None,
    "gpunodes_nvidia_toolkit_packages_key": None,
    "gpunodes_power_image": None,
    # The command line sets these.
    "gpunodes_cluster": None,
    "gpunodes_control_plane": None,
    "gpunodes_facts": None,
}
"""The settings that a source may not set, or only in this form."""

_LOCATIONS = ("inventory_dir", "inventory_file")
"""Ansible sets them to the place of the plugin's file; templates of the user make paths of them."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a variable was withheld: the plugin that lists it, and the form that its value lacks, "" for any value."""

    plugin: str
    wanted: str = ""


@dataclass(frozen=True, slots=True)
class Withheld:
    """The variables that were withheld, by the name of their machine or group."""

    refusals: dict[str, dict[str, Refusal]] = field(default_factory=dict)

    def check(self, host: Host, variables: Mapping[str, Any]) -> None:
        """Raise WrongInput for the first withheld variable that is not in ``variables``, those of the user's files."""
        from ansible import constants

        for owner in (host, *host.get_groups()) if self.refusals else ():
            for key, refusal in self.refusals.get(owner.name, {}).items():
                if key in variables and key not in constants.INTERNAL_STATIC_VARS:
                    continue
                raise WrongInput(
                    f"{key} of {host.name} comes from outside, by the inventory plugin {refusal.plugin}"
                    + (f", and is not {refusal.wanted}" if refusal.wanted else ""),
                    refusal.wanted or "a variable that a source may set (`gpunodes help --page inventories`)",
                    "remove it where the plugin reads it; if it is yours, put it into group_vars or host_vars",
                )


def watch(manager: InventoryManager, names: Mapping[Path, str]) -> Withheld:
    """Make ``manager`` withhold what the plugins ``names`` (by file) may not set, when it reads their files.

    Then it raises WrongInput for a machine that a plugin names as Ansible names the controller.
    """
    found = Withheld()
    parse: Callable[..., bool] = manager.parse_source
    by_path = {file.resolve(): name for file, name in names.items()}

    def parse_source(source: str, cache: bool = False) -> bool:
        plugin = by_path.get(Path(source).resolve())
        if plugin is None:
            return parse(source, cache=cache)
        before = {id(owner): dict(owner.vars) for owner in _owners(manager)}
        done = parse(source, cache=cache)
        constants = _constants(manager, source)
        for owner in _owners(manager):
            _check_controller(owner.name, new=id(owner) not in before, plugin=plugin)
            _withhold(owner, before.get(id(owner), {}), constants, source, plugin, found)
        return done

    manager.parse_source = parse_source
    return found


def _owners(manager: InventoryManager) -> list[Host | Group]:
    return [*manager.groups.values(), *manager.hosts.values()]


def _check_controller(name: str, *, new: bool, plugin: str) -> None:
    """Ansible runs what is delegated to such a machine on the controller, without SSH."""
    from ansible import constants

    if new and name in constants.LOCALHOST:
        raise WrongInput(
            f"the inventory plugin {plugin} lists the machine {name}, which is the controller",
            "other names of machines",
            "rename it where the plugin reads it, or leave it out",
        )


def _withhold(
    owner: Host | Group,
    before: Mapping[str, Any],
    constants: Mapping[str, Any],
    source: str,
    plugin: str,
    found: Withheld,
) -> None:
    """Restore the variables of ``owner`` that the plugin may not have changed."""
    for key, value in list(owner.vars.items()):
        if key in before and before[key] is value:
            continue
        if _is_of_the_user(value) or (key in constants and constants[key] == value):
            continue
        wanted = _refused(key, value, source)
        if wanted is None:
            continue
        found.refusals.setdefault(owner.name, {})[key] = Refusal(plugin, wanted)
        if key in before:
            owner.vars[key] = before[key]
        else:
            del owner.vars[key]


def _refused(key: str, value: Any, source: str) -> str | None:
    """None for a value that a source may set; else the form that it lacks, "" for a variable that it may not set."""
    if key in _LOCATIONS:
        return None if value in (source, str(Path(source).parent)) else ""
    if key in own_variables():
        return ""
    form = ALLOWED.get(key) if key.startswith("ansible_") else CONTROLLER.get(key, _ANY)
    if form is None:
        return ""
    # An absent value is that of Ansible or gpunodes.
    if form is _ANY or value is None:
        return None
    pattern, wanted = form
    return None if isinstance(value, (str, int)) and re.fullmatch(pattern, str(value)) else wanted


def _is_of_the_user(value: Any) -> bool:
    """Whether a value is text of the plugin's own file: Ansible trusts it as a template, and no data of a source."""
    from ansible.template import is_trusted_as_template

    if isinstance(value, str):
        return bool(is_trusted_as_template(value))
    parts = (
        [each for pair in value.items() for each in pair]
        if isinstance(value, Mapping)
        else value
        if isinstance(value, (list, tuple))
        else []
    )
    return bool(parts) and all(map(_is_of_the_user, parts))


def _constants(manager: InventoryManager, source: str) -> dict[str, Any]:
    """The variables to which ``compose`` of a plugin's file gives a constant, such as ``"'-o ProxyJump=bastion'"``.

    Ansible marks no result of an expression.
    """
    import jinja2

    document = manager._loader.load_from_file(source, cache="none")
    compose = document.get("compose") if isinstance(document, Mapping) else None
    found: dict[str, Any] = {}
    for key, expression in compose.items() if isinstance(compose, Mapping) else ():
        try:
            output: Any
            (output,) = jinja2.Environment().parse(f"{{{{ {expression} }}}}").body  # noqa: S701 - nothing is rendered
            (node,) = output.nodes
            found[str(key)] = node.as_const()
        except (jinja2.TemplateError, jinja2.nodes.Impossible, AttributeError, ValueError):
            continue
    return found


@functools.cache
def own_variables() -> frozenset[str]:
    """The variables of the roles and playbooks of gpunodes: an inventory's would override their defaults."""
    content = settings.content()
    roles = sorted((each.name for each in (content / "roles").iterdir() if each.is_dir()), key=len, reverse=True)
    name = re.compile(rf"\b_{{0,2}}(?:{'|'.join(roles)}|wiring)_\w+")
    files = [*(content / "roles").rglob("*.yml"), *(content / "playbooks").rglob("*.yml")]
    return frozenset(found for file in files for found in name.findall(file.read_text(encoding="utf-8")))
