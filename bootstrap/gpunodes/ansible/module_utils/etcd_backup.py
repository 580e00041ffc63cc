"""Sends what a backup of the cluster consists of: a program for control planes (engine/remote/programs.py).

Its output is one line of JSON, then the parts' bytes one after another, then one line of JSON with their SHA-256. The
first line is {"parts": [{"name", "size"}], "about": {...}}, or {"error": {"found", "wanted", "remedy"}}. Nothing stays
on the machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from . import disk, etcd_snapshot, kube_api, kubeconfig, static_pod_files
from .kube_api import ApiError, Client
from .problem import MachineProblem

SNAPSHOT = "etcd/snapshot.db"
_PKI = "/etc/kubernetes/pki"
KEYS = (
    "ca.crt",
    "ca.key",
    "front-proxy-ca.crt",
    "front-proxy-ca.key",
    "sa.key",
    "sa.pub",
    "etcd/ca.crt",
    "etcd/ca.key",
)
"""The certificate authorities and the key of service accounts, below kubeadm's folder: all others follow from them."""
CONFIGURATION = {
    "kubernetes/encryption-configuration": "encryption-provider-config",
    "kubernetes/audit-policy": "audit-policy-file",
}
"""Files that the API server reads, by the arguments that name them. Secrets are unreadable without the first."""
KUBEADM = "kubernetes/kubeadm-config.yaml"
_CHUNK = 1 << 20
_SMALL = 1 << 20
"""Maximum size of a part that is no snapshot."""
_API_S = 20.0


def _end(*_: object) -> None:
    """Handle a signal: end with all clean-up."""
    raise SystemExit(1)


def main(_: Mapping[str, Any]) -> None:
    """Send a backup; the snapshot is deleted even if the connection ends."""
    signal.signal(signal.SIGTERM, _end)
    try:
        small, paths = _small_parts()
        with etcd_snapshot.snapshot() as (path, about):
            _send(small, path, {**_about(), "etcd": about, "paths": paths})
    except MachineProblem as problem:
        _line({"error": asdict(problem.problem)})
    except BrokenPipeError:
        # The controller has ended; there is nobody to report it to.
        os._exit(1)


def _send(small: Mapping[str, bytes], path: str, about: Mapping[str, Any]) -> None:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        parts = [{"name": SNAPSHOT, "size": size}, *({"name": name, "size": len(small[name])} for name in small)]
        _line({"parts": parts, "about": about})
        digests, digest, left = {}, hashlib.sha256(), size
        while left:
            data = file.read(min(_CHUNK, left))
            if not data:
                raise MachineProblem("the snapshot became shorter while it was read")
            digest.update(data)
            sys.stdout.buffer.write(data)
            left -= len(data)
        digests[SNAPSHOT] = digest.hexdigest()
    for name, data in small.items():
        digests[name] = hashlib.sha256(data).hexdigest()
        sys.stdout.buffer.write(data)
    _line({"sha256": digests})


def _line(document: Mapping[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(document).encode() + b"\n")
    sys.stdout.buffer.flush()


def _about() -> dict[str, Any]:
    config = kubeconfig.load(kubeconfig.ADMIN)
    if config is None:
        raise MachineProblem(f"{kubeconfig.ADMIN} does not exist", "a control plane", "run it on another machine")
    return {
        "ca_hash": kubeconfig.ca_hash(disk.read(f"{_PKI}/ca.crt") or ""),
        "endpoint": config.server.partition("://")[2],
        "hostname": os.uname().nodename,
        "time": time.time(),
        "kubernetes": _version(static_pod_files.image("kube-apiserver")),
    }


def _version(image: str) -> str:
    return image.rpartition(":")[2].partition("@")[0]


def _small_parts() -> tuple[dict[str, bytes], dict[str, str]]:
    """The small parts by name, and the paths of those that are elsewhere on other machines."""
    parts, paths = {}, {}
    for name in KEYS:
        data = _read(f"{_PKI}/{name}")
        if data is None and name.endswith(".key") and name != "sa.key":
            # A CA that is kept elsewhere (kubernetes.io, "External CA mode").
            continue
        parts[f"pki/{name}"] = _needed(f"{_PKI}/{name}", data)
    for name, argument in CONFIGURATION.items():
        if path := static_pod_files.argument("kube-apiserver", argument):
            parts[name], paths[name] = _needed(path, _read(path)), path
    with contextlib.suppress(ApiError):
        # It is in the snapshot, too: a backup without an API lacks only this copy for people.
        config = kubeconfig.load(kubeconfig.ADMIN)
        found = Client(config, _API_S).find(f"{kube_api.SYSTEM}/configmaps/kubeadm-config") if config else None
        text = ((found or {}).get("data") or {}).get("ClusterConfiguration")
        if isinstance(text, str) and len(text.encode()) <= _SMALL:
            parts[KUBEADM] = text.encode()
    return parts, paths


def _read(path: str) -> bytes | None:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        return file.read(_SMALL + 1)
    return None


def _needed(path: str, data: bytes | None) -> bytes:
    if data is None or len(data) > _SMALL:
        raise MachineProblem(
            f"{path} {'does not exist' if data is None else 'is larger than 1 MiB'}",
            "a control plane with all files that a restore needs",
            "run it on another control plane, or restore that file",
        )
    return data
