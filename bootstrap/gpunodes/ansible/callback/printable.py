"""Sanitizes machines' output: it cannot control the terminal, forge events of ansible-runner, or end the whole run.

Ansible prints a module's warnings and errors unchanged. ansible-runner marks events in this stream with terminal
sequences (its utils, OutputEventFilter): a machine that reported such a sequence could forge events of any machine.
"""

from __future__ import annotations

DOCUMENTATION = """
name: printable
type: aggregate
short_description: Removes control characters from Ansible's output
description:
  - A machine's output cannot control the terminal, forge events of ansible-runner, or look like lines of Ansible.
  - Keeps the colour of a whole message, which Ansible adds last, but removes colours within it, in diffs and the recap.
requirements:
  - Enable it with C(callbacks_enabled).
"""

import functools
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

try:
    import gpunodes.model as _  # noqa: F401 - checks whether the package is installed
except ModuleNotFoundError:
    # From a checkout, or from the built collection, which brings the parts of the package that this file imports.
    _HERE = Path(__file__).resolve()
    sys.path[:0] = [str(_HERE.parents[3]), str(_HERE.parents[1] / "plugin_utils")]

from ansible import constants
from ansible.plugins.callback import CallbackBase
from ansible.utils.display import Display

# Ansible loads this file, and then forks a process for each task of each machine. What the filters import is loaded
# here once, not in each process.
import gpunodes.planner.desired
import gpunodes.planner.preflight  # noqa: F401 - the filters use both
from gpunodes.model import printable_lines

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Lines after the first one, including empty lines before them, unless they are indented already.
_FOLLOWING = re.compile(r"(?<=[^\n])(\n+)(?!\n|  |$)")


def sanitize(text: str) -> str:
    """A message without control characters and colours; its lines after the first are indented.

    Ansible's own lines are not indented ("ok: [worker-2]"): a machine must not be able to imitate them.
    """
    return _FOLLOWING.sub(r"\1  ", printable_lines(_COLOUR.sub("", text)))


def _sanitizing(display: Any) -> Any:
    @functools.wraps(display)
    def wrapped(self: Display, msg: str, *arguments: Any, **keywords: Any) -> Any:
        return display(self, sanitize(msg), *arguments, **keywords)

    wrapped.gpunodes_sanitizes = True  # type: ignore[attr-defined]  # for the filter sanitizes_output
    return wrapped


def _indenting(diff: Any) -> Any:
    @functools.wraps(diff)
    def wrapped(self: CallbackBase, *arguments: Any) -> str:
        return textwrap.indent(sanitize(diff(self, *arguments)), "  ")

    return wrapped


def _install() -> None:
    # Ansible removes keys that only its own actions may set from a module's result, but not ansible_stats: a value that
    # is not a mapping ended the run for all machines (ansible-core 2.19, plugins/strategy, _process_pending_results).
    constants.INTERNAL_RESULT_KEYS = (*constants.INTERNAL_RESULT_KEYS, "ansible_stats")
    # Ansible prints everything through this method; its workers send their output to the main process.
    Display.display = _sanitizing(Display.display)
    # In a diff, even the first line comes from a machine.
    CallbackBase._get_diff = _indenting(CallbackBase._get_diff)


_install()


class CallbackModule(CallbackBase):  # type: ignore[misc]  # Ansible has no types
    """The class that Ansible loads; importing this module does the work."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "gpunodes.bootstrap.printable"
    CALLBACK_NEEDS_ENABLED = True
