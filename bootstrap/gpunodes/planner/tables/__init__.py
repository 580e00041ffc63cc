"""The tables, each read once. They are TOML, which the standard library can read."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any


@functools.cache
def read(name: str) -> Mapping[str, Any]:
    """The table ``name`` (a file ``name.toml`` beside this one)."""
    return tomllib.loads(resources.files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))
