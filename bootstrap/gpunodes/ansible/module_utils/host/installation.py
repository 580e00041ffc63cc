"""Installs packages together with their files, and holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .. import packages
from ..problem import MachineProblem
from ..process import last_line, run
from ..report import Difference
from . import files, firewall, kernel, services, users
from .changes import Changes
from .sources import Sources


def install(changes: Changes, sources: Sources) -> None:
    """Install the missing packages, write the files, and hold packages; raises MachineProblem if that is impossible."""
    wanted = {package.name: package for package in changes.spec.packages}
    present = sources.manager.installed(list(wanted)) if wanted else {}
    held = _held(changes, sources, present)
    other = {name for name, installed in present.items() if not packages.fits(wanted[name], installed.version)}
    for name, installed in present.items():
        if name in other and not wanted[name].replace:
            raise MachineProblem(
                f"{name} {installed.version} is installed",
                f"{wanted[name].version}; gpunodes does not upgrade or downgrade packages",
                "remove the package, or request the installed version",
            )
    missing = [package for name, package in wanted.items() if name not in present or name in other]
    changes.present = {name: installed.version for name, installed in present.items()}
    versions = {name: version for name, version in changes.present.items() if name not in other}
    if first := [package for package in missing if package.first]:
        chosen_first = _choose(changes, sources, first, versions)
        versions.update(chosen_first)
        _install(changes, sources, chosen_first)
    rest = [package for package in missing if not package.first]
    chosen = _choose(changes, sources, rest, versions) if rest else {}
    versions.update(chosen)
    # Files first: a package that starts its service during installation then uses this configuration.
    changed = False
    for file in changes.spec.files:
        changed = files.write(changes, files.variant(file, versions)) or changed
    if chosen:
        _install(changes, sources, chosen)
        _run_checks(changes)
    changes.versions = versions
    # The package manager may have released those that it replaced.
    _hold(changes, sources, held, replaced=other)
    if (changed or chosen) and not changes.check:
        changes.save()


def _choose(
    changes: Changes,
    sources: Sources,
    missing: Sequence[packages.RequestedPackage],
    present: Mapping[str, str],
) -> dict[str, str]:
    """The exact version of each missing package; ``present`` are the versions of the other packages."""
    if changes.check:
        # The versions in the source are unknown until the source is configured.
        return {package.name: package.version.replace("*", "").rstrip(".-") or "newest" for package in missing}
    if sources.manager.finish_interrupted():
        changes.actions.append("finish an interrupted package installation")
        changes.differences.append(Difference("package manager", {"state": "interrupted"}, {"state": "consistent"}))
    available = sources.available(missing)
    chosen: dict[str, str] = {}
    for package in missing:
        same = {**present, **chosen}.get(package.same_as, "")
        exact = packages.RequestedPackage(package.name, f"{packages.upstream(same)}*") if same else package
        chosen[package.name] = packages.choose(exact, available.get(package.name, ()), sources.unread)
    return chosen


def _install(changes: Changes, sources: Sources, chosen: Mapping[str, str]) -> None:
    """Install exactly these versions; raises MachineProblem if that would remove a package."""
    message = ", ".join(f"{name} {version}" for name, version in chosen.items())
    before = {name: version for name, version in changes.present.items() if name in chosen}
    if changes.check:
        changes.step(f"install {message}", Difference("packages", before, chosen))
        return
    manager = sources.manager
    replace = bool(before)
    try:
        effects = manager.effects(chosen, replace=replace)
    except MachineProblem:
        # Dependencies from other sources are unknown until those sources are read.
        sources.refresh()
        effects = manager.effects(chosen, replace=replace)
    if effects.removes:
        raise MachineProblem(
            f"installing {', '.join(chosen)} would remove {', '.join(effects.removes)}",
            "an installation that removes nothing",
            "remove it yourself if it is not needed, or choose another source of the package",
        )
    if changes.spec.forwards:
        kernel.note_forwarding(changes)
        firewall.note_docker(changes)
    changes.ledger.note_packages(effects.installs)
    changes.ledger.note_groups(name for name in changes.spec.groups if not users.has_group(name))
    changes.ledger.note_users(name for name in changes.spec.users if not users.has_user(name))
    started = services.states([service.name for service in changes.spec.services]) if changes.spec.services else {}
    for name, state in started.items():
        changes.ledger.note_service(name, state)
        if replace:
            # The programs that run are those of the replaced packages.
            changes.ledger.note_restart(name)
    changes.step(f"install {message}", _difference(effects, chosen, before))
    try:
        manager.install(chosen, replace=replace)
    except MachineProblem as problem:
        # Outdated lists name files that no longer exist. dnf checks keys only during the installation.
        if not isinstance(problem, packages.NotFetched) and not sources.renew_keys():
            raise
        sources.refresh()
        manager.install(chosen, replace=replace)
    for name, state in started.items():
        if not state["active"]:
            # Its package has just started it with the new files.
            changes.ledger.restarted(name)


def _difference(effects: packages.Effects, chosen: Mapping[str, str], before: Mapping[str, str]) -> Difference:
    dependencies = {**dict.fromkeys(effects.installs, "a dependency"), **dict.fromkeys(effects.upgrades, "upgraded")}
    return Difference(
        "packages", {**dict.fromkeys(effects.upgrades, "installed"), **before}, {**dependencies, **chosen}
    )


def _run_checks(changes: Changes) -> None:
    """Check that the installed software works; raises MachineProblem if not."""
    for check in () if changes.check else changes.spec.checks:
        result = run(check.command)
        if not result.ok or check.output not in result.text:
            raise MachineProblem(
                f"`{' '.join(check.command)}`: {last_line(result.text) or 'no output'}",
                f"output with {check.output}" if check.output else "exit code 0",
                "check the files that its packages installed",
            )


def _held(changes: Changes, sources: Sources, present: Mapping[str, packages.PackageState]) -> set[str]:
    """The packages that are held before the installation; ``present`` are the requested ones among the installed."""
    matching = sources.manager.matching(changes.spec.holds) if changes.spec.holds else {}
    return {name for name, installed in {**matching, **present}.items() if installed.held}


def _hold(changes: Changes, sources: Sources, before: set[str], *, replaced: set[str]) -> None:
    """Hold packages.

    The ledger gets only those that were not held ``before`` the installation: an administrator held the others, or they
    are in it already. ``replaced`` are those that had another version.
    """
    wanted = [package.name for package in changes.spec.packages if package.hold]
    unheld = [name for name in wanted if name not in before or name in replaced]
    if changes.spec.holds:
        matching = sources.manager.matching(changes.spec.holds)
        unheld = sorted({name for name, state in matching.items() if not state.held} | set(unheld))
    if unheld:
        changes.ledger.note_holds(name for name in unheld if name not in before)
        if changes.step(f"hold {', '.join(unheld)}", Difference("held packages", {}, dict.fromkeys(unheld, "held"))):
            sources.manager.hold(unheld, held=True)
