"""Which versions of Kubernetes are installed, running and configured, by what the machine and its cluster hold."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping

from .. import disk, kube_api
from ..kube_api import Client
from ..process import run

MANIFESTS = "/etc/kubernetes/manifests"
COMPONENTS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
ETCD = "etcd"
_VERSION = re.compile(r"v?(\d+\.\d+\.\d+)\b")


def program(name: str) -> str:
    """The version of kubeadm or the kubelet on disk, ``1.36.3``; "" if it is not installed."""
    argv = {"kubeadm": ["kubeadm", "version", "--output=short"], "kubelet": ["kubelet", "--version"]}[name]
    found = _VERSION.search(run(argv, 30).out)
    return found.group(1) if found else ""


def manifest(name: str) -> str | None:
    """The manifest of a static pod; None if it does not exist."""
    return disk.read(f"{MANIFESTS}/{name}.yaml")


def images() -> dict[str, str]:
    """The tags of the static pods' images, by component: ``{"kube-apiserver": "v1.36.3", "etcd": "3.6.8-0"}``."""
    texts = {name: manifest(name) or "" for name in (*COMPONENTS, ETCD)}
    tags = {name: re.search(r"^\s*image: \"?\S+:([\w.-]+)\"?\s*$", text, re.MULTILINE) for name, text in texts.items()}
    return {name: tag.group(1) for name, tag in tags.items() if tag}


def arguments(text: str) -> dict[str, str]:
    """The arguments in a manifest that kubeadm wrote, by name: ``    - --profiling=false``."""
    found = re.findall(r"^\s*- \"?--([a-z0-9-]+)(?:=(.*?))?\"?\s*$", text, re.MULTILINE)
    return dict(found)


def configured(client: Client) -> str:
    """The version in the cluster's kubeadm-config, ``1.36.3``; "" if it has none."""
    document = client.find(f"{kube_api.SYSTEM}/configmaps/kubeadm-config") or {}
    text = str((document.get("data") or {}).get("ClusterConfiguration") or "")
    found = re.search(r"^kubernetesVersion: \"?v?(\d+\.\d+\.\d+)\"?\s*$", text, re.MULTILINE)
    return found.group(1) if found else ""


def numbers(version: str) -> tuple[int, ...]:
    """A version that can be compared: (1, 36, 3)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def backups(folder: str, prefix: str) -> list[str]:
    """kubeadm's backups in ``folder`` whose names begin with ``prefix``, the oldest first."""
    return sorted(glob.glob(f"{glob.escape(folder)}/{prefix}*"), key=os.path.getmtime)


def complete(role: str, target: str, kubelet: str, running: Mapping[str, str], cluster: str) -> bool:
    """Whether ``kubeadm upgrade`` has nothing to do.

    A worker's kubelet is replaced only afterwards, so its version shows that. On a control plane, the manifests and the
    cluster's configuration do.
    """
    if role == "worker":
        return kubelet == target
    return cluster == target and all(running.get(name) == f"v{target}" for name in COMPONENTS)
