"""How to connect to a machine of the inventory over SSH: from Ansible's variables and ssh_config(5)."""

from __future__ import annotations

import functools
import getpass
import itertools
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpunodes.engine.remote import openssh
from gpunodes.errors import WrongInput
from gpunodes.inventory import LOGIN_PASSWORDS, SUDO_PASSWORDS

Lookup = Callable[[str, Sequence[str]], Mapping[str, Any]]
"""The options in ssh_config for a host and further ssh arguments, by the option's name in lower case."""

DEFAULT_PORT = 22
DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
PYTHON = "/usr/bin/python3"

PASSWORDS = LOGIN_PASSWORDS
PORTS = ("ansible_ssh_port", "ansible_port")
_ALIASES = {
    "host": ("ansible_ssh_host", "ansible_host"),
    "port": PORTS,
    "user": ("ansible_ssh_user", "ansible_user"),
    "identityfile": ("ansible_ssh_private_key_file", "ansible_private_key_file"),
    "password": PASSWORDS,
}
ARGUMENTS = ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args")
# The short options of ssh(1) that are equivalent to an option of ssh_config.
_SHORT_OPTIONS = {"-J": "proxyjump", "-p": "port", "-l": "user", "-i": "identityfile"}


@dataclass(frozen=True, slots=True)
class Target:
    """The SSH connection to a machine. ``jump`` are the jump hosts, the first hop first."""

    name: str
    address: str
    port: int = DEFAULT_PORT
    user: str = ""
    key_files: tuple[str, ...] = ()
    password: str = field(default="", repr=False)
    jump: tuple[Target, ...] = ()
    proxy_command: str = ""
    host_key_alias: str = ""
    identities_only: bool = False
    rules: openssh.Rules = field(default_factory=openssh.Rules)
    python: str = PYTHON
    become: bool = True
    become_password: str = field(default="", repr=False)

    @property
    def host_key_name(self) -> str:
        """The name of the machine in known_hosts (sshd(8))."""
        if self.host_key_alias:
            return self.host_key_alias
        return openssh.filed(self.address, str(self.port))


def ssh_config() -> Lookup:
    """Return a lookup of a host's options in the ssh_config of the user and of the system.

    Where a configuration changes how host keys are checked, the lookup runs ``ssh -G``. It raises WrongInput for a file
    that cannot be parsed.
    """
    import paramiko

    config = paramiko.SSHConfig()

    @functools.cache
    def find(host: str, arguments: tuple[str, ...]) -> Mapping[str, Any]:
        try:
            if own_rules or openssh.sets_rules(arguments):
                return openssh.resolved(host, arguments)
            found: dict[str, Any] = dict(config.lookup(host))
        except (openssh.ResolveError, paramiko.SSHException, ImportError, KeyError, ValueError) as error:
            raise _unreadable(error) from error
        if found.get("hostname") == host:
            del found["hostname"]
        return found

    # One process for each machine is slow: `ssh -G` runs only where a configuration has options for host keys.
    own_rules = openssh.has_own_rules()
    if not own_rules:
        try:
            config.parse(openssh.config_lines())
        except paramiko.SSHException as error:
            raise _unreadable(error) from error
    return lambda host, arguments: find(host, tuple(arguments))


def _unreadable(error: Exception) -> WrongInput:
    return WrongInput(f"ssh_config cannot be parsed: {error}", "ssh_config(5)", "correct ~/.ssh/config")


def target(name: str, variables: Mapping[str, Any], lookup: Lookup) -> Target:
    """The connection to the machine ``name`` with these inventory variables.

    The inventory overrides ssh_config, as with Ansible. Raises WrongInput for an invalid value.
    """
    set_variables = {key: value for key, value in _from_variables(variables).items() if value}
    own = {**_ssh_options(name, variables), **set_variables}
    host = str(own.get("host") or name)
    for value in (host, *(str(value) for value in own.values())):
        if "{{" in value:
            raise WrongInput(
                f"an SSH setting of the machine {name} is a template: {value!r}",
                "a plain value",
                "write the value in the inventory, or set it in ~/.ssh/config",
            )
    arguments = ssh_argv(variables, name)
    connection = _connection(name, host, own, lookup, arguments)
    python = str(variables.get("ansible_python_interpreter") or PYTHON)
    become = variables.get("ansible_become")
    jump = own.get("proxyjump") or ("" if own.get("proxycommand") else lookup(host, arguments).get("proxyjump"))
    has_jump = bool(jump) and str(jump).lower() != "none"
    return Target(
        **connection,
        password=str(own.get("password") or ""),
        jump=hops(str(jump), lookup, connection["key_files"], openssh.other_config(arguments)) if has_jump else (),
        python=python if python.startswith("/") else PYTHON,
        become_password=first(variables, SUDO_PASSWORDS),
        become=str(become).lower() not in {"false", "no", "0"} if become is not None else True,
    )


def first(variables: Mapping[str, Any], names: Sequence[str]) -> str:
    """The value of the first of these variables that is set; "" when none is set."""
    return str(next((variables[name] for name in names if variables.get(name)), ""))


def ssh_argv(variables: Mapping[str, Any], machine: str = "a machine") -> list[str]:
    """The ssh arguments for a machine with these inventory variables, without its address.

    Raises WrongInput for arguments that cannot be parsed.
    """
    argv: list[str] = []
    for option, name in (("-p", "port"), ("-l", "user"), ("-i", "identityfile")):
        if value := first(variables, _ALIASES[name]):
            argv += [option, value]
    return argv + [argument for name in ARGUMENTS for argument in split(variables, name, machine)]


def split(variables: Mapping[str, Any], name: str, machine: str = "a machine") -> list[str]:
    """The arguments in one of ``ARGUMENTS``, from the inventory or else from the environment, as with Ansible.

    Raises WrongInput.
    """
    try:
        return shlex.split(str(variables.get(name, os.environ.get(name.upper())) or ""))
    except ValueError as error:
        raise WrongInput(f"{name} of {machine} cannot be parsed: {error}", "ssh arguments", "correct it") from error


def _connection(
    name: str, host: str, own: Mapping[str, Any], lookup: Lookup, arguments: Sequence[str]
) -> dict[str, Any]:
    """The fields of a Target that machines and jump hosts share; ``own`` are the options that override ssh_config."""
    configured = lookup(host, arguments)
    options = {**configured, **own}
    address = str(options.get("hostname") or host).replace("%h", host)
    port = str(options.get("port") or DEFAULT_PORT)
    if not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise WrongInput(f"the machine {name} has the SSH port {port!r}", "a number up to 65535", "correct it")
    user = str(options.get("user") or getpass.getuser())
    files = options.get("identityfile") or ()
    command = options.get("proxycommand") or ""
    return {
        "name": name,
        "address": address,
        "port": int(port),
        "user": user,
        "key_files": tuple(str(Path(file).expanduser()) for file in ((files,) if isinstance(files, str) else files)),
        "proxy_command": "" if command.lower() == "none" else _expand(command, address, port, user),
        "host_key_alias": str(options.get("hostkeyalias") or ""),
        "identities_only": str(options.get("identitiesonly", "no")).lower() == "yes",
        "rules": openssh.rules(configured),
    }


def _from_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: next((variables[name] for name in names if variables.get(name) is not None), None)
        for key, names in _ALIASES.items()
    }


def _ssh_options(name: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    """The options in the ssh arguments of an inventory, by ssh_config's names; the first value of an option is used."""
    argv = [argument for variable in ARGUMENTS for argument in split(variables, variable, name)]
    options: dict[str, Any] = {}
    for argument, following in itertools.pairwise([*argv, ""]):
        option, value = argument[:2], argument[2:] or following
        if option == "-o":
            key, _, rest = value.replace("=", " ", 1).partition(" ")
            options.setdefault(key.lower(), rest.strip().strip('"'))
        elif option in _SHORT_OPTIONS:
            options.setdefault(_SHORT_OPTIONS[option], value)
    return options


def hops(jump: str, lookup: Lookup, keys: Sequence[str] = (), config: Sequence[str] = ()) -> tuple[Target, ...]:
    """The jump hosts in a ProxyJump, ``user@host:port,...``, with the keys of ssh_config and of the machine.

    Raises WrongInput for a value that is not valid.
    """
    found: list[Target] = []
    for part in jump.split(","):
        user, _, address = part.strip().removeprefix("ssh://").rpartition("@")
        host, port = address, ""
        if address.startswith("["):
            host, _, port = address[1:].partition("]")
            port = port.removeprefix(":")
        elif address.count(":") == 1:
            host, _, port = address.partition(":")
        own = {key: value for key, value in (("user", user), ("port", port)) if value}
        arguments = [*config, *(["-l", user] if user else []), *(["-p", port] if port else [])]
        connection = _connection(f"jump host {host}", host, own, lookup, arguments)
        connection["key_files"] = tuple(dict.fromkeys([*connection["key_files"], *keys]))
        # Every hop after the first is reached through the one before it.
        connection["proxy_command"] = "" if found else connection["proxy_command"]
        found.append(Target(**connection))
    return tuple(found)


def _expand(command: str, address: str, port: str, user: str) -> str:
    """Expand the tokens of a ProxyCommand (ssh_config(5), TOKENS)."""
    values = {"%h": shlex.quote(address), "%p": port, "%r": shlex.quote(user), "%%": "%"}
    return re.sub("%[hpr%]", lambda found: values[found[0]], command)
