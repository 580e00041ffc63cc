"""Everything that is known of a cluster, for one page. Each source may fail: then its section has the reason.

Nothing is changed and no lock is taken: each section is what a command that only reads would show.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from gpunodes.engine import history, journal, scans, whole_file
from gpunodes.engine.fleet import InventoryFleet
from gpunodes.engine.history import HistoryEntry
from gpunodes.errors import ExitCode, Interrupted, WrongInput, sentence
from gpunodes.health.model import State, Verdict
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, MachineCertificates, PreflightFinding, Role, Severity
from gpunodes.operations import maintenance, preflight, scan, status, switched_off
from gpunodes.operations.autoscale import commands as autoscale
from gpunodes.operations.autoscale.commands import AutoscaleStatus, NoAutoscaler
from gpunodes.operations.certs import ends
from gpunodes.operations.maintenance import MaintainedNode
from gpunodes.operations.rolling import status as rolling
from gpunodes.operations.rolling.status import RolloutStatus
from gpunodes.operations.scan import ScanView
from gpunodes.operations.status import ClusterStatus
from gpunodes.operations.tracker import RunView
from gpunodes.planner import gpu, gpu_case, runtime_versions
from gpunodes.planner.candidates import MachineFacts
from gpunodes.repair.switched_off import Switched

T = TypeVar("T")
_RUNTIMES = ("containerd", "containerd.io", "docker.io", "docker-ce")
"""The packages of container runtimes."""
_ELSEWHERE = "certificates"
"""The check of preflight that has a section of its own."""


@dataclass(frozen=True, slots=True)
class Section(Generic[T]):
    """What one source reported, or None and the reason in one sentence."""

    value: T | None = None
    why: str = ""
    failed: bool = False
    """The source failed; otherwise there is nothing that it could report, or the user left it out."""


@dataclass(frozen=True, slots=True)
class ReportedMachine:
    """A machine of the inventory, with what each source knows of it; "" for what is unknown."""

    name: str
    address: str
    role: str
    pool: str
    node: str
    """The name of its node."""
    node_state: str
    """``ready``, ``not ready``, ``no node``, ``off``, or "" if no node is expected or the nodes are unknown."""
    node_reason: str
    """Why its node is not ready, or why it is off; whether it is in maintenance or cordoned."""
    kubernetes: str
    """The kubelet's version."""
    os: str
    kernel: str
    runtime: str
    """The container runtime's package and version."""
    driver: str
    cuda: str
    """The versions of its CUDA toolkits."""
    cudnn: str
    gpus: Mapping[str, int]
    """The number of GPUs of each product; None of them if its facts are unknown."""
    health: str
    """The state of its verdict."""
    not_read: str
    """Why its facts are unknown."""


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """The report. Times are seconds since 1970."""

    inventory: str
    name: str
    """The cluster's key: the address of its first control plane, or the path of an inventory without one."""
    began: float
    ended: float
    cluster: Section[ClusterStatus]
    certificates: Section[Sequence[MachineCertificates]]
    findings: Section[Sequence[PreflightFinding]]
    health: Section[Sequence[Verdict]]
    history: Section[Sequence[HistoryEntry]]
    rollout: Section[RolloutStatus]
    maintenance: Section[Sequence[MaintainedNode]]
    autoscale: Section[AutoscaleStatus]
    machines: Sequence[ReportedMachine] = field(default_factory=list)

    @property
    def exit_code(self) -> ExitCode:
        """PARTLY while a source failed, or while the command of a section would not exit with DONE."""
        return ExitCode.PARTLY if self._failed() or self._wrong() else ExitCode.DONE

    def _failed(self) -> bool:
        sections = (self.cluster, self.certificates, self.findings, self.health)
        return any(each.failed for each in (*sections, self.history, self.rollout, self.maintenance, self.autoscale))

    def _wrong(self) -> bool:
        scaled = self.autoscale.value
        return (
            any(not node.ready for node in (self.cluster.value.nodes if self.cluster.value else ()))
            or ends.exit_code(self.certificates.value or ()) is not ExitCode.DONE
            or any(each.severity is Severity.ERROR for each in self.findings.value or ())
            or any(each.state not in {State.HEALTHY, State.OFF} for each in self.health.value or ())
            or (scaled is not None and not scaled.healthy)
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """The views of what runs: of a playbook, and of the scan. Each is closed when that ends."""

    run: Callable[[], AbstractContextManager[RunView]]
    scan: Callable[[], AbstractContextManager[ScanView]]
    message: Callable[[str], None]


def gather(inventory: Inventory, progress: Progress, *, scanned: bool = True) -> ClusterReport:
    """Read all sources, one after the other; raises Interrupted, and nothing else that a source raises.

    Without control planes the nodes and their maintenance are read by the kubeconfig, if there is one, and nothing else
    of the cluster.

    ``scanned``: the machines are probed, too. Machines that the autoscaler keeps off are asked for nothing: they would
    count as failed.
    """
    began, machines, fleet = time.time(), inventory.select(()), InventoryFleet(inventory)
    off = _section(lambda: switched_off.read(inventory)).value or {}
    seen = _section(lambda: _inspected(inventory, [each for each in machines if each.name not in off], progress))
    health: Section[Sequence[Verdict]] = Section(why="left out by --no-scan")
    if scanned:
        health = _section(lambda: _verdicts(inventory, machines, off, progress))
    cluster: Section[ClusterStatus] = Section(why="the inventory has no control plane")
    certificates: Section[Sequence[MachineCertificates]] = Section(why=cluster.why)
    controls = cluster
    if inventory.machines(Role.CONTROL_PLANE):
        cluster = controls = _section(lambda: _played(progress, lambda view: status.run(inventory, view)))
        nodes = [each for each in inventory.machines(Role.CONTROL_PLANE, Role.WORKER) if each.name not in off]
        certificates = _section(lambda: _played(progress, lambda view: ends.run(inventory, nodes, view)))
    elif inventory.kubeconfig:
        cluster = _section(lambda: status.by_kubeconfig(inventory))
    return ClusterReport(
        inventory=str(inventory.path),
        name=inventory.cluster,
        began=began,
        cluster=cluster,
        certificates=certificates,
        findings=Section(seen.value[1] if seen.value else None, seen.why, seen.failed),
        health=health,
        history=_section(lambda: history.read(cluster=inventory.cluster)),
        rollout=_of_api(controls, lambda: rolling.read(fleet, lambda _, text: progress.message(text))),
        maintenance=_of_api(cluster, lambda: maintenance.listed(fleet, progress.message)),
        autoscale=_scaled(controls, fleet),
        machines=_machines(fleet, machines, seen.value[0] if seen.value else (), cluster.value, health.value or ()),
        ended=time.time(),
    )


def check(path: Path) -> None:
    """Raise WrongInput unless :func:`write` can make this file."""
    whole_file.check(path, "-o")


def write(path: Path, page: str) -> None:
    """Write the page in one step (0600: it has lines of logs); raises GpunodesError."""
    whole_file.write(path, page, 0o600, "the report")


def _section(read: Callable[[], T]) -> Section[T]:
    """The section that ``read`` returns, or why it failed. Machines may report anything: no error ends the report."""
    try:
        return Section(read())
    except Interrupted:
        raise
    except Exception as problem:
        return Section(why=sentence(problem), failed=True)


def _of_api(cluster: Section[ClusterStatus], read: Callable[[], T]) -> Section[T]:
    """The same for what the API of a cluster has: without one, each request would wait for it again."""
    if cluster.value is None:
        why = f"the cluster could not be read: {cluster.why}" if cluster.failed else cluster.why
        return Section(why=why, failed=cluster.failed)
    return _section(read)


def _scaled(cluster: Section[ClusterStatus], fleet: InventoryFleet) -> Section[AutoscaleStatus]:
    def read() -> AutoscaleStatus | None:
        with contextlib.suppress(NoAutoscaler):
            return autoscale.status(fleet)
        return None

    found = _of_api(cluster, read)
    return Section(found.value, found.why or ("" if found.value else "this cluster has no autoscaler"), found.failed)


def _played(progress: Progress, run: Callable[[RunView], T]) -> T:
    with progress.run() as view:
        return run(view)


def _inspected(
    inventory: Inventory, machines: Sequence[Machine], progress: Progress
) -> tuple[Sequence[MachineFacts], list[PreflightFinding]]:
    """The machines' facts, and the findings of preflight, which has the conflicts of the plans for GPUs, too.

    How control planes differ from their settings is in the section of the cluster.
    """
    alone = preflight.are_alone(inventory)
    version = preflight.requested_version(inventory, None, machines, without_cluster=alone)
    folder = journal.open_run("report")
    with progress.run() as view:
        view.begin("report", machines)
        seen = preflight.inspect(
            inventory, machines, folder, view, {"gpunodes_kubernetes_version": version}, alone=alone
        )
    if seen.interrupted:
        raise Interrupted
    found = preflight.findings_of(inventory, seen, version)
    return seen.candidates, [each for each in found if each.check != _ELSEWHERE]


def _verdicts(
    inventory: Inventory, machines: Sequence[Machine], off: Mapping[str, Switched], progress: Progress
) -> list[Verdict]:
    targets = scans.scan_targets(inventory, machines)
    with progress.scan() as view:
        return scan.run(targets, view, deadline_s=None, parallel=scans.PARALLEL, cluster=inventory.cluster, off=off)


def _machines(
    fleet: InventoryFleet,
    machines: Sequence[Machine],
    candidates: Sequence[MachineFacts],
    cluster: ClusterStatus | None,
    verdicts: Sequence[Verdict],
) -> list[ReportedMachine]:
    """Each machine with what the sources know of it."""
    known = {each.name: each for each in candidates}
    off = cluster.off if cluster else {}
    states = {each.name: each.state.value for each in verdicts}
    nodes = {node.machine: node for node in cluster.nodes if node.machine} if cluster else {}
    found = []
    for machine in machines:
        node, facts = nodes.get(machine.name), known[machine.name].facts if machine.name in known else None
        state, reason = _node_state(machine, cluster, nodes)
        found.append(
            ReportedMachine(
                name=machine.name,
                address=machine.address,
                role=machine.role.value,
                pool=_pool(fleet, machine),
                node=node.name if node else "",
                node_state=state,
                node_reason=reason,
                kubernetes=node.version if node else "",
                health=states.get(machine.name, ""),
                not_read=known[machine.name].unreachable if machine.name in known else off.get(machine.name, ""),
                **_software(facts),  # type: ignore[arg-type]  # texts, and the numbers of GPUs
            )
        )
    return found


def _node_state(
    machine: Machine, cluster: ClusterStatus | None, nodes: Mapping[str, status.NodeStatus]
) -> tuple[str, str]:
    if cluster is None or machine.role is Role.GPU_HOST:
        return "", ""
    if node := nodes.get(machine.name):
        return "ready" if node.ready else "not ready", node.reason
    return ("off", cluster.off[machine.name]) if machine.name in cluster.off else ("no node", "")


def _pool(fleet: InventoryFleet, machine: Machine) -> str:
    """The pool of a machine, "" for none, and for one whose settings are wrong."""
    with contextlib.suppress(WrongInput):
        return fleet.pool_label(machine.name)
    return ""


def _software(facts: Mapping[str, Any] | None) -> dict[str, str | Mapping[str, int]]:
    """What a machine runs, by its facts."""
    if facts is None:
        return {**dict.fromkeys(("os", "kernel", "runtime", "driver", "cuda", "cudnn"), ""), "gpus": {}}
    system, packages, found = facts["os"], runtime_versions.installed(facts), facts.get("gpu") or {}
    return {
        "os": system["name"] or " ".join(system[key] or "" for key in ("id", "version")).strip(),
        "kernel": facts["kernel"],
        "runtime": next((f"{name} {packages[name]}" for name in _RUNTIMES if name in packages), ""),
        "driver": gpu_case.installed_driver(found.get("driver") or {}),
        "cuda": ", ".join(sorted(found.get("cuda") or ())),
        # Its library, headers and samples are packages of one version.
        "cudnn": ", ".join(sorted(set((found.get("cudnn") or {}).values()))),
        "gpus": dict(Counter(each.product for each in gpu.gpus_of(facts))),
    }
