"""The settings with which the kubelets of a cluster run.

Each kubelet reports the configuration to which its files and arguments add up: with defaults, but without those of
feature gates. Sources: kubernetes.io, "Set Kubelet Parameters Via A Configuration File"; cmd/kubelet/app/server.go of
1.36 (initConfigz).
"""

from __future__ import annotations

import json
import queue
import random
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .. import kube_api, kubeconfig, nesting, scaling
from ..kube_api import ApiError, Client, Limits
from ..kubeadm.expected import Workshop
from ..problem import MachineProblem
from . import nodes

CONFIG = f"{kube_api.SYSTEM}/configmaps/kubelet-config"
"""The configuration of kubelets that join or are upgraded; kubeadm keeps it."""
_CONFIG_NAME = "the ConfigMap kubelet-config in kube-system"
_AT_ONCE = 128
"""Kubelets that are queried at once; the API server admits 400 requests (--max-requests-inflight)."""
_KUBELET = Limits(call_s=4, whole_s=4, most=1 << 18)
"""A kubelet's configuration has a few kilobytes."""
_WHOLE_S = 8.0
"""Seconds for all kubelets together: whatever they do, a command waits no longer."""
_PATIENCE_S = 10
_MOST = 1 << 15
"""Characters of these fields of one kubelet: its 250 gates have some 10,000."""


def report(fields: Collection[str]) -> dict[str, Any]:
    """These fields of the kubelets' configurations as the module ``kubelet_settings`` returns them.

    Each field is one text of JSON: it is of any type, and nothing on its way to the controller changes it. A problem is
    a part of the result.
    """
    empty: dict[str, Any] = {"problem": "", "cluster": {}, "nodes": {}, "silent": {}}
    config = kubeconfig.load(kubeconfig.ADMIN)
    if config is None:
        return empty
    try:
        client = Client(config, _PATIENCE_S)
        names = [node["metadata"]["name"] for node in client.get("/api/v1/nodes")["items"] if _is_compared(node)]
        of_cluster = cluster_settings(client, fields) if names else {}
    except MachineProblem as problem:
        return {**empty, "problem": str(problem)}
    found, silent = read(config, names, fields)
    return {**empty, "cluster": of_cluster, "nodes": found, "silent": silent}


def _is_compared(node: Mapping[str, Any]) -> bool:
    """Whether a node is Ready, and gpunodes made it one: it does not change kubelets of others."""
    annotations = node["metadata"].get("annotations") or {}
    # planner/registration.py sets the providerID.
    provider_id = str((node.get("spec") or {}).get("providerID") or "")
    own = nodes.READY_BOOT in annotations or provider_id.startswith(scaling.PROVIDER)
    return own and not nodes.not_ready(node)


def cluster_settings(client: Client, fields: Collection[str]) -> dict[str, str]:
    """The fields in the ConfigMap of all kubelets, {} without one; raises MachineProblem if it cannot be read."""
    text = str(((client.find(CONFIG) or {}).get("data") or {}).get("kubelet") or "")
    if not text.strip():
        return {}
    with Workshop() as workshop:
        return chosen(workshop.data(text, _CONFIG_NAME), fields, _CONFIG_NAME)


def read(
    config: kubeconfig.Kubeconfig, names: Sequence[str], fields: Collection[str]
) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """The settings of these nodes' kubelets, and why others are unknown, after ``_WHOLE_S`` at the latest."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    # Those that hang are often neighbours by name, and would use up the time of all others.
    for name in random.sample(names, len(names)):
        waiting.put(name)
    found: dict[str, dict[str, str]] = {}
    silent = dict.fromkeys(names, f"no answer within the {_WHOLE_S:.0f} s for all kubelets")
    deadline = time.monotonic() + _WHOLE_S

    def work() -> None:
        client = Client(config, patience_s=-1, limits=_KUBELET)
        while time.monotonic() < deadline:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                break
            try:
                # Never in pages: what a kubelet sends is no list.
                found[name] = of_kubelet(client.call("GET", f"/api/v1/nodes/{name}/proxy/configz"), fields)
            except MachineProblem as problem:
                silent[name] = _reason(problem)
        client.close()

    # Not joined beyond the deadline, and not at the end of the program: they may still wait for a kubelet.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_AT_ONCE, len(names)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    known = found.copy()
    return known, {name: why for name, why in silent.copy().items() if name not in known}


def _reason(problem: MachineProblem) -> str:
    if isinstance(problem, ApiError) and not problem.status:
        return f"no complete answer within {_KUBELET.call_s:.0f} s"
    return str(problem)[:300]


def of_kubelet(answer: Any, fields: Collection[str]) -> dict[str, str]:
    """The fields in a kubelet's answer, which is untrusted; raises MachineProblem for one of another form."""
    return chosen(answer.get("kubeletconfig") if isinstance(answer, dict) else None, fields, "its answer")


def chosen(configuration: Any, fields: Collection[str], what: str) -> dict[str, str]:
    """These fields of a KubeletConfiguration, each as JSON; raises MachineProblem, with ``what`` it is."""
    if not isinstance(configuration, dict):
        raise MachineProblem(f"{what} has no configuration", "the configuration of a kubelet")
    given = {name: configuration[name] for name in fields if name in configuration}
    if nesting.is_deep(given):
        raise MachineProblem(f"{what} is nested too deeply", f"at most {nesting.LEVELS} levels")
    found = {name: json.dumps(value, sort_keys=True) for name, value in given.items()}
    if sum(map(len, found.values())) > _MOST:
        raise MachineProblem(f"{what} is too long", f"at most {_MOST} characters of the fields that are compared")
    return found
