"""ansible-runner's events as typed events, and explained causes."""

from __future__ import annotations

import time
from typing import Any

import pytest
from gpunodes.engine import events
from gpunodes.model import Outcome, TaskEnded, TaskStarted


def raw(kind: str, **data: Any) -> dict[str, Any]:
    return {"event": kind, "event_data": {"host": "worker-1", "role": "node", "task": "node : Prepare", **data}}


def test_a_start_is_typed() -> None:
    assert events.parse(raw("runner_on_start")) == TaskStarted("worker-1", "node", "Prepare")


@pytest.mark.parametrize(
    ("kind", "data", "outcome"),
    [
        ("runner_on_ok", {"res": {"changed": False}}, Outcome.UNCHANGED),
        ("runner_on_ok", {"res": {"changed": True}, "duration": 2.5}, Outcome.CHANGED),
        ("runner_on_failed", {"res": {"msg": "no"}}, Outcome.FAILED),
        ("runner_on_unreachable", {"res": {"msg": "no"}}, Outcome.UNREACHABLE),
        ("runner_on_skipped", {"res": {}}, Outcome.SKIPPED),
        ("runner_on_ok", {"res": None}, Outcome.UNCHANGED),
    ],
)
def test_an_end_is_typed(kind: str, data: dict[str, Any], outcome: Outcome) -> None:
    event = events.parse(raw(kind, **data))
    assert isinstance(event, TaskEnded)
    assert event.outcome is outcome
    assert event.seconds == data.get("duration", 0.0)


@pytest.mark.parametrize("kind", ["playbook_on_stats", "verbose", "warning", "playbook_on_task_start", ""])
def test_other_events_are_ignored(kind: str) -> None:
    assert events.parse(raw(kind)) is None


@pytest.mark.parametrize(
    ("outcome", "result", "message"),
    [
        (Outcome.UNREACHABLE, "ssh: connect to host 10.0.0.9 port 22: Connection timed out", "does not respond"),
        (Outcome.UNREACHABLE, "ssh: connect to host 10.0.0.9 port 22: Connection refused", "no process listens"),
        (
            Outcome.UNREACHABLE,
            "admin@10.0.0.9: Permission denied (publickey,password).",
            "it offers publickey,password",
        ),
        (
            Outcome.UNREACHABLE,
            "@@@\n@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "host key has changed",
        ),
        (Outcome.UNREACHABLE, "ssh: Could not resolve hostname x: Name or service not known", "does not resolve"),
        (Outcome.FAILED, "Missing sudo password", "sudo asks"),
        (Outcome.FAILED, "/bin/sh: 1: /usr/bin/python3: not found", "Python is not installed"),
        (Outcome.FAILED, "kubeadm: first line\nsecond line", "kubeadm: first line"),
        (Outcome.FAILED, "", "without a message"),
    ],
)
def test_causes_are_explained(outcome: Outcome, result: str, message: str) -> None:
    assert message in events.cause(TaskEnded("m", "node", "Prepare", outcome, 0.0, {"msg": result}))


def test_a_censored_failure_is_reported_as_such() -> None:
    event = TaskEnded("m", "worker", "Join", Outcome.FAILED, 0.0, {"censored": "the output has been hidden"})
    assert "secret" in events.cause(event)


_LINES = ("python", "Load key ", "Permission denied (", "interpreter ", "No such file or directory: ", "sudo: ", "x")


@pytest.mark.parametrize("line", _LINES)
@pytest.mark.parametrize("outcome", [Outcome.UNREACHABLE, Outcome.FAILED])
def test_a_machine_that_sends_megabytes_of_one_message_costs_no_time(outcome: Outcome, line: str) -> None:
    flood = line * ((1 << 20) // len(line))
    result = dict.fromkeys(("msg", "module_stderr", "stderr", "module_stdout"), flood)
    began = time.process_time()
    assert len(events.cause(TaskEnded("m", "node", "Prepare", outcome, 0.0, result))) < 1 << 14
    assert len(events.ssh_reason(flood)) < 1 << 14
    assert time.process_time() - began < 2


@pytest.mark.parametrize("place", ["{0}{1}", "{1}{0}"])
def test_the_cause_is_found_at_both_ends_of_a_long_output(place: str) -> None:
    text = place.format("bash: /usr/bin/python3: No such file or directory\n", "noise\n" * 100_000)
    event = TaskEnded("m", "node", "Prepare", Outcome.FAILED, 0.0, {"msg": "MODULE FAILURE", "module_stderr": text})
    assert "Python is not installed" in events.cause(event)
