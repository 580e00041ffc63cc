"""Webhooks: one POST of JSON, with a deadline.

The address of a webhook is often its password: messages name only the host, and no exception's text is printed.
"""

from __future__ import annotations

import base64
import http.client
import queue
import re
import ssl
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from gpunodes import __version__
from gpunodes.errors import GpunodesError, WrongInput

DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Webhook:
    """An address to post to. ``host`` and ``path`` decide the form; only ``host`` may be shown."""

    host: str
    path: str = field(repr=False)
    url: str = field(repr=False)
    """Without user and password."""
    authorization: str = field(repr=False, default="")
    """The header of a user and password in the address."""


def webhook(url: str) -> Webhook:
    """The webhook at ``url``; raises WrongInput, which does not contain it."""
    wrong = WrongInput(
        "the address for notices is not the URL of a webhook",
        "one such as https://hooks.example.org/services/ID",
        "correct --notify, or GPUNODES_NOTIFY_URL",
    )
    if not re.fullmatch(r"[!-~]+", url):
        raise wrong
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise wrong from None  # its text has a part of the URL
    if parts.scheme not in ("http", "https") or not host:
        raise wrong
    place = f"[{host}]" if ":" in host else host
    plain = urlunsplit((parts.scheme, place if port is None else f"{place}:{port}", parts.path, parts.query, ""))
    given = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    authorization = "" if given == ":" else f"Basic {base64.b64encode(given.encode()).decode()}"
    return Webhook(host, parts.path, plain, authorization)


def post(to: Webhook, body: bytes) -> None:
    """Send JSON to a webhook, through the proxies of the environment; raises GpunodesError.

    Redirects are not followed: another host must not get the notice.
    """
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    # The time limits of sockets apply to each read: a thread that is left behind has no effect.
    threading.Thread(target=lambda: ended.put(_sent(to, body)), daemon=True).start()
    try:
        problem = ended.get(timeout=DEADLINE_S)
    except queue.Empty:
        problem = f"no response within {DEADLINE_S:.0f} s"
    if problem:
        raise GpunodesError(f"the notice to {to.host} failed: {problem}", "", "the next scan sends it again")


def _sent(to: Webhook, body: bytes) -> str:
    """Why the notice could not be sent, "" if it was."""
    headers = {"Content-Type": "application/json", "User-Agent": f"gpunodes/{__version__}"}
    if to.authorization:
        headers["Authorization"] = to.authorization
    try:
        request = urllib.request.Request(to.url, body, headers, method="POST")  # noqa: S310 - http or https, by webhook()
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=DEADLINE_S):
            return ""
    except urllib.error.HTTPError as error:
        error.close()
        return f"it responds with HTTP status {error.code}"
    except urllib.error.URLError as error:
        return _reason(error.reason)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return _reason(error)


def _reason(error: object) -> str:
    """The reason of an error, without texts that may contain the address."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return f"no response within {DEADLINE_S:.0f} s"
    if isinstance(error, OSError):
        return error.strerror or "the connection failed"  # without a reason: a proxy refuses it
    return f"the response is not valid ({type(error).__name__})"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow none: the redirect becomes an HTTPError."""
