"""What a command holds while it works on machines: their Leases, or a lock by SSH where there is no API to ask.

Whoever works on the control plane works alone (engine/leases.py). Such a command holds the lock by SSH as well: it may
take the API away, or make it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gpunodes.ansible.module_utils.gpunodes.identity import Matcher, reported
from gpunodes.engine import cluster as clusters
from gpunodes.engine import identities, leases, locks
from gpunodes.engine.cluster import Cluster, NoCluster, NoResponse, NoSession, Refused, Session
from gpunodes.errors import GpunodesError
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, PreflightFinding, Severity
from gpunodes.repair.policy import Node

PATIENCE_S = leases.DURATION_S
"""Seconds without an API after which a command goes on without: whoever holds a Lease has stopped by then."""


class Claim:
    """The locks of one command on its machines."""

    def __init__(
        self, session: Session, inventory: Inventory, machines: Sequence[Machine], command: str, *, alone: bool
    ) -> None:
        self._cluster = Cluster(session, patience_s=0.0)
        self._leases = leases.Leases(self._cluster, command)
        self._machines = machines
        # All of the inventory, as a repair knows them: both must come to the same name for a machine's Lease.
        self._addresses = {machine.name: machine.address for machine in inventory.machines()}
        self._known = identities.recall_all(inventory.cluster, self._addresses)
        self._alone = alone
        self._worked = locks.clock()
        """When the command was last at work on the control plane itself."""
        self._nodes: Sequence[Node] | None = None
        self.lock: locks.Lock | None = None
        self.findings: Sequence[PreflightFinding] = ()
        """What a user should know of the locks."""
        self.unasked: PreflightFinding | None = None
        """What a user should know while it goes on although nobody could be asked of late."""
        self._control = inventory.control_plane().name

    @property
    def holder(self) -> str:
        """Who we are, in a Lease."""
        return self._leases.me

    def take(self, on_wait: Callable[[GpunodesError], None] = lambda _: None) -> None:
        """Take the Leases of all machines; raises Held, and NoAnswer or Refused where no API can be asked.

        ``on_wait`` hears once why it takes its time.
        """
        deadline, waits = time.monotonic() + PATIENCE_S, False
        while True:
            try:
                nodes = self._cluster.nodes()
                self._leases.take_all(self._locked(nodes), alone=self._alone)
                self._nodes = nodes
                break
            except (NoCluster, NoSession):
                raise
            except (NoResponse, Refused) as problem:
                if time.monotonic() > deadline:
                    raise
                if not waits:
                    on_wait(problem)
                waits = True
                time.sleep(1)

    def take_more(self, facts: Mapping[str, Mapping[str, Any]]) -> None:
        """Take what turns out to be ours to take now that machines have reported who they are; raises as ``take``."""
        if self._nodes is None:
            return
        self._known |= {name: reported(name, self._addresses[name], each) for name, each in facts.items()}
        self._leases.take_all(self._locked(self._nodes), alone=self._alone)

    def lost(self, *, at_work: bool = False) -> GpunodesError | None:
        """Why our locks may be ours no more, None while they are.

        While the command is ``at_work`` on the control plane itself, and as long again as a Lease lives, it goes on
        where nobody can be asked: that is what it does to it. ``unasked`` tells that it does.
        """
        if at_work:
            self._worked = locks.clock()
        problems = [self.lock.lost() if self.lock else None, self._leases.lost()]
        unsure = [each for each in problems if isinstance(each, leases.Unsure | locks.Unresponsive)]
        sure = next((each for each in problems if each and each not in unsure), None)
        goes_on = unsure and not sure and self._alone and locks.clock() - self._worked < PATIENCE_S
        self.unasked = _unasked(self._control) if goes_on else None
        return sure or (None if goes_on else next(iter(unsure), None))

    def close(self) -> None:
        """Let all of it go."""
        self._leases.put_back()
        self._leases.close()

    def _locked(self, nodes: Sequence[Node]) -> list[str]:
        """The names to lock: each machine's node, its own name, and the one that it would join by.

        The node's is the one that repairs take; it may go, or come, while we work.
        """
        names = set()
        matcher = Matcher([node.identity for node in nodes], self._known.values())
        for machine in (self._known[each.name] for each in self._machines):
            node = matcher.match(machine, sure=False).node
            names |= {machine.name, machine.hostname or machine.name, node.name if node else machine.name}
        return [name.lower() for name in names]


@contextlib.contextmanager
def claimed(
    inventory: Inventory,
    machines: Sequence[Machine],
    command: str,
    on_wait: Callable[[PreflightFinding], None] = lambda _: None,
) -> Iterator[Claim]:
    """Hold what a command on ``machines`` must hold, while inside; ``on_wait`` hears what is waited for.

    Raises Held or Taken when somebody works on one of them already, and NoSession or NoLock when the control plane's
    machine cannot be asked.
    """
    control = inventory.control_plane()
    variables = inventory.connection(control.name)
    alone = control.name in {machine.name for machine in machines}
    with contextlib.ExitStack() as held:
        session = Session(clusters.over_ssh(control.address, variables))
        held.callback(session.close)
        claim = Claim(session, inventory, machines, command, alone=alone)
        held.callback(claim.close)
        without = False
        try:
            claim.take(lambda problem: on_wait(_waiting(control.name, problem)))
        except NoCluster:
            without = True
        except NoSession:
            raise
        except (NoResponse, Refused) as problem:
            without = True
            claim.findings = [_unlocked(control.name, problem)]
        if without or alone:
            lock = locks.hold(control.address, variables, command, claim.holder, restarts=alone)
            claim.lock = held.enter_context(lock)
        yield claim


def _waiting(control: str, problem: GpunodesError) -> PreflightFinding:
    return PreflightFinding(
        control,
        "lock",
        f"the API does not answer yet: {problem.found}",
        "an API that answers",
        f"{PATIENCE_S:.0f} s at most are waited for it",
        Severity.WARNING,
    )


def _unasked(control: str) -> PreflightFinding:
    return PreflightFinding(
        control,
        "lock",
        "it is itself worked on, and does not answer: going on without its locks until it does",
        "an API that answers",
        f"where it stays away for {PATIENCE_S:.0f} s after that work, the run ends",
        Severity.WARNING,
    )


def _unlocked(control: str, problem: GpunodesError) -> PreflightFinding:
    return PreflightFinding(
        control,
        "lock",
        f"no Leases can be taken: {problem.found}; a lock on this machine keeps other commands away",
        "an API that answers",
        "bring it back first, if that is not what this is for",
        Severity.WARNING,
    )
