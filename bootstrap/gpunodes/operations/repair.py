"""Repair of machines: who is repaired, in which order, and how each came out.

Verdicts come from looks, decisions from repair/policy.py, each machine's way from repair_one.py; what goes on side by
side, and who may, is settled here.
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
from gpunodes.inventory import GROUPS, Inventory
from gpunodes.model import Machine, Role
from gpunodes.operations import repair_one, scan
from gpunodes.operations.repair_one import OneRepair, Report, Tools
from gpunodes.repair import escalation, policy
from gpunodes.repair import record as recording
from gpunodes.repair.policy import Decision, MachineDecision, Node, RepairCandidate, RepairLimits
from gpunodes.repair.record import RepairOutcome, RepairRecord, Stage

AT_ONCE = 64
"""Most machines that one command works on side by side; budgets are mostly smaller."""


_CORDONED = frozenset({Stage.DRAIN, Stage.ESCALATE, Stage.VERIFY})
"""The steps in which the node must be cordoned for the repair."""
_TOUCHING = _CORDONED | {Stage.SCAN, Stage.LOCK, Stage.COLLECT, Stage.CORDON}
"""The steps after which something is done to the machine or its pods."""
_ALONE = "the control plane is repaired alone"


@dataclass(frozen=True, slots=True)
class RepairRequest:
    """What the user asks for."""

    command: str
    limits: RepairLimits
    named: frozenset[str] = frozenset()
    """Machines that were named themselves, not by a pattern."""
    first: str = ""
    """The rung to start at."""
    reason: str = ""
    force_drain: bool = False
    bug_report: bool = False
    without_cluster: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class MachineScan:
    """A look at one machine: the verdict, and the probe's facts where they came."""

    verdict: Verdict
    facts: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class MachineRepair:
    """How one machine came out. ``outcome`` is None where nothing was begun."""

    machine: str
    decision: Decision
    why: str
    outcome: RepairOutcome | None = None
    verdict: Verdict | None = None
    step: str = ""
    """The rung that it starts at, or that helped at last."""
    skipped: Sequence[str] = ()
    repair: str = ""
    seconds: float = 0.0
    evidence: str = ""
    """The folder with what was collected of it before, "" for none."""

    @property
    def healthy(self) -> bool:
        if self.outcome is not None:
            return self.outcome.good
        return self.decision is Decision.NOTHING and (self.verdict is None or self.verdict.state is State.HEALTHY)


@dataclass(frozen=True, slots=True)
class RepairResult:
    """What a repair command did."""

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
    """The machines of an inventory, as repair meets them: looks, hands, the cluster. Tests put another in its place."""

    def __init__(self, inventory: Inventory, deadline_s: float | None = None, parallel: int = scan.PARALLEL) -> None:
        """``deadline_s`` and ``parallel`` bound each sweep of machines; None is what so many machines need."""
        self.inventory = inventory
        self._deadline_s = deadline_s
        self._parallel = parallel
        self._asked: dict[str, scan.ScanTarget] = {}
        self._settings: dict[str, Any] | None = None

    @property
    def cluster_name(self) -> str:
        """What this cluster's records and history are filed under."""
        return self.inventory.cluster

    def settings(self) -> dict[str, Any]:
        """The settings of the cluster as a whole; raises WrongInput for a template that cannot be rendered."""
        if self._settings is None:
            found = self.inventory.machines(Role.CONTROL_PLANE) or self.inventory.machines()
            given = {}
            if found:
                name = found[0].name
                given = self.inventory.variables(name) | self.inventory.rendered(name, "gpunodes_repair_")
            # Asked for once for each machine, and templates take their time.
            self._settings = settings.resolve(given)
        return self._settings

    def session(self) -> clusters.Session:
        """The way to the cluster's API."""
        control = self.inventory.control_plane()
        return clusters.Session(clusters.over_ssh(control.address, self.inventory.connection(control.name)))

    def lock(self, command: str, holder: str) -> contextlib.AbstractContextManager[locks.Lock]:
        """The lock by SSH, for work on the control plane: who finds no API meanwhile finds it. Raises Taken, NoLock."""
        control = self.inventory.control_plane()
        return locks.hold(control.address, self.inventory.connection(control.name), command, holder, restarts=True)

    def machine_control(
        self, machine: Machine, *, named: bool = False, say: Callable[[str], None] = lambda _: None
    ) -> MachineControl:
        """What can be done to a machine; ``named``: the user named it itself."""
        variables = self.inventory.connection(machine.name) | self.inventory.rendered(machine.name, "gpunodes_bmc_")
        pause = checked(self.settings())["gpunodes_repair_cold_pause"]
        known = identities.recall(self.cluster_name, machine.name, machine.address)
        return MachineControl(machine.name, machine.address, variables, pause, known, named=named, report=say)

    def pool_label(self, name: str) -> str:
        """The pool that a machine's node is labelled with when it joins, "" for none (playbooks/group_vars/all.yml)."""
        variables = self.inventory.variables(name)
        given = settings.resolve(variables)
        groups = sorted(set(variables.get("group_names") or ()) - {"all", "ungrouped", *GROUPS.values()})
        pool = given["gpunodes_pool"] or (groups[0] if groups else "")
        labels = {"gpunodes.dev/pool": pool, **given["gpunodes_node_labels"]}
        return str(labels.get(self.settings()["gpunodes_repair_pool_label"], ""))

    def scan(self, machines: Sequence[Machine], *, full: bool = True) -> dict[str, MachineScan]:
        """Look at machines now; the user's deadline is that of a ``scan``."""
        missing = [machine for machine in machines if machine.name not in self._asked]
        self._asked |= {asked.target.name: asked for asked in scan.scan_targets(self.inventory, missing)}
        found: dict[str, MachineScan] = {}

        def take(answer: probing.ProbeResult) -> None:
            asked = self._asked[answer.name]
            verdict = scan.verdict_on(answer, asked.site, asked.gpus)
            # What is no document of the probe is read no further.
            found[answer.name] = MachineScan(verdict, None if verdict.state is State.UNREACHABLE else answer.facts)

        probing.probe(
            [self._asked[machine.name].target for machine in machines],
            scan.options(),
            deadline_s=(self._deadline_s if full else None) or scan.deadline_for(len(machines)),
            parallel=self._parallel,
            on_result=take,
        )
        answered = {name: seen for name, seen in found.items() if seen.verdict.state is not State.UNREACHABLE}
        identities.remember(self.cluster_name, {name: seen.facts for name, seen in answered.items()})
        return found

    def identities(self, seen: Mapping[str, MachineScan]) -> dict[str, MachineIdentity]:
        """Who all machines of the inventory are: those seen by what they report, the others by what is recorded."""
        machines = {machine.name: machine.address for machine in self.inventory.machines()}
        found = identities.recall_all(self.cluster_name, machines)
        for name, each in seen.items():
            if each.verdict.state is not State.UNREACHABLE and (each.facts or each.verdict.boot_id):
                facts = {"boot_id": each.verdict.boot_id, **(each.facts or {})}
                live, before = identity.reported(name, machines.get(name, ""), facts), found.get(name)
                if before and live.machine_id and before.machine_id == live.machine_id:
                    # The probe does not tell the machine's own address; the same installation has told it before.
                    addresses = tuple(dict.fromkeys([*live.addresses, *before.addresses]))
                    live = dataclasses.replace(live, addresses=addresses)
                found[name] = live
        return found


_LEAST = {"unhealthy_percent": 1, "guard_repairs": 1, "evidence_days": 1, "evidence_mib": 1}
"""The least that settings of repair may be which would do harm as 0."""


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, those of repair that are numbers as such; raises WrongInput."""
    found = dict(given)
    for key, default in settings.resolve({}).items():
        name = key.removeprefix("gpunodes_repair_")
        if key not in given or name == key or not isinstance(default, int):
            continue
        try:
            found[key] = float(given[key])
        except (TypeError, ValueError):
            found[key] = math.nan
        if not _LEAST.get(name, 0) <= found[key] < math.inf:
            wanted = f"a number, {_LEAST.get(name, 0)} at least"
            raise WrongInput(f"{key} is {given[key]!r}", wanted, "correct it in the inventory")
    return found


def limits(given: Mapping[str, Any], max_unavailable: str | None, actions: str, *, by_hand: bool) -> RepairLimits:
    """The limits that the settings and the user make; raises WrongInput."""
    given = checked(given)
    allowed = (Action.RESET_GPU, Action.REBOOT)
    chosen = {word.strip() for word in actions.split(",")}
    if wrong := sorted(chosen - {action.value for action in allowed}):
        raise WrongInput(
            f"{wrong[0]!r} is no action that a repair can take",
            f"some of {', '.join(action.value for action in allowed)}",
            "correct --actions",
        )
    return RepairLimits(
        actions=frozenset(Action(word) for word in chosen),
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
    say: Report,
    verdicts: Mapping[str, MachineScan] | None = None,
) -> RepairResult:
    """Repair what the wish allows among ``machines``; ends when nothing more can be begun and all that was has ended.

    ``verdicts`` are a first look that was had already. Raises GpunodesError before anything is touched: the control
    plane does not answer, somebody decides for too long.
    """
    with _Repairs(fleet, machines, request, say) as repairs:
        return repairs.run(verdicts)


def resume(fleet: Fleet, request: RepairRequest, say: Report) -> RepairResult:
    """Go on with every repair that a command left behind: on this machine, or in the cluster's locks."""
    with _Repairs(fleet, fleet.inventory.machines(), request, say) as repairs:
        return repairs.resume()


class _Repairs:
    """One command's repairs."""

    def __init__(self, fleet: Fleet, machines: Sequence[Machine], request: RepairRequest, say: Report) -> None:
        self._fleet = fleet
        self._machines = {machine.name: machine for machine in machines}
        self._request = request
        self._say = say
        self._settings = checked(fleet.settings())
        self._cluster: clusters.Cluster | None = None
        self._leases: leases.Leases | None = None
        self._stop = threading.Event()
        self._seen: dict[str, MachineScan] = {}
        self._results: dict[str, MachineRepair] = {}
        self._running: dict[Future[RepairRecord], RepairRecord] = {}
        self._node: dict[str, Node | None] = {}
        self._astray: dict[str, str] = {}
        """Machines whose repair was begun on a node that is not theirs, and why."""
        self._pasts: Mapping[str, history.MachineHistory] = {}
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

    # All of it

    def run(self, verdicts: Mapping[str, MachineScan] | None) -> RepairResult:
        machines = list(self._machines.values())
        left = {} if self._request.dry_run else self._left(set(self._machines))
        self._prune(left)
        fresh = [machine for machine in machines if machine.name not in left]
        self._seen = dict(verdicts) if verdicts else self._scan(fresh)
        self._scan_again(fresh)
        self._scan_others(fresh)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                self._go_on_with(pool, left)
                self._walk(pool, [machine.name for machine in fresh])
            except KeyboardInterrupt:
                self._say("", "stopping; what was begun can be gone on with")
                self._interrupt()
            except BaseException:
                self._interrupt()
                raise
        return self._result()

    def resume(self) -> RepairResult:
        left = self._left(None)
        self._prune(left)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                self._go_on_with(pool, left)
                while self._running:
                    self._reap()
            except KeyboardInterrupt:
                self._interrupt()
        return self._result()

    def _prune(self, left: Mapping[str, RepairRecord]) -> None:
        """Let old evidence go, but for that of repairs that go on."""
        if not self._request.dry_run:
            days, mib = (self._settings[f"gpunodes_repair_evidence_{limit}"] for limit in ("days", "mib"))
            with contextlib.suppress(OSError):
                evidence.prune(days, mib, {record.id for record in left.values()})

    def _result(self) -> RepairResult:
        order = list(self._machines)
        found = sorted(
            self._results.values(), key=lambda each: order.index(each.machine) if each.machine in order else 0
        )
        return RepairResult(self._request.command, found, self._request.dry_run, self._stop.is_set())

    # Looking

    def _scan(self, machines: Sequence[Machine]) -> dict[str, MachineScan]:
        return dict(self._fleet.scan(machines)) if machines else {}

    def _scan_again(self, machines: Sequence[Machine]) -> None:
        """What is not the same in a second look is no reason for a reboot."""
        doubtful = [machine for machine in machines if self._asked(self._seen[machine.name].verdict)]
        if not doubtful or self._request.limits.by_hand:
            return
        time.sleep(self._settings["gpunodes_repair_rescan_pause"])
        for name, seen in self._scan(doubtful).items():
            before = self._seen[name].verdict
            self._seen[name] = seen
            if not self._asked(seen.verdict):
                self._say(name, f"{before.action.value} was asked for, and now {seen.verdict.action.value}: left alone")

    def _scan_others(self, machines: Sequence[Machine]) -> None:
        """Look at the others of the pools, too, where something is to be repaired: a pool is judged as a whole."""
        asking = [machine for machine in machines if self._asked(self._seen[machine.name].verdict)]
        others = [machine for machine in self._fleet.inventory.machines() if machine.name not in self._seen]
        if not asking or not others or self._request.limits.by_hand:
            return
        nodes, _ = self._nodes()
        match = self._matching(nodes)
        pools = {policy.pool_name(node) for node in (match(machine.name)[0] for machine in asking) if node}
        elsewhere = {node.name for node in nodes if pools and policy.pool_name(node) not in pools}
        self._seen |= self._scan([machine for machine in others if machine.name.lower() not in elsewhere])

    def _asked(self, verdict: Verdict) -> bool:
        return verdict.action in self._request.limits.actions and verdict.state is not State.UNREACHABLE

    # Deciding

    def _walk(self, pool: ThreadPoolExecutor, names: Sequence[str]) -> None:
        """Decide and begin, until nothing waits for what we do ourselves."""
        waiting, decisions = list(names), list[MachineDecision]()
        while waiting or self._running:
            outdated, before = False, len(waiting)
            try:
                decisions = self._decide_and_begin(pool, waiting) if waiting else []
            except leases.Lost:
                outdated = True  # another command has decided meanwhile: what is true now?
            except GpunodesError as problem:
                # What was begun goes on.
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
            # Else one that could not be begun may have had the others wait.
        while self._running:
            self._reap()
        for decision in decisions:
            if decision.machine in waiting:
                self._leave(decision)

    def _undecided(self, waiting: Sequence[str], problem: GpunodesError) -> list[MachineDecision]:
        """What becomes of machines that could not be decided on: refused now, or at the end if that does not change."""
        if isinstance(problem, leases.Held | clusters.NoResponse):
            # It is decided again when one of those that go on is done.
            return [MachineDecision(name, Decision.REFUSE, str(problem)) for name in waiting]
        for name in waiting:
            if name not in self._results and name not in self._busy():
                self._refuse(name, problem)
        return []

    def _decide_and_begin(self, pool: ThreadPoolExecutor, waiting: Sequence[str]) -> list[MachineDecision]:
        with self._deciding():
            decisions = self._decide(waiting)
            for each in decisions:
                decision = each
                if each.decision is Decision.REPAIR and self._must_wait(each.machine):
                    decision = dataclasses.replace(each, decision=Decision.WAIT, why=_ALONE)
                begins = decision.decision is Decision.REPAIR or decision.give_up
                if begins and self._leases and not self._request.dry_run:
                    # Another command may have decided meanwhile, by the same budget.
                    self._leases.confirm_decision()
                self._carry_out(pool, decision)
        return decisions

    def _must_wait(self, name: str) -> bool:
        """Whether the control plane is repaired by us, or is to be while others are: it is repaired alone."""
        busy = self._busy()
        return bool(busy) and any(map(self._is_control_plane, (name, *busy)))

    def _carry_out(self, pool: ThreadPoolExecutor, decision: MachineDecision) -> None:
        """Do what is decided for a machine; what goes wrong with it is its result, and no other machine's."""
        try:
            if (decision.decision is Decision.REPAIR or decision.give_up) and not self._request.dry_run:
                self._begin(pool, decision)
            elif decision.decision is not Decision.WAIT or self._request.dry_run:
                self._leave(decision)
        except Exception as problem:
            self._refuse(decision.machine, problem)

    def _refuse(self, name: str, problem: Exception, repair: str = "") -> None:
        why = sentence(problem)
        self._say(name, why)
        self._done(MachineRepair(name, Decision.REFUSE, why, verdict=self._verdict(name), repair=repair))

    @contextlib.contextmanager
    def _deciding(self) -> Iterator[None]:
        # A plan touches nothing, not even a lock.
        if self._leases and not self._request.dry_run:
            with self._leases.deciding():
                yield
        else:
            yield

    def _decide(self, names: Sequence[str]) -> list[MachineDecision]:
        self._pasts = history.summaries(self._fleet.cluster_name)
        nodes, busy = self._nodes()
        match = self._matching(nodes)
        candidates = []
        for name in names:
            try:
                candidates.append(self._candidate(self._machines[name], match, busy))
            except Exception as problem:
                # A machine that cannot even be judged is its own trouble.
                self._refuse(name, problem)
        for each in candidates:
            self._node[each.name] = each.node
        # What was repaired, and what is under repair, was sick at the same time as what waits.
        beside = []
        for machine in self._fleet.inventory.machines():
            if machine.name in self._seen and machine.name not in names and not self._recovered(machine.name):
                with contextlib.suppress(Exception):
                    beside.append(self._candidate(machine, match, busy))
        return policy.decide(candidates, nodes, self._request.limits, self._now(), beside)

    def _now(self) -> float:
        """The time that what stands in the cluster goes by, seconds since 1970."""
        return self._leases.now() if self._leases else time.time()

    def _matching(self, nodes: Sequence[Node]) -> Callable[[str], tuple[Node | None, str]]:
        """How a machine's node is found: the node, or None and why nothing may be done."""
        by_name = {node.name: node for node in nodes}
        if not self._cluster:
            return lambda name: (by_name[name.lower()], "")
        known = self._fleet.identities(self._seen)
        matcher = identity.Matcher([node.identity for node in nodes], known.values())

        def match(name: str) -> tuple[Node | None, str]:
            before = self._node.get(name)
            if before and (name in self._busy() or name in self._results):
                # What was seen of it is of before its reboot.
                return by_name.get(before.name), ""
            found = matcher.match(known[name])
            return (by_name[found.node.name], "") if found.node else (None, unmatched(found))

        return match

    def _candidate(
        self, machine: Machine, match: Callable[[str], tuple[Node | None, str]], busy: Mapping[str, str]
    ) -> RepairCandidate:
        (node, why), past = match(machine.name), self._pasts.get(machine.name, history.MachineHistory())
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
        """All nodes, those that somebody works on as such; and who else does, by the lock's name."""
        ours = {record.node or record.machine.lower() for record in self._running.values()}
        if not self._cluster or not self._leases:
            every = [self._stand_in(machine) for machine in self._fleet.inventory.machines()]
            return [_taken(node) if node.name in ours else node for node in every], {}
        live = {seen.name: seen for seen in self._leases.seen() if seen.live}
        every = self._cluster.nodes()
        nodes = [_taken(node) if leases.lock_name(node.name) in live else node for node in every]
        others = {name: seen for name, seen in live.items() if name not in map(leases.lock_name, ours)}
        return nodes, {name: f"{leases.described(seen.holder)}, since {seen.since}" for name, seen in others.items()}

    def _stand_in(self, machine: Machine) -> Node:
        """A machine as a node, where no cluster is asked: its pool as the inventory and its verdict tell it."""
        verdict = self._verdict(machine.name)
        gpus = verdict is None or verdict.gpus_expected is None or verdict.gpus_expected > 0
        pool = policy.pool_of(self._fleet.pool_label(machine.name), gpus=gpus)
        return Node(machine.name.lower(), control_plane=machine.role is Role.CONTROL_PLANE, pool=pool)

    def _leave(self, decision: MachineDecision) -> None:
        """Nothing is done to a machine; what asked for it is remembered, once for as long as it stays the same."""
        self._done(self._plain(decision))
        why = f"{decision.decision.value}: {decision.why}"
        known = self._pasts.get(decision.machine, history.MachineHistory()).not_repaired
        if not self._request.dry_run and decision.decision is not Decision.NOTHING and why != known:
            self._note_verdict(decision.machine, time.time(), why)

    def _plain(self, decision: MachineDecision) -> MachineRepair:
        """The result of a machine that nothing is done to."""
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

    # Doing

    def _begin(self, pool: ThreadPoolExecutor, decision: MachineDecision) -> None:
        machine = self._machines[decision.machine]
        record = self._record(machine)
        self._note_verdict(record.machine, record.started, record.reason, record.id)
        if decision.give_up:
            record = record.to(Stage.GIVE_UP, outcome=RepairOutcome.NEEDS_REPAIR, why=decision.why)
            self._submit(pool, machine, record)
            return
        start = self._start(machine.name)
        self._say(machine.name, f"{record.reason}; it starts with: {start.step.title}")
        for step in start.skipped:
            self._say(machine.name, f"{step.title}: left out, {start.why}")
        self._submit(pool, machine, record)

    def _record(self, machine: Machine) -> RepairRecord:
        seen = self._seen[machine.name]
        verdict = seen.verdict
        node = self._node[machine.name] if self._cluster else None
        asked = "asked for by hand" if self._request.limits.by_hand else verdict.action.value
        message = f"{asked}: {repair_one.describe(verdict)}"
        # What cannot be reached, or whose kubelet is gone, ends nothing gracefully either.
        hung = verdict.hung_in_driver or verdict.state is State.UNREACHABLE or (node is not None and not node.ready)
        now = float(int(time.time()))
        return RepairRecord(
            id=f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now))}-{machine.name}-{secrets.token_hex(3)}",
            machine=machine.name,
            cluster=self._fleet.cluster_name,
            started=now,
            reason=self._request.reason or message,
            action=verdict.action.value,
            stage=Stage.LOCK,
            hung=hung,
            node=node.name if node else "",
            first=self._start(machine.name).step.name,
            named=machine.name in self._request.named,
            force_drain=self._request.force_drain,
            bug_report=self._request.bug_report,
            boot_id=verdict.boot_id or (node.boot_id if node else ""),
            gpus=verdict.gpus_expected,
            resets=repair_one.resets(verdict, seen.facts),
            capacity=node.expected if node else None,
        )

    def _left(self, names: set[str] | None) -> dict[str, RepairRecord]:
        """Repairs that a command left behind: records of this user, and locks whose holder is dead."""
        found = records.read(self._fleet.cluster_name)
        if self._leases and self._cluster:
            left = self._leases.seen()
            for seen in left:
                if seen.live or not seen.record:
                    continue
                with contextlib.suppress(ValueError):
                    record = self._from_lock(seen.record)
                    if leases.lock_name(record.node) != seen.name:
                        continue  # no command of ours writes that
                    # A record of ours for the same repair is written before the lock's: it is the newer one.
                    if found.get(record.machine, record).id != record.id or record.machine not in found:
                        found[record.machine] = record
            nodes = self._cluster.nodes()
            by_name = {node.name: node for node in nodes}
            for name, record in list(found.items()):
                if record.node and (why := _outdated(record, by_name.get(record.node))):
                    self._drop(record, why)
                    del found[name]
            known = {record.node for record in found.values()}
            held = {seen.name for seen in left}
            # One that was rebooted is in another boot than the one that is recorded.
            again = [machine for machine in self._fleet.inventory.machines() if machine.name in found]
            machines = self._fleet.identities(self._scan(again))
            matcher = identity.Matcher([node.identity for node in nodes], machines.values())
            matches = {name: matcher.match(machine) for name, machine in machines.items()}
            names_of = {match.node.name: name for name, match in matches.items() if match.node}
            for node in nodes:
                if leases.lock_name(node.name) in held or node.name in known:
                    continue
                if node.cordoned_by_us and not node.needs_repair:
                    name = names_of.get(node.name, node.name)
                    found.setdefault(name, self._forgotten(node, name))
            for name, record in found.items():
                match = matches.get(name)
                if not record.node or not match or (match.node and match.node.name == record.node):
                    continue
                found_now = f"it is the node {match.node.name}" if match.node else unmatched(match)
                self._astray[name] = f"its repair is of the node {record.node}, and {found_now}"
        return {name: record for name, record in found.items() if names is None or name in names}

    def _drop(self, record: RepairRecord, why: str) -> None:
        """Forget a repair that nobody may go on with: the machine is judged anew."""
        self._say(record.machine, f"its repair {record.id} is not gone on with: {why}")
        with contextlib.suppress(GpunodesError), records.claimed(record.machine, record.cluster):
            records.remove(record)
        if self._leases:
            # Somebody else may hold it by now: then it is theirs.
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
        """A repair that another command left in its lock: the cluster's word, so that what it names is ours to check.

        Raises ValueError.
        """
        return dataclasses.replace(recording.parse(text), cluster=self._fleet.cluster_name, named=False)

    def _forgotten(self, node: Node, name: str) -> RepairRecord:
        """A node with our cordon, and nothing that tells why: proven well it is given back, else it needs repair."""
        return RepairRecord(
            id=node.cordoned_by_us,
            machine=name,
            cluster=self._fleet.cluster_name,
            started=float(int(time.time())),
            reason="a cordon of ours was left behind",
            action=Action.NONE.value,
            stage=Stage.VERIFY,
            node=node.name,
            step="reboot",
            tried=tuple(step.name for step in escalation.steps()),
            capacity=node.expected,
        )

    def _go_on_with(self, pool: ThreadPoolExecutor, left: Mapping[str, RepairRecord]) -> None:
        """Go on with repairs that were left; that of a control plane comes last, and each alone."""
        for name, record in sorted(left.items(), key=lambda item: self._is_control_plane(item[0])):
            while self._must_wait(name):
                self._reap()
            self._go_on(pool, name, record)

    def _is_control_plane(self, name: str) -> bool:
        return name in self._machines and self._machines[name].role is Role.CONTROL_PLANE

    def _go_on(self, pool: ThreadPoolExecutor, name: str, record: RepairRecord) -> None:
        machine = self._machines.get(name)
        if machine is None:
            why = f"a repair of it was begun ({record.id}) and the inventory does not have it"
            self._done(MachineRepair(name, Decision.REFUSE, why, repair=record.id))
            return
        if name in self._astray:
            self._done(MachineRepair(name, Decision.REFUSE, self._astray[name], repair=record.id))
            return
        if record.node and not self._leases:
            why = "a repair of it was begun with the cluster; leave --without-cluster out to go on with it"
            self._done(MachineRepair(name, Decision.REFUSE, why, repair=record.id))
            return
        try:
            self._say(name, f"going on with {record.id} at: {record.stage.value}")
            self._submit(pool, machine, record)
        except Exception as problem:
            self._refuse(name, problem, record.id)

    def _submit(self, pool: ThreadPoolExecutor, machine: Machine, record: RepairRecord) -> None:
        """Lock the machine and give it to a thread; raises GpunodesError for a lock that somebody else holds."""
        with contextlib.ExitStack() as opened:
            machine_control = self._fleet.machine_control(
                machine, named=record.named, say=lambda text: self._say(machine.name, text)
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
        """Lock a machine and see that it may be repaired still; the record to go on from. Raises GpunodesError."""
        left = held.take(record.node, record.text(), alone=machine.role is Role.CONTROL_PLANE)
        try:
            node = cluster.node(record.node)
            with contextlib.suppress(ValueError):
                before = self._from_lock(left) if left else record
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
        """Keep those away who find no API while the control plane is repaired; None where its sshd is dead, too."""
        try:
            return opened.enter_context(self._fleet.lock(self._request.command, held.me))
        except locks.NoLock as problem:
            self._say(machine.name, f"without a lock by SSH: {problem.found}")
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
            say=self._say,
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
        """Wait for a repair to end, and take its result."""
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        for future in done:
            self._take(future)

    def _take(self, future: Future[RepairRecord]) -> None:
        began = self._running.pop(future)
        verdict = self._verdict(began.machine)
        kept = self._evidence(began.id)
        try:
            record = future.result()
        except Exception as problem:
            why = f"{sentence(problem)}; `gpunodes repair --resume` goes on with it"
            self._say(began.machine, why)
            if self._leases and began.node:
                self._leases.abandon(began.node)
            outcome = RepairOutcome.NOT_REPAIRED
            self._done(
                MachineRepair(began.machine, Decision.REPAIR, why, outcome, verdict, repair=began.id, evidence=kept)
            )
            return
        self._done(
            MachineRepair(
                machine=record.machine,
                decision=Decision.NEEDS_REPAIR if began.stage is Stage.GIVE_UP else Decision.REPAIR,
                why=record.why or record.reason,
                outcome=record.outcome,
                verdict=verdict,
                step=record.step,
                repair=record.id,
                seconds=time.time() - record.started,
                evidence=kept,
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
    """Why a repair that was left behind may not be gone on with, "" where it may: its node is another's by now."""
    if node is None:
        return "its node is no more"
    theirs = node.cordoned and not node.cordoned_by_us and (record.named or not node.cordoned_by_others)
    ours = theirs or node.cordoned_by_us == record.id
    return "" if ours or record.stage not in _CORDONED else "its node was given back meanwhile"


def _forbidden(record: RepairRecord, node: Node | None, now: float) -> str:
    """Why a machine may not be repaired, "" where it may; the node was read after it was locked."""
    if record.stage not in _TOUCHING:
        return ""
    if node is None:
        return f"the node {record.node} is no more"
    if node.maintenance and node.maintenance.holds(now):
        return f"it is in maintenance: {node.maintenance.described()}"
    if node.cordoned_by_others and not record.named:
        return f"somebody cordoned it, and may be at work there; `gpunodes repair {record.machine}` repairs it"
    return ""


def _newer(record: RepairRecord, left: RepairRecord) -> RepairRecord:
    """The record to go on from: what a dead holder left in the lock goes before a repair that is only to begin."""
    same = left.machine == record.machine and left.node == record.node
    if same and left.id != record.id and left.stage not in (Stage.END, Stage.RELEASE):
        return dataclasses.replace(left, named=record.named)
    return record


def _taken(node: Node) -> Node:
    return dataclasses.replace(node, cordoned=True, cordoned_by_us=node.cordoned_by_us or "a repair")


def unmatched(match: identity.Match) -> str:
    """Why no node is known to be a machine, and what a repair can do."""
    return f"{missing(match)}; nothing is done; --without-cluster leaves the cluster out"


def missing(match: identity.Match) -> str:
    """Why no node is known to be a machine."""
    return match.contradiction or "no node of the cluster is it by its boot id, name or address"
