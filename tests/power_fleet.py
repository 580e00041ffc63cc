"""A cluster and machines in memory, for the power server. Nothing here is a BMC or an API server."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from gpunodes.autoscale import nodes, plan, state
from gpunodes.autoscale.kept_off import KeptOff
from gpunodes.autoscale.nodes import STARTING, SeenNode
from gpunodes.autoscale.plan import Plan
from gpunodes.autoscale.power import AlreadyOn
from gpunodes.autoscale.server import PowerServer
from gpunodes.autoscale.state import Kubelet, MachineState, Phase
from gpunodes.autoscale.store import POOL_LABEL, Overtaken
from gpunodes.engine.cluster.pods import Pod
from gpunodes.engine.leases.errors import Held
from gpunodes.engine.power import PowerProblem, PowerState, Trouble
from gpunodes.repair import switched_off
from gpunodes.repair.switched_off import Switched

GPU = "nvidia.com/gpu"
CAPACITY = {"cpu": "8", "memory": "64Gi", "pods": "110", GPU: "2"}
THREE = {"w1": "h100", "w2": "h100", "w3": "t4"}
POOLS = {"h100": (0, 2, 50), "t4": (0, 1, 10)}
"""Three machines by their pools, and these with their smallest and largest size and their priority."""


def uuid(name: str) -> str:
    return f"0000000{name[-1]}-1111-4111-8111-111111111111"


def machine_id(name: str) -> str:
    return uuid(name).replace("-", "")


def document(machines: Mapping[str, str], pools: Mapping[str, tuple[int, int, int]]) -> dict[str, Any]:
    """A plan: the pool of each machine, and min, max and priority of each pool."""
    return {
        "version": 1,
        "idle_s": 60.0,
        "boot_s": 100.0,
        "scan_s": 1.0,
        "pools": {
            name: {
                "min": least,
                "max": most,
                "priority": priority,
                "template": {
                    "labels": {POOL_LABEL: name, "gpunodes.dev/gpu": "true"},
                    "taints": [],
                    "capacity": CAPACITY,
                },
            }
            for name, (least, most, priority) in pools.items()
        },
        "authorities": {},
        "proof_image": "registry.example/plugin:1",
        "machines": {
            name: {
                "pool": pool,
                "bmc": {"gpunodes_bmc_type": "redfish", "gpunodes_bmc_address": f"{name}.bmc.example"},
                "identity": {"uuid": uuid(name), "serial": "", "macs": [], "machine_id": machine_id(name)},
                "address": "127.0.0.1",
                "capacity": CAPACITY,
            }
            for name, pool in machines.items()
        },
    }


def parsed(machines: Mapping[str, str], pools: Mapping[str, tuple[int, int, int]]) -> Plan:
    return plan.parse(document(machines, pools))


def node_object(name: str, *, gpus: int = 2, starting: bool = False, ready: bool = True, **more: Any) -> dict[str, Any]:
    """A node as its kubelet registers it; more: labels, annotations, provider, uuid, machine_id."""
    taints = [{"key": STARTING, "effect": "NoSchedule"}] if starting else []
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}-{time.monotonic()}",
            "labels": {POOL_LABEL: "h100", "kubernetes.io/hostname": name, **more.get("labels", {})},
            "annotations": more.get("annotations", {}),
        },
        "spec": {"providerID": more.get("provider", f"gpunodes://{name}"), "taints": taints},
        "status": {
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "capacity": {GPU: str(gpus)},
            "allocatable": {"cpu": "7500m", "memory": "60Gi", "pods": "110", GPU: str(gpus)},
            "nodeInfo": {
                "bootID": f"boot-{name}",
                "kubeletVersion": more.get("kubelet", "v1.36.3"),
                "systemUUID": more.get("uuid", uuid(name)),
                "machineID": more.get("machine_id", machine_id(name)),
            },
        },
    }


class MemoryStore:
    """What ``Store`` does, in memory."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, list[Pod]] = {}
        self.proofs: dict[str, dict[str, Any]] = {}
        """Pods that prove GPUs, by path: they succeed at once, but on ``broken`` nodes, or while it is ``slow``."""
        self.broken: set[str] = set()
        self.slow = False
        self.texts: dict[str, str] = {}
        self.version = 0
        self.events: list[tuple[str, str, str]] = []
        self.writes: list[dict[str, str]] = []
        self._read = 0
        self.off: dict[str, KeptOff] = {}
        self.api_server = "v1.36.3"

    def api_version(self) -> str:
        return self.api_server

    def kept_off(self) -> dict[str, KeptOff]:
        return dict(self.off)

    def keep_off(self, name: str, made: KeptOff | None) -> None:
        if made:
            self.off[name] = made
        else:
            self.off.pop(name, None)

    def states(self) -> dict[str, MachineState]:
        self._read = self.version
        found = {name: state.parse(text) for name, text in self.texts.items()}
        return {name: each for name, each in found.items() if each}

    def switched_off(self) -> dict[str, Switched]:
        return {name: each for name, each in switched_off.parse(self.texts).items() if each.on_purpose}

    def write(self, changes: Mapping[str, MachineState | None]) -> None:
        if self._read != self.version:
            raise Overtaken("another program changed the ConfigMap")
        self.version += 1
        self._read = self.version
        for name, each in changes.items():
            if each:
                self.texts[name] = each.text()
            else:
                self.texts.pop(name, None)
        self.writes.append({name: each.phase.value if each else "" for name, each in changes.items()})

    def seen_nodes(self) -> dict[str, SeenNode]:
        found = [nodes.seen(copy.deepcopy(each), POOL_LABEL) for each in self.objects.values()]
        return {each.node.name: each for each in found if each}

    def seen_node(self, name: str) -> SeenNode | None:
        return self.seen_nodes().get(name)

    def pods_on(self, name: str) -> list[Pod]:
        return self.pods.get(name, [])

    def change(self, name: str, make: Callable[[SeenNode], dict[str, Any] | None]) -> None:
        found = self.seen_nodes().get(name)
        patch = make(found) if found else None
        if not patch:
            return
        item = self.objects[name]
        for kind in ("labels", "annotations"):
            for key, value in patch.get("metadata", {}).get(kind, {}).items():
                if value is None:
                    item["metadata"][kind].pop(key, None)
                else:
                    item["metadata"][kind][key] = value
        if "taints" in patch.get("spec", {}):
            item["spec"]["taints"] = patch["spec"]["taints"]

    def pod(self, path: str) -> dict[str, Any] | None:
        return self.proofs.get(path)

    def create_pod(self, path: str, pod: dict[str, Any]) -> None:
        phase = "Failed" if pod["spec"]["nodeName"] in self.broken else "Succeeded"
        status = {"phase": phase if not self.slow else "Pending"}
        self.proofs[f"{path}/{pod['metadata']['name']}"] = {**pod, "status": status}

    def log(self, path: str) -> str:
        [container] = self.proofs[path]["spec"]["containers"]
        return "GPU 0: H100 (UUID: GPU-0)\n" * int(container["resources"]["limits"][GPU])

    def delete_pod(self, path: str) -> None:
        self.proofs.pop(path, None)

    def delete_node(self, name: str, may_go: Callable[[SeenNode], bool]) -> None:
        found = self.seen_node(name)
        if found and may_go(found):
            del self.objects[name]

    def event(self, node: str, reason: str, message: str, *, warning: bool) -> None:
        self.events.append((node, reason, "Warning" if warning else "Normal"))


class MemoryMachines:
    """Machines with a power state; ``refuses`` are those whose BMC refuses, with ``trouble``; ``refused`` counts it."""

    def __init__(self, on: set[str], plan: Plan | None = None) -> None:
        self.plan = plan
        self.on = set(on)
        self.refuses: set[str] = set()
        self.trouble = Trouble.REFUSED
        self.refused: list[str] = []
        self.locked: dict[str, str] = {}
        """Machines whose Lease another command holds, and its identity there."""
        self.kubelets: dict[str, Kubelet] = {}
        self.orders: list[tuple[str, str]] = []
        self.gate = threading.Event()
        self.gate.set()

    def state(self, name: str) -> PowerState:
        self._check(name)
        return PowerState.ON if name in self.on else PowerState.OFF

    def kubelet(self, name: str) -> Kubelet:
        return self.kubelets.get(name, Kubelet.SILENT)

    def switch_on(self, name: str, before: Callable[[], None], *, again: bool) -> None:
        self._take(name)
        before()
        self._check(name)
        if name in self.on and not again:
            raise AlreadyOn(f"{name} is on")
        self.orders.append((name, "on"))
        self.on.add(name)

    def switch_off(self, name: str, before: Callable[[], None], then: Callable[[], None]) -> None:
        self._take(name)
        self._check(name)
        before()
        assert self.gate.wait(10)
        self.orders.append((name, "off"))
        self.on.discard(name)
        then()

    def _take(self, name: str) -> None:
        if name in self.locked:
            raise Held(name, self.locked[name])

    def _check(self, name: str) -> None:
        if name in self.refuses:
            self.refused.append(name)
            # As the messages of programs, it is never the same twice.
            raise PowerProblem(self.trouble, f"the BMC of {name} refuses request {len(self.refused)}")


class Site:
    """A power server over both, and a clock that tests move."""

    def __init__(self, planned: Plan, *, on: set[str] | None = None) -> None:
        self.plan = planned
        self.time = 1_800_000_000.0
        self.store = MemoryStore()
        self.machines = MemoryMachines(on or set())
        for name in on or ():
            self.store.objects[name] = node_object(name, labels={POOL_LABEL: planned.machines[name].pool})
        self.server = self.new_server()

    def new_server(self) -> PowerServer:
        """A server that starts now, as after a kill of the last one."""
        server = PowerServer(self.plan, self.store, self.machines, lambda: self.time)  # type: ignore[arg-type]  # stand-ins
        server.begin()
        # Machines without a node are known when their BMCs have answered.
        self.looks_until(server, lambda: set(self.plan.machines) <= set(self.phases()))
        return server

    def look(self) -> None:
        """Let the server look at the cluster, and let the proofs that it begins come to their next step."""
        self.server.look()
        self.until(lambda: not self.server._proofs._busy)

    def phases(self) -> dict[str, Phase]:
        return {name: each.phase for name, each in self.store.states().items()}

    def until(self, seen: Callable[[], object]) -> None:
        """Wait for what a thread of the server does."""
        deadline = time.monotonic() + 10
        while not seen():
            assert time.monotonic() < deadline, self.store.texts
            time.sleep(0.01)

    def looks_until(self, server: PowerServer, seen: Callable[[], object]) -> None:
        """Let a server look at the cluster until something is seen."""

        def look() -> object:
            server.look()
            return seen()

        self.until(look)

    def settle(self, wanted: Mapping[str, Phase]) -> None:
        """Wait until machines have these phases in the store."""
        self.until(lambda: wanted.items() <= self.phases().items())

    def asks_until(self, seen: Callable[[], object]) -> None:
        """As ``looks_until``, and BMCs are asked again at each look."""

        def look() -> object:
            self.server._questions._asked.clear()
            self.server.look()
            return seen()

        self.until(look)

    def boots(self, name: str, **more: Any) -> None:
        """The machine's kubelet registers its node, with the starting taint, when it is on."""
        self.until(lambda: name in self.machines.on)
        self.store.objects[name] = node_object(name, starting=True, **more)


def looks(site: Site) -> None:
    """It sees the node, sees that its GPUs are proven, and that it is in service."""
    for _ in range(3):
        site.look()


def in_service(site: Site, name: str, **more: object) -> None:
    """Switch a machine on, let it boot, and bring it into service."""
    site.server.increase(site.plan.machines[name].pool, 1)
    site.settle({name: Phase.STARTING})
    site.boots(name, **more)
    looks(site)
    assert site.phases()[name] is Phase.ON
