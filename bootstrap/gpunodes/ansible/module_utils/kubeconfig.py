"""Reads a kubeconfig as kubeadm and the kubelet write it, and computes the hash with which kubeadm pins a CA.

The machines' Python has no YAML parser; these files are simple enough to be read line by line.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass, replace

from . import disk
from .problem import MachineProblem

ADMIN = "/etc/kubernetes/admin.conf"
KUBELET = "/etc/kubernetes/kubelet.conf"
CONTROLLER_MANAGER = "/etc/kubernetes/controller-manager.conf"
"""Names the API server of this machine itself; ADMIN names the endpoint of the cluster (kubeadm 1.20 and newer)."""
CA = "/etc/kubernetes/pki/ca.crt"
_SEQUENCE = 0x30
_VERSION_TAG = 0xA0


@dataclass(frozen=True)
class Kubeconfig:
    """One cluster and one user. Certificates and keys are PEM; None where they are missing or in another file."""

    server: str
    ca: str
    certificate: str | None
    key: str | None
    own: str = ""
    """The API server of this machine itself, "" where it is unknown or ``server``."""
    token_file: str = ""
    """A file with the token of an account, "" without one; the kubelet replaces a pod's from time to time."""

    @property
    def ca_hash(self) -> str:
        return ca_hash(self.ca)


def parse(text: str) -> Kubeconfig:
    """Parse a kubeconfig; raises MachineProblem when it is invalid."""
    server = _value(text, "server")
    ca = _decoded(text, "certificate-authority-data")
    if not server or not ca:
        raise MachineProblem(
            "a kubeconfig has no server or no CA", "a kubeconfig that kubeadm wrote", "see /etc/kubernetes"
        )
    pair = _decoded(text, "client-certificate-data"), _decoded(text, "client-key-data")
    return Kubeconfig(server, ca, *pair, token_file=_value(text, "tokenFile") or "")


def with_server(text: str, server: str) -> str:
    """A kubeconfig with another server; raises MachineProblem unless it has exactly one."""
    after, count = re.subn(r"^([ -]*server:[ \t]*).*$", lambda found: found[1] + server, text, flags=re.MULTILINE)
    if count != 1:
        raise MachineProblem(
            f"a kubeconfig has {count} servers", "one, as kubeadm writes it", "see /etc/kubernetes, and its ConfigMaps"
        )
    return after


def load(path: str) -> Kubeconfig | None:
    """The kubeconfig at ``path``; None where it is missing or incomplete (after a power cut while it was written)."""
    text = disk.read(path)
    if not text:
        return None
    try:
        found = parse(text)
    except MachineProblem:
        return None
    own = load(CONTROLLER_MANAGER) if path == ADMIN else None
    if own and own.ca == found.ca and own.server != found.server:
        return replace(found, own=own.server)
    return found


def ca_hash(pem: str) -> str:
    """``sha256:...`` of a CA certificate's public key, as ``kubeadm join`` expects it.

    Source: kubernetes.io, kubeadm join: the SHA-256 of the Subject Public Key Info (RFC 7469), in hexadecimal.
    Raises MachineProblem for an invalid certificate.
    """
    found = re.search(r"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", pem, re.DOTALL)
    try:
        if found:
            return "sha256:" + hashlib.sha256(public_key_info(base64.b64decode(found.group(1)))).hexdigest()
    except (ValueError, IndexError, binascii.Error):
        pass
    raise MachineProblem("the cluster's CA is not a valid certificate", "PEM", "see /etc/kubernetes/pki/ca.crt")


def public_key_info(der: bytes) -> bytes:
    """The SubjectPublicKeyInfo of a certificate (RFC 5280, 4.1), with its own header."""
    certificate = _content(der, 0)
    position, end = _content(der, certificate[0])
    fields = []
    while position < end:
        _, after = _content(der, position)
        fields.append(der[position:after])
        position = after
    # version [0] is optional; then serial, algorithm, issuer, validity, subject, key
    index = 6 if fields[0][0] == _VERSION_TAG else 5
    if fields[index][0] != _SEQUENCE:
        raise ValueError("the certificate has no public key")
    return fields[index]


def _content(der: bytes, position: int) -> tuple[int, int]:
    """Where the content of the DER element at ``position`` begins and ends."""
    length = der[position + 1]
    start = position + 2
    if length & 0x80:
        width = length & 0x7F
        length = int.from_bytes(der[start : start + width], "big")
        start += width
    return start, start + length


def _value(text: str, key: str) -> str | None:
    found = re.search(rf"^[ -]*{re.escape(key)}:[ \t]*[\"']?([^\s\"']+)", text, re.MULTILINE)
    return found.group(1) if found else None


def _decoded(text: str, key: str) -> str | None:
    value = _value(text, key)
    if value is None:
        return None
    try:
        return base64.b64decode(value).decode("ascii")
    except (binascii.Error, UnicodeDecodeError):
        return None
