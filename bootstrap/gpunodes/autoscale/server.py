"""The power server: the answers to the autoscaler, and what it does between them.

Answers come from memory; an order is written to the cluster before it is carried out (``carrying.py``). So a
server that was killed goes on where it was: it reads the orders, and repeats those whose end it does not see.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from gpunodes.ansible.module_utils.scaling import PROVIDER
from gpunodes.autoscale import decisions, nodes, proof
from gpunodes.autoscale.carrying import AGAIN_S, Carrier
from gpunodes.autoscale.decisions import Size
from gpunodes.autoscale.nodes import SeenNode
from gpunodes.autoscale.orders import Orders
from gpunodes.autoscale.plan import NodeShape, Plan
from gpunodes.autoscale.power import PoweredMachines, is_woken
from gpunodes.autoscale.proof import NotProven
from gpunodes.autoscale.questions import Questions
from gpunodes.autoscale.state import MachineState, Phase
from gpunodes.autoscale.store import Store
from gpunodes.engine.power import PowerState
from gpunodes.errors import GpunodesError, sentence
from gpunodes.planner import versions

log = logging.getLogger(__name__)
_UNKNOWN = PowerState.UNKNOWN
_PROVEN_AGAIN_S = 600.0
"""Seconds after which GPUs of a node that failed their proof get another one, in the same boot."""


class NotPossible(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """The autoscaler asked for what cannot be done now."""


class PowerServer(Carrier):
    """All methods may be called from any thread. Those for the autoscaler raise NotPossible."""

    def __init__(
        self, plan: Plan, store: Store, machines: PoweredMachines, now: Callable[[], float] = time.time
    ) -> None:
        super().__init__(plan, store, machines, now)
        self._proofs = Orders(self._prove, 0.0, proof.AT_ONCE)
        self._questions = Questions(machines.state, AGAIN_S)
        self._not_ready: dict[str, float] = {}
        """Since when the node of a machine that is on is not ready, by ``now``."""
        self._seen_off: set[str] = set()
        """Machines whose node is not ready, and whose BMC last said that they are off."""
        self._not_proven: dict[str, tuple[str, float]] = {}
        """The boot in which the GPUs of a node failed their last proof, and when."""

    # For the autoscaler

    def size(self, pool: str) -> Size:
        """The size of a pool."""
        with self._mutex:
            self._known(pool)
            return decisions.size(self._world(), pool)

    def pool_of(self, provider: str, node: str = "") -> str:
        """As ``planned_pool``, and "" for a node that is apart from its pool."""
        with self._mutex:
            is_in_pool = decisions.is_in_pool(self._world(), provider.removeprefix(PROVIDER))
            return self.planned_pool(provider, node) if is_in_pool else ""

    def planned_pool(self, provider: str, node: str = "") -> str:
        """The pool of a node with a provider id, "" for a node of no pool that scales.

        Root on a node may give it the provider id of another machine, which would be switched off with it. Of an
        instance without a node the autoscaler gives the provider id as its name, too.
        """
        name = provider.removeprefix(PROVIDER)
        machine = self.plan.machines.get(name)
        is_own = provider.startswith(PROVIDER) and node in {"", name, provider}
        return machine.pool if machine and is_own else ""

    def instances(self, pool: str) -> Sequence[tuple[str, MachineState]]:
        """The machines of a pool that are on or change, with their states."""
        with self._mutex:
            self._known(pool)
            world = self._world()
            return [(name, self._states[name]) for name in self.plan.of_pool[pool] if decisions.is_in_pool(world, name)]

    def template(self, pool: str) -> NodeShape:
        """What pods would see of a new node of a pool."""
        with self._mutex:
            self._known(pool)
            return decisions.template(self._world(), pool)

    def increase(self, pool: str, count: int) -> None:
        """Switch on machines of a pool."""
        with self._mutex:
            self._known(pool)
            now = decisions.size(self._world(), pool)
            if not 0 < count <= now.most - now.target:
                raise NotPossible(
                    f"the pool {pool} has {now.target} machines on, and {count} more were asked for",
                    f"at most {now.most}",
                    "",
                )
            names = decisions.to_start(self._world(), pool, count)
            if len(names) < count:
                raise NotPossible(
                    f"the pool {pool} has {len(names)} machines that can be switched on",
                    f"{count}",
                    "see `gpunodes autoscale status`",
                )
            self._start(names, "a pod waits for it")

    def delete(self, pool: str, providers: Sequence[str]) -> None:
        """Switch off machines whose nodes the autoscaler has drained, or that did not start; all of them or none."""
        with self._mutex:
            self._known(pool)
            world, changes = self._world(), {}
            for provider in providers:
                name = provider.removeprefix(PROVIDER)
                if self.planned_pool(provider) != pool or name not in self._states:
                    raise NotPossible(f"{provider} is no machine of the pool {pool}", "", "")
                state = self._states[name]
                if name in self._foreign or state.phase in (Phase.BY_HAND, Phase.LEFT_ALONE):
                    raise NotPossible(f"{name} stays as it is: {decisions.unusable(world, name)}", "", "")
                if why := decisions.held(world, name):
                    raise NotPossible(f"{name} stays on: {why}", "a node that nobody holds", "")
                if state.phase is Phase.ON:
                    changes[name] = self._changed(state, Phase.STOPPING, "nothing needs it")
                elif state.phase is Phase.STARTING:
                    changes[name] = self._changed(state, Phase.GIVING_UP, decisions.late(world, name))
            self._stop(changes)

    def decrease(self, pool: str, count: int) -> None:
        """Give up starts whose machines have no node yet."""
        with self._mutex:
            self._known(pool)
            world = self._world()
            starting = [
                name
                for name in self.plan.of_pool[pool]
                if world.phase(name) is Phase.STARTING and name not in self._nodes and name not in self._foreign
            ]
            if not 0 < count <= len(starting):
                raise NotPossible(f"the pool {pool} has {len(starting)} machines that start", f"{count}", "")
            changed = {
                name: self._changed(self._states[name], Phase.STOPPING, "it is needed no longer")
                for name in sorted(starting, key=lambda name: -self._states[name].since)[:count]
            }
            self._stop(changed)

    def _known(self, pool: str) -> None:
        if pool not in self.plan.pools:
            raise NotPossible(f"there is no pool {pool}", ", ".join(sorted(self.plan.pools)), "")

    # Between the answers

    def begin(self) -> None:
        """Read the states that the last server left."""
        with self._mutex:
            found = self._store.states()
            self._states = {name: each for name, each in found.items() if name in self.plan.machines}
            if gone := sorted(set(found) - set(self.plan.machines)):
                # A machine that left its pool is nobody's to switch.
                self._store.write(dict.fromkeys(gone))
        self.look()

    def replan(self, plan: Plan) -> None:
        """Go on with another plan: machines that are in it no longer are forgotten, and stay as they are."""
        with self._mutex:
            self.plan = self._machines.plan = plan
            gone = [name for name in self._states if name not in plan.machines]
            if gone:
                self._store.write(dict.fromkeys(gone))
                for name in gone:
                    del self._states[name]

    def look(self) -> None:
        """Look at all nodes, change what follows from them, and repeat orders that did not end."""
        with self._mutex:
            before = dict(self._states)
        found, kept_off, version = self._store.seen_nodes(), self._store.kept_off(), self._store.api_version()
        with self._mutex:
            # Of a machine whose order ended meanwhile the node was read before that, and may be deleted by now.
            moved = {name for name, state in self._states.items() if before.get(name) is not state}
            found = {name: each for name, each in found.items() if name not in moved}
            found |= {name: each for name, each in self._nodes.items() if name in moved}
            ended = self._kept_off.keys() - kept_off.keys()
            self._kept_off, self._version = kept_off, version
            self._nodes = {
                name: each for name, each in found.items() if name in self.plan.machines and self._is_own(name, each)
            }
            self._foreign.intersection_update(found)
            self._ask(found)
            self._switched_on(name for name in self._in_phase(Phase.BY_HAND) if name in ended)
            world = self._world()
            self._update({
                name: after
                for name, before in self._states.items()
                if (after := decisions.observed(world, name)) is not before
            })  # fmt: skip
            world = self._world()
            for name in decisions.overdue(world):
                self._stop({name: self._changed(self._states[name], Phase.GIVING_UP, decisions.late(world, name))})
            self._start(
                decisions.unused(self._world()), "it was off for 30 days: its certificate is renewed while it is on"
            )
            repeated = [name for name in self._states if self._is_left(name)]
            over = [name for name in kept_off if name in self._nodes and not world.switched_off(name)]
        for name in repeated:
            self._orders.give(name, again=True)
        for name in over:
            self._store.keep_off(name, None)
        for name, each in list(self._nodes.items()):
            self._mark(name, each)

    def _ask(self, found: Collection[str]) -> None:
        """Ask BMCs about machines whose nodes do not show whether they are on; ``found`` are the names of all nodes."""
        unknown = [name for name in self.plan.machines if name not in self._states and name not in found]
        alone = [name for name in self._in_phase(Phase.LEFT_ALONE) if name not in found]
        off = [name for name in self._in_phase(Phase.BY_HAND) if name not in self._kept_off]
        lost = self._lost()
        answers = self._questions.answers({*unknown, *lost, *alone, *off})
        silent = {name: self._questions.why(name) for name, answer in answers.items() if answer is _UNKNOWN}
        is_on = {name: answers[name] is PowerState.ON for name in unknown if name in answers and name not in silent}
        self._update(dict(decisions.adopted(self._world(), is_on, silent)))
        self._update({
            name: told
            for name in alone
            if answers.get(name, PowerState.OFF) is not PowerState.OFF
            and (told := decisions.still_alone(self._states[name], silent.get(name, ""))) != self._states[name]
        })  # fmt: skip
        self._switched_on(name for name in off if answers.get(name) is PowerState.ON)
        for name in (name for name in (*lost, *alone) if answers.get(name) is PowerState.OFF):
            state = self._states[name]
            after = self._changed(state, Phase.OFF, decisions.FOUND_OFF)
            if name in lost and is_woken(self.plan.machines[name]):
                # The network does not tell a machine that is off from one whose kernel has stopped.
                after = dataclasses.replace(state, error=decisions.OFF_OR_HANGS)
            elif name in lost:
                # One that `gpunodes power NAME cycle` switches is off for seconds.
                by_hand = self._changed(state, Phase.BY_HAND, decisions.SWITCHED_OFF)
                after = by_hand if name in self._seen_off else state
            if after != state:
                self._update({name: after})
        was_off = dict.fromkeys(self._seen_off, PowerState.OFF)
        self._seen_off = {name for name in lost if (was_off | answers).get(name) is PowerState.OFF}

    def _switched_on(self, names: Iterable[str]) -> None:
        """Note that someone switched on machines that stayed off: they are off on purpose no longer, ready or not."""
        self._update({
            name: self._changed(self._states[name], Phase.LEFT_ALONE, decisions.SWITCHED_ON) for name in names
        })  # fmt: skip

    def _in_phase(self, phase: Phase) -> list[str]:
        return [name for name, each in self._states.items() if each.phase is phase]

    def _is_left(self, name: str) -> bool:
        """Whether an order of a machine is to be repeated. A start is not: the autoscaler takes another machine."""
        phase = self._states[name].phase
        unfinished = phase in (Phase.STARTING, Phase.STOPPING, Phase.GIVING_UP)
        return unfinished and self._orders.is_due(name, once=phase is Phase.STARTING)

    def _mark(self, name: str, found: SeenNode) -> None:
        """Give a node back what it had, prove its GPUs when it offers them, and mark it while others hold it."""
        with self._mutex:
            state, world = self._states.get(name), self._world()
            why, more = decisions.held(world, name), decisions.too_many(world, name)
            unserved = decisions.unserved(world, name)
            if state and unserved:
                self._update({name: dataclasses.replace(state, error=unserved)})
            serves = found.is_starting and not more and not decisions.lacks(world, name)
        if state is None or state.phase in (Phase.STOPPING, Phase.GIVING_UP):
            return
        saved = state.saved
        try:
            if unserved:
                self._store.event(name, "NotInService", unserved, warning=True)
            if nodes.kept_free(found, more):
                self._store.change(name, lambda node: nodes.kept_free(node, more))
                if more:
                    self._store.event(name, "MoreGpus", more, warning=True)
            if found.is_starting and saved and nodes.restored(found, saved):
                self._store.change(name, lambda node: nodes.restored(node, saved))
            if serves and self._proofs.is_due(name, once=False) and not self._failed_lately(found):
                self._proofs.give(name, again=True)
            if state.phase is Phase.ON and any(each["key"] == nodes.STOPPING for each in found.taints):
                self._give_back(name)
            if nodes.kept_on(found, why):
                self._store.change(name, lambda node: nodes.kept_on(node, why))
        except GpunodesError as error:
            log.warning("%s: %s", name, sentence(error))

    def _prove(self, name: str, _again: bool) -> None:
        """Go on with the proof of a node that starts, and lift its taint at the end; no other node waits for it."""
        found = self._nodes.get(name)
        try:
            if found and found.is_starting and self._is_proven(name, found):
                self._store.change(name, lambda node: nodes.lifted(node, found.node.boot_id))
                self._store.event(name, "InService", "a pod has used its GPUs: others may now", warning=False)
        except Exception as error:  # one odd node must not end a thread without a word
            log.warning("%s: %s", name, sentence(error))

    def _is_proven(self, name: str, found: SeenNode) -> bool:
        """Whether a pod has used the GPUs of a node that is still to start; a failed one is its machine's error."""
        try:
            if why := versions.too_old(found.kubelet, self._version):
                raise NotProven(f"{why}: {decisions.upgraded(name)}")
            waits = proof.proven(self._store, found, self.plan.proof_image)
            return not waits and self._states[name].phase not in (Phase.STOPPING, Phase.GIVING_UP)
        except NotProven as error:
            log.warning("%s: %s", name, sentence(error))
            with self._mutex:
                self._not_proven[name] = (found.node.boot_id, self._now())
                # Also of one that someone else switched on: it is on, and no pod gets it.
                if (state := self._states[name]).phase in (Phase.STARTING, Phase.ON):
                    self._update({name: dataclasses.replace(state, error=sentence(error), kubelet=found.kubelet)})
            if state.phase is Phase.ON and not state.error:
                self._store.event(name, "NotProven", sentence(error), warning=True)
            return False

    def _failed_lately(self, found: SeenNode) -> bool:
        boot_id, failed = self._not_proven.get(found.node.name, ("", 0.0))
        return boot_id == found.node.boot_id and self._now() - failed < _PROVEN_AGAIN_S

    def _lost(self) -> list[str]:
        """Machines that are on, and whose node has not been ready for a while: someone may have switched them off.

        Not those that a repair or a roll-out works on: it switches them itself.
        """
        now, is_on = self._now(), {*self._in_phase(Phase.ON), *self._in_phase(Phase.LEFT_ALONE)}
        bad = [
            name
            for name, each in self._nodes.items()
            if name in is_on and not each.node.ready and not decisions.is_worked_on(each.node)
        ]
        self._not_ready = {name: self._not_ready.get(name, now) for name in bad}
        return [name for name in bad if now - self._not_ready[name] >= AGAIN_S]
