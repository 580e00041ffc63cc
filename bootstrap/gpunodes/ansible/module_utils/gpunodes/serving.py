"""Approves the kubelets' requests for serving certificates of the cluster's CA. kubeadm approves none, and they rotate.

It runs on the control plane as a service (role control_plane), as a file of its own: it needs the standard library and
kubectl. A request is approved when it is a node's own: from that node, for its name, for addresses that this node has
and no other. Since a node reports its addresses itself, none of a worker's may be the API's, none may be a service's.
What is not approved stays pending and is named in the journal.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import json
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
    """What a certificate is requested for."""

    common_names: Sequence[str]
    organizations: Sequence[str]
    names: Sequence[str]
    """DNS names and IP addresses."""


@dataclass(frozen=True)
class Reserved:
    """What clients of the API and of services trust: no worker gets a certificate for it, whatever it reports."""

    names: frozenset[str]
    """The API server's DNS names and IP addresses, and the host of the control plane's endpoint."""
    services: Sequence[Any]
    """The networks of the services, as ``ipaddress`` has them."""


def reserved(certificate: str, configuration: str) -> Reserved:
    """By the API server's certificate (PEM) and kubeadm's ClusterConfiguration; raises ValueError for other texts."""
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
        raise ValueError(f"{_API_CERTIFICATE} has no alternative names")
    if host := urlsplit(f"//{_setting(configuration, 'controlPlaneEndpoint')}").hostname:
        names.add(_plain(host))
    subnets = _setting(configuration, "serviceSubnet")
    if not subnets:
        raise ValueError("the ConfigMap kubeadm-config has no serviceSubnet")
    return Reserved(frozenset(names), [ipaddress.ip_network(one.strip(), strict=False) for one in subnets.split(",")])


def _setting(configuration: str, name: str) -> str:
    """A string of kubeadm's ClusterConfiguration, "" where it has none: kubeadm writes each on a line of its own."""
    found = re.search(rf"^ *{name}: *(.*?) *$", configuration, re.MULTILINE)
    return found.group(1).strip("'\"") if found else ""


def _plain(name: str) -> str:
    """A DNS name or an address in the one form in which all are compared."""
    address = _address(name)
    return name.lower() if address is None else str(address)


def _address(name: str) -> Any:
    """An IP address, or None. A mapped one is the IPv4 address that it maps: so compares who verifies a certificate."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def parse(pem: str) -> Request:
    """A PKCS#10 request; raises ValueError for anything that a kubelet does not write."""
    lines = pem.strip().splitlines()
    if lines[:1] != ["-----BEGIN CERTIFICATE REQUEST-----"] or lines[-1] != "-----END CERTIFICATE REQUEST-----":
        raise ValueError("it is no certificate request")
    try:
        der = base64.b64decode("".join(lines[1:-1]), validate=True)
    except binascii.Error as error:
        raise ValueError("its base64 is broken") from error
    [whole] = _elements(der)
    body = next(_elements(_content(whole, _SEQUENCE)))
    _, subject, _, *attributes = _elements(_content(body, _SEQUENCE))
    found: dict[bytes, list[str]] = {_COMMON_NAME: [], _ORGANIZATION: []}
    for part in _elements(_content(subject, _SEQUENCE)):
        for pair in _elements(_content(part, _SET)):
            kind, value = _elements(_content(pair, _SEQUENCE))
            if kind[1] not in found:
                raise ValueError("its subject has more than a name and organizations")
            found[kind[1]].append(value[1].decode("utf-8"))
    names = [name for attribute in attributes for name in _alternative_names(_content(attribute, _ATTRIBUTES))]
    return Request(found[_COMMON_NAME], found[_ORGANIZATION], names)


def _alternative_names(attributes: bytes) -> Iterator[str]:
    for attribute in _elements(attributes):
        kind, values = _elements(_content(attribute, _SEQUENCE))
        if kind != (_OID, _EXTENSION_REQUEST):
            raise ValueError("it has an attribute that is no extension request")
        for extensions in _elements(_content(values, _SET)):
            for extension in _elements(_content(extensions, _SEQUENCE)):
                oid, *_, value = _elements(_content(extension, _SEQUENCE))
                if oid != (_OID, _ALTERNATIVE_NAMES):
                    raise ValueError("it requests more than alternative names")
                [listed] = _elements(_content(value, _OCTETS))
                for tag, name in _elements(_content(listed, _SEQUENCE)):
                    if tag == _DNS:
                        yield name.decode("ascii")
                    elif tag == _IP:
                        yield str(ipaddress.ip_address(name))
                    else:
                        raise ValueError("it has a name that is neither of DNS nor an address")


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The elements of a DER encoding, as tag and content."""
    at = 0
    while at < len(data):
        header = data[at : at + 2]
        if len(header) < 2:  # noqa: PLR2004 - a tag and a length
            raise ValueError("its encoding is cut off")
        tag, size = header
        at += 2
        if size >= _LONG_FORM:
            octets = size - _LONG_FORM
            size = int.from_bytes(data[at : at + octets], "big")
            at += octets
        if at + size > len(data):
            raise ValueError("its encoding is cut off")
        yield tag, data[at : at + size]
        at += size


def _content(element: tuple[int, bytes], tag: int) -> bytes:
    if element[0] != tag:
        raise ValueError("its encoding is not that of a certificate request")
    return element[1]


def objection(spec: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]], kept: Reserved) -> str:
    """Why a CertificateSigningRequest is not to be approved, "" where it is; ``nodes`` are the cluster's.

    ``kept`` is what no worker gets; a control plane's own name and addresses are among it.
    """
    user = str(spec.get("username", ""))
    node = user[len("system:node:") :] if user.startswith("system:node:") else ""
    if not node or _NODES not in (spec.get("groups") or ()):
        return f"it comes from {user!r}, which is no node"
    usages = set(spec.get("usages") or ())
    if "server auth" not in usages or usages - _USAGES:
        return f"it is for {sorted(usages)}, not for serving alone"
    try:
        request = parse(base64.b64decode(spec.get("request") or "").decode("ascii"))
    except (ValueError, StopIteration) as error:
        return f"it cannot be read: {error}"
    if list(request.common_names) != [user] or list(request.organizations) != [_NODES]:
        return f"it is for {list(request.common_names)!r} of {list(request.organizations)!r}, not for {user!r}"
    return _claimed(node, request, nodes, kept)


def _claimed(node: str, request: Request, nodes: Sequence[Mapping[str, Any]], kept: Reserved) -> str:
    """Why what a node requests a certificate for is not its own."""
    own = {name for one in nodes if one["metadata"]["name"] == node for name in _addresses(one)}
    others = {name for one in nodes if one["metadata"]["name"] != node for name in _addresses(one)}
    leads = any(_leads(one) for one in nodes if one["metadata"]["name"] == node)
    for name in request.names:
        plain, address = _plain(name), _address(name)
        if plain not in own or plain in others or (address is None and plain != node):
            wrong = f"not {node}'s alone"
        elif address is not None and _unusable(address):
            wrong = "no address of one machine"
        elif any(address in network for network in kept.services if address is not None):
            wrong = "a service's"
        elif plain in kept.names and not leads:
            wrong = "the API server's"
        else:
            continue
        return f"it is for {name!r}, which is {wrong}"
    return "" if request.names else "it is for no address"


def _leads(node: Mapping[str, Any]) -> bool:
    return _CONTROL_PLANE in (node["metadata"].get("labels") or {})


def _addresses(node: Mapping[str, Any]) -> list[str]:
    return [_plain(str(entry["address"])) for entry in node["status"].get("addresses", ())]


def _unusable(address: Any) -> bool:
    """The kubelet itself takes none of these for its own (validateNodeIP)."""
    return bool(address.is_loopback or address.is_unspecified or address.is_multicast or address.is_link_local)


def pending(listing: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The requests for serving certificates that nobody has decided on."""
    return [
        one
        for one in listing["items"]
        if one["kind"] == "CertificateSigningRequest"
        and one["spec"].get("signerName") == SIGNER
        and not (one.get("status") or {}).get("conditions")
    ]


def round_(told: Mapping[str, str]) -> dict[str, str]:
    """Decide on what is pending now; what was said of each, and is not said again: it goes into the next round.

    Raises OSError, ValueError or SubprocessError when the cluster does not answer.
    """
    listing = json.loads(_kubectl("get", "certificatesigningrequests,nodes", "--output=json"))
    nodes = [one for one in listing["items"] if one["kind"] == "Node"]
    waiting = pending(listing)
    if not waiting:
        return {}
    kept = _reserved()
    message = {}
    for one in waiting:
        name = str(one["metadata"]["name"])
        why = objection(one["spec"], nodes, kept)
        if not why:
            _kubectl("certificate", "approve", name)
        message[name] = f"{name} of {one['spec'].get('username')!r}: {why or 'approved'}"
        if message[name] != told.get(name):
            _log(message[name])
    return message


def _reserved() -> Reserved:
    with open(_API_CERTIFICATE, encoding="ascii") as file:
        certificate = file.read()
    stored = json.loads(_kubectl("get", "configmap", "kubeadm-config", "--namespace=kube-system", "--output=json"))
    return reserved(certificate, stored["data"]["ClusterConfiguration"])


def _kubectl(*words: str) -> str:
    return subprocess.run([*_KUBECTL, *words], capture_output=True, text=True, timeout=_LIMIT_S, check=True).stdout


def _log(line: str) -> None:
    """One line for the journal."""
    sys.stderr.write(f"{line}\n")


def main() -> None:
    told: dict[str, str] = {}
    while True:
        try:
            told = round_(told)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None) or error
            _log(f"nothing can be decided: {str(output).strip()!r}")
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
