"""A reinstalled machine, whose old node is in the cluster: which commands find it, and what they advise."""

from __future__ import annotations

from typing import Any

import pytest
from gpunodes.identity.matcher import Match, Matcher
from gpunodes.identity.model import MachineIdentity, described, reported
from gpunodes.model import Role
from gpunodes.planner.candidates import ClusterRequirements, MachineFacts
from gpunodes.planner.preflight import judge

from tests.stand_ins import facts

UUID = "4c4c4544-0042-4810-8052-b2c04f595331"
NODE: dict[str, Any] = {
    "name": "worker-1",
    "address": "10.0.0.11",
    "addresses": ["10.0.0.11"],
    "boot_id": "old-boot",
    "machine_id": "old",
    "product_uuid": UUID,
    "role": "worker",
}


def report(uuid: str | None = UUID, **changes: Any) -> dict[str, Any]:
    """What the machine reports after it was reinstalled."""
    return {**facts(machine_id="new", boot_id="new-boot", product_uuid=uuid), **changes}


def findings(found: dict[str, Any], node: dict[str, Any]) -> list[str]:
    candidate = MachineFacts("worker-1", Role.WORKER, found, address="10.0.0.11")
    requirements = ClusterRequirements("1.36", "sha256:0", [node])
    return [str(each) for each in judge([candidate], requirements) if each.check in {"hostname", "product_uuid"}]


def joining(found: dict[str, Any], node: dict[str, Any]) -> Match:
    subject = reported("worker-1", "10.0.0.11", found)
    return Matcher([described(node)], [subject]).joining(subject)


def test_its_system_uuid_proves_that_the_node_is_its_own() -> None:
    assert findings(report(), NODE) == []
    found = joining(report(), NODE)
    assert found.node
    assert found.by == "host name and UUID"


def test_until_it_joins_other_commands_refuse_it_and_name_the_join() -> None:
    subject = reported("worker-1", "10.0.0.11", report())
    found = Matcher([described(NODE)], [subject]).match(subject)
    assert found.node is None
    assert "its machine-id differs; it was reinstalled: `gpunodes join` restores its node" in found.contradiction


@pytest.mark.parametrize(
    ("found", "node"),
    [
        (report(None), NODE),
        (
            report("03000200-0400-0500-0006-000700080009"),
            {**NODE, "product_uuid": "03000200-0400-0500-0006-000700080009"},
        ),
        (report("ffffffff-0042-4810-8052-b2c04f595331"), NODE),
    ],
    ids=["unknown", "placeholder", "another board"],
)
def test_without_that_proof_the_advice_is_to_delete_the_node(found: dict[str, Any], node: dict[str, Any]) -> None:
    assert joining(found, node).contradiction
    [line] = [each for each in findings(found, node) if "host name" in each or "hostname" in each]
    assert "the same as that of node worker-1" in line
    assert "or delete that node, if its machine no longer exists or was reinstalled" in line
    # The node is gone then, and the name is free.
    subject = reported("worker-1", "10.0.0.11", found)
    assert Matcher([], [subject]).joining(subject) == Match()


def test_a_removal_as_dead_does_not_take_the_node_of_a_machine_that_is_known_to_be_new() -> None:
    """Its new machine-id is recorded: whether that node is its own is not known, so the user deletes it."""
    recorded = MachineIdentity(
        "worker-1", ("10.0.0.11",), machine_id="0123456789abcdef0123456789abcdef", hostname="worker-1"
    )
    node = {**NODE, "machine_id": "fedcba9876543210fedcba9876543210", "product_uuid": ""}
    assert "its machine-id differs" in Matcher([described(node)], [recorded]).match(recorded).contradiction
