"""What the power server knows: the states of machines, which it writes before it acts on them, and their nodes."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping

from gpunodes.autoscale import decisions, nodes
from gpunodes.autoscale.decisions import World
from gpunodes.autoscale.kept_off import KeptOff
from gpunodes.autoscale.nodes import SeenNode
from gpunodes.autoscale.plan import Plan
from gpunodes.autoscale.state import MachineState, Phase
from gpunodes.autoscale.store import Overtaken, Store
from gpunodes.errors import GpunodesError, sentence

log = logging.getLogger(__name__)


class Memory:
    """States and nodes, which are read and changed by threads that hold ``_mutex``."""

    def __init__(self, plan: Plan, store: Store, now: Callable[[], float]) -> None:
        self.plan = plan
        self._store = store
        self._now = now
        self._states: dict[str, MachineState] = {}
        self._nodes: dict[str, SeenNode] = {}
        self._mutex = threading.RLock()
        self._locked: dict[str, tuple[float, str]] = {}
        """Machines that other commands held: until when they are not tried, and which command it was."""
        self._version = ""
        """That of the API server."""
        self._kept_off: dict[str, KeptOff] = {}
        self._foreign: set[str] = set()
        """Machines whose nodes are not certainly their own, which was logged."""
        self.overtaken = ""
        """Why this server must end, "" while it need not."""

    def _is_own(self, name: str, found: SeenNode) -> bool:
        """Whether a node is that of the plan's machine with its name; another one is left alone."""
        if not nodes.is_own(found, self.plan.machines[name]):
            if name not in self._foreign:
                log.warning("%s: %s", name, decisions.FOREIGN)
                self._foreign.add(name)
            return False
        self._foreign.discard(name)
        return True

    def _end(self, name: str, phase: Phase, after: MachineState) -> None:
        """Write what became of an order, unless the machine has another one by now."""
        with self._mutex:
            if self._states[name].phase is not phase:
                return
            if after.phase in (Phase.OFF, Phase.FAILED):
                self._nodes.pop(name, None)
            try:
                self._update({name: after})
            except GpunodesError as error:
                # It is repeated: what it did is done already.
                log.warning("%s: %s", name, sentence(error))

    def _world(self) -> World:
        now = self._now()
        locked = {name: why for name, (until, why) in self._locked.items() if now < until}
        return World(self.plan, self._states, self._nodes, now, self._foreign, locked, self._kept_off, self._version)

    def _changed(
        self, state: MachineState, phase: Phase, reason: str, error: str = "", used: float | None = None
    ) -> MachineState:
        now, used = self._now(), state.used if used is None else used
        served = now if state.phase is Phase.ON else state.served
        return dataclasses.replace(state, phase=phase, since=now, reason=reason, error=error, used=used, served=served)

    def _update(self, changes: Mapping[str, MachineState]) -> None:
        """Write states, and know them from then on."""
        if not changes:
            return
        try:
            self._store.write(changes)
        except Overtaken as error:
            self.overtaken = sentence(error)
            raise
        self._states.update(changes)
        for name, each in changes.items():
            log.info("%s: %s: %s", name, each.phase.value, each.error or each.reason)
