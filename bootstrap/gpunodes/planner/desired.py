"""Computes the desired state of one machine from its facts, its settings and its cluster. Pure.

The playbooks compute it once a run and give each role its part. Whatever is to be installed or configured on a machine
is decided here; only the roles' results in the same run, such as the driver's labels, come later.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpunodes.ansible.module_utils import devices
from gpunodes.ansible.module_utils.host.spec import Firewall, Service, Spec, data_folders
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.ansible.module_utils.proxies import Proxies
from gpunodes.model import Role
from gpunodes.planner import (
    endpoint,
    firewall,
    gpu,
    gpu_serving,
    gpu_software,
    node_address,
    node_software,
    package_sources,
    pools,
    proxies,
    registration,
    registry,
    runtime_versions,
    scaled_pools,
    storage,
    systems,
    time_service,
    versions,
)
from gpunodes.planner.gpu_installed import is_installed, runtimes_of
from gpunodes.planner.gpu_model import Facts, Plan

CONTROL_PLANE = "control_plane"
"""The group of the control-plane machines."""
GPU_HOSTS = "gpu_hosts"
"""The group of the machines with GPUs that do not become nodes."""
_DOCKER = "docker"


@dataclass(frozen=True, slots=True)
class Given:
    """What the desired state of a machine follows from."""

    machine: str
    facts: Facts
    """A result of the module host_facts."""
    settings: Mapping[str, Any]
    """The machine's settings by name, ``gpunodes_runtime``."""
    sources: package_sources.SourceSettings
    docker_systems: Collection[str]
    """Systems, ``debian 12``, that get Docker's containerd unless the settings decide."""
    images: Sequence[str]
    """Images of the network add-on."""
    groups: Collection[str] = ()
    """Groups of the inventory that contain the machine."""
    cluster_version: str = ""
    """The version of the cluster, "" if there is none."""
    node: Mapping[str, Any] = field(default_factory=dict)
    """The machine's node in the cluster (from cluster_info), {} if it has none."""
    reached: str = ""
    """The address or name by which the inventory reaches the machine."""
    joins: bool = False
    """Whether the machine is to be a node: only a node needs an address in the cluster."""
    addresses: Sequence[str] = ()
    """Addresses of the machines and nodes of the cluster; what is no address is left out."""
    control_addresses: Sequence[str] = ()
    """Those of its control planes, if there are several."""
    runtimes: Sequence[str] | None = None
    """Runtimes that get the container toolkit's configuration; None: the runtime of Kubernetes, or of a GPU host."""
    proxies: Mapping[str, Any] = field(default_factory=dict)
    """The machine's HTTP proxies (planner/proxies.py) as plain data, {} for none."""
    endpoint: str = ""
    """HOST:PORT of the API server, which no proxy may stand before; "" if it is unknown."""
    prepares: bool = False
    """Whether the machine is only prepared, and joins later: its kubelet stays off."""
    control_planes: Sequence[str] = ()
    """The addresses of all control planes in the cluster."""
    is_first: bool = False
    """Whether the machine is the first control plane of the inventory."""
    api_check: str = ""
    """The source of keepalived's check of the API server."""
    mig_program: str = ""
    """The source of the program that makes MIG instances."""
    target: str = ""
    """The exact Kubernetes version that replaces the machine's present one; "" keeps that."""
    replaces_runtime: bool = False
    """Whether other versions of the container runtime and the container toolkit are replaced; a node keeps its own."""
    registry: Mapping[str, str] = field(default_factory=dict)
    """``address`` and ``ca`` of the cluster's registry, {} for none."""

    @property
    def is_gpu_host(self) -> bool:
        """Whether the machine is not meant to be a node."""
        return GPU_HOSTS in self.groups


@dataclass(frozen=True, slots=True)
class GpuState:
    """GPU software of a machine; without GPUs all of it is empty."""

    gpus: int
    """Number of GPUs."""
    expected: bool
    """Whether they are only expected, in machines that will boot a copy of this machine's disk."""
    services: Sequence[str]
    labels: Mapping[str, str]
    """Labels of the node that are known without a driver."""
    wanted: Mapping[str, Spec]
    """The desired state for the module host, by role."""
    mig: Mapping[str, int]
    """The MIG instances of each GPU, by profile."""


@dataclass(frozen=True, slots=True)
class Desired:
    """The desired state of a machine."""

    kubernetes_version: str
    """A minor or an exact version."""
    runtime: str
    """containerd or docker; on a GPU host docker if it is requested or installed."""
    socket: str
    """The socket of the runtime, for the kubelet."""
    node_address: str
    """The address of the machine in the cluster; "" unless it is to be a node."""
    images: Sequence[str]
    """Images that a new node needs first."""
    wanted: Mapping[str, Spec]
    """The desired state for the module host, by role; without GPU software."""
    endpoint: Mapping[str, Spec]
    """keepalived, for the role endpoint; only on a control plane with a virtual address."""
    gpu: GpuState
    labels: Mapping[str, str]
    """Labels of the node by its settings: its pool, and additional ones; and the firewalls that gpunodes opens."""
    taints: Sequence[Mapping[str, str]]
    scales: bool
    """Whether the machine belongs to a pool that scales."""


def desired(given: Given) -> Desired | tuple[Problem, ...]:
    """The desired state of a machine, or all reasons why it cannot have the requested GPU software or address.

    Raises WrongInput for settings of the wrong type, an unknown runtime, and an unknown key of a package source.
    """
    allowed = bool(given.settings.get("gpunodes_unsupported_os"))
    given = replace(given, facts=systems.treated(given.facts, unsupported=allowed))
    version = kubernetes_version(given)
    requested = gpu.requested_of(given.settings, version)
    plan = gpu.plan(given.machine, given.facts, requested.without_kubernetes() if given.is_gpu_host else requested)
    address = _address(given)
    keepalived = {} if isinstance(address, Problem) else _endpoint(given, address)
    scales = _scales(given)
    conflict: Problem | None = None
    if scales:
        conflict = registration.conflict(given.machine, given.node) or gpu_serving.conflict(
            given.machine, given.settings
        )
    if not isinstance(plan, Plan) or isinstance(address, Problem) or isinstance(keepalived, Problem) or conflict:
        others = [each for each in (address, keepalived, conflict) if isinstance(each, Problem)]
        return (*(() if isinstance(plan, Plan) else plan), *others)
    runtime = _runtime(given)
    socket = f"unix:///run/{'cri-dockerd.sock' if runtime == 'docker' else 'containerd/containerd.sock'}"
    images = _images(given, plan, version)
    through = _proxies(given, address)
    software = (
        _gpu_host_wanted(given, runtime)
        if given.is_gpu_host
        else _node_wanted(given, plan, version, runtime, socket, images, address)
    )
    toolkits = _toolkit_runtimes(given, runtime)
    of_gpu = gpu_software.by_role(plan, given.facts, given.sources, toolkits, given.mig_program)
    return Desired(
        kubernetes_version=version,
        runtime=runtime,
        socket=socket,
        node_address=address,
        images=images,
        wanted=_completed(given, node_software.kept_by_others(software, given.facts, given.target), through),
        endpoint=_completed(given, keepalived, through),
        gpu=GpuState(
            gpus=len(plan.gpus),
            expected=plan.expected,
            services=gpu_software.services(plan),
            labels=plan.labels,
            wanted=_completed(given, of_gpu, through),
            mig={} if plan.expected else devices.layout(plan.sharing),
        ),
        labels=_labels(given),
        taints=gpu.taints(given.settings, gpus=bool(plan.gpus)),
        scales=scales,
    )


def _images(given: Given, plan: Plan, version: str) -> list[str]:
    """The images that a new node needs first; of a GPU host those that verify its GPUs."""
    of_gpus = [str(given.settings["gpunodes_device_plugin_image"])] if plan.gpus else []
    of_gpus += [str(given.settings["gpunodes_dra_driver_image"])] if plan.serving else []
    sandbox, ready = node_software.sandbox(versions.minor_of(version)), str(given.settings["gpunodes_ready_image"])
    return of_gpus if given.is_gpu_host else [sandbox, *given.images, ready, *of_gpus]


def _address(given: Given) -> str | Problem:
    if not given.joins:
        return ""
    requested = str(given.settings[node_address.SETTING])
    return node_address.chosen(node_address.Addresses(given.machine, requested, given.reached, given.facts, given.node))


def _endpoint(given: Given, address: str) -> Mapping[str, Spec] | Problem:
    """keepalived on a control plane with a virtual address, or why the machine cannot have that."""
    settings = endpoint.settings_of(given.settings)
    if not settings.vip or not address or CONTROL_PLANE not in given.groups:
        return {}
    device = endpoint.interface(given.facts, address, settings.vip)
    if not device:
        return endpoint.outside(given.facts, address, settings.vip)
    made = endpoint.keepalived(settings, device, address, given.control_planes, given.api_check, first=given.is_first)
    # The same rules as the node's: where only the endpoint changes, no other role runs.
    return {"endpoint": replace(made, firewall=_firewall(given, address))}


def _completed(given: Given, wanted: Mapping[str, Spec], through: Proxies | None) -> Mapping[str, Spec]:
    found = runtime_versions.chosen(wanted, given.facts, replaces=given.replaces_runtime)
    # The credentials stay a placeholder: the desired state is shown and kept.
    return {role: replace(spec, proxies=through) for role, spec in found.items()} if through else found


def _proxies(given: Given, address: str) -> Proxies | None:
    """The machine's proxies; it reaches itself, at its ``address`` in the cluster too, and the API server without them.

    Raises WrongInput for a list of hosts that is too long.
    """
    if not given.proxies:
        return None
    # The kubelet of a control plane uses the API server at the machine's own address.
    server = re.sub(r"^https://", "", str(given.facts["kubernetes"].get("server") or ""))
    vip = str(given.settings.get(endpoint.VIP) or "")
    hosts = [given.endpoint, server, address, given.facts.get("default_address") or "", vip]
    return proxies.with_hosts(Proxies(**{**given.proxies, "no_proxy": tuple(given.proxies["no_proxy"])}), hosts)


def _runtime(given: Given) -> str:
    """The container runtime of Kubernetes; of a GPU host the one that people use."""
    requested = str(given.settings["gpunodes_runtime"])
    if given.is_gpu_host:
        return _DOCKER if _DOCKER in runtimes_of(given.facts) else requested
    # A node keeps the runtime that it joined with.
    return str(given.node.get("runtime") or requested)


def _toolkit_runtimes(given: Given, runtime: str) -> Sequence[str]:
    """The runtimes that get the container toolkit's configuration."""
    if given.is_gpu_host:
        # Docker brings containerd, which nobody else uses there.
        return [_DOCKER] if runtime == _DOCKER else runtimes_of(given.facts)
    return [runtime] if given.runtimes is None else given.runtimes


def kubernetes_version(given: Given) -> str:
    """The version that a machine gets: only ``target`` changes that of a node. A new node gets the cluster's."""
    present = given.node.get("version") or given.cluster_version or given.settings["gpunodes_kubernetes_version"]
    return str(given.target or present).removeprefix("v")


def _labels(given: Given) -> dict[str, str]:
    return pools.labels(given.settings, given.groups) | firewall.labels(
        given.facts, given.settings["gpunodes_firewall"]
    )


def _scales(given: Given) -> bool:
    """Whether the machine is switched on and off as pods need it; control planes and GPU hosts never are."""
    stays = CONTROL_PLANE in given.groups or given.is_gpu_host
    return not stays and scaled_pools.scales(given.settings["gpunodes_pools"], pools.pool(given.settings, given.groups))


def _registration(given: Given, plan: Plan) -> dict[str, Spec]:
    """How a worker registers its node; nothing on a machine that is only prepared."""
    if CONTROL_PLANE in given.groups or given.prepares:
        return {}
    if not _scales(given):
        return {"registration": registration.unregistered()}
    name, is_woken = given.node.get("name") or given.facts["hostname"], given.settings["gpunodes_bmc_type"] == "wol"
    labels, taints = {**plan.labels, **_labels(given)}, gpu.taints(given.settings, gpus=bool(plan.gpus))
    return {"registration": registration.registered(str(name).lower(), labels, taints, without_bmc=is_woken)}


def _node(given: Given, runtime: str, address: str) -> Spec:
    """The kernel, time service and data of a node, and the ports that the machine's firewalls let in."""
    time = time_service.time_service(given.facts, given.settings)
    found = node_software.node(time, data_folders(runtime), str(given.settings["gpunodes_data_directory"]))
    return replace(found, firewall=_firewall(given, address))


def _firewall(given: Given, address: str) -> Firewall | None:
    """What the machine's firewalls let in; None if they stay as they are."""
    settings = given.settings
    if settings["gpunodes_firewall"] != firewall.OPEN:
        return None
    role = Role.CONTROL_PLANE if CONTROL_PLANE in given.groups else Role.WORKER
    pods, shared = str(settings["gpunodes_pod_subnet"]), given.control_planes if settings.get(endpoint.VIP) else ()
    return firewall.wanted(
        role,
        [*given.addresses, address],
        pods,
        given.control_addresses,
        shared,
        network=str(settings["gpunodes_network"]),
        storage=storage.serves(settings[storage.SETTING], given.groups),
    )


def _node_wanted(
    given: Given, plan: Plan, version: str, runtime: str, socket: str, images: Sequence[str], address: str
) -> dict[str, Spec]:
    """The software of the node, by role."""
    minor, exact = versions.minor_of(version), versions.is_exact(version)
    # kube-proxy's version may be known only after the packages' version is resolved.
    proxy = f"registry.k8s.io/kube-proxy:v{version if exact else '{kubelet}'}"
    system, community = given.facts["os"], _from_docker(given)
    repositories = [package_sources.docker(given.sources, system)] if community else []
    sandbox = node_software.sandbox(minor)
    with_docker = runtime == _DOCKER
    # People's Docker stays, with the source of its packages, which a second file for the same source would break.
    for_people = not with_docker and _DOCKER in runtimes_of(given.facts)
    dnf = given.facts["package_manager"] == "dnf"
    found = {
        "node": _node(given, runtime, address),
        "containerd": node_software.containerd(
            [] if for_people and is_installed(given.facts, "containerd.io") else repositories,
            sandbox,
            given.settings["gpunodes_image_mirrors"],
            community=community,
            version=runtime_versions.pattern(str(given.settings[runtime_versions.SETTING])),
            images=[] if with_docker else [*([proxy] if exact else ()), *images],
        ),
        "kubernetes": node_software.kubernetes(
            version,
            package_sources.kubernetes(given.sources, minor, "rpm" if dnf else "deb"),
            package_manager="dnf" if dnf else "apt",
            kubectl=CONTROL_PLANE in given.groups,
            socket=socket,
            gates=plan.gates,
            pod_pids_limit=int(given.settings["gpunodes_pod_pids_limit"]),
            images=[] if with_docker or exact else [proxy],
            prepares=given.prepares,
            replace=bool(given.target),
        ),
        **_registration(given, plan),
        **storage.clients(given.settings, given.facts["package_manager"]),
    }
    if with_docker:
        found["docker"] = node_software.docker(repositories, system, _users(given), community=community)
        found["cri_dockerd"] = node_software.cri_dockerd(package_sources.cri_dockerd(given.sources), sandbox)
    elif for_people:
        found["docker"] = Spec(members={"docker": _users(given)})
    if registry.is_trusted(given.registry, given.settings):
        runtimes = {_DOCKER} if with_docker else {"containerd", _DOCKER} if for_people else {"containerd"}
        found["registry_trust"] = registry.trust(given.registry["address"], given.registry["ca"], runtimes)
    return found


def _gpu_host_wanted(given: Given, runtime: str) -> dict[str, Spec]:
    """Docker for people, on a machine that is not meant to be a node. Installed packages stay those that they are."""
    if runtime != _DOCKER:
        return {}
    system, installed = given.facts["os"], _DOCKER in runtimes_of(given.facts)
    community = is_installed(given.facts, "docker-ce") if installed else _from_docker(given)
    repositories = [package_sources.docker(given.sources, system)] if community and not installed else []
    docker = node_software.docker(repositories, system, _users(given), community=community)
    made = replace(
        docker,
        # People who installed Docker themselves also upgrade it.
        packages=tuple(replace(package, hold=not installed) for package in docker.packages),
        # containerd is a dependency of Docker's packages, and pulls images from mirrors.
        files=node_software.registry_hosts(given.settings["gpunodes_image_mirrors"]),
        directories=(*docker.directories, *node_software.CONTAINERD_FOLDERS),
        services=(Service("containerd"), *docker.services),
        moved={name: folder for name, folder in data_folders(runtime).items() if name != "kubelet"},
        data_directory=str(given.settings["gpunodes_data_directory"]),
    )
    return {"docker": made}


def _users(given: Given) -> Sequence[str]:
    return [str(name) for name in given.settings["gpunodes_docker_users"] or ()]


def _from_docker(given: Given) -> bool:
    source, installed = str(given.settings["gpunodes_containerd_source"]), is_installed(given.facts, "containerd.io")
    return package_sources.from_docker(given.facts["os"], source, given.docker_systems, installed=installed)
