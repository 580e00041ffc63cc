"""The endpoint on machines and in the cluster: certificates, ARP, keepalived's check, kubeconfigs, static pods."""

from __future__ import annotations

import copy
import http.server
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes.ansible.module_utils import (
    api_check,
    certificate,
    containers,
    endpoints,
    facts,
    kubeconfig,
    ledger,
    static_pod_files,
    virtual_address,
)
from gpunodes.ansible.module_utils.cluster import endpoint as cluster_endpoint
from gpunodes.ansible.module_utils.cluster.nodes import NETWORK_LABEL
from gpunodes.ansible.module_utils.firewalls import firewalld, nftables, ufw
from gpunodes.ansible.module_utils.firewalls.wanted import check as check_ports
from gpunodes.ansible.module_utils.host import services
from gpunodes.ansible.module_utils.host.spec import Firewall
from gpunodes.ansible.module_utils.kubeadm import api_certificate, cluster_configuration, node_endpoint, static_pods
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.process import CommandResult
from gpunodes.planner import endpoint as planner_endpoint

STORED = """apiServer:
  extraArgs:
  - name: profiling
    value: "false"
apiVersion: kubeadm.k8s.io/v1beta4
certificatesDir: /etc/kubernetes/pki
controlPlaneEndpoint: 10.0.0.1:6443
controllerManager: {}
encryptionAlgorithm: ECDSA-P256
kind: ClusterConfiguration
kubernetesVersion: v1.36.3
networking:
  dnsDomain: cluster.local
  serviceSubnet: 10.96.0.0/12
"""
NEW = "10.0.0.10:6443"


class _Server(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/readyz" else 404)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    """An HTTPS server on the loopback interface: its port, and its certificate."""
    folder = tmp_path_factory.mktemp("server")
    argv = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=x -days 2 -keyout k -out c"
    names = "subjectAltName=DNS:kubernetes,DNS:api.example,IP:10.96.0.1,IP:127.0.0.1"
    subprocess.run([*argv.split(), "-addext", names], cwd=folder, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "c", folder / "k")
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    running.socket = context.wrap_socket(running.socket, server_side=True)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield running.server_address[1], (folder / "c").read_text()
    running.shutdown()
    running.server_close()


def test_the_names_of_a_certificate(server: tuple[int, str]) -> None:
    expected = ["kubernetes", "api.example", "10.96.0.1", "127.0.0.1"]
    assert certificate.names_of_pem(server[1]) == expected
    der = ssl.PEM_cert_to_DER_cert(server[1])
    assert certificate.names(der) == expected
    for end in (0, 1, 5, len(der) // 2, len(der) - 1):
        assert certificate.names(der[:end]) == []
    assert certificate.names_of_pem("-----BEGIN CERTIFICATE-----\n!!\n-----END CERTIFICATE-----") == []


def test_endpoints_report_what_is_behind_them(server: tuple[int, str]) -> None:
    port, pem = server
    good, refused, unknown = endpoints.read([f"127.0.0.1:{port}", "127.0.0.1:1", "no.such.invalid:6443"])
    assert good == {**good, "resolved": ["127.0.0.1"], "error": "", "names": certificate.names_of_pem(pem)}
    assert refused["resolved"] == ["127.0.0.1"]
    assert refused["error"]
    assert unknown["resolved"] == []
    assert endpoints.read([]) == []


def test_an_endpoint_of_another_cluster_is_refused(
    server: tuple[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, pem = server
    monkeypatch.setattr(kubeconfig, "CA", str(tmp_path / "ca"))
    (tmp_path / "ca").write_text(pem)
    api_certificate.check_leads(f"127.0.0.1:{port}")
    node_endpoint.verify(f"127.0.0.1:{port}", pem)
    with pytest.raises(MachineProblem, match="cannot use localhost"):
        # The certificate is for 127.0.0.1 only.
        node_endpoint.verify(f"localhost:{port}", pem)
    with pytest.raises(MachineProblem, match="does not lead to an API server of this cluster"):
        api_certificate.check_leads("127.0.0.1:1")


def test_who_may_have_the_virtual_address(
    server: tuple[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert api_check.is_ready("127.0.0.1", server[0])
    monkeypatch.setattr(_Server, "status", 500)
    assert not api_check.is_ready("127.0.0.1", server[0])
    assert not api_check.is_ready("127.0.0.1", 1)
    monkeypatch.setattr(api_check, "PEERS", str(tmp_path / "peers"))
    (tmp_path / "peers").write_text("# Managed by gpunodes.\n10.0.0.2\n10.0.0.3\n")
    for ready, first, exit_code in [
        ({"127.0.0.1"}, False, 0),
        (set(), False, 1),
        (set(), True, 0),
        ({"10.0.0.3"}, True, 1),
        ({"127.0.0.1", "10.0.0.3"}, True, 0),
    ]:
        monkeypatch.setattr(api_check, "is_ready", ready.__contains__)
        assert api_check.main(["first"] if first else []) == exit_code
    (tmp_path / "peers").write_text("# nobody\n")
    assert api_check.main(["first"]) == 0


def test_the_check_loads_little_each_time() -> None:
    """keepalived runs it every 2 s: a library that reads e-mail would double its processor time."""
    done = subprocess.run(
        [sys.executable, "-IS", "-X", "importtime", api_check.__file__], capture_output=True, text=True, check=False
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "ssl" in loaded
    assert not loaded & {"http.client", "email", "logging", "concurrent.futures"}


def test_arp() -> None:
    mac = "52:54:00:00:00:01"
    frame = virtual_address.probe(mac, "10.0.0.10")
    assert frame[:6] == b"\xff" * 6
    assert frame[28:32] == b"\0" * 4, "a probe changes no host's table"
    assert virtual_address.answer(frame, "10.0.0.10") == "", "a question is no answer"
    other = bytes.fromhex("525400000002")
    reply = frame[:20] + b"\0\2" + other + bytes([10, 0, 0, 10]) + frame[32:]
    assert virtual_address.answer(reply, "10.0.0.10") == "52:54:00:00:00:02"
    assert virtual_address.answer(reply, "10.0.0.11") == ""
    assert virtual_address.answer(reply[:30], "10.0.0.10") == ""


def test_firewalls_let_vrrp_in_from_control_planes_only() -> None:
    wanted = Firewall(ports={"vrrp 112": ["10.0.0.2"], "tcp 6443": []}, sources=["10.0.0.2", "10.0.0.9"])
    check_ports(wanted.ports, wanted.devices, wanted.sources)
    assert "ip saddr { 10.0.0.2 } meta l4proto 112 accept" in nftables.body("input", "inet", wanted)
    policy = firewalld.files(wanted)[f"{firewalld.ETC}/policies/{firewalld.INPUT}.xml"]
    assert '<source address="10.0.0.2"/><protocol value="vrrp"/><accept/>' in policy
    assert "allow from 10.0.0.2 proto vrrp" in ufw.rules(wanted)
    with pytest.raises(MachineProblem):
        check_ports({"vrrp 112; drop": []}, [])


@pytest.mark.parametrize(("version", "fails"), [("0.36.2", False), ("0.37", False), ("0.36.1", True), ("?", True)])
def test_an_old_ufw_has_no_rules_for_vrrp(version: str, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ufw, "run", lambda argv: CommandResult(argv, 0, f"ufw {version}\nCopyright 2008", ""))
    ufw.check_vrrp(["allow 6443/tcp"])
    if not fails:
        ufw.check_vrrp(["allow from 10.0.0.2 proto vrrp"])
        return
    with pytest.raises(MachineProblem, match=r"-s 10\.0\.0\.2 -j ACCEPT"):
        ufw.check_vrrp(["allow from 10.0.0.2 proto vrrp"])


def test_kubeadms_configuration_is_changed_like_yaml() -> None:
    after = cluster_configuration.changed(STORED, NEW, ["10.0.0.1", "10.0.0.10"])
    expected = yaml.safe_load(STORED)
    expected["controlPlaneEndpoint"] = NEW
    expected["apiServer"]["certSANs"] = ["10.0.0.1", "10.0.0.10"]
    assert yaml.safe_load(after) == expected
    assert cluster_configuration.changed(after, NEW, ["10.0.0.1", "10.0.0.10"]) == after
    assert cluster_configuration.names(after) == ["10.0.0.1", "10.0.0.10"]
    bare = "apiServer: {}\napiVersion: v\nkind: ClusterConfiguration\n"
    made = yaml.safe_load(cluster_configuration.changed(bare, NEW, ["x"]))
    assert made == {**yaml.safe_load(bare), "apiServer": {"certSANs": ["x"]}, "controlPlaneEndpoint": NEW}


@pytest.mark.parametrize(
    "text", ["", "{}", "kind: ClusterConfiguration\n", "apiServer: {certSANs: [x]}\nkind: ClusterConfiguration\n"]
)
def test_a_configuration_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(MachineProblem, match="a form that kubeadm does not write"):
        cluster_configuration.changed(text, NEW, ["x"])
    with pytest.raises(MachineProblem, match="is invalid"):
        cluster_configuration.changed(STORED, NEW, ["x\n  - y"])


def test_the_server_of_a_kubeconfig() -> None:
    text = "clusters:\n- cluster:\n    server: https://10.0.0.1:6443\n  name: a\n"
    assert kubeconfig.with_server(text, "https://x:1") == text.replace("https://10.0.0.1:6443", "https://x:1")
    for wrong in ("", text + text):
        with pytest.raises(MachineProblem, match="servers"):
            kubeconfig.with_server(wrong, "https://x:1")


@pytest.fixture
def manifests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "state/ledger.json"))
    monkeypatch.setattr(static_pod_files, "FOLDER", str(tmp_path / "manifests"))
    monkeypatch.setattr(static_pods, "AWAY", str(tmp_path / "away"))
    monkeypatch.setattr(static_pods, "_POLL_S", 0.01)
    (tmp_path / "manifests").mkdir()
    path = tmp_path / "manifests/kube-apiserver.yaml"
    path.write_text("pod")
    return path


def test_a_static_pod_is_restarted(manifests: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away: list[bool] = []

    def ids(_: str) -> list[str]:
        if manifests.exists():
            return ["new"] if away else ["old"]
        away.append(True)
        assert ledger.load().manifests == {"kube-apiserver": f"{static_pods.AWAY}/kube-apiserver.yaml"}
        return ["old"] if len(away) == 1 else []

    monkeypatch.setattr(containers, "ids", ids)
    static_pods.restart("kube-apiserver", ledger.load(), 5, manifests.exists)
    assert len(away) == 2
    assert manifests.read_text() == "pod"
    assert ledger.load().manifests == {}


def test_a_restart_that_is_killed_is_healed_by_the_next_run(manifests: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(_: str) -> list[str]:
        if manifests.exists():
            return ["old"]
        # Nothing after a kill -9 runs, `finally` neither: the state on the disk is what the next run finds.
        saved["away"] = Path(static_pods.AWAY, manifests.name).read_text()
        saved["ledger"] = Path(ledger.PATH).read_text()
        raise KeyboardInterrupt

    saved: dict[str, str] = {}
    monkeypatch.setattr(containers, "ids", killed)
    with pytest.raises(KeyboardInterrupt):
        static_pods.restart("kube-apiserver", ledger.load(), 5, lambda: True)
    assert manifests.exists(), "an interruption that Python sees moves it back at once"
    manifests.unlink()
    Path(static_pods.AWAY, manifests.name).write_text(saved["away"])
    Path(ledger.PATH).write_text(saved["ledger"])
    assert static_pods.heal(ledger.load()) == ["kube-apiserver"]
    assert manifests.read_text() == "pod"
    assert ledger.load().manifests == {}


def test_containers_that_do_not_end_leave_the_manifest_in_its_place(
    manifests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "ids", lambda _: ["id"])
    with pytest.raises(MachineProblem, match="does not end"):
        static_pods.restart("kube-apiserver", ledger.load(), 0.02, lambda: True)
    assert manifests.exists()
    with pytest.raises(MachineProblem, match="does not exist"):
        static_pods.restart("etcd", ledger.load(), 1, lambda: True)


class Api:
    """A cluster in memory: objects by path, and the controller that makes kube-proxy's pods."""

    def __init__(self) -> None:
        template = {"metadata": {"labels": {"k8s-app": "kube-proxy"}}, "spec": {"containers": []}}
        variables = [
            {"name": "KUBERNETES_SERVICE_HOST", "value": "10.0.0.1"},
            {"name": "KUBERNETES_SERVICE_PORT", "value": "6443"},
            {"name": "POD", "valueFrom": {}},
        ]
        flannel = {
            "metadata": {"labels": {NETWORK_LABEL: "flannel"}},
            "spec": {"containers": [{"name": "f", "env": variables}], "initContainers": [{"name": "i"}]},
        }
        config = "server: https://10.0.0.1:6443\n"
        self.objects: dict[str, Any] = {
            api_certificate.KUBEADM_CONFIG: {"data": {"ClusterConfiguration": STORED}},
            "/api/v1/namespaces/kube-public/configmaps/cluster-info": {"data": {"kubeconfig": config}},
            "/api/v1/namespaces/kube-system/configmaps/kube-proxy": {"data": {"kubeconfig.conf": config, "c": "x"}},
            cluster_endpoint._PROXY: {"spec": {"template": template}},
            "/apis/apps/v1/namespaces/kube-flannel/daemonsets/flannel": {"spec": {"template": flannel}},
        }
        for path, each in self.objects.items():
            parts = path.split("/")
            each["metadata"] = {"name": parts[-1], "namespace": parts[-3], "resourceVersion": "1"}
        self.ready = {"a": True, "b": True, "dead": False}
        self.pods = [self.pod(kind, node) for node in self.ready for kind in ("kube-proxy", "flannel")]
        self.deleted: list[str] = []
        self.patches: list[str] = []
        self.fails_at = 10**9

    def daemonset(self, kind: str) -> Any:
        return next(each for path, each in self.objects.items() if path.endswith(f"/daemonsets/{kind}"))

    def pod(self, kind: str, node: str) -> dict[str, Any]:
        found = self.daemonset(kind)
        template = copy.deepcopy(found["spec"]["template"])
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        meta = {**template["metadata"], "name": f"{kind}-{node}", "namespace": found["metadata"]["namespace"]}
        return {"metadata": meta, "spec": {**template["spec"], "nodeName": node}, "status": status}

    def find(self, path: str) -> Any:
        return copy.deepcopy(self.objects.get(path))

    def get(self, path: str, **query: str) -> Any:
        if path == "/api/v1/nodes":
            return {
                "items": [
                    {"metadata": {"name": n}, "status": {"conditions": [{"type": "Ready", "status": str(ok)}]}}
                    for n, ok in self.ready.items()
                ]
            }
        if path.endswith("/pods"):
            assert path.split("/")[4] in {"kube-system", "kube-flannel"}, "users give their own pods any label"
            kind = "kube-proxy" if "kube-proxy" in query["labelSelector"] else "flannel"
            return {"items": [each for each in self.pods if each["metadata"]["name"].startswith(kind)]}
        # Of all namespaces only to tell of those that are not changed.
        kind = path if "/namespaces/" in path else path.rpartition("/")[2]
        return {"items": [copy.deepcopy(each) for name, each in self.objects.items() if f"{kind}/" in name]}

    def call(self, _: str, path: str, body: Mapping[str, Any], *__: Any) -> Any:
        if len(self.patches) >= self.fails_at:
            raise MachineProblem("killed")
        self.patches.append(path.rpartition("/")[2])

        def merge(into: dict[str, Any], change: Mapping[str, Any]) -> None:
            for key, value in change.items():
                if isinstance(value, Mapping):
                    merge(into.setdefault(key, {}), value)
                else:
                    into[key] = value

        merge(self.objects[path], body)

    def delete(self, path: str) -> bool:
        name = path.rpartition("/")[2]
        self.deleted.append(name)
        kind, node = name.rpartition("-")[::2]
        self.pods = [each for each in self.pods if each["metadata"]["name"] != name]
        self.pods.append(self.pod(kind, node))
        return True


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    monkeypatch.setattr(cluster_endpoint, "_POLL_S", 0.001)
    return Api()


def moved(api: Api, *, check: bool = False) -> list[str]:
    client: Any = api
    return cluster_endpoint.move(client, NEW, 5, check).actions


def test_the_cluster_moves_to_another_endpoint(api: Api) -> None:
    assert len(moved(api, check=True)) == 6
    assert api.patches == []
    assert api.deleted == []
    moved(api)
    texts = [each["data"] for each in api.objects.values() if "data" in each]
    assert "controlPlaneEndpoint: 10.0.0.10:6443" in texts[0]["ClusterConfiguration"]
    assert cluster_configuration.names(texts[0]["ClusterConfiguration"]) == ["10.0.0.1", "10.0.0.10"]
    assert texts[1]["kubeconfig"] == texts[2]["kubeconfig.conf"] == "server: https://10.0.0.10:6443\n"
    variables = api.daemonset("flannel")["spec"]["template"]["spec"]["containers"][0]["env"]
    assert variables[0]["value"] == "10.0.0.10"
    assert variables[2] == {"name": "POD", "valueFrom": {}}
    assert sorted(api.deleted) == ["flannel-a", "flannel-b", "kube-proxy-a", "kube-proxy-b"], "not on a dead node"
    assert moved(api) == []
    assert cluster_endpoint.others(api, NEW) == []  # type: ignore[arg-type]  # a cluster of the test


@pytest.mark.parametrize("steps", range(5))
def test_a_move_that_is_killed_anywhere_is_completed_by_the_next_one(steps: int, api: Api) -> None:
    api.fails_at = steps
    with pytest.raises(MachineProblem, match="killed"):
        moved(api)
    api.fails_at = 10**9
    assert moved(api)
    assert moved(api, check=True) == []
    assert sorted(api.patches) == ["cluster-info", "flannel", "kube-proxy", "kube-proxy", "kubeadm-config"]


def test_what_users_label_as_the_network_is_neither_changed_nor_waited_for(api: Api) -> None:
    """A user of one namespace could stop the move of the endpoint, and have the pods there deleted again and again."""
    theirs = copy.deepcopy(api.daemonset("flannel"))
    theirs["metadata"] = {"name": "theirs", "namespace": "lab", "resourceVersion": "1"}
    api.objects["/apis/apps/v1/namespaces/lab/daemonsets/theirs"] = theirs
    moved(api)
    assert "theirs" not in api.patches
    assert cluster_endpoint.others(api, NEW) == ["DaemonSet lab/theirs"]  # type: ignore[arg-type]  # as above


def test_a_node_that_comes_back_is_moved_by_the_next_run(api: Api) -> None:
    moved(api)
    api.ready["dead"] = True
    assert moved(api) == ["replace 2 pods of kube-proxy and the network"]
    assert api.deleted[-2:] == ["kube-proxy-dead", "flannel-dead"]


def test_parts_that_an_administrator_removed_are_left_out(api: Api) -> None:
    for path in list(api.objects):
        if "kube-proxy" in path or "cluster-info" in path:
            del api.objects[path]
    api.pods = []
    assert moved(api) == ["change kubeadm's configuration in the cluster", "change the DaemonSet flannel"]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kubeconfigs of a control plane whose kubelet uses the API server of its own machine."""
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "state/ledger.json"))
    monkeypatch.setattr(facts, "API_SERVER", str(tmp_path / "manifest"))
    monkeypatch.setattr(kubeconfig, "KUBELET", str(tmp_path / "kubelet.conf"))
    monkeypatch.setattr(node_endpoint, "_FOLDER", str(tmp_path))
    monkeypatch.setattr(node_endpoint, "_OF_PEOPLE", (str(tmp_path / "admin.conf"), str(tmp_path / "none.conf")))
    monkeypatch.setattr(node_endpoint, "_OF_KUBELET", (str(tmp_path / "kubelet.conf"),))
    monkeypatch.setattr(node_endpoint, "verify", lambda *_: None)
    monkeypatch.setattr(node_endpoint, "_wait_for_node", lambda *_: None)
    (tmp_path / "manifest").write_text("- --advertise-address=10.0.0.1\n")
    for name in ("admin", "kubelet", "controller-manager", "scheduler"):
        path = tmp_path / f"{name}.conf"
        path.write_text("    server: https://10.0.0.1:6443\n    certificate-authority-data: eA==\n")
        path.chmod(0o600)
    return tmp_path


def servers(node: Path) -> dict[str, str]:
    return {each.stem: kubeconfig.parse(each.read_text()).server for each in node.glob("*.conf")}


def move_node(restarts: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    def start(name: str, verb: str) -> None:
        restarts.append(f"{verb} {name}")

    monkeypatch.setattr(services, "start", start)
    return node_endpoint.move(NEW, "control-1", 5, False).actions


def test_a_control_plane_keeps_its_own_api_server(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restarts: list[str] = []
    assert len(move_node(restarts, monkeypatch)) == 1
    local = dict.fromkeys(("kubelet", "controller-manager", "scheduler"), "https://10.0.0.1:6443")
    assert servers(node) == {**local, "admin": "https://10.0.0.10:6443"}
    assert restarts == []
    assert (node / "admin.conf").stat().st_mode & 0o777 == 0o600
    assert move_node(restarts, monkeypatch) == []


def test_a_worker_moves_and_restarts_its_kubelet(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (node / "manifest").unlink()
    restarts: list[str] = []
    assert len(move_node(restarts, monkeypatch)) == 3
    assert servers(node)["kubelet"] == "https://10.0.0.10:6443"
    assert restarts == ["restart kubelet"]
    assert move_node(restarts, monkeypatch) == []


def test_a_kubelet_that_was_not_restarted_is_restarted_by_the_next_run(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node / "manifest").unlink()

    def killed(*_: Any) -> None:
        raise MachineProblem("killed")

    with monkeypatch.context() as early:
        early.setattr(node_endpoint, "_wait_for_node", killed)
        with pytest.raises(MachineProblem, match="killed"):
            move_node([], early)
    restarts: list[str] = []
    assert move_node(restarts, monkeypatch) == ["restart kubelet"]
    assert restarts == ["restart kubelet"]


def test_nothing_changes_on_a_machine_that_does_not_reach_the_endpoint(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise MachineProblem("this machine cannot use it")

    before = servers(node)
    monkeypatch.setattr(node_endpoint, "verify", refused)
    with pytest.raises(MachineProblem, match="cannot use"):
        move_node([], monkeypatch)
    assert servers(node) == before
    assert not Path(ledger.PATH).exists()


@pytest.mark.parametrize(("text", "value"), [("1970-01-01T00:01:00.5Z", 60), ("", 0), ("1970-13-01T00:00:00Z", 0)])
def test_times_of_kubernetes(text: str, value: int) -> None:
    assert node_endpoint.seconds(text) == value


@pytest.mark.parametrize(
    ("files", "confined"),
    [
        ({"enforce": "1", "booleans/keepalived_connect_any": "0 0"}, True),
        ({"enforce": "1", "booleans/keepalived_connect_any": "1 1"}, False),
        ({"enforce": "0", "booleans/keepalived_connect_any": "0 0"}, False),
        ({"enforce": "1"}, False),  # a policy without that rule
        ({}, False),
    ],
)
def test_selinux_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], confined: bool
) -> None:
    (tmp_path / "booleans").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(virtual_address, "_SELINUX", str(tmp_path))
    assert virtual_address.is_confined() is confined


@pytest.fixture
def keepalived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration of a keepalived of gpunodes."""
    settings = planner_endpoint.EndpointSettings(vip="10.0.0.10")
    made = planner_endpoint.keepalived(settings, "eth0", "10.0.0.11", [], "", first=False)
    [text] = [each.content for each in made.files if each.path == planner_endpoint.CONFIG]
    config = tmp_path / "keepalived.conf"
    config.write_text(text)
    monkeypatch.setattr(virtual_address, "CONFIG", str(config))
    monkeypatch.setattr(virtual_address, "_PAUSE_S", 0)
    return config


def leads(monkeypatch: pytest.MonkeyPatch, *resolved: str, error: str = "") -> list[str]:
    """Let every endpoint lead to these addresses; returns what systemctl does."""
    done = list[str]()
    monkeypatch.setattr(endpoints, "read", lambda listed: [{"resolved": [*resolved], "error": error} for _ in listed])
    monkeypatch.setattr(virtual_address, "must", lambda argv: done.append(argv[1]))
    return done


def test_the_keepalived_of_gpunodes_is_given_up(keepalived: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = leads(monkeypatch, "10.0.0.5")
    assert (virtual_address.read("10.0.0.20") or {})["others"] == ["10.0.0.10"]
    assert (virtual_address.read("10.0.0.10") or {})["others"] == []
    would = virtual_address.give_up("api.example:6443", check=True)
    assert (len(would.actions), keepalived.exists(), done) == (2, True, [])
    assert virtual_address.give_up("api.example:6443", check=False).actions == would.actions
    assert (keepalived.exists(), done) == (False, ["stop", "disable"])
    assert virtual_address.give_up("api.example:6443", check=False).actions == []
    keepalived.write_text("vrrp_instance of_an_administrator {\n}\n")
    assert virtual_address.give_up("api.example:6443", check=False).actions == []


def test_a_virtual_address_behind_the_new_endpoint_stays(keepalived: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name leads to it, or a load balancer does, which shows only when the address is gone."""
    done = leads(monkeypatch, "10.0.0.10")
    with pytest.raises(MachineProblem, match=r"leads to the virtual address 10\.0\.0\.10 of keepalived"):
        virtual_address.give_up("api.example:6443", check=False)
    assert done == []
    done = leads(monkeypatch, "10.0.0.5", error="timed out")
    with pytest.raises(MachineProblem, match=r"without that: timed out"):
        virtual_address.give_up("api.example:6443", check=False)
    assert (keepalived.exists(), done) == (True, ["stop", "start"])
