"""The autoscaler and the power server with the arguments and rights of the role's objects, beside a real API server.

A machine is switched on by a stand-in BMC for a pod that waits, and off when the pod is gone. What a kubelet would do,
the test does; its kubelet serves the log of the pod that proves the GPUs.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import ssl
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes.ansible.module_utils import kubeconfig
from gpunodes.ansible.module_utils.cluster import objects
from gpunodes.autoscale.proof import NAMESPACE
from gpunodes.autoscale.store import POOL_LABEL
from gpunodes.lab.mirror import gobuild, pins, store
from gpunodes.operations.autoscale.objects import Objects

from tests import power_fleet, redfish
from tests.repair import apiserver, autoscaling
from tests.repair.addon_programs import replaced, running, token
from tests.repair.apiserver import MINOR, ApiServer
from tests.unit.test_autoscaler_role import rendered

GPU = power_fleet.GPU
ACCOUNT = "gpunodes-autoscaler"
PODS = "/api/v1/namespaces/default/pods"
LISTED = "GPU 0: H100 (UUID: GPU-0)\nGPU 1: H100 (UUID: GPU-1)\n"
LIMIT_S = 240.0
TIMES = {"idle_timeout": 3, "boot_timeout": 120, "scan_interval": 1, "drain_timeout": 60}


class Kubelet(http.server.BaseHTTPRequestHandler):
    """Serves the log of a container."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path.startswith(f"/containerLogs/{NAMESPACE}/proof-") else 404)
        self.end_headers()
        self.wfile.write(LISTED.encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    with apiserver.running(tmp_path, {"authorization-mode": "RBAC"}) as made:
        monkeypatch.setattr(kubeconfig, "ADMIN", str(made.kubeconfig))
        yield made


@pytest.fixture
def kubelet(server: ApiServer) -> Iterator[int]:
    """The port of a kubelet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.folder / "server.crt", server.folder / "server.key")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Kubelet) as serving:
        serving.socket = context.wrap_socket(serving.socket, server_side=True)
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield serving.server_port
        serving.shutdown()


def applied() -> dict[tuple[str, str], dict[str, Any]]:
    """The role's objects, in the cluster; a second time nothing changes."""
    pools = {"h100": {"priority": 50, "spare": 0, "taints": []}}
    found = rendered(autoscaler_pools=pools, **{f"autoscaler_{name}": value for name, value in TIMES.items()})
    label = "app.kubernetes.io/part-of=gpunodes-autoscaler"
    assert len(objects.apply(list(found.values()), check=False)[0]) == len(found)
    assert objects.apply(list(found.values()), check=False)[0] == []
    assert objects.delete(list(found.values()), label, check=False, keep=True)[0] == []
    return found


def register(server: ApiServer, port: int) -> None:
    """What the kubelet of the machine that was switched on does."""
    node = power_fleet.node_object("h1", starting=True, labels={POOL_LABEL: "h100", "gpunodes.dev/gpu": "true"})
    status = node.pop("status") | {
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
    }
    status["capacity"] |= {"cpu": "8", "memory": "64Gi", "pods": "110"}
    del node["metadata"]["uid"]
    server.call("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", **node})
    server.call("PATCH", "/api/v1/nodes/h1/status", {"status": status}, "application/merge-patch+json")


def account(server: ApiServer) -> Path:
    """A kubeconfig as the pod has it: with the token of its account in a file."""
    file, path = server.folder / "token", server.folder / "account.conf"
    file.write_text(token(server, "kube-system", ACCOUNT))
    document = yaml.safe_load(server.kubeconfig.read_text())
    document["users"][0]["user"] = {"tokenFile": str(file)}
    path.write_text(yaml.safe_dump(document))
    return path


def end_proofs(server: ApiServer) -> bool:
    """Let the pods that prove GPUs succeed; whether there was one."""
    items = server.call("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
    for item in items:
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{item['metadata']['name']}/status"
        server.call("PATCH", path, {"status": {"phase": "Succeeded"}}, "application/merge-patch+json")
    return bool(items)


@contextlib.contextmanager
def programs(server: ApiServer, found: dict[tuple[str, str], dict[str, Any]]) -> Iterator[list[Path]]:
    """Scheduler, power server and autoscaler; gives the logs of the latter two."""
    known = pins.load()
    with store.locked(apiserver.cache(), print):
        go = gobuild.toolchain(apiserver.cache(), known, print)
        scheduler = gobuild.programs(known.minors[MINOR].kubernetes, go, apiserver.cache(), print) / "kube-scheduler"
        built = gobuild.programs(known.components["cluster-autoscaler"], go, apiserver.cache(), print)
    rights = account(server)
    deployment = found["Deployment", ACCOUNT]["spec"]["template"]["spec"]
    own, power = deployment["containers"]
    address = f"unix://{server.folder}/power"
    config = server.folder / "cloud.yaml"
    config.write_text(
        found["ConfigMap", "gpunodes-autoscaler-cloud"]["data"]["cloud.yaml"].replace(
            "unix:///run/gpunodes/power/socket", address
        )
    )
    words = replaced(power["args"], {"--plan": server.folder / "plan.json", "--passwords": server.folder / "bmc"})
    assert power["command"][0] == "python"
    served = [sys.executable, *power["command"][1:], *words, f"--kubeconfig={rights}", f"--listen={address}"]
    changed = {"--cloud-config": config, "--address": f"127.0.0.1:{apiserver.free_port()}"}
    decides = [f"{built}{own['command'][0]}", *replaced(own["args"], changed), f"--kubeconfig={rights}"]
    binds = [str(scheduler), f"--kubeconfig={server.kubeconfig}", "--leader-elect=false", "--secure-port=0"]
    with contextlib.ExitStack() as held:
        held.enter_context(running(server, "scheduler", binds))
        yield [held.enter_context(running(server, name, argv)) for name, argv in (("power", served), ("ca", decides))]


def test_a_machine_is_switched_on_for_a_pod_and_off_again(server: ApiServer, kubelet: int) -> None:
    resets: list[str] = []
    bmc = redfish.fake("obeys", state="Off", resets=resets, hardware={"UUID": power_fleet.uuid("h1")})
    planned = power_fleet.document({"h1": "h100"}, {"h100": (0, 1, 50)})
    planned["machines"]["h1"]["bmc"] |= {
        "gpunodes_bmc_address": f"http://127.0.0.1:{bmc.server_port}", "gpunodes_bmc_user": "admin",
        "gpunodes_bmc_verify": "true", "gpunodes_bmc_identity": "check",
    }  # fmt: skip
    (server.folder / "plan.json").write_text(json.dumps(planned))
    (server.folder / "bmc").mkdir()
    (server.folder / "bmc" / "h1").write_text("secret")
    session = autoscaling.server_session(server)
    states = Objects(session)
    with programs(server, applied()) as logs:
        autoscaling.wait(lambda: "h1" in states.states(create=False), LIMIT_S)
        resources = {"limits": {GPU: "2"}, "requests": {GPU: "2"}}
        spec = {"containers": [{"name": "job", "image": "job", "resources": resources}]}
        server.call("POST", PODS, {"metadata": {"name": "first"}, "spec": spec})
        try:
            autoscaling.wait(lambda: resets == ["On"], LIMIT_S)
            register(server, kubelet)
            autoscaling.wait(lambda: end_proofs(server), LIMIT_S)
            autoscaling.wait(lambda: server.call("GET", f"{PODS}/first")["spec"].get("nodeName") == "h1", LIMIT_S)
            server.call("DELETE", f"{PODS}/first", {"gracePeriodSeconds": 0})
            autoscaling.wait(lambda: resets == ["On", "GracefulShutdown"], LIMIT_S)
            autoscaling.wait(lambda: server.call("GET", "/api/v1/nodes")["items"] == [], LIMIT_S)
            autoscaling.wait(lambda: states.states(create=False)["h1"].phase == "off", LIMIT_S)
        finally:
            texts = [path.read_text() for path in logs]
            print("\n====\n".join(text[-6000:] for text in texts))
    for text in texts:
        assert "forbidden" not in text.lower()
        assert "secret" not in text.replace("Secret", "").replace("secrets", "")
    session.close()
    bmc.shutdown()
