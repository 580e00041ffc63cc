"""Logins at image registries: a Secret in each namespace, which the namespace's default service account names.

Pods of other service accounts do not use it. What is listed never contains a password: the control plane sends only
the metadata of Secrets.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from gpunodes.engine.cluster.api import CONFLICT, Api
from gpunodes.engine.cluster.errors import Refused, check
from gpunodes.engine.cluster.pages import field
from gpunodes.shape import Many, Maybe, Optional

_KIND = "kubernetes.io/dockerconfigjson"
_LABEL = "gpunodes.dev/registry"
_SERVER, _USER = "gpunodes.dev/registry-server", "gpunodes.dev/registry-user"
_NAME = ("metadata.name", "metadata.namespace", "metadata.uid")
_LOGIN = (*_NAME, *(field("metadata", "annotations", key) for key in (_SERVER, _USER)), "type")
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_DOCKER_HUB = "https://index.docker.io/v1/"
"""The key of docker.io. Source: kubernetes.io, "Pull an Image from a Private Registry"."""
_PULL = {"imagePullSecrets": Maybe(Many({"name": Optional(str)}, 10_000))}
_PAUSE_S = 0.05
_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Login:
    """A login at a registry in one namespace."""

    namespace: str
    secret: str
    server: str
    user: str
    is_used: bool
    """Whether the namespace's default service account names it."""
    uid: str = ""
    """Of the Secret."""


class Registries(Api):
    """The logins of the cluster. The methods raise as those of ``Api``."""

    def has_namespace(self, name: str) -> bool:
        """Whether a namespace exists, with its default service account."""
        return self._find(_account(name)) is not None

    def login(self, namespace: str, server: str, user: str, password: str) -> None:
        """Create the Secret of a login, or replace its content, and add it to the default service account."""
        body = _document(server, user, password)
        name = secret_name(server)
        self._call("PATCH", f"{_secret(namespace, name)}?fieldManager=gpunodes&force=true", body, _APPLY)
        self._change(namespace, lambda names: names if name in names else [*names, name])

    def differs(self, login: Login, user: str, password: str) -> bool:
        """Whether a login has another user or password than these; one that has gone does not."""
        found = self._find(_secret(login.namespace, login.secret))
        return found is not None and found.get("data") != _document(login.server, user, password)["data"]

    def renew(self, login: Login, user: str, password: str) -> None:
        """Replace what the Secret of a login has; raises Refused if another Secret took its place, or none did."""
        body = _document(login.server, user, password)
        body["metadata"]["uid"] = login.uid
        self._call("PATCH", f"{_secret(login.namespace, login.secret)}?fieldManager=gpunodes&force=true", body, _APPLY)

    def logout(self, login: Login) -> None:
        """Take a login out of the default service account, and delete its Secret; what has gone is no error."""
        self._change(login.namespace, lambda names: [each for each in names if each != login.secret])
        self._delete(_secret(login.namespace, login.secret))

    def logins(self) -> list[Login]:
        """All logins that gpunodes made."""
        secrets = self._list(f"/api/v1/secrets?labelSelector={_LABEL}%3Dtrue", _LOGIN)
        path = "/api/v1/serviceaccounts?fieldSelector=metadata.name%3Ddefault"
        accounts = self._list(path, (*_NAME, "imagePullSecrets"))
        used = {str(each["metadata"].get("namespace")): _names(each) for each in accounts}
        found = []
        for each in secrets:
            server = (each["metadata"].get("annotations") or {}).get(_SERVER, "")
            found.append(_login(each, server, used.get(str(each["metadata"].get("namespace")), ())))
        return sorted((each for each in found if each), key=lambda each: (each.server, each.namespace))

    def login_at(self, server: str, namespace: str) -> Login | None:
        """The login of a namespace at a registry, whatever its label, which the namespace's users may remove."""
        name = quote(secret_name(server), safe="")
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/secrets?fieldSelector=metadata.name%3D{name}"
        account = self._find(_account(namespace))
        used = _names(account) if account else ()
        return next(filter(None, (_login(each, server, used) for each in self._list(path, _LOGIN))), None)

    def _change(self, namespace: str, change: Callable[[list[str]], list[str]]) -> None:
        """Change the Secrets that the default service account names, starting from those of this moment."""
        deadline = time.monotonic() + _PATIENCE_S
        while (account := self._find(_account(namespace))) is not None:
            before = _names(account)
            after = change(before)
            if after == before:
                return
            patch = {
                "metadata": {"resourceVersion": account["metadata"]["resourceVersion"]},
                "imagePullSecrets": [{"name": each} for each in after],
            }
            try:
                self._call("PATCH", f"{_account(namespace)}?fieldManager=gpunodes", patch, _MERGE)
            except Refused as error:
                if error.status != CONFLICT or time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_S)
            else:
                return


def secret_name(server: str) -> str:
    """The name of a registry's Secret; two registries never have the same."""
    readable = re.sub(r"[^a-z0-9]+", "-", server.lower()).strip("-")[:40].strip("-")
    return f"gpunodes-registry-{readable}-{hashlib.sha256(server.encode()).hexdigest()[:8]}"


def _login(found: Mapping[str, Any], server: str, used: Sequence[str]) -> Login | None:
    """The login at a registry that a Secret is; None for another one, which is not ours to delete."""
    metadata, name = found["metadata"], secret_name(server)
    if found.get("type") != _KIND or metadata["name"] != name:
        return None
    user = (metadata.get("annotations") or {}).get(_USER, "")
    return Login(str(metadata.get("namespace")), name, server, user, name in used, str(metadata.get("uid", "")))


def _document(server: str, user: str, password: str) -> dict[str, Any]:
    """The Secret of a login."""
    pair = base64.b64encode(f"{user}:{password}".encode()).decode("ascii")
    auths = {_key(server): {"username": user, "password": password, "auth": pair}}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": secret_name(server),
            "labels": {"app.kubernetes.io/managed-by": "gpunodes", _LABEL: "true"},
            "annotations": {_SERVER: server, _USER: user},
        },
        "type": _KIND,
        "data": {".dockerconfigjson": base64.b64encode(json.dumps({"auths": auths}).encode()).decode("ascii")},
    }


def _key(server: str) -> str:
    return _DOCKER_HUB if server == "docker.io" else server


def _account(namespace: str) -> str:
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/serviceaccounts/default"


def _secret(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/secrets/{quote(name, safe='')}"


def _names(account: Mapping[str, Any]) -> list[str]:
    given = account.get("imagePullSecrets")
    check({"imagePullSecrets": given}, _PULL, "the service account of a namespace")
    names: Sequence[Mapping[str, str]] = given or ()
    return [each["name"] for each in names if "name" in each]
