"""The identities of machines, nodes and BMCs, as they are reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MAX_LENGTH = 253
"""Maximum length of a reported value: that of a DNS name."""
_MAX_MACS = 64
_MAX_ADDRESSES = 64


@dataclass(frozen=True)
class MachineIdentity:
    """A machine of the inventory: its inventory entry, and what it reports or once reported."""

    name: str
    addresses: tuple[str, ...] = ()
    """The inventory address first, then the reported ones."""
    hostname: str = ""
    boot_id: str = ""
    machine_id: str = ""
    system_uuid: str = ""
    serial: str = ""
    macs: tuple[str, ...] = ()
    """The MAC addresses of its physical network interfaces."""
    responded: bool = False
    """Whether these are current values; recorded ones may be out of date."""

    @property
    def address(self) -> str:
        """The inventory address."""
        return self.addresses[0] if self.addresses else ""

    @property
    def text(self) -> str:
        known = (("boot", self.boot_id), ("UUID", self.system_uuid), ("machine-id", self.machine_id))
        missing = "it reports no identity" if self.responded else "it has never responded"
        return _text(f"machine {self.name}", known, missing)

    @property
    def has_hardware(self) -> bool:
        """Whether something of its hardware is known, by which a BMC can be matched."""
        return bool(self.system_uuid or self.serial or self.macs)

    @property
    def hardware_text(self) -> str:
        """The hardware identity that it reports."""
        known = (("UUID", self.system_uuid), ("serial number", self.serial), ("MAC", " ".join(self.macs)))
        return _text(f"machine {self.name}", known, "its hardware is unknown")


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
        return _text(f"node {self.name}", known, "it reports no identity")


@dataclass(frozen=True)
class BmcIdentity:
    """The identity of a machine that its BMC reports."""

    system_uuid: str = ""
    serial: str = ""
    macs: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        known = (("UUID", self.system_uuid), ("serial number", self.serial), ("MAC", " ".join(self.macs)))
        return _text("its BMC", known, "it reports no UUID, serial number or MAC address")


def reported(name: str, address: str, facts: Mapping[str, Any] | None, *, responded: bool = True) -> MachineIdentity:
    """The identity in facts of a machine: a document of the probe, a result of ``host_facts``, or a record of either.

    A value of an unexpected type counts as unknown: the machine controls these facts.
    """
    facts = facts or {}
    own = facts.get("addresses")
    known = [address, facts.get("default_address"), *(own[:_MAX_ADDRESSES] if isinstance(own, (list, tuple)) else ())]
    macs = facts.get("macs")
    return MachineIdentity(
        name=name,
        addresses=tuple(dict.fromkeys(text for each in known if (text := _string(each)))),
        hostname=_string(facts.get("hostname")).lower(),
        boot_id=_string(facts.get("boot_id")).lower(),
        machine_id=_string(facts.get("machine_id")).lower(),
        system_uuid=_string(facts.get("product_uuid")).lower(),
        serial=_string(facts.get("product_serial")),
        macs=tuple(_string(mac).lower() for mac in macs[:_MAX_MACS]) if isinstance(macs, (list, tuple)) else (),
        responded=responded and bool(facts),
    )


def described(node: Mapping[str, Any]) -> NodeIdentity:
    """The identity of a node from a document of ``cluster_info``."""
    addresses = node.get("addresses") or [node.get("address")]
    return NodeIdentity(
        name=_string(node.get("name")),
        addresses=tuple(_string(address) for address in addresses if address),
        boot_id=_string(node.get("boot_id")).lower(),
        machine_id=_string(node.get("machine_id")).lower(),
        system_uuid=_string(node.get("product_uuid")).lower(),
    )


def described_bmc(document: Mapping[str, Any]) -> BmcIdentity:
    """The identity that a BMC reports, under the key names of machine facts; a value of another type is unknown."""
    machine = reported("", "", document)
    return BmcIdentity(machine.system_uuid, machine.serial, machine.macs)


def _text(what: str, known: Sequence[tuple[str, str]], missing: str) -> str:
    values = ", ".join(f"{name} {value}" for name, value in known if value)
    return f"{what} ({values or missing})"


def _string(value: object) -> str:
    """A reported value if it is one line of printable characters, otherwise ""."""
    if not isinstance(value, str) or len(value) > _MAX_LENGTH or not value.isprintable():
        return ""
    return value.strip()
