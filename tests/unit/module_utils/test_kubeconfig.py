"""Kubeconfigs of a machine."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from gpunodes.ansible.module_utils import kubeconfig
from gpunodes.ansible.module_utils.problem import MachineProblem

# A CA as kubeadm makes it (openssl req -x509 -newkey ec, CN=kubernetes); its hash by openssl as kubernetes.io shows.
CA = """-----BEGIN CERTIFICATE-----
MIIBgDCCASWgAwIBAgIUIYQf4d8kz+9qF61tY6hNj9yHoC4wCgYIKoZIzj0EAwIw
FTETMBEGA1UEAwwKa3ViZXJuZXRlczAeFw0yNjExMjExMzQ3MjVaFw0zNjExMTgx
MzQ3MjVaMBUxEzARBgNVBAMMCmt1YmVybmV0ZXMwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAARRWrKRy5gW7qIFt2L/BUkNz6C6MkUVHjOR21EPMrYKPZifkHqLw6oy
pKrCw3HZAo1GOzrzUeI+c7r2DdZaq7Rxo1MwUTAdBgNVHQ4EFgQUlLF0nZNNzpXU
Bh05xX10QkVOTqAwHwYDVR0jBBgwFoAUlLF0nZNNzpXUBh05xX10QkVOTqAwDwYD
VR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNJADBGAiEA+e4nlIBginULISzwV3mf
O9nOAF6CncwqbWsBuMXpZ08CIQDyJ8dD27KXFUBG7sQ9VSqrLrG+Wkhun3w8JHoQ
vN9XtA==
-----END CERTIFICATE-----
"""
CA_HASH = "sha256:958f10a720cbcb657c0a2e6c5684ae05cdcb88e85c44745969411256fb9f746b"


def test_ca_hash() -> None:
    assert kubeconfig.ca_hash(CA) == CA_HASH


def test_parse() -> None:
    config = kubeconfig.parse(kubeconfig_text())
    assert config.server == "https://10.0.0.1:6443"
    assert config.ca_hash == CA_HASH
    assert config.certificate == CA
    assert config.key is None


@pytest.mark.parametrize("text", ["", "apiVersion: v1\n", "clusters:\n- cluster:\n    server: https://x\n"])
def test_half_a_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "kubelet.conf"
    path.write_text(text)
    assert kubeconfig.load(str(path)) is None
    with pytest.raises(MachineProblem):
        kubeconfig.parse(text)


def test_no_certificate() -> None:
    with pytest.raises(MachineProblem):
        kubeconfig.ca_hash("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")


def kubeconfig_text() -> str:

    data = base64.b64encode(CA.encode()).decode()
    return (
        "apiVersion: v1\nclusters:\n- cluster:\n"
        f"    certificate-authority-data: {data}\n    server: https://10.0.0.1:6443\n  name: kubernetes\n"
        "kind: Config\nusers:\n- name: default\n  user:\n"
        f"    client-certificate-data: {data}\n    client-key: /var/lib/kubelet/pki/x.pem\n"
    )
