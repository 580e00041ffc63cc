"""What a machine answers steers no terminal, forges no event of ansible-runner, and ends no run of others.

Ansible prints a module's warnings and errors as they are. In ansible-runner's stream, events are marked by terminal
sequences (its utils, OutputEventFilter): a machine that reported such a sequence could forge any event of any machine.
"""

from __future__ import annotations

import functools
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

try:
    import gpunodes.model as _  # noqa: F401 - to see whether the package is installed
except ModuleNotFoundError:
    # ansible-playbook of another Python, from a checkout.
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from ansible import constants
from ansible.plugins.callback import CallbackBase
from ansible.utils.display import Display

from gpunodes.model import printable_lines

DOCUMENTATION = """
name: gpunodes_printable
type: aggregate
short_description: Keeps control characters out of what Ansible prints
description:
  - What a machine reports must not steer a terminal, forge events of ansible-runner, or look like Ansible's own lines.
  - The colour of a message, which Ansible adds last, stays; colours within one, of diffs and the recap, do not.
requirements:
  - It is enabled by C(callbacks_enabled).
"""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# The lines after the first one, with the empty ones before them; those that are indented already stay.
_FOLLOWING = re.compile(r"(?<=[^\n])(\n+)(?!\n|  |$)")


def calm(text: str) -> str:
    """A message without control characters and colours; its lines after the first are indented.

    Ansible's own lines begin at the margin ("ok: [worker-2]"), and a machine must not write one.
    """
    return _FOLLOWING.sub(r"\1  ", printable_lines(_COLOUR.sub("", text)))


def _calming(display: Any) -> Any:
    @functools.wraps(display)
    def wrapped(self: Display, msg: str, *arguments: Any, **keywords: Any) -> Any:
        return display(self, calm(msg), *arguments, **keywords)

    wrapped.gpunodes_calms = True  # type: ignore[attr-defined]  # for the filter gpunodes_calms
    return wrapped


def _indenting(diff: Any) -> Any:
    @functools.wraps(diff)
    def wrapped(self: CallbackBase, *arguments: Any) -> str:
        return textwrap.indent(calm(diff(self, *arguments)), "  ")

    return wrapped


# Ansible drops from a module's answer what only its own actions may tell, but not the word of set_stats: whatever was
# no mapping there ended the run for all machines (ansible-core 2.19, plugins/strategy, _process_pending_results).
constants.INTERNAL_RESULT_KEYS = (*constants.INTERNAL_RESULT_KEYS, "ansible_stats")

# All that Ansible prints goes through this one method; its workers hand their words to the main process.
Display.display = _calming(Display.display)
# A diff is a message of which even the first line is a machine's.
CallbackBase._get_diff = _indenting(CallbackBase._get_diff)


class CallbackModule(CallbackBase):  # type: ignore[misc]  # Ansible has no types
    """What Ansible loads; the work is done by then."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "gpunodes_printable"
    CALLBACK_NEEDS_ENABLED = True
