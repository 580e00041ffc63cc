"""The names of namespaces. Pure."""

from __future__ import annotations

import re

from gpunodes.errors import WrongInput

# RFC 1123, a label.
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def is_name(text: str) -> bool:
    """Whether a namespace can have this name."""
    return _NAME.fullmatch(text) is not None


def check(text: str) -> None:
    """Raise WrongInput for what is no name of a namespace."""
    if not is_name(text):
        raise WrongInput(f"{text!a} is not the name of a namespace", "", "correct --namespace")
