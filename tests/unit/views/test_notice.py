"""Notices of changed states, in each form."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from gpunodes.cli import scan_outputs
from gpunodes.health.changes import StateChange, changes
from gpunodes.health.model import Action, Finding, State, Verdict
from gpunodes.views import notice

FINDING = Finding(
    "fallen-off-bus", "0000:3b:00.0", Action.REBOOT, State.SICK, code=79, message="GPU <!channel> & \x1b[2Jlost"
)
SICK = Verdict("gpu-1", "live", State.SICK, Action.REBOOT, findings=(FINDING,))
HEALTHY = Verdict("gpu-2", "live", State.HEALTHY, Action.NONE)
CHANGES = [StateChange(State.HEALTHY, SICK), StateChange(State.UNREACHABLE, HEALTHY)]


def sent(form: str, found: list[StateChange] = CHANGES) -> Any:
    body = notice.body(form, found, 1700000000.0)
    assert b"\\u001b" not in body
    return json.loads(body)


def test_only_changes() -> None:
    before = {"gpu-1": State.SICK, "gpu-2": State.HUNG, "gpu-9": State.HUNG}
    assert changes([SICK, HEALTHY], before) == [StateChange(State.HUNG, HEALTHY)]
    # The first scan: a healthy machine is no news.
    assert changes([SICK, HEALTHY], {}) == [StateChange(State.HEALTHY, SICK)]


OFF = Verdict("gpu-1", "live", State.OFF, Action.NONE, wanted="off since 08:00: no pod needs it")


@pytest.mark.parametrize(("last", "now"), [(State.HEALTHY, State.OFF), (State.OFF, State.HEALTHY)])
def test_a_machine_that_is_switched_off_on_purpose_is_no_news(last: State, now: State) -> None:
    assert changes([dataclasses.replace(OFF, state=now)], {"gpu-1": last}) == []


def test_what_was_wrong_before_a_machine_was_switched_off_ends_with_the_reason() -> None:
    found = changes([OFF], {"gpu-1": State.SICK})
    (resolved,) = sent("alertmanager", found)
    assert resolved["labels"]["severity"] == "critical"
    assert resolved["endsAt"] == resolved["startsAt"]
    assert resolved["annotations"]["summary"] == "gpu-1: off (was sick): off since 08:00: no pod needs it"
    (firing,) = sent("alertmanager", changes([SICK], {"gpu-1": State.OFF}))
    assert firing["endsAt"] > firing["startsAt"]


def test_json() -> None:
    document = sent("json")
    assert document["schema"] == "gpunodes.health-notice/1"
    assert document["time"] == "2023-11-14T22:13:20+00:00"
    first, second = document["machines"]
    assert {key: first[key] for key in ("name", "before", "state", "action")} == {
        "name": "gpu-1",
        "before": "healthy",
        "state": "sick",
        "action": "reboot",
    }
    assert first["findings"] == [{"rule": "fallen-off-bus", "code": 79, "message": "GPU <!channel> &  [2Jlost"}]
    assert (second["before"], second["state"], second["findings"]) == ("unreachable", "healthy", [])


def test_slack_mentions_nobody() -> None:
    message = sent("slack")
    assert message["text"].splitlines() == [
        "gpu-1: sick (was healthy), needs reboot: GPU &lt;!channel&gt; &amp;  [2Jlost",
        "gpu-2: healthy (was unreachable)",
    ]
    assert message["mrkdwn"] is False


def test_a_message_for_people_is_short() -> None:
    long = Finding("xid", "", Action.NONE, State.SICK, message="x" * 10_000)
    many = [
        StateChange(State.HEALTHY, Verdict(f"gpu-{number}", "live", State.SICK, Action.NONE, findings=(long,)))
        for number in range(1000)
    ]
    text = sent("slack", many)["text"]
    assert len(text) < 20_000
    assert text.endswith("... and 960 other machines")


def test_alertmanager_has_one_alert_for_each_machine() -> None:
    firing, resolved = sent("alertmanager")
    assert firing["labels"] == {"alertname": "GpunodesMachineUnhealthy", "machine": "gpu-1", "severity": "critical"}
    assert firing["annotations"]["state"] == "sick"
    assert firing["startsAt"] == "2023-11-14T22:13:20+00:00"
    assert firing["endsAt"] == "2023-12-14T22:13:20+00:00"
    assert resolved["labels"]["severity"] == "critical"
    assert resolved["endsAt"] == resolved["startsAt"]


def test_another_severity_ends_the_alert() -> None:
    (same,) = sent("alertmanager", [StateChange(State.HUNG, SICK)])
    assert same["labels"]["severity"] == "critical"
    old, new = sent("alertmanager", [StateChange(State.DEGRADED, SICK)])
    assert (old["labels"]["severity"], new["labels"]["severity"]) == ("warning", "critical")
    assert (old["endsAt"] == old["startsAt"], new["endsAt"] == new["startsAt"]) == (True, False)


@pytest.mark.parametrize(
    ("host", "path", "form"),
    [
        ("hooks.slack.com", "/services/T/B/x", "slack"),
        ("hooks.slack.com.example.org", "/", "json"),
        ("10.0.0.9", "/api/v2/alerts", "alertmanager"),
        ("example.org", "/alertmanager/api/v2/alerts", "alertmanager"),
        ("example.org", "/hook", "json"),
    ],
)
def test_the_form_follows_from_the_address(host: str, path: str, form: str) -> None:
    assert notice.form_of(host, path) == form


def test_the_option_has_all_forms() -> None:
    assert set(scan_outputs.FORMS) == set(notice.FORMS)
