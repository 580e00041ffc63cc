"""One roll-out: machines are chosen within the budgets and worked on, and its record in the cluster is kept up."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import time
from collections.abc import Callable, Sequence

from gpunodes.engine.cluster.errors import NoResponse, Refused
from gpunodes.engine.leases.errors import Held, Lost
from gpunodes.engine.locks import Taken
from gpunodes.errors import GpunodesError, sentence
from gpunodes.operations import cluster_state, switched_off
from gpunodes.operations.cluster_state import ClusterState
from gpunodes.operations.rolling import context, reading, unfinished
from gpunodes.operations.rolling.context import RolloutCommand
from gpunodes.operations.rolling.reading import Reading
from gpunodes.operations.rolling.running import Running
from gpunodes.operations.rolling.work import Target, Work
from gpunodes.rollout import policy, state, times
from gpunodes.rollout.policy import Decision, MachineDecision, RolloutCandidate
from gpunodes.rollout.record import RolloutOutcome
from gpunodes.rollout.result import MachineRollout, RolloutResult
from gpunodes.rollout.state import Rollout

_NOTHING = "nothing to do"
_STOPPING = "stopping; `gpunodes rollout resume` continues"
_NOT_BEGUN = "nothing was begun; run the same command again"


class Engine:
    """One command's work on a roll-out."""

    def __init__(self, command: RolloutCommand, work: Work, rollout: Rollout) -> None:
        self._command = command
        self._work = work
        self._rollout = rollout
        self._running = Running(command, work, rollout.options.wait_for_jobs_s)
        self._reading = Reading(command, work)
        self._results: dict[str, MachineRollout] = {}
        self._unended: dict[str, str] = {}
        self._left: dict[str, str] = {}
        """Machines that an earlier command began, and why they cannot be resumed yet."""
        self._idle_since = 0.0
        self._reported: dict[str, str] = {}
        self._interrupted = False
        self._then = ""

    def run(self, *, resumed: bool = False) -> RolloutResult:
        """Work until no further machine can be begun."""
        recorded = resumed
        try:
            self._read(resumed=resumed)
            recorded = True
            self._write(self._rollout)
            if resumed:
                self._resume_machines()
            while self._step():
                pass
        except KeyboardInterrupt:
            self._command.report("", _STOPPING if recorded else _NOT_BEGUN)
            self._interrupted = True
            self._command.stop.set()
        except GpunodesError as problem:
            if not self._rollout.done and not self._rollout.ended and not self._running:
                raise
            self._stop(f"{sentence(problem)}")
        finally:
            self._finish()
        # Without a record there is nothing to resume.
        return self._result() if recorded else dataclasses.replace(self._result(), finished=True)

    # Reading

    def _read(self, *, resumed: bool) -> None:
        """Scan the machines, and ask the work which of them need it: those that need nothing are done."""
        waiting = [self._command.machines[name] for name in self._rollout.waiting]
        self._command.report("", f"reading {len(waiting)} machines")
        self._reading.scan(self._rollout.waiting)
        found = self._state()
        nodes = {name: node for name, (node, _) in found.machines.items()}
        # One that is off on purpose is skipped, whatever it needs.
        waiting = [machine for machine in waiting if machine.name not in found.off]
        left = unfinished.left(self._command, self._rollout.id, nodes)
        targets = [Target(machine, nodes.get(machine.name)) for machine in waiting]
        for target, needed in zip(targets, self._reading.needed(targets), strict=True):
            marked = target.node is not None and target.node.rollout == self._rollout.id
            # A command that was killed may have finished it, and not noted that: not every work sees it there.
            finished = target.node is not None and target.node.rolled_out == self._rollout.id
            if (finished or needed == "") and not marked and target.name not in left:
                outcome = RolloutOutcome.DONE if finished else RolloutOutcome.UNCHANGED
                canary = not self._command.is_control_plane(target.name)
                self._rollout = self._rollout.with_end(target.name, outcome, _NOTHING, canary=canary)
                if not resumed:
                    self._results[target.name] = MachineRollout(target.name, RolloutOutcome.UNCHANGED, _NOTHING)
        self._command.report("", f"{len(self._rollout.waiting)} of {len(waiting)} machines need {self._work.name}")

    def _read_again(self) -> None:
        """Read the machines that other commands have let go."""
        found = self._state()
        free = [each for each in self._rollout.waiting if each in self._reading.forgotten and not _holder(each, found)]
        self._reading.scan(free)
        self._reading.needed([Target(self._command.machines[name], found.machines[name][0]) for name in free])

    def _state(self) -> ClusterState:
        found = cluster_state.read(self._command, self._reading.scans, self._running.nodes())
        self._reading.forget(name for name in self._rollout.waiting if _holder(name, found))
        return found

    # Machines that another command left

    def _resume_machines(self) -> int:
        """Go on with the machines whose locks are free; the number of those that were begun or ended."""
        found, acted = self._state(), 0
        matches = {name: node for name, (node, _) in found.machines.items()}
        left = unfinished.to_resume(self._command, self._work, self._rollout.id, list(found.nodes.values()), matches)
        marked = {name for name, node in matches.items() if node and node.rollout == self._rollout.id}
        self._left = dict.fromkeys(marked.intersection(self._rollout.waiting), "another command holds it")
        names = [name for name in self._rollout.waiting if name in left]
        for name in sorted(names, key=self._command.is_control_plane):
            record, node = left[name], matches.get(name)
            if why := policy.in_maintenance(node, self._command.now()):
                self._left[name] = why  # it stays cordoned
                continue
            alone = self._command.is_control_plane(name)
            while self._running.full or (alone and len(self._running)):
                self._take(self._running.reap())
            if node is None or node.name != record.node:
                self._end(name, RolloutOutcome.FAILED, f"it was begun as the node {record.node}, which it no longer is")
            else:
                self._command.report(name, f"resuming at stage {record.stage.value}")
                start = functools.partial(self._running.start, self._command.machines[name], record, node)
                if not self._begin(name, start, resumed=True):
                    self._left[name] = self._reported.pop(name)
                    continue
            self._left.pop(name, None)
            acted += 1
            if alone and self._running:
                self._take(self._running.reap())
        return acted

    # One step

    def _step(self) -> bool:
        """Begin what may be begun, and take what has ended; False when there is nothing more to do."""
        rollout = self._rollout
        if not rollout.waiting or rollout.stopped:
            return self._wait_for_end()
        if self._left and self._if_it_responds(self._resume_machines):
            return True
        if self._must_soak():
            if self._running:
                return self._wait_for_end()
            self._soak()
            return True
        now = dt.datetime.now().astimezone()
        if not times.is_open(rollout.options.windows, now):
            self._tell("", f"outside of the windows; the next one opens at {times.opens(rollout.options.windows, now)}")
            self._idle_since = 0.0
            return self._wait(limited=False)
        if not self._running.full and self._if_it_responds(self._choose):
            self._idle_since = 0.0
        return self._wait() if self._rollout.waiting and not self._rollout.stopped else True

    def _wait_for_end(self) -> bool:
        if not self._running:
            return False
        self._take(self._running.reap())
        return True

    def _wait(self, *, limited: bool = True) -> bool:
        """Wait for a machine to end, or for others to become available; at most the patience without any of both."""
        limits = self._command.limits
        if self._running:
            self._take(self._running.reap(6 * limits.poll))
            # Machines often end together: one decision is made for all of them.
            time.sleep(min(1.0, limits.poll))
            self._take(self._running.reap(0))
            self._idle_since = 0.0
            return True
        self._command.leases.write_rollout(self._rollout.text())
        self._idle_since = self._idle_since or time.monotonic()
        if limited and time.monotonic() - self._idle_since > limits.patience:
            waits = "; ".join(dict.fromkeys(self._reported.get(name, "") for name in self._rollout.waiting[:3]))
            self._stop(f"nothing could be begun for {limits.patience:.0f} s: {waits}")
            return True
        time.sleep(limits.poll)
        return True

    def _choose(self) -> int:
        """Decide and begin; the number of machines that were begun or ended by that."""
        if self._reading.forgotten.intersection(self._rollout.waiting):
            self._read_again()
        try:
            with self._command.leases.deciding():
                return self._decide_and_begin()
        except Held as problem:
            self._tell("", str(problem))
            return 0

    def _if_it_responds(self, action: Callable[[], int]) -> int:
        """What ``action`` returns; 0 if the API does not respond while machines are in work: it is asked again."""
        try:
            return action()
        except (NoResponse, Refused) as problem:
            # The only control plane may restart for its own work, whose stages end within their limits.
            if not self._running:
                raise
            self._tell("", f"no machine is begun now: {sentence(problem)}")
            return 0

    def _decide_and_begin(self) -> int:
        found, acted = self._state(), 0
        decisions = policy.decide(
            [self._candidate(name, found) for name in self._rollout.waiting],
            list(found.nodes.values()),
            self._rollout.options,
            self._command.now(),
            self._running.nodes(),
            self._canaries_left(),
        )
        for decision in decisions:
            if self._rollout.stopped or (decision.decision is Decision.BEGIN and self._running.full):
                break
            acted += self._carry_out(decision, found)
        return acted

    def _carry_out(self, decision: MachineDecision, found: ClusterState) -> int:
        name = decision.machine
        if decision.decision is Decision.WAIT:
            self._reported[name] = decision.why
            return 0
        if decision.decision is Decision.SKIP:
            self._end(name, RolloutOutcome.SKIPPED, decision.why)
            return 1
        node = found.machines[name][0]
        assert node is not None  # noqa: S101 - machines without one are skipped; for the type checker
        confirm = self._command.leases.confirm_decision
        # Before anything is written of it, and again when the machine is locked.
        confirm()
        record = unfinished.new_record(self._command, self._work, self._rollout.id, name, node)
        start = functools.partial(self._running.start, self._command.machines[name], record, node, confirm)
        return self._begin(name, start)

    def _candidate(self, name: str, found: ClusterState) -> RolloutCandidate:
        node, why = found.machines[name]
        if name in found.off:
            why = switched_off.left_out(name, why, is_rolled_out=True)
        busy, trouble = _holder(name, found) or self._left.get(name, ""), self._reading.trouble(name)
        return RolloutCandidate(name, node, why, self._command.is_control_plane(name), busy, trouble)

    def _begin(self, name: str, start: Callable[[], None], *, resumed: bool = False) -> int:
        """Write that a machine is begun, then begin; what prevents that is its result, or it waits.

        One that is ``resumed`` waits: it is cordoned, and nobody else would give it back.
        """
        before = self._rollout
        self._write(self._rollout.begun(name))
        try:
            start()
        except (Held, Taken) as problem:
            self._reported[name] = str(problem)
            self._write(before)
            return 0
        except (Lost, NoResponse):
            self._write(before)
            raise
        except Exception as problem:
            if resumed:
                self._reported[name] = sentence(problem)
                self._write(before)
                return 0
            self._end(name, RolloutOutcome.SKIPPED, sentence(problem))
        return 1

    # Canaries

    def _canaries_left(self) -> int | None:
        options = self._rollout.options
        if not options.canary or self._rollout.soaked:
            return None
        running = [name for name in self._running.machines() if not self._command.is_control_plane(name)]
        return max(0, options.canary - len(self._rollout.canaries) - len(running))

    def _must_soak(self) -> bool:
        options = self._rollout.options
        return bool(options.canary) and not self._rollout.soaked and len(self._rollout.canaries) >= options.canary

    def _soak(self) -> None:
        """Watch the canaries until they have stayed healthy for long enough."""
        command, options = self._command, self._rollout.options
        if not self._rollout.soak_since:
            self._write(dataclasses.replace(self._rollout, soak_since=command.now()))
        # A moment in the future comes from a record that this gpunodes did not write.
        left = min(self._rollout.soak_since + options.soak_s - command.now(), options.soak_s)
        if why := reading.unhealthy(command, self._rollout.canaries, self._state(), scan=left <= 0):
            self._write(dataclasses.replace(self._rollout, soak_since=0.0))
            self._stop(f"the canaries did not stay healthy: {why}")
        elif left <= 0:
            command.report("", f"the canaries stayed healthy: {state.names(self._rollout.canaries)}")
            self._write(dataclasses.replace(self._rollout, soaked=True))
        else:
            self._tell("", f"watching the canaries {state.names(self._rollout.canaries)} for {options.soak_s:.0f} s")
            command.leases.write_rollout(self._rollout.text())
            time.sleep(min(6 * command.limits.poll, left))

    # Results

    def _take(self, results: Sequence[MachineRollout]) -> None:
        for each in results:
            self._results[each.machine] = each
            if each.outcome is None:
                self._unended[each.machine] = each.why
                self._stop(f"{each.machine}: {each.why}")
                continue
            self._end(each.machine, each.outcome, each.why)

    def _end(self, name: str, outcome: RolloutOutcome, why: str) -> None:
        if outcome is RolloutOutcome.SKIPPED:
            self._command.report(name, f"skipped: {why}")
        control_plane = self._command.is_control_plane(name)
        self._write(self._rollout.with_end(name, outcome, why, canary=not control_plane))
        if outcome.stops:
            self._stop(f"{name}: {why}")
        elif control_plane and not outcome.good:
            self._stop(f"control planes come before other machines, and {name} is {outcome.value}: {why}")

    def _stop(self, why: str) -> None:
        """Begin no further machine."""
        if not self._rollout.stopped:
            self._command.report("", f"no further machine is begun: {why}")
            self._rollout = dataclasses.replace(self._rollout, stopped=why[:500])
            # Its lock may be the reason: then another command has the record now.
            with contextlib.suppress(GpunodesError):
                self._write(self._rollout)

    def _write(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._command.leases.write_rollout(rollout.text())

    def _tell(self, name: str, text: str) -> None:
        """Report a message once, until another one replaces it."""
        if self._reported.get(name) != text:
            self._reported[name] = text
            self._command.report(name, text)

    def _finish(self) -> None:
        """Wait for the machines in flight, and leave a record only of what is unfinished, or follows."""
        try:
            for each in self._running.finish():
                with contextlib.suppress(GpunodesError):
                    self._take([each])
        finally:
            if self._rollout.ended_well and self._rollout.then:
                self._write_following()
            elif self._complete:
                with contextlib.suppress(GpunodesError):
                    self._command.leases.release_rollout(keep=False)

    def _write_following(self) -> None:
        """Replace the record by that of what follows, in one step: a killed command leaves one of both."""
        try:
            work = self._rollout.then[0].work
            following = self._rollout.next(context.new_id(work), float(int(self._command.now())))
            self._command.leases.write_rollout(following.text())
            self._then = work
        except GpunodesError as problem:
            self._rollout = dataclasses.replace(self._rollout, stopped=f"what follows is not begun: {problem}"[:500])

    @property
    def _complete(self) -> bool:
        """Whether nothing of it is left to resume; skipped machines are begun by the next roll-out."""
        return not (self._rollout.waiting or self._rollout.running or self._rollout.stopped)

    def _result(self) -> RolloutResult:
        rollout = self._rollout
        ended = [MachineRollout(name, RolloutOutcome.DONE) for name in rollout.done]
        ended += [MachineRollout(name, each.outcome, each.why) for name, each in rollout.ended.items()]
        machines = [self._results.get(each.machine, each) for each in ended]
        machines += [MachineRollout(name, None, self._unended.get(name, "")) for name in rollout.running]
        machines += [MachineRollout(name, None, self._reported.get(name, "")) for name in rollout.waiting]
        return RolloutResult(
            rollout.id, rollout.work, machines, self._complete, rollout.stopped, self._interrupted, self._then
        )


def _holder(name: str, found: ClusterState) -> str:
    return found.holder(name, found.machines[name][0])
