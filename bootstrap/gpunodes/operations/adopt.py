"""Compare a cluster that kubeadm made with one of gpunodes, and write its inventory. The cluster is not changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpunodes.engine import control_planes, journal
from gpunodes.engine.cluster.adopted import Adopted
from gpunodes.errors import ExitCode, GpunodesError, Interrupted, WrongInput
from gpunodes.inventory import Inventory, addressed, edit
from gpunodes.kubeconfig import parse_yaml
from gpunodes.model import Role, Severity
from gpunodes.operations import preflight
from gpunodes.operations.tracker import RunView
from gpunodes.planner import adoption, drift
from gpunodes.planner.adoption import AdoptedNode, Adoption, Fit, Row
from gpunodes.planner.candidates import Growth

_NAME = "adopt"


@dataclass(frozen=True, slots=True)
class Adopting:
    """The comparison, and the inventory: ``path`` is that of the file, None if none was to be written."""

    document: Mapping[str, Any]
    rows: Sequence[Row]
    path: Path | None

    @property
    def exit_code(self) -> ExitCode:
        """Whether everything can stay as it is."""
        return ExitCode.PARTLY if any(each.fit is Fit.WRONG for each in self.rows) else ExitCode.DONE


def run(
    address: str,
    connection: Mapping[str, object],
    path: Path,
    view: RunView,
    confirm: Callable[[Sequence[AdoptedNode]], None],
    *,
    write: bool,
) -> Adopting:
    """Read the cluster of the control plane at ``address`` and all its machines; write the inventory to ``path``.

    ``connection``: Ansible's connection variables of all machines. ``confirm`` may raise: the cluster names the
    machines that get the user's credentials. Raises WrongInput for a file that exists, before a machine is contacted,
    and GpunodesError for a cluster that cannot be adopted.
    """
    if write and path.exists():
        raise WrongInput(f"{path} exists already", "a new file for the inventory", "name another one with -i")
    found = read(addressed.inventory([address], connection, role=Role.CONTROL_PLANE))
    confirm(found.nodes)
    document = adoption.document(found, connection)
    rows = [*found.rows, *_machines(Inventory(addressed.file_of(document), given=f"the cluster of {address}"), view)]
    if write:
        edit.create(path, document)
    return Adopting(document, rows, path if write else None)


def read(first: Inventory) -> Adoption:
    """The cluster by its API, over its one control plane in the inventory ``first``; raises GpunodesError."""
    with contextlib.closing(control_planes.session(first)) as session:
        reading = Adopted(session, patience_s=0.0).read()
    if reading.configuration is None:
        raise GpunodesError(
            "the cluster has no ConfigMap kubeadm-config in kube-system",
            "a cluster that kubeadm made",
            "use its kubeconfig: `gpunodes help --page other-clusters`",
        )
    try:
        configuration = parse_yaml(reading.configuration)
    except ValueError:
        raise GpunodesError("kubeadm's ConfigMap is not valid YAML", "what kubeadm wrote", "correct it") from None
    return adoption.adopted(reading.version, configuration, reading.nodes, reading.daemon_sets, reading.slices)


def _machines(inventory: Inventory, view: RunView) -> list[Row]:
    """What preflight finds on the machines, by one read of each; a machine without a finding is as it should be."""
    machines = inventory.machines()
    version = preflight.requested_version(inventory, None, machines)
    view.begin(_NAME, machines)
    seen = preflight.inspect(
        inventory,
        machines,
        journal.open_run(_NAME),
        view,
        {"gpunodes_kubernetes_version": version, "control_plane_foreign": True},
        sources=False,
        compares=True,
    )
    if seen.interrupted:
        raise Interrupted
    findings = preflight.judge(seen, version, growth=Growth.NONE)
    rows = [
        Row(
            each.machine,
            each.check,
            each.problem.found,
            each.problem.wanted or each.problem.remedy,
            Fit.WRONG if each.severity is Severity.ERROR else Fit.OTHER,
        )
        for each in findings
        if each.check != drift.CHECK
    ]
    rows += [
        Row(each.machine, "settings", text, "the defaults of gpunodes", Fit.OTHER)
        for each in seen.differing
        for text in _settings(each)
    ]
    named = {each.machine for each in rows}
    rows += [
        Row(each.name, "preflight", "no finding", "no finding", Fit.SAME) for each in machines if each.name not in named
    ]
    return rows


def _settings(found: drift.MachineDrift) -> Iterator[str]:
    """How a control plane differs from the settings."""
    yield from (each.text for each in found.differences)
    if found.left_out:
        yield f"{found.left_out} more differences"
    if found.problem:
        yield f"not known: {found.problem}"
