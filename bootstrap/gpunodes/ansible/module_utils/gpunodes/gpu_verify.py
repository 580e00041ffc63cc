"""Proves a machine's GPUs from the machine's own side: the driver answers, and a container gets them.

Each level says what was found, what was wanted and what to do; the first that fails ends the look. Nothing that hangs
is waited for beyond its limit: a hung driver holds its programs in a sleep that no signal ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from xml.etree import ElementTree

from . import gpu_facts, gpu_host
from .problem import MachineProblem
from .process import PATH, CommandResult, last_line, run

SMI_LIMIT_S = 60
_PULL_LIMIT_S = 600
_CONTAINER_LIMIT_S = 180
_STUCK = "waits for the driver in a sleep that no signal ends"
_NAMESPACE = "k8s.io"
_RUNTIME = "/usr/bin/nvidia-container-runtime"
_ALL_GPUS = "/var/run/nvidia-container-devices/cdi/nvidia.com/gpu/all"
"""Source: github.com/NVIDIA/nvidia-container-toolkit, internal/config/image/cuda_image.go."""


@dataclass(frozen=True)
class Level:
    """How one level came out; ``state`` is ok, failed or skipped."""

    level: str
    state: str
    fact: str
    wanted: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class SmiReport:
    """What nvidia-smi said: the driver, the CUDA that it takes, and the GPUs."""

    driver: str = ""
    cuda: str = ""
    gpus: Sequence[dict[str, Any]] = field(default_factory=tuple)


def verify(image: str, runtime: str, services: Sequence[str]) -> dict[str, Any]:
    """Walk both levels; ``image`` is one that can run nvidia-smi, ``runtime`` containerd or docker."""
    seen = SmiReport()
    levels = []
    level = "host"
    try:
        seen = _host(len(expected()), services)
        names = ", ".join(dict.fromkeys(gpu["name"] for gpu in seen.gpus))
        levels.append(Level(level, "ok", f"driver {seen.driver}, {len(seen.gpus)} x {names}"))
        level = "container"
        levels.append(_container(image, runtime, seen))
    except MachineProblem as problem:
        levels.append(Level(level, "failed", problem.found, problem.wanted, problem.remedy))
    return {"levels": [asdict(one) for one in levels], **asdict(seen), "gpus": list(seen.gpus)}


def expected() -> list[str]:
    """The PCI addresses of the machine's GPUs, those that virtual machines use left out."""
    return [
        function["address"]
        for function in gpu_facts.read()["functions"]
        if function["class"].startswith("03") and function["driver"] != "vfio-pci"
    ]


def labels(found: dict[str, Any]) -> dict[str, str]:
    """What was seen of the GPUs, as labels; of several products the first."""
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


def _host(wanted: int, services: Sequence[str]) -> SmiReport:
    """What nvidia-smi says of all GPUs; raises MachineProblem with the first thing that is not as it should be."""
    if not wanted:
        raise MachineProblem("no NVIDIA GPU is on its PCI bus", "at least one", "see `lspci -d 10de:` and the firmware")
    if not os.path.exists(f"{gpu_host.SYS}/module/nvidia"):
        raise MachineProblem(
            "the module nvidia is not loaded", "the driver", "run `gpunodes gpu install` for it; see `dkms status`"
        )
    nodes = gpu_host.device_nodes()
    if len(nodes) < wanted or not os.path.exists(f"{gpu_host.DEV}/nvidiactl"):
        raise MachineProblem(
            f"{len(nodes)} of {wanted} device nodes are there",
            "/dev/nvidia0 and on, and /dev/nvidiactl",
            "run `nvidia-modprobe -c 0 -u`; see `dmesg | grep NVRM`",
        )
    for name in services:
        state = run(["systemctl", "is-active", name]).out.strip()
        if state != "active":
            raise MachineProblem(f"{name} is {state or 'not there'}", "active", f"see `journalctl -u {name}`")
    seen = _smi()
    if len(seen.gpus) != wanted:
        raise MachineProblem(
            f"nvidia-smi lists {len(seen.gpus)} of {wanted} GPUs", "all of them", "see `gpunodes health` for the others"
        )
    return seen


def _smi() -> SmiReport:
    if stuck := _stuck():
        raise MachineProblem(f"nvidia-smi (process {stuck}) {_STUCK}", "an answer", "see `gpunodes health`")
    done = run_or_leave(["nvidia-smi", "-q", "-x"], SMI_LIMIT_S)
    if not done.ok:
        output = last_line(done.err) or last_line(done.out)
        raise MachineProblem(
            f"nvidia-smi: {output}", "a list of the GPUs", "see `gpunodes health` and `dmesg | grep NVRM`"
        )
    return parse_smi(done.out)


def parse_smi(text: str) -> SmiReport:
    """``nvidia-smi -q -x``; what cannot be read is empty."""
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


def _stuck() -> str:
    """The process id of an nvidia-smi in uninterruptible sleep, "" when there is none. Another one would join it."""
    for folder in os.listdir(gpu_host.PROC):
        if folder.isdigit():
            with contextlib.suppress(OSError), open(f"{gpu_host.PROC}/{folder}/stat", encoding="utf-8") as file:
                found = re.match(r"\d+ \((.*)\) (\S)", file.read())
                if found and found.groups() == ("nvidia-smi", "D"):
                    return folder
    return ""


# --- a container ---


def _container(image: str, runtime: str, seen: SmiReport) -> Level:
    """Raises MachineProblem when a container does not get the GPUs that ``seen`` has."""
    program = {"containerd": "ctr", "docker": "docker"}[runtime]
    if not shutil.which(program, path=PATH):
        return Level("container", "skipped", f"{runtime} is not installed")
    name = f"gpunodes-verify-{secrets.token_hex(3)}"
    pulled, command, clean = (_docker if runtime == "docker" else _containerd)(image, name)
    if not pulled.ok:
        raise MachineProblem(
            f"the image {image} cannot be had: {last_line(pulled.text)}",
            "an image to run",
            "see gpunodes_image_mirrors and gpunodes_device_plugin_image",
        )
    done = run_or_leave(command, _CONTAINER_LIMIT_S)
    if not done.ok:
        run_or_leave(clean, 30)
        raise MachineProblem(
            f"`{program}` with a GPU: {last_line(done.err) or last_line(done.out)}",
            "a container in which nvidia-smi runs",
            f"see {gpu_host.CDI}, `nvidia-ctk cdi list` and `journalctl -u {runtime}`",
        )
    inside = set(re.findall(r"UUID: (\S+?)\)", done.out))
    outside = {gpu["uuid"] for gpu in seen.gpus}
    if inside != outside:
        raise MachineProblem(
            f"a container sees {len(inside)} of {len(outside)} GPUs",
            "all of them",
            f"run `gpunodes gpu install` for it, which configures NVIDIA's runtime; see {gpu_host.CDI}",
        )
    return Level("container", "ok", f"a container of {runtime} sees {len(inside)} GPUs")


_SMI = ["nvidia-smi", "-L"]


def _containerd(image: str, name: str) -> tuple[CommandResult, list[str], list[str]]:
    ctr = ["ctr", "--namespace", _NAMESPACE]
    pulled = run([*ctr, "images", "ls", "-q", f"name=={image}"])
    if not pulled.out.strip():
        pulled = run([*ctr, "images", "pull", "--hosts-dir", "/etc/containerd/certs.d", image], _PULL_LIMIT_S)
    # ctr of containerd 1.x knows no CDI devices: NVIDIA's runtime takes their names from mounts of this form.
    given = ["--runc-binary", _RUNTIME, "--mount", f"type=bind,src=/dev/null,dst={_ALL_GPUS},options=rbind:ro"]
    command = [*ctr, "run", "--rm", *given, image, name, *_SMI]
    return pulled, command, [*ctr, "tasks", "delete", "--force", name]


def _docker(image: str, name: str) -> tuple[CommandResult, list[str], list[str]]:
    pulled = run(["docker", "image", "inspect", "--format", "{{.Id}}", image])
    if not pulled.ok:
        pulled = run(["docker", "pull", "--quiet", image], _PULL_LIMIT_S)
    command = ["docker", "run", "--rm", f"--name={name}", "--device=nvidia.com/gpu=all", "--entrypoint=nvidia-smi"]
    return pulled, [*command, image, "-L"], ["docker", "rm", "--force", name]


# --- programs that may never end ---


def run_or_leave(argv: Sequence[str], limit_s: float) -> CommandResult:
    """Run a program; one that does not end is killed, and left behind where that does not end it."""
    environment = {**os.environ, "PATH": PATH, "LC_ALL": "C"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                list(argv), stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
            )
        except FileNotFoundError:
            return CommandResult(argv, 127, "", f"{argv[0]} is not installed")
        deadline = time.monotonic() + limit_s
        code = process.poll()
        while code is None and time.monotonic() < deadline:
            time.sleep(0.1)
            code = process.poll()
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
            # An interpreter that ends must not wait for it either.
            left = "" if process.poll() is not None else f"; it {_STUCK} (process {process.pid})"
            process.returncode = process.returncode or -signal.SIGKILL
            return CommandResult(argv, 124, "", f"{argv[0]} did not end within {limit_s:.0f} s{left}")
        out.seek(0)
        err.seek(0)
        return CommandResult(argv, code, out.read().decode(errors="replace"), err.read().decode(errors="replace"))
