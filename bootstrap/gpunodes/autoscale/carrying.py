"""What is done to machines: orders that their states are, carried out by threads until they end."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from gpunodes.autoscale import decisions, emptying
from gpunodes.autoscale.emptying import StillUsed
from gpunodes.autoscale.memory import Memory
from gpunodes.autoscale.orders import Orders
from gpunodes.autoscale.plan import Plan
from gpunodes.autoscale.power import AlreadyOn, PoweredMachines
from gpunodes.autoscale.state import MachineState, Phase
from gpunodes.autoscale.store import Store
from gpunodes.errors import sentence

log = logging.getLogger(__name__)
AGAIN_S = 60.0
"""Seconds after which an order that failed, or a question to a BMC, is repeated."""


class Carrier(Memory):
    """Starts and stops machines, each by one order at a time."""

    def __init__(
        self, plan: Plan, store: Store, machines: PoweredMachines, now: Callable[[], float] = time.time
    ) -> None:
        super().__init__(plan, store, now)
        self._machines = machines
        self._orders = Orders(self._carry_out, AGAIN_S)

    def _start(self, names: Sequence[str], reason: str) -> None:
        self._update(
            {name: self._changed(self._states[name], Phase.STARTING, reason, used=self._now()) for name in names}
        )
        for name in names:
            self._orders.give(name)

    def _stop(self, changes: Mapping[str, MachineState]) -> None:
        changed = {}
        for name, state in changes.items():
            found = self._nodes.get(name)
            in_service = found and not found.is_starting and found.node.ready
            changed[name] = dataclasses.replace(
                state, saved=found.saved(self.plan.state_bytes) if found and in_service else state.saved
            )
        self._update(changed)
        for name in changed:
            self._orders.give(name)

    def _carry_out(self, name: str, again: bool) -> None:
        """Carry out the order that a machine's state is; an order that fails stays, with its error."""
        with self._mutex:
            state, found = self._states.get(name), self._nodes.get(name)
        if state is None:  # it left the plan meanwhile
            return
        try:
            if state.phase is Phase.STARTING:
                self._machines.switch_on(name, again=again)
                self._store.event(name, "SwitchedOn", state.reason, warning=False)
            elif state.phase in (Phase.STOPPING, Phase.GIVING_UP):
                # The state stays as it was while the order fails: its reason is not written twice.
                last = state
                if state.phase is Phase.GIVING_UP and found is None:
                    # Before it is switched off: then nothing shows any more why it did not register.
                    last = decisions.unregistered(name, state, self._machines.kubelet(name), self._now())
                boot_id = found.node.boot_id if found else ""
                self._machines.switch_off(
                    name, lambda: self._empty(name), lambda: self._store.delete_node(name, boot_id)
                )
                after = decisions.switched_off(last, self._now())
                self._end(name, state.phase, after)
                reason = "NeedsJoin" if last.needs_join else "SwitchedOff"
                self._store.event(name, reason, last.reason, warning=after.phase is Phase.FAILED)
        except StillUsed as error:
            log.warning("%s: %s", name, sentence(error))
            self._end(name, state.phase, self._changed(state, Phase.ON, sentence(error)))
        except AlreadyOn:
            self._end(name, state.phase, self._changed(state, Phase.BY_HAND, decisions.ON_WITHOUT_NODE))
        except Exception as error:  # one odd machine must not end a thread without a word
            log.warning("%s: %s", name, sentence(error))
            self._end(name, state.phase, dataclasses.replace(state, error=sentence(error)))
            if self._orders.failed(name, error, known=bool(state.error)):
                reason = "NotSwitchedOn" if state.phase is Phase.STARTING else "NotSwitchedOff"
                self._store.event(name, reason, sentence(error), warning=True)
            return
        self._orders.succeeded(name)

    def _empty(self, name: str) -> None:
        """Keep new pods off a machine's node, and check that none is left; raises StillUsed if it must stay on."""
        found = self._store.seen_node(name)
        if found is None:
            return
        if not self._is_own(name, found):
            raise StillUsed("its node is that of another machine")
        with self._mutex:
            why = decisions.held(dataclasses.replace(self._world(), nodes={name: found}), name)
        if why:
            raise StillUsed(why)
        emptying.keep_empty(self._store, name)
