"""kubeadm join."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from typing import Any

from .. import disk, facts, kubeconfig, ledger
from ..masking import Secret
from ..problem import MachineProblem
from ..report import Difference, Report
from . import command, reset

_FLAGS = "/var/lib/kubelet/kubeadm-flags.env"
"""The kubelet's arguments, as kubeadm writes them; they override its configuration."""


def join(
    endpoint: str,
    token: str,
    ca_hash: str,
    registered: bool,
    settings: Mapping[str, Any],
    limit_s: float,
    check: bool,
    *,
    ended: bool = False,
) -> Report:
    """Make this machine a worker; the report is empty if it is one and its node is ``registered``.

    One whose kubelet's certificate has ``ended`` is none: its kubelet does not start.
    """
    machine_ledger = ledger.load()
    report = Report()
    if _joined(ca_hash) and registered and not ended:
        if machine_ledger.kubeadm != "join started":
            return report
        report.add("finish an interrupted kubeadm join", _became_worker("interrupted"))
        if not check:
            _end(machine_ledger)
        return report
    leftovers = reset.leftovers()
    if leftovers:
        if not machine_ledger.kubeadm:
            reset.check_own(leftovers, ca_hash)
        report.add("reset an earlier join", _became_worker("interrupted"))
    document = {
        "apiVersion": "kubeadm.k8s.io/v1beta4",
        "kind": "JoinConfiguration",
        "discovery": {
            "bootstrapToken": {"token": Secret(token), "apiServerEndpoint": endpoint, "caCertHashes": [ca_hash]},
        },
        **settings,
    }
    report.add("kubeadm join", _became_worker("none"), Difference("configuration of kubeadm join", {}, document))
    if check:
        return report
    if not token:
        raise MachineProblem(
            "no token to join with", "a fresh token", "run the complete playbook, without --tags or --start-at-task"
        )
    command.begin(machine_ledger, "join started", taken_over=bool(leftovers))
    if leftovers:
        reset.reset()
    command.run("join", [document], limit_s)
    _end(machine_ledger)
    return report


def _end(machine_ledger: ledger.Ledger) -> None:
    """Finish after kubeadm succeeded.

    The taints of the first registration leave the kubelet's arguments, where they would override those with which the
    node of a pool that scales registers at each start.
    """
    text = disk.read(_FLAGS) or ""
    without = re.sub(r" ?--register-with-taints=[^\s\"]*", "", text)
    if without != text:
        state = os.lstat(_FLAGS)
        disk.write(_FLAGS, without, stat.S_IMODE(state.st_mode))
    command.end(machine_ledger, "join done")


def _became_worker(before: str) -> Difference:
    return Difference("kubeadm", {"worker": before}, {"worker": "complete"})


def _joined(ca_hash: str) -> bool:
    """Whether this machine is a worker of the cluster with this CA, according to the machine's files."""
    state = facts.kubernetes()
    if state["ca_hash"] and state["ca_hash"] != ca_hash and os.path.exists(kubeconfig.KUBELET):
        raise MachineProblem(
            f"this machine belongs to another cluster ({state['server']})",
            "a machine of this cluster, or outside any cluster",
            "if that cluster no longer exists, run gpunodes reset",
        )
    if state["role"] == "control_plane":
        raise MachineProblem(
            "this machine is a control plane", "a machine that can become a worker", "choose another one"
        )
    return bool(state["role"] == "worker" and state["ca_hash"] == ca_hash)
