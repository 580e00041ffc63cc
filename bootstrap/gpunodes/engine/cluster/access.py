"""Who may do what in the cluster: roles, their bindings, and client certificates that the cluster signs."""

from __future__ import annotations

import base64
import binascii
import contextlib
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from gpunodes.engine.cluster.api import CONFLICT, Api
from gpunodes.engine.cluster.errors import NoResponse, Refused, check, malformed
from gpunodes.errors import GpunodesError
from gpunodes.shape import Many, Maybe, Optional

RBAC = "/apis/rbac.authorization.k8s.io/v1"
_REQUESTS = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
SIGNER = "kubernetes.io/kube-apiserver-client"
# What makes pods, and pods themselves.
_WORKLOADS = {
    "/api/v1": ("pods", "replicationcontrollers"),
    "/apis/apps/v1": ("daemonsets", "deployments", "replicasets", "statefulsets"),
    "/apis/batch/v1": ("cronjobs", "jobs"),
}
_TOKENS = "secrets?fieldSelector=type%3Dkubernetes.io%2Fservice-account-token"
_SIGNED_S = 60.0
"""Time limit in seconds for the signature of kube-controller-manager."""
_POLL_S = 0.5
OWN = "gpunodes.dev/user"
"""The label of a binding that gpunodes made for a person."""
END = "gpunodes.dev/certificate-end"
"""The annotation with the latest end of that person's certificates, in seconds since 1970."""
_KEEP = [*(f"metadata.{each}" for each in ("name", "namespace", "labels", "annotations")), "roleRef", "subjects"]

_SUBJECTS = Optional(Maybe(Many({"kind": str, "name": str}, 100_000)))
_BINDING = {"roleRef": {"kind": str, "name": str}, "subjects": _SUBJECTS}
_WORDS = Optional(Maybe(Many(str, 100_000)))
_ROLE = {"rules": Optional(Maybe(Many({"verbs": _WORDS, "apiGroups": _WORDS, "resources": _WORDS}, 100_000)))}
_REQUEST = {
    "spec": {"request": str, "signerName": str},
    "status": Optional(
        Maybe({
            "certificate": Optional(Maybe(str)),
            "conditions": Optional(Maybe(Many({"type": str, "message": Optional(str)}, 100))),
        })
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Binding:
    """A RoleBinding, or a ClusterRoleBinding (``namespace`` is "")."""

    namespace: str
    name: str
    role: str
    is_cluster_role: bool
    users: Sequence[str] = ()
    groups: Sequence[str] = ()
    is_own: bool = False
    """Whether gpunodes made it for a person."""
    end: float | None = None
    """The latest one of the user's certificates, in seconds since 1970."""

    @property
    def path(self) -> str:
        return f"{_bindings(self.namespace)}/{_segment(self.name)}"

    @property
    def title(self) -> str:
        """For people."""
        kind = f"RoleBinding {self.namespace}/{self.name}" if self.namespace else f"ClusterRoleBinding {self.name}"
        return f"{kind} ({self.role})"

    @property
    def deletion(self) -> str:
        """The command that deletes it, quoted for a shell: others chose its name."""
        kind = ["-n", self.namespace, "delete", "rolebinding"] if self.namespace else ["delete", "clusterrolebinding"]
        return shlex.join(["kubectl", *kind, "--", self.name])


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a role."""

    verbs: Sequence[str]
    groups: Sequence[str]
    resources: Sequence[str]


class Access(Api):
    """The cluster's roles, bindings and certificate requests. The methods raise as those of ``Api``."""

    def cluster_role(self, name: str) -> list[Rule] | None:
        """The rules of a ClusterRole; None if it does not exist."""
        found = self._find(f"{RBAC}/clusterroles/{_segment(name)}")
        if found is None:
            return None
        check(found, _ROLE, f"the ClusterRole {name}")
        return [
            Rule(each.get("verbs") or (), each.get("apiGroups") or (), each.get("resources") or ())
            for each in found.get("rules") or []
        ]

    def namespace_labels(self, name: str) -> dict[str, str] | None:
        """The labels of a namespace; None if it does not exist."""
        found = self._find(f"/api/v1/namespaces/{_segment(name)}")
        labels = ((found or {}).get("metadata") or {}).get("labels") or {}
        return None if found is None else dict(labels)

    def bindings(self) -> list[Binding]:
        """All bindings of the cluster."""
        return [
            _binding(item)
            for kind in ("clusterrolebindings", "rolebindings")
            for item in self._list(f"{RBAC}/{kind}", _KEEP)
        ]

    def workloads(self, namespace: str) -> int:
        """How many workloads a namespace has ("": all of them), without those that another one made."""
        kinds = [f"{group}{_within(namespace)}/{kind}" for group, each in _WORKLOADS.items() for kind in each]
        keep = ("metadata.name", "metadata.ownerReferences")
        found = [item for path in kinds for item in self._list(path, keep)]
        return sum(not each["metadata"].get("ownerReferences") for each in found)

    def lasting_tokens(self, namespace: str) -> int:
        """How many Secrets of a namespace ("": all of them) have a token of a service account, which has no end."""
        path = f"/api/v1{_within(namespace)}/{_TOKENS}"
        return len(self._list(path, ("metadata.name",)))

    def bind(self, made: Binding) -> None:
        """Create a binding, or bring it to this state; its role cannot be changed, so another one replaces it."""
        body = _document(made)
        found = self._find(made.path)
        if found is not None:
            before = _binding(found)
            if (before.role, before.is_cluster_role) == (made.role, made.is_cluster_role):
                version = found["metadata"]["resourceVersion"]
                self._call("PUT", made.path, {**body, "metadata": {**body["metadata"], "resourceVersion": version}})
                return
            self.unbind(made)
        self._call("POST", _bindings(made.namespace), body)

    def unbind(self, binding: Binding) -> None:
        """Delete a binding; one that is gone is no error."""
        self._delete(binding.path)

    def signed(self, user: str, request: bytes, seconds: int) -> bytes:
        """A client certificate for a request in PEM, approved here; the request is deleted from the cluster.

        Raises GpunodesError if the cluster does not sign it.
        """
        name = f"gpunodes-{secrets.token_hex(8)}"
        encoded = base64.b64encode(request).decode("ascii")
        body = {
            "apiVersion": "certificates.k8s.io/v1",
            "kind": "CertificateSigningRequest",
            "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": "gpunodes"}},
            "spec": {
                "request": encoded,
                "signerName": SIGNER,
                "expirationSeconds": seconds,
                "usages": ["client auth"],
            },
        }
        try:
            try:
                self._call("POST", _REQUESTS, body)
            except Refused as error:
                if error.status != CONFLICT:  # a repeated request whose first attempt succeeded
                    raise
            self._approve(name, encoded, user)
            return self._wait_signed(name, encoded)
        finally:
            with contextlib.suppress(NoResponse, Refused):
                self._delete(f"{_REQUESTS}/{name}")

    def _approve(self, name: str, encoded: str, user: str) -> None:
        """Approve our own request, and no other one of its name: what was requested cannot be changed afterwards."""
        self._request(name, encoded)
        condition = {
            "type": "Approved",
            "status": "True",
            "reason": "GpunodesKubeconfig",
            "message": f"gpunodes kubeconfig --user {user}",
        }
        patch = {"status": {"conditions": [condition]}}
        self._call("PATCH", f"{_REQUESTS}/{name}/approval", patch, "application/merge-patch+json")

    def _request(self, name: str, encoded: str) -> Mapping[str, Any]:
        """The status of our request; raises GpunodesError if it is another one, or has gone."""
        found = self._find(f"{_REQUESTS}/{name}")
        if found is not None:
            check(found, _REQUEST, f"the request {name}")
        spec = (found or {}).get("spec") or {}
        if (spec.get("request"), spec.get("signerName")) != (encoded, SIGNER):
            raise GpunodesError(
                f"another client deleted or replaced the certificate request {name}",
                "the request of this command",
                "run the same command again",
            )
        return (found or {}).get("status") or {}

    def _wait_signed(self, name: str, encoded: str) -> bytes:
        deadline = time.monotonic() + _SIGNED_S
        while True:
            status = self._request(name, encoded)
            if status.get("certificate"):
                try:
                    return base64.b64decode(status["certificate"], validate=True)
                except binascii.Error as error:
                    raise malformed(f"the request {name}", "its certificate is not in base64") from error
            for each in status.get("conditions") or []:
                if each["type"] in ("Failed", "Denied"):
                    raise GpunodesError(
                        f"the cluster does not sign the certificate: {each.get('message') or each['type']}",
                        f"the signer {SIGNER} of kube-controller-manager",
                        "correct what it reports, then run the same command again",
                    )
            if time.monotonic() > deadline:
                raise GpunodesError(
                    f"the cluster has not signed the certificate after {_SIGNED_S:.0f} s",
                    f"the signer {SIGNER} of kube-controller-manager",
                    "see `kubectl -n kube-system get pods -l component=kube-controller-manager`",
                )
            time.sleep(_POLL_S)


def _segment(name: str) -> str:
    """A name as a part of a path. Names of roles and bindings may have "?", "#" and spaces; "?" would begin a query."""
    return quote(name, safe=":")


def _bindings(namespace: str) -> str:
    return f"{RBAC}{_within(namespace)}/rolebindings" if namespace else f"{RBAC}/clusterrolebindings"


def _within(namespace: str) -> str:
    """A namespace as a part of a path; "" for all."""
    return f"/namespaces/{_segment(namespace)}" if namespace else ""


def _binding(item: Mapping[str, Any]) -> Binding:
    check(item, _BINDING, "a binding")
    metadata, subjects = item["metadata"], item.get("subjects") or []
    end = str((metadata.get("annotations") or {}).get(END, ""))
    # Far below the last year of a calendar.
    known = end.isascii() and end.isdigit() and len(end) <= 11  # noqa: PLR2004 - as above
    return Binding(
        metadata.get("namespace") or "",
        metadata["name"],
        item["roleRef"]["name"],
        item["roleRef"]["kind"] == "ClusterRole",
        tuple(each["name"] for each in subjects if each["kind"] == "User"),
        tuple(each["name"] for each in subjects if each["kind"] == "Group"),
        OWN in (metadata.get("labels") or {}),
        float(end) if known else None,
    )


def _document(made: Binding) -> dict[str, Any]:
    kind = "RoleBinding" if made.namespace else "ClusterRoleBinding"
    group = "rbac.authorization.k8s.io"
    return {
        "apiVersion": f"{group}/v1",
        "kind": kind,
        "metadata": {
            "name": made.name,
            "labels": {"app.kubernetes.io/managed-by": "gpunodes", OWN: "true"},
            "annotations": {END: f"{made.end or 0:.0f}"},
        },
        "roleRef": {"apiGroup": group, "kind": "ClusterRole" if made.is_cluster_role else "Role", "name": made.role},
        "subjects": [{"apiGroup": group, "kind": "User", "name": each} for each in made.users],
    }
