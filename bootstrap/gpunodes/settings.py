"""The settings of a cluster: the inventory's variables `gpunodes_*` over the defaults of the role `settings`.

The defaults stand in ``roles/settings/defaults/main.yml`` and nowhere else.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def content() -> Path:
    """The folder that holds `playbooks` and `roles`: inside an installed package, else the checkout."""
    installed = Path(__file__).parent / "content"
    return installed if installed.is_dir() else Path(__file__).parents[2]


def plugins() -> Path:
    """The folder of our Ansible modules and filters."""
    return Path(__file__).parent / "ansible"


def state_home() -> Path:
    """Where runs are kept: ``$XDG_STATE_HOME/gpunodes``, by default ``~/.local/state/gpunodes``; 0700."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local/state")
    path = Path(base) / "gpunodes"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


def known_hosts() -> Path:
    """Our file of SSH host keys: a key is learned at the first contact, a changed one is refused by ssh."""
    return state_home() / "known_hosts"


@functools.cache
def defaults() -> Mapping[str, Any]:
    """The default of every setting."""
    path = content() / "roles/settings/defaults/main.yml"
    loaded: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


def of(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a machine with these inventory variables."""
    return {name: variables.get(name, default) for name, default in defaults().items()}
