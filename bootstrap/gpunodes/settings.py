"""The settings of a cluster: the inventory's variables `gpunodes_*`, and defaults from the role `settings`.

The only place of the defaults is ``roles/settings/defaults/main.yml``.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gpunodes.errors import WrongInput


def content() -> Path:
    """The folder with `playbooks` and `roles`: inside the installed package, else the checkout."""
    installed = Path(__file__).parent / "content"
    return installed if installed.is_dir() else Path(__file__).parents[2]


def plugins() -> Path:
    """The folder of gpunodes' Ansible modules and filters."""
    return Path(__file__).parent / "ansible"


def state_home() -> Path:
    """The folder of runs: ``$XDG_STATE_HOME/gpunodes``, by default ``~/.local/state/gpunodes``; mode 0700."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local/state")
    path = Path(base) / "gpunodes"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


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
    """The settings of a machine with these inventory variables."""
    return {name: variables.get(name, default) for name, default in defaults().items()}


def check(name: str, variables: Mapping[str, Any]) -> None:
    """Raise WrongInput for a `gpunodes_*` variable of the machine ``name`` that is not a setting, or has a wrong value.

    The argument specification of the role `settings` decides. Templates are not checked: only Ansible can render them.
    """
    from ansible.errors import AnsibleError

    known = _options()
    for key, value in variables.items():
        if not key.startswith("gpunodes_"):
            continue
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise WrongInput(
                f"{key} of {name} is not a setting",
                f"a setting of docs/settings.md{f'; the nearest: {near[0]}' if near else ''}",
                "correct its name, or remove it from the inventory",
            )
        # A value in a locked vault is left to Ansible too.
        with contextlib.suppress(AnsibleError):
            _check(f"{key} of {name}", key, value, known[key])


def _check(title: str, key: str, value: Any, option: Mapping[str, Any]) -> None:
    from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

    if "{{" in str(value):
        return
    # Ansible converts any value to a string, and YAML an unquoted 1.30 to the number 1.3.
    not_text = option["type"] == "str" and isinstance(value, (float, list, dict))
    if not_text or ArgumentSpecValidator({key: option}).validate({key: value}).error_messages:
        choices = option.get("choices")
        raise WrongInput(
            f"{title} cannot be used" if "password" in key else f"{title} is {value!r}",
            f"one of {', '.join(map(str, choices))}" if choices else f"type {option['type']}",
            "put it in quotes" if isinstance(value, float) else "correct it in the inventory",
        )


@functools.cache
def _options() -> Mapping[str, Any]:
    path = content() / "roles/settings/meta/argument_specs.yml"
    options: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"]["main"]["options"]
    return options
