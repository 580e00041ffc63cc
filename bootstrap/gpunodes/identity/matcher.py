"""Matches machines and nodes.

The boot id identifies a machine: the kernel generates a new one at every boot, and the kubelet reports it. The system
UUID and the machine-id only contradict or confirm what a name or an address suggests: clones share them, and boards
ship placeholders. A placeholder counts as unknown: it neither contradicts nor confirms.

:meth:`Matcher.match` finds the node of a machine. "Confirmed" means that a UUID or machine-id is known on both sides
and equal, "contradicted" that one is known on both sides and different. The first row that applies decides:

====  ==================================================================  ==========================================
row   known facts                                                         result
====  ==================================================================  ==========================================
 1    several nodes report the machine's boot id                          refused
 2    one node reports it, and another node has the machine's name        refused
 3    one node reports it, and another machine of the inventory has       refused: a clone joined under that name, or
      that node's name                                                    two inventory entries are swapped
 3a   one node reports it, and has the inventory address of another       refused: the machine reports the boot id of
      machine                                                             another, or two entries are swapped
 3b   one node reports it, and another node has the machine's inventory   refused: like 3a
      address
 4    one node reports it, the UUIDs differ                               refused: no UUID changes within a boot
 4a   one node reports it; neither the machine's name nor its inventory   refused: any machine that knows a boot id
      address matches that node; not confirmed, and the node reports a    can report it
      UUID or machine-id
 5    one node reports it                                                 that node, by the boot id
 6    a node has the machine's name; contradicted                         refused
 7    a node has the machine's name and another machine's boot id         refused
 8    a node has the machine's name; the machine responds with a          that node, by the name: its kubelet has not
      different boot id; confirmed                                        reported the new boot yet
 9    like 8, but not confirmed                                           refused
10    a node has the machine's name                                       that node, by the name
11    one node has the name without its domain (either way), or the       as 6 to 8; not confirmed: refused, or
      address; no other node and no other machine has it                  shown only (``confirmed=False``)
11a   like 11, and another node has the machine's host name or UUID       refused: a node can report any address
12    a node has the host name that the machine itself reports            refused: a clone reports that, too
13    none of these                                                       no node
====  ==================================================================  ==========================================

In rows 2 and 3, a name without its domain also counts if only one of both names has a domain and no other machine or
node has that name. In row 11, a machine-id that several nodes have does not confirm. Rows 3a and 3b skip a node that
has the machine's own name or inventory address, and addresses that several machines of the inventory have (a
gateway's). They do not apply where no node has an inventory address (NAT, another network).

A recorded boot id of another machine (rows 3 and 7) does not contradict a machine that responds and has the node's
name or address: the record may date from a time when two inventory entries were swapped.

A machine that does not respond is matched by its name and its recorded identity (``responded=False``): a recorded boot
id that a node still reports identifies it; an older one means nothing, so row 9 does not apply; a recorded UUID or
machine-id contradicts like a reported one.

:meth:`Matcher.joining` finds the node that a joining machine replaces; the machine's machine-id may be new:

====  ==================================================================  ==========================================
row   known facts                                                         result
====  ==================================================================  ==========================================
 1    rows 1, 3, 3a, 3b, 4 and 4a above                                   refused
 2    one node reports its boot id, and has a different name than its     refused: its own join never leaves that
      host name
 3    one node reports its boot id                                        that node: an interrupted join left it
 4    another machine of the inventory has its host name as its name      refused, with or without such a node
 5    a node has its host name; the UUIDs differ, or neither UUID nor     refused: it belongs to another machine
      machine-id is known to be equal, or the node has another address
 5a   a node has its host name, and rows 3a or 3b above apply, or         refused: it may report the identity of
      another machine of the inventory has, or is recorded with, that     another machine
      host name
 6    a node has its host name                                            that node: the machine's previous node
 7    none of these                                                       no node
====  ==================================================================  ==========================================

Names are compared in lower case: the kubelet's node name is the host name in lower case (kubernetes.io, "Node names").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from .model import MachineIdentity, NodeIdentity
from .values import byte_orders, is_address, same_machine_id, same_uuid, uuid

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Match:
    """The node of a machine, or None; ``by`` is what identified it, ``contradiction`` why the match is refused."""

    node: NodeIdentity | None = None
    by: str = ""
    contradiction: str = ""


class Matcher:
    """Finds the nodes of machines; ``nodes``: all nodes of the cluster, ``machines``: all machines of the inventory."""

    def __init__(self, nodes: Iterable[NodeIdentity], machines: Iterable[MachineIdentity] = ()) -> None:
        nodes, machines = list(nodes), list(machines)
        self._machines = machines
        self._nodes = {node.name: node for node in nodes}
        self._nodes_by_boot = _grouped((node.boot_id, node) for node in nodes)
        self._nodes_by_short_name = _grouped((_short(node.name), node) for node in nodes)
        self._nodes_by_machine_id = _grouped((node.machine_id, node) for node in nodes)
        self._nodes_by_uuid = _grouped((key, node) for node in nodes for key in byte_orders(uuid(node.system_uuid)))
        self._nodes_by_address = _grouped((address, node) for node in nodes for address in set(node.addresses))
        self._machines_by_name = _grouped((machine.name.lower(), machine) for machine in machines)
        self._machines_by_hostname = _grouped((machine.hostname, machine) for machine in machines)
        self._machines_by_boot = _grouped((machine.boot_id, machine) for machine in machines)
        self._machines_by_short_name = _grouped((_short(machine.name.lower()), machine) for machine in machines)
        self._machines_by_inventory_address = _grouped((machine.address, machine) for machine in machines)
        self._machines_by_address = _grouped((addr, machine) for machine in machines for addr in set(machine.addresses))

    def match(self, machine: MachineIdentity, *, confirmed: bool = True) -> Match:
        """The node of ``machine``.

        ``confirmed=False`` accepts an unconfirmed name without its domain, or address: for display only.
        """
        exact, short = self._nodes.get(machine.name.lower()), self._by_short_name(machine)
        if found := self._by_boot(machine):
            by_name = exact or short
            if found.node and by_name and by_name is not found.node:
                return _refused(machine, by_name, f"the node {found.node.name} reports the machine's boot id")
            return found
        if exact:
            return self._checked(machine, exact, "name", sufficient=True)
        node, by = (short, "name without its domain") if short else (self._by_address(machine), "address")
        if node:
            return self._better_match(machine, node) or self._checked(machine, node, by, sufficient=not confirmed)
        if node := self._nodes.get(machine.hostname):
            return _refused(machine, node, "only its host name matches")
        return Match()

    def joining(self, machine: MachineIdentity) -> Match:
        """The node that an earlier join of a joining machine left; no node where the name is free."""
        if found := self._by_boot(machine):
            if found.node and machine.hostname and found.node.name != machine.hostname:
                return _refused(machine, found.node, f"it would join as the node {machine.hostname}")
            return found
        node = self._nodes.get(machine.hostname)
        if other := self._other_named(machine.hostname, machine):
            refused_node = node or NodeIdentity(machine.hostname)
            return _refused(machine, refused_node, f"the inventory has another machine of that name, {other.name}")
        return self._previous_node(machine, node) if node else Match()

    def owner_of_hostname(self, machine: MachineIdentity) -> str:
        """Who else has the host name that a machine reports, "" if nobody has: a machine can report any name.

        Others are another machine of the inventory with that name or host name, and a node that this machine neither
        has nor left before.
        """
        if other := self._other_named(machine.hostname, machine):
            return f"the machine {other.name}"
        node = self._nodes.get(machine.hostname)
        if node and self.match(machine, confirmed=False).node is node:
            return ""
        if other := self._other_owner(self._machines_by_hostname, machine.hostname, machine):
            return f"the machine {other.name}"
        if node is None:
            return ""
        others = (each for each in self._machines if each.name != machine.name)
        is_left = self.joining(machine).node is node and not any(self.match(each).node is node for each in others)
        return "" if is_left else f"the node {node.name}"

    def _previous_node(self, machine: MachineIdentity, node: NodeIdentity) -> Match:
        """Match a node of the machine's host name if the machine itself left it, not another of the same name.

        A machine can report the identity of another one: what the inventory and the records know counts, too.
        """
        equal, different = _compared(machine, node)
        if "UUID" in different or not equal:
            return _refused(machine, node, "the node of that name belongs to another machine")
        if why := self._address_conflict(machine, node):
            return _refused(machine, node, why)
        if other := self._other_owner(self._machines_by_hostname, node.name, machine):
            return _refused(machine, node, f"the machine {other.name} has that host name, too")
        if node.addresses and not set(node.addresses) & set(machine.addresses):
            return _refused(machine, node, f"the node of that name has the address {node.addresses[0]}")
        return Match(node, f"host name and {equal[0]}")

    def _by_boot(self, machine: MachineIdentity) -> Match | None:
        """The match by the boot id; None where no node reports it."""
        found = self._nodes_by_boot.get(machine.boot_id)
        if not found:
            return None
        node = found[0]
        if len(found) > 1:
            names = " and ".join(each.name for each in found[:3])
            return _refused(machine, node, f"the nodes {names} report the same boot id")
        if other := self._other_named(node.name, machine):
            return _refused(machine, node, f"the inventory has another machine of that name, {other.name}")
        other = self._other_in_boot(machine, node)
        verb = "reports" if other and other.responded else "is recorded with"
        equal, different = _compared(machine, node)
        why = f"the machine {other.name} {verb} the same boot id" if other else self._address_conflict(machine, node)
        if not why and "UUID" in different:
            why = "their UUIDs differ within one boot"
        if not (why or equal or self._is_expected(machine, node)) and (node.system_uuid or node.machine_id):
            why = "only the boot id matches, and other machines can report it"
        return (
            _refused(machine, node, why) if why else Match(node, "boot id" if machine.responded else "recorded boot id")
        )

    def _address_conflict(self, machine: MachineIdentity, node: NodeIdentity) -> str:
        """Why the inventory's addresses contradict the match; "" where they do not."""
        if _has_name_or_address(machine, node):
            return ""
        for address in node.addresses:
            owners = self._machines_by_inventory_address.get(address, ())
            if len(owners) == 1 and owners[0].name != machine.name:
                return f"the node has the address {address}, which the inventory assigns to {owners[0].name}"
        others = self._nodes_by_address.get(machine.address, ())
        if others and not self._other_owner(self._machines_by_inventory_address, machine.address, machine):
            return f"the node {others[0].name} has the machine's address {machine.address}"
        return ""

    def _is_expected(self, machine: MachineIdentity, node: NodeIdentity) -> bool:
        """Whether the node has the machine's inventory name or address."""
        return _has_name_or_address(machine, node) or self._by_short_name(machine) is node

    def _better_match(self, machine: MachineIdentity, node: NodeIdentity) -> Match | None:
        """A refusal where another node than the one with its address or short name has its UUID or host name."""
        by_hostname = self._nodes.get(machine.hostname)
        same_uuids = self._nodes_by_uuid.get(uuid(machine.system_uuid), ())
        by_uuid = next((each for each in same_uuids if each is not node), None)
        if other := by_uuid or (by_hostname if by_hostname is not node else None):
            what = "UUID" if other is by_uuid else "host name"
            return _refused(machine, node, f"the node {other.name} has the machine's {what}")
        return None

    def _checked(self, machine: MachineIdentity, node: NodeIdentity, by: str, *, sufficient: bool) -> Match:
        """Match a node that was found by name or address if the other facts allow it.

        ``sufficient``: it matches without confirmation, too.
        """
        if other := self._other_in_boot(machine, node):
            which = "boot id" if other.responded else "recorded boot id"
            return _refused(machine, node, f"the node has the {which} of the machine {other.name}")
        equal, different = _compared(machine, node)
        if different:
            verb = "differs" if len(different) == 1 else "differ"
            hint = "; it was reinstalled: `gpunodes join` restores its node" if equal == ["UUID"] else ""
            return _refused(machine, node, f"its {' and '.join(different)} {verb}{hint}")
        if not sufficient and len(self._nodes_by_machine_id.get(node.machine_id, ())) > 1:
            equal = [what for what in equal if what != "machine-id"]
        rebooted = machine.responded and machine.boot_id and node.boot_id and machine.boot_id != node.boot_id
        if equal or (sufficient and not rebooted):
            return Match(node, f"{by} and {equal[0]}" if equal else by)
        if rebooted:
            why = "the node reports another boot id, and no UUID or machine-id confirms that it is the same machine"
        else:
            why = f"only its {by} matches"
        return _refused(machine, node, why)

    def _by_short_name(self, machine: MachineIdentity) -> NodeIdentity | None:
        """The node whose name differs only by a domain that one of both names lacks."""
        name = machine.name.lower()
        if is_address(name) or self._other_owner(self._machines_by_short_name, _short(name), machine):
            return None
        same_short = self._nodes_by_short_name.get(_short(name), ())
        found = [node for node in same_short if ("." in node.name) != ("." in name)]
        return found[0] if len(found) == 1 else None

    def _by_address(self, machine: MachineIdentity) -> NodeIdentity | None:
        """The node that has an address of the machine, if no other machine and no other node has that address."""
        own = [each for each in machine.addresses if not self._other_owner(self._machines_by_address, each, machine)]
        # The inventory address stays this machine's even if another machine reports it.
        if not self._other_owner(self._machines_by_inventory_address, machine.address, machine):
            own.append(machine.address)
        found = {node.name: node for address in own for node in self._nodes_by_address.get(address, ())}
        node = next(iter(found.values()), None)
        if node is None or len(found) > 1 or self._other_named(node.name, machine):
            return None
        return node

    def _other_named(self, name: str, machine: MachineIdentity) -> MachineIdentity | None:
        """Another machine with that inventory name, or one that differs only by a domain that one of both lacks."""
        if other := self._other_owner(self._machines_by_name, name, machine):
            return other
        if not name or is_address(name) or _short(machine.name.lower()) == _short(name):
            return None
        others = self._machines_by_short_name.get(_short(name), ())
        return next((other for other in others if ("." in other.name) != ("." in name)), None)

    def _other_in_boot(self, machine: MachineIdentity, node: NodeIdentity) -> MachineIdentity | None:
        """Another machine with the node's boot id.

        A record does not count against a machine that responds and has the node's name or address: it is older.
        """
        others = [each for each in self._machines_by_boot.get(node.boot_id, ()) if each.name != machine.name]
        trusted = machine.responded and _has_name_or_address(machine, node)
        return next((each for each in others if each.responded or not trusted), None)

    def _other_owner(
        self, group: Mapping[str, list[MachineIdentity]], key: str, machine: MachineIdentity
    ) -> MachineIdentity | None:
        """Another machine in ``group`` with the same key."""
        return next((other for other in group.get(key, ()) if key and other.name != machine.name), None)


def _has_name_or_address(machine: MachineIdentity, node: NodeIdentity) -> bool:
    """Whether a node has the name or the address that the inventory assigns to a machine."""
    return node.name == machine.name.lower() or bool(machine.address and machine.address in node.addresses)


def _compared(machine: MachineIdentity, node: NodeIdentity) -> tuple[list[str], list[str]]:
    """The names of the identifiers that are equal, and of those that differ."""
    results = {
        "UUID": same_uuid(machine.system_uuid, node.system_uuid),
        "machine-id": same_machine_id(machine.machine_id, node.machine_id),
    }
    return [what for what, same in results.items() if same], [what for what, same in results.items() if same is False]


def _grouped(pairs: Iterable[tuple[str, _Item]]) -> dict[str, list[_Item]]:
    groups: dict[str, list[_Item]] = {}
    for key, item in pairs:
        if key:
            groups.setdefault(key, []).append(item)
    return groups


def _short(name: str) -> str:
    return name.partition(".")[0]


def _refused(machine: MachineIdentity, node: NodeIdentity, why: str) -> Match:
    return Match(contradiction=f"{machine.text} and {node.text} may not be the same machine: {why}")
