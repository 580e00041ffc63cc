"""Files below /etc/kubernetes that kubeadm did not write: no reset removes them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from .. import facts, kubeconfig
from ..ledger import Ledger

FOLDER = "/etc/kubernetes"
_OWN = "gpunodes"
"""Folders of gpunodes there begin with it."""
_OF_MEMBERS = (kubeconfig.KUBELET, kubeconfig.ADMIN, facts.BOOTSTRAP, facts.API_SERVER)
# kubeadm 1.36, app/cmd/phases/reset/cleanupnode.go: what it removes there, beside files *.conf.
_OF_KUBEADM = ("manifests", "pki", "tmp")


def note(ledger: Ledger) -> None:
    """Note these files before kubeadm runs here for the first time, or before what others did with it is reset.

    On a machine that others joined, what kubeadm writes is kubeadm's.
    """
    if ledger.kubeadm:
        return
    member = any(map(os.path.exists, _OF_MEMBERS))
    ledger.given = sorted(
        path for path in _files(FOLDER) if path not in ledger.files and not (member and _is_of_kubeadm(path))
    )


def _is_of_kubeadm(path: str) -> bool:
    first, _, rest = os.path.relpath(path, FOLDER).partition("/")
    return first in _OF_KUBEADM if rest else first.endswith(".conf")


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


def content(ledger: Ledger) -> list[str]:
    """The files that are kubeadm's or gpunodes'."""
    own = set(_files(FOLDER)) - set(ledger.given)
    if os.path.isdir(FOLDER):
        own |= {entry.path for entry in os.scandir(FOLDER) if entry.name.startswith(_OWN)}
    return sorted(own)
