"""Lease objects: their names, what is read from them, and what a command writes into its own."""

from __future__ import annotations

import datetime as dt
import hashlib
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpunodes.engine.leases.errors import Lost, Unsure
from gpunodes.engine.leases.holders import dead_here
from gpunodes.engine.locks import clock

LABEL = ("app.kubernetes.io/managed-by", "gpunodes")
PREFIX = "gpunodes-machine-"
DECISION_LOCK = "gpunodes-decision"
"""The lock that a command holds while it decides which machines are repaired."""
ROLLOUT_LOCK = "gpunodes-rollout"
"""The lock of the cluster's one roll-out, with its record."""
_RECORD = "gpunodes.dev/record"
_MACHINE = "gpunodes.dev/machine"
"""Annotation: the name of the machine that the holder uses."""
_ALONE = "gpunodes.dev/alone"
"""Annotation: the holder works on the control plane, so no other command may work on any machine."""
_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"
_MAX_NAME_LENGTH = 253
"""Maximum length of an object's name (Kubernetes, DNS subdomain names)."""
_MARGIN = 1 / 6
"""The last part of a Lease's duration, in which an own lock already counts as lost."""


def lock_name(machine: str, node: str = "") -> str:
    """The name of the Lease that locks a machine: from the name of its node, or else from its name in the inventory.

    So all commands use the same Lease for a machine: a node has one name, even if two inventories name its machine
    differently. A name that is invalid or too long for an object is replaced by a hash.
    """
    name = (node or machine).lower()
    if len(PREFIX) + len(name) <= _MAX_NAME_LENGTH and re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name):
        return PREFIX + name
    readable = "-".join(re.findall(r"[a-z0-9]+", name))[:40].strip("-")
    return f"{PREFIX}{readable or 'x'}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """A lock, as read from the cluster."""

    name: str
    """The name of the Lease, as of ``lock_name``."""
    machine: str
    """The name that the holder uses: of the node, or of the machine in an inventory."""
    holder: str
    since: str
    """When the holder took the lock, in the control plane's time."""
    live: bool
    expired: bool
    """It has a holder that may be alive, but was not renewed in time, by the control plane's clock (``expiry.py``)."""
    version: str
    """Another one after each change."""
    alone: bool
    """The holder works on the control plane."""
    record: str
    """The text of the repair's record."""

    def excludes(self, holder: str, *, alone: bool) -> bool:
        """Whether it excludes, while it is held, work of ``holder`` on other machines, which is ``alone`` or not."""
        return self.holder != holder and (alone or self.alone)


def observed(item: Mapping[str, Any], now: float) -> ObservedLease:
    """The lock that a Lease is; ``now`` is the control plane's time, in seconds since 1970."""
    metadata, spec = item["metadata"], item["spec"]
    annotations = metadata.get("annotations") or {}
    acquired, holder = spec.get("acquireTime") or "", spec.get("holderIdentity") or ""
    may_live = bool(holder) and not dead_here(holder)
    in_time = may_live and _is_in_time(spec, now)
    return ObservedLease(
        name=metadata["name"],
        machine=annotations.get(_MACHINE) or metadata["name"].removeprefix(PREFIX),
        holder=holder,
        since=acquired.partition(".")[0].replace("T", " ") + " UTC" if acquired else "",
        live=in_time,
        expired=may_live and not in_time,
        version=metadata.get("resourceVersion") or "",
        alone=_ALONE in annotations,
        record=annotations.get(_RECORD, ""),
    )


def _is_in_time(spec: Mapping[str, Any], now: float) -> bool:
    """Whether a Lease was renewed in time; one with an invalid time was not, nor one from the future.

    Its holder's control plane has another clock then, or had one: only a renewal shows that it lives (``expiry.py``).
    """
    try:
        renewed = dt.datetime.strptime(spec["renewTime"], _TIME).replace(tzinfo=dt.UTC).timestamp()
        return abs(now - renewed) < float(spec["leaseDurationSeconds"])
    except (KeyError, TypeError, ValueError):
        return False


@dataclass(slots=True)
class HeldLease:
    """A lock of this command."""

    name: str
    """The name of the Lease, as of ``lock_name``."""
    machine: str
    record: str
    """The text of the repair's record."""
    alone: bool
    stops_api: bool = False
    """The work may stop the API for longer than a lock lasts: then the lock is renewed also after it has expired."""
    found: Mapping[str, Any] = field(default_factory=dict)
    """The Lease as it was last read or written; empty before the first time."""
    previous_record: str = ""
    """The record found in the Lease, of a repair that a dead holder did not end."""
    renewed: float = field(default_factory=clock)
    """When the last successful renewal was sent, by ``clock``."""
    lost: str = ""
    """How the lock was lost, "" while it is held."""
    mutex: threading.Lock = field(default_factory=threading.Lock)

    def age(self) -> float:
        """Seconds since the last successful renewal was sent."""
        return clock() - self.renewed

    def expired(self, duration_s: float) -> bool:
        """Whether the lock was not renewed for so long that another command may have begun."""
        return self.age() > duration_s * (1 - _MARGIN)

    @property
    def expiry(self) -> str:
        """How a lock was lost that was not renewed in time."""
        return f"expired: it was not renewed for {self.age():.0f} s, and another command may have begun meanwhile"

    def check(self, duration_s: float) -> None:
        """Raise Lost or Unsure unless the lock is held for certain; sends no request."""
        if self.lost:
            raise Lost(
                f"the lock on {self.machine} {self.lost}",
                "a lock that is held to the end",
                "check what other commands do, then run this one again",
            )
        if self.expired(duration_s):
            raise Unsure(
                f"the lock on {self.machine} could not be renewed for {self.age():.0f} s: "
                "another command may hold it now",
                "a control plane that responds",
                "run the command again when it responds",
            )

    def taken(self, holder: str, duration_s: float, now: float) -> dict[str, Any]:
        """The Lease to write to take the lock; ``now`` is the control plane's time, in seconds since 1970."""
        transitions = (self.found.get("spec", {}).get("leaseTransitions") or 0) + (1 if self.found else 0)
        return self._object(holder, duration_s, _stamp(now), _stamp(now), transitions)

    def held(self, holder: str, duration_s: float, now: float) -> dict[str, Any]:
        """The Lease to write to renew the lock; ``now`` as above."""
        before = self.found.get("spec", {})
        acquired = before.get("acquireTime", _stamp(now))
        return self._object(holder, duration_s, acquired, _stamp(now), before.get("leaseTransitions") or 0)

    def _object(self, holder: str, duration_s: float, acquired: str, stamp: str, transitions: int) -> dict[str, Any]:
        annotations = {_RECORD: self.record, _MACHINE: self.machine} | ({_ALONE: "true"} if self.alone else {})
        metadata: dict[str, Any] = {"name": self.name, "labels": dict([LABEL]), "annotations": annotations}
        if self.found:
            metadata["resourceVersion"] = self.found["metadata"]["resourceVersion"]
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": round(duration_s),
                "acquireTime": acquired,
                "renewTime": stamp,
                "leaseTransitions": transitions,
            },
        }

    def released(self) -> dict[str, Any]:
        """The Lease to write to release the lock: without a holder, with the record of the repair to resume."""
        metadata = {name: self.found["metadata"][name] for name in ("name", "labels", "resourceVersion")}
        metadata["annotations"] = {_RECORD: self.previous_record, _MACHINE: self.machine}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {}}

    def end(self, *, keep_record: bool) -> tuple[str, str, dict[str, Any]]:
        """The request that releases the lock: method, path and body; refused if another command has taken the Lease."""
        if keep_record and self.previous_record:
            return "PUT", f"/{self.name}", self.released()
        preconditions = {name: self.found["metadata"][name] for name in ("uid", "resourceVersion")}
        return "DELETE", f"/{self.name}", {"preconditions": preconditions}


def _stamp(moment: float) -> str:
    return dt.datetime.fromtimestamp(moment, dt.UTC).strftime(_TIME)
