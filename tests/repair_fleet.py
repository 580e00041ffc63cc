"""A cluster's API and machines in memory, for tests of repairs.

``Api`` replaces a session with a real API server (tests/repair uses a real one); ``Machine`` replaces a machine with
its BMC.
"""

# ruff: noqa: PLR0911 - it stands in for an API with many paths

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from gpunodes.engine import records
from gpunodes.engine.cluster.connection import Response
from gpunodes.engine.leases import expiry
from gpunodes.engine.machine_control import Boot, StepResult
from gpunodes.engine.power import Confirm, PowerProblem, Trouble
from gpunodes.engine.remote.shell import Reached
from gpunodes.engine.scans import MachineScan
from gpunodes.health.model import Action, Finding, State, Verdict
from gpunodes.model import Machine as Entry
from gpunodes.model import Role
from gpunodes.operations.repair import commands, tools
from gpunodes.operations.repair.running import Repairs
from gpunodes.repair.escalation import EscalationStep
from gpunodes.repair.policy import RepairLimits
from gpunodes.repair.record import RepairOutcome
from gpunodes.repair.request import RepairRequest
from gpunodes.repair.result import RepairResult

FACTS = {"smi": {"status": "ok"}, "pci": [], "expected": {"gpus": None, "from": None}}
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"


@dataclass
class Api:
    """Nodes, pods, leases and events, with resource versions and conflicts as the API has them."""

    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    leases: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    budgeted: set[str] = field(default_factory=set)
    """Pods whose eviction a disruption budget forbids."""
    refusal: str = "Cannot evict pod as it would violate the pod's disruption budget."
    sticky: set[str] = field(default_factory=set)
    """Pods that never terminate."""
    switched: dict[str, str] | None = None
    """The autoscaler's states by node; None: there was never an autoscaler."""
    kept_off: dict[str, str] | None = None
    """What commands told the autoscaler of machines that are off, by node."""
    scales: bool = False
    """Whether the autoscaler is there."""
    down: bool = False
    by_ssh: dict[str, str] | None = None
    """The holder of the SSH lock."""
    calls: int = 0
    version: int = 1
    before: Callable[[str, str], None] = lambda method, path: None

    def add_node(self, name: str, **labels: str) -> None:
        self.nodes[name] = {
            "metadata": {
                "name": name,
                "uid": f"uid-{name}",
                "labels": labels,
                "annotations": {},
                "resourceVersion": "1",
            },
            "spec": {},
            "status": {
                "conditions": [{"type": "Ready", "status": "True"}],
                "addresses": [{"type": "InternalIP", "address": f"addr-{name}"}],
                "nodeInfo": {"bootID": f"{name}-boot-1"},
                "capacity": {"nvidia.com/gpu": "8"},
                "allocatable": {"nvidia.com/gpu": "8"},
            },
        }

    def add_pod(self, name: str, node: str, owner: str = "ReplicaSet") -> None:
        self.pods[name] = {
            "metadata": {
                "name": name,
                "namespace": "default",
                "uid": f"uid-{name}",
                "ownerReferences": [{"kind": owner, "controller": True}] if owner else [],
            },
            "spec": {"nodeName": node},
            "status": {"phase": "Running"},
        }

    def request(
        self, method: str, path: str, body: Any = None, kind: str = "application/json", keep: Sequence[str] = ()
    ) -> Response:
        self.calls += 1
        self.before(method, path)
        if self.down:
            return Response(0, None, "connection refused", time.time())
        if method == "LOCK":
            return Response(200, self.by_ssh, "", time.time())
        status, answer = self._answer(method, urlsplit(path).path, parse_qs(urlsplit(path).query), copy.deepcopy(body))
        error = "" if status == 200 else f"the Kubernetes API reports: {answer}"
        return Response(status, copy.deepcopy(answer) if status == 200 else None, error, time.time())

    def close(self) -> None:
        pass

    def _answer(self, method: str, path: str, query: Mapping[str, list[str]], body: Any) -> tuple[int, Any]:
        if path == "/version":
            return 200, {}
        if path.startswith(LEASES):
            return self._lease(method, path.removeprefix(LEASES).strip("/"), body)
        if "/configmaps" in path:
            return self._config_map(method, path, body)
        if path.endswith("/deployments/gpunodes-autoscaler"):
            about = {"name": "gpunodes-autoscaler", "uid": "u", "resourceVersion": "1"}
            return (200, {"metadata": about}) if self.scales else (404, "not found")
        if path == "/api/v1/nodes":
            return 200, {"items": list(self.nodes.values())}
        if path.startswith("/api/v1/nodes/"):
            return self._a_node(method, unquote(path.rpartition("/")[2]), body)
        if path == "/api/v1/pods":
            if "labelSelector" in query:
                wanted = {tuple(each.split("=")) for each in query["labelSelector"][0].split(",")}
                found = [pod for pod in self.pods.values() if wanted <= set(pod["metadata"].get("labels", {}).items())]
                return 200, {"items": found}
            node = query["fieldSelector"][0].partition("=")[2]
            return 200, {"items": [pod for pod in self.pods.values() if pod["spec"]["nodeName"] == node]}
        if path.endswith("/eviction"):
            name = unquote(path.split("/")[-2])
            if name in self.budgeted:
                return 429, self.refusal
            self._end(name)
            return 200, {}
        if path.endswith("/events"):
            self.events.append(body)
            return 200, body
        if method == "DELETE" and "/pods/" in path:
            self.pods.pop(unquote(path.rpartition("/")[2]), None)
            return 200, {}
        raise AssertionError(f"{method} {path}")

    def _end(self, name: str) -> None:
        if name in self.sticky:
            self.pods[name]["metadata"]["deletionTimestamp"] = "now"
        else:
            self.pods.pop(name, None)

    def _config_map(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """The autoscaler's states, or what commands told it; only the second is ever created."""
        is_state = path.endswith("/gpunodes-autoscaler-state")
        if method == "POST":
            self.kept_off = {}
        data = self.switched if is_state else self.kept_off
        if data is None:
            return 404, "not found"
        if method in ("PATCH", "POST"):
            _merge(data, body["data"])
        about = {"name": path.rpartition("/")[2], "uid": "u", "resourceVersion": "1"}
        return 200, {"metadata": about, "data": data}

    def _a_node(self, method: str, name: str, body: Any) -> tuple[int, Any]:
        node = self.nodes.get(name)
        if node is None:
            return 404, "not found"
        if method == "PATCH":
            if body["metadata"].pop("resourceVersion") != node["metadata"]["resourceVersion"]:
                return 409, "conflict"
            _merge(node, body)
            self.version += 1
            node["metadata"]["resourceVersion"] = str(self.version)
        return 200, node

    def _lease(self, method: str, name: str, body: Any) -> tuple[int, Any]:
        found = self.leases.get(name)
        if method == "GET" and not name:
            return 200, {"items": list(self.leases.values())}
        if method == "POST":
            name = body["metadata"]["name"]
            if name in self.leases:
                return 409, "already exists"
            body["metadata"]["uid"] = f"uid-{self.version}"
        elif found is None:
            return 404, "not found"
        elif method == "GET":
            return 200, found
        elif method == "DELETE":
            version = found["metadata"]["resourceVersion"]
            if body["preconditions"].get("resourceVersion", version) != version:
                return 409, "conflict"
            del self.leases[name]
            return 200, {}
        elif body["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
            return 409, "conflict"
        else:
            body["metadata"]["uid"] = found["metadata"]["uid"]
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self.leases[name] = body
        return 200, body


def _merge(target: dict[str, Any], patch: Mapping[str, Any]) -> None:
    """JSON merge patch (RFC 7386)."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, Mapping):
            _merge(target.setdefault(key, {}), value)
        else:
            target[key] = value


@dataclass
class Machine:
    """A machine that is unhealthy until a step in ``cures`` reboots it; steps that do not reach it have no effect."""

    name: str
    api: Api
    sick: bool = True
    action: Action = Action.REBOOT
    hung: bool = True
    cures: frozenset[str] = frozenset({"reboot", "force", "sysrq", "bmc", "cold"})
    deaf: frozenset[str] = frozenset()
    """Escalation steps that do not bring it down."""
    bmc: str = "good"
    """good, none, down, refuses or lies."""
    sshd: bool = True
    off: bool = False
    boot: int = 1
    gpus: int = 8
    after: Verdict | None = None
    """The verdict after the repair, without boot and GPUs; None for a healthy machine."""
    done: list[str] = field(default_factory=list)
    reset: list[str] = field(default_factory=list)
    """The GPUs that the last step named."""

    @property
    def boot_id(self) -> str:
        return f"{self.name}-boot-{self.boot}"

    def verdict(self) -> Verdict:
        if self.off or not self.sshd:
            return Verdict(self.name, "live", State.UNREACHABLE, Action.NONE)
        if not self.sick and self.after:
            return dataclasses.replace(self.after, boot_id=self.boot_id, gpus_expected=self.gpus, gpus_seen=self.gpus)
        if not self.sick:
            return Verdict(
                self.name, "live", State.HEALTHY, Action.NONE, False, (), (), self.boot_id, self.gpus, self.gpus
            )
        rule = "hung-in-driver" if self.hung else "xid"
        finding = Finding(rule, "", self.action, State.HUNG if self.hung else State.SICK, evidence=("the line",))
        return Verdict(self.name, "live", finding.state, self.action, self.hung, (), (), self.boot_id, 8, 8, (finding,))

    def use(self, step: str) -> None:
        """An escalation step reaches the machine."""
        self.done.append(step)
        if step in self.deaf:
            return
        if step != "gpu-reset":
            self.boot += 1
            self.sshd = True
            self.off = False
            self.api.nodes[self.name]["status"]["nodeInfo"]["bootID"] = self.boot_id
        if step in self.cures:
            self.sick = False


class StandInControl:
    """engine.fleet.ControlsMachine for a machine in memory."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def boot(self) -> Boot:
        machine = self._machine
        if machine.off:
            return Boot(Reached.NO_RESPONSE)
        return Boot(Reached.ENDED, machine.boot_id, 1.0) if machine.sshd else Boot(Reached.REFUSED)

    def collect(self, folder: Path, facts: Mapping[str, Any] | None, *, bug_report: bool) -> list[str]:
        (folder / f"{self._machine.name}.kernel.log").write_text("the line\n")
        return [f"{self._machine.name}.kernel.log"]

    def run_step(
        self, step: EscalationStep, boot_id: str, later: Sequence[tuple[float, str]], gpus: Sequence[str]
    ) -> StepResult:
        if self._machine.off or not self._machine.sshd:
            return StepResult(False, "SSH does not respond")
        if boot_id and boot_id != self._machine.boot_id:
            return StepResult(False, "the machine has already rebooted")
        self._machine.reset = list(gpus)
        self._machine.use(step.name)
        return StepResult(True)

    def has_power(self) -> bool:
        return self._machine.bmc != "none"

    def reset(self, confirm: Confirm) -> None:
        self._power("bmc", confirm)

    def cold_cycle(self, confirm: Confirm) -> None:
        self._power("cold", confirm)

    def compared(self) -> None:
        """The BMC was compared with the machine."""

    def _power(self, step: str, confirm: Confirm) -> None:
        self.compared()
        confirm()
        if self._machine.bmc == "good":
            self._machine.use(step)
            return
        if self._machine.bmc == "lies":
            self._machine.off = True
            self._machine.done.append(step)
            return
        raise PowerProblem(Trouble(self._machine.bmc), f"the BMC is {self._machine.bmc}")


class Fleet:
    """engine.fleet.Fleet with machines in memory."""

    def __init__(self, api: Api, machines: Mapping[str, Machine], control_planes: Sequence[str] = ()) -> None:
        self.api = api
        self.machines = machines
        self._control_planes = control_planes
        self.scans = 0

    def all_machines(self) -> list[Entry]:
        return [
            Entry(name, f"addr-{name}", Role.CONTROL_PLANE if name in self._control_planes else Role.WORKER)
            for name in self.machines
        ]

    @property
    def cluster_name(self) -> str:
        return "test"

    def settings(self) -> dict[str, Any]:
        return {
            "gpunodes_repair_pool_label": "gpunodes.dev/pool",
            "gpunodes_repair_rescan_pause": 0,
            "gpunodes_repair_drain_timeout": 0.3,
            "gpunodes_repair_drain_timeout_hung": 0.2,
            "gpunodes_repair_boot_timeout": 0.3,
            "gpunodes_repair_verify_timeout": 0.5,
            "gpunodes_repair_settle": 0,
            "gpunodes_repair_evidence_days": 90,
            "gpunodes_repair_evidence_mib": 100,
            "gpunodes_rollout_drain_timeout": 0.3,
            "gpunodes_rollout_verify_timeout": 0.5,
        }

    def pool_label(self, name: str) -> str:
        return str(self.api.nodes[self.machines[name].name]["metadata"]["labels"].get("gpunodes.dev/pool", ""))

    def session(self) -> Any:
        return self.api

    def cordon(self, node: str, repair: str = "") -> None:
        """Cordon a node, by a repair or, as "", by a person with `kubectl cordon`."""
        found = self._changed(node)
        found["spec"]["unschedulable"] = True
        manager = "gpunodes" if repair else "kubectl"
        fields: dict[str, Any] = {"f:spec": {"f:unschedulable": {}}}
        found["metadata"]["managedFields"] = [{"manager": "kubelet"}, {"manager": manager, "fieldsV1": fields}]
        if repair:
            found["metadata"]["annotations"]["gpunodes.dev/cordoned-by"] = repair

    def uncordon(self, node: str) -> None:
        """`kubectl uncordon`: it leaves all annotations."""
        found = self._changed(node)
        found["spec"].pop("unschedulable", None)
        found["metadata"].pop("managedFields", None)

    def _changed(self, node: str) -> dict[str, Any]:
        self.api.version += 1
        self.api.nodes[node]["metadata"]["resourceVersion"] = str(self.api.version)
        return self.api.nodes[node]

    def lock(self, command: str, holder: str) -> Any:
        return contextlib.nullcontext(SimpleNamespace(lost=lambda: None))

    def machine_control(self, machine: Entry, **_: Any) -> Any:
        return StandInControl(self.machines[machine.name])

    def scan(self, machines: Sequence[Entry], *, full: bool = True) -> dict[str, MachineScan]:
        self.scans += len(machines)
        return {machine.name: MachineScan(self.machines[machine.name].verdict(), FACTS) for machine in machines}


def hurry(monkeypatch: pytest.MonkeyPatch, state: Path) -> None:
    """Use the test's own state folder and very short time limits of escalation steps; expired locks are not watched."""
    monkeypatch.setattr(expiry, "WATCHED", 0.0)
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    monkeypatch.setattr(EscalationStep, "limit", lambda self, hung: 0.1)
    made = tools.TimeLimits
    monkeypatch.setattr(tools, "TimeLimits", lambda **given: made(**{**given, "poll": 0.01}))


def fleet(number: int, sick: Sequence[str] = (), **special: Any) -> Fleet:
    """``number`` workers w0, w1, ...; those in ``sick`` are unhealthy, with ``special`` fields."""
    api = Api()
    machines = {}
    for index in range(number):
        name = f"w{index}"
        api.add_node(name)
        machines[name] = Machine(name, api, sick=name in sick, **(special if name in sick else {}))
    return Fleet(api, machines)


def run(place: Fleet, **request: Any) -> RepairResult:
    """Repair the machines of a fleet; ``request`` are fields of the request."""
    made = RepairRequest("health", request.pop("limits", RepairLimits()), **request)
    return commands.run(place, place.all_machines(), made, lambda *_: None)


class Killed(BaseException):
    """kill -9."""


def kill(place: Fleet, monkeypatch: pytest.MonkeyPatch, method: str, **request: Any) -> None:
    """Run a repair that dies in a method of the machine control; its Lease stays."""

    def dies(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(StandInControl, method, dies)
        patch.setattr(Repairs, "interrupt", lambda _: None)
        run(place, **request)


def resume(place: Fleet) -> RepairResult:
    """Resume the unfinished repairs of a fleet."""
    return commands.resume(place, RepairRequest("repair", RepairLimits()), lambda *_: None)


def outcomes(result: RepairResult) -> dict[str, RepairOutcome | None]:
    """The outcome of each machine."""
    return {each.machine: each.outcome for each in result.machines}


def clean(place: Fleet) -> None:
    """Nothing of gpunodes is left: no lock, no cordon, no mark, no record."""
    assert place.api.leases == {}
    assert records.read("test") == {}
    for node in place.api.nodes.values():
        assert not node["spec"].get("unschedulable")
        assert not node["spec"].get("taints")
        assert set(node["metadata"]["annotations"]) <= {"gpunodes.dev/repairs"}


def bury(place: Fleet) -> None:
    """Mark the holders of all locks as dead."""
    for lease in place.api.leases.values():
        if "holderIdentity" not in lease["spec"]:
            continue  # it was released
        parts = lease["spec"]["holderIdentity"].rsplit("/", 3)
        lease["spec"]["holderIdentity"] = "/".join([parts[0], "1", "0", parts[3]])


def control_planes(place: Fleet, *names: str) -> None:
    """Let machines be control planes, each with a member of etcd."""
    place._control_planes = names
    for name in names:
        place.api.nodes[name]["metadata"]["labels"]["node-role.kubernetes.io/control-plane"] = ""
        place.api.pods[f"etcd-{name}"] = {
            "metadata": {
                "name": f"etcd-{name}",
                "namespace": "kube-system",
                "uid": f"etcd-{name}",
                "labels": {"component": "etcd", "tier": "control-plane"},
                "annotations": {"kubernetes.io/config.mirror": "x"},
            },
            "spec": {"nodeName": name},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
        }
