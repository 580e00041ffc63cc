"""The configuration that a kubelet should have, by where it comes from. Pure.

Each layer overrides the one before: the ConfigMap of all kubelets, kubeadm's patches on a control plane, and the files
that gpunodes writes on the machine (planner/node_software.py, planner/registration.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpunodes.errors import WrongInput
from gpunodes.planner import drift, gates, gpu, pools, registration, scaled_pools

GATES, PIDS, PROVIDER, TAINTS = "featureGates", "podPidsLimit", "providerID", "registerWithTaints"
"""Fields that gpunodes sets on a machine."""
FIELDS = (GATES, PIDS, PROVIDER, TAINTS, "cgroupDriver", "serverTLSBootstrap")
"""All fields that it sets, the last ones when it creates a cluster. Others come from patches for kubeadm."""
PATCHES = "gpunodes_kubeadm_patches"
STARTING = registration.STARTING["key"]
"""The key of the taint with which only a node of a pool that scales registers."""
_PATCHED = "kubeletconfiguration"
"""How the names of patches of the kubelets' configuration begin. Source: `kubeadm join --help`, --patches."""
_PIDS_SETTING = "gpunodes_pod_pids_limit"
_GATES_SETTING = "gpunodes_feature_gates"
_UNSET: tuple[Any, ...] = (None, "", "0s", 0, [], {})
"""What kubeadm writes into the ConfigMap for a field that has its default: durations and structures without omitempty.

Source: kubernetes 1.36, KubeletConfiguration."""

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kubelet:
    """The kubelet of a machine."""

    machine: str
    node: str
    version: str
    gpus: bool
    """Whether its node has GPUs."""
    settings: Mapping[str, Any]
    """The machine's settings, as the inventory has them."""
    control_plane: bool = False
    """Whether it is that of a control plane: only there kubeadm gets patches."""
    groups: Collection[str] = ()
    """Groups of the inventory that contain the machine."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A value that the configuration should have."""

    value: Any
    source: str
    """What says so, as in "the settings say"."""
    kind: str
    """What applies it, as in ``drift.DriftDifference``."""


@dataclass(slots=True)
class Layers:
    """What is wanted, by path, and the paths about which nothing is known: what is below them is not compared."""

    wanted: dict[Path, Wanted] = field(default_factory=dict)
    unknown: set[Path] = field(default_factory=set)

    def put(self, path: Path, value: Any, source: str, kind: str) -> None:
        """A layer sets a value; maps are merged."""
        for leaf, each in leaves(value, path):
            self.drop(leaf)
            self.wanted[leaf] = Wanted(each, source, kind)

    def drop(self, path: Path) -> None:
        """A layer replaces or removes what is below a path."""
        for below in [each for each in self.wanted if each[: len(path)] == path]:
            del self.wanted[below]

    def forget(self, path: Path) -> None:
        """What a layer makes of this path cannot be told."""
        self.drop(path)
        self.unknown.add(path)

    def is_unknown(self, path: Path) -> bool:
        """Whether a path, or one above it, cannot be told."""
        return any(path[:length] in self.unknown for length in range(1, len(path) + 1))

    def knows(self, path: Path) -> bool:
        """Whether a value may be at a path."""
        return path in self.wanted or self.is_unknown(path)


def of(kubelet: Kubelet, of_cluster: Mapping[str, Any]) -> Layers | None:
    """The layers of a kubelet; None if settings are templates, which only Ansible can render."""
    patches = kubelet.settings[PATCHES] or {}
    requested = kubelet.settings[_GATES_SETTING] or {}
    if not isinstance(patches, Mapping) or not isinstance(requested, Mapping):
        return None
    made = Layers()
    for path, value in leaves(of_cluster):
        if value is False or value not in _UNSET:
            made.put(path, value, "the cluster's kubelet-config says", drift.UPGRADE)
    for name in sorted(map(str, patches)) if kubelet.control_plane else ():
        if name.startswith(_PATCHED):
            _patch(made, patches[name])
    _own(made, kubelet, requested)
    return made


def fields(settings: Mapping[str, Any]) -> set[str]:
    """The fields that patches of the kubelet's configuration name."""
    patches, made = settings[PATCHES], Layers()
    for name, patch in patches.items() if isinstance(patches, Mapping) else ():
        if str(name).startswith(_PATCHED):
            _patch(made, patch)
    return {path[0] for path in (*made.wanted, *made.unknown)}


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The values of a document by their paths; a list is one value."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from leaves(each, (*path, str(key)))
    elif path:
        yield path, value


def _patch(made: Layers, patch: object) -> None:
    """Apply a patch in the forms of `kubeadm --patches`: a strategic or merge patch, or the list of RFC 6902."""
    if isinstance(patch, Mapping):
        for path, value in leaves(patch):
            if path[0] in {"apiVersion", "kind"}:
                continue
            directive = next((length for length, name in enumerate(path) if name.startswith("$")), None)
            if value is None or directive is not None or _is_template(value):
                made.forget(path[:directive] or path[:1])
            else:
                made.put(path, value, "the settings say", drift.UPGRADE)
    for operation in patch if isinstance(patch, list) else ():
        if isinstance(operation, Mapping):
            _operate(made, operation)


def _operate(made: Layers, operation: Mapping[str, Any]) -> None:
    parts = str(operation.get("path")).split("/")[1:]
    path = tuple(part.replace("~1", "/").replace("~0", "~") for part in parts)
    if not path or not path[0]:
        return
    is_item = any(part == "-" or part.isdecimal() for part in path)
    value = operation.get("value")
    if operation.get("op") in {"add", "replace"} and not is_item and not _is_template(value):
        made.drop(path)
        made.put(path, value, "the settings say", drift.UPGRADE)
    else:
        made.forget(path[:1] if is_item else path)


def _own(made: Layers, kubelet: Kubelet, requested: Mapping[str, Any]) -> None:
    """The files that gpunodes writes on the machine."""

    def put(field: str, value: Any) -> None:
        made.put((field,), value, "the settings say", drift.KUBELET)

    plain = {name: value for name, value in requested.items() if isinstance(value, bool)}
    for name in requested.keys() - plain.keys():
        made.forget((GATES, str(name)))
    if wanted := gates.wanted(kubelet.version, plain, gpus=kubelet.gpus):
        put(GATES, wanted)
    limit = kubelet.settings[_PIDS_SETTING]
    if isinstance(limit, bool) or not isinstance(limit, int):
        made.forget((PIDS,))
    elif limit >= 0:
        put(PIDS, limit)
    if (registers := _registers(kubelet)) is None:
        made.forget((PROVIDER,))
        made.forget((TAINTS,))
    elif registers:
        put(PROVIDER, registration.provider_id(kubelet.node))
        put(TAINTS, registration.started_with(gpu.taints(kubelet.settings, gpus=kubelet.gpus)))


def _registers(kubelet: Kubelet) -> bool | None:
    """Whether the kubelet registers a node of a pool that scales; None if the settings do not tell."""
    of_pools, taints = kubelet.settings["gpunodes_pools"], kubelet.settings["gpunodes_node_taints"]
    if _is_template(of_pools) or _is_template(taints) or _is_template(kubelet.settings["gpunodes_pool"]):
        return None
    try:
        pool = pools.pool(kubelet.settings, kubelet.groups)
    except WrongInput:
        return None
    return not kubelet.control_plane and scaled_pools.scales(of_pools, pool)


def _is_template(value: object) -> bool:
    return "{{" in str(value)
