"""What is done to machines: orders that their states are, carried out by threads until they end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from gpunodes.autoscale import decisions, emptying, nodes
from gpunodes.autoscale.emptying import StillUsed
from gpunodes.autoscale.kept_off import StaysOff
from gpunodes.autoscale.memory import Memory
from gpunodes.autoscale.nodes import SeenNode
from gpunodes.autoscale.orders import Orders
from gpunodes.autoscale.plan import Plan
from gpunodes.autoscale.power import AlreadyOn, PoweredMachines, is_woken
from gpunodes.autoscale.state import MachineState, Phase
from gpunodes.autoscale.store import Store
from gpunodes.engine.cluster.errors import NoResponse, Refused
from gpunodes.engine.leases.errors import Held, Lost
from gpunodes.engine.locks import Taken
from gpunodes.engine.power import PowerState
from gpunodes.errors import GpunodesError, sentence

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
        self._before: dict[str, MachineState] = {}
        """The states of machines before starts that this server ordered, until those have begun."""
        self._begun: set[str] = set()
        """Machines that this server switched on, and saw on."""
        self._waited: set[str] = set()
        """Machines that are to be switched off, and that another command held before they were complete."""

    def _start(self, names: Sequence[str], reason: str) -> None:
        before = {name: self._states[name] for name in names}
        self._update(
            {name: self._changed(each, Phase.STARTING, reason, used=self._now()) for name, each in before.items()}
        )
        self._before.update(before)
        self._begun.difference_update(names)
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
                self._switch_on(name, state, again=again)
            elif state.phase in (Phase.STOPPING, Phase.GIVING_UP):
                self._switch_off(name, state, found)
        except StillUsed as error:
            log.warning("%s: %s", name, sentence(error))
            self._give_back(name)
            self._end(name, state.phase, self._changed(state, Phase.ON, sentence(error)))
        except StaysOff as found_off:
            self._end(name, state.phase, decisions.switched_off_by_user(state, found_off.made))
        except AlreadyOn:
            self._end(name, state.phase, self._changed(state, Phase.LEFT_ALONE, decisions.ON_WITHOUT_NODE))
        except (Held, Taken, Lost, NoResponse, Refused) as problem:
            self._not_now(name, state, problem)
            return
        except Exception as error:  # one odd machine must not end a thread without a word
            log.warning("%s: %s", name, sentence(error))
            self._end(name, state.phase, dataclasses.replace(state, error=sentence(error)))
            if self._orders.failed(name, error, known=bool(state.error)):
                reason = "NotSwitchedOn" if state.phase is Phase.STARTING else "NotSwitchedOff"
                self._store.event(name, reason, sentence(error), warning=True)
            self._before.pop(name, None)
            return
        self._before.pop(name, None)
        self._waited.discard(name)
        self._orders.succeeded(name)

    def _switch_on(self, name: str, state: MachineState, *, again: bool) -> None:
        # What was begun before may be repeated; else a machine that is on is someone else's.
        is_repeated = again and name not in self._before
        self._machines.switch_on(name, lambda: self._check_wanted(name), again=is_repeated)
        if not is_woken(self.plan.machines[name]):
            self._begun.add(name)
        self._store.event(name, "SwitchedOn", state.reason, warning=False)

    def _switch_off(self, name: str, state: MachineState, found: SeenNode | None) -> None:
        if state.phase is Phase.GIVING_UP and self._was_switched_off(name):
            self._end(name, state.phase, self._changed(state, Phase.BY_HAND, decisions.SWITCHED_OFF))
            return
        # The state stays as it was while the order fails: its reason is not written twice.
        last = state
        if state.phase is Phase.GIVING_UP and found is None:
            # Before it is switched off: then nothing shows any more why it did not register.
            last = decisions.unregistered(name, state, self._machines.kubelet(name), self._now())
        machine, boot_id = self.plan.machines[name], found.node.boot_id if found else ""
        # A machine that crashes again and again may have booted once more. Only a BMC shows that it is off for certain.
        may_go = functools.partial(nodes.may_go, machine=machine, boot_id=boot_id, any_boot=not is_woken(machine))
        self._machines.switch_off(name, lambda: self._release(name), lambda: self._store.delete_node(name, may_go))
        after = decisions.switched_off(last, self._now())
        self._end(name, state.phase, after)
        reason = "NeedsJoin" if last.needs_join else "SwitchedOff"
        self._store.event(name, reason, last.reason, warning=after.phase is Phase.FAILED)

    def _check_wanted(self, name: str) -> None:
        """Raise StaysOff if a user switched the machine off since the last look: its lock is held now."""
        if made := self._store.kept_off().get(name):
            raise StaysOff(made)

    def _was_switched_off(self, name: str) -> bool:
        """Whether a machine that this server switched on, and that did not come into service, is off by now."""
        return name in self._begun and self._machines.state(name) is PowerState.OFF

    def _not_now(self, name: str, state: MachineState, problem: GpunodesError) -> None:
        """Another command holds the machine, or the API does not respond or refuses: that is no failure of the machine.

        An order that was begun waits for the lock. A start that was not is withdrawn: the autoscaler, which sees the
        pool become smaller, takes another machine. One that is on by now is left to the other command.
        """
        why = sentence(problem)
        log.warning("%s: not now: %s", name, why)
        before = self._before.get(name)
        if state.phase is Phase.STARTING and before and isinstance(problem, Held | Taken):
            after = dataclasses.replace(before, reason=f"not now: {why}")
            if self._is_on(name):
                after = self._changed(before, Phase.LEFT_ALONE, f"someone else switches it on: {why}")
            with self._mutex:
                self._locked[name] = (self._now() + AGAIN_S, why)
                self._end(name, state.phase, after)
            self._before.pop(name, None)
            return
        self._orders.postpone(name)
        if state.phase is not Phase.STARTING:
            # A complete node is given up because no pod can use its GPUs: that it is complete later shows nothing.
            if isinstance(problem, Held | Taken) and self._lacks(name):
                self._waited.add(name)
            if state.error != why and not isinstance(problem, NoResponse):
                self._end(name, state.phase, dataclasses.replace(state, error=why))

    def _lacks(self, name: str) -> str:
        """What a machine lacked at the last look before pods may use it, "" if nothing."""
        with self._mutex:
            return decisions.lacks(self._world(), name)

    def _is_on(self, name: str) -> bool:
        with contextlib.suppress(GpunodesError):
            return self._machines.state(name) is PowerState.ON
        return False

    def _give_back(self, name: str) -> None:
        """Let pods return to a node that stays."""
        with self._mutex:
            machine = self.plan.machines[name]
        with contextlib.suppress(GpunodesError):
            self._store.change(name, lambda node: nodes.stays(node) if nodes.is_own(node, machine) else None)

    def _release(self, name: str) -> None:
        """Empty a machine that is switched off now, under its lock; raises StillUsed if it must stay on."""
        self._empty(name)
        # From here on it is this server that switches it off, also if it does not see the end of that.
        self._begun.discard(name)

    def _empty(self, name: str) -> None:
        """Keep new pods off a machine's node, and check that none is left; raises StillUsed if it must stay on."""
        found = self._store.seen_node(name)
        if found is None:
            return
        if not self._is_own(name, found):
            raise StillUsed("its node is that of another machine")
        with self._mutex:
            world = dataclasses.replace(self._world(), nodes={name: found})
            why = decisions.held(world, name)
            waited = name in self._waited and world.phase(name) is Phase.GIVING_UP
            if waited and not decisions.lacks(world, name):
                why = "its node became complete while another command held its lock"
        if why:
            raise StillUsed(why)
        emptying.keep_empty(self._store, name)
