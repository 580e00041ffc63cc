"""A machine whose certificate has ended: a real kubelet, a real API server, and kubeadm's rights of tokens.

It shows what the power server concludes from (the kubelet ends, and does not listen), and that a fresh token, as
`gpunodes join` makes one, helps: the kubelet requests a certificate with it, and kubeadm's own rule approves that.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpunodes.ansible.module_utils import facts, kubeconfig
from gpunodes.ansible.module_utils.cluster import tokens

from tests import node_certificates
from tests.programs import ending

from . import apiserver
from .apiserver import ApiServer

RBAC = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
REQUESTS = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
SECRETS = "/api/v1/namespaces/kube-system/secrets"
TOKENS = "system:bootstrappers:kubeadm:default-node-token"
# kubeadm 1.36, phases/bootstraptoken/node/tlsbootstrap.go
RIGHTS = {
    "kubeadm:kubelet-bootstrap": "system:node-bootstrapper",
    "kubeadm:node-autoapprove-bootstrap": "system:certificates.k8s.io:certificatesigningrequests:nodeclient",
}
LIMIT_S = 90.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    flags = {"authorization-mode": "Node,RBAC", "enable-bootstrap-token-auth": "true"}
    with apiserver.running(tmp_path_factory.mktemp("cluster"), flags) as made:
        apiserver.controllers(made, "csrapproving,csrsigning,bootstrapsigner")
        for name, role in RIGHTS.items():
            subject = {"kind": "Group", "name": TOKENS, "apiGroup": "rbac.authorization.k8s.io"}
            rule = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
            wait_for(made, role)
            made.call("POST", RBAC, {"metadata": {"name": name}, "roleRef": rule, "subjects": [subject]})
        info = {"kubeconfig": made.kubeconfig.read_text()}
        with contextlib.suppress(urllib.error.HTTPError):
            made.call("POST", "/api/v1/namespaces", {"metadata": {"name": "kube-public"}})
        made.call(
            "POST", "/api/v1/namespaces/kube-public/configmaps", {"metadata": {"name": "cluster-info"}, "data": info}
        )
        yield made


def names(server: ApiServer, path: str) -> set[str]:
    return {each["metadata"]["name"] for each in server.call("GET", path)["items"]}


def wait_for(server: ApiServer, role: str) -> None:
    """The API server makes its own roles when it has started."""
    until(lambda: role in names(server, RBAC.replace("bindings", "s")))


def until(seen: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.2)


class Kubelet:
    """The kubelet of the machine w1, with its files in a folder. Its container runtime accepts, and says nothing."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.port = apiserver.free_port()
        self.current = folder / "pki" / "kubelet-client-current.pem"
        self.conf, self.bootstrap = folder / "kubelet.conf", folder / "bootstrap-kubelet.conf"
        self._runtime = socket.socket(socket.AF_UNIX)
        self._runtime.bind(str(folder / "cri.sock"))
        self._runtime.listen()
        self.current.parent.mkdir()
        self.conf.write_text(self._kubeconfig(f"client-certificate: {self.current}\n    client-key: {self.current}"))
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": self.port,
            "healthzPort": 0,
            "rotateCertificates": True,
            "failSwapOn": False,
            "failCgroupV1": False,
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "authentication": {"x509": {"clientCAFile": str(server.folder / "ca.crt")}},
            "containerRuntimeEndpoint": f"unix://{folder}/cri.sock",
        }
        (folder / "config.yaml").write_text(json.dumps(config))

    def close(self) -> None:
        self._runtime.close()

    def certify(self, days: float) -> None:
        """Give it a certificate of the cluster that ends in so many days."""
        self.current.write_text(node_certificates.pem("w1", days, self.server.folder))

    def give(self, token: str) -> None:
        """What `kubeadm join` writes for the kubelet: kubelet.conf is made anew from it."""
        self.bootstrap.write_text(self._kubeconfig(f"token: {token}"))
        self.conf.unlink()
        self.current.unlink()

    def start(self) -> subprocess.Popen[bytes]:
        program = apiserver.programs()[0].with_name("kubelet")
        argv: list[str | Path] = [
            program,
            "--hostname-override=w1",
            f"--config={self.folder}/config.yaml",
            f"--kubeconfig={self.conf}",
        ]
        argv += [f"--bootstrap-kubeconfig={self.bootstrap}", f"--root-dir={self.folder}/root"]
        argv += [f"--cert-dir={self.current.parent}"]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(ending(argv), stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _kubeconfig(self, user: str) -> str:
        head, _, _ = self.server.kubeconfig.read_text().partition("users:")
        return (
            f"{head}users:\n- name: node\n  user:\n    {user}\n"
            "contexts:\n- name: test\n  context: {cluster: test, user: node}\ncurrent-context: test\n"
        )

    def listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False


@pytest.fixture
def kubelet(server: ApiServer, tmp_path: Path) -> Iterator[Kubelet]:
    made = Kubelet(server, tmp_path)
    yield made
    made.close()


def test_a_kubelet_whose_certificate_has_ended_ends_and_a_fresh_token_mends_it(
    server: ApiServer, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubeconfig, "ADMIN", str(server.kubeconfig))
    kubelet.certify(days=-1)
    assert facts._has_ended(str(kubelet.current))
    with kubelet.start() as process:
        assert process.wait(LIMIT_S) != 0
    assert "unable to load bootstrap kubeconfig" in (kubelet.folder / "log").read_text()
    assert not kubelet.listens(), "this is what the power server sees"
    assert not names(server, REQUESTS)

    token = tokens.create(900, 60)
    kubelet.give(token)
    for _ in range(5):
        # As systemd does: it waits a few seconds for its container runtime.
        with kubelet.start() as process:
            process.wait(LIMIT_S)
        if kubelet.current.exists():
            break
    assert not facts._has_ended(str(kubelet.current))
    request = server.call("GET", REQUESTS)["items"][0]
    assert request["spec"]["username"] == f"system:bootstrap:{token[:6]}"
    assert request["spec"]["signerName"] == "kubernetes.io/kube-apiserver-client-kubelet"
    assert request["status"]["conditions"][0]["message"].startswith("Auto approving")
    tokens.delete()
    assert not any(name.startswith("bootstrap-token-") for name in names(server, SECRETS))


def test_a_certificate_that_lasts_is_used(kubelet: Kubelet) -> None:
    """The negative control: such a kubelet needs no bootstrap kubeconfig, and goes on to its container runtime."""
    kubelet.certify(days=200)
    assert not facts._has_ended(str(kubelet.current))
    with kubelet.start() as process:
        assert process.wait(LIMIT_S) != 0
    log = (kubelet.folder / "log").read_text()
    assert "validate CRI v1 runtime API" in log
    assert "unable to load bootstrap kubeconfig" not in log
