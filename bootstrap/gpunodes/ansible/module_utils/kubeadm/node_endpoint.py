"""Moves the kubeconfigs of a node to another endpoint of its cluster, and restarts what uses them."""

from __future__ import annotations

import calendar
import os
import re
import socket
import ssl
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from urllib.parse import urlsplit

from .. import containers, disk, facts, kubeconfig, ledger
from ..host import services
from ..kube_api import PORT, ApiError, Client
from ..kubeconfig import Kubeconfig
from ..problem import MachineProblem
from ..report import Difference, Report
from . import static_pods

_FOLDER = "/etc/kubernetes"
_OF_PEOPLE = (kubeconfig.ADMIN, f"{_FOLDER}/super-admin.conf")
_OF_KUBELET = (kubeconfig.KUBELET, facts.BOOTSTRAP)
_OF_PODS = {"kube-controller-manager": "controller-manager.conf", "kube-scheduler": "scheduler.conf"}
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_KUBELET = "kubelet"
_TLS_LIMIT_S = 10
_POLL_S = 1.0


def move(endpoint: str, node: str, limit_s: float, check: bool) -> Report:
    """Have everything on this machine use ``endpoint`` (HOST:PORT), and verify that its ``node`` is Ready with it.

    On a control plane the kubelet, the controller manager and the scheduler may use the API server of their own
    machine, as kubeadm sets it up (KEP 4471; app/phases/kubeconfig); that stays. The ledger names what is still to be
    restarted, so that a run that is killed is completed by the next one. Raises MachineProblem before any change if
    this machine does not reach the cluster at the endpoint.
    """
    report = Report()
    machine_ledger = ledger.load()
    own = facts.advertised_address(disk.read(facts.API_SERVER) or "") or ""
    files = list(_changes(endpoint, own))
    restarts = [name for name in (_KUBELET, *_OF_PODS) if name in machine_ledger.restarts]
    for path, before, after, user in files:
        title = f"change the server in {path}"
        report.add(title, Difference(path, {"server": before}, {"server": after}))
        restarts += [user] if user and user not in restarts else []
    for name in restarts:
        report.add(
            f"restart {name}", Difference(name, {"started with": "an earlier file"}, {"started with": "this one"})
        )
    if check or not report.actions:
        return report
    config = kubeconfig.load(kubeconfig.KUBELET) or kubeconfig.load(kubeconfig.ADMIN)
    verify(endpoint, config.ca if config else "")
    for name in restarts:
        machine_ledger.note_restart(name)
    machine_ledger.save()
    for path, _, after, _ in files:
        state = os.lstat(path)
        text = kubeconfig.with_server(disk.read(path) or "", after)
        disk.write(path, text, stat.S_IMODE(state.st_mode), state.st_uid, state.st_gid)
    for name in restarts:
        began = time.time()
        if name == _KUBELET:
            services.start(_KUBELET, "restart")
            _wait_for_node(node, began, limit_s)
        else:
            static_pods.restart(name, ledger.load(), limit_s, partial(_runs, name))
        machine_ledger = ledger.load()
        machine_ledger.restarted(name)
        machine_ledger.save()
    return report


def _runs(pod: str) -> bool:
    return bool(containers.ids(pod))


def verify(endpoint: str, ca: str) -> None:
    """Raise MachineProblem unless a server with a certificate of this CA for the endpoint's name is there."""
    host, _, port = endpoint.rpartition(":")
    try:
        context = ssl.create_default_context(cadata=ca)
        with socket.create_connection((host, int(port)), timeout=_TLS_LIMIT_S) as plain:
            context.wrap_socket(plain, server_hostname=host).close()
    except (OSError, ValueError) as error:
        raise MachineProblem(
            f"this machine cannot use {endpoint}: {error}",
            "an endpoint that leads to the API servers of this cluster",
            "correct the load balancer, the name, or the firewalls between, then run the command again",
        ) from error


def _changes(endpoint: str, own: str) -> Iterator[tuple[str, str, str, str]]:
    """Each file to change with its server before and after, and what must be restarted then ("" for nothing)."""
    wanted = f"https://{endpoint}"
    pods = {f"{_FOLDER}/{name}": pod for pod, name in _OF_PODS.items()} if own else {}
    users = {**dict.fromkeys(_OF_PEOPLE, ""), **dict.fromkeys(_OF_KUBELET, _KUBELET), **pods}
    for path, user in users.items():
        found = kubeconfig.load(path)
        if found is None:
            continue
        is_local = bool(own) and urlsplit(found.server).hostname == own
        target = f"https://{own}:{PORT}" if path in pods else wanted
        if found.server != target and not (user and is_local):
            yield path, found.server, target, user


def _wait_for_node(node: str, since: float, limit_s: float) -> None:
    """Wait until the node is Ready, and its kubelet has renewed its Lease ``since`` then, by this machine's clock.

    The kubelet's own certificate may read both (Node authorization).
    """
    deadline, reason = time.monotonic() + limit_s, "its kubelet has not connected yet"
    while time.monotonic() < deadline:
        try:
            reason = _not_alive(node, since)
        except (ApiError, OSError, ValueError) as error:
            reason = str(error)
        if not reason:
            return
        time.sleep(_POLL_S)
    raise MachineProblem(
        f"the node {node} is not ready after the restart of its kubelet: {reason}",
        f"a node that is Ready within {limit_s:.0f} s",
        "see `journalctl -u kubelet` there, then run the command again",
    )


def _not_alive(node: str, since: float) -> str:
    config = kubeconfig.load(kubeconfig.KUBELET)
    pair = disk.read(facts.CLIENT_CERTIFICATE) or ""
    if config is None or not pair:
        return f"{kubeconfig.KUBELET} or {facts.CLIENT_CERTIFICATE} is missing"
    client = Client(Kubeconfig(config.server, config.ca, pair, pair), patience_s=0)
    try:
        found = client.get(f"/api/v1/nodes/{node}")
        renewed = str((client.get(f"{_LEASES}/{node}").get("spec") or {}).get("renewTime") or "")
    finally:
        client.close()
    conditions = {each["type"]: each for each in found["status"].get("conditions", ())}
    ready = conditions.get("Ready", {})
    if ready.get("status") != "True":
        return str(ready.get("message") or "it is not Ready")
    return "" if seconds(renewed) > int(since) else "its kubelet has not renewed its Lease yet"


def seconds(text: str) -> int:
    """Seconds since 1970 of a time of Kubernetes (RFC 3339 in UTC); 0 for anything else."""
    if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", text):
        with suppress(ValueError):
            return calendar.timegm(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S"))
    return 0
