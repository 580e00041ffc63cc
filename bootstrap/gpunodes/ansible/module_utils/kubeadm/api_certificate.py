"""The certificate of the API server on a control plane: made again with more names, and served."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress

from .. import certificate, disk, endpoints, facts, kube_api, kubeconfig, ledger, tree
from ..kube_api import Client
from ..problem import MachineProblem
from ..process import must
from ..report import Difference, Report
from . import cluster_configuration, command, static_pods

PKI = "/etc/kubernetes/pki"
CERTIFICATE, KEY = f"{PKI}/apiserver.crt", f"{PKI}/apiserver.key"
_WORK = "/etc/kubernetes/gpunodes-certificates"
"""kubeadm makes the new pair here. On the same file system as the old one, which a rename replaces."""
API_SERVER = "kube-apiserver"
KUBEADM_CONFIG = f"{kube_api.SYSTEM}/configmaps/kubeadm-config"
_POLL_S = 1.0
_PATIENCE_S = 60.0


def add_names(wanted: Sequence[str], limit_s: float, check: bool) -> Report:
    """Have the API server on this machine serve a certificate with these names besides those that it has.

    The old pair is in its place until the new one is complete; a run that is killed is completed by the next one, which
    compares the file and what the server presents. Raises MachineProblem if this machine is no control plane.
    """
    report = Report()
    address = facts.advertised_address(disk.read(facts.API_SERVER) or "") or ""
    if ledger.load().manifests:
        report.add(
            "start the static pods that an interrupted run stopped", Difference("static pods", {}, {"all": "on"})
        )
        if not check:
            static_pods.heal(ledger.load())
            address = facts.advertised_address(disk.read(facts.API_SERVER) or "") or ""
    if not address:
        raise MachineProblem(
            f"{facts.API_SERVER} has no --advertise-address", "a control plane that kubeadm made", "check that manifest"
        )
    present = certificate.names_of_pem(disk.read(CERTIFICATE) or "")
    missing = [name for name in wanted if name not in present]
    if missing:
        names = [*present, *missing]
        title = f"make the API server's certificate for {', '.join(missing)} too"
        report.add(title, Difference(f"names in {CERTIFICATE}", {"names": present}, {"names": names}))
        if not check:
            _make(names, address, limit_s)
    # The server that runs may still present an older file, since an earlier run too.
    if missing or not _serves(wanted, address):
        report.add(
            f"restart {API_SERVER}", Difference(API_SERVER, {"certificate": "earlier"}, {"certificate": "present"})
        )
        if not check:
            static_pods.restart(API_SERVER, ledger.load(), limit_s, lambda: not kube_api.local_problem(address))
            _verify(wanted, address, limit_s)
    return report


def check_leads(endpoint: str) -> None:
    """Raise MachineProblem unless an API server with a certificate of this cluster's CA is behind the endpoint.

    Its name need not be in that certificate yet.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        endpoints.presented(host, int(port), disk.read(kubeconfig.CA) or "")
    except (OSError, ValueError) as error:
        raise MachineProblem(
            f"{endpoint} does not lead to an API server of this cluster: {error}",
            "a load balancer or a name that leads to its control planes",
            "correct it, then run the command again; nothing was changed on this machine",
        ) from error


def own_client() -> Client:
    """The client of the API server on this machine, which may start at the moment."""
    address = facts.advertised_address(disk.read(facts.API_SERVER) or "")
    if not address:
        raise MachineProblem(f"{facts.API_SERVER} has no --advertise-address", "a control plane that kubeadm made")
    return kube_api.local(address, _PATIENCE_S)


def _make(names: Sequence[str], address: str, limit_s: float) -> None:
    """Make a new pair with exactly these names, and those that kubeadm adds; then replace the old one."""
    stored = str(
        (kube_api.local(address, _PATIENCE_S).get(KUBEADM_CONFIG).get("data") or {}).get("ClusterConfiguration") or ""
    )
    tree.remove(_WORK)
    os.mkdir(_WORK, 0o700)
    try:
        for name in ("ca.crt", "ca.key"):
            os.symlink(f"{PKI}/{name}", f"{_WORK}/{name}")
        command.run("init phase certs apiserver", _documents(stored, names, address), limit_s)
        made = certificate.names_of_pem(disk.read(f"{_WORK}/apiserver.crt") or "")
        if lost := [name for name in names if name not in made]:
            raise MachineProblem(f"kubeadm made a certificate without {lost[0]}", "one with all names", "report this")
        # The server reads both when it starts. If this is killed in between, the next run makes both again: the file
        # lacks the names until the second step.
        os.replace(f"{_WORK}/apiserver.key", KEY)
        os.replace(f"{_WORK}/apiserver.crt", CERTIFICATE)
    finally:
        tree.remove(_WORK)


def _documents(stored: str, names: Sequence[str], address: str) -> list[dict[str, object]]:
    """kubeadm's configuration for the certificate. What is not in it has no influence on the certificate."""
    version = must(["kubeadm", "version", "--output=short"]).strip()
    kept = {
        key: found
        for key in ("encryptionAlgorithm", "certificateValidityPeriod")
        if (found := cluster_configuration.value(stored, key))
    }
    networking = {
        key: found
        for key in ("serviceSubnet", "dnsDomain")
        if (found := cluster_configuration.value(stored, f"networking.{key}"))
    }
    return [
        {
            "apiVersion": "kubeadm.k8s.io/v1beta4",
            "kind": "InitConfiguration",
            "localAPIEndpoint": {"advertiseAddress": address},
        },
        {
            "apiVersion": "kubeadm.k8s.io/v1beta4",
            "kind": "ClusterConfiguration",
            "kubernetesVersion": version,
            "certificatesDir": _WORK,
            "networking": networking,
            "apiServer": {"certSANs": [*names]},
            **kept,
        },
    ]


def _serves(wanted: Sequence[str], address: str) -> bool:
    """Whether the API server on this machine presents a certificate of its CA with these names."""
    with suppress(OSError):
        found = certificate.names(endpoints.presented(address, kube_api.PORT, disk.read(kubeconfig.CA) or ""))
        return all(name in found for name in wanted)
    return False


def _verify(wanted: Sequence[str], address: str, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not _serves(wanted, address):
        if time.monotonic() > deadline:
            raise MachineProblem(
                f"the API server at {address}:{kube_api.PORT} presents a certificate without {', '.join(wanted)}",
                f"the certificate in {CERTIFICATE}",
                "see `crictl logs` of kube-apiserver there",
            )
        time.sleep(_POLL_S)
