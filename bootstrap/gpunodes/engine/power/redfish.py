"""Power control over Redfish; the only file that uses sushy."""

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

from gpunodes.engine.power import Access, Order, PowerProblem, PowerState, Trouble, Uncertain
from gpunodes.engine.power.web import NotRedfish, NoWay, Timeout, Unanswered, Untrusted, Web
from gpunodes.identity.model import BmcIdentity, described_bmc

_CALL_S = 60.0
"""Time limit in seconds for a whole call; the first call also opens a session and lists the systems."""
_INTERFACES = 16
"""Maximum number of network interfaces of a machine that are queried."""
_ACCOUNTS = 32
"""Maximum number of accounts that are read; BMCs have 10 to 16."""
_MAX_NAMES = 10
"""Maximum number of systems of a BMC that an error message lists."""
_STATES = {
    sushy.PowerState.ON: PowerState.ON,
    sushy.PowerState.OFF: PowerState.OFF,
    sushy.PowerState.POWERING_ON: PowerState.CHANGING,
    sushy.PowerState.POWERING_OFF: PowerState.CHANGING,
}
# DMTF DSP0268, ComputerSystem.Reset; the second type has the same effect, for a BMC that does not offer the first.
_ORDERS = {
    Order.ON: (sushy.ResetType.ON, sushy.ResetType.FORCE_ON),
    Order.OFF: (sushy.ResetType.FORCE_OFF,),
    Order.SHUTDOWN: (sushy.ResetType.GRACEFUL_SHUTDOWN,),
    Order.RESET: (sushy.ResetType.FORCE_RESTART, sushy.ResetType.POWER_CYCLE),
}

_CAUSES = (NotRedfish, NoWay, Timeout, Unanswered, Untrusted, requests.TooManyRedirects)
"""Errors that explain the error of sushy that wraps them."""


class Redfish:
    """One system of a BMC, over a session that the first request opens."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._url = access.address
        if "://" not in self._url:
            host, port = access.place
            # RFC 3986, 3.2.2
            self._url = f"https://{f'[{host}]' if ':' in host else host}{f':{port}' if port else ''}"
        self.name = f"Redfish at {self._url}"
        if access.jump:
            self.name += f" through {access.jump[-1].name}"
        self._system: Any = None
        self._root: Any = None

    def state(self) -> PowerState:
        """The power state that the BMC reports; raises PowerProblem."""
        with self._call() as system:
            system.refresh(force=True)
            return _STATES.get(system.power_state, PowerState.UNKNOWN)

    def order(self, order: Order) -> None:
        """Start a power action; raises PowerProblem, Uncertain if it was sent and its response is lost."""
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
            # Some BMCs do not list network interfaces, or send invalid ones: the UUID may be enough.
            with contextlib.suppress(Exception):
                for interface in itertools.islice(system.ethernet_interfaces.get_members(), _INTERFACES):
                    kept = (interface.json.get(key) for key in ("PermanentMACAddress", "MACAddress"))
                    addresses += [address for address in kept if address]
            return described_bmc({**found, "macs": addresses})

    def change_password(self, new: str) -> None:
        """Change the password of the account (DMTF DSP0268, ManagerAccount); raises PowerProblem."""
        with self._call():
            try:
                connector = self._root._conn
                connector.patch(self._account(), data={"Password": new})
            except exceptions.HTTPError as error:
                # A BMC may quote the request.
                message = str(error).replace(new, "...")
                raise PowerProblem(Trouble.REFUSED, f"{self.name} does not change its password: {message}") from None
            finally:
                # The session of the old password may end.
                self._system = None

    def _account(self) -> str:
        """The path of the account with the user's name."""

        def read(path: str) -> Any:
            return self._root._conn.get(path).json()

        accounts = read(read(self._root.json["AccountService"]["@odata.id"])["Accounts"]["@odata.id"])["Members"]
        paths = [str(each["@odata.id"]) for each in accounts[:_ACCOUNTS]]
        found = [path for path in paths if read(path).get("UserName") == self._access.user]
        if len(found) != 1:
            raise PowerProblem(
                Trouble.REFUSED,
                f"{self.name} has {len(found)} accounts with the name {self._access.user!r}",
                "give each account one name; an account may need the right to list accounts (ConfigureUsers)",
            )
        return found[0]

    @contextlib.contextmanager
    def _call(self) -> Iterator[Any]:
        """The system, for one call. Every error inside becomes a PowerProblem, and the next call reconnects.

        sushy does not validate responses, and an invalid one may raise any exception: hence the catch-all.
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
        return Web(self._url, self._access.verify, self._access.jump)

    def _open(self) -> Any:
        root = self._root = sushy.Sushy(
            self._url,
            username=self._access.user,
            password=self._access.password,
            connector=_Connector(self._url, self._web),
            # For message registries, for which a BMC may report any URL.
            public_connector=self._web.session(),
        )
        systems = root.get_system_collection().members_identities
        matching = [path for path in systems if path.rstrip("/").rpartition("/")[2] == self._access.system]
        if not self._access.system:
            matching = list(systems)
        if len(matching) != 1:
            names = ", ".join(path.rstrip("/").rpartition("/")[2] for path in systems[:_MAX_NAMES]) or "none"
            requested = f"none of them is {self._access.system!r}" if self._access.system else "none is selected"
            raise PowerProblem(
                Trouble.REFUSED,
                f"{self.name} has the systems {names}; {requested}",
                "name one of them in gpunodes_bmc_system",
            )
        return root.get_system(matching[0])

    def _problem(self, error: Exception) -> PowerProblem:
        """The PowerProblem for an error of sushy or of the connection. Their messages never hold the password."""
        # sushy wraps the error of the connection in its own.
        cause: BaseException | None = error
        while cause and not isinstance(cause, _CAUSES):
            cause = cause.__cause__ or cause.__context__
        message = " ".join(str(cause or error).split())[:300]
        if isinstance(cause, Untrusted):
            return PowerProblem(
                Trouble.TLS,
                f"the certificate of {self.name} cannot be verified",
                "set gpunodes_bmc_verify to the path of its CA file, or to false for this machine",
            )
        if isinstance(cause, NotRedfish | requests.TooManyRedirects):
            return PowerProblem(
                Trouble.REFUSED, f"{self.name} is not a Redfish service: {message}", "correct gpunodes_bmc_address"
            )
        if isinstance(error, exceptions.AccessError):
            return PowerProblem(
                Trouble.LOGIN, f"{self.name} refuses the user {self._access.user!r}", "correct user and password"
            )
        if isinstance(error, exceptions.ConnectionError | requests.RequestException | OSError):
            found, remedy = "does not respond", "check that the BMC is reachable"
            if isinstance(cause, NoWay):
                found, remedy = "is not reached", "correct gpunodes_bmc_jump, or the jump host"
            kind = Uncertain if isinstance(cause, Unanswered) else PowerProblem
            return kind(Trouble.UNREACHABLE, f"{self.name} {found}: {message}", remedy)
        if isinstance(error, exceptions.SushyError):
            return PowerProblem(Trouble.REFUSED, f"{self.name} refuses the request: {message}")
        return PowerProblem(
            Trouble.REFUSED,
            f"{self.name} sent a response that is not valid for Redfish ({type(error).__name__}: {message})",
            "update its firmware",
        )


class _Connector(Connector):  # type: ignore[misc]  # sushy has no types
    """sushy's connector, over the transport with a deadline."""

    def __init__(self, url: str, web: Web) -> None:
        # The Web adapter verifies TLS.
        super().__init__(url, verify=True)
        self._session: requests.Session = web.session()
        # As in sushy: some BMCs fail with persistent connections.
        self._session.headers["Connection"] = "close"


# sushy logs every request, and raises an exception for every error that it logs.
logging.getLogger("sushy").addHandler(logging.NullHandler())
logging.getLogger("sushy").propagate = False
