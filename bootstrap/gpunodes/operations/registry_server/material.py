"""What the registry has in its Secret: a CA of its own, a certificate, and a user with a password.

The CA is for this one registry, and nodes trust it at the registry's address only. ``up`` renews the certificate when
200 days are left, and the CA long before it ends; nodes then trust the old and the new one. It keeps the password
unless a new one is requested.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpunodes.errors import GpunodesError
from gpunodes.planner.registry import NAME, NAMESPACE, USER

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

_CA_DAYS, _DAYS = 3650, 365
# More than half a year: who runs `up` twice a year never lets it end.
_RENEW_DAYS = 200
_PASSWORD = re.compile(r"[A-Za-z0-9_-]{20,72}")
"""bcrypt uses 72 bytes of a password; longer ones the registry refuses."""
_HASH = re.compile(rf"{USER}:\$2[aby]\$\d\d\$[./A-Za-z0-9]{{53}}\n")
# As htpasswd(1) has it. The registry hashes at each request, and a pull makes many; nobody guesses 256 random bits,
# however fast.
_ROUNDS = 5
# Clocks of nodes may be behind this computer's.
_EARLIER = datetime.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Material:
    """The content of the Secret, each part as text."""

    ca: str
    """The CA's certificate; with the one before it, if that has not ended."""
    ca_key: str
    certificate: str
    key: str
    htpasswd: str
    password: str
    user: str = USER

    @property
    def data(self) -> dict[str, str]:
        """By the keys of the Secret."""
        return {
            "ca.crt": self.ca,
            "ca.key": self.ca_key,
            "tls.crt": self.certificate,
            "tls.key": self.key,
            "htpasswd": self.htpasswd,
            "user": self.user,
            "password": self.password,
        }

    def __repr__(self) -> str:
        return "Material(...)"


def made(host: str) -> Material:
    """New material for a registry at an address."""
    authority, ca_key = _new_authority(_now())
    certificate, key = _issued(host, authority, ca_key)
    htpasswd, password = _new_password()
    return Material(_pem(authority), _key_pem(ca_key), _pem(certificate), _key_pem(key), htpasswd, password)


def wanted(found: Material | None, host: str, *, new_password: bool = False) -> Material:
    """What the registry gets now: ``found`` as far as it may stay, with another password on request."""
    if found is None:
        return made(host)
    kept = renewed(found, host)
    if not new_password:
        return kept
    htpasswd, password = _new_password()
    return replace(kept, htpasswd=htpasswd, password=password)


def _new_password() -> tuple[str, str]:
    """The line of the registry's file of users, and the password."""
    import bcrypt

    password = secrets.token_urlsafe(32)
    hashed = bcrypt.hashpw(password.encode(), bcrypt.gensalt(_ROUNDS)).decode("ascii")
    return f"{USER}:{hashed}\n", password


def renewed(found: Material, host: str) -> Material:
    """The material, with a new certificate if the old one ends soon or is for another address; the same otherwise."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    authority = x509.load_pem_x509_certificates(found.ca.encode())[0]
    ca_key: Any = load_pem_private_key(found.ca_key.encode(), None)
    certificate = x509.load_pem_x509_certificate(found.certificate.encode())
    now = _now()
    ca = found.ca
    if authority.not_valid_after_utc < now + datetime.timedelta(days=_DAYS + _RENEW_DAYS):
        old = authority
        authority, ca_key = _new_authority(now)
        ca = _pem(authority) + (_pem(old) if old.not_valid_after_utc > now else "")
    elif certificate.not_valid_after_utc > now + datetime.timedelta(days=_RENEW_DAYS) and _is_for(
        certificate, host, authority
    ):
        return found
    new, key = _issued(host, authority, ca_key)
    return Material(ca, _key_pem(ca_key), _pem(new), _key_pem(key), found.htpasswd, found.password)


def read(data: Mapping[str, Any]) -> Material:
    """The material in a Secret's data, decoded; raises GpunodesError for what gpunodes did not make."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    names = ("ca.crt", "ca.key", "tls.crt", "tls.key", "htpasswd", "password", "user")
    try:
        ca, ca_key, certificate, key, htpasswd, password, user = (str(data[name]) for name in names)
        # What is passed on is what was read, without anything between and around it.
        trusted = "".join(map(_pem, x509.load_pem_x509_certificates(ca.encode())[:2]))
        served = _pem(x509.load_pem_x509_certificate(certificate.encode()))
        for each in (ca_key, key):
            load_pem_private_key(each.encode(), None)
    except (KeyError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _invalid() from error
    if user != USER or not _PASSWORD.fullmatch(password) or not _HASH.fullmatch(htpasswd):
        raise _invalid()
    return Material(trusted, ca_key, served, key, htpasswd, password)


def certificates(ca: str, certificate: str) -> tuple[str, float] | None:
    """The CA's certificates as nodes get them, and when the registry's certificate ends; None if they are invalid."""
    from cryptography import x509

    try:
        trusted = "".join(map(_pem, x509.load_pem_x509_certificates(ca.encode())[:2]))
        end = x509.load_pem_x509_certificate(certificate.encode()).not_valid_after_utc
    except ValueError:
        return None
    return trusted, end.timestamp()


def _invalid() -> GpunodesError:
    return GpunodesError(
        f"the Secret {NAME} in the namespace {NAMESPACE} is not what `gpunodes registry up` made",
        "its CA, certificate, user and password",
        "run `gpunodes registry down`, then `up` again; the images stay",
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _new_authority(now: datetime.datetime) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    key = _new_key()
    name = _name(f"gpunodes registry {now:%Y-%m-%d}")
    usage = dict.fromkeys(_USAGES, False) | {"key_cert_sign": True, "crl_sign": True}
    built = (
        _builder(name, key, now, _CA_DAYS)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
    )
    return built.sign(key, hashes.SHA256()), key


def _issued(
    host: str, authority: x509.Certificate, ca_key: EllipticCurvePrivateKey
) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    """A certificate for the address, and for the names that pods may use."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = _new_key()
    service = f"{NAME}.{NAMESPACE}.svc"
    names = [x509.DNSName(each) for each in (service, f"{service}.cluster.local")]
    others = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host)), *names])
    usage = dict.fromkeys(_USAGES, False) | {"digital_signature": True}
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    built = (
        _builder(_name(service), key, _now(), _DAYS)
        .issuer_name(authority.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(others, critical=False)
        .add_extension(issuer, critical=False)
    )
    return built.sign(ca_key, hashes.SHA256()), key


_USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


def _builder(
    subject: x509.Name, key: EllipticCurvePrivateKey, now: datetime.datetime, days: int
) -> x509.CertificateBuilder:
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _is_for(certificate: x509.Certificate, host: str, authority: x509.Certificate) -> bool:
    """Whether a certificate is for this address, and of this CA."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(authority)
        others = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (InvalidSignature, ValueError, TypeError, x509.ExtensionNotFound):
        return False
    return ipaddress.ip_address(host) in others.get_values_for_type(x509.IPAddress)


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _name(text: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM).decode("ascii")


def _key_pem(key: EllipticCurvePrivateKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode("ascii")
