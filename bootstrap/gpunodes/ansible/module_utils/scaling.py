"""What the power server of pools that scale and the commands on machines have in common."""

from __future__ import annotations

import json

PROVIDER = "gpunodes://"
"""The providerID of a node of a pool that scales begins with it; the name of the node follows."""
KEPT_OFF = "gpunodes-kept-off"
"""The ConfigMap in kube-system with an entry for each machine that is left off, under the name of its node."""
REMOVED = "gpunodes remove"
"""Who has the machine of a removed node left off; all others are users, NAME@HOST."""


def entry(by: str, since: float, boot_id: str) -> str:
    """The text of an entry: who had it left off, when, in seconds since 1970, and the boot of its node then."""
    return json.dumps({"by": by, "since": round(since), "boot_id": boot_id})
