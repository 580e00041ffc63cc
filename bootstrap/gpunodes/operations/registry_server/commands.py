"""Start the registry of the cluster and let its nodes trust it; its state; take it away."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpunodes import settings
from gpunodes.engine import control_planes
from gpunodes.engine.cluster.registries import Login, Registries
from gpunodes.engine.cluster.workloads import line
from gpunodes.engine.registry.objects import RegistryServer
from gpunodes.errors import GpunodesError, WrongInput, together
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, Role, RunResult
from gpunodes.operations import phases, registries, switched_off
from gpunodes.operations.registry_server import logins, material
from gpunodes.operations.registry_server.logins import Renewed
from gpunodes.operations.registry_server.material import Material
from gpunodes.operations.repair.context import Report
from gpunodes.operations.run import Operation, RunOptions, carry_out
from gpunodes.operations.storage import commands as storage_commands
from gpunodes.operations.storage.objects import Objects
from gpunodes.operations.tracker import RunView
from gpunodes.planner import certificates, registry, storage
from gpunodes.planner.registry import NAME, NAMESPACE, Request

UP = Operation(name="registry up", playbook="registry_up.yml", phases=(phases.REGISTRY_TRUST,), needs_cluster=True)
DOWN = Operation(
    name="registry down", playbook="registry_down.yml", phases=(phases.REGISTRY_DISTRUST,), needs_cluster=True
)
_READY_S = 600.0
_POLL_S = 2.0


@dataclass(frozen=True, slots=True)
class Started:
    """The registry after `registry up`. ``password`` is "" unless this command made it."""

    address: str
    user: str
    share: str
    folder: str
    image: str
    certificate_end: float
    """Seconds since 1970."""
    changed: Sequence[str]
    """The objects that this command changed, or with a dry run would change."""
    password: str = field(default="", repr=False)
    logins: Renewed = field(default_factory=Renewed)
    """What happened to the logins of namespaces."""


@dataclass(frozen=True, slots=True)
class Status:
    """What the cluster reports of its registry."""

    address: str
    user: str
    folder: str
    """SERVER:PATH of the images; "" if it is unknown."""
    image: str
    problem: str
    """Why it is not ready; "" if it is."""
    certificate_end: float
    logins: Sequence[Login]
    """The namespaces that may pull from it."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `registry up` has made so far."""

    started: Started
    material: Material


def request_of(inventory: Inventory) -> Request:
    """What the settings request; raises WrongInput."""
    name = inventory.control_plane().name
    keys = (storage.SETTING, registry.SHARE, registry.ADDRESS, registry.IMAGE, registry.SUBNET)
    given = settings.resolve(inventory.variables(name) | inventory.rendered(name, *keys))
    storage_commands.setting(inventory)
    return registry.requested(given, storage_commands.own_server(inventory, given[storage.SETTING]))


def up(
    inventory: Inventory,
    view: RunView,
    report: Report,
    options: RunOptions,
    shown: Callable[[Started], None] = lambda _: None,
    *,
    new_password: bool = False,
) -> tuple[Started, RunResult]:
    """Make the registry, let all nodes trust it, and wait until it is ready; all logins of namespaces stay valid.

    ``shown`` gets what was made with each new password, before anything else can fail. Raises WrongInput for settings
    that the cluster contradicts, before anything is changed, and GpunodesError if it does not become ready.
    """
    request = request_of(inventory)
    if request.others:
        report(
            "",
            f"warning: pods of the namespace{'s' if len(request.others) > 1 else ''} {', '.join(request.others)} may "
            f"mount the share {request.share}, and change the images; `namespaces: []` makes it one for the registry",
        )
    with control_planes.connected(inventory, RegistryServer) as api:
        _check_storage(api, request, dry_run=options.dry_run)
        before = api.folder() if api.has_namespace() else ""
        if before and before != request.folder:
            report("", f"warning: the images so far stay in {before}; it serves those in {request.folder} from now on")
        prepared = prepare(api, request, dry_run=options.dry_run)
    started = prepared.started
    shown(started)
    trusted = {"address": request.address, "ca": prepared.material.ca}
    nodes = _nodes(inventory, report)
    ended = carry_out(UP, inventory, nodes, view, replace(options, variables={"wiring_given_registry": trusted}))
    if ended.interrupted:
        return started, ended
    changed = list(started.changed)
    with control_planes.connected(inventory, RegistryServer) as api:
        if new_password and not started.password:
            # Not earlier: the registry reads it within a minute, and then refuses all logins that have the old one.
            prepared = prepare(api, request, dry_run=options.dry_run, new_password=True)
            started = prepared.started
            shown(started)
            changed += started.changed
        changed += deploy(api, request, prepared, dry_run=options.dry_run)
        # Also without a new password: a command that was interrupted may have made one.
        renewed = logins.renew(api, request.address, prepared.material, dry_run=options.dry_run)
        if not options.dry_run:
            report("", "waiting until the registry is ready")
            wait(api, _READY_S, report)
    return replace(started, changed=list(dict.fromkeys(changed)), logins=renewed), ended


def prepare(api: RegistryServer, request: Request, *, dry_run: bool = False, new_password: bool = False) -> Prepared:
    """Everything before the nodes trust it: without a pod, nothing serves yet.

    A Service whose address is taken is refused before anything else is made. What is published belongs to a key that
    is kept.
    """
    exists = api.has_namespace()
    address = api.address() if exists else ""
    if address not in {"", request.address}:
        raise WrongInput(
            f"the registry exists at {address}, and the settings make that {request.address}",
            "the address that it has: the names of its images begin with it",
            f"set {registry.ADDRESS} to {address.partition(':')[0]}; or `gpunodes registry down` first",
        )
    found = api.secret() if exists else None
    before = material.read(found) if found is not None else None
    now = material.wanted(before, request.host, new_password=new_password)
    changed = [api.apply(registry.namespace(), dry_run=dry_run)]
    if dry_run and not exists:
        # The API server checks nothing in a namespace that does not exist.
        objects = [*request.volumes, {"kind": "Secret"}, {"kind": "ConfigMap"}, {"kind": "Service"}]
        changed += [f"{each['kind']} {(each.get('metadata') or {}).get('name', NAME)}" for each in objects]
    else:
        own = [registry.secret(now.data)] if now != before else []
        published = registry.public(request, now.ca, now.certificate)
        for each in (registry.service(request), *own, *request.volumes):
            changed.append(api.apply(each, dry_run=dry_run))
        if not dry_run:
            _check_current(api, now)
        changed.append(api.apply(published, dry_run=dry_run))
    password = "" if dry_run or (before and before.password == now.password) else now.password
    started = Started(
        request.address,
        now.user,
        request.share,
        request.folder,
        request.image,
        _end(now),
        [each for each in changed if each],
        password,
    )
    return Prepared(started, now)


def deploy(api: RegistryServer, request: Request, prepared: Prepared, *, dry_run: bool = False) -> list[str]:
    """Start the registry, or replace its pod if its certificate, login or configuration changed.

    Raises GpunodesError if another command has changed the Secret since: logins would get an old password.
    """
    wanted = registry.deployment(request, prepared.material.certificate, prepared.material.htpasswd)
    if dry_run and not api.has_namespace():
        return [f"Deployment {NAME}"]
    if not dry_run:
        _check_current(api, prepared.material)
    return [each for each in [api.apply(wanted, dry_run=dry_run)] if each]


def _check_current(api: RegistryServer, made: Material) -> None:
    if credentials(api) != made:
        raise GpunodesError(
            "another command makes the registry at this moment", "one command at a time", "run the same command again"
        )


def wait(api: RegistryServer, limit_s: float, report: Report) -> None:
    """Wait until the registry is ready; raises GpunodesError with the cluster's reason if it is not in time."""
    deadline, last = time.monotonic() + limit_s, ""
    while True:
        found = api.deployment()
        reason = api.why_not_ready(found) if found else "it has been deleted"
        if not reason:
            return
        if time.monotonic() > deadline:
            raise GpunodesError(
                f"the registry is not ready after {limit_s:.0f} s: {reason}",
                "a pod that serves it",
                "correct that, then run `gpunodes registry up` again",
            )
        if reason != last:
            report("", f"waiting: {reason}")
            last = reason
        time.sleep(_POLL_S)


def status(inventory: Inventory) -> Status:
    """What the cluster reports of its registry; raises WrongInput without one. The Secret is not read."""
    with control_planes.connected(inventory, RegistryServer) as api:
        return status_of(api)


def status_of(api: RegistryServer) -> Status:
    """The same with a session."""
    public = existing(api)
    read = material.certificates(public.ca, public.certificate)
    if read is None:
        raise GpunodesError(
            f"the ConfigMap {NAMESPACE}/{NAME} has no valid certificate",
            "that of `gpunodes registry up`",
            "run it again",
        )
    found = api.deployment()
    containers = (((found or {}).get("spec") or {}).get("template") or {}).get("spec", {}).get("containers") or [{}]
    if read[1] <= time.time():
        # Its pod is ready all the same: the kubelet's probes accept any certificate.
        problem = f"its certificate ended {certificates.shown(read[1])}; run `gpunodes registry up` again"
    else:
        problem = api.why_not_ready(found) if found else "it has no Deployment; run `gpunodes registry up` again"
    return Status(
        public.address,
        registry.USER,
        api.folder(),
        line(containers[0].get("image", "")),
        problem,
        read[1],
        logins.own(api, public.address),
    )


def existing(api: RegistryServer) -> Any:
    """What the registry has published; raises WrongInput without one."""
    public = api.public() if api.has_namespace() else None
    if public is None:
        raise WrongInput("the cluster has no registry", "that of `gpunodes registry up`", "run it first")
    return public


def down(
    inventory: Inventory, view: RunView, report: Report, options: RunOptions, confirm: Callable[[str], None]
) -> tuple[Sequence[str], str, RunResult | None]:
    """Remove logins, pod, the nodes' trust and all objects; returns these, SERVER:PATH of the images, and the run.

    The run is None if nodes trust none. Images are never removed. What names the address is removed last, so that the
    next run continues if a node fails.
    """
    with control_planes.connected(inventory, RegistryServer) as api:
        exists = api.has_namespace()
        if not exists and not api.volumes():
            return [], "", None
        address = api.address() if exists else ""
        folder = api.folder() if exists else ""
        confirm(
            "nodes can no longer pull from the registry, and pods with its images run until a container restarts "
            f"(Kubernetes 1.35 and later); the images stay{f' in {folder}' if folder else ''}"
        )
        removed = [] if options.dry_run else _stopped(api, address, report)
    ended = None
    if address:
        variables = {"wiring_given_registry": {"address": address, "ca": ""}}
        ended = carry_out(DOWN, inventory, _nodes(inventory, report), view, replace(options, variables=variables))
        if ended.exit_code:
            return removed, folder, ended
    if not options.dry_run:
        with control_planes.connected(inventory, RegistryServer) as api:
            removed += api.remove()
    return removed, folder, ended


def _stopped(api: RegistryServer, address: str, report: Report) -> list[str]:
    report("", "stopping the registry")
    removed = [f"Deployment {NAME}"] if api.stop() else []
    if address and logins.own(api, address):
        gone = registries.logged_out(Registries(api.session), address)
        removed += [f"Secret {each.namespace}/{each.secret}" for each in gone]
    return removed


def _check_storage(api: RegistryServer, request: Request, *, dry_run: bool) -> None:
    # A share for the registry alone has no other volume; if nodes cannot mount it, the wait shows why.
    if request.others and not api.shares(request.share):
        raise WrongInput(
            f"the cluster has no volume of the share {request.share}",
            "shares that nodes can mount",
            "run `gpunodes storage up` first",
        )
    volumes = Objects(api.session)
    present = volumes.present(request.volumes)
    if wrong := storage.conflicts(request.volumes, present):
        raise together(wrong)
    if not dry_run:
        volumes.delete_released(present)


def _nodes(inventory: Inventory, report: Report) -> list[Machine]:
    """The machines of the cluster that are on; the others are reported."""
    nodes, left = switched_off.split(inventory, inventory.machines(Role.CONTROL_PLANE, Role.WORKER))
    for name, why in left.items():
        report(name, why)
    return nodes


def _end(found: Material) -> float:
    read = material.certificates(found.ca, found.certificate)
    return read[1] if read else 0.0


def credentials(api: RegistryServer) -> Material:
    """The material of the registry; raises GpunodesError without it."""
    found: Mapping[str, str] | None = api.secret()
    return material.read(found or {})
