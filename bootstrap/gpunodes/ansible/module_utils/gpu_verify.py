"""Verifies a machine's GPUs on the machine: the driver responds, and a container gets them.

Each level reports what was found, what was wanted and a remedy; the first failure ends the verification. Every program
has a time limit: a hung driver keeps programs in uninterruptible sleep, in which no signal ends them.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any
from xml.etree import ElementTree

from . import causes, gpu_facts
from .causes import Program
from .host import gpu_driver
from .host import images as containerd_images
from .probe import smi
from .probe.options import ProbeOptions
from .problem import MachineProblem
from .process import PATH, CommandResult, last_line, run, run_alone

SMI_LIMIT_S = 60
_PULL_LIMIT_S = 600
_CONTAINER_LIMIT_S = 180
_STUCK = "is stuck in the driver (uninterruptible sleep)"
_NAMESPACE = "k8s.io"
_RUNTIME = "/usr/bin/nvidia-container-runtime"
_GPU_MOUNT = "/var/run/nvidia-container-devices/cdi/nvidia.com/gpu/"
"""Source: github.com/NVIDIA/nvidia-container-toolkit, internal/config/image/cuda_image.go."""


@dataclass(frozen=True)
class Level:
    """The result of one level; ``state`` is ok, failed or skipped."""

    level: str
    state: str
    fact: str
    wanted: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class SmiReport:
    """What nvidia-smi reports: the driver, the CUDA version that it supports, and the GPUs."""

    driver: str = ""
    cuda: str = ""
    gpus: Sequence[dict[str, Any]] = field(default_factory=tuple)


def verify(image: str, runtime: str, services: Sequence[str]) -> dict[str, Any]:
    """Verify both levels; nvidia-smi can run in ``image``, ``runtime`` is containerd or docker."""
    report = SmiReport()
    levels = []
    level = "host"
    try:
        report = _host(len(expected()), services)
        names = ", ".join(dict.fromkeys(gpu["name"] for gpu in report.gpus))
        levels.append(Level(level, "ok", f"driver {report.driver}, {len(report.gpus)} x {names}"))
        level = "container"
        levels.append(_container(image, runtime, report))
    except MachineProblem as error:
        levels.append(Level(level, "failed", *astuple(error.problem)))
    return {"levels": [asdict(level) for level in levels], **asdict(report), "gpus": list(report.gpus)}


def expected() -> list[str]:
    """PCI addresses of the machine's GPUs, except those that are passed through to virtual machines."""
    return [
        function["address"]
        for function in gpu_facts.read()["functions"]
        if function["class"].startswith("03") and function["driver"] != "vfio-pci"
    ]


def labels(found: dict[str, Any]) -> dict[str, str]:
    """Node labels of the GPUs; if there are several products, of the first."""
    if not found["gpus"]:
        return {}
    first = found["gpus"][0]
    values = {
        "gpu-product": first["name"],
        "gpu-memory": f"{first['memory_mib']}Mi",
        "gpu-count": str(len(found["gpus"])),
        "gpu-driver": found["driver"],
        "gpu-cuda": found["cuda"],
    }
    plain = {name: re.sub(r"[^A-Za-z0-9_.-]+", "-", value).strip("-_.")[:63] for name, value in values.items()}
    return {f"gpunodes.dev/{name}": value for name, value in plain.items() if value}


# --- the host ---


def _host(expected_count: int, services: Sequence[str]) -> SmiReport:
    """nvidia-smi's report on all GPUs; raises MachineProblem with the first problem."""
    if not expected_count:
        raise MachineProblem("no NVIDIA GPU on the PCI bus", "at least one", "see `lspci -d 10de:` and the firmware")
    if not os.path.exists(f"{gpu_driver.SYS}/module/nvidia"):
        raise MachineProblem(
            "the module nvidia is not loaded",
            "a loaded driver",
            "run `gpunodes gpu install` for this machine; see `dkms status`",
        )
    nodes = gpu_driver.device_nodes()
    if len(nodes) < expected_count or not os.path.exists(f"{gpu_driver.DEV}/nvidiactl"):
        raise MachineProblem(
            f"{len(nodes)} of {expected_count} device nodes exist",
            "/dev/nvidia0 and following, and /dev/nvidiactl",
            "run `nvidia-modprobe -c 0 -u`; see `dmesg | grep NVRM`",
        )
    for name in services:
        state = run(["systemctl", "is-active", name]).out.strip()
        if state != "active":
            raise MachineProblem(f"{name} is {state or 'not installed'}", "active", f"see `journalctl -u {name}`")
    report = _smi()
    if len(report.gpus) != expected_count:
        raise MachineProblem(
            f"nvidia-smi lists {len(report.gpus)} of {expected_count} GPUs",
            "all GPUs",
            "see `gpunodes health` for the others",
        )
    return report


def _smi() -> SmiReport:
    return parse_smi(smi_xml())


def smi_xml() -> str:
    """The output of ``nvidia-smi -q -x``; raises MachineProblem if it fails, hangs, or another one hangs."""
    if stuck := _stuck():
        raise MachineProblem(f"nvidia-smi (process {stuck}) {_STUCK}", "a responsive driver", "see `gpunodes health`")
    result = run_alone(["nvidia-smi", "-q", "-x"], SMI_LIMIT_S)
    if not result.ok:
        output = last_line(result.err) or last_line(result.out)
        raise MachineProblem(
            f"nvidia-smi: {output}", "a list of the GPUs", "see `gpunodes health` and `dmesg | grep NVRM`"
        )
    return result.out


def parse_smi(text: str) -> SmiReport:
    """Parse ``nvidia-smi -q -x``; values that cannot be parsed are empty."""
    try:
        root = ElementTree.fromstring(text)  # noqa: S314 - the machine's own driver wrote it
    except ElementTree.ParseError:
        return SmiReport()
    gpus = []
    for gpu in root.findall("gpu"):
        memory = re.match(r"\d+", gpu.findtext("fb_memory_usage/total") or "")
        gpus.append(
            {
                "uuid": (gpu.findtext("uuid") or "").strip(),
                "name": (gpu.findtext("product_name") or "").strip(),
                "memory_mib": int(memory.group(0)) if memory else 0,
            }
        )
    return SmiReport(
        (root.findtext("driver_version") or "").strip(), (root.findtext("cuda_version") or "").strip(), gpus
    )


def _stuck(root: str = "/") -> str:
    """Process id of a nvidia-smi that hangs in the driver, by its stack, else "". A second one would get stuck, too."""
    found = smi.hung_thread(ProbeOptions(root), "nvidia-smi")
    return str(found.tid) if found else ""


# --- a container ---


def _container(image: str, runtime: str, report: SmiReport) -> Level:
    """Raises MachineProblem if a container does not get the GPUs in ``report``."""
    program = {"containerd": "ctr", "docker": "docker"}[runtime]
    if not shutil.which(program, path=PATH):
        return Level("container", "skipped", f"{runtime} is not installed")
    name = f"gpunodes-verify-{secrets.token_hex(3)}"
    if runtime == "docker":
        # docker replaces the entry point of an image, ctr ignores it.
        options, argv = ["--entrypoint=nvidia-smi"], ["-L"]
    else:
        options, argv = [], ["nvidia-smi", "-L"]
    pulled = pull(runtime, image)
    command, cleanup = container(runtime, image, name, "all", argv, options)
    if not pulled.ok:
        cause = causes.of(Program.IMAGE, pulled.text)
        raise MachineProblem(
            f"the image {image} cannot be pulled: {cause.found}",
            "an image to run",
            cause.remedy or "see gpunodes_image_mirrors and gpunodes_device_plugin_image",
        )
    result = run_alone(command, _CONTAINER_LIMIT_S)
    if not result.ok:
        run_alone(cleanup, 30)
        raise MachineProblem(
            f"`{program}` with a GPU: {last_line(result.err) or last_line(result.out)}",
            "a container in which nvidia-smi runs",
            f"see {gpu_driver.CDI}, `nvidia-ctk cdi list` and `journalctl -u {runtime}`",
        )
    # A container that sees all GPUs also lists their MIG instances.
    inside = {uuid for uuid in re.findall(r"UUID: (\S+?)\)", result.out) if not uuid.startswith("MIG-")}
    outside = {gpu["uuid"] for gpu in report.gpus}
    if inside != outside:
        raise MachineProblem(
            f"a container sees {len(inside)} of {len(outside)} GPUs",
            "all GPUs",
            f"run `gpunodes gpu install` for this machine to configure NVIDIA's runtime; see {gpu_driver.CDI}",
        )
    return Level("container", "ok", f"a container of {runtime} sees {len(inside)} GPUs")


def pull(runtime: str, image: str) -> CommandResult:
    """Pull an image for containerd or docker, unless it is present."""
    if runtime == "docker":
        found = run(["docker", "image", "inspect", "--format", "{{.Id}}", image])
        return found if found.ok else run(["docker", "pull", "--quiet", image], _PULL_LIMIT_S)
    found = run([*_CTR, "images", "ls", "-q", f"name=={image}"])
    if found.out.strip() and not containerd_images.was_interrupted(image):
        return found
    return containerd_images.pull(image, _PULL_LIMIT_S)


_CTR = ("ctr", "--namespace", _NAMESPACE)


def container(
    runtime: str, image: str, name: str, gpu: str, argv: Sequence[str], options: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """The argv of a container with a GPU (its number, or "all"), and the argv that ends it."""
    if runtime == "docker":
        # What people type; one GPU is named as everywhere else.
        device = "--gpus=all" if gpu == "all" else f"--device=nvidia.com/gpu={gpu}"
        command = ["docker", "run", "--rm", f"--name={name}", device, *options, image, *argv]
        return command, ["docker", "rm", "--force", name]
    # ctr of containerd 1.x does not support CDI devices: NVIDIA's runtime takes their names from mounts of this form.
    mount = ["--mount", f"type=bind,src=/dev/null,dst={_GPU_MOUNT}{gpu},options=rbind:ro"]
    command = [*_CTR, "run", "--rm", "--runc-binary", _RUNTIME, *mount, *options, image, name, *argv]
    return command, [*_CTR, "tasks", "delete", "--force", name]
