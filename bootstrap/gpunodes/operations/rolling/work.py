"""What a roll-out does to a machine: the interface of all works."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gpunodes.errors import GpunodesError
from gpunodes.model import Machine, Role
from gpunodes.repair.policy import Node
from gpunodes.rollout.record import Disruption


class Stopped(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """The command was interrupted, or lost a lock, during a stage; the roll-out can be resumed."""

    def __init__(self, found: str = "interrupted") -> None:
        super().__init__(found, remedy="`gpunodes rollout resume` continues")


@dataclass(frozen=True, slots=True)
class Target:
    """A machine, as a work gets it."""

    machine: Machine
    node: Node | None = None
    """Its node, as it was read last."""
    report: Callable[[str], None] = lambda _: None
    """Show a line about it to the user."""
    should_stop: Callable[[], bool] = field(default=threading.Event().is_set)
    """Whether a long action must end soon: the user stopped the command, or the machine's lock may be lost."""

    @property
    def name(self) -> str:
        return self.machine.name

    @property
    def address(self) -> str:
        return self.machine.address

    @property
    def role(self) -> Role:
        return self.machine.role


class Work(Protocol):
    """A work. Its state is that of machine and cluster: each method may be called again after any interruption.

    ``prepare``, ``apply`` and ``undo`` raise GpunodesError when they fail, and Stopped when they ended early because
    ``should_stop`` of the target became true. They run in parallel for several machines.
    """

    @property
    def name(self) -> str:
        """Its name in operations/rolling/works.py."""

    @property
    def disrupts(self) -> Disruption:
        """Which pods are evicted before it."""

    @property
    def parameters(self) -> Mapping[str, str]:
        """What its class in ``works`` needs to make it again in another command; no secrets."""

    @property
    def undoes(self) -> bool:
        """Whether ``undo`` can undo it."""

    def needed(self, target: Target) -> str:
        """What there is to do on a machine, "" for nothing: read from the machine or the cluster, changing nothing."""

    def prepare(self, target: Target) -> None:
        """Fetch what ``apply`` needs, before pods are evicted; a failure leaves the machine as it was."""

    def apply(self, target: Target) -> None:
        """Do the work."""

    def verify(self, target: Target) -> str:
        """What is wrong after the work, "" for nothing. Node and GPUs are verified by the roll-out itself."""

    def undo(self, target: Target) -> None:
        """Undo a work that failed."""
