"""What keeps pods from shares but by a claim: the rules of each node, and the policy of the cluster. Pure.

A server knows a node by its address, and a node gives its address to what it forwards for its pods. Two ways would lead
pods to every share: an NFS client in the pod itself, and a volume that the kubelet mounts without a claim.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpunodes.ansible.module_utils.host.spec import File, Service, Spec
from gpunodes.ansible.module_utils.packages import RequestedPackage
from gpunodes.planner import networks

SERVICE = "gpunodes-storage"
AGAIN = f"{SERVICE}-nftables"
"""A service that only starts with the service nftables."""
TABLE = "inet gpunodes_storage"
RULES = "/etc/gpunodes-storage.nft"
"""In no folder of other files: what a section of the ledger created leaves with all that is in it."""
_UNITS = "/etc/systemd/system"
POLICY = "gpunodes-storage"
"""The name of the policy and of its binding."""
ALLOWED = "gpunodes.dev/inline-nfs"
"""Label of a namespace whose pods may have such volumes, with the value ``allowed``."""
_PORT = 2049
_LAST_PORT = 65535
_API = "admissionregistration.k8s.io/v1"
_KINDS = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
# It stays until the machine is off: while it shuts down, containers run on after the kubelet has stopped. The ruleset
# of the service nftables may flush all others, whenever it is loaded. PartOf would stop this service with that one, and
# firewalld conflicts with it.
_UNIT_TEXT = f"""\
# Managed by gpunodes: pods reach no NFS server. The rules are in {RULES}.
[Unit]
Description=Drop packets of pods to NFS servers (gpunodes)
DefaultDependencies=no
After=sysinit.target nftables.service
Before=kubelet.service
ReloadPropagatedFrom=nftables.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/sbin/nft -f {RULES}
ExecReload=/usr/sbin/nft -f {RULES}
ExecStop=-/usr/sbin/nft delete table {TABLE}

[Install]
WantedBy=multi-user.target
"""
_AGAIN_TEXT = f"""\
# Managed by gpunodes: {SERVICE}.service once more, after a start of the service nftables.
[Unit]
Description=Drop packets of pods to NFS servers, after the ruleset was loaded (gpunodes)
DefaultDependencies=no
After=nftables.service

[Service]
Type=oneshot
ExecStart=/usr/sbin/nft -f {RULES}

[Install]
WantedBy=nftables.service
"""
_VOLUMES = "!has(object.spec.volumes) || object.spec.volumes.all(each, {})"
_WHY = (
    "the node would mount any folder that its address may mount, of other namespaces too: use a "
    "PersistentVolumeClaim, such as those of gpunodes storage"
)


def ports(options: Iterable[str]) -> list[int]:
    """The ports of NFS servers: the usual one, and those that mount options of shares name."""
    given = [int(number[1]) for each in options if (number := re.fullmatch(r"port=(\d{1,5})", each))]
    return sorted({_PORT, *(number for number in given if 0 < number <= _LAST_PORT)})


def rules(pods: str, numbers: Sequence[int]) -> str:
    """The file for nft; ``pods`` is the range of pods, whose own NFS servers stay reachable.

    Of all sources: a Service that leads to a server is forwarded by any node, for machines that are none, too. To all
    other destinations, since a server may have more addresses and names than a share names. Mounts of the kubelet and
    of CSI drivers are packets of the machine itself, which are not forwarded. What one table drops stays dropped,
    whatever other tables accept.
    """
    families = {4: "ip", 6: "ip6"}
    inside = [f"    {families[each.version]} daddr {each} accept\n" for each in networks.ranges_of(pods)]
    listed = ", ".join(map(str, numbers))
    dropped = [f"    {protocol} dport {{ {listed} }} counter drop\n" for protocol in ("tcp", "udp")]
    return (
        "# Managed by gpunodes: nodes forward nothing to NFS servers, which would take it for their own.\n"
        # The first line is for the second: a table that does not exist cannot be deleted.
        f"add table {TABLE}\n"
        f"delete table {TABLE}\n"
        f"table {TABLE} {{\n"
        "  chain forward {\n"
        "    type filter hook forward priority -10; policy accept;\n"
        f"{''.join([*inside, *dropped])}"
        "  }\n"
        "}\n"
    )


def guarded(client: Spec, pods: str, options: Iterable[str]) -> Spec:
    """The NFS client of a node with the rules, which are there before it has any address of a server."""
    return replace(
        client,
        packages=(*client.packages, RequestedPackage("nftables")),
        files=(
            *client.files,
            File(RULES, rules(pods, ports(options))),
            File(f"{_UNITS}/{SERVICE}.service", _UNIT_TEXT),
            File(f"{_UNITS}/{AGAIN}.service", _AGAIN_TEXT),
        ),
        services=(*client.services, Service(SERVICE), Service(AGAIN, started=False)),
    )


def policy(labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """The policy, with its binding, that refuses pods whose volumes name an NFS server themselves.

    Of any server: a name of a user's own domain may have the address of the shares' server.
    """
    metadata = {"name": POLICY, "labels": dict(labels)}
    pods = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    elsewhere = {"key": ALLOWED, "operator": "NotIn", "values": ["allowed"]}
    refused = {
        "a volume of the kind nfs": "!has(each.nfs)",
        "a volume of nfs.csi.k8s.io in a pod": "!has(each.csi) || each.csi.driver != 'nfs.csi.k8s.io'",
    }
    specs: tuple[dict[str, Any], ...] = (
        {
            "failurePolicy": "Fail",
            # The volumes of a pod cannot be changed later.
            "matchConstraints": {"resourceRules": [pods]},
            "validations": [
                {"expression": _VOLUMES.format(allowed), "message": f"{what} is not allowed here: {_WHY}"}
                for what, allowed in refused.items()
            ],
        },
        {
            "policyName": POLICY,
            "validationActions": ["Deny"],
            "matchResources": {"namespaceSelector": {"matchExpressions": [elsewhere]}},
        },
    )
    return [
        {"apiVersion": _API, "kind": kind, "metadata": metadata, "spec": spec}
        for kind, spec in zip(_KINDS, specs, strict=True)
    ]


def names() -> list[dict[str, Any]]:
    """The same objects without their content, to delete them."""
    return [{"apiVersion": _API, "kind": kind, "metadata": {"name": POLICY}} for kind in _KINDS]
