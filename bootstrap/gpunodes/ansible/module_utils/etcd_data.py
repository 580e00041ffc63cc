"""The data folder of etcd on a machine, which may be that of an etcd of the machine's user."""

from __future__ import annotations

import os

from . import kubeconfig, static_pod_files, tree
from .ledger import Ledger

FOLDER = "/var/lib/etcd"
"""kubeadm's (etcd.local.dataDir), and Debian's package etcd has its data below it."""
MEMBER = f"{FOLDER}/member"


def is_kubeadms(ledger: Ledger) -> bool:
    """Whether the folder is kubeadm's; ``ledger`` is that of the machine.

    kubeadm writes admin.conf before etcd has data. A folder that gpunodes created was not a user's.
    """
    files = (kubeconfig.ADMIN, static_pod_files.path("kube-apiserver"), static_pod_files.path("etcd"))
    return FOLDER in ledger.directories or ledger.kubeadm.startswith("init") or any(map(os.path.exists, files))


def is_in_the_way(ledger: Ledger) -> bool:
    """Whether files of others are where the etcd of a new control plane is to have its data."""
    return not ledger.kubeadm and not is_kubeadms(ledger) and tree.has_content(FOLDER)
