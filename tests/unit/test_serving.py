"""Which requests of kubelets for serving certificates are approved. The requests are real ones, made by openssl."""

from __future__ import annotations

import base64
import ipaddress
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils.gpunodes import serving

USER = "system:node:worker-1"
OWN = "DNS:worker-1,IP:10.0.0.11"


def node(name: str, *addresses: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"addresses": [{"type": "x", "address": one} for one in addresses]}}


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
KEPT = serving.Reserved(
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


def spec(key: Path, names: str = OWN, subject: str = f"/O=system:nodes/CN={USER}", **more: Any) -> dict[str, Any]:
    """A CertificateSigningRequest's spec, as the API server shows it."""
    command = ["openssl", "req", "-new", "-key", str(key), "-subj", subject]
    if names:
        command += ["-addext", names if "=" in names else f"subjectAltName={names}"]
    made = subprocess.run(command, capture_output=True, check=True).stdout
    return {
        "username": USER,
        "groups": ["system:nodes", "system:authenticated"],
        "usages": ["digital signature", "server auth"],
        "request": base64.b64encode(made).decode(),
        **more,
    }


def test_a_nodes_own_request_is_approved(key: Path) -> None:
    assert serving.objection(spec(key), NODES, KEPT) == ""
    assert serving.objection(spec(key, f"{OWN},IP:fd00::11"), NODES, KEPT) == ""


@pytest.mark.parametrize(
    ("why", "changed"),
    [
        ("no node", {"username": "system:serviceaccount:default:app"}),
        ("no node", {"groups": ["system:authenticated"]}),
        ("not for 'system:node:worker-2'", {"username": "system:node:worker-2"}),
        ("not for serving alone", {"usages": ["digital signature", "server auth", "client auth"]}),
        ("not for serving alone", {"usages": ["digital signature"]}),
        ("not for 'system:node:worker-1'", {"subject": "/O=system:masters/CN=system:node:worker-1"}),
        ("not for 'system:node:worker-1'", {"subject": "/O=system:nodes/O=system:masters/CN=system:node:worker-1"}),
        ("more than a name", {"subject": f"/O=system:nodes/OU=x/CN={USER}"}),
        ("'10.0.0.12', which is not worker-1's alone", {"names": f"{OWN},IP:10.0.0.12"}),
        ("'kubernetes.default', which", {"names": f"{OWN},DNS:kubernetes.default"}),
        ("neither of DNS nor an address", {"names": f"{OWN},URI:spiffe://x"}),
        ("for no address", {"names": ""}),
        ("more than alternative names", {"names": "basicConstraints=CA:TRUE"}),
        ("cannot be read", {"request": base64.b64encode(b"{{ 7 * 7 }}").decode()}),
        ("cannot be read", {"request": "not base64"}),
    ],
)
def test_everything_else_is_refused(key: Path, why: str, changed: dict[str, Any]) -> None:
    """A stolen node gets no certificate of another node, of the API, for clients or as a CA."""
    assert why in serving.objection(spec(key, **changed), NODES, KEPT)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("kubernetes.default.svc", "not worker-1's alone"),
        ("worker-9", "not worker-1's alone"),
        ("10.96.0.1", "a service's"),
        ("::ffff:10.96.0.10", "a service's"),
        ("fd00:96::a", "a service's"),
        ("10.0.0.1", "the API server's"),
        ("10.0.0.100", "the API server's"),
        ("127.0.0.1", "no address of one machine"),
        ("::", "no address of one machine"),
        ("224.0.0.1", "no address of one machine"),
        ("fe80::1", "no address of one machine"),
        ("::ffff:10.0.0.12", "not worker-1's alone"),
    ],
)
def test_what_a_node_writes_into_its_own_status_is_no_claim(key: Path, name: str, why: str) -> None:
    """A node reports its addresses itself; it got a certificate of the API, or of a service, by reporting theirs."""
    kind = "DNS" if name.isalpha() or name[0] in "kw" else "IP"
    liar = node("worker-1", "worker-1", "10.0.0.11", name, str(ipaddress.ip_address(name)) if kind == "IP" else name)
    assert why in serving.objection(spec(key, f"{OWN},{kind}:{name}"), [liar, NODES[1]], KEPT)


def test_a_node_that_is_called_like_the_api_gets_no_certificate_of_it(key: Path) -> None:
    name = "kubernetes.default.svc"
    user = f"system:node:{name}"
    asked = spec(key, f"DNS:{name},IP:10.0.0.13", f"/O=system:nodes/CN={user}", username=user)
    assert "the API server's" in serving.objection(asked, [node(name, name, "10.0.0.13")], KEPT)


def test_the_control_planes_own_node_has_an_address_of_the_api(key: Path) -> None:
    """Its kubelet is certified for the address that the API server has, and not for what only the API has."""
    user = "system:node:control-1"
    names = ("control-1", "10.0.0.1", "10.96.0.1", "kubernetes")
    own = node("control-1", *names)
    own["metadata"]["labels"] = {"node-role.kubernetes.io/control-plane": ""}

    def asked(names: str) -> str:
        return serving.objection(spec(key, names, f"/O=system:nodes/CN={user}", username=user), [own, *NODES], KEPT)

    assert asked("DNS:control-1,IP:10.0.0.1") == ""
    assert "a service's" in asked("DNS:control-1,IP:10.96.0.1")
    assert "not control-1's alone" in asked("DNS:kubernetes,IP:10.0.0.1")


@pytest.mark.parametrize("text", ["", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n", "x"])
def test_without_the_apis_certificate_nothing_is_decided(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        serving.reserved(text, CONFIGURATION)


def test_without_the_services_network_nothing_is_decided(key: Path) -> None:
    with pytest.raises(ValueError, match="no serviceSubnet"):
        serving.reserved(api_certificate(key), "kind: ClusterConfiguration\n")


def test_what_is_reserved_is_what_the_api_server_and_kubeadm_say(key: Path) -> None:
    """The certificate of a real openssl, the configuration as kubeadm stores it."""
    found = serving.reserved(api_certificate(key), CONFIGURATION)
    assert found == KEPT
    six = serving.reserved(
        api_certificate(key), "controlPlaneEndpoint: '[fd00::100]:6443'\nserviceSubnet: fd00:96::/108"
    )
    assert "fd00::100" in six.names


def test_what_stays_pending_is_said_once(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It went into the journal every 15 seconds."""
    waiting = {"kind": "CertificateSigningRequest", "metadata": {"name": "csr-1"}}
    waiting["spec"] = {**spec(key, "DNS:kubernetes"), "signerName": serving.SIGNER}
    listing = {"items": [waiting, *({"kind": "Node", **one} for one in NODES)]}
    message: list[str] = []
    monkeypatch.setattr(serving, "_kubectl", lambda *_: json.dumps(listing))
    monkeypatch.setattr(serving, "_reserved", lambda: KEPT)
    monkeypatch.setattr(serving, "_log", message.append)
    told = serving.round_(serving.round_(serving.round_({})))
    assert len(message) == 1
    assert list(told) == ["csr-1"]
    listing["items"] = []
    assert serving.round_(told) == {}


def test_an_address_that_two_nodes_claim_is_nobodys(key: Path) -> None:
    """A node reports its addresses itself: one that claims another's gets no certificate for it, in either's place."""
    claimed = [*NODES, node("worker-3", "worker-3", "10.0.0.11")]
    assert "not worker-1's alone" in serving.objection(spec(key), claimed, KEPT)


def test_no_cut_of_a_request_ends_the_service(key: Path) -> None:
    whole = base64.b64decode(spec(key)["request"]).decode().splitlines()
    der = base64.b64decode("".join(whole[1:-1]))
    for size in range(len(der)):
        cut = base64.b64encode(der[:size]).decode()
        request = base64.b64encode("\n".join([whole[0], cut, whole[-1]]).encode()).decode()
        assert serving.objection({**spec_of(request)}, NODES, KEPT) != ""


def spec_of(request: str) -> dict[str, Any]:
    return {"username": USER, "groups": ["system:nodes"], "usages": ["server auth"], "request": request}


def test_only_what_nobody_decided_on_is_looked_at() -> None:
    base = {"kind": "CertificateSigningRequest", "metadata": {"name": "a"}}
    mine = {**base, "spec": {"signerName": serving.SIGNER}}
    items = [
        mine,
        {**mine, "status": {"conditions": [{"type": "Denied"}]}},
        {**base, "spec": {"signerName": "kubernetes.io/kube-apiserver-client-kubelet"}},
        {"kind": "Node", "metadata": {"name": "n"}},
    ]
    assert serving.pending({"items": items}) == [mine]
