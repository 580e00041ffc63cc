"""What a control plane gives to another one that joins: encrypted certificates, and files of its API server.

kubeadm stores the certificates in the Secret kubeadm-certs, encrypted with a key of 32 random bytes that is made here
for each join. The Secret's owner is a bootstrap token without rights, with which it expires after two hours.
Source: kubeadm 1.36 app/phases/copycerts.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import disk, kube_api, kubeconfig
from ..cluster import tokens
from ..containers import runtime_socket
from ..kube_api import Client
from ..problem import MachineProblem
from . import command, reset

FOLDER = "/etc/kubernetes/gpunodes"
_KINDS = {"encryption.json": "EncryptionConfiguration", "audit-policy.json": "Policy"}
"""The files that gpunodes writes for the API server (role control_plane), and the kind of object in each."""
_FILE_FLAGS = (
    *("admission-control-config-file", "audit-policy-file", "audit-webhook-config-file"),
    *("authentication-config", "authentication-token-webhook-config-file", "authorization-config"),
    *("authorization-webhook-config-file", "egress-selector-config-file", "encryption-provider-config"),
    *("oidc-ca-file", "token-auth-file", "tracing-config-file"),
)
"""Arguments of the API server that name a file, which kubeadm does not copy. Source: kube-apiserver 1.36 --help."""
_FLAG = re.compile(rf"--(?:{'|'.join(_FILE_FLAGS)})=(/[A-Za-z0-9._/-]+)")
_KEY_BYTES = 32
_SECRET = f"{kube_api.SYSTEM}/secrets/kubeadm-certs"
_OWNER = base64.b64encode(b"Proxy for managing TTL for the kubeadm-certs secret").decode("ascii")
"""Description of the bootstrap tokens that own the Secret."""


@dataclass(frozen=True)
class Shared:
    """What the machine that joins gets; ``key`` and ``files`` are secret."""

    key: str
    """The key of the certificates, in hexadecimal."""
    files: Mapping[str, str]
    """The texts of the files that gpunodes wrote for the API server, by path."""
    required: Sequence[str]
    """Other files that the API server reads: the administrator's own."""


def share(run: str, limit_s: float) -> Shared:
    """Upload the certificates for one join; ``run`` is the holder of the Leases of the run that joins, "" for none.

    Raises MachineProblem if another run joins a control plane at the moment, which needs its own key.
    """
    client = kube_api.admin()
    if _is_in_use(client, client.find(_SECRET), run):
        raise MachineProblem(
            "another command joins a control plane at the moment",
            "one that joins at a time",
            "run the command again when the other one has ended",
        )
    key = secrets.token_hex(_KEY_BYTES)
    documents = [
        {
            "apiVersion": "kubeadm.k8s.io/v1beta4",
            "kind": "InitConfiguration",
            "certificateKey": key,
            "nodeRegistration": {"criSocket": runtime_socket()},
        },
        # With a version kubeadm does not look for the newest one on the Internet.
        {
            "apiVersion": "kubeadm.k8s.io/v1beta4",
            "kind": "ClusterConfiguration",
            "kubernetesVersion": client.get("/version")["gitVersion"],
        },
    ]
    command.run("init phase upload-certs", documents, limit_s, ("--upload-certs", "--skip-certificate-key-print"))
    client.call("PATCH", _SECRET, {"metadata": {"annotations": {tokens.RUN: run}}}, None, kube_api.MERGE)
    files, required = _api_server_files(disk.read(reset.MANIFEST) or "")
    return Shared(key, files, required)


def withdraw(run: str = "", check: bool = False) -> list[str]:
    """Delete the uploaded certificates and their tokens, or with ``check`` only list them; returns the Secrets' names.

    Those of another run that still holds a Lease are kept.
    """
    if check and kubeconfig.load(kubeconfig.ADMIN) is None:
        return []  # the cluster does not exist yet
    client = kube_api.admin(tokens.PATIENCE_S)
    found = client.find(_SECRET)
    if _is_in_use(client, found, run):
        return []
    listed = client.get(f"{kube_api.SYSTEM}/secrets", fieldSelector="type=bootstrap.kubernetes.io/token")["items"]
    names = [each["metadata"]["name"] for each in listed if (each.get("data") or {}).get("description") == _OWNER]
    names += ["kubeadm-certs"] if found else []
    return [name for name in names if check or _delete(client, name)]


def place(files: Mapping[str, str], required: Sequence[str]) -> None:
    """Write the files of another control plane's API server on this machine, readable by root only.

    Raises MachineProblem, before anything is written, for a file that gpunodes does not share, and for a missing one of
    the administrator.
    """
    check_files(files, required)
    for path, text in files.items():
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        disk.write(path, text, 0o600)


def check_files(files: Mapping[str, str], required: Sequence[str]) -> None:
    """The checks of ``place``."""
    for path, text in files.items():
        if _kind(text) != _shared().get(path):
            # Another control plane chose path and text: they must not become any other file of this machine.
            raise MachineProblem(
                f"the other control plane shares {path!r}, which is none of the files of its API server",
                f"only {' and '.join(_shared())}, as gpunodes wrote them",
                "compare that folder of the two machines",
            )
    missing = [path for path in required if not os.path.isfile(path)]
    if missing:
        raise MachineProblem(
            f"this machine lacks {', '.join(missing)}, which the API server of the cluster is started with",
            "the same files on all control planes",
            "copy them from another control plane with the same mode, then run the command again",
        )


def _shared() -> dict[str, str]:
    return {f"{FOLDER}/{name}": kind for name, kind in _KINDS.items()}


def _kind(text: str) -> str | None:
    try:
        found = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return ""
    return str(found.get("kind", "")) if isinstance(found, dict) else ""


def _api_server_files(manifest: str) -> tuple[dict[str, str], list[str]]:
    """The texts of the files that gpunodes wrote, and the other files in the arguments of this API server."""
    files, required = {}, []
    for path in dict.fromkeys(_FLAG.findall(manifest)):
        text = disk.read(path) if path in _shared() else None
        if text is None:
            required.append(path)
        else:
            files[path] = text
    return files, required


def _is_in_use(client: Client, secret: Any, run: str) -> bool:
    """Whether another run uploaded these certificates and still holds a Lease."""
    annotations = (secret or {}).get("metadata", {}).get("annotations") or {}
    return annotations.get(tokens.RUN) in tokens.active_runs(tokens.leases(client), run, time.time())


def _delete(client: Client, name: str) -> bool:
    return client.delete(f"{kube_api.SYSTEM}/secrets/{name}")
