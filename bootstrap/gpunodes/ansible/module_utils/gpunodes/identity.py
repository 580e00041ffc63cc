"""Which machine is which node is which BMC. Pure; the only place that decides it.

The boot id identifies: a kernel draws it anew at every boot, and the kubelet reports it. The system UUID and the
machine-id only contradict, or confirm what a name or an address suggests: clones share them, and boards ship
placeholders. A placeholder is taken for unknown: it neither contradicts nor confirms.

:meth:`Matcher.match` finds the node of a machine. "Confirmed" means that a UUID or machine-id is known on both sides
and equal, "contradicted" that one is known on both sides and different. The first row that applies decides:

====  ==================================================================  ==========================================
row   what is known                                                       result
====  ==================================================================  ==========================================
 1    several nodes report the machine's boot id                          refused
 2    one node reports it, and another node has the machine's name        refused
 3    one node reports it, and another machine of the inventory has       refused: a clone that joined as that one,
      that node's name                                                    or two inventory entries mixed up
 3a   one node reports it, and has the inventory address of another       refused: a machine that reports another's
      machine                                                             boot id, or two entries mixed up
 3b   one node reports it, and another node has the machine's inventory   refused: like 3a
      address
 4    one node reports it, the UUIDs differ                               refused: no UUID changes within a boot
 4a   one node reports it, which neither the machine's name nor its       refused: whoever heard of a boot id can
      address in the inventory suggests; not confirmed, and the node      report it
      reports a UUID or machine-id
 5    one node reports it                                                 that node, by the boot id
 6    a node has the machine's name; contradicted                         refused
 7    a node has the machine's name and another machine's boot id         refused
 8    a node has the machine's name; the machine answers, its boot is     that node, by the name: its kubelet has not
      another one; confirmed                                              reported the new boot yet
 9    like 8, but not confirmed                                           refused
10    a node has the machine's name                                       that node, by the name
11    one node has the name without its domain (either way), or the       as 6 to 8; not confirmed: refused, or taken
      address; no other node and no other machine has it                  where nothing is done by it (``sure=False``)
11a   like 11, and another node has the machine's host name or UUID       refused: an address is what a node says
12    a node has the host name that the machine itself reports            refused: a clone reports that, too
13    none of these                                                       no node
====  ==================================================================  ==========================================

In rows 2 and 3 a name counts without its domain, too, where one of both lacks it and it is no other's. In row 11 a
machine-id that several nodes have confirms nothing. Rows 3a and 3b leave out a node that has the machine's own name or
inventory address, and addresses that several machines of the inventory have (a gateway's). Where the inventory's
addresses are no node's (NAT, another network), they are silent.

What is recorded of another machine's boot (rows 3 and 7) is nothing against a machine that answers and has the node's
name or address: it may be of a time when the inventory had them mixed up.

A machine that does not answer goes by its name and its recorded identity (``answered=False``): a recorded boot id that
a node still reports identifies; an older one proves nothing, so that row 9 does not apply; a recorded UUID or
machine-id contradicts as a reported one does.

:meth:`Matcher.joining` finds the node that a machine which is to join takes the place of; its machine-id may be new:

====  ==================================================================  ==========================================
 1    rows 1, 3, 3a, 3b, 4 and 4a above                                   refused
 2    one node reports its boot id, and has another name than its host    refused: no join of it leaves that
 3    one node reports its boot id                                        that node: an interrupted join left it
 4    another machine of the inventory is called as its host              refused, whether there is such a node or not
 5    a node has its host name; the UUIDs differ, or neither UUID nor     refused: it is another machine's
      machine-id is known to be equal, or the node has another address
 6    a node has its host name                                            that node: left by the machine before
 7    none of these                                                       no node
====  ==================================================================  ==========================================

Names are compared in lower case: the kubelet's node name is the host name in lower case (kubernetes.io, "Node names").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

_LONGEST = 253
"""Longest value that is taken from a report: that of a DNS name."""
_MACS = 64
_Thing = TypeVar("_Thing")

# Boards whose vendor never set a UUID: AMI's default in both byte orders, a sample of the SMBIOS documents, and what
# osquery lists (osquery/core/system.cpp, kPlaceholderHardwareUUIDList).
_PLACEHOLDERS = frozenset(
    {
        "03000200040005000006000700080009",
        "00020003000400050006000700080009",
        "030201000504070608090a0b0c0d0e0f",
        "10000000000080000040000000000000",
        "12345678123456781234567812345678",
        "123456781234567890abcddeefaabbcc",
    }
)
_NO_SERIALS = frozenset(
    {
        "0123456789",
        "123456789",
        "1234567890",
        "default string",
        "none",
        "not applicable",
        "not available",
        "not present",
        "not specified",
        "null",
        "o.e.m.",
        "system serial number",
        "to be filled by o.e.m.",
        "unknown",
        "n/a",
    }
)


@dataclass(frozen=True)
class MachineIdentity:
    """A machine of the inventory: what the inventory says, and what the machine reports or once reported."""

    name: str
    addresses: tuple[str, ...] = ()
    """Those of the inventory first, then those that it reports."""
    hostname: str = ""
    boot_id: str = ""
    machine_id: str = ""
    system_uuid: str = ""
    serial: str = ""
    macs: tuple[str, ...] = ()
    """Of its physical network interfaces."""
    answered: bool = False
    """Whether it answered now; what was recorded earlier may be out of date."""

    @property
    def address(self) -> str:
        """That of the inventory."""
        return self.addresses[0] if self.addresses else ""

    @property
    def text(self) -> str:
        known = (("boot", self.boot_id), ("UUID", self.system_uuid), ("machine-id", self.machine_id))
        return _text(f"machine {self.name}", known, "it has never answered" if not self.answered else "it reports none")


@dataclass(frozen=True)
class NodeIdentity:
    """A node as its API object describes it."""

    name: str
    addresses: tuple[str, ...] = ()
    boot_id: str = ""
    machine_id: str = ""
    system_uuid: str = ""

    @property
    def text(self) -> str:
        known = (("boot", self.boot_id), ("UUID", self.system_uuid), ("machine-id", self.machine_id))
        return _text(f"node {self.name}", known, "it reports nothing")


@dataclass(frozen=True)
class BmcIdentity:
    """A machine as its BMC describes it."""

    system_uuid: str = ""
    serial: str = ""
    macs: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        known = (("UUID", self.system_uuid), ("serial number", self.serial), ("MAC", " ".join(self.macs)))
        return _text("its BMC", known, "it reports nothing that identifies a machine")


@dataclass(frozen=True)
class Match:
    """The node of a machine, or None; ``by`` says what identified it, ``contradiction`` why nothing may be done."""

    node: NodeIdentity | None = None
    by: str = ""
    contradiction: str = ""


@dataclass(frozen=True)
class BmcMatch:
    """Whether a BMC is the machine's: True, False, or None where nothing tells; ``why`` in words."""

    same: bool | None
    why: str


def reported(name: str, address: str, facts: Mapping[str, Any] | None, *, answered: bool = True) -> MachineIdentity:
    """A machine by what it reports: a document of the probe, a result of ``host_facts``, or a record of either.

    Whatever has another type than expected is taken for unknown: it comes from the machine.
    """
    facts = facts or {}
    own = _string(facts.get("default_address"))
    macs = facts.get("macs")
    return MachineIdentity(
        name=name,
        addresses=tuple(dict.fromkeys(each for each in (address, own) if each)),
        hostname=_string(facts.get("hostname")).lower(),
        boot_id=_string(facts.get("boot_id")).lower(),
        machine_id=_string(facts.get("machine_id")).lower(),
        system_uuid=_string(facts.get("product_uuid")).lower(),
        serial=_string(facts.get("product_serial")),
        macs=tuple(_string(each).lower() for each in macs[:_MACS]) if isinstance(macs, (list, tuple)) else (),
        answered=answered and bool(facts),
    )


def described_bmc(document: Mapping[str, Any]) -> BmcIdentity:
    """A machine as its BMC describes it, under the names that machines report it by; other types are unknown."""
    machine = reported("", "", document)
    return BmcIdentity(machine.system_uuid, machine.serial, machine.macs)


def described(node: Mapping[str, Any]) -> NodeIdentity:
    """A node as ``cluster.describe`` has it."""
    addresses = node.get("addresses") or [node.get("address")]
    return NodeIdentity(
        name=_string(node.get("name")),
        addresses=tuple(_string(each) for each in addresses if each),
        boot_id=_string(node.get("boot_id")).lower(),
        machine_id=_string(node.get("machine_id")).lower(),
        system_uuid=_string(node.get("product_uuid")).lower(),
    )


class Matcher:
    """Finds the nodes of machines: ``nodes`` are all of the cluster, ``machines`` all of the inventory."""

    def __init__(self, nodes: Iterable[NodeIdentity], machines: Iterable[MachineIdentity] = ()) -> None:
        nodes, machines = list(nodes), list(machines)
        self._nodes = {node.name: node for node in nodes}
        self._booted = _grouped((node.boot_id, node) for node in nodes)
        self._short = _grouped((_short(node.name), node) for node in nodes)
        self._installed = _grouped((node.machine_id, node) for node in nodes)
        self._boards = _grouped((form, node) for node in nodes for form in _forms(_uuid(node.system_uuid)))
        self._addressed = _grouped((address, node) for node in nodes for address in set(node.addresses))
        self._machines_named = _grouped((machine.name.lower(), machine) for machine in machines)
        self._machines_booted = _grouped((machine.boot_id, machine) for machine in machines)
        self._machines_short = _grouped((_short(machine.name.lower()), machine) for machine in machines)
        self._machines_placed = _grouped((machine.address, machine) for machine in machines)
        self._machines_addressed = _grouped((address, each) for each in machines for address in set(each.addresses))

    def match(self, machine: MachineIdentity, *, sure: bool = True) -> Match:
        """The node that ``machine`` is.

        ``sure=False`` takes a name without its domain, or an address, unconfirmed: for what is only shown.
        """
        named, short = self._nodes.get(machine.name.lower()), self._by_short(machine)
        if found := self._by_boot(machine):
            called = named or short
            if found.node and called and called is not found.node:
                return _refused(machine, called, f"the node in its boot is {found.node.name}")
            return found
        if named:
            return self._suggested(machine, named, "name", enough=True)
        node, by = (short, "name without its domain") if short else (self._by_address(machine), "address")
        if node:
            return self._claimed(machine, node) or self._suggested(machine, node, by, enough=not sure)
        if node := self._nodes.get(machine.hostname):
            return _refused(machine, node, "it calls itself so, and nothing else says that it is that node")
        return Match()

    def joining(self, machine: MachineIdentity) -> Match:
        """The node that an earlier join left, for a machine that is to join; none where its name is free."""
        if found := self._by_boot(machine):
            if found.node and machine.hostname and found.node.name != machine.hostname:
                return _refused(machine, found.node, f"it would join as the node {machine.hostname}")
            return found
        node = self._nodes.get(machine.hostname)
        if other := self._called(machine.hostname, machine):
            place = node or NodeIdentity(machine.hostname)
            return _refused(machine, place, f"the inventory has another machine of that name, {other.name}")
        return self._left_by(machine, node) if node else Match()

    @staticmethod
    def _left_by(machine: MachineIdentity, node: NodeIdentity) -> Match:
        """Whether a node of the machine's host name was left by it, and not by another that was called so."""
        equal, different = _compared(machine, node)
        if "UUID" in different or not equal:
            return _refused(machine, node, "the node of that name is another machine's")
        if node.addresses and not set(node.addresses) & set(machine.addresses):
            return _refused(machine, node, f"the node of that name has the address {node.addresses[0]}")
        return Match(node, f"host name and {equal[0]}")

    def _by_boot(self, machine: MachineIdentity) -> Match | None:
        """What the boot id says; None for nothing."""
        found = self._booted.get(machine.boot_id)
        if not found:
            return None
        node = found[0]
        if len(found) > 1:
            names = " and ".join(each.name for each in found[:3])
            return _refused(machine, node, f"the nodes {names} report one boot id")
        if other := self._called(node.name, machine):
            return _refused(machine, node, f"the inventory has another machine of that name, {other.name}")
        other = self._other_in_boot(machine, node)
        verb = "reports" if other and other.answered else "is recorded with"
        equal, different = _compared(machine, node)
        why = f"the machine {other.name} {verb} the same boot id" if other else self._misplaced(machine, node)
        if not why and "UUID" in different:
            why = "one boot has one UUID"
        if not (why or equal or self._suggests(machine, node)) and (node.system_uuid or node.machine_id):
            why = "only a boot id, which others can report, says that it is that node"
        return (
            _refused(machine, node, why) if why else Match(node, "boot id" if machine.answered else "recorded boot id")
        )

    def _misplaced(self, machine: MachineIdentity, node: NodeIdentity) -> str:
        """Why the inventory's addresses say that the node is not the machine in its boot; "" where they are silent."""
        if _stands(machine, node):
            return ""
        for address in node.addresses:
            owners = self._machines_placed.get(address, ())
            if len(owners) == 1 and owners[0].name != machine.name:
                return f"the node has the address {address}, which the inventory gives to {owners[0].name}"
        others = self._addressed.get(machine.address, ())
        if others and not self._rival(self._machines_placed, machine.address, machine):
            return f"the node {others[0].name} has the machine's address {machine.address}"
        return ""

    def _suggests(self, machine: MachineIdentity, node: NodeIdentity) -> bool:
        """Whether the inventory's name or address of a machine is the node's."""
        return _stands(machine, node) or self._by_short(machine) is node

    def _claimed(self, machine: MachineIdentity, node: NodeIdentity) -> Match | None:
        """A refusal where the machine rather is another node than the one that has its address or half its name."""
        named = self._nodes.get(machine.hostname)
        alike = next((each for each in self._boards.get(_uuid(machine.system_uuid), ()) if each is not node), None)
        if other := alike or (named if named is not node else None):
            what = "UUID" if other is alike else "host name"
            return _refused(machine, node, f"the node {other.name} has the machine's {what}")
        return None

    def _suggested(self, machine: MachineIdentity, node: NodeIdentity, by: str, *, enough: bool) -> Match:
        """Hold a node that a name or an address suggests against the rest; ``enough``: unconfirmed it counts, too."""
        if other := self._other_in_boot(machine, node):
            which = "boot" if other.answered else "recorded boot"
            return _refused(machine, node, f"the node is in the {which} of the machine {other.name}")
        equal, different = _compared(machine, node)
        if different:
            verb = "is another" if len(different) == 1 else "are others"
            again = "; it was installed anew: `gpunodes join` gives it its node back" if equal == ["UUID"] else ""
            return _refused(machine, node, f"its {' and '.join(different)} {verb}{again}")
        if not enough and len(self._installed.get(node.machine_id, ())) > 1:
            equal = [what for what in equal if what != "machine-id"]
        rebooted = machine.answered and machine.boot_id and node.boot_id and machine.boot_id != node.boot_id
        if equal or (enough and not rebooted):
            return Match(node, f"{by} and {equal[0]}" if equal else by)
        if rebooted:
            why = "the node reports another boot, and no UUID or machine-id says that it is the same machine"
        else:
            why = f"only its {by} suggests it"
        return _refused(machine, node, why)

    def _by_short(self, machine: MachineIdentity) -> NodeIdentity | None:
        """The node whose name differs by the domain alone, which one of both lacks."""
        name = machine.name.lower()
        if _is_address(name) or self._rival(self._machines_short, _short(name), machine):
            return None
        found = [node for node in self._short.get(_short(name), ()) if ("." in node.name) != ("." in name)]
        return found[0] if len(found) == 1 else None

    def _by_address(self, machine: MachineIdentity) -> NodeIdentity | None:
        """The node that has an address of the machine which no other machine, and no other node, has."""
        own = [each for each in machine.addresses if not self._rival(self._machines_addressed, each, machine)]
        # What another machine reports takes no address away that the inventory gives to this one.
        if not self._rival(self._machines_placed, machine.address, machine):
            own.append(machine.address)
        found = {node.name: node for address in own for node in self._addressed.get(address, ())}
        node = next(iter(found.values()), None)
        if node is None or len(found) > 1 or self._called(node.name, machine):
            return None
        return node

    def _called(self, name: str, machine: MachineIdentity) -> MachineIdentity | None:
        """Another machine that the inventory calls ``name``, or so but for the domain, which one of both lacks."""
        if other := self._rival(self._machines_named, name, machine):
            return other
        if not name or _is_address(name) or _short(machine.name.lower()) == _short(name):
            return None
        others = self._machines_short.get(_short(name), ())
        return next((other for other in others if ("." in other.name) != ("." in name)), None)

    def _other_in_boot(self, machine: MachineIdentity, node: NodeIdentity) -> MachineIdentity | None:
        """Another machine in the node's boot.

        A record is older than what a machine answers that stands where the node does, and nothing against it.
        """
        others = [each for each in self._machines_booted.get(node.boot_id, ()) if each.name != machine.name]
        trusted = machine.answered and _stands(machine, node)
        return next((each for each in others if each.answered or not trusted), None)

    def _rival(
        self, group: Mapping[str, list[MachineIdentity]], key: str, machine: MachineIdentity
    ) -> MachineIdentity | None:
        """Another machine that has what is to be one machine's own."""
        return next((other for other in group.get(key, ()) if key and other.name != machine.name), None)


def match_bmc(machine: MachineIdentity, bmc: BmcIdentity) -> BmcMatch:
    """Whether a BMC belongs to ``machine``.

    The UUID decides, in whichever byte order; then a common MAC address; then the serial number, which the machines of
    one chassis may share: an equal one proves nothing where MAC addresses are known and none is common. Last, that
    none is common. ``why`` names both sides.
    """
    both = f"{machine_text(machine)}; {bmc.text}"
    ours, theirs = _macs(machine.macs), _macs(bmc.macs)
    common, apart = sorted(ours & theirs), bool(ours and theirs) and not ours & theirs
    if (same := same_uuid(machine.system_uuid, bmc.system_uuid)) is not None:
        return BmcMatch(same, f"{'one UUID' if same else 'two UUIDs'}: {both}")
    if common:
        return BmcMatch(True, f"both have the MAC address {common[0]}: {both}")
    mine, its = _serial(machine.serial), _serial(bmc.serial)
    if mine and its and mine != its:
        return BmcMatch(False, f"two serial numbers: {both}")
    if mine and its:
        return BmcMatch(
            None if apart else True, f"one serial number{', no common MAC address' if apart else ''}: {both}"
        )
    return BmcMatch(False if apart else None, f"{'no common MAC address' if apart else 'nothing to compare'}: {both}")


def machine_text(machine: MachineIdentity) -> str:
    """What a machine's hardware says of itself, in words."""
    known = (("UUID", machine.system_uuid), ("serial number", machine.serial), ("MAC", " ".join(machine.macs)))
    return _text(f"machine {machine.name}", known, "nothing is known of its hardware")


def same_uuid(one: str, other: str) -> bool | None:
    """Whether two UUIDs are the same, in whichever byte order; None where one is unknown or a placeholder.

    SMBIOS stores the first three fields little-endian, and vendors differ in whether they show them so (SMBIOS 2.6,
    7.2.1); IPMI sends all bytes in reverse (IPMI 2.0, 20.8).
    """
    first, second = _uuid(one), _uuid(other)
    if not first or not second:
        return None
    return first in _forms(second)


def _stands(machine: MachineIdentity, node: NodeIdentity) -> bool:
    """Whether a node has the name or the address that the inventory gives to a machine."""
    return node.name == machine.name.lower() or bool(machine.address and machine.address in node.addresses)


def _compared(machine: MachineIdentity, node: NodeIdentity) -> tuple[list[str], list[str]]:
    """By what a machine and a node are equal, and by what they differ."""
    results = {
        "UUID": same_uuid(machine.system_uuid, node.system_uuid),
        "machine-id": _same_machine_id(machine.machine_id, node.machine_id),
    }
    return [what for what, same in results.items() if same], [what for what, same in results.items() if same is False]


def _grouped(pairs: Iterable[tuple[str, _Thing]]) -> dict[str, list[_Thing]]:
    found: dict[str, list[_Thing]] = {}
    for key, thing in pairs:
        if key:
            found.setdefault(key, []).append(thing)
    return found


def _short(name: str) -> str:
    return name.partition(".")[0]


def _refused(machine: MachineIdentity, node: NodeIdentity, why: str) -> Match:
    return Match(contradiction=f"{machine.text} and {node.text} cannot be told to be the same: {why}")


def _text(what: str, known: Sequence[tuple[str, str]], nothing: str) -> str:
    told = ", ".join(f"{name} {value}" for name, value in known if value)
    return f"{what} ({told or nothing})"


def _string(value: object) -> str:
    """A value that a machine reported: one line of printable characters, or nothing."""
    if not isinstance(value, str) or len(value) > _LONGEST or not value.isprintable():
        return ""
    return value.strip()


def _uuid(text: str) -> str:
    """32 hexadecimal digits; "" for what is none, and for a placeholder."""
    digits = text.strip().lower().replace("-", "")
    if not re.fullmatch(r"[0-9a-f]{32}", digits) or digits == digits[:2] * 16 or digits in _PLACEHOLDERS:
        return ""
    return digits


def _forms(digits: str) -> set[str]:
    """A UUID's digits in each byte order in which it may be shown; none for ""."""
    reverse = bytes.fromhex(digits)[::-1].hex()
    return {digits, _swapped(digits), reverse, _swapped(reverse)} if digits else set()


def _swapped(digits: str) -> str:
    """The first three fields of a UUID in the other byte order."""
    data = bytes.fromhex(digits)
    return (data[3::-1] + data[5:3:-1] + data[7:5:-1] + data[8:]).hex()


def _same_machine_id(one: str, other: str) -> bool | None:
    """machine-id(5); "uninitialized" and a repeated digit stand for none."""
    first, second = (text.strip().lower().replace("-", "") for text in (one, other))
    if any(not text or text == "uninitialized" or len(set(text)) == 1 for text in (first, second)):
        return None
    return first == second


def _serial(text: str) -> str:
    value = text.strip().lower()
    return "" if value in _NO_SERIALS or len(set(value)) < 2 else value  # noqa: PLR2004 - one sign repeated


def _macs(addresses: Sequence[str]) -> set[str]:
    """MAC addresses that belong to one interface: not zeros, not ones that systems make up for themselves."""
    found = set()
    for address in addresses:
        digits = re.sub(r"[^0-9a-f]", "", address.lower())
        # The second bit of the first byte: locally administered (IEEE 802).
        if len(digits) == 12 and len(set(digits)) > 1 and not int(digits[:2], 16) & 2:  # noqa: PLR2004 - 48 bits
            found.add(":".join(digits[at : at + 2] for at in range(0, 12, 2)))
    return found


def _is_address(name: str) -> bool:
    return bool(re.fullmatch(r"[0-9.]+|[0-9a-f:]*:[0-9a-f:.]*", name))
