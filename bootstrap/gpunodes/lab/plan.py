"""The options of ``gpunodes lab up``, and the machines that are planned from them."""

from __future__ import annotations

import secrets
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from gpunodes.errors import WrongInput
from gpunodes.lab.host import memory_mib, used_networks
from gpunodes.lab.layout import Boards, Equipment, LabRecord, LabRole, Layout, Size, System, free_subnet, plan_machines

_CONTROL_PLANE = Size(memory_mib=4096, cpus=2)
# One of several: kubeadm's control plane with its images uses 0.7 GiB, and a joining one unpacks all images at once.
_ONE_OF_SEVERAL = Size(memory_mib=3072, cpus=2)
_WORKER_MIB = 2048


@dataclass(frozen=True)
class LabRequest:
    """The options of ``up``."""

    workers: int
    system: System
    inventory: Path
    minors: tuple[str, ...]
    """Kubernetes minors that the mirror offers; empty: a lab without a mirror."""
    gpu_workers: int = 0
    boards: Boards | None = None
    """The stand-in boards of each GPU worker."""
    cpus: int = 1
    """Of each worker. The default of 1 leaves more of a small host to the control plane."""
    equipment: Equipment = field(default_factory=Equipment)
    control_planes: int = 1
    extras: tuple[str, ...] = ()
    """Further images of the mirror."""
    docker: bool = False
    """Whether machines can install Docker although none has GPUs."""

    @property
    def standin(self) -> bool:
        """Whether the mirror has the stand-in tree: the software of GPUs, and Docker."""
        return bool(self.minors) and bool(self.gpu_workers or self.docker)


def plan(layout: Layout, request: LabRequest, accelerator: str) -> LabRecord:
    """The record of a new lab; raises WrongInput if the host has too little free memory."""
    subnet = free_subnet(used_networks())
    count = request.control_planes + request.workers + request.gpu_workers
    identities = [(str(uuid.uuid4()), secrets.token_urlsafe(12)) for _ in range(count)]
    control_plane = _CONTROL_PLANE if request.control_planes == 1 else _ONE_OF_SEVERAL
    sizes = {LabRole.CONTROL_PLANE: control_plane, LabRole.WORKER: Size(_WORKER_MIB, request.cpus)}
    machines = plan_machines(
        subnet,
        request.workers,
        sizes,
        identities,
        request.gpu_workers,
        request.boards,
        request.equipment,
        request.control_planes,
    )
    needed = sum(machine.memory_mib for machine in machines)
    if memory_mib() < needed:
        raise WrongInput(
            f"{memory_mib()} MiB of memory are free on this machine",
            f"{needed} MiB for the lab's machines",
            "use fewer --workers" if request.control_planes == 1 else "use fewer --workers or --control-planes",
        )
    return LabRecord(
        name=layout.name,
        system=request.system,
        subnet=str(subnet),
        accelerator=accelerator,
        machines=machines,
        inventory=str(request.inventory),
        mirror=None,
    )


def compare(record: LabRecord, request: LabRequest) -> None:
    """Raise WrongInput if the lab that is up differs from the requested one."""
    gpu_machines = [each for each in record.machines if each.boards]
    control_planes = len(record.control_planes)
    workers = len(record.machines) - len(gpu_machines) - control_planes
    pairs = [("workers", workers, request.workers), ("os", record.system, request.system)]
    pairs.append(("control-planes", control_planes, request.control_planes))
    pairs.append(("gpu-workers", len(gpu_machines), request.gpu_workers))
    if gpu_machines:
        pairs.append(("boards", gpu_machines[0].boards, request.boards))
    first = record.machines[0]
    pairs.append(("second-network", first.second_link is not None, request.equipment.second_network))
    pairs.append(("data-disk", first.data_disk, request.equipment.data_disk))
    pairs.append(("own-kernel", first.own_kernel, request.equipment.own_kernel))
    pairs.append(("inventory", record.inventory, str(request.inventory)))
    for option, existing, requested in pairs:
        if existing != requested:
            raise WrongInput(
                f"a lab is up with {option} {existing}",
                f"{option} {requested}",
                "run `gpunodes lab down` first, or request the same",
            )
