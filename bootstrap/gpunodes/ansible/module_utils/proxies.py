"""HTTP proxies: which requests of a machine go through them, and its own downloads.

Shared with the controller, which makes the list of exceptions.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import queue
import re
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import unquote, urlsplit

from .problem import MachineProblem

if TYPE_CHECKING:
    from urllib.request import OpenerDirector

CREDENTIALS = "{credentials}"
"""Stands for USER:PASSWORD in a proxy's URL until the machine gets them."""
URL = (
    r"http://(?:(?P<credentials>[A-Za-z0-9_.~!&()*+,;=%-]+:[A-Za-z0-9_.~!&()*+,;=%-]+)@)?"
    r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}/?"
)
"""A proxy's URL. Nothing in it has a meaning in the files of apt, dnf and systemd. Python knows no proxies over TLS,
and programs differ in the default port."""
URL_WANTED = "http://HOST:PORT, or http://USER:PASSWORD@HOST:PORT with special characters percent-encoded"
EXCEPTIONS_WANTED = "names, .domains, addresses and networks, without ports and *"
_NAME = r"\.?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9])?"
_CONNECT_LIMIT_S = 20
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Proxies:
    """The proxies of a machine.

    ``http`` and ``https`` are the URLs of the proxies for requests to http and https addresses, "" for none:
    ``http://[USER:PASSWORD@]HOST:PORT``, percent-encoded. ``no_proxy`` are hosts that are reached directly, as Go's
    net/http reads NO_PROXY: addresses, networks, names (which include their subdomains), and .domains.
    """

    http: str = ""
    https: str = ""
    no_proxy: Sequence[str] = ()

    @property
    def secret(self) -> bool:
        """Whether a URL contains credentials."""
        return "@" in self.http + self.https

    def of(self, scheme: str, host: str) -> str:
        """The URL of the proxy for requests to ``host``, "" for none."""
        url = {"http": self.http, "https": self.https}.get(scheme, "")
        return "" if is_excepted(host, self.no_proxy) else url

    def environment(self) -> dict[str, str]:
        """The environment variables for programs in Go (golang.org/x/net/http/httpproxy)."""
        values = {"HTTP_PROXY": self.http, "HTTPS_PROXY": self.https, "NO_PROXY": ",".join(self.no_proxy)}
        return {name: value for name, value in values.items() if value}


def proxies_from(given: Mapping[str, Any] | None, credentials: Mapping[str, str] | None) -> Proxies | None:
    """The proxies from plain data, None for none; ``credentials`` are USER:PASSWORD by the name of the URL.

    Raises MachineProblem if credentials are missing.
    """
    if not given:
        return None
    urls = {}
    for name in ("http", "https"):
        url = str(given.get(name) or "")
        known = str((credentials or {}).get(name) or "")
        if CREDENTIALS in url and not known:
            raise MachineProblem(
                f"the credentials of the proxy {public(url)} are missing",
                "the option proxy_credentials of this module",
                "pass it beside the desired state, as the playbooks of gpunodes do",
            )
        urls[name] = url.replace(CREDENTIALS, known)
    return Proxies(no_proxy=tuple(given.get("no_proxy") or ()), **urls) if any(urls.values()) else None


def public(url: str) -> str:
    """The URL of a proxy without its credentials."""
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def login(url: str) -> tuple[str, str]:
    """User and password in the URL of a proxy, decoded; "" and "" for none."""
    user, _, password = url.rpartition("://")[2].rpartition("@")[0].partition(":")
    return unquote(user), unquote(password)


def listed(value: Any) -> Sequence[str]:
    """The entries of a list, or of a text with commas."""
    entries = value if isinstance(value, (list, tuple)) else str(value or "").split(",")
    return [text for entry in entries if (text := str(entry).strip())]


def is_exception(entry: str) -> bool:
    """Whether the entry of a list of exceptions means the same to all programs: no pattern, no port."""
    try:
        ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return re.fullmatch(_NAME, entry, re.ASCII) is not None
    return True


def is_excepted(host: str, no_proxy: Iterable[str]) -> bool:
    """Whether requests to ``host`` (a name or an address) do not use a proxy.

    Source: golang.org/x/net/http/httpproxy, the documentation of Config.NoProxy: the machine itself never does.
    """
    return excepted_by(no_proxy)(host)


def excepted_by(no_proxy: Iterable[str]) -> Callable[[str], bool]:
    """:func:`is_excepted` for many hosts and one list, whose networks are read once."""
    domains = [entry.lower() for entry in no_proxy]
    networks = [network for entry in domains if (network := _network(entry))]

    def excepted(host: str) -> bool:
        name = host.lower().strip("[]").rstrip(".")
        address = _address(name)
        if name == "localhost" or (address and address.is_loopback):
            return True
        if address:
            return any(address in network for network in networks)
        return any(_is_in_domain(name, domain) for domain in domains)

    return excepted


def without_covered(entries: Iterable[str], others: Sequence[str]) -> list[str]:
    """The addresses and names in ``entries`` that no entry of ``others`` includes, without duplicates."""
    excepted = excepted_by(others)
    return [each for each in dict.fromkeys(entries) if each and not excepted(each)]


def environment_file(text: str | None) -> dict[str, str]:
    """The variables in a file that ``host.proxies`` wrote for systemd; {} without a file."""
    pairs = (line.partition("=") for line in (text or "").splitlines() if not line.startswith("#"))
    return {name: value.strip('"') for name, separator, value in pairs if separator}


def opener(proxies: Proxies | None) -> OpenerDirector:
    """What opens http and https addresses through ``proxies``; None: as the environment of the process says."""
    from urllib import request

    if proxies is None:
        return request.build_opener()
    settings = proxies

    class Handler(request.ProxyHandler):
        """In place of the handler of the standard library, which reads the environment."""

        def __init__(self) -> None:
            super().__init__({})

        def http_open(self, wanted: request.Request) -> None:
            self._direct(wanted)

        def https_open(self, wanted: request.Request) -> None:
            self._direct(wanted)

        def _direct(self, wanted: request.Request) -> None:
            # Called for each redirection too: the header must not follow one to another host.
            url = settings.of(wanted.type, urlsplit(wanted.full_url).hostname or "")
            if url:
                if "@" in url:
                    token = base64.b64encode(":".join(login(url)).encode()).decode("ascii")
                    wanted.add_unredirected_header("Proxy-authorization", f"Basic {token}")
                wanted.set_proxy(public(url).partition("://")[2].rstrip("/"), "http")

    return request.build_opener(Handler)


def within(limit_s: float, work: Callable[[], _Found]) -> _Found:
    """What ``work`` returns or raises, OSError for a broken response; raises TimeoutError if it does not end in time.

    The limit of an opener is for each piece that arrives: a server, or who is in between, could keep a command.
    """
    ended: queue.SimpleQueue[tuple[_Found | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            ended.put((work(), None))
        except HTTPException as error:
            ended.put((None, OSError(f"its response is not valid ({type(error).__name__})")))
        except Exception as error:  # it is raised in the caller's thread
            ended.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        found, error = ended.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError(f"no complete response within {limit_s:.0f} s") from None
    if error is not None:
        raise error
    return cast("_Found", found)


def unreachable(proxies: Proxies) -> dict[str, str]:
    """The proxies that this machine cannot connect to: the reason by their URLs, which are without credentials."""
    found = {}
    for url in dict.fromkeys(filter(None, (proxies.http, proxies.https))):
        address = urlsplit(public(url))
        try:
            with contextlib.closing(
                socket.create_connection((address.hostname, address.port or 80), timeout=_CONNECT_LIMIT_S)
            ):
                pass
        except (OSError, ValueError) as error:
            found[public(url)] = getattr(error, "strerror", None) or str(error)
    return found


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _network(entry: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(entry.strip("[]"), strict=False)
    except ValueError:
        return None


def _is_in_domain(name: str, entry: str) -> bool:
    return name.endswith(entry if entry.startswith(".") else f".{entry}") or name == entry
