"""The CA, the certificate and the password of the registry."""

from __future__ import annotations

import contextlib
import datetime
import re
import socket
import ssl
import threading
from dataclasses import replace
from pathlib import Path

import bcrypt
import pytest
from cryptography import x509
from gpunodes.errors import GpunodesError
from gpunodes.operations.registry_server import material

HOST = "10.96.0.15"


@pytest.fixture(scope="module")
def found() -> material.Material:
    return material.made(HOST)


def later(monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    moment = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    monkeypatch.setattr(material, "_now", lambda: moment)


def days_left(pem: str) -> int:
    return (x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days


def serve(made: material.Material, ca: str, name: str, folder: Path) -> str:
    """What a TLS client with this CA says of a server with this certificate: "" if it accepts it."""
    (folder / "tls").write_text(made.certificate + made.key)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "tls")
    client = ssl.create_default_context(cadata=ca)
    # As Python 3.13 and newer check by default.
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    ours, theirs = socket.socketpair()

    def accept() -> None:
        with ours, contextlib.suppress(OSError):
            server.wrap_socket(ours, server_side=True).close()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    with theirs:
        try:
            client.wrap_socket(theirs, server_hostname=name).close()
        except ssl.SSLError as error:
            return str(error)
        finally:
            thread.join(10)
    return ""


def test_the_certificate_is_for_the_address_and_the_names_of_the_service(
    found: material.Material, tmp_path: Path
) -> None:
    for name in (HOST, "registry.gpunodes-registry.svc", "registry.gpunodes-registry.svc.cluster.local"):
        assert serve(found, found.ca, name, tmp_path) == ""
    assert "IP address mismatch" in serve(found, found.ca, "10.96.0.16", tmp_path)
    assert "CERTIFICATE_VERIFY_FAILED" in serve(found, material.made(HOST).ca, HOST, tmp_path)


def test_the_ca_can_sign_no_other_ca_and_ends_late(found: material.Material) -> None:
    authority = x509.load_pem_x509_certificate(found.ca.encode())
    basic = authority.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (basic.critical, basic.value.ca, basic.value.path_length) == (True, True, 0)
    assert 3640 < days_left(found.ca) < 3660
    assert 360 < days_left(found.certificate) < 370


def test_the_password_is_hashed_by_bcrypt(found: material.Material) -> None:
    user, _, hashed = found.htpasswd.strip().partition(":")
    assert user == "gpunodes"
    assert bcrypt.checkpw(found.password.encode(), hashed.encode())
    assert len(found.password) >= 40
    assert found.password != material.made(HOST).password


def test_nothing_shows_a_secret(found: material.Material) -> None:
    for secret in (found.password, found.key, found.ca_key):
        assert secret not in repr(found) + str(found)


def test_it_is_read_as_it_was_made(found: material.Material) -> None:
    assert material.read(found.data) == found


def test_it_stays_until_200_days_are_left(found: material.Material, monkeypatch: pytest.MonkeyPatch) -> None:
    assert material.renewed(found, HOST) is found
    later(monkeypatch, 365 - 201)
    assert material.renewed(found, HOST) is found


@pytest.mark.parametrize("left", [100, 184])
def test_a_certificate_that_would_end_within_half_a_year_is_renewed_with_the_same_ca_and_password(
    found: material.Material, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    later(monkeypatch, 365 - left)
    new = material.renewed(found, HOST)
    assert new.certificate != found.certificate
    assert (new.ca, new.ca_key, new.password, new.htpasswd) == (
        found.ca, found.ca_key, found.password, found.htpasswd
    )  # fmt: skip
    assert days_left(new.certificate) > 540
    x509.load_pem_x509_certificate(new.certificate.encode()).verify_directly_issued_by(
        x509.load_pem_x509_certificate(found.ca.encode())
    )


def test_another_address_takes_another_certificate(found: material.Material, tmp_path: Path) -> None:
    new = material.renewed(found, "10.96.0.99")
    assert new.password == found.password
    assert serve(new, found.ca, "10.96.0.99", tmp_path) == ""


def test_a_ca_that_ends_is_replaced_and_nodes_trust_both(
    found: material.Material, monkeypatch: pytest.MonkeyPatch
) -> None:
    later(monkeypatch, 3650 - 400)
    new = material.renewed(found, HOST)
    authorities = x509.load_pem_x509_certificates(new.ca.encode())
    assert len(authorities) == 2
    assert found.ca in new.ca
    x509.load_pem_x509_certificate(new.certificate.encode()).verify_directly_issued_by(authorities[0])
    # The form that reports of the cluster may have.
    assert re.fullmatch(
        r"(-----BEGIN CERTIFICATE-----\n([A-Za-z0-9+/=]{1,76}\n){1,60}-----END CERTIFICATE-----\n){1,2}", new.ca
    )
    later(monkeypatch, 3650 + 1)
    assert len(x509.load_pem_x509_certificates(material.renewed(found, HOST).ca.encode())) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"ca.crt": ""},
        {"ca.key": "-----BEGIN PRIVATE KEY-----\n"},
        {"tls.crt": "x"},
        {"password": "short"},
        {"password": "a" * 30 + "\n"},
        {"htpasswd": "gpunodes:{plain}x\n"},
        {"htpasswd": "gpunodes:$2b$12$" + "a" * 53 + "\nother:$2b$12$" + "a" * 53 + "\n"},
        {"user": "root"},
    ],
)
def test_what_gpunodes_did_not_make_is_refused(found: material.Material, change: dict[str, str]) -> None:
    with pytest.raises(GpunodesError, match="is not what `gpunodes registry up` made"):
        material.read(found.data | change)


def test_a_missing_part_is_refused(found: material.Material) -> None:
    for name in found.data:
        with pytest.raises(GpunodesError, match="is not what"):
            material.read({key: text for key, text in found.data.items() if key != name})


def test_text_beside_certificates_is_not_passed_on(found: material.Material) -> None:
    read = material.read(found.data | {"ca.crt": "{{ lookup('pipe', 'x') }}\n" + found.ca + "# more\n"})
    assert read == replace(found)
