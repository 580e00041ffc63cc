"""Requests to one BMC, ended by a deadline whatever it does: beneath sushy, in place of what requests has for that.

The time limits of requests hold for each read: a service that sends a byte now and then keeps a request for ever, in
its TLS handshake, its headers or its body. Here one deadline holds for the whole call, name resolution included; an
answer is small, an object, and comes from the BMC itself.
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

_CONNECT_S = 10.0
"""Most seconds for one TCP connection."""
_FAREWELL_S = 5.0
"""For a request outside a call: sushy closes its session when it is forgotten."""
_MOST_BYTES = 2**20
_DEEPEST = 50
"""Levels of an answer; DMTF's schemas need a dozen."""
_ERRORS_FROM = 400


class Odd(requests.RequestException):
    """The BMC answered, and no Redfish service answers so."""


class Late(requests.RequestException):
    """The deadline has passed."""


class Untrusted(requests.RequestException):
    """Its certificate cannot be verified."""


class Web(BaseAdapter):
    """What sends the requests of a ``requests.Session`` to one BMC; proxies of the environment are not asked."""

    def __init__(self, url: str, verify: bool | str) -> None:
        """``verify`` is as in ``Access``. Raises OSError for a file of a CA that cannot be used."""
        super().__init__()
        self._origin = _origin(url)
        self._context = _context(verify) if self._origin[0] == "https" else None
        self._deadline: float | None = None

    def session(self) -> requests.Session:
        """A session all of whose requests go through here."""
        session = requests.Session()
        session.trust_env = False
        session.max_redirects = 5
        for scheme in ("http://", "https://"):
            session.mount(scheme, self)
        return session

    @contextlib.contextmanager
    def within(self, limit_s: float) -> Iterator[None]:
        """All requests inside end within ``limit_s`` seconds together."""
        self._deadline = time.monotonic() + limit_s
        try:
            yield
        finally:
            self._deadline = None

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        """Carry out one request; raises Odd, Late, Untrusted, or requests' own exceptions of connections.

        What requests wants beside it (time limits, verification, proxies) is decided here.
        """
        deadline = self._deadline or time.monotonic() + _FAREWELL_S
        if _origin(str(request.url)) != self._origin:
            raise Odd(f"it sends us elsewhere: to {str(request.url)[:200]}")
        try:
            return self._exchange(request, deadline)
        except requests.RequestException:
            raise
        except TimeoutError as error:
            raise Late("its answer did not come in time") from error
        except ssl.SSLCertVerificationError as error:
            raise Untrusted(f"CERTIFICATE_VERIFY_FAILED: {error.verify_message}") from error
        except OSError as error:
            # sushy repeats what fails so: not an order, which may have been carried out.
            kind = requests.ConnectionError if request.method == "GET" else requests.RequestException
            raise kind(error.strerror or str(error)) from error
        except (http.client.HTTPException, ValueError, zlib.error) as error:
            raise Odd(f"its answer is no HTTP: {error or type(error).__name__}") from error

    def close(self) -> None:
        """Nothing is kept between requests: BMCs choke at that."""

    def _exchange(self, request: requests.PreparedRequest, deadline: float) -> requests.Response:
        _, host, port = self._origin
        channel = _connect(host, port, deadline)
        try:
            if self._context:
                channel.settimeout(_left(deadline))
                channel = self._context.wrap_socket(channel, server_hostname=host)
            connection = http.client.HTTPConnection(host, port)
            connection.sock = _Channel(channel, deadline)  # what http.client uses of a socket
            parts = urlsplit(str(request.url))
            target = parts.path + (f"?{parts.query}" if parts.query else "")
            connection.request(str(request.method), target, _body(request), dict(request.headers))
            answer = connection.getresponse()
            body = answer.read()
        finally:
            channel.close()
        return _response(request, answer, body)


class _Channel:
    """What http.client takes for a socket; it never waits beyond the deadline."""

    def __init__(self, channel: socket.socket, deadline: float) -> None:
        self._channel = channel
        self._deadline = deadline

    def sendall(self, data: bytes) -> None:
        self._channel.settimeout(_left(self._deadline))
        self._channel.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self._channel, self._deadline))

    def close(self) -> None:
        """http.client closes before it has read; who made the channel closes it."""


class _Reader(io.RawIOBase):
    """At most so many bytes, and none after the deadline."""

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
        if self._bytes > _MOST_BYTES:
            raise Odd(f"its answer is larger than {_MOST_BYTES // 2**20} MiB")
        return count


def _body(request: requests.PreparedRequest) -> bytes | None:
    body = request.body
    return body.encode() if isinstance(body, str) else body if isinstance(body, bytes) else None


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port; raises Odd for a URL without them."""
    try:
        parts = urlsplit(url)
        if parts.scheme in {"http", "https"} and parts.hostname:
            return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme]
    except ValueError:
        pass
    raise Odd(f"{url[:200]} is not the address of a Redfish service")


def _context(verify: bool | str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif isinstance(verify, str) and verify:
        folder = Path(verify).is_dir()
        context = ssl.create_default_context(cafile=None if folder else verify, capath=verify if folder else None)
    return context


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    problem: OSError = OSError("its name has no address")
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
    """The addresses of a host. The resolver cannot be ended: a thread waits for it, by the resolver's own limits."""
    with contextlib.suppress(socket.gaierror):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    found: queue.Queue[list[Any] | OSError] = queue.Queue()

    def ask() -> None:
        try:
            found.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.put(error if isinstance(error, OSError) else OSError("its name is none"))

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = found.get(timeout=_left(deadline))
    except queue.Empty as error:
        raise TimeoutError from error
    if isinstance(answer, OSError):
        raise answer
    return answer


def _response(request: requests.PreparedRequest, answer: http.client.HTTPResponse, body: bytes) -> requests.Response:
    response = requests.Response()
    response.status_code, response.reason = answer.status, answer.reason
    response.headers = CaseInsensitiveDict(answer.getheaders())
    response.url, response.request, response.encoding = str(request.url), request, "utf-8"
    if response.headers.pop("Content-Encoding", "identity") != "identity":
        packed = zlib.decompressobj(wbits=47)  # gzip or zlib, as it comes
        body = packed.decompress(body, _MOST_BYTES)
        if packed.unconsumed_tail:
            raise Odd(f"its answer is larger than {_MOST_BYTES // 2**20} MiB")
    if response.is_redirect and request.method != "GET":
        raise Odd("it redirects an order")
    response._content = _checked(body, failed=answer.status >= _ERRORS_FROM)
    return response


def _checked(body: bytes, *, failed: bool) -> bytes:
    """A body that is an object of bearable depth, or nothing; of an error's body anything else is left out."""
    if not body.strip():
        return b""
    try:
        document = json.loads(body)
        if isinstance(document, dict) and _depth(document) <= _DEEPEST:
            return body
        what = f"a JSON {type(document).__name__}" if not isinstance(document, dict) else "JSON deeper than is bearable"
    except RecursionError:
        what = "JSON deeper than is bearable"
    except ValueError:
        what = "no JSON"
    if failed:
        return b""
    raise Odd(f"its answer is {what}, and Redfish has objects")


def _depth(document: Any) -> int:
    depth, level = 0, [document]
    while level and depth <= _DEEPEST:
        depth += 1
        level = [
            each
            for one in level
            for each in (one.values() if isinstance(one, dict) else one)
            if isinstance(each, dict | list)
        ]
    return depth
