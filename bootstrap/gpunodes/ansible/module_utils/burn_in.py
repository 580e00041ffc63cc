"""Tests a machine's GPUs before they take work: by DCGM's diagnostics, or else by a CUDA program on each GPU.

Changes nothing that stays. Every program has a deadline, and ends when the controller disconnects.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any
from xml.etree import ElementTree

from . import burn_in_results, causes
from .burn_in_results import FAILED, PASSED, TestResult
from .causes import Program
from .gpu_verify import container, pull, smi_xml
from .probe import log
from .probe.options import ProbeOptions
from .probe.readers import SlowError
from .problem import MachineProblem, Problem
from .process import PATH, last_line, run, run_alone

DIAG_LIMITS_S = {1: 900, 2: 1800, 3: 7200, 4: 21600}
"""Time limits of ``dcgmi diag`` by level: several times what NVIDIA states. Source: DCGM user guide, dcgmi diag."""
WORKLOAD_LIMIT_S = 3600
_STOP_S = 60
"""Seconds in which ``dcgmi diag`` ends its test after SIGTERM; it waits 25 s itself."""
_ENGINE_S = 30
"""Seconds in which a host engine of DCGM must respond."""
_LOG_S = 60
"""Seconds in which the journal is read."""
ROOT = "/"
_LISTED = 5
_NAME = "gpunodes-burn-in"


@dataclass(frozen=True)
class Gpu:
    """A GPU of ``nvidia-smi -q -x``: its number is the position in that list."""

    number: int
    address: str
    users: Sequence[str] = ()
    """Programs that compute on it, with their process ids."""

    def __str__(self) -> str:
        return f"GPU {self.number} ({self.address})"


def gpus() -> list[Gpu]:
    """The GPUs that nvidia-smi lists; raises MachineProblem if it fails or lists none."""
    try:
        root = ElementTree.fromstring(smi_xml())  # noqa: S314 - the machine's own driver wrote it
    except ElementTree.ParseError:
        root = ElementTree.Element("nothing")
    found = []
    for number, gpu in enumerate(root.findall("gpu")):
        users = [
            f"{(each.findtext('process_name') or '?').strip()} (process {(each.findtext('pid') or '?').strip()})"
            for each in gpu.findall("processes/process_info")
            if "C" in (each.findtext("type") or "")
        ]
        found.append(Gpu(number, gpu.get("id", "").lower()[-12:], users))
    if not found:
        raise MachineProblem("nvidia-smi lists no GPU", "the GPUs to test", "run `gpunodes gpu verify`")
    return found


def busy(found: Sequence[Gpu]) -> Problem | None:
    """Why the GPUs cannot be tested now: programs use them."""
    users = [f"{user} uses {gpu}" for gpu in found for user in gpu.users]
    if not users:
        return None
    more = f" and {len(users) - _LISTED} more" if len(users) > _LISTED else ""
    return Problem(
        ", ".join(users[:_LISTED]) + more,
        "idle GPUs, because a burn-in would disturb programs and fail by them",
        "wait for them or end them, then run the command again",
    )


def burn_in(level: int, runtime: str, image: str, command: Sequence[str]) -> dict[str, Any]:
    """Test all GPUs; returns the tool, its results, ``failed`` as a sentence, and ``refused`` if the GPUs are in use.

    ``image`` and ``command`` are the CUDA program for a machine without DCGM; an empty image is refused there. Raises
    MachineProblem if nothing can be tested.
    """
    found = gpus()
    if problem := busy(found):
        return {"tool": "", "results": [], "failed": "", "refused": str(problem)}
    since, ring_buffer = time.time(), _ring_buffer()
    if shutil.which("dcgmi", path=PATH):
        tool, results = _diagnostics(level)
    else:
        tool, results = _workload(found, runtime, image, command)
    results += _xids(*ring_buffer)
    failed = burn_in_results.failure(results)
    return {
        "tool": tool,
        "summary": burn_in_results.summary(results),
        "results": [asdict(each) for each in results],
        "failed": f"{tool}: {failed}" if failed else "",
        "refused": "",
        "seconds": round(time.time() - since, 1),
    }


# --- DCGM ---


def _diagnostics(level: int) -> tuple[str, list[TestResult]]:
    limit_s = DIAG_LIMITS_S[level]
    with _host_engine() as addresses:
        ended = run_alone(["dcgmi", "diag", "-r", str(level), "-j"], limit_s, _STOP_S)
    found = burn_in_results.diagnosis(ended.out, addresses)
    tool = f"DCGM {found.version} diagnostics, level {level}".replace("  ", " ")
    if found.error or not found.results:
        why = last_line(ended.err) if ended.code in (124, 127) else found.error
        raise MachineProblem(
            f"`dcgmi diag -r {level}` gave no result: {why}",
            "a report of its tests",
            "see `journalctl -u nvidia-dcgm` and /var/log/nvidia-dcgm; the taint stays until a burn-in passes",
        )
    results = list(found.results)
    if ended.code and not any(each.state == FAILED for each in results):
        results.append(TestResult("dcgmi", "", FAILED, f"exit code {ended.code}, although no test failed"))
    return tool, results


@contextlib.contextmanager
def _host_engine() -> Iterator[dict[str, str]]:
    """A responding host engine, for this test where none runs; PCI addresses by DCGM's numbers of GPUs."""
    started = None
    listed = run_alone(["dcgmi", "discovery", "-l"], _ENGINE_S)
    try:
        if not listed.ok and shutil.which("nv-hostengine", path=PATH):
            # -n: in the foreground, so that it ends with this test. Its packages leave the service disabled.
            started = subprocess.Popen(
                ["nv-hostengine", "-n"],
                env={**os.environ, "PATH": PATH},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            deadline = time.monotonic() + _ENGINE_S
            while not listed.ok and started.poll() is None and time.monotonic() < deadline:
                time.sleep(0.5)
                listed = run_alone(["dcgmi", "discovery", "-l"], _ENGINE_S)
        if not listed.ok:
            raise MachineProblem(
                f"DCGM's host engine does not respond: {last_line(listed.err) or last_line(listed.out)}",
                "a running nv-hostengine",
                "run `systemctl enable --now nvidia-dcgm` on the machine, or remove dcgmi to test without DCGM",
            )
        yield burn_in_results.addresses(listed.out)
    finally:
        if started is not None:
            started.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(10)
            # One that hangs in the driver survives every signal: Python must not wait for it at its end.
            started.returncode = started.poll() or 0


# --- a CUDA program ---


def _workload(found: Sequence[Gpu], runtime: str, image: str, command: Sequence[str]) -> tuple[str, list[TestResult]]:
    """The same program on all GPUs at once, each in its own container: so a failure has its GPU."""
    if not image:
        raise MachineProblem(
            "dcgmi is not installed, and gpunodes_burn_in_image is empty",
            "a tool that tests GPUs",
            "install DCGM (the package datacenter-gpu-manager), or set gpunodes_burn_in_image",
        )
    program = {"containerd": "ctr", "docker": "docker"}[runtime]
    if not shutil.which(program, path=PATH):
        raise MachineProblem(
            f"neither dcgmi nor {runtime} is installed",
            "a tool that tests GPUs",
            "install DCGM (the package datacenter-gpu-manager)",
        )
    pulled = pull(runtime, image)
    if not pulled.ok:
        cause = causes.of(Program.IMAGE, pulled.text)
        raise MachineProblem(
            f"the image {image} cannot be pulled: {cause.found}",
            "an image to run",
            f"{cause.remedy or 'see gpunodes_image_mirrors and gpunodes_burn_in_image'}; or install DCGM",
            pulled.text,
        )
    with ThreadPoolExecutor(len(found)) as pool:
        results = list(pool.map(lambda gpu: _compute(gpu, runtime, image, command), found))
    return "CUDA program (only whether each GPU computes; no DCGM)", results


def _compute(gpu: Gpu, runtime: str, image: str, command: Sequence[str]) -> TestResult:
    argv, end = container(runtime, image, f"{_NAME}-{gpu.number}", str(gpu.number), command)
    # The container of a run that was interrupted.
    run(end, 60)
    if runtime == "containerd":
        run(["ctr", "--namespace", "k8s.io", "containers", "delete", f"{_NAME}-{gpu.number}"], 60)
    ended = run_alone(argv, WORKLOAD_LIMIT_S, _STOP_S)
    if ended.ok:
        return TestResult("CUDA program", str(gpu), PASSED)
    run_alone(end, 30)
    message = " ".join((last_line(ended.err) or last_line(ended.out)).split())
    return TestResult("CUDA program", str(gpu), FAILED, f"exit code {ended.code}: {message[:200]}")


# --- the kernel log ---


def _ring_buffer() -> tuple[list[log.Line], str]:
    """The kernel's own lines in its ring buffer, and why it cannot be read."""
    lines, _, error = log.kmsg(ProbeOptions(ROOT).path("dev/kmsg"))
    return lines, f"/dev/kmsg: {error}" if error else ""


def _xids(before: list[log.Line], problem: str) -> list[TestResult]:
    """The Xids in the kernel log since ``before`` was its ring buffer; a failure if it is not read.

    What the ring buffer has lost since then is in the journal. Only lines of the kernel are read, one for each message:
    programs choose names that look like messages.
    """
    after, later_problem = _ring_buffer()
    known = set(before)
    problem = problem or later_problem
    if not problem:
        if not known or known.intersection(after[:1]):
            return burn_in_results.xids(text for time_s, text in after if (time_s, text) not in known)
        problem = "the ring buffer has lost lines of the test"
        try:
            lines = list(log.journal(ProbeOptions(ROOT, 2 * _LOG_S), float("inf")))
        except (OSError, SlowError) as error:
            problem = f"{problem}; the journal: {error}"
        else:
            if lines and lines[-1][0] >= before[-1][0]:
                new = [each for each in [*lines, *after] if each[0] >= before[-1][0] and each not in known]
                return burn_in_results.xids(text for _, text in new)
            problem = f"{problem}, and the journal does not have them"
    return [TestResult("kernel log", "", FAILED, f"not read, so Xids are unknown: {problem}")]
