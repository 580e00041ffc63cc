"""Approves the kubelets' certificate signing requests for serving certificates of the cluster's CA.

kubeadm does not approve these requests, and the certificates rotate. This program runs on the control plane as a
service (role control_plane), as a single file: it needs only the standard library and kubectl. It approves the request
of a node for its own name and for addresses that only this node has. A node reports its addresses itself: therefore no
request may name an address of a service, and no worker's request an address of the API server. Other requests stay
pending, and the journal has the reason.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

SIGNER = "kubernetes.io/kubelet-serving"
_NODES = "system:nodes"
_USAGES = {"digital signature", "key encipherment", "server auth"}
_KUBECTL = ["kubectl", "--kubeconfig=/etc/kubernetes/admin.conf", "--request-timeout=30s"]
_API_CERTIFICATE = "/etc/kubernetes/pki/apiserver.crt"
_CONTROL_PLANE = "node-role.kubernetes.io/control-plane"
"""A node cannot give itself this label (NodeRestriction)."""
_PAUSE_S = 15
_LIMIT_S = 120

# DER: tags, and object identifiers in their encoded form. Source: RFC 2986 (requests), RFC 5280 (names, extensions).
_SEQUENCE, _SET, _OID, _OCTETS, _ATTRIBUTES, _EXTENSIONS = 0x30, 0x31, 0x06, 0x04, 0xA0, 0xA3
_DNS, _IP = 0x82, 0x87
_COMMON_NAME = bytes.fromhex("550403")
_ORGANIZATION = bytes.fromhex("55040a")
_EXTENSION_REQUEST = bytes.fromhex("2a864886f70d01090e")
_ALTERNATIVE_NAMES = bytes.fromhex("551d11")
_LONG_FORM = 0x80


@dataclass(frozen=True)
class Request:
    """The contents of a certificate signing request."""

    common_names: Sequence[str]
    organizations: Sequence[str]
    names: Sequence[str]
    """DNS names and IP addresses."""


@dataclass(frozen=True)
class Reserved:
    """Names and networks of the API and of services: no worker gets a certificate for them, whatever it reports."""

    names: frozenset[str]
    """The API server's DNS names and IP addresses, and the host of the control plane's endpoint."""
    services: Sequence[Any]
    """The networks of the services, as objects of ``ipaddress``."""


def reserved(certificate: str, configuration: str) -> Reserved:
    """What the API server's certificate (PEM) and kubeadm's ClusterConfiguration reserve; raises ValueError."""
    der = base64.b64decode("".join(certificate.partition("-----END")[0].strip().splitlines()[1:]), validate=True)
    [whole] = _elements(der)
    body = next(_elements(_content(whole, _SEQUENCE)), (0, b""))
    names = set()
    for tag, content in _elements(_content(body, _SEQUENCE)):
        if tag != _EXTENSIONS:
            continue
        for extension in _elements(_content(next(_elements(content), (0, b"")), _SEQUENCE)):
            oid, *_, value = _elements(_content(extension, _SEQUENCE))
            if oid == (_OID, _ALTERNATIVE_NAMES):
                [listed] = _elements(_content(value, _OCTETS))
                for kind, name in _elements(_content(listed, _SEQUENCE)):
                    if kind in {_DNS, _IP}:
                        names.add(_plain(name.decode("ascii") if kind == _DNS else str(ipaddress.ip_address(name))))
    if not names:
        raise ValueError(f"{_API_CERTIFICATE} has no subject alternative names")
    if host := urlsplit(f"//{_setting(configuration, 'controlPlaneEndpoint')}").hostname:
        names.add(_plain(host))
    subnets = _setting(configuration, "serviceSubnet")
    if not subnets:
        raise ValueError("the ConfigMap kubeadm-config has no serviceSubnet")
    networks = [ipaddress.ip_network(subnet.strip(), strict=False) for subnet in subnets.split(",")]
    return Reserved(frozenset(names), networks)


def _setting(configuration: str, name: str) -> str:
    """A string of kubeadm's ClusterConfiguration, "" where it is missing: kubeadm writes each on its own line."""
    found = re.search(rf"^ *{name}: *(.*?) *$", configuration, re.MULTILINE)
    return found.group(1).strip("'\"") if found else ""


def _plain(name: str) -> str:
    """A DNS name or an address in its normal form, for comparisons."""
    address = _address(name)
    return name.lower() if address is None else str(address)


def _address(name: str) -> Any:
    """An IP address, or None. An IPv4-mapped address becomes its IPv4 address, as in certificate verification."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def parse(pem: str) -> Request:
    """Parse a PKCS#10 request; raises ValueError for contents that a kubelet does not write."""
    lines = pem.strip().splitlines()
    if lines[:1] != ["-----BEGIN CERTIFICATE REQUEST-----"] or lines[-1] != "-----END CERTIFICATE REQUEST-----":
        raise ValueError("it is not a certificate request")
    try:
        der = base64.b64decode("".join(lines[1:-1]), validate=True)
    except binascii.Error as error:
        raise ValueError("its base64 encoding is invalid") from error
    [whole] = _elements(der)
    body = next(_elements(_content(whole, _SEQUENCE)))
    _, subject, _, *attributes = _elements(_content(body, _SEQUENCE))
    found: dict[bytes, list[str]] = {_COMMON_NAME: [], _ORGANIZATION: []}
    for relative_name in _elements(_content(subject, _SEQUENCE)):
        for pair in _elements(_content(relative_name, _SET)):
            kind, value = _elements(_content(pair, _SEQUENCE))
            if kind[1] not in found:
                raise ValueError("its subject has more than a common name and organizations")
            found[kind[1]].append(value[1].decode("utf-8"))
    names = [name for attribute in attributes for name in _alternative_names(_content(attribute, _ATTRIBUTES))]
    return Request(found[_COMMON_NAME], found[_ORGANIZATION], names)


def _alternative_names(attributes: bytes) -> Iterator[str]:
    for attribute in _elements(attributes):
        kind, values = _elements(_content(attribute, _SEQUENCE))
        if kind != (_OID, _EXTENSION_REQUEST):
            raise ValueError("it has an attribute that is not an extension request")
        for extensions in _elements(_content(values, _SET)):
            for extension in _elements(_content(extensions, _SEQUENCE)):
                oid, *_, value = _elements(_content(extension, _SEQUENCE))
                if oid != (_OID, _ALTERNATIVE_NAMES):
                    raise ValueError("it requests extensions other than subject alternative names")
                [listed] = _elements(_content(value, _OCTETS))
                for tag, name in _elements(_content(listed, _SEQUENCE)):
                    if tag == _DNS:
                        yield name.decode("ascii")
                    elif tag == _IP:
                        yield str(ipaddress.ip_address(name))
                    else:
                        raise ValueError("it has an alternative name that is neither a DNS name nor an IP address")


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The elements of a DER encoding, as tag and content."""
    position = 0
    while position < len(data):
        header = data[position : position + 2]
        if len(header) < 2:  # noqa: PLR2004 - a tag and a length
            raise ValueError("its DER encoding is truncated")
        tag, size = header
        position += 2
        if size >= _LONG_FORM:
            octets = size - _LONG_FORM
            size = int.from_bytes(data[position : position + octets], "big")
            position += octets
        if position + size > len(data):
            raise ValueError("its DER encoding is truncated")
        yield tag, data[position : position + size]
        position += size


def _content(element: tuple[int, bytes], tag: int) -> bytes:
    if element[0] != tag:
        raise ValueError("its DER encoding is not that of a certificate request")
    return element[1]


def objection(spec: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]], protected: Reserved) -> str:
    """Why a CertificateSigningRequest must not be approved, "" where it may; ``nodes`` are the cluster's nodes.

    ``protected`` is what no worker gets; it includes the control plane's own name and addresses.
    """
    user = str(spec.get("username", ""))
    node = user[len("system:node:") :] if user.startswith("system:node:") else ""
    if not node or _NODES not in (spec.get("groups") or ()):
        return f"the requester {user!r} is not a node"
    usages = set(spec.get("usages") or ())
    if "server auth" not in usages or usages - _USAGES:
        return f"its usages are {sorted(usages)}, not only those of a serving certificate"
    try:
        request = parse(base64.b64decode(spec.get("request") or "").decode("ascii"))
    except (ValueError, StopIteration) as error:
        return f"it cannot be parsed: {error}"
    if list(request.common_names) != [user] or list(request.organizations) != [_NODES]:
        names, organizations = list(request.common_names), list(request.organizations)
        return f"its subject is {names!r} in {organizations!r}, not {user!r} in {[_NODES]!r}"
    return _name_objection(node, request, nodes, protected)


def _name_objection(node: str, request: Request, nodes: Sequence[Mapping[str, Any]], protected: Reserved) -> str:
    """Why the node must not get a certificate for the requested names and addresses."""
    own = {name for each in nodes if each["metadata"]["name"] == node for name in _addresses(each)}
    others = {name for each in nodes if each["metadata"]["name"] != node for name in _addresses(each)}
    is_control_plane = any(_is_control_plane(each) for each in nodes if each["metadata"]["name"] == node)
    for name in request.names:
        plain, address = _plain(name), _address(name)
        if plain not in own or plain in others or (address is None and plain != node):
            why = f"does not belong to {node} alone"
        elif address is not None and _unusable(address):
            why = "is not an address of a single machine"
        elif any(address in network for network in protected.services if address is not None):
            why = "belongs to a service"
        elif plain in protected.names and not is_control_plane:
            why = "belongs to the API server"
        else:
            continue
        return f"it is for {name!r}, which {why}"
    return "" if request.names else "it has no subject alternative names"


def _is_control_plane(node: Mapping[str, Any]) -> bool:
    return _CONTROL_PLANE in (node["metadata"].get("labels") or {})


def _addresses(node: Mapping[str, Any]) -> list[str]:
    return [_plain(str(entry["address"])) for entry in node["status"].get("addresses", ())]


def _unusable(address: Any) -> bool:
    """Whether the kubelet itself rejects it as a node address (validateNodeIP)."""
    return bool(address.is_loopback or address.is_unspecified or address.is_multicast or address.is_link_local)


def pending(listing: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The requests for serving certificates that are neither approved nor denied."""
    return [
        item
        for item in listing["items"]
        if item["kind"] == "CertificateSigningRequest"
        and item["spec"].get("signerName") == SIGNER
        and not (item.get("status") or {}).get("conditions")
    ]


def process_pending(logged: Mapping[str, str]) -> dict[str, str]:
    """Process all pending requests; returns the message of each by its name, for the next call.

    ``logged`` are the messages of the previous call: they are not logged again. Raises OSError, ValueError or
    SubprocessError when the cluster does not respond.
    """
    listing = json.loads(_kubectl("get", "certificatesigningrequests,nodes", "--output=json"))
    nodes = [item for item in listing["items"] if item["kind"] == "Node"]
    requests = pending(listing)
    if not requests:
        return {}
    protected = _reserved()
    messages = {}
    for request in requests:
        name = str(request["metadata"]["name"])
        why = objection(request["spec"], nodes, protected)
        if not why:
            _kubectl("certificate", "approve", name)
        messages[name] = f"{name} of {request['spec'].get('username')!r}: {why or 'approved'}"
        if messages[name] != logged.get(name):
            _log(messages[name])
    return messages


def _reserved() -> Reserved:
    with open(_API_CERTIFICATE, encoding="ascii") as file:
        certificate = file.read()
    stored = json.loads(_kubectl("get", "configmap", "kubeadm-config", "--namespace=kube-system", "--output=json"))
    return reserved(certificate, stored["data"]["ClusterConfiguration"])


def _kubectl(*arguments: str) -> str:
    # The API server is on this machine: a proxy that systemd's configuration names is not for it.
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return subprocess.run(
        [*_KUBECTL, *arguments], capture_output=True, text=True, timeout=_LIMIT_S, check=True, env=environment
    ).stdout


def _log(line: str) -> None:
    """Write one line to the journal."""
    sys.stderr.write(f"{line}\n")


def main() -> None:
    logged: dict[str, str] = {}
    while True:
        try:
            logged = process_pending(logged)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None) or error
            _log(f"requests cannot be processed: {str(output).strip()!r}")
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
