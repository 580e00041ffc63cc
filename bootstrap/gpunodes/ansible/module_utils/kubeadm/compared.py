"""Compares the control plane on this machine with its settings; changes nothing."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .. import certificate, disk, kube_api, ledger, static_pod_files
from ..kube_api import Client
from ..ledger import Ledger
from ..problem import MachineProblem
from . import api_certificate, drift, expected, static_pods, versions
from .drift import Drift

_READ_S = 10
"""Seconds for an API server that starts at the moment, where differences are only shown."""
_PATIENCE_S = 60
_MINOR = re.compile(r"v?(\d+\.\d+)\.")


@dataclass(frozen=True)
class Wanted:
    """What the settings say about a control plane."""

    configuration: Mapping[str, Any]
    """The sections of a ClusterConfiguration (v1beta4) that they decide."""
    patches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON files of the API server by path."""
    networks: Mapping[str, str] = field(default_factory=dict)
    """podSubnet and serviceSubnet, which are only compared."""
    timeouts: Mapping[str, Any] = field(default_factory=dict)
    """kubeadm's time limits (v1beta4): it writes one of them into the manifests, for the start of each static pod."""


@dataclass(frozen=True)
class Compared:
    """What was found."""

    drift: Sequence[Drift]
    stored: Mapping[str, Any]
    """The ClusterConfiguration in the cluster."""
    configuration: Mapping[str, Any]
    """What it is to be."""
    manifests: Mapping[str, str]
    """What the manifests are to be, by component."""
    names: Sequence[str]
    """Names that the API server's certificate lacks."""
    address: str
    """At which the API server on this machine listens."""
    node: str
    """The name of its node."""

    def pending(self, component: str) -> bool:
        """Whether a static pod is to be changed."""
        return drift.has_pending(self.drift, component) or (
            component == drift.API_SERVER and drift.has_pending(self.drift, drift.AUDIT_POLICY)
        )


def report(wanted: Wanted, *, foreign: bool = False) -> dict[str, Any]:
    """The differences as the module ``control_plane_drift`` returns them; a problem is a part of the result.

    ``foreign``: a control plane that gpunodes did not make is compared, too; nothing applies the settings to it.
    """
    empty: dict[str, Any] = {"managed": False, "problem": "", "unverified": False, "differences": [], "left_out": 0}
    try:
        machine_ledger = ledger.load()
        made = machine_ledger.kubeadm.endswith(" done")
        if not (made or foreign) or not is_control_plane():
            return empty
        empty |= {"managed": made, "unverified": bool(machine_ledger.control_plane)}
        found = compare(wanted, own_client(_READ_S))
    except MachineProblem as problem:
        return {**empty, "problem": str(problem)}
    differences = [
        {**asdict(each), "running": drift.shown(each.running), "wanted": drift.shown(each.wanted)}
        for each in found.drift
    ]
    left_out = max(0, len(differences) - drift.MOST)
    return {**empty, "differences": differences[: drift.MOST], "left_out": left_out}


def is_control_plane() -> bool:
    """Whether the machine has an API server, also one whose manifest is away for a moment."""
    return manifest(drift.API_SERVER) is not None


def manifest(component: str) -> str | None:
    """The manifest of a static pod in its place, or where an interrupted restart left it; None without one."""
    text = disk.read(static_pod_files.path(component))
    return disk.read(static_pods.away(component)) if text is None else text


def address() -> str:
    """The address of this machine's API server, "" if its manifest has none."""
    return static_pod_files.argument(drift.API_SERVER, "advertise-address", manifest(drift.API_SERVER) or "")


def own_client(patience_s: float = _PATIENCE_S) -> Client:
    """The client of the API server on this machine, which may start at the moment."""
    return kube_api.local(address() or "127.0.0.1", patience_s)


def stored_configuration(client: Client, workshop: expected.Workshop) -> dict[str, Any]:
    """The ClusterConfiguration in the cluster."""
    text = str((client.get(api_certificate.KUBEADM_CONFIG).get("data") or {}).get("ClusterConfiguration") or "")
    found = workshop.data(text, "the ConfigMap kubeadm-config in kube-system")
    expected.check_version(found)
    return found


def compare(wanted: Wanted, client: Client) -> Compared:
    """Compare manifests, kubeadm's configuration, files and the certificate; raises MachineProblem."""
    with expected.Workshop() as workshop:
        pods, stored, place = _read(workshop, client)
        configuration = drift.merged(stored, wanted.configuration)
        own = drift.with_running(configuration, pods)
        texts = workshop.manifests(own, place, wanted.patches, wanted.timeouts, pods)
        found: list[Drift] = []
        manifests = {}
        for component, made in texts.items():
            pod = workshop.data(made, f"kubeadm's manifest of {component}")
            manifests[component] = expected.with_image(made, component, pod, pods[component])
            found += drift.of_pod(component, pods[component], pod, stored)
    found += drift.of_configuration(stored, configuration, found)
    found += _of_files(wanted.files)
    missing = _missing_names(stored)
    found += [Drift(drift.CERTIFICATE, name, None, "a name in it") for name in missing]
    found += drift.of_creation(wanted.configuration, stored, pods, wanted.networks)
    return Compared(found, stored, configuration, manifests, missing, place["address"], place["name"])


def lost(patches: Mapping[str, Mapping[str, Any]], timeouts: Mapping[str, Any], client: Client) -> list[Drift]:
    """What the next upgrade by kubeadm, with these patches and time limits, changes in the manifests beside versions.

    Neither kubeadm's configuration in the cluster nor ``patches`` have it: a user edited a manifest, or gave kubeadm
    patches of their own. Raises MachineProblem.
    """
    with expected.Workshop() as workshop:
        pods, stored, place = _read(workshop, client)
        kept = drift.merged(stored, stored)
        kept["apiServer"]["extraVolumes"] = drift.volumes(stored)
        found: list[Drift] = []
        texts = workshop.manifests(drift.with_running(kept, pods), place, patches, timeouts, pods)
        for component, made in texts.items():
            pod = workshop.data(made, f"kubeadm's manifest of {component}")
            found += drift.of_pod(component, pods[component], pod, stored)
    return found


def _read(workshop: expected.Workshop, client: Client) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """The static pods, kubeadm's configuration in the cluster, and the machine's address and name in it."""
    pods = {component: workshop.data(_present(component), f"the manifest of {component}") for component in _ALL}
    stored = stored_configuration(client, workshop)
    _check_kubeadm(pods)
    running = drift.arguments(pods[drift.API_SERVER], drift.API_SERVER)
    node = drift.arguments(pods[drift.ETCD], drift.ETCD).get("name", "")
    place = {"address": running.get("advertise-address", ""), "name": node}
    _check_place(place)
    return pods, stored, place


_ALL = tuple(drift.SECTIONS)


def _present(component: str) -> str:
    text = manifest(component)
    if text is None:
        raise MachineProblem(
            f"{static_pod_files.path(component)} does not exist",
            "the four static pods of a control plane with its own etcd",
            "see `ls /etc/kubernetes/manifests`, and the copies of kubeadm in /etc/kubernetes/tmp",
        )
    return text


def _check_kubeadm(pods: Mapping[str, Any]) -> None:
    """Raise MachineProblem if kubeadm would write manifests of another minor: an upgrade is not finished."""
    installed = versions.program("kubeadm")
    tag = drift.image(pods[drift.API_SERVER], drift.API_SERVER).rpartition(":")[2]
    minors = [found.group(1) if (found := _MINOR.match(each)) else each for each in (installed, tag)]
    if minors[0] != minors[1]:
        raise MachineProblem(
            f"kubeadm {installed or '(none)'} is not of the version of the API server: {tag[:40] or 'unknown'}",
            "both of one minor version",
            "finish the upgrade of this control plane: `gpunodes rollout status`",
        )


def _check_place(place: Mapping[str, str]) -> None:
    """Raise MachineProblem for an address or a name that a manifest of kubeadm does not have."""
    try:
        ipaddress.ip_address(place["address"])
        valid = bool(re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", place["name"]))
    except ValueError:
        valid = False
    if not valid:
        raise MachineProblem(
            "the manifests have no --advertise-address of the API server, or no --name of etcd",
            "those that kubeadm wrote",
            "restore them from the copies of kubeadm in /etc/kubernetes/tmp",
        )


def _of_files(files: Mapping[str, Mapping[str, Any]]) -> list[Drift]:
    """Files of the API server with other content than the settings'; those that it no longer reads do no harm."""
    found = []
    for path, content in files.items():
        try:
            present = json.loads(disk.read(path) or "null")
        except (ValueError, RecursionError):
            present = "unreadable"
        if present != content:
            running = None if present is None else _rules(present)
            found.append(Drift(drift.AUDIT_POLICY, os.path.basename(path), running, _rules(content, present)))
    return found


def _rules(content: Any, other: Any = None) -> str:
    """What is said about a policy: its content is long."""
    rules = content.get("rules") if isinstance(content, Mapping) else None
    count = f"{len(rules)} rule{'s'[: len(rules) != 1]}" if isinstance(rules, list) else "another document"
    others = other.get("rules") if isinstance(other, Mapping) else None
    alike = isinstance(rules, list) and isinstance(others, list) and len(others) == len(rules)
    return f"{count}, others" if alike else count


def _missing_names(stored: Mapping[str, Any]) -> list[str]:
    """The names of kubeadm's configuration that the API server's certificate lacks."""
    section = drift.section(stored, drift.API_SERVER)
    listed = section.get("certSANs")
    wanted = [each for each in listed if isinstance(each, str)] if isinstance(listed, list) else []
    endpoint = stored.get("controlPlaneEndpoint")
    host = endpoint.rpartition(":")[0] or endpoint if isinstance(endpoint, str) else ""
    present = {_plain(name) for name in certificate.names_of_pem(disk.read(api_certificate.CERTIFICATE) or "")}
    return [name for name in dict.fromkeys([*wanted, *([host] if host else [])]) if _plain(name) not in present]


def _plain(name: str) -> str:
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name.lower()


def check_machine(machine_ledger: Ledger) -> None:
    """Raise MachineProblem for a machine whose settings are not changed now."""
    if not machine_ledger.kubeadm.endswith(" done"):
        raise MachineProblem(
            "gpunodes did not make this machine a control plane, or has not finished",
            "a control plane that gpunodes created or joined",
            "finish `gpunodes up` first; change another one by hand, as kubeadm's documentation says",
        )
    if machine_ledger.upgrade:
        raise MachineProblem(
            "an upgrade of this control plane is not finished",
            "a control plane of one version",
            "finish it first: `gpunodes rollout resume`",
        )
