"""Whether an unfinished repair may be resumed, and from which record. Pure."""

from __future__ import annotations

import dataclasses

from gpunodes.health.model import Action
from gpunodes.repair import escalation
from gpunodes.repair.maintenance import kept_by
from gpunodes.repair.policy import ROLLED_OUT, Node
from gpunodes.repair.record import RepairRecord, Stage

_CORDONED = frozenset({Stage.DRAIN, Stage.ESCALATE, Stage.VERIFY})
"""The stages in which the repair needs the node cordoned."""
_BEFORE = frozenset({Stage.SCAN, Stage.LOCK, Stage.COLLECT, Stage.CORDON})
"""The stages before the repair changes the machine."""
_CHANGING = _CORDONED | _BEFORE
"""The stages in or after which the repair changes the machine or its pods."""


def outdated(record: RepairRecord, node: Node | None) -> str:
    """Why a repair must not continue, "" if it may: its node changed in the meantime."""
    if node is None:
        return "its node no longer exists"
    if record.stage in _BEFORE and record.boot_id and node.boot_id and node.boot_id != record.boot_id:
        return "its machine was booted again before the repair changed anything"
    if record.stage not in _CHANGING and not (record.stage is Stage.GIVE_UP and record.tried):
        return ""
    foreign = node.cordoned and not node.cordoned_by_repair and (record.named or not node.cordoned_by_others)
    kept = node.cordoned_by_repair == record.id or (foreign and not record.own_cordon)
    lifted = node.cordon_lifted == record.id or (not kept and record.stage not in _BEFORE)
    return "its node was uncordoned in the meantime" if lifted else ""


def without_cluster(record: RepairRecord) -> str:
    """Why a repair that was begun with --without-cluster must not continue, "" if it may.

    Nothing protects its verdict: its node has no cordon, and the machine may have recovered in the same boot.
    """
    if record.node or record.stage not in _BEFORE:
        return ""
    return f"it was begun with --without-cluster, and had changed nothing yet; {_again(record)}"


def without_budget(record: RepairRecord, node: Node | None) -> str:
    """Why a repair whose lock has ended must not continue, "" if it may: a cordon keeps its place in the budget."""
    if record.stage not in _BEFORE or node is None or node.cordoned:
        return ""
    return f"it had not cordoned its node yet, and other repairs may have used the budget; {_again(record)}"


def _again(record: RepairRecord) -> str:
    return f"`gpunodes health --reboot-hung` or `gpunodes repair {record.machine}` decides on it again"


def forbidden(record: RepairRecord, node: Node | None, now: float) -> str:
    """Why a machine must not be repaired, "" if it may be; the node was read after it was locked."""
    if record.stage not in _CHANGING:
        return ""
    if node is None:
        return f"the node {record.node} no longer exists"
    if node.rollout:
        return ROLLED_OUT
    if why := kept_by(node.maintenance, now):
        return why
    if node.cordoned_by_others and not record.named:
        return f"a user or another program cordoned it; `gpunodes repair {record.machine}` repairs it anyway"
    return ""


def newer(record: RepairRecord, stored: RepairRecord) -> RepairRecord:
    """The record to continue from: that of the lock's dead holder has priority over a new repair."""
    same = stored.machine == record.machine and stored.node == record.node
    if same and stored.id != record.id and stored.stage not in (Stage.END, Stage.RELEASE):
        return dataclasses.replace(stored, named=record.named)
    return record


def of_cordon(node: Node, machine: str, cluster: str, now: float) -> RepairRecord:
    """The repair of a node that an unknown repair cordoned: verified healthy it is uncordoned, else marked."""
    return RepairRecord(
        id=node.cordoned_by_repair,
        machine=machine,
        cluster=cluster,
        started=float(int(now)),
        reason="an unfinished repair left a cordon",
        action=Action.NONE.value,
        stage=Stage.VERIFY,
        node=node.name,
        step="reboot",
        tried=tuple(step.name for step in escalation.steps()),
        capacity=node.expected,
    )
