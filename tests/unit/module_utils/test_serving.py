"""Approval of the kubelets' requests for serving certificates. openssl makes the requests."""

from __future__ import annotations

import base64
import ipaddress
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils import serving

USER = "system:node:worker-1"
OWN = "DNS:worker-1,IP:10.0.0.11"


def node(name: str, *addresses: str) -> dict[str, Any]:
    listed = [{"type": "x", "address": address} for address in addresses]
    return {"metadata": {"name": name}, "status": {"addresses": listed}}


NODES = [node("worker-1", "worker-1", "10.0.0.11", "fd00::11"), node("worker-2", "worker-2", "10.0.0.12")]


API_NAMES = ("kubernetes", "kubernetes.default.svc", "control-1", "10.96.0.1", "10.0.0.1")
CONFIGURATION = """\
apiServer: {}
controlPlaneEndpoint: 10.0.0.100:6443
kind: ClusterConfiguration
networking:
  dnsDomain: cluster.local
  podSubnet: 10.244.0.0/16
  serviceSubnet: 10.96.0.0/12,fd00:96::/108
"""
PROTECTED = serving.Reserved(
    frozenset({*API_NAMES, "10.0.0.100"}),
    [ipaddress.ip_network("10.96.0.0/12"), ipaddress.ip_network("fd00:96::/108")],
)


def api_certificate(key: Path) -> str:
    names = ",".join(f"{'IP' if name[0].isdigit() else 'DNS'}:{name}" for name in API_NAMES)
    command = ["openssl", "req", "-x509", "-new", "-key", str(key), "-subj", "/CN=kube-apiserver", "-days", "1"]
    return subprocess.run(
        [*command, "-addext", f"subjectAltName={names}"], capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(scope="session")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key.pem"
    subprocess.run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path], check=True)
    return path


def spec(key: Path, names: str = OWN, subject: str = f"/O=system:nodes/CN={USER}", **changes: Any) -> dict[str, Any]:
    """The spec of a CertificateSigningRequest, as the API server returns it."""
    command = ["openssl", "req", "-new", "-key", str(key), "-subj", subject]
    if names:
        command += ["-addext", names if "=" in names else f"subjectAltName={names}"]
    request = subprocess.run(command, capture_output=True, check=True).stdout
    return {
        "username": USER,
        "groups": ["system:nodes", "system:authenticated"],
        "usages": ["digital signature", "server auth"],
        "request": base64.b64encode(request).decode(),
        **changes,
    }


def test_request_of_a_node_for_itself_is_approved(key: Path) -> None:
    assert serving.objection(spec(key), NODES, PROTECTED) == ""
    assert serving.objection(spec(key, f"{OWN},IP:fd00::11"), NODES, PROTECTED) == ""


@pytest.mark.parametrize(
    ("why", "changed"),
    [
        ("is not a node", {"username": "system:serviceaccount:default:app"}),
        ("is not a node", {"groups": ["system:authenticated"]}),
        (", not 'system:node:worker-2' in", {"username": "system:node:worker-2"}),
        ("not only those of a serving certificate", {"usages": ["digital signature", "server auth", "client auth"]}),
        ("not only those of a serving certificate", {"usages": ["digital signature"]}),
        (", not 'system:node:worker-1' in", {"subject": "/O=system:masters/CN=system:node:worker-1"}),
        (", not 'system:node:worker-1' in", {"subject": "/O=system:nodes/O=system:masters/CN=system:node:worker-1"}),
        ("more than a common name", {"subject": f"/O=system:nodes/OU=x/CN={USER}"}),
        ("'10.0.0.12', which does not belong to worker-1 alone", {"names": f"{OWN},IP:10.0.0.12"}),
        ("'kubernetes.default', which", {"names": f"{OWN},DNS:kubernetes.default"}),
        ("neither a DNS name nor an IP address", {"names": f"{OWN},URI:spiffe://x"}),
        ("has no subject alternative names", {"names": ""}),
        ("extensions other than subject alternative names", {"names": "basicConstraints=CA:TRUE"}),
        ("cannot be parsed", {"request": base64.b64encode(b"{{ 7 * 7 }}").decode()}),
        ("cannot be parsed", {"request": "not base64"}),
    ],
)
def test_other_requests_are_refused(key: Path, why: str, changed: dict[str, Any]) -> None:
    """A compromised node gets no certificate of another node or of the API, no client certificate and no CA."""
    assert why in serving.objection(spec(key, **changed), NODES, PROTECTED)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("kubernetes.default.svc", "does not belong to worker-1 alone"),
        ("worker-9", "does not belong to worker-1 alone"),
        ("10.96.0.1", "belongs to a service"),
        ("::ffff:10.96.0.10", "belongs to a service"),
        ("fd00:96::a", "belongs to a service"),
        ("10.0.0.1", "belongs to the API server"),
        ("10.0.0.100", "belongs to the API server"),
        ("127.0.0.1", "is not an address of a single machine"),
        ("::", "is not an address of a single machine"),
        ("224.0.0.1", "is not an address of a single machine"),
        ("fe80::1", "is not an address of a single machine"),
        ("::ffff:10.0.0.12", "does not belong to worker-1 alone"),
    ],
)
def test_reported_address_of_the_api_or_a_service_is_refused(key: Path, name: str, why: str) -> None:
    """A node reports its addresses itself, so it can report those of the API or of a service."""
    kind = "DNS" if name.isalpha() or name[0] in "kw" else "IP"
    forged = node("worker-1", "worker-1", "10.0.0.11", name, str(ipaddress.ip_address(name)) if kind == "IP" else name)
    assert why in serving.objection(spec(key, f"{OWN},{kind}:{name}"), [forged, NODES[1]], PROTECTED)


def test_node_with_the_name_of_the_api_is_refused(key: Path) -> None:
    name = "kubernetes.default.svc"
    user = f"system:node:{name}"
    request = spec(key, f"DNS:{name},IP:10.0.0.13", f"/O=system:nodes/CN={user}", username=user)
    assert "belongs to the API server" in serving.objection(request, [node(name, name, "10.0.0.13")], PROTECTED)


def test_control_plane_node_may_share_an_address_with_the_api(key: Path) -> None:
    """Its kubelet gets a certificate for the API server's address, but not for names that only the API has."""
    user = "system:node:control-1"
    names = ("control-1", "10.0.0.1", "10.96.0.1", "kubernetes")
    own = node("control-1", *names)
    own["metadata"]["labels"] = {"node-role.kubernetes.io/control-plane": ""}

    def objection(names: str) -> str:
        return serving.objection(
            spec(key, names, f"/O=system:nodes/CN={user}", username=user), [own, *NODES], PROTECTED
        )

    assert objection("DNS:control-1,IP:10.0.0.1") == ""
    assert "belongs to a service" in objection("DNS:control-1,IP:10.96.0.1")
    assert "does not belong to control-1 alone" in objection("DNS:kubernetes,IP:10.0.0.1")


@pytest.mark.parametrize("text", ["", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n", "x"])
def test_invalid_certificate_of_the_api_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        serving.reserved(text, CONFIGURATION)


def test_missing_service_subnet_is_an_error(key: Path) -> None:
    with pytest.raises(ValueError, match="no serviceSubnet"):
        serving.reserved(api_certificate(key), "kind: ClusterConfiguration\n")


def test_reserved_names_come_from_the_api_certificate_and_kubeadm(key: Path) -> None:
    """The certificate is made by openssl; the configuration is as kubeadm stores it."""
    found = serving.reserved(api_certificate(key), CONFIGURATION)
    assert found == PROTECTED
    ipv6 = serving.reserved(
        api_certificate(key), "controlPlaneEndpoint: '[fd00::100]:6443'\nserviceSubnet: fd00:96::/108"
    )
    assert "fd00::100" in ipv6.names


def test_pending_request_is_logged_once(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused request is processed every 15 seconds, but its message does not change."""
    request = {"kind": "CertificateSigningRequest", "metadata": {"name": "csr-1"}}
    request["spec"] = {**spec(key, "DNS:kubernetes"), "signerName": serving.SIGNER}
    listing = {"items": [request, *({"kind": "Node", **item} for item in NODES)]}
    messages: list[str] = []
    monkeypatch.setattr(serving, "_kubectl", lambda *_: json.dumps(listing))
    monkeypatch.setattr(serving, "_reserved", lambda: PROTECTED)
    monkeypatch.setattr(serving, "_log", messages.append)
    logged = serving.process_pending(serving.process_pending(serving.process_pending({})))
    assert len(messages) == 1
    assert list(logged) == ["csr-1"]
    listing["items"] = []
    assert serving.process_pending(logged) == {}


def test_address_that_two_nodes_report_is_refused(key: Path) -> None:
    """A node reports its addresses itself: neither node gets a certificate for an address that both report."""
    nodes = [*NODES, node("worker-3", "worker-3", "10.0.0.11")]
    assert "does not belong to worker-1 alone" in serving.objection(spec(key), nodes, PROTECTED)


def test_truncated_requests_are_refused_without_an_exception(key: Path) -> None:
    lines = base64.b64decode(spec(key)["request"]).decode().splitlines()
    der = base64.b64decode("".join(lines[1:-1]))
    for size in range(len(der)):
        truncated = base64.b64encode(der[:size]).decode()
        request = base64.b64encode("\n".join([lines[0], truncated, lines[-1]]).encode()).decode()
        assert serving.objection({**spec_of(request)}, NODES, PROTECTED) != ""


def spec_of(request: str) -> dict[str, Any]:
    return {"username": USER, "groups": ["system:nodes"], "usages": ["server auth"], "request": request}


def test_only_pending_requests_are_processed() -> None:
    base = {"kind": "CertificateSigningRequest", "metadata": {"name": "a"}}
    undecided = {**base, "spec": {"signerName": serving.SIGNER}}
    items = [
        undecided,
        {**undecided, "status": {"conditions": [{"type": "Denied"}]}},
        {**base, "spec": {"signerName": "kubernetes.io/kube-apiserver-client-kubelet"}},
        {"kind": "Node", "metadata": {"name": "n"}},
    ]
    assert serving.pending({"items": items}) == [undecided]
