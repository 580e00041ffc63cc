"""Brings images into Docker by the mirrors that containerd has: Docker itself takes mirrors for docker.io only.

Docker shares the machine's containerd. That fetches an image under its public name, and Docker loads it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence

from .problem import MachineProblem
from .process import PATH, last_line, must, run

_NAMESPACE = "gpunodes"
"""containerd's, for what is only on its way through."""
_FETCH_LIMIT_S = 600
_LOAD_LIMIT_S = 600
_OF_WORKERS = ("coredns", "kube-proxy", "pause")


def bring(images: Sequence[str], mirrored: Sequence[str], control_plane: bool, check: bool) -> list[str]:
    """See that Docker has ``images`` and those that kubeadm names, as far as their registries are ``mirrored``.

    Returns the actions taken; raises MachineProblem for an image that its mirror does not have, or Docker not keep.
    """
    wanted = [*images, *_of_kubeadm(control_plane)] if mirrored else []
    missing = [name for name in dict.fromkeys(wanted) if name.partition("/")[0] in mirrored and not _is_there(name)]
    if missing and not check:
        _load(missing)
    return [f"load {name}" for name in missing]


def _is_there(name: str) -> bool:
    """Whether Docker has an image by this name, which may have a digest."""
    return run(["docker", "image", "inspect", "--format={{.Id}}", name]).ok


def _of_kubeadm(control_plane: bool) -> list[str]:
    """What the installed kubeadm would run on this machine; nothing where it is not installed yet."""
    if not shutil.which("kubeadm", path=PATH):
        return []
    version = must(["kubeadm", "version", "--output=short"]).strip()
    names = must(["kubeadm", "config", "images", "list", f"--kubernetes-version={version}"]).split()
    return [name for name in names if control_plane or os.path.basename(name).partition(":")[0] in _OF_WORKERS]


def _load(images: Sequence[str]) -> None:
    ctr = ["ctr", f"--namespace={_NAMESPACE}"]
    with tempfile.TemporaryDirectory(prefix="gpunodes-", dir="/var/tmp") as folder, contextlib.ExitStack() as fetched:
        for name in images:
            done = run([*ctr, "content", "fetch", "--hosts-dir=/etc/containerd/certs.d", name], _FETCH_LIMIT_S)
            fetched.callback(run, [*ctr, "images", "remove", name])
            if not done.ok:
                raise MachineProblem(
                    f"the image {name} cannot be had: {last_line(done.err)}",
                    "a mirror that has it",
                    "see gpunodes_image_mirrors",
                )
        # One archive: what images have in common is in it once.
        must([*ctr, "images", "export", f"{folder}/images.tar", *images], _FETCH_LIMIT_S)
        loaded = run(["docker", "load", "--quiet", f"--input={folder}/images.tar"], _LOAD_LIMIT_S)
    lost = [name for name in images if not _is_there(name)]
    if lost or not loaded.ok:
        raise MachineProblem(
            f"Docker does not have {', '.join(lost or images)} after it was loaded: {last_line(loaded.text)}",
            "an image of this name",
            # github.com/moby/moby, issue 43570: its older store knows a digest only of what it has pulled itself.
            "a name with a digest needs Docker's containerd image store, else name the tag alone"
            if any("@" in name for name in images)
            else "see `journalctl -u docker`",
        )
