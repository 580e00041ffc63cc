"""Client certificates of kubelets, with their keys, that end when a test wants it."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


def pem(node: str, days: float, ca: Path | None = None) -> str:
    """A certificate of a node that ends in so many days, and its key; ``ca`` is the folder of ca.crt and ca.key.

    Without ``ca`` it is signed by itself.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([
        x509.NameAttribute(NameOID.ORGANIZATION_NAME, "system:nodes"),
        x509.NameAttribute(NameOID.COMMON_NAME, f"system:node:{node}"),
    ])  # fmt: skip
    issuer, signs = subject, key
    if ca:
        issuer = x509.load_pem_x509_certificate((ca / "ca.crt").read_bytes()).subject
        loaded: Any = serialization.load_pem_private_key((ca / "ca.key").read_bytes(), None)
        signs = loaded
    end = dt.datetime.now(dt.UTC) + dt.timedelta(days=days)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(end - dt.timedelta(days=365))
        .not_valid_after(end)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .sign(signs, hashes.SHA256())
    )
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return (made.public_bytes(serialization.Encoding.PEM) + key.private_bytes(*form)).decode()
