"""Tokens of accounts of the cluster, by TokenRequest."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime

from gpunodes.engine.cluster.api import Api
from gpunodes.engine.cluster.errors import invalid

# RFC 7519: three parts in base64url.
_TOKEN = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+){2}")
_LONGEST = 16_384


@dataclass(frozen=True, slots=True)
class Token:
    """A token, and when it ends, in seconds since 1970."""

    text: str = field(repr=False)
    end: float


class Tokens(Api):
    """The methods raise as those of ``Api``."""

    def token(self, namespace: str, account: str, seconds: int) -> Token:
        """A new token of a ServiceAccount; it cannot be withdrawn, and ends by itself."""
        wanted = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": seconds},
        }
        body = self._call("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token", wanted).body
        text = body["status"]["token"]
        try:
            end = datetime.fromisoformat(body["status"]["expirationTimestamp"]).timestamp()
        except (ValueError, OverflowError):
            end = 0.0
        if not end or len(text) > _LONGEST or not _TOKEN.fullmatch(text):
            raise invalid("the control plane's response to the request for a token is not a token")
        return Token(text, end)
