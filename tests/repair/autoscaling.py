"""The real cluster-autoscaler and a real scheduler beside a real API server; machines and kubelets are simulated.

A machine that is switched on registers its node after BOOT_S, and offers its GPUs GPUS_S later. Nothing here is a BMC
or a kernel.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpunodes.autoscale import plan, service
from gpunodes.autoscale.nodes import MORE_GPUS, POWER_OFF, STOPPING
from gpunodes.autoscale.plan import Plan
from gpunodes.autoscale.power import AlreadyOn, PoweredMachines
from gpunodes.autoscale.proof import NAMESPACE
from gpunodes.autoscale.server import PowerServer
from gpunodes.autoscale.state import Kubelet
from gpunodes.autoscale.store import POOL_LABEL, Store
from gpunodes.engine.cluster import connection
from gpunodes.engine.cluster.session import Session
from gpunodes.engine.power import PowerProblem, PowerState, Trouble
from gpunodes.lab.mirror import gobuild, pins
from gpunodes.lab.mirror import store as cached

from tests.power_fleet import GPU, document, node_object, uuid
from tests.programs import ending

from .apiserver import MINOR, ApiServer, cache, free_port

BOOT_S, GPUS_S = 2.0, 4.0
SYSTEM = {"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
"""Labels with which a kubelet registers its node."""
_PROOFS = f"/api/v1/namespaces/{NAMESPACE}/pods"
_OPTIONS = {
    "cloud-provider": "externalgrpc",
    "startup-taint": "gpunodes.dev/starting",
    "expander": "priority",
    "namespace": "kube-system",
    "leader-elect": "false",
    "scan-interval": "1s",
    "scale-down-unneeded-time": "4s",
    "scale-down-delay-after-add": "2s",
    "scale-down-unready-time": "20s",
    "max-node-provision-time": "40s",
    "max-total-unready-percentage": "100",
    "skip-nodes-with-system-pods": "false",
    "v": "2",
}
"""The options of the role `autoscaler`, with shorter times."""
_BOOT_TIMES = ("max-node-provision-time", "scale-down-unready-time")
"""Those that the role sets to gpunodes_autoscale_boot_timeout."""
_STATUS_TAINTS = [f"--status-taint={taint}" for taint in (STOPPING, MORE_GPUS)]


class StoreWithLogs(Store):
    """The store; a simulated kubelet has no logs, so that of a pod is made here."""

    def log(self, path: str) -> str:
        return "GPU 0: H100 (UUID: GPU-0)\nGPU 1: H100 (UUID: GPU-1)\n"


class SimulatedMachines:
    """The machines of a plan: BMCs of ``refuses`` refuse, ``dead`` ones never register, GPUs of ``broken`` fail."""

    def __init__(self, server: ApiServer, planned: Plan) -> None:
        self.plan = planned
        self._server = server
        self.on: dict[str, float] = {}
        self.orders: list[tuple[str, str]] = []
        self.refuses: set[str] = set()
        self.dead: set[str] = set()
        self.broken: set[str] = set()
        self._mutex = threading.Lock()

    def state(self, name: str) -> PowerState:
        return PowerState.ON if name in self.on else PowerState.OFF

    def kubelet(self, name: str) -> Kubelet:
        return Kubelet.DOWN if name in self.dead else Kubelet.RUNS

    def switch_on(self, name: str, before: Callable[[], None], *, again: bool) -> None:
        before()
        self._check(name)
        with self._mutex:
            if name in self.on and not again:
                raise AlreadyOn(f"{name} is on")
            self.orders.append((name, "on"))
            self.on[name] = time.monotonic()
        if name not in self.dead:
            threading.Thread(target=self._boot, args=(name,), daemon=True).start()

    def switch_off(self, name: str, before: Callable[[], None], then: Callable[[], None]) -> None:
        self._check(name)
        before()
        with self._mutex:
            self.orders.append((name, "off"))
            self.on.pop(name, None)
        then()

    def _check(self, name: str) -> None:
        if name in self.refuses:
            raise PowerProblem(Trouble.REFUSED, f"the BMC of {name} refuses")

    def _boot(self, name: str) -> None:
        time.sleep(BOOT_S)
        pool = self.plan.machines[name].pool
        labels = {POOL_LABEL: pool, "gpunodes.dev/gpu": "true", **SYSTEM}
        node = node_object(name, gpus=0, starting=True, labels=labels)
        node = {"apiVersion": "v1", "kind": "Node", **node}
        del node["metadata"]["uid"]
        status = node.pop("status")
        self._server.call("POST", "/api/v1/nodes", node)
        self._status(name, status)
        time.sleep(GPUS_S)
        status["capacity"][GPU] = status["allocatable"][GPU] = "2"
        self._status(name, status)

    def end_proofs(self) -> None:
        """What the kubelets do with the pods that prove GPUs."""
        for item in self._server.call("GET", _PROOFS)["items"]:
            phase = "Failed" if item["spec"]["nodeName"] in self.broken else "Succeeded"
            if item["status"].get("phase") != phase:
                path = f"{_PROOFS}/{item['metadata']['name']}/status"
                self._server.call("PATCH", path, {"status": {"phase": phase}}, "application/merge-patch+json")

    def _status(self, name: str, status: Mapping[str, Any]) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        conditions = [
            {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "", "lastHeartbeatTime": now}
        ]
        capacity = {**status["allocatable"], **status["capacity"]}
        body = {"status": {**status, "capacity": capacity, "conditions": conditions}}
        self._server.call("PATCH", f"/api/v1/nodes/{name}/status", body, "application/merge-patch+json")


@contextlib.contextmanager
def running(
    server: ApiServer,
    pools: Mapping[str, tuple[int, int, int]],
    machines: Mapping[str, str],
    connect: Callable[[StoreWithLogs], PoweredMachines] | None = None,
    boot_s: float | None = None,
) -> Iterator[Site]:
    """Scheduler, autoscaler and power server for these machines (name: pool) and pools (min, max, priority).

    ``connect`` makes the power control of the machines in place of simulated ones. ``boot_s`` is how long a machine may
    take to come into service, in place of short times that are enough for a few.
    """
    planned = plan.parse(document(machines, pools) | ({"boot_s": boot_s} if boot_s else {}))
    fleet = SimulatedMachines(server, planned)
    with contextlib.ExitStack() as held:
        session = held.enter_context(contextlib.closing(server_session(server)))
        restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
        server.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE, "labels": restricted}})
        server.call("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", {"metadata": {"name": "default"}})
        store = StoreWithLogs(session)
        power = PowerServer(planned, store, connect(store) if connect else fleet)
        power.begin()
        address = f"unix://{server.folder}/power"
        listening = service.start(power, address)
        held.callback(lambda: listening.stop(None).wait())
        stop = threading.Event()
        looking = threading.Thread(target=_look, args=(power, fleet, stop), daemon=True)
        looking.start()
        held.callback(looking.join, 10)
        held.callback(stop.set)
        lines = "".join(f"{each[2]}:\n  - ^{name}$\n" for name, each in pools.items())
        _create(server, "configmaps", "cluster-autoscaler-priority-expander", {"data": {"priorities": lines}})
        limits = dict.fromkeys(_BOOT_TIMES, f"{boot_s:.0f}s") if boot_s else {}
        for name, argv in _programs(server, address, limits).items():
            held.enter_context(_process(server.folder / f"{name}.log", argv))
        yield Site(server, fleet, power, session)


def server_session(server: ApiServer) -> Session:
    """A session of the power server with the test's API server."""
    return Session(connection.here(sys.executable, server.kubeconfig))


def _look(power: PowerServer, machines: SimulatedMachines, stop: threading.Event) -> None:
    while not stop.wait(1):
        machines.end_proofs()
        power.look()


def _programs(server: ApiServer, address: str, limits: Mapping[str, str]) -> dict[str, list[str]]:
    known = pins.load()
    with cached.locked(cache(), print):
        go = gobuild.toolchain(cache(), known, print)
        scheduler = gobuild.programs(known.minors[MINOR].kubernetes, go, cache(), print) / "kube-scheduler"
        autoscaler = gobuild.programs(known.components["cluster-autoscaler"], go, cache(), print) / "cluster-autoscaler"
    config = server.folder / "cloud.yaml"
    # As the role has it: an order of many machines is one write, which waits for those of machines that start.
    config.write_text(f"address: {address}\ngrpc_timeout: 30s\n")
    # By default its metrics are at port 8085, which another run may have.
    address = f"127.0.0.1:{free_port()}"
    options = {**_OPTIONS, **limits, "kubeconfig": server.kubeconfig, "cloud-config": config, "address": address}
    same = ["--kubeconfig", str(server.kubeconfig), "--leader-elect=false", "--secure-port=0"]
    return {
        "scheduler": [str(scheduler), *same],
        "autoscaler": [str(autoscaler), *_STATUS_TAINTS, *(f"--{name}={value}" for name, value in options.items())],
    }


@contextlib.contextmanager
def _process(log: Path, argv: Sequence[str]) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(ending(argv), stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)


def _create(server: ApiServer, kind: str, name: str, content: Mapping[str, Any]) -> None:
    server.call("POST", f"/api/v1/namespaces/kube-system/{kind}", {"metadata": {"name": name}, **content})


def node(server: ApiServer, name: str, provider: str) -> None:
    """A ready node with everything that the autoscaler and the power server set."""
    own = ["gpunodes.dev/starting", "gpunodes.dev/stopping", "ToBeDeletedByClusterAutoscaler"]
    notes = {
        "cluster-autoscaler.kubernetes.io/scale-down-disabled": "true",
        "gpunodes.dev/autoscaler-disabled": "maintenance",
        POWER_OFF: "boot",
    }
    taints = [{"key": key, "effect": "NoSchedule"} for key in [*own, "yours"]]
    body = {"metadata": {"name": name, "annotations": notes}, "spec": {"providerID": provider, "taints": taints}}
    server.call("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", **body})
    status = {
        "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}],
        "nodeInfo": {"systemUUID": uuid(name), "bootID": f"boot-{name}"},
    }
    server.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, "application/merge-patch+json")


def write_plan(folder: Path, port: int) -> dict[str, Any]:
    """Write the files of the power server for h1, whose BMC is a service on loopback; its plan."""
    planned = document({"h1": "h100"}, {"h100": (0, 1, 0)})
    planned["machines"]["h1"]["bmc"] = {
        "gpunodes_bmc_type": "redfish",
        "gpunodes_bmc_address": f"http://127.0.0.1:{port}",
        "gpunodes_bmc_user": "admin",
        "gpunodes_bmc_verify": "true",
        "gpunodes_bmc_identity": "check",
    }
    (folder / "plan.json").write_text(json.dumps(planned))
    (folder / "bmc").mkdir()
    (folder / "bmc" / "h1").write_text("secret")
    return planned


@contextlib.contextmanager
def program(server: ApiServer, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m gpunodes.autoscale`, as in its pod, with a kubeconfig, and with the files of ``write_plan``."""
    words = [f"--plan={folder}/plan.json", f"--passwords={folder}/bmc", f"--kubeconfig={server.kubeconfig}"]
    argv = [sys.executable, "-m", "gpunodes.autoscale", *words, f"--listen=unix://{folder}/socket"]
    with (folder / "power.log").open("ab") as log:
        process = subprocess.Popen(ending(argv), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def wait(seen: Callable[[], object], limit_s: float = 60) -> None:
    """Wait until something is seen."""
    deadline = time.monotonic() + limit_s
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.2)


class Site:
    """What tests do and see."""

    def __init__(self, server: ApiServer, machines: SimulatedMachines, power: PowerServer, session: Session) -> None:
        self.server = server
        self.machines = machines
        self.power = power
        self.session = session

    def pod(self, name: str, pool: str = "", labels: Mapping[str, str] = MappingProxyType({})) -> None:
        """A pod that wants both GPUs of a node, of a pool if one is named, and with ``labels``."""
        resources = {"limits": {GPU: "2"}, "requests": {GPU: "2"}}
        spec: dict[str, Any] = {"containers": [{"name": "job", "image": "job", "resources": resources}]}
        spec["nodeSelector"] = {**labels, **({POOL_LABEL: pool} if pool else {})}
        # Owned, as pods are that something starts again: others keep a node on.
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "job", "uid": "1", "controller": True}
        metadata = {"name": name, "ownerReferences": [owner]}
        self.server.call("POST", "/api/v1/namespaces/default/pods", {"metadata": metadata, "spec": spec})

    def node_of(self, name: str) -> str:
        """The node of a pod, "" while it waits."""
        found = self.server.call("GET", f"/api/v1/namespaces/default/pods/{name}")
        return str(found["spec"].get("nodeName") or "")

    def delete_pod(self, name: str) -> None:
        body = {"gracePeriodSeconds": 0}
        self.server.call("DELETE", f"/api/v1/namespaces/default/pods/{name}", body)

    def started(self) -> list[str]:
        return [name for name, order in self.machines.orders if order == "on"]

    def until(self, seen: Callable[[], object], limit_s: float = 120) -> float:
        """Seconds until something is seen."""
        began = time.monotonic()
        while not seen():
            tail = (self.server.folder / "autoscaler.log").read_text()[-3000:]
            assert time.monotonic() - began < limit_s, f"{self.machines.orders}\n{tail}"
            time.sleep(0.2)
        return time.monotonic() - began
