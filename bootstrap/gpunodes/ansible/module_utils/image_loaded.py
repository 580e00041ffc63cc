"""An image that no registry has, loaded from an archive into the container runtime of this machine."""

from __future__ import annotations

from collections.abc import Sequence

from . import causes, containers, disk
from .causes import Program
from .host import images as containerd_images
from .problem import MachineProblem
from .process import CommandResult, must, run
from .report import Difference, Report

_CTR = ("ctr", "--namespace=k8s.io")
_LOAD_LIMIT_S = 600
_DIGEST = 2
"""The column of the digest."""
_PINNED = "io.cri-containerd.pinned=pinned"
"""Keeps the kubelet from deleting the image when disk space is short (containerd 1.7 and newer)."""


def is_loaded(name: str, digests: Sequence[str]) -> bool:
    """Whether the runtime has the image: containerd names the digest of its manifest, Docker this or its config's."""
    return _digest(name) in digests and (containers.is_docker() or not containerd_images.was_interrupted(name))


def load(name: str, digests: Sequence[str], archive: str, check: bool) -> Report:
    """Load an image unless the runtime has it, and delete the archive; raises MachineProblem if that fails."""
    report = Report()
    if is_loaded(name, digests):
        return report
    report.add(f"load {name}", Difference("images", {name: _digest(name) or "missing"}, {name: digests[0]}))
    if check:
        return report
    try:
        if containers.is_docker():
            done = run(["docker", "load", "--quiet", f"--input={archive}"], _LOAD_LIMIT_S)
        else:
            containerd_images.begin(name)
            done = run([*_CTR, "images", "import", archive], _LOAD_LIMIT_S)
            run([*_CTR, "images", "label", name, _PINNED])
            containerd_images.complete(name)
    finally:
        disk.remove(archive)
    if not is_loaded(name, digests):
        raise MachineProblem(
            f"the image {name} cannot be loaded: {causes.of(Program.IMAGE, done.text).found}",
            "an archive that `make image` built, for this machine's architecture",
            "build it again, then run the command again",
            done.text,
        )
    return report


def remove(repository: str, check: bool) -> Report:
    """Remove all images of a repository.

    The kubelet's interface of containerd names each image a second time, by its id ("sha256:..."): the image stays on
    the disk until that name is gone, too (internal/cri/server/images/image_pull.go, UpdateImage).
    """
    report, left = Report(), _images()
    for name in [each for each in left if each.rpartition(":")[0] == repository]:
        digest = left.pop(name)
        report.add(f"remove {name}", Difference("images", {name: "present"}, {}))
        if check:
            continue
        # A pod that is ending may still use it.
        if containers.is_docker():
            must(["docker", "image", "rm", "--force", name])
            continue
        others = {each for each, its in left.items() if its == digest}
        ids = {each for each in others if each.startswith("sha256:")}
        for each in [name, *sorted(ids)] if others == ids else [name]:
            must([*_CTR, "images", "rm", "--sync", each])
    return report


def _digest(name: str) -> str:
    """The digest of an image, "" for none."""
    if containers.is_docker():
        return run(["docker", "image", "inspect", "--format={{.Id}}", name]).out.strip()
    return _digests(f"name=={name}").get(name, "")


def _images() -> dict[str, str]:
    """All images by name; with containerd, the digest of the manifest of each."""
    if containers.is_docker():
        return dict.fromkeys(_listed(["docker", "image", "ls", "--format={{.Repository}}:{{.Tag}}"]), "")
    return _digests()


def _digests(*filters: str) -> dict[str, str]:
    """Digests by name, from the table of ctr: REF, TYPE, DIGEST and more, after a line with these titles."""
    rows = (line.split() for line in _listed([*_CTR, "images", "ls", *filters])[1:])
    return {row[0]: row[_DIGEST] for row in rows if len(row) > _DIGEST}


def _listed(argv: Sequence[str]) -> list[str]:
    done: CommandResult = run(argv, 60)
    if not done.ok:
        raise MachineProblem(
            f"the container runtime does not list its images: {causes.of(Program.IMAGE, done.text).found}",
            "a container runtime that responds",
            "see `systemctl status containerd` (or docker), then run the command again",
        )
    return done.out.splitlines()
