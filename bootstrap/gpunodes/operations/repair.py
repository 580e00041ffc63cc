"""Repair of machines: which are repaired, in which order, and with which outcome.

Verdicts come from scans, decisions from repair/policy.py, and the stages of one repair from repair_one.py; this module
runs repairs in parallel and takes the locks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from gpunodes import settings
from gpunodes.ansible.module_utils.gpunodes import identity
from gpunodes.ansible.module_utils.gpunodes.identity import MachineIdentity
from gpunodes.engine import cluster as clusters
from gpunodes.engine import evidence, history, identities, leases, locks, probing, records
from gpunodes.engine.machine_control import MachineControl
from gpunodes.errors import ExitCode, GpunodesError, WrongInput, sentence
from gpunodes.health.model import Action, State, Verdict
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, Role
from gpunodes.operations import repair_one, scan
from gpunodes.operations.repair_one import OneRepair, Report, Tools
from gpunodes.planner import desired
from gpunodes.repair import escalation, policy
from gpunodes.repair import record as recording
from gpunodes.repair.policy import Decision, MachineDecision, Node, RepairCandidate, RepairLimits
from gpunodes.repair.record import RepairOutcome, RepairRecord, Stage

AT_ONCE = 64
"""Most machines that one command repairs in parallel; budgets are mostly smaller."""


_CORDONED = frozenset({Stage.DRAIN, Stage.ESCALATE, Stage.VERIFY})
"""The stages in which the repair needs the node cordoned."""
_CHANGING = _CORDONED | {Stage.SCAN, Stage.LOCK, Stage.COLLECT, Stage.CORDON}
"""The stages in or after which the repair changes the machine or its pods."""
_CONTROL_PLANE_ALONE = "the control plane is never repaired at the same time as other machines"


@dataclass(frozen=True, slots=True)
class RepairRequest:
    """What the user requests."""

    command: str
    limits: RepairLimits
    named: frozenset[str] = frozenset()
    """Machines that the user named themselves, not by a pattern."""
    first: str = ""
    """The escalation step to start at."""
    reason: str = ""
    force_drain: bool = False
    bug_report: bool = False
    without_cluster: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class MachineScan:
    """The scan of one machine: the verdict, and the probe's facts if it sent any."""

    verdict: Verdict
    facts: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class MachineRepair:
    """The result for one machine. ``outcome`` is None if no repair was started."""

    machine: str
    decision: Decision
    why: str
    outcome: RepairOutcome | None = None
    verdict: Verdict | None = None
    step: str = ""
    """The escalation step that the repair starts at, or that fixed the machine."""
    skipped: Sequence[str] = ()
    repair: str = ""
    seconds: float = 0.0
    evidence: str = ""
    """The folder with the evidence, "" for none."""

    @property
    def healthy(self) -> bool:
        if self.outcome is not None:
            return self.outcome.good
        return self.decision is Decision.NOTHING and (self.verdict is None or self.verdict.state is State.HEALTHY)


@dataclass(frozen=True, slots=True)
class RepairResult:
    """The result of a repair command."""

    command: str
    machines: Sequence[MachineRepair]
    dry_run: bool = False
    interrupted: bool = False

    @property
    def exit_code(self) -> ExitCode:
        if self.interrupted:
            return ExitCode.INTERRUPTED
        return ExitCode.DONE if all(each.healthy for each in self.machines) else ExitCode.PARTLY


class Fleet:
    """Machines, BMCs and cluster as repair meets them: scans, machine control, sessions. Tests replace it."""

    def __init__(self, inventory: Inventory, deadline_s: float | None = None, parallel: int = scan.PARALLEL) -> None:
        """``deadline_s`` and ``parallel`` limit each scan; the default deadline depends on the number of machines."""
        self.inventory = inventory
        self._deadline_s = deadline_s
        self._parallel = parallel
        self._targets: dict[str, scan.ScanTarget] = {}
        self._settings: dict[str, Any] | None = None

    @property
    def cluster_name(self) -> str:
        """The key of this cluster's records and history."""
        return self.inventory.cluster

    def settings(self) -> dict[str, Any]:
        """The cluster-wide settings; raises WrongInput for a template that cannot be rendered."""
        if self._settings is None:
            found = self.inventory.machines(Role.CONTROL_PLANE) or self.inventory.machines()
            given = {}
            if found:
                name = found[0].name
                given = self.inventory.variables(name) | self.inventory.rendered(name, "gpunodes_repair_")
            # Called for each machine, and templates are slow.
            self._settings = settings.resolve(given)
        return self._settings

    def session(self) -> clusters.Session:
        """A session with the cluster's API."""
        control = self.inventory.control_plane()
        return clusters.Session(clusters.over_ssh(control.address, self.inventory.connection(control.name)))

    def lock(self, command: str, holder: str) -> contextlib.AbstractContextManager[locks.Lock]:
        """The SSH lock, for work on the control plane: commands that find no API check it. Raises Taken, NoLock."""
        control = self.inventory.control_plane()
        return locks.hold(control.address, self.inventory.connection(control.name), command, holder, restarts=True)

    def machine_control(
        self, machine: Machine, *, named: bool = False, report: Callable[[str], None] = lambda _: None
    ) -> MachineControl:
        """The control of a machine; ``named``: the user named the machine itself."""
        variables = self.inventory.connection(machine.name) | self.inventory.rendered(machine.name, "gpunodes_bmc_")
        pause = checked(self.settings())["gpunodes_repair_cold_pause"]
        known = identities.recall(self.cluster_name, machine.name, machine.address)
        return MachineControl(machine.name, machine.address, variables, pause, known, named=named, report=report)

    def pool_label(self, name: str) -> str:
        """The pool label that a machine's node gets when it joins, "" for none."""
        variables = self.inventory.variables(name)
        labels = desired.labels(settings.resolve(variables), variables.get("group_names") or ())
        return str(labels.get(self.settings()["gpunodes_repair_pool_label"], ""))

    def scan(self, machines: Sequence[Machine], *, full: bool = True) -> dict[str, MachineScan]:
        """Scan machines now; the user's deadline applies only to a ``full`` scan."""
        new = [machine for machine in machines if machine.name not in self._targets]
        self._targets |= {each.target.name: each for each in scan.scan_targets(self.inventory, new)}
        found: dict[str, MachineScan] = {}

        def take(result: probing.ProbeResult) -> None:
            target = self._targets[result.name]
            verdict = scan.verdict_on(result, target.site, target.gpus)
            # A document that the probe did not write is not used.
            found[result.name] = MachineScan(verdict, None if verdict.state is State.UNREACHABLE else result.facts)

        probing.probe(
            [self._targets[machine.name].target for machine in machines],
            scan.options(),
            deadline_s=(self._deadline_s if full else None) or scan.deadline_for(len(machines)),
            parallel=self._parallel,
            on_result=take,
        )
        reached = {name: seen for name, seen in found.items() if seen.verdict.state is not State.UNREACHABLE}
        identities.remember(self.cluster_name, {name: seen.facts for name, seen in reached.items()})
        return found

    def identities(self, seen: Mapping[str, MachineScan]) -> dict[str, MachineIdentity]:
        """The identities of all machines: of scanned machines as they report, of the others as recorded."""
        machines = {machine.name: machine.address for machine in self.inventory.machines()}
        found = identities.recall_all(self.cluster_name, machines)
        for name, each in seen.items():
            if each.verdict.state is not State.UNREACHABLE and (each.facts or each.verdict.boot_id):
                facts = {"boot_id": each.verdict.boot_id, **(each.facts or {})}
                live, before = identity.reported(name, machines.get(name, ""), facts), found.get(name)
                if before and live.machine_id and before.machine_id == live.machine_id:
                    # The probe does not report the machine's addresses; the same installation reported them before.
                    addresses = tuple(dict.fromkeys([*live.addresses, *before.addresses]))
                    live = dataclasses.replace(live, addresses=addresses)
                found[name] = live
        return found


_MINIMUM = {"unhealthy_percent": 1, "guard_repairs": 1, "evidence_days": 1, "evidence_mib": 1}
"""The minimum of repair settings for which 0 would do harm."""


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the numbers among the repair settings converted; raises WrongInput."""
    found = dict(given)
    for key, default in settings.resolve({}).items():
        name = key.removeprefix("gpunodes_repair_")
        if key not in given or name == key or not isinstance(default, int):
            continue
        try:
            found[key] = float(given[key])
        except (TypeError, ValueError):
            found[key] = math.nan
        if not _MINIMUM.get(name, 0) <= found[key] < math.inf:
            wanted = f"a number, at least {_MINIMUM.get(name, 0)}"
            raise WrongInput(f"{key} is {given[key]!r}", wanted, "correct it in the inventory")
    return found


def limits(given: Mapping[str, Any], max_unavailable: str | None, actions: str, *, by_hand: bool) -> RepairLimits:
    """The limits set by the settings and the user; raises WrongInput."""
    given = checked(given)
    allowed = (Action.RESET_GPU, Action.REBOOT)
    chosen = {name.strip() for name in actions.split(",")}
    if wrong := sorted(chosen - {action.value for action in allowed}):
        raise WrongInput(
            f"{wrong[0]!r} is not an action of repairs",
            f"some of {', '.join(action.value for action in allowed)}",
            "correct --actions",
        )
    return RepairLimits(
        actions=frozenset(Action(name) for name in chosen),
        max_unavailable=policy.budget(str(max_unavailable or given["gpunodes_repair_max_unavailable"])),
        unhealthy_percent=int(given["gpunodes_repair_unhealthy_percent"]),
        guard_repairs=int(given["gpunodes_repair_guard_repairs"]),
        guard_hours=float(given["gpunodes_repair_guard_hours"]),
        by_hand=by_hand,
    )


def run(
    fleet: Fleet,
    machines: Sequence[Machine],
    request: RepairRequest,
    report: Report,
    verdicts: Mapping[str, MachineScan] | None = None,
) -> RepairResult:
    """Repair ``machines`` as the request allows; returns when all started repairs have ended and no more can start.

    ``verdicts`` are the results of an earlier scan. Raises GpunodesError before anything is changed if the control
    plane does not respond, or another command holds the decision lock for too long.
    """
    with _Repairs(fleet, machines, request, report) as repairs:
        return repairs.run(verdicts)


def resume(fleet: Fleet, request: RepairRequest, report: Report) -> RepairResult:
    """Resume every repair that a command left unfinished: on this controller, or in the cluster's locks."""
    with _Repairs(fleet, fleet.inventory.machines(), request, report) as repairs:
        return repairs.resume()


class _Repairs:
    """The repairs of one command."""

    def __init__(self, fleet: Fleet, machines: Sequence[Machine], request: RepairRequest, report: Report) -> None:
        self._fleet = fleet
        self._machines = {machine.name: machine for machine in machines}
        self._request = request
        self._report = report
        self._settings = checked(fleet.settings())
        self._cluster: clusters.Cluster | None = None
        self._leases: leases.Leases | None = None
        self._stop = threading.Event()
        self._seen: dict[str, MachineScan] = {}
        self._results: dict[str, MachineRepair] = {}
        self._running: dict[Future[RepairRecord], RepairRecord] = {}
        self._node: dict[str, Node | None] = {}
        self._mismatched: dict[str, str] = {}
        """Machines whose repair was started for a node that is not theirs, and why."""
        self._histories: Mapping[str, history.MachineHistory] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> _Repairs:
        if not self._request.without_cluster:
            session = self._fleet.session()
            self._open.callback(session.close)
            self._cluster = clusters.Cluster(session, str(self._settings["gpunodes_repair_pool_label"]))
            self._leases = leases.Leases(self._cluster, self._request.command)
            self._open.callback(self._leases.close)
            try:
                self._cluster.call_once("GET", "/version")
            except BaseException:
                self._open.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    # The whole command

    def run(self, verdicts: Mapping[str, MachineScan] | None) -> RepairResult:
        machines = list(self._machines.values())
        unfinished = {} if self._request.dry_run else self._unfinished(set(self._machines))
        self._prune(unfinished)
        fresh = [machine for machine in machines if machine.name not in unfinished]
        self._seen = dict(verdicts) if verdicts else self._scan(fresh)
        self._scan_again(fresh)
        self._scan_others(fresh)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                self._resume_all(pool, unfinished)
                self._repair_all(pool, [machine.name for machine in fresh])
            except KeyboardInterrupt:
                self._report("", "stopping; unfinished repairs can be resumed")
                self._interrupt()
            except BaseException:
                self._interrupt()
                raise
        return self._result()

    def resume(self) -> RepairResult:
        unfinished = self._unfinished(None)
        self._prune(unfinished)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                self._resume_all(pool, unfinished)
                while self._running:
                    self._reap()
            except KeyboardInterrupt:
                self._interrupt()
        return self._result()

    def _prune(self, unfinished: Mapping[str, RepairRecord]) -> None:
        """Delete old evidence, except that of unfinished repairs."""
        if not self._request.dry_run:
            days, mib = (self._settings[f"gpunodes_repair_evidence_{limit}"] for limit in ("days", "mib"))
            with contextlib.suppress(OSError):
                evidence.prune(days, mib, {record.id for record in unfinished.values()})

    def _result(self) -> RepairResult:
        order = list(self._machines)
        found = sorted(
            self._results.values(), key=lambda each: order.index(each.machine) if each.machine in order else 0
        )
        return RepairResult(self._request.command, found, self._request.dry_run, self._stop.is_set())

    # Scanning

    def _scan(self, machines: Sequence[Machine]) -> dict[str, MachineScan]:
        return dict(self._fleet.scan(machines)) if machines else {}

    def _scan_again(self, machines: Sequence[Machine]) -> None:
        """A finding that a second scan does not confirm is no reason for a reboot."""
        to_confirm = [machine for machine in machines if self._needs_repair(self._seen[machine.name].verdict)]
        if not to_confirm or self._request.limits.by_hand:
            return
        time.sleep(self._settings["gpunodes_repair_rescan_pause"])
        for name, seen in self._scan(to_confirm).items():
            before = self._seen[name].verdict
            self._seen[name] = seen
            if not self._needs_repair(seen.verdict):
                self._report(
                    name,
                    f"not repaired: the second scan's action is {seen.verdict.action.value}, not {before.action.value}",
                )

    def _scan_others(self, machines: Sequence[Machine]) -> None:
        """Scan the other machines of the pools in which a machine is to be repaired: a pool is judged as a whole."""
        to_repair = [machine for machine in machines if self._needs_repair(self._seen[machine.name].verdict)]
        others = [machine for machine in self._fleet.inventory.machines() if machine.name not in self._seen]
        if not to_repair or not others or self._request.limits.by_hand:
            return
        nodes, _ = self._nodes()
        match = self._matching(nodes)
        pools = {policy.pool_name(node) for node in (match(machine.name)[0] for machine in to_repair) if node}
        elsewhere = {node.name for node in nodes if pools and policy.pool_name(node) not in pools}
        self._seen |= self._scan([machine for machine in others if machine.name.lower() not in elsewhere])

    def _needs_repair(self, verdict: Verdict) -> bool:
        return verdict.action in self._request.limits.actions and verdict.state is not State.UNREACHABLE

    # Deciding

    def _repair_all(self, pool: ThreadPoolExecutor, names: Sequence[str]) -> None:
        """Decide and start repairs, until no machine waits for a repair of this command."""
        waiting, decisions = list(names), list[MachineDecision]()
        while waiting or self._running:
            outdated, before = False, len(waiting)
            try:
                decisions = self._decide_and_start(pool, waiting) if waiting else []
            except leases.Lost:
                outdated = True  # another command has decided in the meantime: decide again
            except GpunodesError as problem:
                # Started repairs go on.
                if not self._running and not self._results:
                    raise
                decisions = self._undecided(waiting, problem)
            waiting = [name for name in waiting if name not in self._results and name not in self._busy()]
            if outdated:
                continue
            if self._running:
                self._reap()
            elif not waiting or len(waiting) == before:
                break
            # Otherwise the others may have waited for one that could not be started.
        while self._running:
            self._reap()
        for decision in decisions:
            if decision.machine in waiting:
                self._skip(decision)

    def _undecided(self, waiting: Sequence[str], problem: GpunodesError) -> list[MachineDecision]:
        """Decisions for machines without one: refused now, or later if the reason may still change."""
        if isinstance(problem, leases.Held | clusters.NoResponse):
            # It is decided again when a running repair ends.
            return [MachineDecision(name, Decision.REFUSE, str(problem)) for name in waiting]
        for name in waiting:
            if name not in self._results and name not in self._busy():
                self._refuse(name, problem)
        return []

    def _decide_and_start(self, pool: ThreadPoolExecutor, waiting: Sequence[str]) -> list[MachineDecision]:
        with self._deciding():
            decisions = self._decide(waiting)
            for each in decisions:
                decision = each
                if each.decision is Decision.REPAIR and self._control_plane_busy(each.machine):
                    decision = dataclasses.replace(each, decision=Decision.WAIT, why=_CONTROL_PLANE_ALONE)
                starts = decision.decision is Decision.REPAIR or decision.give_up
                if starts and self._leases and not self._request.dry_run:
                    # Another command may have used the same budget in the meantime.
                    self._leases.confirm_decision()
                self._carry_out(pool, decision)
        return decisions

    def _control_plane_busy(self, name: str) -> bool:
        """Whether a machine must wait: the control plane is never repaired at the same time as other machines."""
        busy = self._busy()
        return bool(busy) and any(map(self._is_control_plane, (name, *busy)))

    def _carry_out(self, pool: ThreadPoolExecutor, decision: MachineDecision) -> None:
        """Carry out a decision; an error is the result of this machine and does not affect others."""
        try:
            if (decision.decision is Decision.REPAIR or decision.give_up) and not self._request.dry_run:
                self._start_repair(pool, decision)
            elif decision.decision is not Decision.WAIT or self._request.dry_run:
                self._skip(decision)
        except Exception as problem:
            self._refuse(decision.machine, problem)

    def _refuse(self, name: str, problem: Exception, repair: str = "") -> None:
        why = sentence(problem)
        self._report(name, why)
        self._done(MachineRepair(name, Decision.REFUSE, why, verdict=self._verdict(name), repair=repair))

    @contextlib.contextmanager
    def _deciding(self) -> Iterator[None]:
        # A plan changes nothing, and takes no lock.
        if self._leases and not self._request.dry_run:
            with self._leases.deciding():
                yield
        else:
            yield

    def _decide(self, names: Sequence[str]) -> list[MachineDecision]:
        self._histories = history.summaries(self._fleet.cluster_name)
        nodes, busy = self._nodes()
        match = self._matching(nodes)
        candidates = []
        for name in names:
            try:
                candidates.append(self._candidate(self._machines[name], match, busy))
            except Exception as problem:
                # An error about one machine does not affect the others.
                self._refuse(name, problem)
        for each in candidates:
            self._node[each.name] = each.node
        # Machines repaired by this command, or under repair, were unhealthy at the same time as those that wait.
        others = []
        for machine in self._fleet.inventory.machines():
            if machine.name in self._seen and machine.name not in names and not self._recovered(machine.name):
                with contextlib.suppress(Exception):
                    others.append(self._candidate(machine, match, busy))
        return policy.decide(candidates, nodes, self._request.limits, self._now(), others)

    def _now(self) -> float:
        """The time that the cluster's annotations and Leases use, seconds since 1970."""
        return self._leases.now() if self._leases else time.time()

    def _matching(self, nodes: Sequence[Node]) -> Callable[[str], tuple[Node | None, str]]:
        """The function that finds a machine's node: the node and "", or None and why it may not be repaired."""
        by_name = {node.name: node for node in nodes}
        if not self._cluster:
            return lambda name: (by_name[name.lower()], "")
        known = self._fleet.identities(self._seen)
        matcher = identity.Matcher([node.identity for node in nodes], known.values())

        def match(name: str) -> tuple[Node | None, str]:
            before = self._node.get(name)
            if before and (name in self._busy() or name in self._results):
                # Its scan is older than its reboot.
                return by_name.get(before.name), ""
            found = matcher.match(known[name])
            return (by_name[found.node.name], "") if found.node else (None, unmatched(found))

        return match

    def _candidate(
        self, machine: Machine, match: Callable[[str], tuple[Node | None, str]], busy: Mapping[str, str]
    ) -> RepairCandidate:
        (node, why), past = match(machine.name), self._histories.get(machine.name, history.MachineHistory())
        return RepairCandidate(
            name=machine.name,
            verdict=self._seen[machine.name].verdict,
            node=node,
            control_plane=machine.role is Role.CONTROL_PLANE,
            named=machine.name in self._request.named,
            repairs=past.repairs,
            needs_repair=past.needs_repair,
            busy=busy.get(leases.lock_name(machine.name, node.name if node else ""), ""),
            unmatched=why,
        )

    def _recovered(self, name: str) -> bool:
        result = self._results.get(name)
        return result is not None and result.outcome is RepairOutcome.REPAIRED

    def _nodes(self) -> tuple[list[Node], dict[str, str]]:
        """All nodes, locked ones marked as cordoned; and the holders of other commands' locks, by the lock's name."""
        own = {record.node or record.machine.lower() for record in self._running.values()}
        if not self._cluster or not self._leases:
            every = [self._stand_in(machine) for machine in self._fleet.inventory.machines()]
            return [_locked(node) if node.name in own else node for node in every], {}
        live = {seen.name: seen for seen in self._leases.seen() if seen.live}
        every = self._cluster.nodes()
        nodes = [_locked(node) if leases.lock_name(node.name) in live else node for node in every]
        others = {name: seen for name, seen in live.items() if name not in map(leases.lock_name, own)}
        return nodes, {name: f"{leases.described(seen.holder)}, since {seen.since}" for name, seen in others.items()}

    def _stand_in(self, machine: Machine) -> Node:
        """The stand-in of a machine's node with --without-cluster: its pool by the inventory and its verdict."""
        verdict = self._verdict(machine.name)
        gpus = verdict is None or verdict.gpus_expected is None or verdict.gpus_expected > 0
        pool = policy.pool_of(self._fleet.pool_label(machine.name), gpus=gpus)
        return Node(machine.name.lower(), control_plane=machine.role is Role.CONTROL_PLANE, pool=pool)

    def _skip(self, decision: MachineDecision) -> None:
        """Leave a machine as it is; the reason is added to the history once, until it changes."""
        self._done(self._unrepaired(decision))
        why = f"{decision.decision.value}: {decision.why}"
        known = self._histories.get(decision.machine, history.MachineHistory()).not_repaired
        if not self._request.dry_run and decision.decision is not Decision.NOTHING and why != known:
            self._note_verdict(decision.machine, time.time(), why)

    def _unrepaired(self, decision: MachineDecision) -> MachineRepair:
        """The result for a machine that is not repaired now."""
        verdict = self._seen[decision.machine].verdict
        plan = MachineRepair(decision.machine, decision.decision, decision.why, verdict=verdict)
        if decision.decision not in (Decision.REPAIR, Decision.WAIT):
            return plan
        start = self._start(decision.machine)
        skipped = [f"{step.title}: {start.why}" for step in start.skipped]
        return dataclasses.replace(plan, step=start.step.name, skipped=skipped)

    def _start(self, name: str) -> escalation.StartingStep:
        seen = self._seen[name]
        return escalation.start(seen.verdict, self._request.first, repair_one.faults(seen.verdict, seen.facts))

    # Repairing

    def _start_repair(self, pool: ThreadPoolExecutor, decision: MachineDecision) -> None:
        machine = self._machines[decision.machine]
        record = self._record(machine)
        self._note_verdict(record.machine, record.started, record.reason, record.id)
        if decision.give_up:
            record = record.to(Stage.GIVE_UP, outcome=RepairOutcome.NEEDS_REPAIR, why=decision.why)
            self._submit(pool, machine, record)
            return
        start = self._start(machine.name)
        self._report(machine.name, f"{record.reason}; first step: {start.step.title}")
        for step in start.skipped:
            self._report(machine.name, f"{step.title}: skipped, {start.why}")
        self._submit(pool, machine, record)

    def _record(self, machine: Machine) -> RepairRecord:
        seen = self._seen[machine.name]
        verdict = seen.verdict
        node = self._node[machine.name] if self._cluster else None
        cause = "requested by the user" if self._request.limits.by_hand else verdict.action.value
        reason = f"{cause}: {repair_one.describe(verdict)}"
        # An unreachable machine, or one without a ready kubelet, does not terminate pods gracefully either.
        hung = verdict.hung_in_driver or verdict.state is State.UNREACHABLE or (node is not None and not node.ready)
        now = float(int(time.time()))
        return RepairRecord(
            id=f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now))}-{machine.name}-{secrets.token_hex(3)}",
            machine=machine.name,
            cluster=self._fleet.cluster_name,
            started=now,
            reason=self._request.reason or reason,
            action=verdict.action.value,
            stage=Stage.LOCK,
            hung=hung,
            node=node.name if node else "",
            first_step=self._start(machine.name).step.name,
            named=machine.name in self._request.named,
            force_drain=self._request.force_drain,
            bug_report=self._request.bug_report,
            boot_id=verdict.boot_id or (node.boot_id if node else ""),
            gpus=verdict.gpus_expected,
            resets=repair_one.resets(verdict, seen.facts),
            capacity=node.expected if node else None,
        )

    def _unfinished(self, names: set[str] | None) -> dict[str, RepairRecord]:
        """Repairs that a command left unfinished: records of this user, and locks whose holder is dead."""
        found = records.read(self._fleet.cluster_name)
        if self._leases and self._cluster:
            locks_seen = self._leases.seen()
            for seen in locks_seen:
                if seen.live or not seen.record:
                    continue
                with contextlib.suppress(ValueError):
                    record = self._from_lock(seen.record)
                    if leases.lock_name(record.node) != seen.name:
                        continue  # gpunodes never writes such a record
                    # The record on disk is written before that in the lock: for the same repair it is the newer one.
                    if found.get(record.machine, record).id != record.id or record.machine not in found:
                        found[record.machine] = record
            nodes = self._cluster.nodes()
            by_name = {node.name: node for node in nodes}
            for name, record in list(found.items()):
                if record.node and (why := _outdated(record, by_name.get(record.node))):
                    self._drop(record, why)
                    del found[name]
            known = {record.node for record in found.values()}
            held = {seen.name for seen in locks_seen}
            # A machine that was rebooted is no longer in the recorded boot.
            again = [machine for machine in self._fleet.inventory.machines() if machine.name in found]
            machines = self._fleet.identities(self._scan(again))
            matcher = identity.Matcher([node.identity for node in nodes], machines.values())
            matches = {name: matcher.match(machine) for name, machine in machines.items()}
            names_of = {match.node.name: name for name, match in matches.items() if match.node}
            for node in nodes:
                if leases.lock_name(node.name) in held or node.name in known:
                    continue
                if node.cordoned_by_repair and not node.needs_repair:
                    name = names_of.get(node.name, node.name)
                    found.setdefault(name, self._forgotten(node, name))
            for name, record in found.items():
                match = matches.get(name)
                if not record.node or not match or (match.node and match.node.name == record.node):
                    continue
                actual = f"the machine is the node {match.node.name}" if match.node else unmatched(match)
                self._mismatched[name] = f"its repair was started for the node {record.node}, but {actual}"
        return {name: record for name, record in found.items() if names is None or name in names}

    def _drop(self, record: RepairRecord, why: str) -> None:
        """Drop a repair that must not be resumed: the machine is judged again."""
        self._report(record.machine, f"its repair {record.id} is not resumed: {why}")
        with contextlib.suppress(GpunodesError), records.claimed(record.machine, record.cluster):
            records.remove(record)
        if self._leases:
            # Another command may hold it by now, and keeps it.
            with contextlib.suppress(GpunodesError):
                self._leases.take(record.node, "")
                self._leases.release(record.node)
        self._note_end(record, why)

    def _note_end(self, record: RepairRecord, why: str) -> None:
        history.append(
            history.HistoryEntry(
                time=time.time(),
                machine=record.machine,
                kind=history.EntryKind.END,
                what="repair",
                outcome=RepairOutcome.NOT_REPAIRED.value,
                detail=why,
                repair=record.id,
                cluster=self._fleet.cluster_name,
                by=f"{getpass.getuser()}@{socket.gethostname()}",
            )
        )

    def _from_lock(self, text: str) -> RepairRecord:
        """The repair that another command stored in its lock; raises ValueError.

        The cluster is not trusted to choose another cluster's records, or to mark the machine as named by the user.
        """
        return dataclasses.replace(recording.parse(text), cluster=self._fleet.cluster_name, named=False)

    def _forgotten(self, node: Node, name: str) -> RepairRecord:
        """The repair of a node that an unknown repair cordoned: verified healthy it is uncordoned, else marked."""
        return RepairRecord(
            id=node.cordoned_by_repair,
            machine=name,
            cluster=self._fleet.cluster_name,
            started=float(int(time.time())),
            reason="an unfinished repair left a cordon",
            action=Action.NONE.value,
            stage=Stage.VERIFY,
            node=node.name,
            step="reboot",
            tried=tuple(step.name for step in escalation.steps()),
            capacity=node.expected,
        )

    def _resume_all(self, pool: ThreadPoolExecutor, unfinished: Mapping[str, RepairRecord]) -> None:
        """Resume unfinished repairs; that of a control plane comes last, and never together with others."""
        for name, record in sorted(unfinished.items(), key=lambda item: self._is_control_plane(item[0])):
            while self._control_plane_busy(name):
                self._reap()
            self._resume(pool, name, record)

    def _is_control_plane(self, name: str) -> bool:
        return name in self._machines and self._machines[name].role is Role.CONTROL_PLANE

    def _resume(self, pool: ThreadPoolExecutor, name: str, record: RepairRecord) -> None:
        machine = self._machines.get(name)
        if machine is None:
            why = f"it has an unfinished repair ({record.id}) but is not in the inventory"
            self._done(MachineRepair(name, Decision.REFUSE, why, repair=record.id))
            return
        if name in self._mismatched:
            self._done(MachineRepair(name, Decision.REFUSE, self._mismatched[name], repair=record.id))
            return
        if record.node and not self._leases:
            why = "its unfinished repair uses the cluster; omit --without-cluster to resume it"
            self._done(MachineRepair(name, Decision.REFUSE, why, repair=record.id))
            return
        try:
            self._report(name, f"resuming {record.id} at stage {record.stage.value}")
            self._submit(pool, machine, record)
        except Exception as problem:
            self._refuse(name, problem, record.id)

    def _submit(self, pool: ThreadPoolExecutor, machine: Machine, record: RepairRecord) -> None:
        """Lock the machine and repair it in a thread; raises GpunodesError if another command holds the lock."""
        with contextlib.ExitStack() as opened:
            machine_control = self._fleet.machine_control(
                machine, named=record.named, report=lambda text: self._report(machine.name, text)
            )
            opened.enter_context(records.claimed(machine.name, record.cluster))
            lock = None
            if self._leases and self._cluster and record.node:
                record = self._lock(self._leases, self._cluster, machine, record)
                if machine.role is Role.CONTROL_PLANE:
                    lock = self._lock_by_ssh(self._leases, machine, opened, record)
            claim = opened.pop_all()
        if record.stage is Stage.LOCK:
            record = record.to(Stage.COLLECT)
        facts = self._seen[machine.name].facts if machine.name in self._seen else None
        one = OneRepair(record, machine_control, self._tools(machine, lock), facts)

        def work() -> RepairRecord:
            with claim:
                return one.run()

        self._running[pool.submit(work)] = record

    def _lock(
        self, held: leases.Leases, cluster: clusters.Cluster, machine: Machine, record: RepairRecord
    ) -> RepairRecord:
        """Lock a machine and check that it may still be repaired; the record to continue from. Raises GpunodesError."""
        stored = held.take(record.node, record.text(), alone=machine.role is Role.CONTROL_PLANE)
        try:
            node = cluster.node(record.node)
            with contextlib.suppress(ValueError):
                before = self._from_lock(stored) if stored else record
                record = record if _outdated(before, node) else _newer(record, before)
            if why := _forbidden(record, node, self._now()):
                raise GpunodesError(why)
        except BaseException:
            held.leave(record.node)
            raise
        return record

    def _lock_by_ssh(
        self, held: leases.Leases, machine: Machine, opened: contextlib.ExitStack, record: RepairRecord
    ) -> locks.Lock | None:
        """The SSH lock while the control plane is repaired; None if its sshd does not respond either."""
        try:
            return opened.enter_context(self._fleet.lock(self._request.command, held.me))
        except locks.NoLock as problem:
            self._report(machine.name, f"no SSH lock: {problem.found}")
            return None
        except BaseException:
            held.leave(record.node)
            raise

    def _tools(self, machine: Machine, lock: locks.Lock | None) -> Tools:
        given = self._settings

        def scan(_: str) -> tuple[Verdict, Mapping[str, Any] | None]:
            seen = self._fleet.scan([machine], full=False)[machine.name]
            return seen.verdict, seen.facts

        return Tools(
            scan=scan,
            report=self._report,
            limits=repair_one.TimeLimits(
                drain=given["gpunodes_repair_drain_timeout"],
                drain_hung=given["gpunodes_repair_drain_timeout_hung"],
                boot=given["gpunodes_repair_boot_timeout"],
                verify=given["gpunodes_repair_verify_timeout"],
                settle=given["gpunodes_repair_settle"],
            ),
            by=f"{getpass.getuser()}@{socket.gethostname()}",
            cluster=self._cluster,
            leases=self._leases,
            lock=lock,
            control_plane=machine.role is Role.CONTROL_PLANE,
            stop=self._stop,
        )

    def _reap(self) -> None:
        """Wait until a repair ends, and collect its result."""
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        for future in done:
            self._take(future)

    def _take(self, future: Future[RepairRecord]) -> None:
        submitted = self._running.pop(future)
        verdict = self._verdict(submitted.machine)
        folder = self._evidence(submitted.id)
        try:
            record = future.result()
        except Exception as problem:
            why = f"{sentence(problem)}; `gpunodes repair --resume` resumes it"
            self._report(submitted.machine, why)
            if self._leases and submitted.node:
                self._leases.abandon(submitted.node)
            outcome = RepairOutcome.NOT_REPAIRED
            self._done(
                MachineRepair(
                    submitted.machine, Decision.REPAIR, why, outcome, verdict, repair=submitted.id, evidence=folder
                )
            )
            return
        self._done(
            MachineRepair(
                machine=record.machine,
                decision=Decision.NEEDS_REPAIR if submitted.stage is Stage.GIVE_UP else Decision.REPAIR,
                why=record.why or record.reason,
                outcome=record.outcome,
                verdict=verdict,
                step=record.step,
                repair=record.id,
                seconds=time.time() - record.started,
                evidence=folder,
            )
        )

    def _evidence(self, repair: str) -> str:
        with contextlib.suppress(GpunodesError, OSError):
            found = evidence.folder(repair)
            return str(found) if found.is_dir() else ""
        return ""

    def _interrupt(self) -> None:
        self._stop.set()
        while self._running:
            self._reap()

    def _verdict(self, name: str) -> Verdict | None:
        seen = self._seen.get(name)
        return seen.verdict if seen else None

    def _busy(self) -> set[str]:
        return {record.machine for record in self._running.values()}

    def _done(self, result: MachineRepair) -> None:
        self._results[result.machine] = result

    def _note_verdict(self, machine: str, moment: float, why: str, repair: str = "") -> None:
        verdict = self._seen[machine].verdict
        history.append(
            history.HistoryEntry(
                time=moment,
                machine=machine,
                kind=history.EntryKind.VERDICT,
                what=verdict.action.value,
                outcome=verdict.state.value,
                detail=why,
                repair=repair,
                cluster=self._fleet.cluster_name,
                by=f"{getpass.getuser()}@{socket.gethostname()}",
                evidence=repair_one.first_lines(verdict),
            )
        )


def _outdated(record: RepairRecord, node: Node | None) -> str:
    """Why an unfinished repair must not be resumed, "" if it may be: its node changed in the meantime."""
    if node is None:
        return "its node no longer exists"
    foreign = node.cordoned and not node.cordoned_by_repair and (record.named or not node.cordoned_by_others)
    valid = foreign or node.cordoned_by_repair == record.id
    return "" if valid or record.stage not in _CORDONED else "its node was uncordoned in the meantime"


def _forbidden(record: RepairRecord, node: Node | None, now: float) -> str:
    """Why a machine must not be repaired, "" if it may be; the node was read after it was locked."""
    if record.stage not in _CHANGING:
        return ""
    if node is None:
        return f"the node {record.node} no longer exists"
    if node.maintenance and node.maintenance.holds(now):
        return f"it is in maintenance: {node.maintenance.described()}"
    if node.cordoned_by_others and not record.named:
        return f"a user or another program cordoned it; `gpunodes repair {record.machine}` repairs it anyway"
    return ""


def _newer(record: RepairRecord, stored: RepairRecord) -> RepairRecord:
    """The record to continue from: that of the lock's dead holder has priority over a new repair."""
    same = stored.machine == record.machine and stored.node == record.node
    if same and stored.id != record.id and stored.stage not in (Stage.END, Stage.RELEASE):
        return dataclasses.replace(stored, named=record.named)
    return record


def _locked(node: Node) -> Node:
    return dataclasses.replace(node, cordoned=True, cordoned_by_repair=node.cordoned_by_repair or "a repair")


def unmatched(match: identity.Match) -> str:
    """Why no node matches a machine, and how to repair it anyway."""
    return f"{missing(match)}; nothing is changed; --without-cluster ignores the cluster"


def missing(match: identity.Match) -> str:
    """Why no node matches a machine."""
    return match.contradiction or "no node of the cluster matches it by boot id, name or address"
