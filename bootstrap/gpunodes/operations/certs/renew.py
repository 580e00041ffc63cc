"""Renew the certificates of control planes, and the administrator's kubeconfig on the controller."""

from __future__ import annotations

from pathlib import Path

from gpunodes.errors import GpunodesError
from gpunodes.inventory import Inventory
from gpunodes.kubeconfig import parse_yaml
from gpunodes.model import Role
from gpunodes.operations import kubeconfig, phases
from gpunodes.operations.run import Operation

OPERATION = Operation(
    name="certs renew",
    playbook="certs_renew.yml",
    phases=(phases.ETCD_CERTIFICATES, phases.CERTIFICATES_RENEWED),
)


def refresh(inventory: Inventory) -> str:
    """Fetch the kubeconfig again that `up` wrote, if it is this cluster's; what a person must know about others.

    Nobody knows where `gpunodes kubeconfig` wrote others: their client certificates end with the old ones.
    """
    others = "other copies keep the old certificate until it ends: `gpunodes kubeconfig` fetches a new one"
    control = inventory.machines(Role.CONTROL_PLANE)[0].name
    named = inventory.rendered(control, "gpunodes_kubeconfig_path").get("gpunodes_kubeconfig_path")
    path = Path(str(named)).expanduser() if named else Path.home() / ".kube/gpunodes.conf"
    try:
        own = _authority(parse_yaml(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return others
    try:
        fetched = kubeconfig.fetch(inventory)
        if own is None or own != _authority(fetched):
            return others
        kubeconfig.write(path, fetched, merge=False)
    except (GpunodesError, OSError) as error:
        return f"{path} is stale: {error}; {others}"
    return f"{path} has the new certificate; {others}"


def _authority(document: object) -> str | None:
    """The CA of a kubeconfig's only cluster, in base64."""
    clusters = document.get("clusters") if isinstance(document, dict) else None
    first = clusters[0] if isinstance(clusters, list) and len(clusters) == 1 else None
    cluster = first.get("cluster") if isinstance(first, dict) else None
    found = cluster.get("certificate-authority-data") if isinstance(cluster, dict) else None
    return found if isinstance(found, str) else None
