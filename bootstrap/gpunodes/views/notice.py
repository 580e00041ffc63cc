"""Notices of changed states, in the forms that webhooks accept. Texts may come from machines."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpunodes.health.changes import FINE, StateChange
from gpunodes.health.model import Action, State
from gpunodes.model import printable

JSON, SLACK, ALERTMANAGER = "json", "slack", "alertmanager"
_SLACK_HOST = "hooks.slack.com"
_ALERTMANAGER_PATH = "/api/v2/alerts"
_MANY = 40
"""Machines that a message for people lists, and the findings of one machine in a document."""
_LONG = 300
"""Characters of a finding."""
_ALERT_DAYS = 30
"""Alertmanager resolves an alert without an end after minutes; a notice of the recovery ends it earlier."""
_CRITICAL = {State.SICK, State.HUNG, State.UNREACHABLE}


def form_of(host: str, path: str) -> str:
    """The form that the service at this host and path accepts."""
    if host == _SLACK_HOST:
        return SLACK
    return ALERTMANAGER if path.endswith(_ALERTMANAGER_PATH) else JSON


def body(form: str, changes: Sequence[StateChange], moment: float) -> bytes:
    """The notice as JSON; ``moment`` is the end of the scan, in seconds since 1970."""
    return json.dumps(FORMS[form](changes, dt.datetime.fromtimestamp(moment, dt.UTC))).encode()


def document(changes: Sequence[StateChange], moment: dt.datetime) -> dict[str, Any]:
    """``gpunodes.health-notice/1``"""
    return {
        "schema": "gpunodes.health-notice/1",
        "time": moment.isoformat(timespec="seconds"),
        "machines": [
            {
                "name": printable(change.verdict.name),
                "before": change.before.value,
                "state": change.verdict.state.value,
                "action": change.verdict.action.value,
                "findings": [
                    {"rule": finding.rule, "code": finding.code, "message": _short(finding.message)}
                    for finding in change.verdict.findings[:_MANY]
                ],
            }
            for change in changes
        ],
    }


def _slack(changes: Sequence[StateChange], _: dt.datetime) -> dict[str, Any]:
    """https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks"""
    ordered = sorted(changes, key=lambda change: -change.verdict.state.rank)
    lines = [f"{printable(change.verdict.name)}: {_sentence(change)}" for change in ordered[:_MANY]]
    if more := len(changes) - len(lines):
        lines.append(f"... and {more} other machines")
    # These signs could mention users and channels: https://docs.slack.dev/messaging/formatting-message-text
    text = "\n".join(lines).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return {"text": text, "mrkdwn": False, "unfurl_links": False}


def _alerts(changes: Sequence[StateChange], moment: dt.datetime) -> list[dict[str, Any]]:
    """https://prometheus.io/docs/alerting/latest/alerts_api/; labels identify an alert, so another severity ends it."""
    found = []
    for change in changes:
        old, new = _severity(change.before), _severity(change.verdict.state)
        if old and old != new:
            found.append(_alert(change, old, moment, moment))
        if new:
            found.append(_alert(change, new, moment, moment + dt.timedelta(days=_ALERT_DAYS)))
    return found


def _severity(state: State) -> str:
    """The severity of the alert of a state, "" for none."""
    if state in FINE:
        return ""
    return "critical" if state in _CRITICAL else "warning"


def _alert(change: StateChange, severity: str, begins: dt.datetime, ends: dt.datetime) -> dict[str, Any]:
    name = printable(change.verdict.name)
    return {
        "labels": {"alertname": "GpunodesMachineUnhealthy", "machine": name, "severity": severity},
        "annotations": {
            "summary": f"{name}: {_sentence(change)}",
            "state": change.verdict.state.value,
            "action": change.verdict.action.value,
        },
        "startsAt": begins.isoformat(),
        "endsAt": ends.isoformat(),
    }


FORMS: Mapping[str, Callable[[Sequence[StateChange], dt.datetime], Any]] = {
    JSON: document,
    SLACK: _slack,
    ALERTMANAGER: _alerts,
}


def _sentence(change: StateChange) -> str:
    """The new state, the action and the first reason."""
    verdict = change.verdict
    action = "" if verdict.action is Action.NONE else f", needs {verdict.action.value}"
    why = next((each.message or each.rule for each in verdict.findings if not change.recovered), "")
    if verdict.state is State.OFF:
        why = verdict.wanted  # why it was switched off: it was not repaired
    reason = f": {_short(why)}" if why else ""
    return f"{verdict.state.value} (was {change.before.value}){action}{reason}"


def _short(text: str) -> str:
    return printable(text if len(text) <= _LONG else f"{text[:_LONG]}...")
