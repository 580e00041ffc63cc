"""The data folder of etcd on a machine, which may be that of an etcd of the machine's user."""

from __future__ import annotations

import glob
import os

from . import kubeconfig, static_pod_files, tree
from .ledger import Ledger

FOLDER = "/var/lib/etcd"
"""kubeadm's (etcd.local.dataDir), and Debian's package etcd has its data below it."""
MEMBER = f"{FOLDER}/member"
BEFORE = "gpunodes-before-"
"""Beginning of the names of folders with the data of before a restore."""
ABORTED = "aborted"
"""State of a restore that is given up (etcd_restore_abort): the old data returns."""


def is_kubeadms(ledger: Ledger) -> bool:
    """Whether the folder is kubeadm's; ``ledger`` is that of the machine.

    kubeadm writes admin.conf before etcd has data. A folder that gpunodes created was not a user's.
    """
    files = (kubeconfig.ADMIN, static_pod_files.path("kube-apiserver"), static_pod_files.path("etcd"))
    return FOLDER in ledger.directories or ledger.kubeadm.startswith("init") or any(map(os.path.exists, files))


def restore(ledger: Ledger) -> str:
    """Whether a restore of etcd on this machine is "unfinished", is "aborted", or was "done" earlier; "" for none."""
    if ledger.etcd_restore:
        return ABORTED if ledger.etcd_restore.get("state") == ABORTED else "unfinished"
    return "done" if ledger.etcd_revision or glob.glob(f"{FOLDER}/{BEFORE}*") else ""


def is_in_the_way(ledger: Ledger) -> bool:
    """Whether files of others are where the etcd of a new control plane is to have its data."""
    return not ledger.kubeadm and not is_kubeadms(ledger) and tree.has_content(FOLDER)
