"""Matches of machines, nodes and BMCs: every row of the tables in identity/matcher.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gpunodes.identity.bmc import match_bmc
from gpunodes.identity.matcher import Match, Matcher
from gpunodes.identity.model import BmcIdentity, MachineIdentity, NodeIdentity, described, reported

UUID = "4c4c4544-0042-4810-8052-b2c04f595331"
SWAPPED = "44454c4c-4200-1048-8052-b2c04f595331"
OTHER = "9c1e4b1a-5c3b-4d0e-9a2f-0123456789ab"
PLACEHOLDERS = [
    "",
    "00000000-0000-0000-0000-000000000000",
    "ffffffff-ffff-ffff-ffff-ffffffffffff",
    "03000200-0400-0500-0006-000700080009",
    "Not Settable",
]
GPU = MachineIdentity("gpu-1", ("10.0.0.1",), "gpu-1", "boot-1", "id-1", UUID, responded=True)
NODE = NodeIdentity("gpu-1", ("10.0.0.1",), "boot-1", "id-1", UUID)
OTHER_MACHINE = MachineIdentity("gpu-2", ("10.0.0.2",), "gpu-2", "boot-2", "id-2", OTHER, responded=True)
REBOOTED = replace(GPU, boot_id="boot-1b")
UNRESPONSIVE = MachineIdentity("gpu-1", ("10.0.0.1",))
IMPOSTOR = MachineIdentity("10.0.0.5", ("10.0.0.5", "10.0.0.6"), "gpu-b", "boot-1", responded=True)
"""A machine that reports the boot id of another, and no UUID."""
RECORD = MachineIdentity("gpu-9", ("10.0.0.9",), boot_id="boot-1")
REPORTS_ADDRESS = replace(OTHER_MACHINE, name="10.0.0.2", addresses=("10.0.0.2", "10.0.0.1"))
"""A machine that reports the address of another as its own."""
BY_ADDRESS = MachineIdentity("10.0.0.1", ("10.0.0.1",))
CONFIRMED = replace(IMPOSTOR, system_uuid=UUID)
REPORTING_ALL = replace(GPU, name="10.0.0.5", addresses=("10.0.0.5", "10.0.0.1"), boot_id="b")
"""A machine that reports all that another one's node reports, but for the boot id."""
OWN_NODE = NodeIdentity("gpu-b", addresses=("10.0.0.5",), boot_id="boot-b")
OTHER_NODE = NodeIdentity("gpu-b", addresses=("192.168.0.6",), boot_id="boot-b")


CLAIMING_NODE = replace(NODE, name="evil", boot_id="e")
"""A node that claims an address, a UUID and a machine-id of another."""


def named(name: str, **changes: Any) -> MachineIdentity:
    """A machine whose inventory address is its DNS name."""
    return replace(GPU, name=name, addresses=(name,), **changes)


def machine(**changes: Any) -> MachineIdentity:
    return replace(GPU, **changes)


def node(**changes: Any) -> NodeIdentity:
    return replace(NODE, **changes)


@pytest.mark.parametrize(
    ("row", "subject", "nodes", "others", "expected"),
    [
        # Boot id.
        (1, GPU, [node(), node(name="evil")], [], "gpu-1 and evil report the same boot id"),
        (2, GPU, [node(boot_id="x"), node(name="other")], [], "the node other reports the machine's boot id"),
        (
            3,
            machine(name="gpu-5"),
            [node()],
            [OTHER_MACHINE, machine(boot_id="b")],
            "another machine of that name, gpu-1",
        ),
        (3, GPU, [node()], [machine(name="gpu-5")], "the machine gpu-5 reports the same boot id"),
        (3, IMPOSTOR, [node(name="gpu-a")], [BY_ADDRESS], "address 10.0.0.1, which the inventory assigns to 10.0.0.1"),
        (3, replace(IMPOSTOR, responded=False), [node(name="gpu-a")], [BY_ADDRESS], "which the inventory assigns to"),
        (3, IMPOSTOR, [node(name="gpu-a"), OWN_NODE], [], "the node gpu-b has the machine's address 10.0.0.5"),
        (3, IMPOSTOR, [node(addresses=("192.168.0.5",))], [RECORD], "machine gpu-9 is recorded with the same boot id"),
        (3, replace(GPU, responded=False), [node()], [RECORD], "machine gpu-9 is recorded with the same boot id"),
        (4, GPU, [node(system_uuid=OTHER)], [], "their UUIDs differ within one boot"),
        (
            4,
            IMPOSTOR,
            [node(addresses=("192.168.0.5",))],
            [],
            "only the boot id matches, and other machines can report it",
        ),
        (
            4,
            replace(IMPOSTOR, name="v.example.org"),
            [node(addresses=())],
            [],
            "only the boot id matches, and other machines can report it",
        ),
        (5, replace(IMPOSTOR, name="a"), [NodeIdentity("gpu-1", boot_id="boot-1")], [], "gpu-1 by boot id"),
        # Names without their domain.
        (
            2,
            named("v.example.org"),
            [node(), NodeIdentity("v", boot_id="v")],
            [],
            "the node gpu-1 reports the machine's boot id",
        ),
        (
            2,
            named("v"),
            [node(), NodeIdentity("v.example.org", boot_id="v")],
            [],
            "the node gpu-1 reports the machine's boot id",
        ),
        (
            3,
            named("v.example.org"),
            [node()],
            [named("gpu-1.example.org", boot_id="")],
            "of that name, gpu-1.example.org",
        ),
        (
            3,
            named("v"),
            [node(name="gpu-1.a.org")],
            [named("gpu-1", boot_id="")],
            "another machine of that name, gpu-1",
        ),
        (5, named("gpu-1.a.org"), [node()], [named("gpu-1.b.org", boot_id="")], "gpu-1 by boot id"),
        (5, GPU, [node(), NodeIdentity("gpu-2")], [OTHER_MACHINE], "gpu-1 by boot id"),
        (5, machine(name="gpu-1.example.org"), [node()], [], "gpu-1 by boot id"),
        (5, machine(name="rack-7"), [node(addresses=("10.9.9.9",))], [], "gpu-1 by boot id"),
        (5, GPU, [node(machine_id="before systemd-machine-id-setup")], [], "gpu-1 by boot id"),
        (5, GPU, [node(), node(name="evil", boot_id="e", addresses=("10.0.0.1",))], [], "gpu-1 by boot id"),
        (5, replace(GPU, responded=False), [node()], [], "gpu-1 by recorded boot id"),
        (5, GPU, [node()], [RECORD], "gpu-1 by boot id"),
        (5, replace(GPU, name="10.0.0.1"), [node()], [RECORD], "gpu-1 by boot id"),
        # Inventory addresses that decide nothing: other networks, names, one gateway for all, the node's own.
        (5, CONFIRMED, [node(addresses=("192.168.0.5",)), OTHER_NODE], [BY_ADDRESS], "gpu-1 by boot id"),
        (5, replace(CONFIRMED, addresses=("bastion",)), [node()], [], "gpu-1 by boot id"),
        (
            5,
            CONFIRMED,
            [node(), OWN_NODE],
            [machine(name="b", addresses=("10.0.0.5",), boot_id="b")],
            "gpu-1 by boot id",
        ),
        (5, IMPOSTOR, [node(addresses=("10.0.0.1", "10.0.0.5"))], [BY_ADDRESS], "gpu-1 by boot id"),
        (5, GPU, [node(addresses=("192.168.0.1",)), node(name="evil", boot_id="e")], [], "gpu-1 by boot id"),
        # Name.
        (6, REBOOTED, [node(system_uuid=OTHER)], [], "its UUID differs"),
        (6, REBOOTED, [node(machine_id="id-9")], [], "machine-id differs; it was reinstalled: `gpunodes join`"),
        (6, REBOOTED, [node(machine_id="id-9", system_uuid=OTHER)], [], "its UUID and machine-id differ"),
        (6, replace(REBOOTED, responded=False), [node(system_uuid=OTHER)], [], "its UUID differs"),
        (7, UNRESPONSIVE, [node()], [RECORD], "the node has the recorded boot id of the machine gpu-9"),
        (8, REBOOTED, [node()], [RECORD], "gpu-1 by name and UUID"),
        (7, UNRESPONSIVE, [node()], [machine(name="gpu-5")], "the node has the boot id of the machine gpu-5"),
        (8, REBOOTED, [node()], [], "gpu-1 by name and UUID"),
        (8, REBOOTED, [node(system_uuid="")], [], "gpu-1 by name and machine-id"),
        (8, machine(boot_id="b", system_uuid=SWAPPED), [node()], [], "gpu-1 by name and UUID"),
        (9, machine(boot_id="b", system_uuid="", machine_id=""), [node()], [], "reports another boot id"),
        (10, UNRESPONSIVE, [node()], [], "gpu-1 by name"),
        (10, replace(UNRESPONSIVE, name="GPU-1"), [node()], [], "gpu-1 by name"),
        (10, replace(REBOOTED, responded=False), [node(system_uuid="", machine_id="")], [], "gpu-1 by name"),
        (10, GPU, [node(boot_id="", system_uuid="", machine_id="")], [], "gpu-1 by name"),
        # Name without its domain, and address.
        (11, replace(REBOOTED, name="gpu-1.example.org"), [node()], [], "gpu-1 by name without its domain and UUID"),
        (11, REBOOTED, [node(name="gpu-1.example.org")], [], "gpu-1.example.org by name without its domain and UUID"),
        (11, replace(UNRESPONSIVE, name="gpu-1.example.org"), [node()], [], "only its name without its domain matches"),
        (11, replace(REBOOTED, name="gpu-1.example.org"), [node(machine_id="id-9")], [], "its machine-id differs"),
        (
            13,
            replace(UNRESPONSIVE, name="gpu-1.a", addresses=()),
            [node()],
            [replace(UNRESPONSIVE, name="gpu-1.b")],
            "",
        ),
        (11, replace(REBOOTED, name="10.0.0.1"), [node()], [], "gpu-1 by address and UUID"),
        (11, replace(UNRESPONSIVE, name="10.0.0.1"), [node()], [], "only its address matches"),
        (
            11,
            replace(UNRESPONSIVE, name="10.0.0.1", system_uuid=UUID),
            [node()],
            [REPORTS_ADDRESS],
            "gpu-1 by address and UUID",
        ),
        (11, replace(REBOOTED, name="a"), [node(name="evil", system_uuid=OTHER)], [], "its UUID differs"),
        # A node reports the machine's address, and another node has the machine's UUID or host name.
        (
            11,
            replace(REBOOTED, name="10.0.0.1"),
            [CLAIMING_NODE, node(addresses=())],
            [],
            "node gpu-1 has the machine's UUID",
        ),
        (
            11,
            replace(REBOOTED, name="10.0.0.1"),
            [CLAIMING_NODE, node(addresses=(), system_uuid="")],
            [],
            "the node gpu-1 has the machine's host name",
        ),
        (
            11,
            replace(REBOOTED, name="10.0.0.1", hostname="a", system_uuid=""),
            [CLAIMING_NODE, node(addresses=())],
            [],
            "no UUID or machine-id confirms",
        ),
        (13, replace(UNRESPONSIVE, name="a"), [node(), node(name="evil", boot_id="e")], [], ""),
        (13, replace(UNRESPONSIVE, name="a"), [node(name="b")], [replace(UNRESPONSIVE, name="c")], ""),
        (13, replace(UNRESPONSIVE, name="a"), [node(name="gpu-2")], [OTHER_MACHINE], ""),
        # The machine's own host name.
        (12, machine(name="gpu-5", addresses=(), boot_id="b"), [node()], [], "only its host name matches"),
        (12, machine(name="gpu-5", addresses=(), boot_id="b"), [node()], [GPU], "only its host name matches"),
        (13, machine(name="gpu-5", addresses=(), hostname="gpu-5", boot_id="b"), [node()], [GPU], ""),
    ],
)
def test_every_row_of_the_table(
    row: int, subject: MachineIdentity, nodes: list[NodeIdentity], others: list[MachineIdentity], expected: str
) -> None:
    """The table in the module's docstring: a node, no node, or a refusal that names both sides."""
    found = Matcher(nodes, [subject, *others]).match(subject)
    if row in {5, 8, 10} or " by " in expected:
        assert not found.contradiction
        assert found.node is not None
        assert f"{found.node.name} by {found.by}" == expected
    elif row == 13:
        assert found == Match()
    else:
        assert found.node is None
        assert expected in found.contradiction
        assert subject.name in found.contradiction
        assert "node " in found.contradiction


@pytest.mark.parametrize("placeholder", PLACEHOLDERS)
def test_placeholder_neither_contradicts_nor_confirms(placeholder: str) -> None:
    """Boards whose vendor did not set a UUID all report the same placeholder."""
    assert Matcher([node(system_uuid=placeholder)]).match(GPU).node == node(system_uuid=placeholder)
    blank = machine(boot_id="b", system_uuid=placeholder, machine_id="")
    refused = Matcher([node(system_uuid=placeholder, machine_id="")]).match(blank)
    assert "reports another boot id" in refused.contradiction
    assert Matcher([node()]).match(machine(boot_id="b", system_uuid=placeholder)).by == "name and machine-id"


def test_unconfirmed_match_is_accepted_for_display() -> None:
    """`gpunodes status` matches an inventory of addresses although it probes no machine."""
    for name in ("10.0.0.1", "gpu-1.example.org"):
        assert Matcher([node()]).match(replace(UNRESPONSIVE, name=name), confirmed=False).node == NODE


@pytest.mark.parametrize(
    ("subject", "nodes", "others", "expected"),
    [
        (GPU, [node(), node(name="b")], [], "report the same boot id"),
        (machine(name="gpu-5"), [node()], [GPU], "another machine of that name, gpu-1"),
        (IMPOSTOR, [node(name="gpu-a")], [BY_ADDRESS], "which the inventory assigns to 10.0.0.1"),
        (IMPOSTOR, [node(name="gpu-a"), OWN_NODE], [], "the node gpu-b has the machine's address 10.0.0.5"),
        (CONFIRMED, [node(addresses=("192.168.0.5",)), OTHER_NODE], [BY_ADDRESS], "would join as the node gpu-b"),
        (replace(CONFIRMED, hostname="gpu-1"), [node(addresses=())], [BY_ADDRESS], "gpu-1 by boot id"),
        (GPU, [node()], [], "gpu-1 by boot id"),
        (
            machine(name="gpu-5", boot_id="b"),
            [],
            [OTHER_MACHINE, machine(boot_id="c")],
            "another machine of that name, gpu-1",
        ),
        (machine(name="gpu-5", boot_id="b"), [], [named("gpu-1.a.org")], "another machine of that name, gpu-1.a.org"),
        (named("gpu-1.b.org", boot_id="b"), [], [named("gpu-1.a.org")], ""),
        (machine(name="gpu-5", boot_id="b"), [node()], [GPU], "another machine of that name, gpu-1"),
        (machine(name="a", boot_id="b", system_uuid=OTHER), [node()], [], "belongs to another machine"),
        (machine(name="a", boot_id="b", system_uuid="", machine_id="new"), [node()], [], "belongs to another machine"),
        (machine(name="a", boot_id="b", addresses=("10.0.0.9",)), [node()], [], "has the address 10.0.0.1"),
        # The inventory's names are no names of nodes.
        (REPORTING_ALL, [node()], [BY_ADDRESS], "which the inventory assigns to 10.0.0.1"),
        (REPORTING_ALL, [node(), OWN_NODE], [], "the node gpu-b has the machine's address 10.0.0.5"),
        (
            REPORTING_ALL,
            [node()],
            [replace(BY_ADDRESS, addresses=(), hostname="gpu-1")],
            "10.0.0.1 has that host name, too",
        ),
        (machine(boot_id="b", machine_id="new"), [node()], [], "gpu-1 by host name and UUID"),
        (machine(boot_id="b", system_uuid=PLACEHOLDERS[1]), [node()], [], "gpu-1 by host name and machine-id"),
        (machine(hostname="gpu-5", boot_id="b"), [node()], [], ""),
    ],
)
def test_joining_machine_replaces_only_its_own_node(
    subject: MachineIdentity, nodes: list[NodeIdentity], others: list[MachineIdentity], expected: str
) -> None:
    """The second table: a reinstalled machine has a new machine-id, a cloned disk another machine's name."""
    found = Matcher(nodes, [subject, *others]).joining(subject)
    if not expected:
        assert found == Match()
    elif found.node:
        assert f"{found.node.name} by {found.by}" == expected
    else:
        assert expected in found.contradiction


@pytest.mark.parametrize(
    ("subject", "nodes", "others", "owner"),
    [
        (GPU, [NODE], [OTHER_MACHINE], ""),
        (GPU, [], [OTHER_MACHINE], ""),
        (machine(hostname="free"), [NODE], [OTHER_MACHINE], ""),
        # Another machine of the inventory has the name, or reports it.
        (machine(hostname="gpu-2"), [NODE], [OTHER_MACHINE], "the machine gpu-2"),
        (machine(hostname="gpu-2.example.com"), [NODE], [OTHER_MACHINE], "the machine gpu-2"),
        (machine(hostname="rack-7"), [], [replace(OTHER_MACHINE, hostname="rack-7")], "the machine gpu-2"),
        # A node has it: that of another machine, whatever this one reports, or one that this one left.
        (machine(hostname="gpu-9"), [NODE, NodeIdentity("gpu-9")], [], "the node gpu-9"),
        (replace(named("rack-1", boot_id="b"), addresses=("10.0.0.1",)), [NODE], [], ""),
        (named("rack-1", boot_id="b"), [replace(NODE, addresses=())], [], ""),
        (named("rack-1", boot_id="b"), [replace(NODE, addresses=())], [named("rack-2", hostname="")], "the node gpu-1"),
    ],
)
def test_a_host_name_may_be_that_of_another(
    subject: MachineIdentity, nodes: list[NodeIdentity], others: list[MachineIdentity], owner: str
) -> None:
    assert Matcher(nodes, [subject, *others]).owner_of_hostname(subject) == owner


def test_invalid_reported_values_are_unknown() -> None:
    """Values of a wrong type, with several lines or of excessive length are unknown, not errors."""
    invalid = {"hostname": ["a"], "boot_id": 0.42, "machine_id": "a\nb", "product_uuid": "x" * 999, "macs": {"a": 1}}
    assert reported("a", "10.0.0.1", invalid) == MachineIdentity("a", ("10.0.0.1",), responded=True)
    assert not reported("a", "10.0.0.1", None).responded
    assert described({"name": "a", "address": "", "machine_id": None}) == NodeIdentity("a")


BMC = BmcIdentity(UUID, "ABC123", ("3c:ec:ef:00:00:01",))
MAC = "3C-EC-EF-00-00-01"
OTHER_MAC = "3c:ec:ef:00:00:02"


@pytest.mark.parametrize(
    ("subject", "bmc", "same"),
    [
        (machine(), BMC, True),
        # Clones, and boards of one vendor, may share a UUID.
        (machine(serial="XYZ", macs=(OTHER_MAC,)), BMC, False),
        (machine(serial="XYZ"), BMC, False),
        (machine(macs=(OTHER_MAC,)), BMC, None),
        (machine(serial="abc123", macs=(OTHER_MAC,)), BMC, None),
        (machine(serial="To Be Filled By O.E.M.", macs=(OTHER_MAC,)), BMC, None),
        (machine(serial="XYZ", macs=(OTHER_MAC, MAC)), BMC, True),
        (machine(serial="abc123"), BMC, True),
        # Virtual machines, also those of the lab: their addresses are locally administered.
        (machine(macs=("52:54:00:00:00:01",)), BmcIdentity(UUID, "", ("52:54:00:00:00:01",)), True),
        (machine(system_uuid=SWAPPED), BMC, True),
        (machine(system_uuid="3153594f-c0b2-5280-1048-420044454c4c"), BMC, True),
        (machine(system_uuid=OTHER), BMC, False),
        (machine(system_uuid=OTHER, macs=(MAC,)), BMC, False),
        (machine(system_uuid="", macs=(MAC,)), BMC, True),
        (machine(system_uuid="", serial="XYZ", macs=(MAC,)), BMC, True),
        (machine(system_uuid="", serial="abc123", macs=(OTHER_MAC,)), BMC, None),
        (machine(system_uuid="fe" * 16), replace(BMC, system_uuid="fe" * 16), None),
        (machine(system_uuid="", serial="123456789"), replace(BMC, serial="123456789"), None),
        (machine(system_uuid=OTHER, serial="abc123"), BMC, False),
        (machine(system_uuid=""), BMC, None),
        (machine(system_uuid=PLACEHOLDERS[3], serial="abc123 "), BMC, True),
        (machine(system_uuid="", serial="XYZ"), BMC, False),
        (machine(system_uuid="", serial="To Be Filled By O.E.M."), BMC, None),
        (machine(system_uuid="", macs=(OTHER_MAC,)), BMC, False),
        (machine(system_uuid="", macs=("52:54:00:00:00:01",)), replace(BMC, macs=("52:54:00:00:00:02",)), None),
        (UNRESPONSIVE, BMC, None),
        (machine(), BmcIdentity(), None),
    ],
)
def test_bmc_is_compared_with_its_machine(subject: MachineIdentity, bmc: BmcIdentity, same: bool | None) -> None:
    """The table of ``match_bmc``; the message always names both."""
    found = match_bmc(subject, bmc)
    assert found.same is same, found
    assert f"machine {subject.name}" in found.why
    assert "its BMC" in found.why
