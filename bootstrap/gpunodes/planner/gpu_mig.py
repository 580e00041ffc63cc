"""MIG: whether the GPUs of a machine can be sliced as its settings request, and the unit that keeps them so. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpunodes.ansible.module_utils import devices
from gpunodes.ansible.module_utils.host.spec import File, Service, Spec
from gpunodes.planner import tables
from gpunodes.planner.gpu_case import Case, Row, cite, number
from gpunodes.planner.gpu_model import Gpu

UNIT = "gpunodes-mig"
PROGRAM = "/usr/local/libexec/gpunodes/gpu-mig"
_MEMORY = {7: 8, 4: 4}
"""Memory slices of a card by its compute slices."""


def judge(case: Case, branch: str) -> None:
    """Refuse a layout that a GPU of the machine cannot have; explain the others."""
    layout = devices.layout(case.requested.sharing)
    if not layout:
        return
    for gpu in dict.fromkeys(case.gpus):
        _judge(case, gpu, layout, branch)
    if case.conflicts:
        return
    offered = ", ".join(f"{name}: {count}" for name, count in devices.offered(case.requested.sharing, 1).items())
    case.explain(f"MIG {text(layout)}", f"requested; for each GPU the node offers {offered}", _source())
    if any(gpu.generation == "ampere" for gpu in case.gpus):
        case.explain(
            "reset for MIG",
            "the mode of Ampere GPUs changes with a reset: nvidia-smi tries it, else the machine must be rebooted",
            tables.read("mig")["sources"]["guide"],
        )


def _judge(case: Case, gpu: Gpu, layout: Mapping[str, int], branch: str) -> None:
    card = next((row for row in tables.read("mig")["card"] if int(gpu.device, 16) in row["devices"]), None)
    if card is None:
        case.refuse(
            f"{gpu.product} has no MIG profiles in the table, and {text(layout)} is requested",
            f"one of {', '.join(row['name'] for row in tables.read('mig')['card'])} ({_source()})",
            "remove gpunodes_gpu_sharing from this pool, or put the machine into another pool",
        )
        return
    unknown = [name for name in layout if name not in card["profiles"]]
    if unknown:
        case.refuse(
            f"{gpu.product} has no MIG profile {unknown[0]}",
            f"one of {', '.join(card['profiles'])} ({cite('mig', card)})",
            "correct gpunodes_gpu_sharing, or put machines with other cards into a pool of their own",
        )
        return
    shapes = [shape for name, count in layout.items() for shape in [_shape(card, name)] * count]
    if not fits(shapes, card["slices"]):
        case.refuse(
            f"{text(layout)} do not fit on one {gpu.product}",
            f"instances of {card['slices']} compute and {_MEMORY[card['slices']]} memory slices together"
            f" ({cite('mig', shapes[0])})",
            "request fewer or smaller instances",
        )
    for shape in shapes:
        if branch and number(branch) < shape.get("driver", 0):
            case.refuse(
                f"driver {branch} has no instances of one compute slice with double memory",
                f"driver {shape['driver']} or newer ({cite('mig', shape)})",
                "request a newer driver",
            )
            return


def fits(shapes: Sequence[Row], slices: int) -> bool:
    """Whether instances of these shapes have a place on a card with so many compute slices."""

    def placed(left: Sequence[Row], used: frozenset[int]) -> bool:
        if not left:
            return True
        size = left[0]["memory"]
        places = (frozenset(range(start, start + size)) for start in left[0]["starts"])
        return any(not used & place and placed(left[1:], used | place) for place in places)

    largest = sorted(shapes, key=lambda shape: -shape["memory"])
    return sum(shape["compute"] for shape in shapes) <= slices and placed(largest, frozenset())


def _shape(card: Row, name: str) -> Row:
    shapes = [row for row in tables.read("mig")["shape"] if row["slices"] == card["slices"]]
    found: Row = shapes[card["profiles"].index(name)]
    return found


def _source() -> str:
    return str(tables.read("mig")["sources"]["mig-parted"])


def text(layout: Mapping[str, int]) -> str:
    """``7 x 1g.10gb``"""
    return " + ".join(f"{count} x {name}" for name, count in layout.items())


def spec(section: str, sharing: str, program: str) -> Spec:
    """The unit that makes the instances again after a boot or a reset, for the module host; without MIG its absence.

    ``program`` is the source of module_utils/mig.py.
    """
    layout = devices.layout(sharing)
    path = f"/etc/systemd/system/{UNIT}.service"
    if not layout:
        return Spec(section=section, absent=(path, PROGRAM))
    arguments = " ".join(f"{name}={count}" for name, count in layout.items())
    files = (
        File(PROGRAM, f"#!/usr/bin/python3\n# Managed by gpunodes.\n{program}", mode="0755"),
        File(path, _UNIT.replace("{program}", f"{PROGRAM} {arguments}")),
    )
    # It is not started: the role makes the first instances.
    return Spec(section=section, files=files, services=(Service(UNIT, started=False),))


# nvidia-persistenced is started again after a reset of a GPU and an upgrade of the driver, which end all instances.
# Source of the order: github.com/NVIDIA/mig-parted, deployments/systemd/nvidia-mig-manager.service.
_UNIT = """\
# Managed by gpunodes.
[Unit]
Description=MIG instances of gpunodes_gpu_sharing
After=nvidia-persistenced.service nvidia-fabricmanager.service nvidia-cdi-refresh.service
Before=kubelet.service docker.service

[Service]
Type=oneshot
ExecStart={program}
TimeoutStartSec=480

[Install]
WantedBy=multi-user.target nvidia-persistenced.service
"""
