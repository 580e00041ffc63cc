"""Fetches what an upgrade installs, while the machine's pods still run: packages of another minor, and images."""

from __future__ import annotations

from collections.abc import Sequence

from . import causes, containers, packages
from .causes import Program
from .host import images as containerd_images
from .host.changes import Changes
from .host.sources import Sources
from .host.spec import Spec
from .problem import MachineProblem
from .process import CommandResult
from .report import Difference


def fetch(spec: Spec, images: Sequence[str], limit_s: float, check: bool) -> Changes:
    """Configure the package sources of ``spec``, download its packages, and pull ``images`` by containerd.

    Installs nothing and restarts nothing. Raises MachineProblem if a source has no matching version, if an installation
    would remove a package, and if an image cannot be pulled in ``limit_s`` seconds.
    """
    changes = Changes(spec, check)
    sources = Sources(changes)
    for repository in spec.repositories:
        sources.configure(repository)
    wanted = {package.name: package for package in spec.packages}
    present = sources.manager.installed(list(wanted)) if wanted else {}
    other = [
        each for name, each in wanted.items() if not (name in present and packages.fits(each, present[name].version))
    ]
    if other:
        _download(changes, sources, other)
    for name in _missing(images):
        if changes.step(f"pull {name}", Difference("images", {}, {name: "present"})):
            _pull(name, limit_s)
    if not check:
        changes.save()
    return changes


def _download(changes: Changes, sources: Sources, other: Sequence[packages.RequestedPackage]) -> None:
    names = ", ".join(package.name for package in other)
    difference = Difference("downloaded packages", {}, {package.name: package.version for package in other})
    if changes.check:
        changes.step(f"download {names}", difference)
        return
    available = sources.available(other)
    chosen = {each.name: packages.choose(each, available.get(each.name, ()), sources.unread) for each in other}
    removes = sources.manager.effects(chosen, replace=True).removes
    if removes:
        raise MachineProblem(
            f"installing {names} would remove {', '.join(removes)}",
            "an upgrade that removes nothing",
            "remove it yourself if it is not needed",
        )
    if sources.manager.has_downloaded(chosen):
        return
    changes.step(f"download {names}", difference)
    sources.manager.download(chosen)


def _missing(images: Sequence[str]) -> list[str]:
    if not images:
        return []
    is_present = containerd_images.lister()
    return [name for name in dict.fromkeys(images) if not is_present(name)]


def _pull(name: str, limit_s: float) -> None:
    result = containerd_images.pull(name, limit_s)
    # Mirrors that others configured may be in containerd's own file, which only its interface for the kubelet reads.
    if not result.ok and containers.crictl(["pull", name], limit_s).ok:
        containerd_images.complete(name)
        result = CommandResult(result.argv, 0, "", "")
    if not result.ok or _missing([name]):
        cause = causes.of(Program.IMAGE, result.text)
        raise MachineProblem(
            f"the image {name} cannot be pulled: {cause.found or 'no reason is reported'}",
            "all images of the version, before the node is drained",
            cause.remedy or "check the network and gpunodes_image_mirrors, then run the command again",
            result.text,
        )
