"""Gives a restore of etcd up: the untouched old data is started again, in steps that may be interrupted anywhere.

All control planes must be given back before one of them can be ready, because the old members need their quorum: the
first step starts them, and the second one waits.
"""

from __future__ import annotations

import os

from . import etcd_data, etcd_restore, etcd_snapshot, ledger, tree
from .kubeadm import static_pods
from .ledger import Ledger
from .problem import MachineProblem
from .report import Difference, Report


def start(check: bool) -> tuple[Report, list[str]]:
    """Put the old data back, and start the control plane of this machine; nothing without an unfinished restore.

    Returns also what a person must know. Raises MachineProblem, with nothing changed, if there is no old data.
    """
    report = Report()
    machine_ledger = ledger.load()
    state = machine_ledger.etcd_restore
    if not state or _is_started(machine_ledger):
        return report, []
    _check_old_data(state)
    moved = bool(_kept(state))
    here = "of the backup" if moved else "stopped"
    report.add("start the old data of etcd again", Difference("etcd", {"data": here}, {"data": "before the restore"}))
    if check:
        return report, []
    notes = ["kubelets that followed the restored state may miss changes: restart them"] if moved else []
    state["state"] = etcd_data.ABORTED
    machine_ledger.save()
    _take_back(machine_ledger)
    return report, notes


def verify(limit_s: float) -> None:
    """Wait until the control plane that ``start`` started is ready, then forget the restore; raises MachineProblem."""
    machine_ledger = ledger.load()
    if machine_ledger.etcd_restore.get("state") != etcd_data.ABORTED:
        return
    for name in reversed(etcd_restore.COMPONENTS):
        etcd_restore.wait_ready(name, limit_s)
    etcd_restore.clean_new()
    machine_ledger.etcd_restore = {}
    machine_ledger.save()


def _is_started(machine_ledger: Ledger) -> bool:
    """Whether an earlier run has put the old data back and started the control plane."""
    state = machine_ledger.etcd_restore
    return state["state"] == etcd_data.ABORTED and "before" not in state and not machine_ledger.manifests


def _kept(state: dict[str, str]) -> str:
    """The folder of the old data that was moved aside, "" if it is in its place."""
    folder = f"{etcd_snapshot.DATA}/{state['before']}" if state.get("before") else ""
    return folder if folder and os.path.isdir(f"{folder}/member") else ""


def _check_old_data(state: dict[str, str]) -> None:
    # What is in its place after the move is of the backup. Without data etcd would begin an empty cluster.
    in_place = state["state"] != "swapped" and os.path.isdir(f"{etcd_snapshot.DATA}/member")
    if not _kept(state) and not in_place:
        raise MachineProblem(
            f"the data of etcd from before the restore is not in {etcd_snapshot.DATA}",
            f"{etcd_data.BEFORE}* there, or the data that was not moved yet",
            "finish `gpunodes etcd restore` instead",
        )


def _take_back(machine_ledger: Ledger) -> None:
    state, member = machine_ledger.etcd_restore, f"{etcd_snapshot.DATA}/member"
    etcd_restore.end_pods()
    if folder := _kept(state):
        # They may run with the restored data, or without any.
        static_pods.stop(etcd_restore.COMPONENTS, machine_ledger, etcd_restore.STOP_S)
        tree.remove(member)
        os.replace(f"{folder}/member", member)
    if before := state.get("before"):
        tree.remove(f"{etcd_snapshot.DATA}/{before}")
        del state["before"]
        machine_ledger.save()
    static_pods.start(reversed(etcd_restore.COMPONENTS), machine_ledger)
