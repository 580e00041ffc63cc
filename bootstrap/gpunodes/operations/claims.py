"""The locks of a command that changes machines: their Leases, or an SSH lock if there is no API or no cluster.

A command on a control plane excludes all other commands (engine/leases/). It also holds the SSH lock, since it may
stop the API, or create it. A command that finds no API takes its Leases as soon as there is one: what works in the
cluster, as the power server of pools that scale, sees only those.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.engine import control_planes, group_lock, identities, locks
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.errors import NoCluster, NoResponse, NoSession, OtherCluster, Refused
from gpunodes.engine.cluster.session import Session
from gpunodes.engine.leases.errors import Held, Unsure
from gpunodes.engine.leases.held import DURATION_S, Leases
from gpunodes.errors import GpunodesError
from gpunodes.identity.matcher import Matcher
from gpunodes.identity.model import reported
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, PreflightFinding, Severity
from gpunodes.repair.policy import Node

_PARALLEL = 32
"""SSH connections that are opened at once."""
PATIENCE_S = DURATION_S
"""Seconds without an API after which a command continues without it: any holder of a Lease has stopped by then."""

_LATE_S = 15.0
"""Seconds between two attempts to take the Leases of a command that began without an API."""

_NOT_ALLOWED = frozenset({401, 403})
"""Statuses for credentials that have ended, or that have not the rights."""


class Claim:
    """The locks of one command on its machines."""

    def __init__(self, session: Session, inventory: Inventory, machines: Sequence[Machine], command: str) -> None:
        self._session = session
        self._inventory = inventory
        self._cluster = Cluster(session, patience_s=0.0)
        self._leases = Leases(self._cluster, command)
        self._machines = machines
        # The whole inventory, as for repairs: both must derive the same Lease name for a machine.
        self._addresses = {machine.name: machine.address for machine in inventory.machines()}
        self._known = identities.recall_all(inventory.cluster, self._addresses)
        controls = [] if inventory.kubeconfig else inventory.control_planes()
        self._changed = [each.name for each in controls if each.name in {machine.name for machine in machines}]
        """The control planes that the command changes."""
        self._total = len(controls)
        self._worked = locks.clock()
        """When the command last worked on a control plane."""
        self._nodes: Sequence[Node] | None = None
        """The nodes when the Leases were taken; None before that."""
        self._mutex = threading.Lock()
        """Held while Leases are taken: which ones follows from ``_known`` and ``_nodes``."""
        self._end = threading.Event()
        """The Leases are not to be taken any more."""
        self._refused: Held | None = None
        """Why a machine's Lease could not be taken late: another command holds it."""
        self.lock: group_lock.GroupLock | None = None
        self.findings: Sequence[PreflightFinding] = ()
        """Warnings about the locks."""
        self.unrenewed: PreflightFinding | None = None
        """The warning while the command continues although its locks cannot be renewed."""

    @property
    def exclusive(self) -> bool:
        """Whether the command changes a control plane."""
        return bool(self._changed)

    @property
    def choice(self) -> control_planes.Choice:
        """The control plane that the run uses."""
        return control_planes.used(self._inventory, self._session)

    @property
    def holder(self) -> str:
        """The identity of this command in Leases."""
        return self._leases.holder

    def take(self, on_wait: Callable[[GpunodesError], None] = lambda _: None) -> None:
        """Take the Leases of all machines; raises Held, and NoResponse or Refused if the API cannot be used.

        ``on_wait`` is called once with the reason if it has to wait.
        """
        deadline, waited = time.monotonic() + PATIENCE_S, False
        while True:
            try:
                nodes = self._cluster.nodes()
                self._take_all(nodes)
                self._nodes = nodes
                break
            except (NoCluster, NoSession, OtherCluster):
                raise
            except (NoResponse, Refused) as problem:
                if time.monotonic() > deadline:
                    raise
                if not waited:
                    on_wait(problem)
                waited = True
                time.sleep(1)

    def take_more(self, facts: Mapping[str, Mapping[str, Any]], *, lock_only: bool = False) -> None:
        """Take the Leases that follow from the identities in ``facts``; raises like ``take``.

        ``lock_only``: release all Leases instead, and keep the lock over SSH, which excludes every other command, too.
        """
        if lock_only:
            self.close()
            return
        with self._mutex:
            self._known |= {name: reported(name, self._addresses[name], each) for name, each in facts.items()}
            if self._nodes is not None:
                self._take_all(self._nodes)

    def take_late(self) -> None:
        """Take the Leases in the background, as soon as the API responds; until then the lock over SSH is the lock."""
        threading.Thread(target=self._keep_trying, daemon=True).start()

    def _keep_trying(self) -> None:
        refused = 0
        while not self._end.wait(_LATE_S):
            try:
                nodes = self._cluster.nodes()
                with self._mutex:
                    if not self._end.is_set():
                        self._take_all(nodes)
                        self._nodes = nodes
                if self._end.is_set():
                    # The command has ended without waiting for this.
                    self._leases.release_all()
                return
            except Held as problem:
                # Work on other machines, which began with the API, is waited for. A command that finds the lock over
                # SSH releases its Leases again: only the second refusal counts.
                refused = refused + 1 if problem.what.lower() in self._locked(nodes) else 0
                if refused > 1:
                    self._refused = problem
                    return
            except GpunodesError:
                # The program of the connection has read the kubeconfig once; there may be another one by now.
                self._session.close()

    def _take_all(self, nodes: Sequence[Node]) -> None:
        self._leases.take_all(self._locked(nodes), alone=self.exclusive, stops_api=self._may_stop_api(nodes))

    def lost(self, *, at_work: bool = False) -> GpunodesError | None:
        """Why the locks may be lost, None while they are held.

        While the command is ``at_work`` on a control plane, and for the duration of a Lease after that, it continues
        without a responding API if that work may have stopped it: if too few other control planes are left for etcd.
        ``unrenewed`` is the warning about it.
        """
        if at_work:
            self._worked = locks.clock()
        # Without nodes the lock over SSH is the lock, also while a first attempt to take Leases is not complete.
        leases = self._leases.lost() if self._nodes is not None else self._refused
        problems = [self.lock.lost() if self.lock else None, leases]
        unsure = [each for each in problems if isinstance(each, Unsure | locks.Unresponsive)]
        sure = next((each for each in problems if each and each not in unsure), None)
        continues = (
            unsure and not sure and self._may_stop_api(self._nodes) and locks.clock() - self._worked < PATIENCE_S
        )
        self.unrenewed = _unrenewed(self._changed[0]) if continues else None
        return sure or (None if continues else next(iter(unsure), None))

    def _may_stop_api(self, nodes: Sequence[Node] | None) -> bool:
        """Whether the API may stop because the command changes control planes; ``nodes`` are None without an API."""
        total = self._total if nodes is None else sum(node.control_plane for node in nodes)
        return self.exclusive and total - len(self._changed) <= total // 2

    def close(self) -> None:
        """Release the Leases."""
        self._end.set()
        # While the thread takes Leases: not for its other requests, to which a hung machine may not respond.
        if self._mutex.acquire(timeout=PATIENCE_S):
            self._mutex.release()
        self._leases.release_all()
        self._leases.close()

    def _locked(self, nodes: Sequence[Node]) -> list[str]:
        """The names to lock: each machine's node, its own name, and the name by which it would join.

        Repairs lock the node's name; the node may be deleted or created in the meantime. A machine can report the host
        name of another one: the lock of that one is not taken.
        """
        names: set[str] = set()
        matcher = Matcher([node.identity for node in nodes], self._known.values())
        for machine in (self._known[each.name] for each in self._machines):
            node = matcher.match(machine, confirmed=False).node
            names |= {machine.name, node.name if node else machine.name}
            if machine.hostname and not matcher.owner_of_hostname(machine):
                names.add(machine.hostname)
        return [name.lower() for name in names]


class HostClaim:
    """The locks of one command on GPU hosts, which have no cluster: an SSH lock on each machine."""

    holder = ""
    findings: Sequence[PreflightFinding] = ()

    def __init__(self, held: Mapping[str, locks.Lock]) -> None:
        self._held = held
        self._worked = locks.clock()
        self.unrenewed: PreflightFinding | None = None
        """As in ``Claim``."""

    def take_more(self, facts: Mapping[str, Mapping[str, Any]], *, lock_only: bool = False) -> None:
        """Nothing: these locks are on the machines themselves, by whatever name a command knows them."""

    def lost(self, *, at_work: bool = False) -> GpunodesError | None:
        """As ``Claim.lost``, with ``at_work`` on one of the machines, which may reboot it."""
        if at_work:
            self._worked = locks.clock()
        lost = {name: problem for name, lock in self._held.items() if (problem := lock.lost())}
        sure = next((each for each in lost.values() if not isinstance(each, locks.Unresponsive)), None)
        continues = lost and not sure and locks.clock() - self._worked < PATIENCE_S
        self.unrenewed = _unrenewed(next(iter(lost))) if continues else None
        return sure or (None if continues else next(iter(lost.values()), None))


@contextlib.contextmanager
def claimed_hosts(inventory: Inventory, machines: Sequence[Machine], command: str) -> Iterator[HostClaim]:
    """Hold the locks of a command on GPU hosts while inside.

    Raises Taken if another command works on one of them, and NoLock if one does not respond; then none is held.
    """

    def hold(machine: Machine) -> contextlib.AbstractContextManager[locks.Lock]:
        return locks.hold(
            machine.address, inventory.connection(machine.name), command, restarts=True, machine=machine.name
        )

    with contextlib.ExitStack() as held:
        # All are tried, so that those that were taken are released if another one was not.
        with ThreadPoolExecutor(max_workers=_PARALLEL) as pool:
            found = {machine.name: pool.submit(held.enter_context, hold(machine)) for machine in machines}
        yield HostClaim({name: future.result() for name, future in found.items()})


@contextlib.contextmanager
def claimed(
    inventory: Inventory,
    machines: Sequence[Machine],
    command: str,
    on_wait: Callable[[PreflightFinding], None] = lambda _: None,
) -> Iterator[Claim]:
    """Hold the locks of a command on ``machines`` while inside; ``on_wait`` is called with the reason for a wait.

    Raises Held or Taken if another command works on one of them, NoSession or NoLock if too few control-plane machines
    respond, and OtherCluster if only machines of another cluster do. With a kubeconfig there is no lock over SSH:
    raises NoSession if the API does not respond, and Refused if it does not accept these credentials.
    """
    with contextlib.ExitStack() as held:
        session = control_planes.session(inventory, {machine.name for machine in machines})
        held.callback(session.close)
        claim = Claim(session, inventory, machines, command)
        held.callback(claim.close)
        no_api = False
        try:
            claim.take(lambda problem: on_wait(_waiting(session.machine, problem)))
            claim.findings = [] if inventory.kubeconfig else unresponsive(claim.choice)
        except NoCluster:
            no_api = True
        except (NoSession, OtherCluster):
            raise
        except (NoResponse, Refused) as problem:
            if inventory.kubeconfig:
                if isinstance(problem, Refused) and problem.status in _NOT_ALLOWED:
                    # A cluster that works: another command may hold a lock there.
                    raise
                raise NoSession(problem.problem.found, problem.problem.wanted, problem.problem.remedy) from problem
            no_api = True
            claim.findings = [_unlocked(session.machine, problem)]
        if no_api or claim.exclusive:
            lock = control_planes.lock(inventory, command, claim.holder, restarts=claim.exclusive)
            claim.lock = held.enter_context(lock)
        if no_api:
            claim.take_late()
        yield claim


def unresponsive(choice: control_planes.Choice) -> Sequence[PreflightFinding]:
    """Warnings about control planes that do not respond, while another one does."""
    return [
        PreflightFinding(
            name,
            "cluster",
            Problem(
                f"it does not respond as a control plane: {why}; {choice.machine.name} is used",
                "a control plane that responds",
                "repair it; remove it from the inventory if it is gone",
            ),
            Severity.WARNING,
        )
        for name, why in choice.failures
    ]


def _waiting(control: str, error: GpunodesError) -> PreflightFinding:
    return _warning(
        control,
        f"the API does not respond yet: {error.problem.found}",
        f"gpunodes waits at most {PATIENCE_S:.0f} s for it",
    )


def _unrenewed(control: str) -> PreflightFinding:
    return _warning(
        control,
        "it is being changed and does not respond: continuing without its locks until it does",
        f"the run ends if it does not respond within {PATIENCE_S:.0f} s after that work",
    )


def no_lock(control: str, error: GpunodesError) -> PreflightFinding:
    """The warning of a command that needs no cluster, and continues although it cannot lock its machines there."""
    return _warning(
        control,
        f"no lock can be taken: {error.problem.found}; other commands are not excluded",
        "make sure that no other command changes the same machines now",
    )


def _unlocked(control: str, error: GpunodesError) -> PreflightFinding:
    return _warning(
        control,
        f"no Leases can be taken: {error.problem.found}; a lock over SSH excludes other commands",
        "restore the API first, unless this command is meant to do that",
    )


def _warning(control: str, found: str, remedy: str) -> PreflightFinding:
    return PreflightFinding(control, "lock", Problem(found, "an API that responds", remedy), Severity.WARNING)
