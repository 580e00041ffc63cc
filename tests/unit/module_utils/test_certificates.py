"""The reader of certificates, on real ones of openssl and on damaged ones."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils import certificates
from gpunodes.ansible.module_utils.der import Invalid
from gpunodes.planner import certificates as judged
from gpunodes.planner import reports


def made(folder: Path, *words: str, subject: str = "/O=system:masters/CN=kubernetes-admin") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(folder / "key")]
    command = ["openssl", "req", "-x509", *key, "-subj", subject, "-out", str(folder / "crt"), *words]
    subprocess.run(command, check=True, capture_output=True)
    return (folder / "crt").read_text()


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> str:
    return made(tmp_path_factory.mktemp("pki"), "-days", "365")


def test_a_certificate_is_read_as_openssl_reads_it(pem: str) -> None:
    found = certificates.parse_pem(f"bag attributes\n{pem}\n{pem}")
    shown = subprocess.run(
        ["openssl", "x509", "-noout", "-enddate", "-dateopt", "iso_8601"],
        input=pem,
        text=True,
        capture_output=True,
        check=True,
    ).stdout
    assert shown.strip() == time.strftime("notAfter=%Y-%m-%d %H:%M:%SZ", time.gmtime(found.not_after))
    assert found.subject == "kubernetes-admin"
    assert found.not_after - found.not_before == 365 * 86400


def test_a_certificate_of_the_next_century_is_read(tmp_path: Path) -> None:
    """After 2049 the time has another form (RFC 5280, 4.1.2.5)."""
    found = certificates.parse_pem(made(tmp_path, "-days", "36500"))
    assert time.gmtime(found.not_after).tm_year >= 2120


def test_a_subject_cannot_steer_a_terminal(tmp_path: Path) -> None:
    assert "\x1b" not in certificates.parse_pem(made(tmp_path, subject="/CN=a\x1b[31mb")).subject


def test_every_cut_is_refused(pem: str) -> None:
    """A certificate that lost bytes, or has more, is no certificate."""
    der = certificates.parse_pem(pem).der
    for length in range(len(der)):
        with pytest.raises(Invalid):
            certificates.parse(der[:length])
    for extra in (b"\0", der, b"\x30\x00"):
        with pytest.raises(Invalid):
            certificates.parse(der + extra)


def test_no_changed_byte_raises_anything_else(pem: str) -> None:
    der = certificates.parse_pem(pem).der
    for position in range(len(der)):
        for value in (0x00, 0x1F, 0x30, 0x7F, 0x80, 0x84, 0xFF):
            changed = der[:position] + bytes([value]) + der[position + 1 :]
            try:
                found = certificates.parse(changed)
            except Invalid:
                continue
            assert isinstance(found.not_after, int)
            assert found.subject.isprintable() or not found.subject


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
        "-----BEGIN CERTIFICATE-----\nMI=IB\n-----END CERTIFICATE-----",
        "-----BEGIN PRIVATE KEY-----\nMIIB\n-----END PRIVATE KEY-----",
        "-----BEGIN CERTIFICATE-----" + "A" * 200_000 + "-----END CERTIFICATE-----",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(Invalid):
        certificates.parse_pem(text)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pem: str) -> Path:
    import base64

    monkeypatch.setattr(certificates, "KUBERNETES", str(tmp_path))
    monkeypatch.setattr(certificates, "KUBELET", str(tmp_path / "kubelet"))
    for name in (
        "pki/ca.crt",
        "pki/apiserver.crt",
        "pki/etcd/ca.crt",
        "kubelet/kubelet-client-current.pem",
        "kubelet/kubelet.crt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(pem)
    data = base64.b64encode(pem.encode()).decode()
    (tmp_path / "admin.conf").write_text(
        f"server: https://10.0.0.1:6443\ncertificate-authority-data: {data}\n    client-certificate-data: {data}\n"
    )
    return tmp_path


def test_a_node_reports_all_its_certificates(node: Path) -> None:
    found = {each["name"]: each for each in certificates.report()}
    assert set(found) == {"ca", "etcd-ca", "apiserver", "admin.conf", "kubelet-client-current", "kubelet"}
    assert {name: each["renewal"] for name, each in found.items()} == {
        "ca": "none", "etcd-ca": "none", "apiserver": "renew", "admin.conf": "renew",
        "kubelet-client-current": "kubelet", "kubelet": "none",
    }  # fmt: skip
    assert not reports.certificates_problem(list(found.values()))
    (node / "kubelet/kubelet-server-current.pem").write_text((node / "pki/ca.crt").read_text())
    assert "kubelet" not in {each["name"] for each in certificates.report()}


def test_an_unreadable_certificate_is_a_row(node: Path) -> None:
    (node / "pki/apiserver.crt").write_text("half a line")
    (node / "admin.conf").write_text("")
    found = {each["name"]: each for each in certificates.report()}
    assert found["apiserver"]["not_after"] is None
    assert found["apiserver"]["problem"] == "it contains no certificate"
    assert found["admin.conf"]["not_after"] is None
    assert len(judged.ending(list(found.values()), 0)) == 2


def row(days: float, **changes: Any) -> dict[str, Any]:
    return {
        "name": "apiserver",
        "path": "/a",
        "subject": "",
        "not_after": int(days * 86400),
        "problem": "",
        "renewal": "renew",
        **changes,
    }


def test_a_warning_names_who_renews_it() -> None:
    assert judged.ending([row(30), row(365)], 0.0) == []
    for renewal, words in {"renew": "certs renew", "kubelet": "by itself", "none": "never renews"}.items():
        warning = str(judged.ending([row(29.9, renewal=renewal)], 0.0)[0])
        assert "ends 1970-01-30" in warning
        assert words in warning
    assert "ended" in str(judged.ending([row(-1)], 0.0)[0])


@pytest.mark.parametrize(
    "report",
    [None, {}, [{}], [row(1, name="a\nb")], [row(1, path="/a b; rm")], [row(1, not_after="soon")], [row(1)] * 101,
     [row(1, not_after=1 << 64)], [row(1, renewal="me")]],
)  # fmt: skip
def test_a_machine_s_report_is_data(report: Any) -> None:
    assert reports.certificates_problem(report)


def test_a_year_that_no_calendar_has_is_shown() -> None:
    assert judged.shown(1 << 62) == ""
    assert not reports.certificates_problem([row(1, not_after=1 << 62)])
    assert judged.ending([row(1, not_after=-(1 << 62))], 0.0)
