"""The certificates of a node of kubeadm, and when each ends; their times are in UTC (RFC 5280)."""

from __future__ import annotations

import calendar
import os
import re
import time
from dataclasses import dataclass
from typing import Any

from . import disk, kubeconfig
from .der import Invalid, elements, of_pem

KUBERNETES = "/etc/kubernetes"
KUBELET = "/var/lib/kubelet/pki"
RENEWABLE = (
    "apiserver.crt",
    "apiserver-kubelet-client.crt",
    "front-proxy-client.crt",
    "apiserver-etcd-client.crt",
    "etcd/server.crt",
    "etcd/peer.crt",
    "etcd/healthcheck-client.crt",
)
"""What `kubeadm certs renew all` renews below pki/ (kubernetes.io, Certificate Management with kubeadm)."""
AUTHORITIES = ("ca.crt", "etcd/ca.crt", "front-proxy-ca.crt")
KUBECONFIGS = ("admin.conf", "super-admin.conf", "controller-manager.conf", "scheduler.conf")
"""Kubeconfigs with a client certificate inside, which it renews, too; the kubelet renews its own."""
SOON_DAYS = 30
"""Days before its end from which a certificate is warned of: the kubelet renews its own ones earlier.

From then on a renewal may take the quorum of etcd for some seconds.
"""
_KUBELET_FILES = ("kubelet-client-current.pem", "kubelet-server-current.pem", "kubelet.crt")
_LONGEST = 1 << 16
_SEQUENCE, _SET, _UTC, _GENERALIZED = 0x30, 0x31, 0x17, 0x18
_COMMON_NAME = b"\x55\x04\x03"


@dataclass(frozen=True)
class Certificate:
    """A certificate: its subject's common name, and its times in seconds since 1970."""

    subject: str
    not_before: int
    not_after: int
    der: bytes = b""


def parse_pem(text: str) -> Certificate:
    """The first certificate of a PEM text; raises Invalid."""
    return parse(of_pem(text))


def parse(der: bytes) -> Certificate:
    """A certificate in DER (RFC 5280, 4.1); raises Invalid."""
    if len(der) > _LONGEST:
        raise Invalid("its certificate is too long")
    whole = list(elements(der))
    if len(whole) != 1 or whole[0][0] != _SEQUENCE:
        raise Invalid("it is not one certificate")
    signed = list(elements(whole[0][1]))
    if not signed or signed[0][0] != _SEQUENCE:
        raise Invalid("its certificate has no content")
    fields = list(elements(signed[0][1]))
    # version [0] is optional; then serial, algorithm, issuer, validity, subject, key
    fields = fields[1:] if fields and fields[0][0] == 0xA0 else fields  # noqa: PLR2004 - the tag of version
    if len(fields) < 6 or fields[3][0] != _SEQUENCE or fields[4][0] != _SEQUENCE:  # noqa: PLR2004 - as listed
        raise Invalid("its certificate lacks fields")
    times = list(elements(fields[3][1]))
    if len(times) != 2:  # noqa: PLR2004 - notBefore and notAfter
        raise Invalid("its certificate has no validity")
    not_before, not_after = (_time(*each) for each in times)
    return Certificate(_common_name(fields[4][1]), not_before, not_after, der)


def _time(tag: int, content: bytes) -> int:
    """Seconds since 1970 (RFC 5280, 4.1.2.5): both forms end with Z, and have seconds."""
    forms = {_UTC: (r"\d{12}Z", "%y%m%d%H%M%SZ"), _GENERALIZED: (r"\d{14}Z", "%Y%m%d%H%M%SZ")}
    pattern, form = forms.get(tag, ("", ""))
    text = content.decode("ascii", "replace")
    if not form or not re.fullmatch(pattern, text, re.ASCII):
        raise Invalid("its certificate has an invalid time")
    if tag == _UTC:
        # strptime divides the centuries at 69; RFC 5280 at 50.
        text, form = ("19" if text >= "50" else "20") + text, "%Y%m%d%H%M%SZ"
    try:
        return calendar.timegm(time.strptime(text, form))
    except ValueError as error:
        raise Invalid("its certificate has an invalid time") from error


def _common_name(name: bytes) -> str:
    for tag, relative in elements(name):
        for _, pair in elements(relative) if tag == _SET else ():
            parts = list(elements(pair))
            if len(parts) == 2 and parts[0][1] == _COMMON_NAME:  # noqa: PLR2004 - type and value
                text = parts[1][1].decode("utf-8", "replace")
                return "".join(each if each.isprintable() else "?" for each in text)[:200]
    return ""


# The certificates of a node


def of_file(path: str) -> Certificate | None:
    """The certificate of a PEM file or kubeconfig; None where there is no file. Raises Invalid."""
    if os.path.exists(path) and os.path.getsize(path) > 1 << 20:
        raise Invalid("the file is too large")
    text = disk.read(path)
    if text is None:
        return None
    if path.endswith(".conf"):
        config = kubeconfig.load(path)
        text = (config.certificate if config else "") or ""
    return parse_pem(text)


def files() -> dict[str, str]:
    """The paths of the certificates that this machine can have, by the names that kubeadm gives them."""
    found = {_name(name): f"{KUBERNETES}/pki/{name}" for name in (*AUTHORITIES, *RENEWABLE)}
    found |= {name: f"{KUBERNETES}/{name}" for name in KUBECONFIGS}
    found |= {name.rpartition(".")[0]: f"{KUBELET}/{name}" for name in _KUBELET_FILES}
    # A kubelet with a serving certificate of the cluster does not use its own one.
    if os.path.exists(f"{KUBELET}/{_KUBELET_FILES[1]}"):
        found.pop("kubelet")
    return found


def _name(file: str) -> str:
    return file.rpartition(".")[0].replace("/", "-")


def report() -> list[dict[str, Any]]:
    """Each certificate of this machine: ``name``, ``path``, ``subject``, ``not_after``, ``problem`` and ``renewal``.

    ``not_after`` is in seconds since 1970, None if it cannot be read: ``problem`` says why. ``renewal`` is "renew"
    (`gpunodes certs renew`), "kubelet" (by itself), or "none" for authorities and for the kubelet's own serving
    certificate.
    """
    authorities = {_name(name) for name in AUTHORITIES}
    rows = []
    for name, path in files().items():
        row: dict[str, Any] = {"name": name, "path": path, "subject": "", "not_after": None, "problem": ""}
        row["renewal"] = "none" if name in authorities or name == "kubelet" else "renew"
        row["renewal"] = "kubelet" if name.endswith("-current") else row["renewal"]
        try:
            found = of_file(path)
        except (Invalid, OSError) as error:
            row["problem"] = str(error)
        else:
            if found is None:
                continue
            row.update(subject=found.subject, not_after=found.not_after)
        rows.append(row)
    return rows
