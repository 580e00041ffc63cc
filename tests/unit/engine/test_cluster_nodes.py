"""Nodes as the API has them."""

from __future__ import annotations

from typing import Any

import pytest
from gpunodes.engine.cluster import nodes

ZULU = "2027-01-15T08:00:00Z"


@pytest.mark.parametrize(
    ("ready", "expected"),
    [
        ([{"status": "True", "lastTransitionTime": ZULU}], (True, 1_800_000_000.0)),
        ([{"status": "Unknown", "lastTransitionTime": ZULU}], (False, 1_800_000_000.0)),
        ([{"status": "False", "lastTransitionTime": "{{ 7 * 7 }}"}], (False, 0.0)),
        ([{"status": "False", "lastTransitionTime": None}], (False, 0.0)),
        ([{"status": "False", "lastTransitionTime": "0001-01-01T00:00:00Z"}], (False, -62_135_596_800.0)),
        ([], (False, 0.0)),
    ],
)
def test_since_when_a_node_is_ready_or_not(ready: list[dict[str, Any]], expected: tuple[bool, float]) -> None:
    conditions = [{"type": "DiskPressure", "status": "False"}, *({"type": "Ready", **each} for each in ready)]
    found = nodes.parse({"metadata": {"name": "n"}, "status": {"conditions": conditions}}, "pool")
    assert (found.ready, found.changed) == expected
