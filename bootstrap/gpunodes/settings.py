"""The settings of a cluster: the inventory's variables `gpunodes_*`, and defaults from the role `settings`.

The only place of the defaults is ``roles/settings/defaults/main.yml``.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gpunodes.errors import WrongInput, together
from gpunodes.setting_forms import FORMS, subnets


def content() -> Path:
    """The collection's folder (`playbooks`, `roles`, `plugins`): of the installed package, or of the checkout."""
    package = Path(__file__).parent
    root = package / "content" if (package / "content").is_dir() else package.parent
    return root / "ansible_collections" / "gpunodes" / "bootstrap"


def pages() -> Path:
    """The folder of the documentation's pages (`NAME.md`): of the installed package, or of the checkout."""
    package = Path(__file__).parent
    return package / "docs" if (package / "docs").is_dir() else package.parents[1] / "docs"


def plugins() -> Path:
    """The folder of gpunodes' Ansible modules and filters."""
    return Path(__file__).parent / "ansible"


def state_home() -> Path:
    """The folder of runs: ``$XDG_STATE_HOME/gpunodes``, by default ``~/.local/state/gpunodes``; mode 0700.

    Raises WrongInput if it cannot be created.
    """
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local/state")
    path = Path(base) / "gpunodes"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise WrongInput(
            f"the folder {path} cannot be made: {error.strerror}",
            "a folder that this user can write",
            "set HOME, or XDG_STATE_HOME, to one",
        ) from error
    return path


def _unusable(path: Path) -> str:
    """Why this user cannot have a folder; empty if it is there, or was made."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(path, os.W_OK) else "it cannot be written"


def check_ansible_home() -> None:
    """Raise WrongInput where Ansible cannot have its folder, which it makes when it is imported."""
    path = Path(os.environ.get("ANSIBLE_HOME") or "~/.ansible").expanduser()
    if problem := _unusable(path):
        raise WrongInput(
            f"Ansible's folder {path} cannot be used: {problem}",
            "a folder that this user can write",
            "set HOME, or ANSIBLE_HOME, to one",
        )


def ansible_config() -> Path:
    """Ansible's configuration for all that gpunodes does with Ansible."""
    return Path(__file__).with_name("ansible.cfg")


def import_ansible() -> None:
    """Import Ansible's own settings, without the user's ansible.cfg.

    It does not apply to the playbooks of gpunodes. Where gpunodes itself reads the inventory, its
    result must be the same.
    """
    users = os.environ.get("ANSIBLE_CONFIG")
    os.environ["ANSIBLE_CONFIG"] = str(ansible_config())
    try:
        importlib.import_module("ansible.constants")
    finally:
        del os.environ["ANSIBLE_CONFIG"]
        if users is not None:
            os.environ["ANSIBLE_CONFIG"] = users


def ssh_sockets() -> Path | None:
    """The folder for the sockets of SSH connections, where Ansible's default cannot be used; None for the default.

    The default, ~/.ansible/cp, does not follow ANSIBLE_HOME. It is used where it can be: the path of a socket has at
    most 108 characters, and ANSIBLE_HOME may be long.
    """
    home = os.environ.get("ANSIBLE_HOME")
    if not home or os.environ.get("ANSIBLE_SSH_CONTROL_PATH_DIR") or not _unusable(Path("~/.ansible/cp").expanduser()):
        return None
    return Path(home).expanduser() / "cp"


VERBOSE = "GPUNODES_VERBOSE"
"""The environment variable that --verbose sets."""


def verbose() -> bool:
    """Whether Ansible's own output is shown."""
    return os.environ.get(VERBOSE, "") not in {"", "0"}


def known_hosts() -> Path:
    """gpunodes' file of SSH host keys: a key is added at the first contact, a changed one is refused by ssh."""
    return state_home() / "known_hosts"


@functools.cache
def defaults() -> Mapping[str, Any]:
    """The default of every setting."""
    path = content() / "roles/settings/defaults/main.yml"
    loaded: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


def resolve(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a machine with these inventory variables, booleans and numbers converted as Ansible does.

    An inventory in INI has the text "false". What is no boolean or number stays as it is: ``problems`` reports it.
    """
    found = {name: variables.get(name, default) for name, default in defaults().items()}
    for name in _not_text():
        if isinstance(found[name], str):
            with contextlib.suppress(ValueError):
                found[name] = _CONVERTERS[_options()[name]["type"]](found[name])
    return found


@functools.cache
def _not_text() -> Sequence[str]:
    """The settings that are booleans or numbers, by their defaults: the specification is seldom needed, and long."""
    return [name for name, default in defaults().items() if isinstance(default, (bool, int, float))]


def _boolean(text: str) -> bool:
    """A boolean by its text, as Ansible's module_utils/parsing/convert_bool.py; raises ValueError."""
    found = text.strip().lower()
    if found not in _TRUE | _FALSE:
        raise ValueError(text)
    return found in _TRUE


_CONVERTERS: Mapping[str, Callable[[str], object]] = {"bool": _boolean, "int": int, "float": float, "raw": str}
"""By the declared type of a setting."""
_TRUE = frozenset({"y", "yes", "on", "1", "true", "t", "1.0"})
_FALSE = frozenset({"n", "no", "off", "0", "false", "f", "0.0"})


def is_template(value: object) -> bool:
    """Whether a value of an inventory may contain a template. Of a locked vault it is not known: then it may."""
    from ansible.errors import AnsibleError

    try:
        text = str(value)
    except AnsibleError:
        return True
    return "{{" in text or "{%" in text


@dataclass(frozen=True, slots=True)
class SettingProblem:
    """A wrong setting of a machine. ``found`` follows the setting's name and machine in a sentence."""

    key: str
    found: str
    wanted: str


def report_all(path: object, machines: Mapping[str, Sequence[SettingProblem]], more: Sequence[WrongInput] = ()) -> None:
    """Raise WrongInput for the problems of all machines, by name, and for ``more``; nothing where there are none.

    ``path`` is their inventory, which the one remedy of all names.
    """
    found: dict[SettingProblem, list[str]] = {}
    for name, wrong_settings in machines.items():
        for problem in wrong_settings:
            found.setdefault(problem, []).append(name)
    wrong = [(_sentence(each, names), each.wanted) for each, names in found.items()]
    wrong += [(each.problem.found, each.problem.wanted) for each in more]
    if wrong:
        remedy = f"correct {'this setting' if len(wrong) == 1 else 'these settings'} of the inventory {path}"
        raise together([WrongInput(*each, remedy) for each in wrong])


def problems(variables: Mapping[str, Any]) -> Iterator[SettingProblem]:
    """What is wrong with the `gpunodes_*` variables of one machine.

    The argument specification of the role `settings` decides, with the formats below. Templates are not checked: only
    Ansible can render them.
    """
    from ansible.errors import AnsibleError

    known = _options()
    for key, value in variables.items():
        if not key.startswith("gpunodes_"):
            continue
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            yield SettingProblem(
                key,
                "is not a setting",
                f"a setting of `gpunodes help --page settings`{f'; the nearest: {near[0]}' if near else ''}",
            )
            continue
        # A value in a locked vault is left to Ansible too.
        with contextlib.suppress(AnsibleError):
            yield from _problems_of(key, value, known[key])
    with contextlib.suppress(AnsibleError):
        yield from _overlaps(resolve(variables))


def _sentence(problem: SettingProblem, names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    return f"{problem.key} of {shown} {problem.found}"


_NAMED = 4
"""Machines that an error names."""


def _problems_of(key: str, value: Any, option: Mapping[str, Any]) -> Iterator[SettingProblem]:
    from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

    if is_template(value) or value == defaults().get(key):
        return
    secret = "password" in key or key in {"gpunodes_http_proxy", "gpunodes_https_proxy"}
    fact = "cannot be used" if secret else f"is {value!r}"
    # Ansible converts any value to a string, and YAML an unquoted 1.30 to the number 1.3.
    not_text = option["type"] == "str" and isinstance(value, (float, list, dict))
    if not_text or ArgumentSpecValidator({key: option}).validate({key: value}).error_messages:
        choices = option.get("choices")
        yield SettingProblem(
            key,
            fact,
            f"one of {', '.join(map(str, choices))}"
            if choices
            else f"type {option['type']}{', in quotes' if isinstance(value, float) else ''}",
        )
        return
    for names, wanted, holds in FORMS:
        if fnmatch.fnmatchcase(key, names):
            if not holds(value):
                yield SettingProblem(key, fact, wanted)
            return


def _overlaps(resolved: Mapping[str, Any]) -> Iterator[SettingProblem]:
    pods, services = (subnets(resolved[f"gpunodes_{name}_subnet"]) for name in ("pod", "service"))
    if any(a.version == b.version and a.overlaps(b) for a in pods for b in services):
        yield SettingProblem(
            "gpunodes_pod_subnet",
            f"is {resolved['gpunodes_pod_subnet']}, which overlaps gpunodes_service_subnet",
            "two networks without a common address",
        )


@functools.cache
def _options() -> Mapping[str, Any]:
    path = content() / "roles/settings/meta/argument_specs.yml"
    options: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"]["main"]["options"]
    return options
