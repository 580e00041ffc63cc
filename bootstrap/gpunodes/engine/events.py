"""Convert ansible-runner's event dictionaries to typed events; the only module that uses their keys.

They have no published schema; the recorded events in the tests are from ansible-runner 2.4 with ansible-core 2.19.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpunodes.ansible.module_utils.causes import bounded
from gpunodes.model import Event, Outcome, TaskEnded, TaskStarted, printable
from gpunodes.settings import known_hosts

_READ = 16 << 10
"""Characters of a machine's text in which a cause is looked for, half of them from its end: it may send 64 MiB."""

_OUTCOMES = {
    "runner_on_ok": Outcome.UNCHANGED,
    "runner_on_failed": Outcome.FAILED,
    "runner_on_unreachable": Outcome.UNREACHABLE,
    "runner_on_skipped": Outcome.SKIPPED,
}

# Patterns of ssh's messages, with messages for the user. The first match wins; OpenSSH 8.4 to 10. Each repetition is
# limited: what a machine sends may begin like a message thousands of times.
_SSH = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|[Hh]ost key verification failed",
        (
            "the SSH host key has changed: the machine was reinstalled, or another machine has its address; "
            "if the new key is right, remove the old key with `ssh-keygen -f {known_hosts} -R ADDRESS`"
        ),
    ),
    (
        r"Permission denied \(([^)\n]{0,200})\)",
        "SSH refuses the user or the key (it offers {0}); check --user and --key",
    ),
    (r"[Cc]onnection timed out|Operation timed out", "SSH does not respond (timed out)"),
    (r"Connection refused", "the SSH connection is refused: no process listens on that port"),
    (r"No route to host", "no route to host"),
    (r"Could not resolve hostname", "the host name does not resolve"),
    (r"Load key .{0,500}: (.{0,500})", "the SSH key cannot be used: {0}"),
    (r"Connection (?:closed|reset)|Broken pipe", "SSH closed the connection"),
)

_SUDO = (
    (r"Missing sudo password|a password is required|sudo: a terminal is required", "sudo asks for a password"),
    (r"Sorry, try again|[Ii]ncorrect (?:sudo )?password", "sudo refuses the password of the inventory"),
    (r"is not in the sudoers file|not allowed to (?:run|execute)", "the user is not allowed to use sudo"),
    (r"sudo: (?:command )?not found|sudo: No such file", "sudo is not installed"),
)

_PYTHON = (
    r"python\S{0,100}: (?:command )?not found|python\S{0,100}: No such file|interpreter .{0,300} was not found"
    r"|No such file or directory: .{0,300}python"
)


def parse(raw: Mapping[str, Any]) -> Event | None:
    """The typed event of ``raw``, or None for an event that gpunodes does not use."""
    data: Mapping[str, Any] = raw.get("event_data", {})
    machine = str(data.get("host", ""))
    phase = str(data.get("role", "")).rpartition(".")[2]
    task = _title(str(data.get("task", "")))
    kind = str(raw.get("event", ""))
    if kind == "runner_on_start":
        return TaskStarted(machine=machine, phase=phase, task=task)
    outcome = _OUTCOMES.get(kind)
    if outcome is None:
        return None
    result = data.get("res")
    result = result if isinstance(result, Mapping) else {}
    if outcome is Outcome.UNCHANGED and result.get("changed"):
        outcome = Outcome.CHANGED
    if outcome is Outcome.FAILED and data.get("ignore_errors"):
        outcome = Outcome.UNCHANGED
    return TaskEnded(
        machine=machine,
        phase=phase,
        task=task,
        outcome=outcome,
        seconds=float(data.get("duration") or 0.0),
        result=result,
    )


def cause(event: TaskEnded) -> str:
    """Why a task failed, in one line: the first cause that its module reports, with ssh's messages explained."""
    result = event.result
    keys = ("msg", "module_stderr", "stderr", "module_stdout")
    texts = [bounded(str(result.get(key) or ""), _READ) for key in keys]
    text, detail = texts[0], "\n".join(texts)
    if event.outcome is Outcome.UNREACHABLE:
        return _first(_SSH, detail) or _line(text) or "the machine is unreachable"
    if found := _first(_SUDO, detail):
        return found
    if re.search(_PYTHON, detail):
        return "Python is not installed at the path that Ansible uses (/usr/bin/python3)"
    timeout = result.get("timedout")
    if isinstance(timeout, Mapping):
        seconds = printable(str(timeout.get("period")))[:20]
        return f"the task did not end within {seconds} s: the machine is connected, but sudo, Python or a program hangs"
    if result.get("censored"):
        return "the task failed; its output holds a secret and is not shown"
    return _line(text) or _line(detail) or "the task failed without a message"


def ssh_reason(text: str) -> str:
    """The explanation of ssh's messages, in one line; their first line when no pattern matches."""
    text = bounded(text, _READ)
    return _first(_SSH, text) or _first(_SUDO, text) or _line(text)


def _first(table: tuple[tuple[str, str], ...], text: str) -> str:
    for pattern, meaning in table:
        if found := re.search(pattern, text):
            return meaning.format(*found.groups(), known_hosts=known_hosts())
    return ""


def _line(text: str) -> str:
    """The first line with text, without the warning that a host key was learned."""
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line and not line.startswith("Warning: Permanently added")), "")


def _title(task: str) -> str:
    """A task's name without the role prefix that Ansible adds."""
    return task.rpartition(" : ")[2]
