"""Notebooks with GPUs in the cluster: start, reach, verify, list and remove them."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpunodes import settings, shape
from gpunodes.engine import control_planes
from gpunodes.engine.jupyter import cell, objects, tunnel
from gpunodes.engine.jupyter.objects import Notebooks
from gpunodes.engine.jupyter.tunnel import Tunnel
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import printable
from gpunodes.planner import notebooks
from gpunodes.planner.notebooks import Place, Request

IMAGE = "gpunodes_jupyter_image"
_POLL_S = 2.0
_CELL_S = 180.0
# What the CUDA driver itself counts, by libcuda, which the container toolkit mounts: no library of the image is needed.
_CELL = """
import ctypes, json, subprocess
try:
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines() if not done.returncode else []
except (OSError, subprocess.SubprocessError):
    lines = []
count, code = ctypes.c_int(0), -1
try:
    cuda = ctypes.CDLL("libcuda.so.1")
    code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
except (OSError, AttributeError):
    pass
print("gpunodes " + json.dumps({"cuda": count.value, "code": code, "lines": lines}))
"""
_SEEN = {"cuda": int, "code": int, "lines": shape.Many(str, 64)}
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Started:
    """A notebook that is there. ``token`` is "" unless this command made it."""

    place: Place
    request: Request
    made: Sequence[str] = ()
    """The kinds of the objects that this command made, or with a dry run would make."""
    token: str = ""
    node_port: int | None = None


@dataclass(frozen=True, slots=True)
class Listed:
    """A notebook in a list. ``request`` is None if another client has overwritten it."""

    place: Place
    request: Request | None
    is_ready: bool


@dataclass(frozen=True, slots=True)
class Seen:
    """What a cell of a notebook sees: the lines of `nvidia-smi -L`, and how many GPUs CUDA counts."""

    gpus: Sequence[str]
    cuda: int


def up(
    api: Notebooks,
    place: Place,
    given: Mapping[str, Any],
    image: str,
    report: Report,
    *,
    scratch: bool = False,
    dry_run: bool = False,
) -> Started:
    """Make what is missing of a notebook. One that exists keeps what it has, its token too.

    ``given`` are the fields of ``Request`` that the user named, ``image`` is the one without. Raises WrongInput, before
    anything is made, for a request that the cluster contradicts, or another one than that of the existing notebook.
    """
    notebooks.check_place(place)
    notebooks.check(Request(**{"image": image, **given}))
    api.check_namespace(place.namespace)
    found = api.found(place)
    if "Deployment" in found:
        request = objects.request_of(place, found["Deployment"])
        _check_same(place, request, {**given, **({"storage": ""} if scratch else {})})
        # Its server knows no other token than that of its start.
        api.token(place)
    else:
        request = Request(**{"image": image, **given, "storage": _storage(api, place, given, scratch=scratch)})
    _warn(request, report)
    if found and "Deployment" not in found and not dry_run:
        # What an interrupted command left: nobody may have read its token.
        api.remove(place, found)
        found = {}
    token = secrets.token_urlsafe(32)
    made = objects.missing(found, notebooks.objects(place, request, token))
    # A quota, or another check of the API server, refuses all of them or none.
    for trial in (True,) if dry_run else (True, False):
        for each in made:
            api.make(place, each, dry_run=trial)
    kinds = [str(each["kind"]) for each in made]
    if "Secret" in kinds and not dry_run and api.token(place) != token:
        raise GpunodesError(
            f"another command makes or removes the notebook {place} at this moment",
            "one command at a time",
            "see `gpunodes jupyter list`, then run the same command again",
        )
    port = None if dry_run else api.node_port(place)
    return Started(place, request, kinds, token if "Secret" in kinds and not dry_run else "", port)


def wait(api: Notebooks, place: Place, limit_s: float, report: Report) -> None:
    """Wait until a notebook is ready; raises GpunodesError with the cluster's reason if it is not in time."""
    deadline, last = time.monotonic() + limit_s, ""
    while True:
        deployment = _deployment(api, place)
        if api.is_ready(deployment):
            return
        reason = api.reason(place, deployment)
        if time.monotonic() > deadline:
            raise GpunodesError(
                f"the notebook {place} is not ready after {limit_s:.0f} s: {reason}",
                "a node with free GPUs for it, and its image",
                f"free GPUs, or correct that, then run the same command again; `{place.command('down')}` gives it up",
            )
        if reason != last:
            report(f"waiting: {reason}")
            last = reason
        time.sleep(_POLL_S)


def down(api: Notebooks, place: Place, confirm: Report) -> tuple[list[str], Request | None, str]:
    """Remove a notebook after ``confirm``, which raises for a no; the home folder on shared storage stays.

    Returns the kinds of the removed objects; what the notebook had, None if that is unknown; what becomes of its home.
    """
    notebooks.check_place(place)
    found = api.found(place)
    deployment = found.get("Deployment")
    request = notebooks.requested(deployment) if deployment else None
    home = _home(request, notebooks.folder_of(deployment or {}, place))
    if found:
        confirm(f"the notebook {place} ends with its kernels; {home}")
        api.remove(place, found)
    return list(found), request, home


def _home(request: Request | None, folder: str) -> str:
    """What becomes of the home folder."""
    if request is None:
        return "a home folder on shared storage stays"
    if not request.storage:
        return "its files end with it: it has no shared storage"
    return f"its home stays: the folder {folder} of the claim {request.storage}"


def listed(api: Notebooks) -> list[Listed]:
    """All notebooks of the cluster."""
    return [Listed(place, notebooks.requested(each), api.is_ready(each)) for place, each in api.all()]


@contextlib.contextmanager
def reached(inventory: Inventory, place: Place, port: int, report: Report) -> Iterator[tuple[Tunnel, str, Request]]:
    """A tunnel to a notebook that is ready, its token, and what it has. ``port`` is the local one, 0 for any."""
    notebooks.check_place(place)
    with connected(inventory) as api:
        deployment = _deployment(api, place)
        if not api.is_ready(deployment):
            raise GpunodesError(
                f"the notebook {place} is not ready: {api.reason(place, deployment)}",
                "a pod that is ready",
                f"`{place.command('up')}` waits for it",
            )
        request, token = objects.request_of(place, deployment), api.token(place)
        pod = api.pod(place)
        machine = control_planes.used(inventory, api.session).machine
    if not pod:
        raise GpunodesError(
            f"the notebook {place} has no pod that is ready", "one that is", "run the same command again"
        )
    report(f"connecting over {machine.name}")
    variables = inventory.connection(machine.name)
    with tunnel.opened(machine, variables, place.namespace, pod, notebooks.PORT, port) as opened:
        opened.check("/api")
        yield opened, token, request


def verify(inventory: Inventory, place: Place, report: Report) -> tuple[Seen, Request]:
    """Run a cell in a notebook as a browser does; raises GpunodesError if it does not see the GPUs."""
    with reached(inventory, place, 0, report) as (opened, token, request):
        report("running a cell")
        return seen(cell.run(opened.port, token, _CELL, _CELL_S), request), request


def seen(output: str, request: Request) -> Seen:
    """What a cell saw, by its output; raises GpunodesError if it is less than what the notebook requests."""
    found = re.search(r"^gpunodes (\{.*\})$", output, re.MULTILINE)
    document: dict[str, Any] = {}
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(found[1]) if found else {}
    if shape.wrong(document, _SEEN):
        raise GpunodesError("the cell printed something else than its result", "the output of the cell", "try it again")
    result = Seen([printable(" ".join(each.split()))[:200] for each in document["lines"]], document["cuda"])
    # Shares of one GPU are counted once.
    least = request.gpus if request.gpus > 1 else min(1, request.gpus)
    if min(result.cuda, len(result.gpus)) < least:
        raise GpunodesError(
            f"a cell sees {len(result.gpus)} GPUs by nvidia-smi and {result.cuda} by CUDA (cuInit: {document['code']})",
            f"at least {least}",
            "see `gpunodes gpu verify` for the node, and whether the image runs with its driver",
        )
    return result


def image(inventory: Inventory) -> str:
    """The setting gpunodes_jupyter_image."""
    name = inventory.control_planes()[0].name
    return str(settings.resolve(inventory.variables(name) | inventory.rendered(name, IMAGE))[IMAGE])


def connected(inventory: Inventory) -> contextlib.AbstractContextManager[Notebooks]:
    """A session with the API while inside; raises NoResponse without one."""
    return control_planes.connected(inventory, Notebooks)


def _deployment(api: Notebooks, place: Place) -> dict[str, Any]:
    found = api.one(place, "Deployment")
    if found is None:
        raise WrongInput(
            f"there is no notebook {place.name} in the namespace {place.namespace}",
            "one of `gpunodes jupyter list`",
            f"start it with `{place.command('up')}`",
        )
    return found


def _check_same(place: Place, request: Request, given: Mapping[str, Any]) -> None:
    if different := notebooks.differences(request, given):
        raise WrongInput(
            f"the notebook {place} exists with {'; '.join(different)}",
            "the same, or no notebook of this name: a change ends its kernels",
            f"run `{place.command('down')}` first, or choose another name",
        )


def _storage(api: Notebooks, place: Place, given: Mapping[str, Any], *, scratch: bool) -> str:
    """The claim for a new notebook; raises WrongInput unless there is exactly one, or the user has chosen."""
    if scratch:
        return ""
    if name := str(given.get("storage") or ""):
        if not api.has_claim(place.namespace, name):
            raise WrongInput(
                f"the namespace {place.namespace} has no claim {name}",
                "a share of `gpunodes storage` with this namespace, or another PersistentVolumeClaim",
                "see `kubectl get pvc`, and correct --storage",
            )
        return name
    claims = api.claims(place.namespace)
    if len(claims) != 1:
        found = f"the claims {', '.join(claims)}" if claims else "no claim of shared storage"
        raise WrongInput(
            f"the namespace {place.namespace} has {found}",
            "one, for the home folder",
            "name it with --storage, run `gpunodes storage up`, or use --scratch: then files end with the pod",
        )
    return claims[0]


def _warn(request: Request, report: Report) -> None:
    if not request.storage:
        report("warning: without shared storage the files of this notebook end with its pod")
    if request.node_port:
        report(
            "warning: --node-port serves this notebook without encryption to everyone who reaches a node: everyone "
            "who reads the traffic gets the token, and with it a shell in the pod"
        )
