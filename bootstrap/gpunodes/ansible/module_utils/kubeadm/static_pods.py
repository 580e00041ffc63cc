"""Stops, starts and restarts the control plane's static pods: the kubelet runs those whose manifests are in its folder.

A manifest that is moved away is in the ledger before it moves, and in a folder of the same file system, so that the
move is atomic: the next run puts it back. A reset removes both folders.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import ssl
import time
from collections.abc import Callable, Iterable

from .. import containers, disk, etcdctl, kube_api, kubeconfig, static_pod_files
from ..ledger import Ledger
from ..problem import MachineProblem
from .errors import component_error, refuses_argument

AWAY = "/etc/kubernetes/gpunodes-manifests"
_POLL_S = 1.0
_HEALTH = {"kube-controller-manager": 10257, "kube-scheduler": 10259}
"""Ports of https://127.0.0.1/healthz, which needs no identity (kubernetes.io, Ports and Protocols)."""


def heal(machine_ledger: Ledger, check: bool = False) -> list[str]:
    """Put manifests back that an interrupted restart left away; returns the names of their pods.

    Raises MachineProblem if a restore of etcd has stopped this control plane, which starts it itself: an etcd that is
    started meanwhile has other data.
    """
    if machine_ledger.etcd_restore:
        raise MachineProblem(
            "a restore of etcd has stopped this control plane",
            "a control plane in use",
            "finish `gpunodes etcd restore`, give it up with `gpunodes etcd restore --abort`, or reset this machine "
            "and join it again",
        )
    names = sorted(machine_ledger.manifests)
    if not check:
        for name in names:
            _back(name, machine_ledger)
    return names


def restart(
    name: str,
    machine_ledger: Ledger,
    limit_s: float,
    ready: Callable[[], bool] | None = None,
    manifest_text: str | None = None,
) -> None:
    """Restart one static pod and wait until it is ready; ``ready`` replaces the check for its kind.

    With ``manifest_text`` it gets another manifest while it is stopped; an interrupted run leaves the old or the new
    one.

    Raises MachineProblem if there is no such pod and, with the manifest in its place, if it does not end or become
    ready in time.
    """
    heal(machine_ledger)
    manifest = static_pod_files.path(name)
    if not os.path.exists(manifest):
        raise MachineProblem(
            f"{manifest} does not exist",
            f"the static pod {name} of a control plane",
            "see `ls /etc/kubernetes/manifests`",
        )
    deadline, began = time.monotonic() + limit_s, time.time()
    before = set(containers.ids(name))
    try:
        stop([name], machine_ledger, limit_s)
        if manifest_text is not None:
            disk.write(manifest, manifest_text, 0o600)
    finally:
        _back(name, machine_ledger)
    works = ready or (lambda: is_ready(name))
    while not (set(containers.ids(name)) - before and works()):
        if time.monotonic() > deadline or refuses_argument(name, began):
            raise not_ready(name, f"the static pod {name} is not ready after its restart", began)
        time.sleep(_POLL_S)


def not_ready(name: str, found: str, since: float) -> MachineProblem:
    """The problem of a static pod, with the error by which its component ended after ``since``, if it did."""
    remedy = f"see `crictl ps -a --name {name}` and its logs, and `journalctl -u kubelet`"
    cause = component_error(since, [name])
    if cause is None:
        return MachineProblem(found, "a kubelet that follows the manifests of its folder", remedy)
    return MachineProblem(f"{found}: {cause.found}", "a ready static pod", cause.remedy or remedy)


def stop(names: Iterable[str], machine_ledger: Ledger, limit_s: float) -> None:
    """Move manifests away, and wait until their containers are gone; raises MachineProblem if they stay."""
    names = list(names)
    for name in names:
        if os.path.exists(static_pod_files.path(name)):
            machine_ledger.manifests[name] = away(name)
            machine_ledger.save()
            os.makedirs(AWAY, mode=0o700, exist_ok=True)
            os.replace(static_pod_files.path(name), away(name))
    deadline = time.monotonic() + limit_s
    for name in names:
        while containers.ids(name):
            if time.monotonic() > deadline:
                raise MachineProblem(
                    f"the static pod {name} does not end",
                    "a kubelet that follows the manifests of its folder",
                    "see `journalctl -u kubelet`: the kubelet must run",
                )
            time.sleep(_POLL_S)


def start(names: Iterable[str], machine_ledger: Ledger) -> None:
    """Put manifests back; does not wait."""
    for name in names:
        _back(name, machine_ledger)


def is_ready(name: str) -> bool:
    """Whether a component of the control plane responds as healthy on this machine."""
    if name == "kube-apiserver":
        return _api_is_ready()
    if name == "etcd":
        with contextlib.suppress(MachineProblem):
            etcdctl.must(["endpoint", "health"])
            return True
        return False
    return _healthy(_HEALTH[name])


def _api_is_ready() -> bool:
    address = static_pod_files.argument("kube-apiserver", "advertise-address")
    if not address or kubeconfig.load(kubeconfig.ADMIN) is None:
        return False
    # Another API server behind the cluster's endpoint would respond for this one.
    return not kube_api.local_problem(address)


def _healthy(port: int) -> bool:
    # Loopback, no identity and nothing secret: whose certificate it is does not matter.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=context)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def away(name: str) -> str:
    """The path of a manifest that is moved away."""
    return f"{AWAY}/{name}.yaml"


def _back(name: str, machine_ledger: Ledger) -> None:
    """Put a manifest back, unless a newer one is there: then kubeadm wrote it meanwhile."""
    if os.path.exists(away(name)):
        if os.path.exists(static_pod_files.path(name)):
            disk.remove(away(name))
        else:
            os.replace(away(name), static_pod_files.path(name))
    if machine_ledger.manifests.pop(name, None):
        machine_ledger.save()
