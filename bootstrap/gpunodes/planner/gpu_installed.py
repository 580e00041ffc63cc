"""A driver that is installed already: whether it stays, and whether the machine must be rebooted after a new one."""

from __future__ import annotations

from collections.abc import Sequence

from gpunodes.planner.gpu_case import Case, Row, installed_driver
from gpunodes.planner.gpu_model import Facts, Flavour, Source

RUNTIMES = {"containerd": {"containerd", "containerd.io"}, "docker": {"docker.io", "docker-ce"}}
"""The packages of each container runtime."""


def runtimes_of(facts: Facts) -> list[str]:
    """The container runtimes on a machine, by its packages."""
    return [name for name, packages in RUNTIMES.items() if any(is_installed(facts, package) for package in packages)]


def is_installed(facts: Facts, package: str) -> bool:
    """Whether a package of a container runtime is installed."""
    return bool({**facts["packages"], **(facts.get("gpu") or {}).get("runtimes", {})}.get(package))


def installed_from(case: Case) -> tuple[Source, str, Flavour | None] | None:
    """Source, branch and modules of a driver that was installed from packages, if there is one."""
    driver = case.gpu.get("driver") or {}
    origin = {"nvidia-repository": Source.NVIDIA, "distribution": Source.DISTRIBUTION}.get(driver.get("origin") or "")
    version = installed_driver(driver)
    if not origin or not version:
        return None
    modules = driver.get("flavour")
    return origin, version.partition(".")[0], Flavour(modules) if modules else None


def is_requested(case: Case) -> bool:
    """Whether the installed driver has the requested version, as far as an exact one is requested."""
    exact = case.requested.exact_driver
    return not exact or installed_driver(case.gpu.get("driver") or {}) == exact


def judge_installed(
    case: Case,
    installed: tuple[Source, str, Flavour | None] | None,
    choices: Sequence[tuple[Row, str, Flavour]],
) -> None:
    """Refuse to replace a driver that is in use or not from packages; warn of one that will be replaced."""
    driver = case.gpu.get("driver") or {}
    if installed is None:
        _judge_unpackaged(case, driver)
        return
    source, branch, modules = installed
    for offer, other, flavour in choices:
        if (offer["source_of"], other) == (source, branch) and modules in {None, flavour} and is_requested(case):
            return
    if not choices:
        return
    clients = case.gpu.get("clients")
    in_cluster = bool((case.facts.get("kubernetes") or {}).get("role"))
    used = driver.get("loaded") and (clients or (clients is None and in_cluster))
    users = f"{clients} processes use it" if clients else "pods may use it"
    sources = {choice[0]["source_of"] for choice in choices}
    fact = f"driver {installed_driver(driver)} ({modules or 'unknown'} modules, from {source}) is installed"
    if used:
        case.refuse(
            f"{fact}, and {users}",
            "a driver that meets the request, or one that is not in use: a driver in use is not replaced",
            f"drain the node, run `gpunodes gpu remove {case.machine}`, and try again; or change the request",
        )
    elif branch == case.requested.branch and not is_requested(case):
        case.refuse(
            fact,
            f"driver {case.requested.driver}, or no driver: an installation does not replace packages",
            f"run `gpunodes gpu remove {case.machine}`, and try again; or request {installed_driver(driver)}",
        )
    elif source not in sources:
        case.refuse(
            fact,
            f"a driver from {' or '.join(sorted(sources))}: packages of two sources overwrite each other",
            f"run `gpunodes gpu remove {case.machine}`, or set gpunodes_driver_source to {source}",
        )
    else:
        case.warnings.append(f"{fact} and will be replaced, because it does not meet the request")


def _judge_unpackaged(case: Case, driver: Row) -> None:
    """Refuse a driver that was not installed from packages."""
    if installed_driver(driver):
        origin = {"runfile": "by NVIDIA's .run installer"}.get(driver.get("origin") or "", "by an unknown installer")
        remedy = "`nvidia-uninstall`, then reboot" if driver.get("origin") == "runfile" else "remove it, then reboot"
        remedy += "; or keep it: set gpunodes_driver_source to existing"
        case.refuse(
            f"driver {installed_driver(driver)} was installed {origin}",
            "a driver from packages, or no driver: two drivers overwrite each other's files",
            remedy,
        )


def reboot(case: Case, branch: str, flavour: Flavour, nouveau: str) -> str | None:
    """Why the machine must be rebooted after the installation, or None."""
    driver = case.gpu.get("driver") or {}
    if nouveau == "loaded":
        return "nouveau is loaded, and blocks the GPUs until the next boot"
    loaded = str(driver.get("module") or "")
    if driver.get("loaded") and (
        loaded.partition(".")[0] != branch or driver.get("flavour") not in {None, flavour.value}
    ):
        return f"the module {loaded} stays loaded until the next boot"
    return None
