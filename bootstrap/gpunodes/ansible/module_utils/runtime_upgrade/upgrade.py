"""The stages of an upgrade of the container runtime. Each may be repeated after any interruption.

What is installed, kept and recorded in the ledger decides what is left to do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from .. import disk, packages
from ..causes import Program
from ..driver_upgrade import transaction
from ..driver_upgrade.kept import ROOT
from ..host import files, services
from ..host.changes import Changes
from ..host.converge import converge
from ..host.sources import Sources
from ..host.spec import Generated, Spec
from ..os_upgrade import locks
from ..packages import RequestedPackage
from ..problem import MachineProblem
from ..process import CommandResult, run
from ..report import Difference
from . import store
from .store import REPLACE, Kept

apt = packages.Apt.get
ROLES = ("containerd", "docker", "cri_dockerd", "container_toolkit")
"""The roles whose software is replaced, in the order in which they are configured."""


@dataclass
class Outcome:
    """What a stage did or, in check mode, would do."""

    actions: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)


def pending(specs: Mapping[str, Spec]) -> tuple[Kept, list[str]]:
    """The packages that would be replaced, and the other changes, such as of configuration. Changes nothing.

    ``specs`` are the desired states by role, as for all stages. The lists of packages are read into a folder that is
    deleted again. Raises MachineProblem if a package cannot be replaced.
    """
    manager = _manager()
    if run(["dpkg", "--audit"]).out.strip():
        # Until then apt cannot tell what an installation would do.
        return Kept({}, {}), ["finish an interrupted package installation"]
    with packages.other_lists() as options:
        _must("apt-get update", apt(*options, "update"))
        found = _replacement(specs, manager, options)
    return found, _other_changes(specs)


def prepare(specs: Mapping[str, Spec], check: bool = False) -> Outcome:
    """Download the new packages, and keep the installed ones; installs and configures nothing."""
    manager = _manager()
    if not check:
        locks.wait()
        manager.finish_interrupted()
        _refresh(specs, manager)
    found, kept, done = _replacement(specs, manager), store.load(), Outcome()
    if not found.new:
        # Packages of an earlier replacement must not be put back: that is finished unless a restart is still due.
        if kept and not check and not (_has(manager, kept.new) and any(_restarts(spec) for _, spec in _ordered(specs))):
            store.forget()
        return done
    if kept and _continues(manager, kept, found):
        return done
    done.actions.append(f"download {_shown(found.new)}, and keep {_shown(found.old) or 'nothing'}")
    done.differences.append(Difference("kept packages", {}, {**found.old, **found.new}))
    if not check:
        changes = Changes(Spec())
        if not os.path.isdir(ROOT):
            changes.ledger.note_directories([ROOT])
            changes.save()
        store.download(found)
    return done


def apply(specs: Mapping[str, Spec], check: bool = False) -> Outcome:
    """Install the packages that ``prepare`` downloaded, without a network, and configure and restart the services."""
    manager, kept = _manager(), store.load()
    if not check:
        locks.wait()
        manager.finish_interrupted()
    if kept is None and (unmet := _unmet(specs, manager)):
        raise MachineProblem(
            f"the packages of {', '.join(unmet)} are not on the machine", "a prepared machine", "run the stage prepare"
        )
    return _switch(specs, kept.new if kept else {}, manager, check)


def undo(specs: Mapping[str, Spec], check: bool = False) -> Outcome:
    """Go back to the packages that were replaced, without a network; nothing if ``apply`` changed nothing.

    Raises MachineProblem if it changed the configuration alone: there is none to go back to.
    """
    manager, kept = _manager(), store.load()
    if kept is None:
        restarts = any(_restarts(spec) for _, spec in _ordered(specs))
        if not _unmet(specs, manager) and (restarts or not _other_changes(specs)):
            raise MachineProblem(
                "no package was replaced, and the earlier configuration is not kept",
                "kept packages",
                "correct the settings, then run the upgrade again (`gpunodes rollout resume`)",
            )
        return Outcome()
    if not check:
        locks.wait()
        manager.finish_interrupted()
    done = _switch(specs, kept.old, manager, check)
    if not check and not _has(manager, kept.old):
        raise MachineProblem("the old packages are not installed", _shown(kept.old), "see /var/log/apt/term.log")
    return done


def verify(specs: Mapping[str, Spec]) -> None:
    """Raise MachineProblem unless the requested versions are installed, configured, and run."""
    manager, kept = _manager(), store.load()
    unmet = _unmet(specs, manager)
    if unmet or (kept and not _has(manager, kept.new)):
        wanted = kept.new if kept else {name: package.version for name, package in unmet.items()}
        there = manager.installed(list(wanted))
        shown = _shown({name: there[name].version if name in there else "none" for name in wanted})
        raise MachineProblem(f"installed: {shown}", _shown(wanted), "see /var/log/apt/term.log")
    for _, spec in _ordered(specs):
        waiting = _restarts(spec)
        states = services.states([service.name for service in spec.services]) if spec.services else {}
        if down := waiting or [name for name, state in states.items() if not state["active"]]:
            raise MachineProblem(f"{down[0]} does not run with them", "active", f"see `journalctl -u {down[0]}`")


def running(specs: Mapping[str, Spec], runtime: str) -> str:
    """The version of the installed ``runtime`` (containerd, docker) as its node reports it: containerd://2.1.4."""
    names = [package.name for package in specs[runtime].packages][:1]
    version = "".join(state.version for state in packages.detect().installed(names).values())
    # The revisions of distributions (1.7.24~ds1) are no part of what kubelets report everywhere.
    found = re.match(r"\d+(\.\d+)*", packages.upstream(version))
    return f"{runtime}://{found[0]}" if found else ""


# --- the replacement ---


def _switch(specs: Mapping[str, Spec], versions: Mapping[str, str], manager: packages.Manager, check: bool) -> Outcome:
    """Install these ``versions`` of packages, with the configuration for them, and restart what they changed."""
    there = {name: state.version for name, state in manager.installed(list(versions)).items()}
    other = {name: version for name, version in versions.items() if there.get(name) != version}
    done = Outcome()
    configured = [] if check else _configure(specs, versions, manager)
    if other:
        before = {name: version for name, version in there.items() if name in other}
        done.actions.append(f"replace {_shown(before) or 'nothing'} by {_shown(other)}")
        done.differences.append(Difference("packages", before, other))
        if not check:
            _install(specs, versions, other, before)
    converged = [converge(replace(_unchanged(spec), repositories=()), check) for _, spec in _ordered(specs)]
    for made in (*configured, *converged):
        done.actions += made.actions
        done.differences += made.differences
    return done


def _configure(specs: Mapping[str, Spec], versions: Mapping[str, str], manager: packages.Manager) -> list[Changes]:
    """Write the configuration for ``versions`` first: the packages start their services again at once."""
    made_changes: list[Changes] = []
    for _, spec in _ordered(specs):
        changes = Changes(spec)
        made_changes.append(changes)
        there = {name: state.version for name, state in manager.installed(_names(spec)).items()} | dict(versions)
        for file in spec.files:
            if file.package and file.package not in there:
                continue
            made = files.variant(file, there)
            if disk.read(made.path) == made.content:
                continue
            derived = _without_derived(specs, made.path)
            files.write(changes, made)
            changes.save()
            for others, generated in derived:
                files.generate(others, generated)
                others.save()
                made_changes.append(others)
    return made_changes


def _without_derived(specs: Mapping[str, Spec], path: str) -> list[tuple[Changes, Generated]]:
    """Remove what a program made from a file that changes, such as the container toolkit's part of containerd's.

    Its format follows that of the file: a program that finds the earlier one would continue it.
    """
    found = []
    for _, spec in _ordered(specs):
        changes = Changes(spec)
        for generated in spec.generated:
            if generated.input == path and generated.path in changes.ledger.files:
                changes.note_restarts()
                changes.save()
                disk.remove(generated.path)
                found.append((changes, generated))
    return found


def _install(
    specs: Mapping[str, Spec], versions: Mapping[str, str], other: Mapping[str, str], before: Mapping[str, str]
) -> None:
    """Install the kept packages' files; the ledgers have the new packages, holds and restarts before that."""
    manager = _manager()
    held = [name for name, state in manager.installed([*other]).items() if state.held]
    for _, spec in _ordered(specs):
        changes = Changes(spec)
        changes.ledger.note_packages(name for name in _names(spec) if name in other and name not in before)
        wanted = {each.name for each in spec.packages if each.hold and each.name in other}
        changes.ledger.note_holds(sorted(wanted.difference(held)))
        if {*other} & {*_names(spec)}:
            # The programs that run are those of the replaced packages.
            changes.note_restarts()
        changes.save()
    known = {name for _, spec in _ordered(specs) for name in _names(spec)}
    changes = Changes(Spec())
    changes.ledger.note_packages(name for name in other if name not in before and name not in known)
    changes.save()
    paths = Kept(versions, {}).files(other)
    result = apt(*packages.WITHOUT_SOURCES, *REPLACE, "install", *paths)
    # apt may have released them: an administrator's hold is not in the ledger.
    manager.hold([*manager.installed(held)], held=True)
    if not result.ok:
        raise packages.failure(Program.APT, f"installing {_shown(other)}", result)


# --- what the machine has ---


def _replacement(specs: Mapping[str, Spec], manager: packages.Manager, options: Sequence[str] = ()) -> Kept:
    """What apt would replace so that the machine has the requested versions, by its lists of packages.

    ``options`` of apt name other lists. Raises MachineProblem if no version matches, and if a package would be removed.
    """
    wanted = [package for _, spec in _ordered(specs) for package in spec.packages]
    names = [package.name for package in wanted]
    available = packages.parse_madison(run(["apt-cache", *options, "madison", *names]).out)
    chosen = choose(wanted, manager.installed(names), available, manager.unread)
    if not chosen:
        return Kept({}, {})
    arguments = [f"{name}={version}" for name, version in chosen.items()]
    result = apt(*options, *REPLACE, "install", "--simulate", *arguments)
    _must("apt-get install", result)
    installs, replaced, removes = transaction.parse(result.out)
    if removes:
        raise MachineProblem(
            f"replacing {', '.join(chosen)} would remove {', '.join(removes)}",
            "a replacement that removes nothing",
            "remove it yourself if it is not needed; another source of containerd needs `gpunodes remove`, then a join",
        )
    return Kept(installs, replaced)


def _other_changes(specs: Mapping[str, Spec]) -> list[str]:
    """What ``apply`` would change beside the versions of packages, such as configuration."""
    changes: list[str] = []
    for role, spec in _ordered(specs):
        try:
            changes += converge(replace(_unchanged(spec), repositories=(), images=()), check=True).actions
        except MachineProblem as problem:
            changes.append(f"configure {role}: {problem.problem.found}")
    return changes


def choose(
    wanted: Sequence[RequestedPackage],
    installed: Mapping[str, packages.PackageState],
    available: Mapping[str, Sequence[str]],
    unread: str = "",
) -> dict[str, str]:
    """The version of each package that is to be replaced, or installed: the best one that matches the request.

    An installed version that matches is replaced by a newer one only. Raises MachineProblem if no version matches.
    """
    chosen: dict[str, str] = {}
    for package in wanted:
        there = installed[package.name].version if package.name in installed else ""
        same = chosen.get(package.same_as) or (
            installed[package.same_as].version if package.same_as in installed else ""
        )
        exact = replace(package, version=f"{packages.upstream(same)}*") if same else package
        matching = [version for version in available.get(package.name, ()) if packages.fits(exact, version)]
        if there and packages.fits(exact, there) and not (matching and _newer(matching[0], there)):
            continue
        chosen[package.name] = packages.choose(exact, available.get(package.name, ()), unread)
    return chosen


def _newer(version: str, than: str) -> bool:
    return version != than and run(["dpkg", "--compare-versions", version, "gt", than]).ok


def _refresh(specs: Mapping[str, Spec], manager: packages.Manager) -> None:
    """Configure the package sources, and read all lists again; if that fails, renew keys and retry."""
    sources = []
    for _, spec in _ordered(specs):
        changes = Changes(spec)
        sources.append(Sources(changes))
        for repository in spec.repositories:
            sources[-1].configure(repository)
        changes.save()
    try:
        manager.refresh()
    except MachineProblem:
        renewed = [each.renew_keys() for each in sources]
        if not any(renewed):
            raise
        manager.refresh()


def _continues(manager: packages.Manager, kept: Kept, found: Kept) -> bool:
    """Whether the kept packages are those of this replacement, which may have been interrupted anywhere."""
    there = {name: state.version for name, state in manager.installed(list(kept.old)).items()}
    between = all(there.get(name) in {version, kept.new.get(name)} for name, version in kept.old.items())
    return between and all(kept.new.get(name) == version for name, version in found.new.items())


def _restarts(spec: Spec) -> list[str]:
    """The services that must still be restarted after a change."""
    return [service.name for service in spec.services if service.name in Changes(spec).ledger.restarts]


def _unmet(specs: Mapping[str, Spec], manager: packages.Manager) -> dict[str, RequestedPackage]:
    wanted = {package.name: package for _, spec in _ordered(specs) for package in spec.packages}
    there = manager.installed(list(wanted))
    return {
        name: package
        for name, package in wanted.items()
        if name not in there or not packages.fits(package, there[name].version)
    }


def _has(manager: packages.Manager, versions: Mapping[str, str]) -> bool:
    there = manager.installed(list(versions))
    return all(name in there and there[name].version == version for name, version in versions.items())


def _unchanged(spec: Spec) -> Spec:
    """``spec`` with any version of its packages: another one is installed by this file alone."""
    return replace(spec, packages=tuple(replace(each, version="", same_as="", replace=False) for each in spec.packages))


def _ordered(specs: Mapping[str, Spec]) -> list[tuple[str, Spec]]:
    return [(role, specs[role]) for role in ROLES if role in specs]


def _names(spec: Spec) -> list[str]:
    return [package.name for package in spec.packages]


def _shown(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}".rstrip() for name, version in versions.items())


def _manager() -> packages.Manager:
    manager = packages.detect()
    if isinstance(manager, packages.Dnf):
        raise MachineProblem(
            "its packages come by dnf",
            "a system with apt: on others gpunodes cannot go back to the old packages",
            "upgrade it by hand: drain the node, release its version locks, `dnf upgrade`, restart the runtime",
        )
    return manager


def _must(title: str, result: CommandResult) -> None:
    if not result.ok:
        raise packages.failure(Program.APT, title, result)
