"""Power by Redfish. The only file that knows sushy."""

from __future__ import annotations

import logging
from typing import Any

import requests
import sushy
from sushy import exceptions

from gpunodes.engine.power import Access, Order, PowerProblem, PowerState, Trouble

_CONNECT_S = 10
_READ_S = 20
_STATES = {
    sushy.PowerState.ON: PowerState.ON,
    sushy.PowerState.OFF: PowerState.OFF,
    sushy.PowerState.POWERING_ON: PowerState.CHANGING,
    sushy.PowerState.POWERING_OFF: PowerState.CHANGING,
}
# DMTF DSP0268, ComputerSystem.Reset; where a BMC offers no first choice the second does the same.
_ORDERS = {
    Order.ON: (sushy.ResetType.ON, sushy.ResetType.FORCE_ON),
    Order.OFF: (sushy.ResetType.FORCE_OFF,),
    Order.RESET: (sushy.ResetType.FORCE_RESTART, sushy.ResetType.POWER_CYCLE),
}


class Redfish:
    """One system of a BMC, over a session that is opened at the first request."""

    def __init__(self, access: Access) -> None:
        address = access.address
        self._access = access
        self._url = address if "://" in address else f"https://{address}"
        self.name = f"Redfish at {self._url}"
        self._system: Any = None

    def state(self) -> PowerState:
        """What the BMC says; raises PowerProblem."""
        try:
            system = self._open()
            system.refresh(force=True)
            return _STATES.get(system.power_state, PowerState.UNKNOWN)
        except (exceptions.SushyError, requests.RequestException, OSError, ValueError) as error:
            raise self._problem(error) from error

    def order(self, order: Order) -> None:
        """Tell it; raises PowerProblem."""
        try:
            system = self._open()
            allowed = system.get_allowed_reset_system_values()
            kind = next((each for each in _ORDERS[order] if each in allowed), _ORDERS[order][0])
            system.reset_system(kind)
        except (exceptions.SushyError, requests.RequestException, OSError, ValueError) as error:
            raise self._problem(error) from error

    def _open(self) -> Any:
        if self._system is None:
            root = sushy.Sushy(
                self._url,
                username=self._access.user,
                password=self._access.password,
                verify=self._access.verify,
                server_side_retries=0,
                read_timeout=_READ_S,
                connect_timeout=_CONNECT_S,
            )
            found = root.get_system_collection().members_identities
            wanted = [path for path in found if path.rstrip("/").rpartition("/")[2] == self._access.system]
            if not self._access.system:
                wanted = list(found)
            if len(wanted) != 1:
                names = ", ".join(path.rstrip("/").rpartition("/")[2] for path in found) or "none"
                raise PowerProblem(
                    Trouble.REFUSED,
                    f"{self.name} has the systems {names}, and not one that is meant",
                    "name one of them in gpunodes_bmc_system",
                )
            self._system = root.get_system(wanted[0])
        return self._system

    def _problem(self, error: Exception) -> PowerProblem:
        """What an error of sushy or of the connection means. No text of theirs holds the password."""
        self._system = None
        said = " ".join(str(error).split())[:300]
        if "CERTIFICATE_VERIFY_FAILED" in said or isinstance(error, requests.exceptions.SSLError):
            return PowerProblem(
                Trouble.TLS,
                f"the certificate of {self.name} cannot be verified",
                "set gpunodes_bmc_verify to the file of its CA, or to false for this machine",
            )
        if isinstance(error, exceptions.AccessError):
            return PowerProblem(
                Trouble.LOGIN, f"{self.name} refuses the user {self._access.user!r}", "correct user and password"
            )
        if isinstance(error, exceptions.ConnectionError | requests.RequestException | OSError):
            return PowerProblem(Trouble.DOWN, f"{self.name} does not answer: {said}", "see that the BMC is reachable")
        return PowerProblem(Trouble.REFUSED, f"{self.name} refuses: {said}")


# It logs every request; what goes wrong comes as exceptions too.
logging.getLogger("sushy").addHandler(logging.NullHandler())
logging.getLogger("sushy").propagate = False
