"""The stage that verifies that a machine works again, after an escalation step."""

from __future__ import annotations

import time

from gpunodes.engine.cluster.errors import NoResponse, Refused
from gpunodes.engine.history import EntryKind
from gpunodes.operations.repair.tools import Tools
from gpunodes.repair import flow, verification
from gpunodes.repair.record import RepairRecord

_SCAN_PAUSE_S = 20.0
"""Seconds without scans of a machine while its node becomes ready."""


def verify(tools: Tools, record: RepairRecord) -> RepairRecord:
    """Scan the machine until it stays healthy, or until the time limit; the record of the next stage.

    Raises NoResponse and Lost: without a control plane that responds nothing is verified, and the record stays here.
    """
    tools.report("verifying that it is healthy")
    began = time.monotonic()
    deadline = began + tools.limits.verify
    why, bad, healthy_since = "", 0, 0.0
    while True:
        # A scan slows down a booting machine, and its node becomes ready only after it.
        _await_node(tools, record, min(deadline, time.monotonic() + _SCAN_PAUSE_S))
        scan_began = time.monotonic()
        seen = tools.scan()
        why, final = verification.not_healthy(record, seen.verdict, seen.facts)
        now = time.monotonic()
        bad = bad + 1 if final else 0
        healthy_since = 0.0 if why else healthy_since or now
        why = why or _not_ready(tools, record, seen.verdict.boot_id or "")
        # The settle time includes the wait for the node; scans take at most half of the time otherwise.
        pause = max(tools.limits.poll, now - scan_began) if why else tools.limits.settle - (now - healthy_since)
        # A finding that two scans of a boot report is final; everything else may still change.
        if (not why and pause <= 0) or bad > 1 or now > deadline:
            break
        tools.stop.wait(pause)
    if why:
        # The controller's network may have failed instead of the machine. Then the lock is lost.
        tools.lock.confirm(record)
    detail = why or verification.verified_state(seen.verdict)
    tools.report(f"not healthy: {why}" if why else f"verified: {detail}")
    outcome = "failed" if why else "passed"
    tools.note(record, EntryKind.VERIFICATION, record.step, outcome, detail, time.monotonic() - began)
    return flow.verified(record, why, seen.verdict.boot_id or "")


def _await_node(tools: Tools, record: RepairRecord, until: float) -> None:
    """Wait for its node to be ready; until ``until`` (monotonic) at most."""
    while _not_ready(tools, record) and time.monotonic() < until:
        tools.check_stop()
        tools.stop.wait(tools.limits.poll)
    tools.check_stop()


def _not_ready(tools: Tools, record: RepairRecord, boot_id: str = "") -> str:
    """Why its node is not ready yet, "" if it is or with --without-cluster; ``boot_id`` is its boot, if known."""
    if not tools.cluster:
        return ""
    try:
        node = tools.cluster.node(record.node)
    except (NoResponse, Refused) as problem:
        # The API of the only control plane returns with the machine, and is part of what is verified.
        if not tools.lock.stops_api:
            raise
        return str(problem)
    return verification.not_ready(record, node, boot_id)
