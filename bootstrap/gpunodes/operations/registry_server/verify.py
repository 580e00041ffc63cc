"""Verify the registry as its users use it: an image is pushed, and each node pulls and runs it."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpunodes.engine import control_planes
from gpunodes.engine.cluster.registries import Registries, secret_name
from gpunodes.engine.jupyter import tunnel
from gpunodes.engine.registry.client import Client
from gpunodes.engine.registry.objects import RegistryServer
from gpunodes.errors import GpunodesError
from gpunodes.inventory import Inventory
from gpunodes.operations.registry_server import commands
from gpunodes.planner import registry, registry_image
from gpunodes.planner.registry import NAMESPACE, PORT

IMAGES = "gpunodes/verify"
"""The name of the images that are pushed, and deleted again."""
_LIMIT_S = 300.0
_POLL_S = 1.0
_MOST = 10
"""Images of commands that were killed that one command deletes."""
_ENDED_S = 3600.0
"""After this time a command has ended: longer than one takes, and than the clocks of two controllers differ."""
_NONCE = re.compile(r"(\d{10})-[0-9a-f]{16}-")
"""What the pods and tags of one command have in their names: when it began, in seconds since 1970, and a number."""
_PULLED = re.compile(r"sha256:[0-9a-f]{64}$")
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Pulled:
    """Whether a node pulled and ran the image that was pushed; ``problem`` is why not, "" if it did."""

    node: str
    digest: str
    problem: str


@contextlib.contextmanager
def reached(inventory: Inventory, port: int, report: Report) -> Iterator[tuple[tunnel.Tunnel, str, Client]]:
    """A tunnel to the registry, its address, and a client with its login. ``port`` is the local one, 0 for any."""
    with control_planes.connected(inventory, RegistryServer) as api:
        public = commands.existing(api)
        found = api.deployment()
        if problem := api.why_not_ready(found) if found else "it has no Deployment":
            raise GpunodesError(
                f"the registry is not ready: {problem}", "a pod that is ready", "`gpunodes registry up` waits for it"
            )
        own = commands.credentials(api)
        pod, machine = api.pod(), control_planes.used(inventory, api.session).machine
    report(f"connecting over {machine.name}")
    variables = inventory.connection(machine.name)
    with tunnel.opened(machine, variables, NAMESPACE, pod, PORT, port, tunnel.REGISTRY) as opened:
        client = Client(public.address, opened.port, own.ca, own.user, own.password)
        client.check()
        yield opened, public.address, client


def run(inventory: Inventory, report: Report) -> list[Pulled]:
    """Push an image, let each ready node pull and run it, and delete both; raises GpunodesError without a push."""
    with (
        reached(inventory, 0, report) as (_, address, client),
        control_planes.connected(inventory, RegistryServer) as api,
    ):
        own = commands.credentials(api)
        nodes = api.ready_nodes()
        if not nodes:
            raise GpunodesError("no node is ready", "nodes that pull from the registry", "see `gpunodes status`")
        Registries(api.session).login(NAMESPACE, address, own.user, own.password)
        api.end_verifying(filter(_is_left, (str(each["metadata"]["name"]) for each in api.verifying())))
        report("pushing an image")
        with pushed(client, nodes.values()) as images:
            report(f"pulling it on {len(nodes)} nodes")
            return pulled(api, address, nodes, images, _LIMIT_S)


@contextlib.contextmanager
def pushed(client: Client, architectures: Any) -> Iterator[dict[str, tuple[str, str]]]:
    """An image for each architecture that is known: its tag and digest; they are deleted afterwards."""
    for left in list(filter(_is_left, client.tags(IMAGES)))[:_MOST]:
        if digest := client.digest_of(IMAGES, left, registry_image.MANIFEST):
            client.delete_manifest(IMAGES, digest)
    nonce = f"{time.time():.0f}-{secrets.token_hex(8)}"
    made: dict[str, tuple[str, str]] = {}
    try:
        for each in sorted(set(architectures) & set(registry_image.ARCHITECTURES)):
            image, tag = registry_image.made(each, nonce), f"{nonce}-{each}"
            for blob in image.blobs:
                client.push_blob(IMAGES, registry_image.digest(blob), blob)
            client.push_manifest(IMAGES, tag, registry_image.MANIFEST, image.manifest)
            made[each] = (tag, image.digest)
            if client.digest_of(IMAGES, tag, registry_image.MANIFEST) != image.digest:
                raise GpunodesError(
                    f"the registry has another image as {IMAGES}:{tag} than the one that was pushed",
                    "the same content",
                    "check its share: another program may write there",
                )
        yield made
    finally:
        for _, digest in made.values():
            client.delete_manifest(IMAGES, digest)


def _is_left(name: str) -> bool:
    """Whether a pod or a tag is of a command that was killed, and not of one that runs at the same time."""
    found = _NONCE.search(name)
    return found is None or abs(time.time() - int(found[1])) > _ENDED_S


def pulled(
    api: RegistryServer,
    address: str,
    nodes: Mapping[str, str],
    images: Mapping[str, tuple[str, str]],
    limit_s: float,
) -> list[Pulled]:
    """Run the image of its architecture on each node; what each node did."""
    found: dict[str, Pulled] = {}
    waiting: dict[str, tuple[str, str]] = {}
    own: list[str] = []
    try:
        for number, (node, architecture) in enumerate(sorted(nodes.items())):
            if architecture not in images:
                found[node] = Pulled(node, "", f"there is no image for its architecture, {architecture[:50]}")
                continue
            tag, digest = images[architecture]
            name = f"verify-{tag.rpartition('-')[0]}-{number}"
            own.append(name)
            image = f"{address}/{IMAGES}:{tag}"
            api.start(registry.verifying_pod(name, node, image, secret_name(address)))
            waiting[name] = (node, digest)
        deadline = time.monotonic() + limit_s
        while waiting:
            late = time.monotonic() > deadline
            pods = {each["metadata"]["name"]: each for each in api.verifying()}
            for name, (node, digest) in list(waiting.items()):
                problem = _ended(pods.get(name), digest)
                if problem is None and late:
                    problem = api.problem_of(NAMESPACE, pods[name]) or "its pod has not ended"
                    problem += f" (after {limit_s:.0f} s)"
                if problem is not None:
                    found[node] = Pulled(node, digest, problem)
                    del waiting[name]
            if waiting:
                time.sleep(_POLL_S)
    finally:
        api.end_verifying(own)
    return [found[node] for node in sorted(found)]


def _ended(pod: Mapping[str, Any] | None, digest: str) -> str | None:
    """Why a pod did not run the image with this digest; "" if it did, None while it has not ended."""
    if pod is None:
        return "its pod was deleted"
    phase = pod["status"].get("phase")
    if phase not in {"Succeeded", "Failed"}:
        return None
    states: Sequence[Mapping[str, Any]] = pod["status"].get("containerStatuses") or ()
    state = states[0] if states else {}
    ran = _PULLED.search(str(state.get("imageID", "")))
    code = ((state.get("state") or {}).get("terminated") or {}).get("exitCode")
    if phase == "Failed" or code != 0:
        return f"the program of the image ended with {code}" if states else "its pod was refused by the kubelet"
    if ran is None or ran[0] != digest:
        return f"it ran another image than the one that was pushed, {ran[0] if ran else 'without a digest'}"
    return ""
