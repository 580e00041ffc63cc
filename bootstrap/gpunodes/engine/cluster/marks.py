"""The marks of gpunodes on a node (cordons, annotations, labels and taints), and the patches that change them. Pure.

Each patch is made from the node's current object: a merge patch, or None if nothing is to be changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
from collections.abc import Mapping
from typing import Any

from gpunodes.ansible.module_utils import kube_api, pools
from gpunodes.ansible.module_utils.cluster.nodes import MAINTENANCE
from gpunodes.model import printable
from gpunodes.repair import maintenance
from gpunodes.repair.maintenance import Maintenance

_PREFIX = "gpunodes.dev/"
CORDONED_BY = f"{_PREFIX}cordoned-by"
"""Node annotation: the id of the repair that cordoned it. `kubectl uncordon` leaves it: see :func:`cordoned_by`."""
REASON = f"{_PREFIX}repair-reason"
REPAIRS = f"{_PREFIX}repairs"
"""Node annotation: the times of recent repairs, for the loop protection of every user's controller."""
NEEDS_REPAIR = f"{_PREFIX}needs-repair"
"""Node annotation (the full reason), label and taint (the reason in short): gpunodes cannot repair the node."""
TEMPORARY_TAINT = f"{_PREFIX}repair"
"""Taint NoExecute while GPUs are reset: it evicts pods that do not tolerate every taint, also device plugins."""
ROLLOUT = f"{_PREFIX}rollout"
"""Node annotation: the id of the roll-out that works on the node; repairs stay away until it ends."""
ROLLOUT_CORDON = f"{_PREFIX}rollout-cordon"
"""Node annotation: the roll-out cordoned the node, and uncordons it at its end."""
ROLLED_OUT = f"{_PREFIX}rolled-out"
"""Node annotation: the id of the last roll-out whose work ended well on the node."""
_REPAIRS_KEPT = 8
_MERGED = frozenset({"ancient-changes", "before-first-apply"})
"""The managers of fields whose managers the API no longer knows: it keeps ten of those that update an object."""
_SCHEDULABLE = "f:unschedulable"
"""The field of a cordon, as managedFields names it."""

NodeObject = Mapping[str, Any]
Patch = dict[str, Any]


# What is read


def maintenance_of(node: NodeObject) -> Maintenance | None:
    """The maintenance that a node is in."""
    return maintenance.parse(_annotations(node).get(MAINTENANCE, ""))


def repairs_of(node: NodeObject) -> list[float]:
    """The times of a node's recent repairs, in seconds since 1970."""
    found = []
    for part in _annotations(node).get(REPAIRS, "").split(","):
        with contextlib.suppress(ValueError):
            found.append(dt.datetime.strptime(part, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=dt.UTC).timestamp())
    return found


def cordoned_by(node: NodeObject) -> str:
    """The id of the repair whose cordon a node has now, "" if it has none, or that of others."""
    own = _is_cordoned(node) and not cordoned_again(node)
    return _annotations(node).get(CORDONED_BY, "") if own else ""


def cordon_lifted(node: NodeObject) -> str:
    """The id of the repair whose cordon others lifted from a node, "" for none."""
    return "" if cordoned_by(node) else _annotations(node).get(CORDONED_BY, "")


def cordoned_again(node: NodeObject) -> bool:
    """Whether the present cordon is not that of gpunodes, whatever marks it left: the API keeps who set a field.

    A person may lift a cordon of gpunodes with `kubectl uncordon`, and cordon the node later to work there.
    """
    entries = node["metadata"].get("managedFields") or ()
    setters = {each.get("manager") for each in entries if _SCHEDULABLE in _spec_fields(each)} - _MERGED
    return _is_cordoned(node) and bool(setters) and kube_api.MANAGER not in setters


def _spec_fields(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = (entry.get("fieldsV1") or {}).get("f:spec") or {}
    return fields


def stays_cordoned(node: NodeObject, repair: str, now: float) -> bool:
    """Whether a node stays cordoned at the end of this repair: by others, or by the maintenance that it is in."""
    own = cordoned_by(node) == repair
    return _is_cordoned(node) and (not own or _keeps_cordon(maintenance_of(node), now))


# Patches, in the order of a repair


def cordon(node: NodeObject, repair: str, reason: str, now: float) -> Patch | None:
    """Cordon a node for a repair, unless it has a cordon that does not belong to a repair, or is in maintenance.

    ``now`` in seconds since 1970.
    """
    maintained = maintenance_of(node)
    if (_is_cordoned(node) and not cordoned_by(node)) or (maintained and maintained.holds(now)):
        return None
    patch: Patch = {
        "metadata": {"annotations": {CORDONED_BY: repair, REASON: reason}},
        "spec": {"unschedulable": True},
    }
    return _with_plugin(node, patch)


def note_repair(node: NodeObject, moment: float) -> Patch | None:
    """Add the time of a repair."""
    known = repairs_of(node)
    if moment in known:
        return None
    kept = [*known, moment][-_REPAIRS_KEPT:]
    return {"metadata": {"annotations": {REPAIRS: ",".join(_stamp(each) for each in kept)}}}


def taint_temporarily(node: NodeObject, repair: str) -> Patch:
    """Evict the pods that do not tolerate every taint."""
    return _with_taint(node, TEMPORARY_TAINT, _short(repair), "NoExecute")


def untaint(node: NodeObject) -> Patch:
    """Undo :func:`taint_temporarily`."""
    return _without_taint(node, TEMPORARY_TAINT)


def uncordon(node: NodeObject, repair: str, now: float) -> Patch:
    """Undo what a repair did to a node; a cordon that does not belong to this repair stays.

    Maintenance that began while the node was cordoned keeps it cordoned. ``now`` in seconds since 1970.
    """
    patch = untaint(node)
    patch["metadata"] = {}
    if _annotations(node).get(CORDONED_BY) != repair:
        return patch
    patch["metadata"] = {"annotations": {CORDONED_BY: None, REASON: None}}
    if cordoned_again(node):
        return patch
    maintained = maintenance_of(node)
    return _without_cordon(node, patch, maintained if _keeps_cordon(maintained, now) else None)


def forget(node: NodeObject, repair: str) -> Patch | None:
    """Remove the taint of a repair that was dropped, and its annotations if its cordon is gone; None for neither."""
    taints = (node.get("spec") or {}).get("taints") or ()
    own = any((taint["key"], taint.get("value")) == (TEMPORARY_TAINT, _short(repair)) for taint in taints)
    patch: Patch = untaint(node) if own else {}
    if cordon_lifted(node) == repair:
        patch["metadata"] = {"annotations": {CORDONED_BY: None, REASON: None}}
    return patch or None


def give_up(node: NodeObject, repair: str, reason: str) -> Patch:
    """Cordon, taint and label a node that gpunodes cannot repair."""
    patch = _with_taint(_merged(node, untaint(node)), NEEDS_REPAIR, _short(reason), "NoSchedule")
    annotations = {NEEDS_REPAIR: reason}
    # A roll-out that is abandoned leaves its cordon to this mark.
    if not _is_cordoned(node) or (ROLLOUT_CORDON in _annotations(node) and not cordoned_again(node)):
        annotations |= {CORDONED_BY: repair, REASON: reason}
    patch["metadata"] = {"annotations": annotations, "labels": {NEEDS_REPAIR: _short(reason)}}
    patch["spec"]["unschedulable"] = True
    return patch


def clear(node: NodeObject, now: float) -> Patch:
    """Remove all annotations, labels and taints of repairs, and their cordon; maintenance keeps it: ``uncordon``."""
    patch = _without_taint(_merged(node, untaint(node)), NEEDS_REPAIR)
    removed = dict.fromkeys((CORDONED_BY, REASON, REPAIRS, NEEDS_REPAIR))
    patch["metadata"] = {"annotations": removed, "labels": {NEEDS_REPAIR: None}}
    if CORDONED_BY in _annotations(node) and not cordoned_again(node):
        maintained = maintenance_of(node)
        patch = _without_cordon(node, patch, maintained if _keeps_cordon(maintained, now) else None)
    return _with_plugin(node, patch)


def _keeps_cordon(maintained: Maintenance | None, now: float) -> bool:
    """Whether a node stays cordoned after other work: of expired maintenance only its own cordon stays."""
    return maintained is not None and (maintained.cordoned or maintained.holds(now))


def _without_cordon(node: NodeObject, patch: Patch, maintained: Maintenance | None) -> Patch:
    """The patch, and the own cordon is removed; ``maintained`` gets the cordon instead, and removes it at its end."""
    if maintained and _is_cordoned(node):
        text = dataclasses.replace(maintained, cordoned=True).text()
        annotations = {**patch["metadata"]["annotations"], MAINTENANCE: text}
        return {**patch, "metadata": {**patch["metadata"], "annotations": annotations}}
    return {**patch, "spec": {**patch.get("spec", {}), "unschedulable": False}}


# Patches of maintenance


def begin_maintenance(node: NodeObject, made: Maintenance, *, cordon: bool) -> Patch:
    """Block repairs of a node, and cordon it unless it is cordoned.

    The cordon of a repair becomes that of the maintenance, too: it stays until both have ended.
    """
    before = maintenance_of(node)
    schedulable = not _is_cordoned(node)
    own = cordon and (schedulable or bool(cordoned_by(node)))
    own = own or (not schedulable and before is not None and before.cordoned and not cordoned_again(node))
    text = dataclasses.replace(made, cordoned=own).text()
    patch: Patch = {"metadata": {"annotations": {MAINTENANCE: text}}}
    return _with_own_cordon(node, patch) if cordon and schedulable else patch


def end_maintenance(node: NodeObject, kept: Maintenance | None = None) -> Patch | None:
    """Undo :func:`begin_maintenance` and its cordon; ``kept`` is the maintenance without a cordon that goes on."""
    before, annotations = maintenance_of(node), _annotations(node)
    if MAINTENANCE not in annotations:
        return None
    patch: Patch = {"metadata": {"annotations": {MAINTENANCE: kept.text() if kept else None}}}
    if before and before.cordoned and NEEDS_REPAIR in annotations:
        # A repair gave up the node after its maintenance expired, or before: now the cordon belongs to the repair.
        patch["metadata"]["annotations"][CORDONED_BY] = annotations.get(CORDONED_BY, "maintenance")
    elif before and before.cordoned and not cordoned_by(node) and not cordoned_again(node):
        patch["spec"] = {"unschedulable": False}
    return patch


# Patches of roll-outs


def begin_rollout(node: NodeObject, rollout: str, *, cordon: bool) -> Patch | None:
    """Mark a node for a roll-out, and cordon it if ``cordon``; None if it has another mark or cordon."""
    annotations = _annotations(node)
    foreign = _is_cordoned(node) and ROLLOUT not in annotations
    foreign = foreign or (ROLLOUT_CORDON in annotations and cordoned_again(node))
    if annotations.get(ROLLOUT, rollout) != rollout or foreign:
        return None
    patch: Patch = {"metadata": {"annotations": {ROLLOUT: rollout}}}
    if cordon:
        patch["metadata"]["annotations"][ROLLOUT_CORDON] = "true"
        patch = _with_own_cordon(node, patch)
    return _with_plugin(node, patch)


def end_rollout(node: NodeObject, rollout: str, now: float, *, done: bool) -> Patch | None:
    """Undo :func:`begin_rollout`; a cordon of others stays, as do the marks of another roll-out. ``done``: all is well.

    Maintenance that began while the node was cordoned keeps it cordoned, and removes that cordon at its own end, if it
    has not expired. ``now`` in seconds since 1970.
    """
    annotations, maintained = _annotations(node), maintenance_of(node)
    if annotations.get(ROLLOUT) != rollout:
        return None
    patch: Patch = {"metadata": {"annotations": {ROLLOUT: None, ROLLOUT_CORDON: None}}}
    if done:
        patch["metadata"]["annotations"][ROLLED_OUT] = rollout
    if cordoned_again(node):
        return patch
    if ROLLOUT_CORDON in annotations and maintained and _keeps_cordon(maintained, now):
        patch["metadata"]["annotations"][MAINTENANCE] = dataclasses.replace(maintained, cordoned=True).text()
    elif ROLLOUT_CORDON in annotations and NEEDS_REPAIR not in annotations:
        patch["spec"] = {"unschedulable": False}
    return patch


# What all patches share


def return_plugin(node: NodeObject) -> Patch | None:
    """Give a node back to the device plugin, if a command that did not end took it; None for another node.

    The patches that begin a repair or a roll-out, or clear a node, do that too: nothing else works on its driver then.
    """
    return _with_plugin(node, {}) or None


def _with_plugin(node: NodeObject, patch: Patch) -> Patch:
    found, metadata = pools.with_plugin(node), patch.get("metadata", {})
    if not found:
        return patch
    return {**patch, "metadata": {**metadata, **{kind: {**metadata.get(kind, {}), **found[kind]} for kind in found}}}


def _with_own_cordon(node: NodeObject, patch: Patch) -> Patch:
    """The patch with a cordon that is no repair's: annotations that `kubectl uncordon` left would say otherwise."""
    left = {key: None for key in (CORDONED_BY, REASON) if key in _annotations(node) and not _is_cordoned(node)}
    annotations = {**patch["metadata"]["annotations"], **left}
    return {**patch, "metadata": {**patch["metadata"], "annotations": annotations}, "spec": {"unschedulable": True}}


def finished(patch: Patch, node: NodeObject) -> Patch:
    """The patch, valid only for this version of the node, with each annotation as one printable line.

    A reason may quote a machine's output, and `kubectl` prints it.
    """
    metadata = {**patch.get("metadata", {}), "resourceVersion": node["metadata"]["resourceVersion"]}
    texts = metadata.get("annotations", {})
    shown = {name: text if text is None else printable(text) for name, text in texts.items()}
    return {**patch, "metadata": {**metadata, "annotations": shown} if shown else metadata}


def _annotations(node: NodeObject) -> Mapping[str, str]:
    return node["metadata"].get("annotations") or {}


def _is_cordoned(node: NodeObject) -> bool:
    return bool(node.get("spec", {}).get("unschedulable"))


def _with_taint(node: NodeObject, key: str, value: str, effect: str) -> Patch:
    patch = _without_taint(node, key)
    patch["spec"]["taints"].append({"key": key, "value": value, "effect": effect})
    return patch


def _without_taint(node: NodeObject, key: str) -> Patch:
    taints = [taint for taint in (node.get("spec") or {}).get("taints") or () if taint["key"] != key]
    return {"spec": {"taints": taints}}


def _merged(node: NodeObject, patch: Patch) -> NodeObject:
    return {**node, "spec": {**(node.get("spec") or {}), **patch["spec"]}}


def _short(reason: str) -> str:
    """A reason as the value of a label or taint: at most 63 letters, digits, dashes, dots and underscores."""
    replaced = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in reason.lower())
    value = "-".join(part for part in replaced.split("-") if part)
    return value[:60].strip("-._") or "unknown"


def _stamp(moment: float) -> str:
    return dt.datetime.fromtimestamp(moment, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
