"""The state machine of one machine in a roll-out: from the result of one stage to the next stage. Pure."""

from __future__ import annotations

from gpunodes.repair.flow import DrainResult, pod_list
from gpunodes.rollout.record import Disruption, RolloutOutcome, RolloutRecord, Stage


def collected(record: RolloutRecord, needed: str, unhealthy: str, *, marked: bool) -> RolloutRecord:
    """After a machine was read. ``needed``: what there is to do; ``marked``: an earlier command began with it."""
    if not needed and marked:
        # Whatever an earlier command applied is verified before its node is given back.
        return record.to(Stage.VERIFY, applied=True)
    if not needed:
        return record.to(Stage.RELEASE, outcome=RolloutOutcome.UNCHANGED, why="nothing to do")
    if unhealthy and not marked:
        why = f"it is not healthy before the roll-out: {unhealthy}; see `gpunodes health {record.machine}`"
        return record.to(Stage.RELEASE, outcome=RolloutOutcome.SKIPPED, why=why)
    # The mark alone does not say that the work was begun: it is written before the drain.
    return record.to(Stage.CORDON)


def cordoned(record: RolloutRecord, *, own: bool, marked: bool = False) -> RolloutRecord:
    """After the cordon; ``own`` is false if a user or another program cordoned the node meanwhile.

    ``marked``: it still has the mark of an earlier command, which is removed; their cordon stays.
    """
    if own:
        return record.to(Stage.PREPARE)
    if record.applied:
        return _hold(record, "a user or another program changed its cordon or its marks")
    why = "a user or another program cordoned its node in the meantime"
    return record.to(Stage.UNCORDON if marked else Stage.RELEASE, outcome=RolloutOutcome.SKIPPED, why=why)


def prepared(record: RolloutRecord, why: str) -> RolloutRecord:
    """After the preparation; ``why`` it failed, "" if it did not."""
    if not why:
        drains = record.disrupts is not Disruption.NOTHING
        return record.to(Stage.DRAIN) if drains else record.to(Stage.APPLY, applied=True)
    return _give_back(record, RolloutOutcome.FAILED, f"it could not be prepared: {why}")


def drained(record: RolloutRecord, result: DrainResult) -> RolloutRecord:
    """After the drain. A pod without a controller is lost when it ends, so it is not evicted for a roll-out."""
    if result.refused:
        return _give_back(
            record,
            RolloutOutcome.NOT_DRAINED,
            f"these pods cannot be evicted: {pod_list(result.refused)}; ask the owners of their disruption budgets",
        )
    if result.terminating:
        return _give_back(
            record,
            RolloutOutcome.NOT_DRAINED,
            f"these pods did not terminate in time: {pod_list(result.terminating)}; "
            "increase gpunodes_rollout_drain_timeout",
        )
    if result.unmanaged:
        return _give_back(
            record,
            RolloutOutcome.NOT_DRAINED,
            f"nothing would start these pods elsewhere: {pod_list(result.unmanaged)}; end them first",
        )
    return record.to(Stage.APPLY, applied=True)


def taken_back(record: RolloutRecord, why: str) -> RolloutRecord:
    """After a drain, if a person has taken the node back meanwhile."""
    return _give_back(record, RolloutOutcome.SKIPPED, why)


def applied(record: RolloutRecord, why: str) -> RolloutRecord:
    """After the work; ``why`` it failed, "" if it did not."""
    return record.to(Stage.VERIFY) if not why else _failed(record, f"it failed: {why}")


def verified(record: RolloutRecord, why: str) -> RolloutRecord:
    """After the verification; ``why`` is what is wrong, "" for nothing."""
    if not why:
        return record.to(Stage.UNCORDON, outcome=RolloutOutcome.DONE, why="")
    return _failed(record, f"it was applied, but the verification fails: {why}")


def undone(record: RolloutRecord, why: str) -> RolloutRecord:
    """After the work was undone and verified; ``why`` is what is wrong, "" for nothing."""
    if not why:
        return record.to(Stage.UNCORDON, outcome=RolloutOutcome.UNDONE, why=f"{record.why}; it was taken back")
    return _hold(record, f"{record.why}; it could not be taken back: {why}")


def resumed(record: RolloutRecord) -> RolloutRecord:
    """The record that a new command continues from.

    Every stage before the end may be done again, so it starts with the first, which reads what is left to do. What was
    being taken back is not applied again, and a node that was being given back is given back.
    """
    if record.stage in {Stage.UNDO, Stage.UNCORDON, Stage.RELEASE}:
        return record
    return record.to(Stage.COLLECT, outcome=None, why="")


def _failed(record: RolloutRecord, why: str) -> RolloutRecord:
    return record.to(Stage.UNDO, why=why) if record.undoes else _hold(record, why)


def _give_back(record: RolloutRecord, outcome: RolloutOutcome, why: str) -> RolloutRecord:
    """Nothing was applied, so the node is given back as it was; a machine that is half changed stays cordoned."""
    return _hold(record, why) if record.applied else record.to(Stage.UNCORDON, outcome=outcome, why=why)


def _hold(record: RolloutRecord, why: str) -> RolloutRecord:
    return record.to(Stage.HOLD, outcome=RolloutOutcome.FAILED, why=why)
