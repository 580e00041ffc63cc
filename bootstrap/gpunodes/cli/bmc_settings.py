"""--bmc NAME=VALUE: the BMC of a machine that is in no inventory. A password is never an argument."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from gpunodes.cli import terminal
from gpunodes.errors import WrongInput

_PREFIX = "gpunodes_bmc_"
PASSWORD = "GPUNODES_BMC_PASSWORD"  # noqa: S105 - the name of an environment variable
_WITH_PASSWORD = {"redfish", "ipmi"}


def parsed(given: Sequence[str]) -> dict[str, Any]:
    """The settings that --bmc gives, with the password; raises WrongInput."""
    from gpunodes import settings

    known = {name.removeprefix(_PREFIX) for name in settings.defaults() if name.startswith(_PREFIX)}
    found: dict[str, Any] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if name == "password":
            raise WrongInput(
                "--bmc password: other users of this machine would see it",
                "no password in the arguments",
                f"leave it out: it is asked for, unless {PASSWORD} has it",
            )
        if not equals or name not in known:
            wanted = f"NAME=VALUE, with one of {', '.join(sorted(known - {'password'}))}"
            raise WrongInput(f"--bmc {name!r}", wanted, "correct it")
        found[_PREFIX + name] = {"true": True, "false": False}.get(value, value)
    if not found:
        return {}
    for problem in settings.problems(found):
        name = problem.key.removeprefix(_PREFIX)
        raise WrongInput(f"--bmc {name} {problem.found}", problem.wanted, "correct it")
    sources = {f"{_PREFIX}password_env", f"{_PREFIX}password_command"}
    if found.get(f"{_PREFIX}type") in _WITH_PASSWORD and not sources & set(found):
        if os.environ.get(PASSWORD):
            found[f"{_PREFIX}password_env"] = PASSWORD
        else:
            found[f"{_PREFIX}password"] = terminal.secret("Password of the BMC")
    return found
