"""Machines without a BMC: switched on by Wake-on-LAN; the network shows whether they are on.

Source of the packet: AMD, "Magic Packet Technology" (white paper 20213): six bytes FF, then the address 16 times.
"""

from __future__ import annotations

import errno
import socket
import time

from gpunodes.engine.power import Access, Order, PowerProblem, PowerState, Trouble
from gpunodes.errors import WrongInput
from gpunodes.identity.model import BmcIdentity

BROADCAST, PORT = "255.255.255.255", 9
"""Where the packet is sent unless the settings say otherwise; the port is the one of the service discard."""
_PACKETS = 3
"""UDP may lose one."""
_TRIES, _TIMEOUT_S, _PAUSE_S = 3, 2.0, 0.5
# The machine, or a router that waited for it in vain, does not respond; other errors concern the controller.
_SILENT = frozenset({errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT})
# Its kernel responds, if only to refuse.
_ALIVE = frozenset({errno.ECONNREFUSED, errno.ECONNRESET})


class WakeOnLan:
    """One machine: ``access.macs`` are the addresses to wake, ``access.reached`` is where its SSH server listens."""

    change_s = 1800.0
    """A server may test its memory and its GPUs for many minutes before its network works."""

    def __init__(self, machine: str, access: Access) -> None:
        self._machine = machine
        self._macs = [bytes.fromhex(mac.replace(":", "").replace("-", "")) for mac in access.macs]
        self._reached = access.reached
        host, port = access.place
        self._broadcast = (host or BROADCAST, int(port or PORT))
        self._shared = access.shared
        self.name = f"Wake-on-LAN to {', '.join(access.macs) or 'no address'}"

    def state(self) -> PowerState:
        """On if the machine's SSH port responds in any way, off if it does not in several tries.

        Raises PowerProblem if the controller cannot find that out.
        """
        for left in reversed(range(_TRIES)):
            if self._responds():
                return PowerState.ON
            if left:
                time.sleep(_PAUSE_S)
        return PowerState.OFF

    def order(self, order: Order) -> None:
        """Send the packet; raises PowerProblem for any other action than on, and if it would wake another machine."""
        if order is not Order.ON:
            raise PowerProblem(
                Trouble.REFUSED,
                f"{self._machine} has no BMC that could do {order.value}: Wake-on-LAN only switches on",
                f"`gpunodes power {self._machine} off` shuts its system down over SSH; one that does not respond is "
                "switched off on site",
            )
        if self._shared:
            raise PowerProblem(Trouble.WRONG_MACHINE, self._shared, f"set gpunodes_bmc_mac of {self._machine}")
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
                sending.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                for mac in self._macs * _PACKETS:
                    sending.sendto(packet(mac), self._broadcast)
        except OSError as error:
            raise PowerProblem(
                Trouble.UNREACHABLE,
                f"{self.name} cannot be sent to {self._broadcast[0]}: {error.strerror or error}",
                "correct gpunodes_bmc_address, the broadcast address of the machine's network",
            ) from error

    def identity(self) -> BmcIdentity:
        """The addresses that the packet wakes: nothing responds to it."""
        return BmcIdentity(macs=tuple(mac.hex(":") for mac in self._macs))

    def change_password(self, _new: str) -> None:
        """Raises WrongInput: there is none."""
        raise WrongInput(
            f"{self._machine} is switched on by Wake-on-LAN, which has no password",
            "a BMC of type redfish or ipmi",
            "leave the machine out",
        )

    def _responds(self) -> bool:
        try:
            socket.create_connection(self._reached, _TIMEOUT_S).close()
        except TimeoutError:
            return False
        except OSError as error:
            if error.errno in _ALIVE:
                return True
            if error.errno in _SILENT:
                return False
            raise PowerProblem(
                Trouble.UNREACHABLE,
                f"whether {self._machine} is on cannot be seen: {self._reached[0]}: {error.strerror or error}",
                "a controller that reaches the machine directly, without a jump host",
            ) from error
        return True


def packet(mac: bytes) -> bytes:
    """The magic packet of an address of six bytes."""
    return b"\xff" * 6 + mac * 16
