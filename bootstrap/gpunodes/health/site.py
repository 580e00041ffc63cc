"""What a site says of single codes, as it stands in the settings."""

from __future__ import annotations

from collections.abc import Mapping

from gpunodes.errors import WrongInput
from gpunodes.health.model import Action, SiteRules


def rules(xids: object, sxids: object) -> SiteRules:
    """The settings gpunodes_health_xids and gpunodes_health_sxids; raises WrongInput for what is no action by code."""
    return SiteRules(_actions("gpunodes_health_xids", xids), _actions("gpunodes_health_sxids", sxids))


def _actions(setting: str, message: object) -> Mapping[int, Action]:
    if not isinstance(message, Mapping):
        raise WrongInput(f"{setting} is {message!r}", "actions by code, {79: repair}", "correct it")
    actions = {}
    for code, action in message.items():
        if not str(code).isdigit() or str(action) not in set(Action):
            raise WrongInput(
                f"{setting} has {code!r}: {action!r}", f"a code, and one of {', '.join(Action)}", "correct it"
            )
        actions[int(code)] = Action(str(action))
    return actions
