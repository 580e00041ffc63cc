"""What a machine answers steers no terminal, forges no event of ansible-runner, and ends no run of others.

Ansible prints a module's warnings and errors as they are. In ansible-runner's stream, events are marked by terminal
sequences (its utils, OutputEventFilter): a machine that reported such a sequence could forge any event of any machine.
"""

from __future__ import annotations

import functools
import re
import sys
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
  - What a machine reports must not steer a terminal, nor forge events of ansible-runner.
  - Colours (ECMA-48 SGR), which Ansible itself adds, stay.
requirements:
  - It is enabled by C(callbacks_enabled).
"""

_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")


def calm(text: str) -> str:
    """``text`` without control characters, but with its lines and colours."""
    parts = _COLOUR.split(text)
    return "".join(part if number % 2 else printable_lines(part) for number, part in enumerate(parts))


def _calming(display: Any) -> Any:
    @functools.wraps(display)
    def wrapped(self: Display, msg: str, *arguments: Any, **keywords: Any) -> Any:
        return display(self, calm(msg), *arguments, **keywords)

    return wrapped


# Ansible drops from a module's answer what only its own actions may tell, but not the word of set_stats: whatever was
# no mapping there ended the run for all machines (ansible-core 2.19, plugins/strategy, _process_pending_results).
constants.INTERNAL_RESULT_KEYS = (*constants.INTERNAL_RESULT_KEYS, "ansible_stats")

# All that Ansible prints goes through this one method; its workers hand their words to the main process.
Display.display = _calming(Display.display)


class CallbackModule(CallbackBase):  # type: ignore[misc]  # Ansible has no types
    """What Ansible loads; the work is done by then."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "gpunodes_printable"
    CALLBACK_NEEDS_ENABLED = True
