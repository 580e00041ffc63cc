"""Power by Redfish. The only file that knows sushy."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import requests
import sushy
from sushy import exceptions
from sushy.connector import Connector

from gpunodes.ansible.module_utils.gpunodes.identity import BmcIdentity, described_bmc
from gpunodes.engine.power import Access, Order, PowerProblem, PowerState, Trouble
from gpunodes.engine.power.web import Late, Odd, Untrusted, Web

_CALL_S = 60.0
"""Most seconds for a call as a whole, whatever the BMC does; the first opens a session and asks for its systems too."""
_INTERFACES = 16
"""Most network interfaces of a machine that are asked for."""
_NAMED = 10
"""How many systems of a BMC an error names."""
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
        self._access = access
        self._url = access.address
        if "://" not in self._url:
            host, port = access.place
            # RFC 3986, 3.2.2
            self._url = f"https://{f'[{host}]' if ':' in host else host}{f':{port}' if port else ''}"
        self.name = f"Redfish at {self._url}"
        self._system: Any = None

    def state(self) -> PowerState:
        """What the BMC says; raises PowerProblem."""
        with self._call() as system:
            system.refresh(force=True)
            return _STATES.get(system.power_state, PowerState.UNKNOWN)

    def order(self, order: Order) -> None:
        """Tell it; raises PowerProblem."""
        with self._call() as system:
            allowed = system.get_allowed_reset_system_values()
            kind = next((each for each in _ORDERS[order] if each in allowed), _ORDERS[order][0])
            system.reset_system(kind)

    def identity(self) -> BmcIdentity:
        """UUID, serial number and MAC addresses of the system, as far as the BMC reports them; raises PowerProblem."""
        with self._call() as system:
            document = system.json
            found = {"product_uuid": document.get("UUID"), "product_serial": document.get("SerialNumber")}
            addresses: list[Any] = []
            # Not every BMC lists its machine's interfaces, and some answer oddly: the UUID may be enough.
            with contextlib.suppress(Exception):
                for interface in itertools.islice(system.ethernet_interfaces.get_members(), _INTERFACES):
                    kept = (interface.json.get(key) for key in ("PermanentMACAddress", "MACAddress"))
                    addresses += [address for address in kept if address]
            return described_bmc({**found, "macs": addresses})

    @contextlib.contextmanager
    def _call(self) -> Iterator[Any]:
        """The system, for one call. Every error inside becomes a PowerProblem, and the next call begins anew.

        sushy trusts what a BMC answers and stumbles in its own ways over what no Redfish service would: hence the
        catch-all.
        """
        try:
            web = self._web
        except requests.RequestException as error:
            raise self._problem(error) from error
        except OSError as error:
            raise PowerProblem(
                Trouble.TLS,
                f"the CA file {self._access.verify} of {self.name} cannot be used: {error.strerror or error}",
                "correct gpunodes_bmc_verify",
            ) from error
        try:
            with web.within(_CALL_S):
                if self._system is None:
                    self._system = self._open()
                yield self._system
        except PowerProblem:
            self._system = None
            raise
        except Exception as error:
            self._system = None
            raise self._problem(error) from error

    @functools.cached_property
    def _web(self) -> Web:
        return Web(self._url, self._access.verify)

    def _open(self) -> Any:
        root = sushy.Sushy(
            self._url,
            username=self._access.user,
            password=self._access.password,
            connector=_Connector(self._url, self._web),
            # For registries of messages, which a BMC may say are anywhere.
            public_connector=self._web.session(),
        )
        found = root.get_system_collection().members_identities
        wanted = [path for path in found if path.rstrip("/").rpartition("/")[2] == self._access.system]
        if not self._access.system:
            wanted = list(found)
        if len(wanted) != 1:
            names = ", ".join(path.rstrip("/").rpartition("/")[2] for path in found[:_NAMED]) or "none"
            raise PowerProblem(
                Trouble.REFUSED,
                f"{self.name} has the systems {names}, and not one that is meant",
                "name one of them in gpunodes_bmc_system",
            )
        return root.get_system(wanted[0])

    def _problem(self, error: Exception) -> PowerProblem:
        """What an error of sushy or of the connection means. No text of theirs holds the password."""
        # sushy puts its own error over that of the connection.
        below: BaseException | None = error
        while below and not isinstance(below, Odd | Late | Untrusted | requests.TooManyRedirects):
            below = below.__cause__ or below.__context__
        message = " ".join(str(below or error).split())[:300]
        if isinstance(below, Untrusted):
            return PowerProblem(
                Trouble.TLS,
                f"the certificate of {self.name} cannot be verified",
                "set gpunodes_bmc_verify to the file of its CA, or to false for this machine",
            )
        if isinstance(below, Odd | requests.TooManyRedirects):
            return PowerProblem(Trouble.REFUSED, f"{self.name} is no Redfish service: {message}", "correct its address")
        if isinstance(error, exceptions.AccessError):
            return PowerProblem(
                Trouble.LOGIN, f"{self.name} refuses the user {self._access.user!r}", "correct user and password"
            )
        if isinstance(error, exceptions.ConnectionError | requests.RequestException | OSError):
            return PowerProblem(
                Trouble.DOWN, f"{self.name} does not answer: {message}", "see that the BMC is reachable"
            )
        if isinstance(error, exceptions.SushyError):
            return PowerProblem(Trouble.REFUSED, f"{self.name} refuses: {message}")
        return PowerProblem(
            Trouble.REFUSED,
            f"{self.name} answers as no Redfish service does ({type(error).__name__}: {message})",
            "see that its firmware is up to date",
        )


class _Connector(Connector):  # type: ignore[misc]  # sushy has no types
    """sushy's, over our transport."""

    def __init__(self, url: str, web: Web) -> None:
        # TLS is verified there.
        super().__init__(url, verify=True)
        self._session: requests.Session = web.session()
        # As sushy's own: BMCs choke at connections that last.
        self._session.headers["Connection"] = "close"


# It logs every request; what goes wrong comes as exceptions too.
logging.getLogger("sushy").addHandler(logging.NullHandler())
logging.getLogger("sushy").propagate = False
