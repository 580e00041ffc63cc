"""Keeps removed machines away: the API refuses to let their kubelets' certificates make a node again.

Such a certificate stays valid after its machine has left, and Kubernetes lets it create the node of its name and renew
itself. The names are in a ConfigMap, which no node may write; a policy reads it.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable, Mapping
from typing import Any

from .. import kube_api
from ..kube_api import ApiError, Client

NAME = "gpunodes-removed-nodes"
PATH = f"{kube_api.SYSTEM}/configmaps/{NAME}"
_POLICIES = "/apis/admissionregistration.k8s.io/v1"
_TIME = "%Y-%m-%dT%H:%M:%SZ"
KEPT_DAYS = 400
"""A kubelet's certificate lasts a year, by default of the controller manager (--cluster-signing-duration), and is not
renewed after the removal. The rest is for clocks that differ."""
_IN_FORCE_S = 30
_PAUSE_S = 0.5
_LABELS = {"app.kubernetes.io/managed-by": "gpunodes"}
_USER = "system:node:"

_LIST: Mapping[str, Any] = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": NAME, "namespace": "kube-system", "labels": _LABELS},
}
_POLICY: Mapping[str, Any] = {
    "apiVersion": "admissionregistration.k8s.io/v1",
    "kind": "ValidatingAdmissionPolicy",
    "metadata": {"name": NAME, "labels": _LABELS},
    "spec": {
        "failurePolicy": "Fail",
        "paramKind": {"apiVersion": "v1", "kind": "ConfigMap"},
        "matchConstraints": {
            "resourceRules": [
                {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["nodes"]},
                {
                    "apiGroups": ["certificates.k8s.io"],
                    "apiVersions": ["*"],
                    "operations": ["CREATE"],
                    "resources": ["certificatesigningrequests"],
                },
            ]
        },
        "matchConditions": [{"name": "by-a-node", "expression": f"request.userInfo.username.startsWith('{_USER}')"}],
        "validations": [
            {
                "expression": "params == null || !has(params.data) || "
                f"!(request.userInfo.username.substring({len(_USER)}) in params.data)",
                "message": "gpunodes removed this machine from the cluster; `gpunodes join` lets it in again",
                "reason": "Forbidden",
            }
        ],
    },
}
_BINDING: Mapping[str, Any] = {
    "apiVersion": "admissionregistration.k8s.io/v1",
    "kind": "ValidatingAdmissionPolicyBinding",
    "metadata": {"name": NAME, "labels": _LABELS},
    "spec": {
        "policyName": NAME,
        "validationActions": ["Deny"],
        # Without the list every node joins as before.
        "paramRef": {"name": NAME, "namespace": "kube-system", "parameterNotFoundAction": "Allow"},
    },
}


def refuse(client: Client, name: str) -> list[str]:
    """Put a node on the list, before it is deleted; returns notes for the user: why it may come back nevertheless.

    The API server needs a moment until it knows the policy and the list: waits for that.
    """
    try:
        _apply(client, PATH, _LIST)
        _apply(client, f"{_POLICIES}/validatingadmissionpolicies/{NAME}", _POLICY)
        _apply(client, f"{_POLICIES}/validatingadmissionpolicybindings/{NAME}", _BINDING)
    except ApiError as error:
        if error.status != kube_api.NOT_FOUND:
            raise
        return [_note(name, "this version of Kubernetes has no ValidatingAdmissionPolicy")]
    now = datetime.datetime.now(datetime.timezone.utc)
    data = client.get(PATH).get("data") or {}
    changes: dict[str, str | None] = dict.fromkeys(ended(data, now))
    _patch(client, {**changes, name: now.strftime(_TIME)})
    if not _is_in_force(name):
        return [_note(name, f"the policy {NAME} has no effect")]
    return []


def admit(client: Client, names: Iterable[str], check: bool = False) -> list[str]:
    """Take nodes off the list, before their machines join; returns those that were on it."""
    found = client.find(PATH)
    data = (found or {}).get("data") or {}
    listed = [name for name in names if name in data]
    if listed and not check:
        _patch(client, dict.fromkeys(listed))
    return listed


def ended(data: Mapping[str, str], now: datetime.datetime) -> list[str]:
    """The names whose certificates must have ended; an entry that is no time stays."""
    found = []
    for name, text in data.items():
        try:
            removed = datetime.datetime.strptime(text, _TIME).replace(tzinfo=datetime.timezone.utc)
        except ValueError:
            continue
        if now - removed > datetime.timedelta(days=KEPT_DAYS):
            found.append(name)
    return found


def _apply(client: Client, path: str, wanted: Mapping[str, Any]) -> None:
    query = {"fieldManager": kube_api.MANAGER, "force": "true"}
    client.call("PATCH", path, wanted, query, "application/apply-patch+yaml")


def _patch(client: Client, data: Mapping[str, str | None]) -> None:
    client.call("PATCH", PATH, {"data": data}, None, kube_api.MERGE)


def _is_in_force(name: str) -> bool:
    """Whether the API server refuses the node within the limit, by a dry run in the name of the node."""
    client = kube_api.admin(0)
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    deadline = time.monotonic() + _IN_FORCE_S
    try:
        while time.monotonic() < deadline:
            try:
                client.call("POST", "/api/v1/nodes", node, {"dryRun": "All"}, user=f"{_USER}{name}")
            except ApiError as error:
                if NAME in str(error):
                    return True
            time.sleep(_PAUSE_S)
    finally:
        client.close()
    return False


def _note(name: str, why: str) -> str:
    return f"root on the machine of {name} can make its node again, as long as its certificate is valid: {why}"
