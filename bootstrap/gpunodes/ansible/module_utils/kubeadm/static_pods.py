"""Restarts static pods of the control plane, one at a time.

The kubelet stops a static pod whose manifest is gone, and starts it again when the manifest is back. While it is away,
the ledger has its place: the next run moves back what an interrupted one left there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from .. import disk, ledger
from ..problem import MachineProblem
from ..process import run
from .reset import runtime_socket

FOLDER = "/etc/kubernetes/manifests"
AWAY = "/etc/kubernetes/gpunodes-manifests"
"""On the same file system: a rename moves a manifest as a whole. The kubelet does not read this folder."""
_POLL_S = 1.0


def heal() -> list[str]:
    """Move back the manifests that an interrupted restart left away; returns the names of their pods."""
    machine_ledger = ledger.load()
    healed = []
    for path, away in list(machine_ledger.manifests.items()):
        if os.path.lexists(away):
            if os.path.lexists(path):
                # kubeadm, or an administrator, wrote a new one meanwhile.
                disk.remove(away)
            else:
                os.rename(away, path)
                healed.append(os.path.basename(path).rpartition(".yaml")[0])
        del machine_ledger.manifests[path]
        machine_ledger.save()
    return healed


def is_unhealed() -> bool:
    """Whether an interrupted restart left a manifest away."""
    return bool(ledger.load().manifests)


def restart(name: str, limit_s: float, is_ready: Callable[[], bool]) -> None:
    """Restart the static pod ``name``, kube-apiserver for example, and wait until it ``is_ready``.

    Raises MachineProblem if its containers do not end, or it is not ready again, within ``limit_s`` each; its manifest
    is in its place then too.
    """
    heal()
    path, away = f"{FOLDER}/{name}.yaml", f"{AWAY}/{name}.yaml"
    if not os.path.exists(path):
        raise MachineProblem(
            f"{path} does not exist", f"the static pod {name} of a control plane", "see `ls /etc/kubernetes/manifests`"
        )
    machine_ledger = ledger.load()
    machine_ledger.manifests[path] = away
    machine_ledger.save()
    os.makedirs(AWAY, mode=0o700, exist_ok=True)
    os.rename(path, away)
    try:
        _wait(lambda: not running(name), limit_s, f"the containers of {name} do not end")
    finally:
        heal()
    _wait(is_ready, limit_s, f"{name} is not ready after its restart")


def running(name: str) -> list[str]:
    """The ids of the running containers of a static pod; raises MachineProblem if the runtime does not tell them."""
    argv = ["crictl", f"--runtime-endpoint={runtime_socket()}", "--timeout=30s"]
    found = run([*argv, "ps", "--quiet", "--state=Running", f"--name=^{name}$"], 60)
    if not found.ok:
        raise MachineProblem(
            f"the containers of {name} cannot be listed: {found.err.strip()}", "a container runtime that responds"
        )
    return found.out.split()


def _wait(condition: Callable[[], bool], limit_s: float, problem: str) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise MachineProblem(
                problem, f"that within {limit_s:.0f} s", "see `journalctl -u kubelet` and `crictl ps -a` there"
            )
        time.sleep(_POLL_S)
