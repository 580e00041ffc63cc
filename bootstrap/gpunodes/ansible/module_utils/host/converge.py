"""One run of the module host: all changes that bring the machine into the desired state, in their order."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from typing import Any

from ..problem import MachineProblem
from . import files, firewall, gpu_driver, images, installation, kernel, mounts, proxies, services, swap, users
from .changes import Changes
from .sources import Sources, enable_stream
from .spec import Spec, spec_from


def converge(spec: Spec, check: bool = False) -> Changes:
    """Make all changes, or with ``check`` only list them; raises MachineProblem at the first one that fails."""
    changes = Changes(spec, check)
    missing = [path for path in spec.directories if not os.path.lexists(path)]
    if missing and not check:
        changes.ledger.note_directories(missing)
    mounts.move(changes)
    kernel.load_modules(changes)
    kernel.set_sysctls(changes)
    kernel.raise_sysctls(changes)
    if spec.swap_off:
        swap.turn_off(changes)
    if spec.firewall:
        firewall.open_ports(changes, spec.firewall)
    if spec.driver:
        gpu_driver.note_modules(changes, spec.driver)
    _install(changes)
    if spec.driver:
        gpu_driver.load_driver(changes, spec.driver)
    for generated in spec.generated:
        files.generate(changes, generated)
    for path in spec.absent:
        files.remove(changes, path)
    if spec.devices and not changes.reboot:
        gpu_driver.publish_devices(changes)
    if spec.services:
        services.start_all(changes)
    for group, names in spec.members.items():
        users.set_members(changes, group, names)
    images.fetch(changes)
    return changes


def diff(
    wanted: Mapping[str, Mapping[str, Any]], proxy_credentials: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """The roles with pending changes, and the versions of the installed packages."""
    pending = []
    versions: dict[str, str] = {}
    for role, parameters in wanted.items():
        try:
            changes = converge(spec_from(parameters, proxy_credentials), check=True)
        except MachineProblem:
            # The role itself reports the problem when it runs.
            pending.append(role)
            continue
        if changes.actions:
            pending.append(role)
        versions.update(changes.present)
    return pending, versions


def _install(changes: Changes) -> None:
    """Configure proxies and package sources, and install packages and files from them."""
    spec = changes.spec
    proxies.configure(changes)
    sources = Sources(changes)
    for repository in spec.repositories:
        sources.configure(repository)
    if spec.module_stream:
        enable_stream(changes, spec.module_stream)
    began = time.time()
    try:
        installation.install(changes, sources)
    except MachineProblem:
        # If a module does not build, the package manager reports only the last line; the build log has the cause.
        problem = gpu_driver.build_problem(spec.driver.modules[0], platform.release(), began) if spec.driver else None
        if problem is None:
            raise
        raise problem from None
