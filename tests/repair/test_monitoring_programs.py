"""The programs of the add-on monitoring: their arguments, configuration and rights, beside a real API server."""

from __future__ import annotations

import contextlib
import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.repair import apiserver
from tests.repair.addon_programs import (
    MERGE,
    NODE,
    container,
    get,
    installed,
    kubeconfig_of,
    program,
    replaced,
    running,
    token,
    until,
)
from tests.repair.apiserver import ApiServer

MONITORING, EXPORTERS = "gpunodes-monitoring", "gpunodes-node-exporter"
SICK = "gpu-2"
CONTROL_PLANE = "node-role.kubernetes.io/control-plane"
IN_A_POD = "/var/run/secrets/kubernetes.io/serviceaccount"


@pytest.fixture
def objects(server: ApiServer, verdicts: int, admin: None) -> tuple[dict[str, Any], ...]:  # noqa: ARG001 - a fixture
    """The add-on, installed with a target of its own, where its pods may run."""
    server.call("PATCH", f"/api/v1/nodes/{NODE}", {"metadata": {"labels": {CONTROL_PLANE: ""}}}, MERGE)
    targets = [f"127.0.0.1:{verdicts}"]
    return installed("monitoring", gpunodes_monitoring_grafana=False, gpunodes_monitoring_targets=targets)


class Verdicts(http.server.BaseHTTPRequestHandler):
    """What `gpunodes serve-metrics` serves: two machines, one of them sick, and a metric that is none of its own."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        for machine, state in ((NODE, "healthy"), (SICK, "sick")):
            line = f'gpunodes_machine_health_state{{machine="{machine}",state="{state}"}} 1\n'
            self.wfile.write(line.encode())
        self.wfile.write(b"node_memory_MemTotal_bytes 1\n")

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def verdicts() -> Iterator[int]:
    """The port of a server of verdicts."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Verdicts) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield serving.server_port
        serving.shutdown()


@contextlib.contextmanager
def kube_state_metrics(server: ApiServer, objects: tuple[dict[str, Any], ...]) -> Iterator[tuple[int, int]]:
    """Its ports: of the metrics, and of its own."""
    path = program("kube-state-metrics", "kube-state-metrics")
    words = container(objects, "kube-state-metrics")["args"]
    port, telemetry = apiserver.free_port(), apiserver.free_port()
    rights = kubeconfig_of(server, MONITORING, "kube-state-metrics")
    own = replaced(words, {"--port": port, "--telemetry-port": telemetry})
    with running(server, "kube-state-metrics", [str(path), *own, f"--kubeconfig={rights}"]) as log:
        until("it has the node", lambda: f'kube_node_info{{node="{NODE}"' in get(f"http://127.0.0.1:{port}/metrics"))
        yield port, telemetry
        assert "forbidden" not in log.read_text()


@contextlib.contextmanager
def node_exporter(server: ApiServer, objects: tuple[dict[str, Any], ...]) -> Iterator[int]:
    """Its port; it reads this machine instead of the folders of a pod."""
    path = program("node-exporter", "node_exporter")
    words = container(objects, "node-exporter")["args"]
    port = apiserver.free_port()
    own = [
        word.replace("/host/root", "/").replace("/host/", "/").replace("=:9100", f"=127.0.0.1:{port}") for word in words
    ]
    with running(server, "node-exporter", [str(path), *own]):
        until("it serves", lambda: get(f"http://127.0.0.1:{port}/metrics"))
        yield port


def test_kube_state_metrics_may_read_what_it_reports(server: ApiServer, objects: tuple[dict[str, Any], ...]) -> None:
    with kube_state_metrics(server, objects) as (port, telemetry):
        # The paths of its probes.
        assert get(f"http://127.0.0.1:{port}/livez")
        assert get(f"http://127.0.0.1:{telemetry}/readyz")
        text = get(f"http://127.0.0.1:{port}/metrics")
        assert f'kube_namespace_status_phase{{namespace="{MONITORING}",phase="Active"}} 1' in text
        assert 'kube_deployment_spec_replicas{namespace="gpunodes-monitoring",deployment="prometheus"} 1' in text
        assert "kube_secret_" not in text


def test_node_exporter_takes_its_arguments(server: ApiServer, objects: tuple[dict[str, Any], ...]) -> None:
    with node_exporter(server, objects) as port:
        text = get(f"http://127.0.0.1:{port}/metrics")
        assert "node_memory_MemTotal_bytes" in text
        assert "node_filesystem_size_bytes" in text
        assert "node_netstat" not in text
        assert 'mountpoint="/proc' not in text


def files(objects: tuple[dict[str, Any], ...]) -> dict[str, str]:
    """The configuration of Prometheus."""
    [found] = [each for each in objects if (each["kind"], each["metadata"]["name"]) == ("ConfigMap", "prometheus")]
    return dict(found["data"])


def configuration(server: ApiServer, objects: tuple[dict[str, Any], ...], ports: dict[str, int]) -> Path:
    """The files of the ConfigMap with the paths, addresses and ports that are here instead of in a cluster."""
    folder, account = server.folder / "prometheus", server.folder / "account"
    for each in (folder, account):
        each.mkdir()
    (account / "token").write_text(token(server, MONITORING, "prometheus"))
    shutil.copy(server.folder / "ca.crt", account / "ca.crt")
    rights = kubeconfig_of(server, MONITORING, "prometheus")
    in_cluster = "kubernetes_sd_configs:\n      - "
    changes = {
        # In a pod it finds the API server by itself.
        in_cluster: f"{in_cluster}kubeconfig_file: {rights}\n        ",
        IN_A_POD: str(account),
        "$1:6443": f"$1:{server.port}",
        "server_name: kubernetes.default.svc": "server_name: 127.0.0.1",
        "kube-state-metrics.gpunodes-monitoring.svc:8080": f"127.0.0.1:{ports['state']}",
        "127.0.0.1:9090": f"127.0.0.1:{ports['own']}",
        # Nothing here answers queries of names.
        "dns_sd_configs:\n      - names: [dcgm-exporter.gpunodes-dcgm.svc]\n        type: A\n        port: 9400\n": (
            "static_configs: []\n"
        ),
    }
    texts = files(objects)
    assert all(any(old in text for text in texts.values()) for old in changes)
    for name, text in texts.items():
        for old, new in changes.items():
            text = text.replace(old, new)  # noqa: PLW2901 - one change after the other
        (folder / name).write_text(text)
    return folder


def add_exporter_pod(server: ApiServer, objects: tuple[dict[str, Any], ...], port: int) -> None:
    """A pod of node exporter's DaemonSet, as a kubelet reports it."""
    [found] = [each for each in objects if each["kind"] == "DaemonSet"]
    pod = json.loads(json.dumps(found["spec"]["template"]))
    pod["metadata"]["name"] = "node-exporter-1"
    pod["spec"]["nodeName"] = NODE
    pod["spec"]["containers"][0]["ports"][0]["containerPort"] = port
    pods = f"/api/v1/namespaces/{EXPORTERS}/pods"
    server.call("POST", pods, pod)
    status = {"phase": "Running", "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}
    server.call("PATCH", f"{pods}/node-exporter-1/status", {"status": status}, MERGE)


def test_promtool_accepts_the_configuration(objects: tuple[dict[str, Any], ...], tmp_path: Path) -> None:
    promtool = program("prometheus", "promtool")
    for name, text in files(objects).items():
        (tmp_path / name).write_text(text)
    subprocess.run([promtool, "check", "config", "--syntax-only", tmp_path / "prometheus.yml"], check=True)


def query(promtool: str, address: str, expression: str) -> list[dict[str, str]]:
    """The labels of the series that a query gives."""
    argv = [promtool, "query", "--format=json", "instant", f"http://{address}", expression]
    done = subprocess.run(argv, capture_output=True, check=True)
    return [each["metric"] for each in json.loads(done.stdout)]


def test_prometheus_reads_all_of_its_targets_and_its_alerts_fire(
    server: ApiServer, objects: tuple[dict[str, Any], ...], verdicts: int
) -> None:
    path = program("prometheus", "prometheus")
    found = container(objects, "prometheus")
    promtool, port = str(path.with_name("promtool")), apiserver.free_port()
    address, target = f"127.0.0.1:{port}", f"127.0.0.1:{verdicts}"

    def labels(expression: str) -> set[tuple[str, str]]:
        return {(each["job"], each["instance"]) for each in query(promtool, address, expression)}

    with contextlib.ExitStack() as held:
        state, _ = held.enter_context(kube_state_metrics(server, objects))
        add_exporter_pod(server, objects, held.enter_context(node_exporter(server, objects)))
        folder = configuration(server, objects, {"state": state, "own": port})
        places = {"--config.file": folder / "prometheus.yml", "--storage.tsdb.path": folder / "data"}
        own = replaced(found["args"], {**places, "--web.listen-address": address})
        log = held.enter_context(running(server, "prometheus", [str(path), *own]))
        probe = [word.replace(":9090", f":{port}") for word in found["readinessProbe"]["exec"]["command"]]
        assert probe[0] == "/bin/promtool"
        ready = [promtool, *probe[1:]]
        until("it is ready", lambda: subprocess.run(ready, capture_output=True, check=False).returncode == 0)
        expected = {(job, NODE) for job in ("node-exporter", "kubelet", "cadvisor", "apiserver")}
        expected |= {("kube-state-metrics", "cluster"), ("prometheus", address), ("gpunodes", target)}
        until("all targets are up", lambda: labels("up == 1") == expected)
        assert labels("up == 0") == set()
        # Each job keeps the metrics of its own kind.
        assert labels("node_memory_MemTotal_bytes") == {("node-exporter", NODE)}
        assert labels("kube_node_info") == {("kube-state-metrics", "cluster")}
        assert labels("gpunodes_machine_health_state") == {("gpunodes", target)}
        [alert] = until("an alert fires", lambda: query(promtool, address, 'ALERTS{alertstate="firing"}'))
        assert (alert["alertname"], alert["machine"]) == ("GpunodesMachineSick", SICK)
        assert "forbidden" not in log.read_text()
