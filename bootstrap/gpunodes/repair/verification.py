"""Whether a machine works again after an escalation step. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpunodes.health.model import State, Verdict
from gpunodes.repair import escalation
from gpunodes.repair.escalation import VerifiedBy
from gpunodes.repair.findings import describe
from gpunodes.repair.policy import Node
from gpunodes.repair.record import RepairRecord


def not_healthy(record: RepairRecord, verdict: Verdict, facts: Mapping[str, Any] | None) -> tuple[str, bool]:
    """Why the machine is not healthy yet after a repair, "" if it is; and whether this is final."""
    booted = _by_boot(record)
    if booted and record.boot_id and verdict.boot_id == record.boot_id:
        return "it is still in the old boot", False
    return unhealthy(verdict, facts, record.gpus, booted=booted)


def unhealthy(
    verdict: Verdict,
    facts: Mapping[str, Any] | None,
    expected: int | None,
    *,
    booted: bool = False,
    tolerated: State = State.HEALTHY,
) -> tuple[str, bool]:
    """Why a machine is not healthy yet, "" if it is; and whether this is final.

    ``expected`` is how many GPUs it must have; ``tolerated`` the worst state that it may have, which is the state that
    it was in before the work.
    """
    if verdict.state.rank > tolerated.rank and verdict.state in (State.UNREACHABLE, State.UNKNOWN):
        return f"it is {verdict.state.value}{f': {verdict.wanted}' if verdict.wanted else ''}", False
    if verdict.state.rank > tolerated.rank:
        # Findings of the log, and a hang, are final; a driver may still be loading.
        logged = any(finding.first for finding in verdict.findings if finding.state is not State.HEALTHY)
        found = f"{describe(verdict)} ({verdict.state.value})"
        return f"the {'new boot' if booted else 'GPU'} has findings: {found}", (logged or verdict.hung_in_driver)
    gpus = max(expected or 0, verdict.gpus_expected or 0)
    if gpus and (verdict.gpus_seen or 0) < gpus:
        return f"{verdict.gpus_seen or 0} of {gpus} GPUs are visible", False
    smi = (facts or {}).get("smi", {})
    if gpus and smi.get("status") != "ok":
        message = " ".join(str(smi.get("message") or smi.get("status")).split())
        return f"nvidia-smi fails: {message[:200]}", False
    return "", False


def not_ready(record: RepairRecord, node: Node | None, boot_id: str = "") -> str:
    """Why the machine's node is not ready yet, "" if it is; ``boot_id`` is the machine's boot, if known."""
    return unready(node, record.capacity, boot_id, record.boot_id if _by_boot(record) else "")


def unready(node: Node | None, capacity: int | None, boot_id: str = "", old_boot: str = "") -> str:
    """Why a node is not ready yet, "" if it is. ``capacity`` GPUs must be allocatable.

    ``boot_id`` is the machine's present boot, if known; else it must not be ``old_boot``, if that is known.
    """
    if node is None:
        return "its node is no longer in the cluster"
    offered = node.allocatable or 0
    old = node.boot_id != boot_id if boot_id else bool(old_boot) and node.boot_id == old_boot
    checks = (
        (not node.ready, "its kubelet is not ready"),
        (old, "its kubelet has not reported the new boot yet"),
        (offered < (capacity or 0), f"{offered} of {capacity} GPUs can be allocated"),
    )
    return next((why for failed, why in checks if failed), "")


def verified_state(verdict: Verdict) -> str:
    """A healthy verdict in one line."""
    gpus = f", {verdict.gpus_seen} GPUs" if verdict.gpus_seen is not None else ""
    return f"{verdict.state.value}{gpus}, boot {verdict.boot_id or 'unknown'}"


def _by_boot(record: RepairRecord) -> bool:
    return escalation.step(record.step).verified_by is VerifiedBy.BOOT
