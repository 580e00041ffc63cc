"""Completes a machine that is prepared but joins later, perhaps as a copy: images are present, machine ids are not."""

from __future__ import annotations

import glob
import time
from collections.abc import Sequence

from . import causes, disk, docker_images, ledger, packages
from .causes import Program
from .host import images as containerd_images
from .host.spec import filled
from .problem import MachineProblem
from .process import run
from .report import Difference, Report

IDS = {
    "/var/lib/containerd": "io.containerd.*introspection*/uuid",
    "/var/lib/docker": "engine-id",
}
"""Files, by their runtime's folder, with an id that the runtime gave this machine, and makes again when it is missing.

Sources: containerd, plugins/services/introspection/local.go; moby, daemon/id.go.
"""
_KUBELET = "{kubelet}"
_PAUSE_S = 2.0


def complete(
    images: Sequence[str], runtime: str, control_plane: bool, limit_s: float, check: bool, pause_s: float = _PAUSE_S
) -> Report:
    """Wait until the container runtime has all ``images``, pull those that are missing, and remove the machine's ids.

    ``{kubelet}`` in a name is the version of the installed kubelet. With Docker the images that kubeadm lists count,
    too. Raises MachineProblem if an image cannot be pulled in ``limit_s`` seconds.
    """
    docker = runtime == "docker"
    names = [name for name in _named(images) if _KUBELET not in name]
    names += docker_images.kubeadm_images(control_plane) if docker else ()
    if not docker and not check:
        _wait(time.monotonic() + limit_s, limit_s, pause_s)
    report = Report()
    missing = _missing(names, docker)
    for name in missing:
        report.add(f"pull {name}", Difference("images", {}, {name: "present"}))
    if missing and not check:
        _pull(missing, docker, limit_s)
    for path in _ids():
        report.add(f"remove {path}", Difference("ids of the machine", {path: "present"}, {}))
        if not check:
            disk.remove(path)
    return report


def _named(images: Sequence[str]) -> list[str]:
    """The names with the kubelet's version; in check mode it may not be installed yet."""
    if not any(_KUBELET in name for name in images):
        return list(images)
    kubelet = packages.detect().installed(["kubelet"]).get("kubelet")
    values = {_KUBELET: packages.upstream(kubelet.version)} if kubelet else {}
    return [filled(name, values) for name in images]


def _wait(deadline: float, limit_s: float, pause_s: float) -> None:
    """Wait for the pulls that earlier phases started in the background."""
    while containerd_images.fetching():
        if time.monotonic() >= deadline:
            raise MachineProblem(
                f"containerd has not pulled its images in {limit_s:.0f} s",
                "all images that a node needs",
                "check the network and gpunodes_image_mirrors, then run the command again; "
                "`journalctl -u 'gpunodes-images-*'` shows the pulls",
            )
        time.sleep(pause_s)


def _missing(names: Sequence[str], docker: bool) -> list[str]:
    present = docker_images.present if docker else containerd_images.lister()
    return [name for name in dict.fromkeys(names) if not present(name)]


def _pull(names: Sequence[str], docker: bool, limit_s: float) -> None:
    for name in names:
        result = run(["docker", "pull", "--quiet", name], limit_s) if docker else containerd_images.pull(name, limit_s)
        if not result.ok or _missing([name], docker):
            cause = causes.of(Program.IMAGE, result.text)
            raise MachineProblem(
                f"the image {name} cannot be pulled: {cause.found}",
                "all images that a node needs",
                cause.remedy or "check the network and gpunodes_image_mirrors, then run the command again",
                result.text,
            )


def _ids() -> list[str]:
    """The files with ids of runtimes that gpunodes installed; a runtime that was here before keeps its id."""
    own = set(ledger.load().directories)
    return [
        path for folder, pattern in IDS.items() if folder in own for path in sorted(glob.glob(f"{folder}/{pattern}"))
    ]
