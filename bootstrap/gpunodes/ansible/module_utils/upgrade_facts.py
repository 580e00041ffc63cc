"""Reads what an upgrade of Kubernetes depends on: of a machine, and of its cluster on a control plane."""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import os
import re
import shutil
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin

from . import disk, image_query, kube_api, ledger, packages, process
from .cluster.nodes import NETWORK_LABEL, NETWORK_PODS
from .host import images as containerd_images
from .kube_api import Client
from .kubeadm import compared, drift, versions
from .problem import MachineProblem
from .proxies import Proxies, opener, within

PACKAGES = ("kubeadm", "kubectl", "kubelet")
_KUBELET = "/var/lib/kubelet"
# kubeadm's arguments of the kubelet, and those of its administrator (KUBELET_EXTRA_ARGS) on systems with apt and dnf.
_ENVIRONMENTS = (f"{_KUBELET}/kubeadm-flags.env", "/etc/default/kubelet", "/etc/sysconfig/kubelet")
_INDEX_LIMIT = 64 << 20
"""Bytes of a package source's index, uncompressed."""
_ANSWER_LIMIT_S = 30
_WHOLE_S = 180
_STARTS_S = 10
"""Seconds for an API server that starts at the moment."""
_MOST = 200
"""Deprecated APIs that are reported."""
_RELEASE = re.compile(r"[1-9]\d?\.\d{1,3}")
_NAME = re.compile(r"[A-Za-z0-9./:_@-]{0,300}")
_GPU_PODS = "name in (nvidia-device-plugin-ds,nvidia-dra-driver)"
"""The pods of the device plugin, and of the driver for dynamic resource allocation."""
_FEATURE_GATES = re.compile(r"[\"']?featureGates[\"']?[ ]*:")
_TRUE = ("true", "yes", "on")
_GATE_NAME = re.compile(r"[A-Za-z0-9]{1,100}")
_GATE = re.compile(r"\b([A-Za-z0-9]{1,100})[\"']?[ ]*:[ ]*(true|false|yes|no|on|off)\b", re.IGNORECASE)
_DEPRECATED = "apiserver_requested_deprecated_apis{"


@dataclass(frozen=True)
class Sources:
    """Where a machine would get what an upgrade needs."""

    url: str = ""
    """The package source of the requested minor, with ``{format}`` for deb or rpm; "" asks none."""
    requested: str = ""
    """The requested version, a minor or an exact one."""
    images: Sequence[str] = ()
    """The images that the machine would fetch, with ``{version}`` for the exact version."""
    mirrors: Mapping[str, str] = field(default_factory=dict)
    """URLs by the names of registries."""
    proxies: Proxies | None = None


def read(
    sources: Sources, cluster: bool, patches: Mapping[str, Mapping[str, Any]], timeouts: Mapping[str, Any]
) -> dict[str, Any]:
    """The machine, and with ``cluster`` its cluster too; kubeadm will upgrade it with ``patches`` and ``timeouts``."""
    offered, unread = _offered(sources.url, sources.proxies) if sources.url else ({}, "")
    texts = {name: versions.manifest(name) or "" for name in versions.COMPONENTS}
    given = {name: versions.arguments(text) for name, text in texts.items() if text}
    environment = "\n".join([_unit(), *(disk.read(path) or "" for path in _ENVIRONMENTS)])
    found = ledger.load()
    return {
        "kubeadm": versions.program("kubeadm"),
        "kubelet": versions.program("kubelet"),
        "images": versions.images(),
        # Only names, and the values of feature gates: other arguments may be secret.
        "arguments": {name: sorted(found) for name, found in given.items()},
        "gates": {name: gates_of(found.get("feature-gates", "")) for name, found in given.items()},
        "kubelet_arguments": kubelet_arguments(environment),
        "kubelet_gates": _gates_of_files(environment, found.files) | argument_gates(environment),
        "unpackaged": _unpackaged(),
        "unfinished": bool(found.upgrade),
        # Of a control plane that gpunodes made this is drift, which is compared with the settings.
        **({"lost": [], "not_compared": ""} if found.kubeadm or not any(texts.values()) else _lost(patches, timeouts)),
        "offered": offered,
        "unread": unread,
        "fetched": _fetched_images(sources, offered),
        **_requested(),
        "cluster": _cluster(kube_api.admin()) if cluster else None,
    }


def _requested() -> dict[str, Any]:
    """The deprecated APIs that were requested of the API server on this machine, or why that is not known.

    Each API server counts what it was asked itself.
    """
    if not compared.is_control_plane():
        return {"deprecated": [], "metrics_unread": ""}
    try:
        found = compared.own_client(_STARTS_S).get("/metrics")
    except MachineProblem as problem:
        return {"deprecated": [], "metrics_unread": str(problem)[:300]}
    return {"deprecated": deprecated(str(found.get("message") or "")), "metrics_unread": ""}


def _unpackaged() -> list[str]:
    """Programs on this node that no package installed: a package's would be another one. kubeadm may be missing."""
    found = {name: shutil.which(name, path=process.PATH) for name in ("kubeadm", "kubelet")}
    return [name for name, path in found.items() if path != f"/usr/bin/{name}" and (path or name == "kubelet")]


def _lost(patches: Mapping[str, Mapping[str, Any]], timeouts: Mapping[str, Any]) -> dict[str, Any]:
    """What kubeadm will change in the manifests of others beside versions, or why that is not known; no values."""
    try:
        differences = compared.lost(patches, timeouts, compared.own_client())[: drift.MOST]
    except MachineProblem as problem:
        return {"lost": [], "not_compared": str(problem)[:300]}
    return {"lost": [{"component": each.component, "name": each.name} for each in differences], "not_compared": ""}


def _fetched_images(sources: Sources, offered: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Of which exact version the images were looked for, those that are nowhere, and why others are unknown.

    The version is the newest that the package source offers of the requested minor, as the upgrade chooses it.
    """
    numbers = versions.numbers(sources.requested)
    known = [each for each in offered.get("kubeadm", ()) if versions.numbers(each)[: len(numbers)] == numbers]
    if not known or not sources.images:
        return {"version": "", "missing": [], "unasked": ""}
    version = max(known, key=versions.numbers)
    try:
        is_present = containerd_images.lister()
    except MachineProblem as problem:
        return {"version": version, "missing": [], "unasked": str(problem)[:300]}
    wanted = [name.replace("{version}", version) for name in sources.images]
    missing, unasked = image_query.missing(
        [name for name in wanted if not is_present(name)], sources.mirrors, sources.proxies
    )
    return {"version": version, "missing": missing, "unasked": unasked}


def gates_of(text: str) -> dict[str, bool]:
    """The value of ``--feature-gates``: ``A=true,kube:B=false``; gates of other components are left out."""
    found = {}
    for part in text.split(","):
        name, separator, value = part.strip().rpartition("=")
        component, _, gate = name.rpartition(":")
        if separator and component in {"", "kube"} and value.lower() in {"true", "false"}:
            found[gate] = value.lower() == "true"
    return found


def kubelet_arguments(text: str) -> list[str]:
    """The names of the arguments in files such as kubeadm-flags.env: ``KUBELET_KUBEADM_ARGS="--node-ip=10.0.0.2"``."""
    return sorted(set(re.findall(r"(?:^|[\s\"'=])--([a-z0-9-]+)", text)))


def argument_gates(text: str) -> dict[str, bool]:
    """The feature gates among the kubelet's arguments in such files."""
    found: dict[str, bool] = {}
    for value in re.findall(r"--feature-gates[= ]([A-Za-z0-9=,:]+)", text):
        found.update(gates_of(value))
    return found


def _unit() -> str:
    """The files of the kubelet's unit, without comments: they may have arguments, too."""
    lines = process.run(["systemctl", "cat", "kubelet.service"], _ANSWER_LIMIT_S).out.splitlines()
    return "\n".join(line for line in lines if not line.startswith(("#", ";")))


def _gates_of_files(arguments: str, own: Container[str]) -> dict[str, bool]:
    """The feature gates of the kubelet's configuration and of the files in its --config-dir, as it merges them.

    Without files of gpunodes itself, ``own``: an upgrade writes these anew before it starts the kubelet. Source:
    kubernetes.io, "Set Kubelet Parameters Via A Configuration File".
    """
    found = kubelet_gates(disk.read(f"{_KUBELET}/config.yaml") or "")
    folders = re.findall(r"--config-dir[= ]([^\s\"']+)", arguments)
    # Of an argument that is given again the kubelet takes the last one.
    for folder in folders[-1:]:
        paths = sorted(os.path.join(where, name) for where, _, names in os.walk(folder) for name in names)
        for path in paths[:_MOST]:
            if path.endswith(".conf") and path not in own:
                found |= kubelet_gates(disk.read(path) or "")
    return found


def kubelet_gates(text: str) -> dict[str, bool]:
    """The feature gates in a file of the kubelet's configuration, YAML or JSON, which may be written by hand."""
    with contextlib.suppress(ValueError):
        document = json.loads(text)
        given = document.get("featureGates") if isinstance(document, dict) else None
        gates = given.items() if isinstance(given, dict) else ()
        return {name: value for name, value in gates if isinstance(value, bool) and _GATE_NAME.fullmatch(name)}
    lines = [re.sub(r"(^|\s)#.*", "", line) for line in text.splitlines()]
    lines = [line for line in lines if line.strip()]
    first = next((number for number, line in enumerate(lines) if _FEATURE_GATES.match(line)), len(lines))
    inside = itertools.takewhile(lambda line: line[0] in " \t}", lines[first + 1 :])
    block = "\n".join([*(_FEATURE_GATES.sub("", line) for line in lines[first : first + 1]), *inside])
    return {name: value.lower() in _TRUE for name, value in _GATE.findall(block)}


def _offered(url: str, proxies: Proxies | None) -> tuple[dict[str, list[str]], str]:
    """The versions of the packages in a source, and why it could not be read.

    The index is read without its signature: it only tells early what the package manager checks again.
    """
    apt = isinstance(packages.detect(), packages.Apt)
    base = url.replace("{format}", "deb" if apt else "rpm").rstrip("/") + "/"
    try:
        if apt:
            return parse_packages(_fetched(f"{base}Packages", proxies)), ""
        return _of_rpm(base, proxies), ""
    except (OSError, ValueError, EOFError, MachineProblem) as error:
        return {}, str(getattr(error, "reason", None) or error)[:300] or type(error).__name__


def _of_rpm(base: str, proxies: Proxies | None) -> dict[str, list[str]]:
    index = _fetched(f"{base}repodata/repomd.xml", proxies)
    place = re.search(r'<data type="primary">.*?<location href="([^"]+)"', index, re.DOTALL)
    if place is None or not place.group(1).endswith(".gz"):
        raise MachineProblem("its index is not in a known format (primary.xml.gz)")
    return parse_primary(_fetched(urljoin(base, place.group(1)), proxies))


def _fetched(url: str, proxies: Proxies | None) -> str:
    def read() -> bytes:
        with opener(proxies).open(url, timeout=_ANSWER_LIMIT_S) as response:
            content: bytes = response.read(_INDEX_LIMIT + 1)
            return content

    if not url.startswith(("http://", "https://")):
        raise MachineProblem("its index is not at an http or https address")
    content = within(_WHOLE_S, read)
    if url.endswith(".gz"):
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as unpacked:
            content = unpacked.read(_INDEX_LIMIT + 1)
    if len(content) > _INDEX_LIMIT:
        raise MachineProblem(f"its index has more than {_INDEX_LIMIT >> 20} MiB")
    return content.decode("utf-8", "replace")


def parse_packages(text: str) -> dict[str, list[str]]:
    """The upstream versions of Kubernetes' packages in an apt index, ``1.36.3``, newest first."""
    found: dict[str, set[str]] = {}
    for stanza in text.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version): (\S+)$", stanza, re.MULTILINE))
        _note(found, fields.get("Package", ""), fields.get("Version", ""))
    return _sorted(found)


def parse_primary(text: str) -> dict[str, list[str]]:
    """The same for an rpm index, primary.xml."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"<name>([^<]+)</name>.*?<version [^>]*?ver=\"([^\"]+)\"", text, re.DOTALL):
        _note(found, name, version)
    return _sorted(found)


def _note(found: dict[str, set[str]], name: str, version: str) -> None:
    upstream = packages.upstream(version)
    if name in PACKAGES and re.fullmatch(r"\d{1,4}\.\d{1,4}\.\d{1,4}", upstream):
        found.setdefault(name, set()).add(upstream)


def _sorted(found: Mapping[str, set[str]]) -> dict[str, list[str]]:
    return {name: sorted(each, key=versions.numbers, reverse=True) for name, each in found.items()}


def _cluster(client: Client) -> dict[str, Any]:
    """The cluster of this control plane. Values of another form, which a user may have set, become ""."""
    pods = client.get(NETWORK_PODS, labelSelector=NETWORK_LABEL)["items"]
    pods += client.get(f"{kube_api.SYSTEM}/pods", labelSelector=_GPU_PODS)["items"]
    images = {str(each.get("image")) for pod in pods for each in pod["spec"].get("containers", ())}
    return {
        "configured": versions.configured(client),
        "gates": configured_gates(client.find(f"{kube_api.SYSTEM}/configmaps/kubeadm-config") or {}),
        "coredns": _image(client, "deployments/coredns"),
        "proxy": _image(client, "daemonsets/kube-proxy"),
        "addons": sorted(name for name in images if _NAME.fullmatch(name))[:_MOST],
    }


def configured_gates(document: Mapping[str, Any]) -> dict[str, bool]:
    """The feature gates of all components in kubeadm-config (v1beta4), which the next upgrade writes into manifests."""
    text = str((document.get("data") or {}).get("ClusterConfiguration") or "")
    values = re.findall(r"name: \"?feature-gates\"?[ ]*\n[ ]*value: ['\"]?([^'\"\n]*)", text)
    return {name: value for each in values for name, value in gates_of(each).items()}


def _image(client: Client, path: str) -> str:
    """The image of a workload's first container, "" for none."""
    found = client.find(f"/apis/apps/v1/namespaces/kube-system/{path}")
    containers = found["spec"]["template"]["spec"]["containers"] if found else []
    name = str(containers[0].get("image") or "") if containers else ""
    return name if _NAME.fullmatch(name) else ""


def deprecated(metrics: str) -> list[dict[str, str]]:
    """The deprecated APIs that were requested since this API server started, and the release that removes each.

    Source: the metric apiserver_requested_deprecated_apis (kubernetes.io, "Deprecated API Migration Guide").
    """
    found = []
    for line in metrics.splitlines():
        if not line.startswith(_DEPRECATED):
            continue
        labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
        release = labels.get("removed_release", "")
        group = f"{labels['group']}/" if labels.get("group") else ""
        api = f"{group}{labels.get('version', '')} {labels.get('resource', '')}"
        if _RELEASE.fullmatch(release) and re.fullmatch(r"[a-z0-9./-]{1,200} [a-z0-9.-]{1,100}", api):
            found.append({"api": api, "removed": release})
    return found[:_MOST]
