"""The feature gates with which the kubelets of a cluster run.

Each kubelet reports the configuration to which its files and arguments add up, without defaults of gates. Sources:
kubernetes.io, "Set Kubelet Parameters Via A Configuration File"; cmd/kubelet/app/server.go of 1.36 (initConfigz).
"""

from __future__ import annotations

import queue
import random
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .. import kube_api, kubeconfig
from ..kube_api import ApiError, Client, Limits
from ..kubeadm.expected import Workshop
from ..problem import MachineProblem
from . import nodes

CONFIG = f"{kube_api.SYSTEM}/configmaps/kubelet-config"
"""The configuration of kubelets that join or are upgraded; kubeadm keeps it."""
_CONFIG_NAME = "the ConfigMap kubelet-config in kube-system"
_AT_ONCE = 32
"""Kubelets that are queried at once."""
_KUBELET = Limits(call_s=4, whole_s=4, most=1 << 18)
"""A kubelet's configuration has a few kilobytes."""
_WHOLE_S = 20.0
"""Seconds after which no further kubelet is queried."""
_PATIENCE_S = 10
_MOST = 500
"""Gates of one kubelet, as in planner/reports.py; it knows some 250."""
_GATE = re.compile(r"[A-Za-z0-9]{1,100}")
_OWN = "gpunodes://"
"""How the providerID of a node begins that a machine of a pool that scales has registered (planner/registration.py)."""


def report() -> dict[str, Any]:
    """The gates as the module ``kubelet_gates`` returns them; a problem is a part of the result."""
    empty: dict[str, Any] = {"problem": "", "cluster": {}, "nodes": {}, "silent": {}}
    config = kubeconfig.load(kubeconfig.ADMIN)
    if config is None:
        return empty
    try:
        client = Client(config, _PATIENCE_S)
        names = [node["metadata"]["name"] for node in client.get("/api/v1/nodes")["items"] if _is_compared(node)]
        of_cluster = cluster_gates(client)
    except MachineProblem as problem:
        return {**empty, "problem": str(problem)}
    found, silent = read(config, names)
    return {**empty, "cluster": of_cluster, "nodes": found, "silent": silent}


def _is_compared(node: Mapping[str, Any]) -> bool:
    """Whether a node is Ready, and gpunodes made it one: it does not change kubelets of others."""
    annotations = node["metadata"].get("annotations") or {}
    own = nodes.READY_BOOT in annotations or str((node.get("spec") or {}).get("providerID") or "").startswith(_OWN)
    return own and not nodes.not_ready(node)


def cluster_gates(client: Client) -> dict[str, bool]:
    """The gates in the ConfigMap of all kubelets, {} without one; raises MachineProblem if it cannot be read."""
    text = str(((client.find(CONFIG) or {}).get("data") or {}).get("kubelet") or "")
    if "featureGates" not in text:
        return {}
    with Workshop() as workshop:
        return checked(workshop.data(text, _CONFIG_NAME), _CONFIG_NAME)


def read(config: kubeconfig.Kubeconfig, names: Sequence[str]) -> tuple[dict[str, dict[str, bool]], dict[str, str]]:
    """The gates of these nodes' kubelets, and why others are unknown: none is waited for longer than a few seconds."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    # Those that hang are often neighbours by name, and would use up the time of all others.
    for name in random.sample(names, len(names)):
        waiting.put(name)
    found: dict[str, dict[str, bool]] = {}
    silent = dict.fromkeys(names, f"it was not queried within {_WHOLE_S:.0f} s")
    deadline = time.monotonic() + _WHOLE_S

    def work(_: int) -> None:
        client = Client(config, patience_s=-1, limits=_KUBELET)
        while time.monotonic() < deadline:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                break
            try:
                found[name] = of_kubelet(client.get(f"/api/v1/nodes/{name}/proxy/configz"))
            except MachineProblem as problem:
                silent[name] = _reason(problem)
        client.close()

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(work, range(min(_AT_ONCE, len(names)))))
    return found, {name: why for name, why in silent.items() if name not in found}


def _reason(problem: MachineProblem) -> str:
    if isinstance(problem, ApiError) and not problem.status:
        return f"no complete answer within {_KUBELET.call_s:.0f} s"
    return str(problem)[:300]


def of_kubelet(answer: Any) -> dict[str, bool]:
    """The gates in a kubelet's answer, which is untrusted; raises MachineProblem for one of another form."""
    return checked(answer.get("kubeletconfig") if isinstance(answer, dict) else None, "its answer")


def checked(configuration: Any, what: str) -> dict[str, bool]:
    """The gates of a KubeletConfiguration; raises MachineProblem, with ``what`` it is, unless they are gates."""
    found = configuration.get("featureGates") or {} if isinstance(configuration, dict) else None
    if (
        isinstance(found, dict)
        and len(found) <= _MOST
        and all(_GATE.fullmatch(name) and isinstance(value, bool) for name, value in found.items())
    ):
        return found
    raise MachineProblem(f"{what} has no valid feature gates", "the configuration of a kubelet, with true or false")
