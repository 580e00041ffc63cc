"""A site's own actions for single codes, from the settings."""

from __future__ import annotations

from collections.abc import Mapping

from gpunodes.errors import WrongInput
from gpunodes.health.model import Action, SiteRules


def rules(xids: object, sxids: object) -> SiteRules:
    """Rules from gpunodes_health_xids and gpunodes_health_sxids; raises WrongInput unless they are actions by code."""
    return SiteRules(_actions("gpunodes_health_xids", xids), _actions("gpunodes_health_sxids", sxids))


def _actions(setting: str, value: object) -> Mapping[int, Action]:
    if not isinstance(value, Mapping):
        raise WrongInput(
            f"{setting} is {value!r}", "a mapping from codes to actions, such as {79: repair}", "correct it"
        )
    actions = {}
    for code, action in value.items():
        if not str(code).isdigit() or str(action) not in set(Action):
            raise WrongInput(
                f"{setting} contains {code!r}: {action!r}", f"a code, and one of {', '.join(Action)}", "correct it"
            )
        actions[int(code)] = Action(str(action))
    return actions
