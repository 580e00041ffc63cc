"""Whether images are in their registries, without fetching them: the manifest's HEAD request of the distribution API.

Source: github.com/opencontainers/distribution-spec, "Checking if content exists in the registry"; the anonymous token
is that of distribution.github.io/distribution/spec/auth/token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit
from urllib.request import OpenerDirector, Request

from .proxies import Proxies, opener, within

_LIMIT_S = 15
_WHOLE_S = 60
"""The limit for one image, with its token."""
_MOST = 1 << 20
"""Bytes of a token's response."""
_ACCEPT = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
_SERVERS = {"docker.io": "registry-1.docker.io"}
_ABSENT, _WITHOUT_TOKEN = 404, 401


class _UnknownError(Exception):
    """A registry does not say whether it has an image."""


def missing(images: Sequence[str], mirrors: Mapping[str, str], proxies: Proxies | None) -> tuple[list[str], str]:
    """The images that no registry has, and why others could not be asked for, "" if all were.

    ``mirrors``: the URL by the registry's name; as containerd does, what a mirror lacks is asked of the registry.
    """
    direct, found, unknown = opener(proxies), list[str](), dict[str, str]()
    failures: dict[str, str] = {}
    for image in dict.fromkeys(images):
        places = _places(image, mirrors)
        answers = [_answer(direct, place, image, failures) for place in places]
        if answers == [None] * len(places):
            unknown |= {place: failures[place] for place in places}
        # A mirror that lacks it decides if the registry behind it does not respond: that is what the machine will see.
        elif True not in answers:
            found.append(image)
    return found, "; ".join(f"{place}: {why}" for place, why in unknown.items())


def _places(image: str, mirrors: Mapping[str, str]) -> list[str]:
    registry = image.partition("/")[0]
    own = [mirrors[registry].rstrip("/")] if registry in mirrors else []
    return [*own, f"https://{_SERVERS.get(registry, registry)}"]


def _answer(direct: OpenerDirector, place: str, image: str, failures: dict[str, str]) -> bool | None:
    """Whether a registry has an image; None, and why in ``failures``, if that cannot be found out."""
    if place in failures:
        return None
    path, _, tag = image.partition("/")[2].rpartition(":")
    try:
        return within(_WHOLE_S, lambda: _has(direct, f"{place}/v2/{path}/manifests/{tag}", ""))
    except (OSError, ValueError, HTTPException, _UnknownError) as error:
        failures[place] = str(getattr(error, "reason", None) or error)[:200] or type(error).__name__
        return None


def _has(direct: OpenerDirector, url: str, token: str) -> bool:
    headers = {"Accept": _ACCEPT, **({"Authorization": f"Bearer {token}"} if token else {})}
    try:
        with direct.open(Request(url, headers=headers, method="HEAD"), timeout=_LIMIT_S):  # noqa: S310 - a setting
            return True
    except HTTPError as error:
        error.close()
        if error.code == _ABSENT:
            return False
        challenge = error.headers.get("WWW-Authenticate") or ""
        if error.code != _WITHOUT_TOKEN or token:
            raise _UnknownError(f"it responds {error.code}") from error
        # A redirection may have led to another server, whose token this is.
        return _has(direct, error.url or url, _token(direct, challenge, error.url or url))


def _token(direct: OpenerDirector, challenge: str, url: str) -> str:
    """An anonymous token for pulling, as ``challenge`` says."""
    given = dict(re.findall(r'(realm|service|scope)="([^"]*)"', challenge))
    realm = given.pop("realm", "")
    schemes = {"https"} if url.startswith("https:") else {"https", "http"}
    if not challenge.startswith("Bearer ") or urlsplit(realm).scheme not in schemes:
        raise _UnknownError("it wants a login")
    with direct.open(f"{realm}?{urlencode(given)}", timeout=_LIMIT_S) as response:
        document = json.loads(response.read(_MOST))
    token = document.get("token") or document.get("access_token") if isinstance(document, dict) else None
    if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]{1,16384}", token):
        raise _UnknownError("it wants a login")
    return token
