"""Renews the certificates of a control plane, and restarts what still uses the old ones.

What is to be done follows from the machine alone, so that a run after an interruption continues: certificates of which
much of their time has passed are renewed, and components that are older than one of their files are restarted.
"""

from __future__ import annotations

import calendar
import contextlib
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Mapping

from .. import certificates, containers, etcd, kubeconfig, ledger, static_pod_files
from ..certificates import Certificate
from ..der import Invalid
from ..problem import MachineProblem
from ..process import last_line, run
from ..report import Difference, Report
from . import command, static_pods

FRESH = 0.9
"""Share of its time that a certificate must have left to be kept."""
_KUBEADM_S = 300
_SOON_S = 3600
"""A certificate that ends within so many seconds may have ended before all control planes are restarted."""
_POLL_S = 1.0
_PKI = f"{certificates.KUBERNETES}/pki"
USES: Mapping[str, tuple[str, ...]] = {
    "etcd": ("pki/etcd/server.crt", "pki/etcd/peer.crt"),
    "kube-apiserver": (
        "pki/apiserver.crt",
        "pki/apiserver-kubelet-client.crt",
        "pki/apiserver-etcd-client.crt",
        "pki/front-proxy-client.crt",
    ),
    "kube-controller-manager": ("controller-manager.conf",),
    "kube-scheduler": ("scheduler.conf",),
}
"""The files below /etc/kubernetes that each static pod reads at its start, in the order of the restarts."""
_PEER = "etcd/peer.crt"
"""The certificate that members of etcd accept each other with."""
_SERVED = {"etcd": (2379, "pki/etcd/server.crt"), "kube-apiserver": (6443, "pki/apiserver.crt")}
"""The ports on which the certificates are served, with their files."""


def renew(all_of_them: bool, limit_s: float, check: bool) -> Report:
    """Renew the certificates of this control plane; raises MachineProblem if the new ones are not served afterwards.

    ``all_of_them``: also those that are new. ``limit_s``: for each restart.
    """
    _check_control_plane()
    machine_ledger = ledger.load()
    report = Report()
    for name in static_pods.heal(machine_ledger, check):
        report.add(f"start {name}, which an interrupted run stopped")
    due = _due(all_of_them)
    _check_authorities(due)
    # kubeadm renews the files that are not due, too.
    restarts = [name for name in USES if _has(name) and (due or _older(name))]
    if "etcd" in restarts:
        _check_quorum(due)
    _add(report, due)
    for name in restarts:
        report.add(f"restart {name}", Difference("static pods", {}, {name: "restarted"}))
    if check:
        return report
    if due:
        _run_kubeadm()
    for name in restarts:
        static_pods.restart(name, machine_ledger, limit_s)
    for name in _SERVED:
        if _has(name):
            _check_served(name, limit_s)
    return report


def renew_ended(check: bool) -> Report:
    """Renew the files if the certificate has ended that members of etcd accept each other with; restart nothing.

    A member whose certificate has ended is alone: restarted before the others have new files, it would wait for them
    for ever. Members read these files for each new connection (etcd's documentation, Transport security model), so that
    they have their quorum again without a restart as soon as most machines have new ones. Raises MachineProblem.
    """
    _check_control_plane()
    # It is refused after a restore has stopped this machine.
    static_pods.heal(ledger.load(), check=True)
    report = Report()
    due = _due(all_of_them=False)
    if _PEER in due and due[_PEER].not_after < time.time() + _SOON_S:
        _check_authorities(due)
        _add(report, due)
        if not check:
            _run_kubeadm()
    return report


def _check_control_plane() -> None:
    if not os.path.exists(f"{_PKI}/ca.crt") or not os.path.exists(kubeconfig.ADMIN):
        raise MachineProblem("this machine is no control plane", "one that kubeadm made", "select control planes")


def _add(report: Report, due: Mapping[str, Certificate]) -> None:
    for name, found in due.items():
        report.add(f"renew {name}", Difference("certificates", {name: shown(found.not_after)}, {name: "renewed"}))


def shown(seconds: int) -> str:
    """A time in UTC, for people."""
    return time.strftime("ends %Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _due(all_of_them: bool) -> dict[str, Certificate]:
    """The certificates to renew, by name. Raises MachineProblem for one that cannot be read."""
    paths = {name: f"{certificates.KUBERNETES}/{name}" for name in certificates.KUBECONFIGS}
    paths |= {name: f"{_PKI}/{name}" for name in certificates.RENEWABLE}
    found = {}
    for name, path in paths.items():
        try:
            each = certificates.of_file(path)
        except Invalid as error:
            raise MachineProblem(
                f"{path} cannot be read: {error}", "a certificate of kubeadm", "restore it from a backup"
            ) from error
        if each and (all_of_them or each.not_after - time.time() < FRESH * (each.not_after - each.not_before)):
            found[name] = each
    return found


def _check_authorities(due: Mapping[str, Certificate]) -> None:
    """Raise MachineProblem before a renewal by an authority that has ended, or whose key is kept elsewhere."""
    for name in certificates.AUTHORITIES if due else ():
        found = certificates.of_file(f"{_PKI}/{name}")
        if found and found.not_after < time.time():
            raise MachineProblem(
                f"the certificate authority {_PKI}/{name} has {shown(found.not_after).replace('ends', 'ended')}",
                "authorities that are valid",
                "it is never renewed here: see `gpunodes help --page certificates`",
            )
        if found and not os.path.exists(f"{_PKI}/{name[: -len('.crt')]}.key"):
            raise MachineProblem(
                f"the key of {_PKI}/{name} is not on this machine",
                "the keys of all authorities",
                "renew the certificates where that key is kept",
            )


def _check_quorum(due: Mapping[str, Certificate]) -> None:
    """Raise MachineProblem before a restart of etcd that would stop a cluster in which other members do not work.

    Not where a certificate ends soon: the cluster is away for some seconds then, as with a single control plane.
    """
    if any(each.not_after < time.time() + certificates.SOON_DAYS * 86400 for each in due.values()):
        return
    try:
        voters = [each for each in etcd.members() if each.votes]
        working = etcd.healthy(voters) if len(voters) > 1 else set()
    except MachineProblem:
        working = set()
    if not working:
        # Without a quorum there is none to lose. Beside an alarm, such as for a full disk, etcdctl calls all unhealthy.
        return
    down = [str(each) for each in voters if each.id not in working]
    if down and len(working) - 1 < etcd.quorum(len(voters)):
        raise MachineProblem(
            f"etcd does not work on {', '.join(down)}: while it is restarted on this machine, {len(working) - 1} of "
            f"{len(voters)} members would work",
            f"at least {etcd.quorum(len(voters))}: with fewer the cluster stops",
            "start those machines, or `gpunodes remove --dead` one that is gone; a certificate that ends within "
            f"{certificates.SOON_DAYS} days is renewed in any case",
        )


def _run_kubeadm() -> None:
    done = run(["kubeadm", "certs", "renew", "all"], _KUBEADM_S, environment=command.without_proxies())
    if not done.ok:
        raise MachineProblem(
            f"`kubeadm certs renew all` failed: {last_line(done.err) or last_line(done.out)}",
            "renewed certificates",
            "see the log of this run; run the command again to continue",
            output=done.text,
        )


def _has(name: str) -> bool:
    return os.path.exists(static_pod_files.path(name))


def _older(name: str) -> bool:
    """Whether a component was started before one of its files was written; also if it does not run."""
    running = containers.ids(name)
    if not running:
        return True
    started = _started(running[0])
    written = [
        os.stat(path).st_mtime
        for path in (f"{certificates.KUBERNETES}/{file}" for file in USES[name])
        if os.path.exists(path)
    ]
    return started is None or any(time_ > started for time_ in written)


def _started(container: str) -> float | None:
    """When a container was started, in seconds since 1970; None if the runtime does not report it."""
    done = containers.crictl(["inspect", container])
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(done.out)["status"]["startedAt"])
        found = re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)", text)
        if found:
            whole = calendar.timegm(time.strptime(found.group(1), "%Y-%m-%dT%H:%M:%S"))
            zone = found.group(3)
            offset = 0 if zone == "Z" else int(zone[0] + "1") * (int(zone[1:3]) * 3600 + int(zone[4:]) * 60)
            return whole - offset + float(found.group(2) or 0)
    return None


def _check_served(name: str, limit_s: float) -> None:
    """Wait until a component is ready with the certificate in its file; raises MachineProblem if it does not get so.

    A component that was not restarted may still start: an earlier run may have ended before it was ready.
    """
    port, file = _SERVED[name]
    wanted = certificates.of_file(f"{certificates.KUBERNETES}/{file}")
    deadline = time.monotonic() + limit_s
    while True:
        serves = wanted is not None and _handshake(port) == wanted.der
        if serves and static_pods.is_ready(name):
            return
        if wanted is None or time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    found = "is not ready" if serves else f"does not serve the certificate {certificates.KUBERNETES}/{file}"
    raise MachineProblem(
        f"{name} {found} on port {port}",
        "a component that is ready with the renewed one",
        f"see `crictl ps -a --name {name}` and its logs, then run the command again",
    )


def _handshake(port: int) -> bytes | None:
    """The certificate in DER that is served on a port of this machine; None without one."""
    # It is compared with a file, and nothing is sent: the authority does not matter.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    # etcd demands a certificate; with one, the handshake ends in every version of TLS.
    with contextlib.suppress(OSError, ssl.SSLError):
        context.load_cert_chain(f"{_PKI}/etcd/healthcheck-client.crt", f"{_PKI}/etcd/healthcheck-client.key")
    try:
        with socket.create_connection(("127.0.0.1", port), 10) as plain, context.wrap_socket(plain) as connection:
            return connection.getpeercert(binary_form=True)
    except OSError:  # errors of TLS are such, too
        return None
