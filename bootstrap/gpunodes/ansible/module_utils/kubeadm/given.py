"""Files below /etc/kubernetes that kubeadm did not write: no reset removes them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator

from ..ledger import Ledger

FOLDER = "/etc/kubernetes"
_OWN = "gpunodes"
"""Folders of gpunodes there begin with it."""
# What `kubeadm reset` removes there (kubeadm 1.36, app/cmd/phases/reset/cleanupnode.go).
_FOLDERS = ("manifests", "pki", "tmp")
_KUBECONFIGS = ("admin", "super-admin", "kubelet", "bootstrap-kubelet", "controller-manager", "scheduler")


def files(ledger: Ledger, *, taken_over: bool) -> list[str]:
    """These files as they are now, before kubeadm runs here for the first time.

    ``taken_over``: others ran kubeadm here, and what it writes is kubeadm's.
    """
    return sorted(
        path for path in _files(FOLDER) if path not in ledger.files and not (taken_over and _is_of_kubeadm(path))
    )


def without_pki(paths: Collection[str]) -> list[str]:
    """Those that are no keys and certificates of a cluster."""
    return [path for path in paths if not path.startswith(f"{FOLDER}/pki/")]


def _is_of_kubeadm(path: str) -> bool:
    first, _, rest = os.path.relpath(path, FOLDER).partition("/")
    return first in _FOLDERS if rest else first in {f"{name}.conf" for name in _KUBECONFIGS}


def _files(folder: str) -> Iterator[str]:
    """The files and links below a folder, which need not exist; no link is followed."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if folder == FOLDER and entry.name.startswith(_OWN):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _files(entry.path)
        else:
            yield entry.path


def others(kept: Collection[str]) -> list[str]:
    """The files there without those ``kept``: kubeadm's and gpunodes'."""
    found = set(_files(FOLDER)) - {*kept}
    if os.path.isdir(FOLDER):
        found |= {entry.path for entry in os.scandir(FOLDER) if entry.name.startswith(_OWN)}
    return sorted(found)
