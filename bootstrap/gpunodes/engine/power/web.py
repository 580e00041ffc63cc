"""HTTP transport for requests to one BMC, used by sushy in place of the adapter of requests; it enforces a deadline.

The timeouts of requests apply to each read: a service that sends a byte now and then keeps a request open for ever, in
the TLS handshake, the headers or the body. Here one deadline applies to the whole call, name resolution included. A
response must be a small JSON object, and must come from the BMC itself.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import queue
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import BaseAdapter
from requests.structures import CaseInsensitiveDict

from gpunodes.ansible.module_utils.nesting import is_deep
from gpunodes.engine.remote.reach import LostError
from gpunodes.engine.remote.targets import Target

_CONNECT_S = 10.0
"""Time limit in seconds for one TCP connection."""
_LOGOUT_S = 5.0
"""Time limit for a request outside of a call: sushy deletes its Redfish session when it is garbage-collected."""
_MAX_BYTES = 2**20
_ERRORS_FROM = 400


class NotRedfish(requests.RequestException):
    """The response is not valid for a Redfish service."""


class Timeout(requests.RequestException):
    """The deadline has passed."""


class Unanswered(requests.RequestException):
    """A power action, or another change, was sent, and its response is lost."""


class Untrusted(requests.RequestException):
    """The certificate cannot be verified."""


class NoWay(requests.RequestException):
    """The jump host cannot be used, or does not reach the BMC."""


class Web(BaseAdapter):
    """A transport adapter for ``requests.Session``, for one BMC; it ignores the proxy variables of the environment."""

    def __init__(self, url: str, verify: bool | str, jump: tuple[Target, ...] = ()) -> None:
        """``verify`` and ``jump`` are as in ``Access``. Raises OSError for a CA file that cannot be used."""
        super().__init__()
        self._jump = jump
        self._origin = _origin(url)
        self._context = _context(verify) if self._origin[0] == "https" else None
        self._deadline: float | None = None

    def session(self) -> requests.Session:
        """A session that sends all requests through this adapter."""
        session = requests.Session()
        session.trust_env = False
        session.max_redirects = 5
        for scheme in ("http://", "https://"):
            session.mount(scheme, self)
        return session

    @contextlib.contextmanager
    def within(self, limit_s: float) -> Iterator[None]:
        """All requests inside together end within ``limit_s`` seconds."""
        self._deadline = time.monotonic() + limit_s
        try:
            yield
        finally:
            self._deadline = None

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        """Send one request; raises NotRedfish, Timeout, Unanswered, Untrusted, or requests' own for connections.

        The other arguments of requests (timeouts, verification, proxies) are ignored: this class decides them.
        """
        deadline = self._deadline or time.monotonic() + _LOGOUT_S
        if _origin(str(request.url)) != self._origin:
            raise NotRedfish(f"the response refers to another address: {str(request.url)[:200]}")
        try:
            return self._exchange(request, deadline)
        except requests.RequestException:
            raise
        except TimeoutError as error:
            raise Timeout("no response in time") from error
        except ssl.SSLCertVerificationError as error:
            raise Untrusted(f"CERTIFICATE_VERIFY_FAILED: {error.verify_message}") from error
        except OSError as error:
            # sushy repeats a request after a ConnectionError: a power action must not be repeated.
            kind = requests.ConnectionError if request.method == "GET" else requests.RequestException
            raise kind(error.strerror or str(error)) from error
        except (http.client.HTTPException, ValueError, zlib.error) as error:
            raise NotRedfish(f"the response is not valid HTTP: {error or type(error).__name__}") from error

    def close(self) -> None:
        """Nothing to close: each request has its own connection, because some BMCs fail with persistent ones."""

    def _exchange(self, request: requests.PreparedRequest, deadline: float) -> requests.Response:
        _, host, port = self._origin
        channel = _relayed(self._jump, host, port, deadline) if self._jump else _connect(host, port, deadline)
        try:
            if self._context:
                channel.settimeout(_left(deadline))
                channel = self._context.wrap_socket(channel, server_hostname=host)
            connection = http.client.HTTPConnection(host, port)
            connection.sock = _Channel(channel, deadline)  # what http.client uses of a socket
            parts = urlsplit(str(request.url))
            target = parts.path + (f"?{parts.query}" if parts.query else "")
            with _sent(request):
                connection.request(str(request.method), target, _body(request), dict(request.headers))
                response = connection.getresponse()
                body = response.read()
        finally:
            channel.close()
        return _response(request, response, body)


class _Channel:
    """The part of the socket interface that http.client uses, with a deadline for all reads and writes."""

    def __init__(self, channel: socket.socket, deadline: float) -> None:
        self._channel = channel
        self._deadline = deadline

    def sendall(self, data: bytes) -> None:
        self._channel.settimeout(_left(self._deadline))
        self._channel.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self._channel, self._deadline))

    def close(self) -> None:
        """Ignored: http.client closes the socket before it has read the body. ``_exchange`` closes the channel."""


class _Reader(io.RawIOBase):
    """Reads with a limit for the size and a deadline."""

    def __init__(self, channel: socket.socket, deadline: float) -> None:
        self._channel = channel
        self._deadline = deadline
        self._bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._channel.settimeout(_left(self._deadline))
        count = self._channel.recv_into(buffer)
        self._bytes += count
        if self._bytes > _MAX_BYTES:
            raise NotRedfish(f"the response is larger than {_MAX_BYTES // 2**20} MiB")
        return count


@contextlib.contextmanager
def _sent(request: requests.PreparedRequest) -> Iterator[None]:
    """From here on the BMC may carry out a request, whatever becomes of its response."""
    try:
        yield
    except (OSError, http.client.IncompleteRead) as error:
        # The exceptions of requests are OSErrors, too: such a response was read.
        if request.method == "GET" or isinstance(error, requests.RequestException):
            raise
        why = "no response in time" if isinstance(error, TimeoutError) else getattr(error, "strerror", "")
        raise Unanswered(why or str(error)) from error


def _body(request: requests.PreparedRequest) -> bytes | None:
    body = request.body
    return body.encode() if isinstance(body, str) else body if isinstance(body, bytes) else None


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port; raises NotRedfish for a URL without them."""
    try:
        parts = urlsplit(url)
        if parts.scheme in {"http", "https"} and parts.hostname:
            return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme]
    except ValueError:
        pass
    raise NotRedfish(f"{url[:200]} is not the address of a Redfish service")


def _context(verify: bool | str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif isinstance(verify, str) and verify:
        folder = Path(verify).is_dir()
        context = ssl.create_default_context(cafile=None if folder else verify, capath=verify if folder else None)
    return context


def _relayed(jump: tuple[Target, ...], host: str, port: int, deadline: float) -> socket.socket:
    # paramiko takes a while to load.
    from gpunodes.engine.remote import relay

    try:
        return relay.connect(jump, host, port, _left(deadline))
    except LostError as error:
        raise NoWay(error.message) from error


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    problem: OSError = OSError("the host name has no address")
    for family, kind, protocol, _, address in _resolve(host, port, deadline):
        channel = socket.socket(family, kind, protocol)
        try:
            channel.settimeout(min(_left(deadline), _CONNECT_S))
            channel.connect(address)
        except OSError as error:
            channel.close()
            problem = error
        else:
            return channel
    raise problem


def _resolve(host: str, port: int, deadline: float) -> list[Any]:
    """The addresses of a host. A lookup cannot be cancelled, so it runs in a thread that the deadline leaves behind."""
    with contextlib.suppress(socket.gaierror):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    found: queue.Queue[list[Any] | OSError] = queue.Queue()

    def look_up() -> None:
        try:
            found.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.put(error if isinstance(error, OSError) else OSError("the host name is not valid"))

    threading.Thread(target=look_up, daemon=True).start()
    try:
        result = found.get(timeout=_left(deadline))
    except queue.Empty as error:
        raise TimeoutError from error
    if isinstance(result, OSError):
        raise result
    return result


def _response(request: requests.PreparedRequest, received: http.client.HTTPResponse, body: bytes) -> requests.Response:
    response = requests.Response()
    response.status_code, response.reason = received.status, received.reason
    response.headers = CaseInsensitiveDict(received.getheaders())
    response.url, response.request, response.encoding = str(request.url), request, "utf-8"
    if response.headers.pop("Content-Encoding", "identity") != "identity":
        packed = zlib.decompressobj(wbits=47)  # gzip or zlib, as it comes
        body = packed.decompress(body, _MAX_BYTES)
        if packed.unconsumed_tail:
            raise NotRedfish(f"the response is larger than {_MAX_BYTES // 2**20} MiB")
    if response.is_redirect and request.method != "GET":
        raise NotRedfish("the BMC redirects a power action")
    response._content = _checked(body, failed=received.status >= _ERRORS_FROM)
    return response


def _checked(body: bytes, *, failed: bool) -> bytes:
    """The body if it is a JSON object of limited depth, or empty; the invalid body of an error becomes empty."""
    if not body.strip():
        return b""
    try:
        document = json.loads(body)
        if isinstance(document, dict) and not is_deep(document):
            return body
        found = f"a JSON {type(document).__name__}" if not isinstance(document, dict) else "too deeply nested"
    except RecursionError:
        found = "too deeply nested"
    except ValueError:
        found = "not JSON"
    if failed:
        return b""
    raise NotRedfish(f"the response is {found}; a Redfish service sends JSON objects")
