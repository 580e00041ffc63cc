"""Dynamic inventories: YAML files with ``plugin: NAME``, whose machines a plugin of Ansible lists.

Ansible's own loader runs the plugin. Which file is one, where its plugin may be, how long it may take and why it failed
is decided here. What it lists is data: names.py, sources.py and :func:`template_from_outside` say what may be in it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from gpunodes.errors import WrongInput

DEADLINE_S = 120.0
"""Seconds within which the plugins of an inventory must end."""
_LONGEST = 300
"""Characters of a plugin's own message, which may be a whole page of a web server."""
FOLDER = "inventory_plugins"
"""The name of a folder beside an inventory that may contain plugins."""
_AGAIN_S = 1.0
"""Seconds until the deadline is raised again: a plugin may catch everything."""
_TEMPLATE = re.compile(r"\{[{%#]")


class _Overdue(BaseException):
    """The deadline has passed. No Exception: Ansible would take it for a failure of one plugin, and try the next."""


def plugin_of(document: yaml.Node | None) -> str:
    """The inventory plugin that a YAML document names, "" for a static inventory."""
    for key, value in document.value if isinstance(document, yaml.MappingNode) else ():
        if key.value == "plugin" and isinstance(value, yaml.ScalarNode):
            return str(value.value)
    return ""


def plugin_in(path: Path) -> str:
    """The same of a file or of the first such file in a folder; "" for a file that is not YAML, too."""
    files = sorted((*path.glob("*.yml"), *path.glob("*.yaml"))) if path.is_dir() else [path]
    for file in files:
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
            if found := plugin_of(yaml.compose(file.read_text(encoding="utf-8"))):
                return found
    return ""


def folder(inventory: Path) -> Path | None:
    """The folder of plugins beside an inventory, None if there is none."""
    path = inventory.absolute().parent / FOLDER
    return path if path.is_dir() else None


def search_path(inventory: Path) -> str:
    """Ansible's path of inventory plugins, with the folder beside the inventory first; "" for Ansible's own path."""
    own = folder(inventory)
    if own is None:
        return ""
    default = "~/.ansible/plugins/inventory:/usr/share/ansible/plugins/inventory"
    return os.pathsep.join([str(own), os.environ.get("ANSIBLE_INVENTORY_PLUGINS") or default])


@contextlib.contextmanager
def running(inventory: Path, names: Mapping[Path, str]) -> Iterator[None]:
    """Inside, Ansible finds the plugins ``names`` (by file), and has ``DEADLINE_S`` seconds; raises WrongInput."""
    if not names:
        yield
        return
    _prepare(inventory)
    try:
        with _deadline():
            yield
    except _Overdue:
        raise WrongInput(
            f"{inventory}: {_described(names)} did not end within {DEADLINE_S:.0f} s",
            "an inventory in that time",
            "make it list fewer machines, or switch on its cache and fill it with `ansible-inventory --list`",
        ) from None
    except SystemExit as error:
        raise WrongInput(
            f"{inventory}: {_described(names)} ended gpunodes with exit code {error.code}",
            "a plugin that lists machines",
            "correct the plugin",
        ) from None


def check_parsed(inventory: Path, names: Mapping[Path, str], parsed: Iterable[str | None], output: str) -> None:
    """Raise WrongInput for the first file whose plugin failed; ``output`` is what Ansible printed meanwhile.

    Ansible itself goes on without the machines of such a file.
    """
    # For a folder Ansible lists its files, and then None.
    done = {Path(source).resolve() for source in parsed if source}
    for file, name in names.items():
        if file.resolve() not in done:
            missing = re.search(
                rf"(?:Error loading plugin '{re.escape(name)}': |plugin: (?=No module named ))(.+)", output
            ) or re.search(r"(specifies unknown plugin .+)", output)
            found = missing or re.search(r"Failed to parse inventory with .+ plugin: (.+)", output)
            cause = found[1][:_LONGEST] if found else ""
            raise WrongInput(
                f"{file}: the inventory plugin {name} {'cannot be loaded' if missing else 'failed'}"
                + (f": {cause.strip().rstrip('.')}" if cause else ""),
                "a plugin that lists machines",
                "install its collection, and its libraries for the Python of gpunodes, or put the plugin into "
                f"{inventory.absolute().parent / FOLDER}"
                if missing
                else "correct the file, or what the plugin reads",
            )


def template_from_outside(variables: Mapping[str, Any]) -> str:
    """The first variable that Ansible or gpunodes itself reads and that is an untrusted template, "" if none is.

    Ansible trusts templates in files, and none that a plugin received. Passwords are never taken for templates.
    """
    for key, value in variables.items():
        if key.startswith(("ansible_", "gpunodes_")) and "pass" not in key and _is_untrusted_template(value):
            return key
    return ""


def _is_untrusted_template(value: Any) -> bool:
    from ansible.template import is_trusted_as_template

    if isinstance(value, str):
        return _TEMPLATE.search(value) is not None and not is_trusted_as_template(value)
    if isinstance(value, Mapping):
        return any(_is_untrusted_template(each) for pair in value.items() for each in pair)
    return isinstance(value, (list, tuple)) and any(map(_is_untrusted_template, value))


def _prepare(inventory: Path) -> None:
    """Make Ansible find inventory plugins beside the inventory."""
    from ansible.plugins.loader import inventory_loader

    if own := folder(inventory):
        inventory_loader.add_directory(str(own))


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    """Raise _Overdue inside after ``DEADLINE_S`` seconds. Only the main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def overdue(*_: object) -> None:
        raise _Overdue

    before = signal.signal(signal.SIGALRM, overdue)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _described(names: Mapping[Path, str]) -> str:
    return f"the inventory plugin {' or '.join(dict.fromkeys(names.values()))}"
