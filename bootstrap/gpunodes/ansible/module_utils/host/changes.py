"""The changes of one run, each recorded in the ledger before it is made."""

from __future__ import annotations

from dataclasses import dataclass, field

from .. import ledger
from ..report import Difference
from .spec import Spec


@dataclass
class Changes:
    """The changes made, or with ``check`` the changes that would be made: then nothing is changed."""

    spec: Spec
    check: bool = False
    ledger: ledger.Ledger = field(init=False)
    actions: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the requested packages after the run."""
    present: dict[str, str] = field(default_factory=dict)
    """Versions of the packages that were installed before."""
    notes: list[str] = field(default_factory=list)
    """What the user should know about the result."""
    reboot: str = ""
    """Why the machine must be rebooted to complete the changes, "" if no reboot is required."""

    def __post_init__(self) -> None:
        self.ledger = ledger.load(ledger.path_of(self.spec.section))

    def save(self) -> None:
        """Write the ledger to disk."""
        self.ledger.save(ledger.path_of(self.spec.section))

    def step(self, action: str, *differences: Difference) -> bool:
        """Record an action with its differences, and return whether to perform it.

        The ledger is on disk before the action.
        """
        self.actions.append(action)
        self.differences += differences
        if not self.check:
            self.save()
        return not self.check

    def note_restarts(self) -> None:
        """Record that the services must be restarted, because their files change."""
        for service in self.spec.services:
            self.ledger.note_restart(service.name)
