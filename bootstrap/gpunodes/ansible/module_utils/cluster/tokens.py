"""Bootstrap tokens, with which machines join the cluster."""

from __future__ import annotations

import datetime
import secrets
import string
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .. import kube_api, kubeconfig
from ..kube_api import Client
from ..problem import MachineProblem
from . import removed_nodes

_SECRETS = f"{kube_api.SYSTEM}/secrets"
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"
RUN = "gpunodes.dev/run"
"""Annotation of a token: the run that uses it, by its name as a holder of Leases."""
_DESCRIPTION = "Z3B1bm9kZXMgam9pbg=="  # base64 of "gpunodes join"
_TRIED = "gpunodes.dev/tried"
"""Annotation of a token that was not signed at once: when it was last changed, in seconds since 1970."""
_AGAIN_S = 15.0
"""Seconds after which the controller manager is reminded of a token."""
PATIENCE_S = 300
"""Deleting a token must succeed: wait longer for a busy API server than elsewhere."""


def new_token() -> str:
    """A new bootstrap token in the form of bootstrap.kubernetes.io: [a-z0-9]{6}.[a-z0-9]{16}."""
    characters = string.ascii_lowercase + string.digits
    token = "".join(secrets.choice(characters) for _ in range(22))
    return f"{token[:6]}.{token[6:]}"


def create(ttl_s: int, limit_s: float, run: str = "", names: Sequence[str] = ()) -> str:
    """Create a bootstrap token that expires after ``ttl_s``; returns it when joins can use it.

    ``run`` is the holder of the Leases of the run that uses it, "" for none. ``names`` are the nodes that join with it:
    the API refuses them no longer, if they were removed.
    """
    client = kube_api.admin()
    removed_nodes.admit(client, names)
    token = new_token()
    name, _, secret = token.partition(".")
    ends = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=ttl_s)
    client.call(
        "POST",
        _SECRETS,
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "bootstrap.kubernetes.io/token",
            "metadata": {"name": f"bootstrap-token-{name}", "annotations": {RUN: run}},
            "stringData": {
                "description": "gpunodes join",
                "token-id": name,
                "token-secret": secret,
                "expiration": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
                "usage-bootstrap-authentication": "true",
                "usage-bootstrap-signing": "true",
                "auth-extra-groups": "system:bootstrappers:kubeadm:default-node-token",
            },
        },
    )
    deadline = time.monotonic() + limit_s
    again = time.monotonic() + _AGAIN_S
    while True:
        # The controller manager signs cluster-info with each token; a join that starts earlier waits much longer.
        signed = client.get("/api/v1/namespaces/kube-public/configmaps/cluster-info")["data"]
        if f"jws-kubeconfig-{name}" in signed:
            return token
        if time.monotonic() > deadline:
            client.delete(f"{_SECRETS}/bootstrap-token-{name}")
            raise MachineProblem(
                f"the controller manager did not sign cluster-info with the join token within {limit_s:.0f} s",
                "a working controller manager",
                "see `kubectl -n kube-system get pods` on the control plane",
            )
        if time.monotonic() > again:
            # Its signer drops a failed update, as of credentials that ended while the machine slept, until the next
            # change of a token (pkg/controller/bootstrap/bootstrapsigner.go, updateConfigMap).
            change = {"metadata": {"annotations": {_TRIED: str(int(time.time()))}}}
            client.call("PATCH", f"{_SECRETS}/bootstrap-token-{name}", change, content_type=kube_api.MERGE)
            again = time.monotonic() + _AGAIN_S
        time.sleep(0.3)


def delete(run: str = "", check: bool = False) -> list[str]:
    """Delete the tokens of a run and those of earlier interrupted joins, or with ``check`` only list them.

    Returns the names of their Secrets. Other runs may join machines at the same time: their tokens are kept while they
    hold a Lease.
    """
    if check and kubeconfig.load(kubeconfig.ADMIN) is None:
        return []  # the cluster does not exist yet
    client = kube_api.admin(PATIENCE_S)
    found = client.get(_SECRETS, fieldSelector="type=bootstrap.kubernetes.io/token")["items"]
    names = unused(found, leases(client), run, time.time())
    return [name for name in names if check or client.delete(f"{_SECRETS}/{name}")]


def unused(tokens: Sequence[Mapping[str, Any]], leases: Sequence[Mapping[str, Any]], run: str, now: float) -> list[str]:
    """The tokens of gpunodes that belong to ``run``, or to a run without a valid Lease."""
    active = active_runs(leases, run, now)
    created = [token["metadata"] for token in tokens if (token.get("data") or {}).get("description") == _DESCRIPTION]
    return [token["name"] for token in created if (token.get("annotations") or {}).get(RUN) not in active]


def leases(client: Client) -> list[Mapping[str, Any]]:
    """The Leases of gpunodes."""
    found: list[Mapping[str, Any]] = client.get(_LEASES, labelSelector="app.kubernetes.io/managed-by=gpunodes")["items"]
    return found


def active_runs(leases: Sequence[Mapping[str, Any]], run: str, now: float) -> set[str]:
    """The other runs than ``run`` that hold a valid Lease, by their names as holders."""
    holders = {lease["spec"].get("holderIdentity") for lease in leases if _is_valid(lease["spec"], now)}
    return holders - {run, None, ""}


def _is_valid(spec: Mapping[str, Any], now: float) -> bool:
    """Whether a Lease has not expired; ``now`` is this machine's time, which Leases use."""
    try:
        renewed = datetime.datetime.strptime(spec["renewTime"], _TIME).replace(tzinfo=datetime.timezone.utc)
        return renewed.timestamp() + float(spec["leaseDurationSeconds"]) > now
    except (KeyError, TypeError, ValueError):
        return False
