"""Loads images into Docker through containerd's mirrors: Docker itself supports mirrors for docker.io only.

containerd, which Docker shares, pulls an image under its public name, and Docker loads it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence

from . import causes
from .causes import Program
from .host.proxies import variables_of
from .problem import MachineProblem
from .process import PATH, must, run
from .report import Difference, Report

_NAMESPACE = "gpunodes"
"""containerd's namespace for images until Docker has loaded them."""
_FETCH_LIMIT_S = 600
_LOAD_LIMIT_S = 600
_WORKER_IMAGES = ("coredns", "kube-proxy", "pause")


def load_missing(images: Sequence[str], mirrored: Sequence[str], control_plane: bool, check: bool) -> Report:
    """Load ``images`` and those that kubeadm lists into Docker, if their registries are ``mirrored``.

    Raises MachineProblem if a mirror does not have an image, or Docker does not keep it.
    """
    requested = [*images, *kubeadm_images(control_plane)] if mirrored else []
    missing = [name for name in dict.fromkeys(requested) if name.partition("/")[0] in mirrored and not present(name)]
    if missing and not check:
        _load(missing)
    report = Report()
    for name in missing:
        report.add(f"load {name}", Difference("images in Docker", {}, {name: "present"}))
    return report


def present(name: str) -> bool:
    """Whether Docker has an image with this name, which may include a digest."""
    return run(["docker", "image", "inspect", "--format={{.Id}}", name]).ok


def kubeadm_images(control_plane: bool) -> list[str]:
    """The images that the installed kubeadm needs on this machine; none if it is not installed yet."""
    if not shutil.which("kubeadm", path=PATH):
        return []
    version = must(["kubeadm", "version", "--output=short"]).strip()
    names = must(["kubeadm", "config", "images", "list", f"--kubernetes-version={version}"]).split()
    return [name for name in names if control_plane or os.path.basename(name).partition(":")[0] in _WORKER_IMAGES]


def _load(images: Sequence[str]) -> None:
    ctr = ["ctr", f"--namespace={_NAMESPACE}"]
    with tempfile.TemporaryDirectory(prefix="gpunodes-", dir="/var/tmp") as folder, contextlib.ExitStack() as fetched:
        for name in images:
            result = run(
                [*ctr, "content", "fetch", "--hosts-dir=/etc/containerd/certs.d", name],
                _FETCH_LIMIT_S,
                environment=variables_of("containerd"),  # ctr itself fetches
            )
            fetched.callback(run, [*ctr, "images", "remove", name])
            if not result.ok:
                cause = causes.of(Program.IMAGE, result.text)
                raise MachineProblem(
                    f"the image {name} cannot be pulled: {cause.found}",
                    "a mirror that has it",
                    cause.remedy or "see gpunodes_image_mirrors",
                    result.text,
                )
        # A single archive contains shared layers only once.
        must([*ctr, "images", "export", f"{folder}/images.tar", *images], _FETCH_LIMIT_S)
        loaded = run(["docker", "load", "--quiet", f"--input={folder}/images.tar"], _LOAD_LIMIT_S)
    lost = [name for name in images if not present(name)]
    if lost or not loaded.ok:
        raise MachineProblem(
            f"Docker does not have {', '.join(lost or images)} after loading it: "
            f"{causes.of(Program.IMAGE, loaded.text).found}",
            "an image with this name",
            # github.com/moby/moby, issue 43570: the older store keeps digests only of images that Docker itself pulled.
            "use Docker's containerd image store, which names with a digest require, or use only the tag"
            if any("@" in name for name in images)
            else "see `journalctl -u docker`",
        )
