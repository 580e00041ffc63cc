"""How a control plane differs from its settings: static pods, kubeadm's configuration, and what is never changed. Pure.

Documents are JSON that kubectl made of YAML files, which anyone may have edited: no value has an assured type.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CONFIG = "kubeadm-config"
"""The ConfigMap with kubeadm's ClusterConfiguration, from which joins and upgrades take the settings."""
AUDIT_POLICY = "audit policy"
CERTIFICATE = "API server's certificate"
CLUSTER = "cluster"
ETCD, API_SERVER = "etcd", "kube-apiserver"
SECTIONS: Mapping[str, tuple[str, ...]] = {
    ETCD: ("etcd", "local"),
    API_SERVER: ("apiServer",),
    "kube-controller-manager": ("controllerManager",),
    "kube-scheduler": ("scheduler",),
}
"""The static pods in the order in which they are changed, with their sections of the ClusterConfiguration."""
FIXED: Mapping[str, frozenset[str]] = {
    ETCD: frozenset(
        {
            *("advertise-client-urls", "data-dir", "initial-advertise-peer-urls", "initial-cluster"),
            *("initial-cluster-state", "initial-cluster-token", "listen-client-urls", "listen-peer-urls", "name"),
        }
    ),
    API_SERVER: frozenset(
        {
            *("advertise-address", "encryption-provider-config", "etcd-servers", "kubelet-certificate-authority"),
            *("secure-port", "service-cluster-ip-range"),
        }
    ),
    "kube-controller-manager": frozenset({"cluster-cidr", "node-cidr-mask-size", "service-cluster-ip-range"}),
    "kube-scheduler": frozenset(),
}
"""Arguments that are decided when the cluster is created or a member joins: data in etcd, other machines, or addresses
depend on them. They stay as they run, whatever the settings say."""
OWN_VOLUMES = frozenset({"gpunodes", "audit"})
"""The additional volumes of the API server that the settings decide (role control_plane); others stay."""
MOST = 200
"""Most differences in a report."""
_SHOWN = 100
"""Most characters of a value in a message."""
_DEPTH = 20


@dataclass(frozen=True)
class Drift:
    """One difference; ``running`` or ``wanted`` is None where the thing is not set."""

    component: str
    """A static pod, or one of the constants above."""
    name: str
    """An argument (``--v``), or a path in the pod (``spec.volumes[audit].hostPath.path``)."""
    running: str | None
    wanted: str | None
    kind: str = "settings"
    """"settings"; "foreign": neither kubeadm nor the settings know it; "fixed": it is never changed."""

    @property
    def changes(self) -> bool:
        """Whether the settings are applied to it."""
        return self.kind != "fixed"


def shown(text: str | None) -> str | None:
    """A value in a message: a long one might be anything."""
    if text is None or len(text) <= _SHOWN:
        return text
    return f"{text[:60]}... ({len(text)} characters)"


def arguments(pod: Any, component: str) -> dict[str, str]:
    """The arguments of a component's container, by name without dashes; those that are repeated are joined."""
    found: dict[str, str] = {}
    for text in _command(_container(pod, component))[1:]:
        name, separator, value = text.partition("=")
        name = name.lstrip("-") if text.startswith("-") else text
        value = value if separator else "true" if text.startswith("-") else ""
        found[name] = f"{found[name]},{value}" if name in found else value
    return found


def image(pod: Any, component: str) -> str:
    """The image of a component's container, "" if it has none."""
    found = _container(pod, component).get("image")
    return found if isinstance(found, str) else ""


def extra_arguments(configuration: Any, component: str) -> dict[str, str]:
    """The additional arguments of a component in a ClusterConfiguration (v1beta4), by name."""
    listed = section(configuration, component).get("extraArgs")
    pairs = [each for each in listed if isinstance(each, Mapping)] if isinstance(listed, list) else []
    return {str(each.get("name")): str(each.get("value", "")) for each in pairs}


def section(configuration: Any, component: str) -> Mapping[str, Any]:
    """The section of a component in a ClusterConfiguration, {} without one."""
    found = configuration
    for key in SECTIONS[component]:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def volumes(configuration: Any) -> list[Mapping[str, Any]]:
    """The additional volumes of the API server in a ClusterConfiguration."""
    listed = section(configuration, API_SERVER).get("extraVolumes")
    return [each for each in listed if isinstance(each, Mapping)] if isinstance(listed, list) else []


def merged(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The stored ClusterConfiguration with the parts that settings decide from ``wanted``, which has those parts alone.

    Fixed arguments and volumes that are not gpunodes' own stay as stored.
    """
    made: dict[str, Any] = json.loads(json.dumps(stored))
    for component, keys in SECTIONS.items():
        own = made
        for key in keys:
            own[key] = dict(own[key]) if isinstance(own.get(key), Mapping) else {}
            own = own[key]
        before = extra_arguments(stored, component)
        given = {name: value for name, value in extra_arguments(wanted, component).items() if _is_free(component, name)}
        kept = {name: value for name, value in before.items() if not _is_free(component, name)}
        own["extraArgs"] = _listed({**given, **kept})
    own = made["apiServer"]
    kept_volumes = [each for each in volumes(stored) if each.get("name") not in OWN_VOLUMES]
    own["extraVolumes"] = _mounting([*volumes(wanted), *kept_volumes], [*volumes(stored)], own["extraArgs"])
    return made


def with_running(configuration: Mapping[str, Any], pods: Mapping[str, Any]) -> dict[str, Any]:
    """The ClusterConfiguration for one machine: fixed arguments are those with which its ``pods`` run."""
    made: dict[str, Any] = json.loads(json.dumps(configuration))
    for component, keys in SECTIONS.items():
        running = arguments(pods.get(component), component)
        own = made
        for key in keys:
            own = own[key]
        given = {each["name"]: each["value"] for each in own["extraArgs"] if _is_free(component, each["name"])}
        kept = {name: running[name] for name in sorted(FIXED[component]) if name in running}
        own["extraArgs"] = _listed({**given, **kept})
    own = made["apiServer"]
    own["extraVolumes"] = _mounting(own["extraVolumes"], own["extraVolumes"], own["extraArgs"])
    return made


def of_pod(component: str, running: Any, wanted: Any, stored: Mapping[str, Any]) -> list[Drift]:
    """How the manifest of a static pod differs from the wanted one, images aside.

    ``stored`` is the ClusterConfiguration before: an argument that it does not have, and kubeadm neither, is foreign.
    """
    if running == wanted:
        return []
    before, after = arguments(running, component), arguments(wanted, component)
    known = extra_arguments(stored, component)
    found = []
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            foreign = name not in after and name not in known
            kind = "foreign" if foreign else "settings"
            found.append(Drift(component, _flag(name), before.get(name), after.get(name), kind))
    old, new = (dict(_flat(_without_command(pod, component))) for pod in (running, wanted))
    for path in sorted(old.keys() | new.keys()):
        if old.get(path) != new.get(path):
            found.append(Drift(component, path, *_values(path, old.get(path), new.get(path))))
    return found


def of_configuration(stored: Mapping[str, Any], wanted: Mapping[str, Any], pods: Sequence[Drift]) -> list[Drift]:
    """How kubeadm's configuration in the cluster differs, beside what differs in the ``pods`` just the same."""
    reported = {(each.component, each.name) for each in pods}
    found = []
    for component in SECTIONS:
        before, after = extra_arguments(stored, component), extra_arguments(wanted, component)
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name) and (component, _flag(name)) not in reported:
                found.append(Drift(CONFIG, f"{component} {_flag(name)}", before.get(name), after.get(name)))
    if not any(each.component == API_SERVER and "olumes" in each.name for each in pods):
        sides = [sorted(json.dumps(each, sort_keys=True) for each in volumes(side)) for side in (stored, wanted)]
        if sides[0] != sides[1]:
            old, new = (", ".join(str(each.get("name")) for each in volumes(side)) for side in (stored, wanted))
            found.append(Drift(CONFIG, "volumes of kube-apiserver", old or None, new or None))
    return found


def of_creation(
    given: Mapping[str, Any], stored: Mapping[str, Any], pods: Mapping[str, Any], networks: Mapping[str, str]
) -> list[Drift]:
    """What the settings request otherwise and is never changed; ``networks``: podSubnet and serviceSubnet."""
    found = []
    for component in SECTIONS:
        running = arguments(pods.get(component), component)
        asked = extra_arguments(given, component)
        stored_ones = extra_arguments(stored, component)
        for name in sorted(FIXED[component]):
            # What only kubeadm's defaults decide is no matter of the settings.
            if (name in asked or name in stored_ones) and asked.get(name) != running.get(name):
                found.append(Drift(component, _flag(name), running.get(name), asked.get(name), "fixed"))
    own = stored.get("networking")
    for name, wanted in networks.items():
        present = own.get(name) if isinstance(own, Mapping) else None
        if wanted and present != wanted:
            found.append(Drift(CLUSTER, name, None if present is None else str(present), wanted, "fixed"))
    return found


def has_pending(found: Sequence[Drift], component: str) -> bool:
    """Whether something of a component is to be changed."""
    return any(each.component == component and each.changes for each in found)


def _is_free(component: str, name: str) -> bool:
    return name not in FIXED[component]


def _listed(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _mounting(
    wanted: Sequence[Mapping[str, Any]], stored: Sequence[Mapping[str, Any]], listed: Sequence[Mapping[str, str]]
) -> list[Mapping[str, Any]]:
    """The volumes; the folder of gpunodes is one of them exactly if an argument names a file in it."""
    folder = next((each for each in (*wanted, *stored) if each.get("name") == "gpunodes"), None)
    others = [each for each in wanted if each.get("name") != "gpunodes"]
    if folder is None or not any(each["value"].startswith(f"{folder.get('mountPath')}/") for each in listed):
        return others
    return [folder, *others]


def _flag(name: str) -> str:
    return f"--{name}"


def _container(pod: Any, component: str) -> Mapping[str, Any]:
    """The container of a component, {} if the pod has none."""
    spec = pod.get("spec") if isinstance(pod, Mapping) else None
    listed = spec.get("containers") if isinstance(spec, Mapping) else None
    found = [each for each in listed if isinstance(each, Mapping)] if isinstance(listed, list) else []
    return next((each for each in found if each.get("name") == component), {})


def _command(container: Mapping[str, Any]) -> list[str]:
    parts = [container.get(key) for key in ("command", "args")]
    return [str(text) for part in parts if isinstance(part, list) for text in part]


def _without_command(pod: Any, component: str) -> Any:
    """The pod without what ``arguments`` and ``image`` return, and without its status."""
    own = _container(pod, component)
    if not own:
        return pod
    rest = {key: value for key, value in own.items() if key not in {"command", "args", "image"}}
    program = _command(own)[:1]
    spec = {**pod["spec"], "containers": [rest if each is own else each for each in pod["spec"]["containers"]]}
    return {**{key: value for key, value in pod.items() if key != "status"}, "spec": spec, "program": program}


def _flat(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """The leaves of a document by their paths; items of a list by their names, so that their order does not matter."""
    if isinstance(value, Mapping) and value and depth < _DEPTH:
        for key, each in value.items():
            yield from _flat(each, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, list) and (names := _names(value)) and depth < _DEPTH:
        for name, each in zip(names, value):
            yield from _flat(each, f"{path}[{name}]", depth + 1)
    elif value not in (None, {}, []):
        yield path, value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _names(items: Sequence[Any]) -> list[str]:
    """Names that identify the items, [] if they have none."""
    for key in ("mountPath", "name"):
        names = [str(each[key]) for each in items if isinstance(each, Mapping) and isinstance(each.get(key), str)]
        if len(names) == len(items) and all(count == 1 for count in Counter(names).values()):
            return names
    return []


def _values(path: str, before: str | None, after: str | None) -> tuple[str | None, str | None]:
    """The values as they may be shown: a variable of the environment may hold a password."""
    if ".env[" in path or path.endswith(".env") or '"env"' in f"{before}{after}":
        return (before and "one value", after and "another value")
    return before, after
