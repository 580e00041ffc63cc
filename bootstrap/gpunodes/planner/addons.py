"""What an update of an add-on would change, from what the control plane reports. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PlannedAddon:
    """A DaemonSet of an add-on that is installed."""

    name: str
    wanted: Sequence[str]
    """Its images in this gpunodes."""
    running: Mapping[str, int]
    """The number of nodes by image."""
    changes: Sequence[str]
    """Objects of the add-on that would change."""
    behind: Sequence[str]
    """Nodes whose pod is of an earlier version or does not run."""

    @property
    def needed(self) -> bool:
        """Whether there is anything to update, or to wait for."""
        return bool(self.changes or self.behind)


def planned(report: Mapping[str, Any]) -> PlannedAddon:
    """The add-on of a row of the result of addon_pending, whose form was checked."""
    return PlannedAddon(report["name"], report["wanted"], report["running"], report["changes"], report["behind"])
