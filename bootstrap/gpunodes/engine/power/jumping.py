"""The SSH jump hosts before a BMC: from the settings, with the user's ssh_config, keys and known hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpunodes.engine.remote import targets
from gpunodes.engine.remote.targets import Target
from gpunodes.errors import WrongInput

_KIND = "redfish"
_REASONS = {"ipmi": "its UDP packets do not pass SSH", "wol": "its UDP packets do not pass SSH"}


def hops(machine: str, kind: str, settings: Mapping[str, Any]) -> tuple[Target, ...]:
    """The jump hosts of a machine's BMC, none without the setting.

    Raises WrongInput for a kind of BMC that cannot use them.
    """
    jump = str(settings["gpunodes_bmc_jump"] or "")
    if not jump:
        return ()
    if kind != _KIND:
        raise WrongInput(
            f"{machine} has gpunodes_bmc_jump, and its gpunodes_bmc_type is {kind}: "
            f"{_REASONS.get(kind, 'the command itself reaches the BMC')}",
            f"gpunodes_bmc_jump with the type {_KIND} only",
            f"use Redfish, or leave gpunodes_bmc_jump of {machine} empty",
        )
    found = targets.hops(jump, targets.ssh_config())
    if not (key := key_file(settings)):
        return found
    if not key.is_file():
        raise WrongInput(
            f"gpunodes_bmc_jump_key of {machine} is {str(key)!r}, which is no file", "a private key", "correct it"
        )
    return tuple(dataclasses.replace(hop, key_files=(str(key),), identities_only=True) for hop in found)


def key_file(settings: Mapping[str, Any]) -> Path | None:
    """The file with the private key for the jump hosts; None for those of the user and of the SSH agent."""
    text = str(settings["gpunodes_bmc_jump_key"] or "")
    return Path(text).expanduser() if text else None
