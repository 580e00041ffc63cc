"""The plan of a machine whose driver others installed and keep (``gpunodes_driver_source: existing``).

gpunodes installs no driver, no headers and no Fabric Manager there, and removes and replaces none. The container
toolkit, and CUDA and cuDNN from NVIDIA's repository if they are requested, it installs as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpunodes.planner import gpu_packages as software
from gpunodes.planner.gpu_case import Case, Row, branches, expected_gpus, installed_driver
from gpunodes.planner.gpu_model import Flavour, Package, Source
from gpunodes.planner.gpu_offers import broken_limits, offers_for

_REMEDY = "install it as the present one was, or remove that one, reboot, and leave gpunodes_driver_source empty"


def judge(case: Case, cudas: Sequence[tuple[str, Row]]) -> tuple[str, Flavour | None]:
    """The branch and the modules of the machine's driver; adds a conflict for each reason why it does not fit."""
    driver = case.gpu.get("driver") or {}
    version = installed_driver(driver)
    branch = version.partition(".")[0]
    if not version:
        case.refuse(
            "no NVIDIA driver is installed, and gpunodes_driver_source is existing",
            "a driver that works",
            "install one, or leave gpunodes_driver_source empty: then gpunodes installs one",
        )
        return "", None
    if not driver.get("loaded") and not expected_gpus(case.facts):
        case.refuse(
            f"driver {version} is installed, but not loaded",
            "a driver that works: gpunodes_driver_source is existing",
            "load it (`modprobe nvidia`), and make the system load it at every boot",
        )
    request = case.requested.driver
    if request and not f"{version}.".startswith(f"{request}."):
        case.refuse(f"driver {version} is installed, and gpunodes_driver_source is existing", request, _REMEDY)
    if branch in branches():
        for problem in broken_limits(case, branch, cudas):
            case.refuse(problem.found, problem.wanted, _REMEDY)
    else:
        case.warnings.append(f"driver {version} is not in gpunodes' table of drivers: untested")
    case.explain(f"driver {version}", "it is there (gpunodes_driver_source: existing): others install and update it")
    if case.switched():
        case.warnings.append(
            f"these GPUs need Fabric Manager {version}, and gpunodes does not install it beside an existing driver"
        )
    modules = driver.get("flavour")
    return branch, Flavour(modules) if modules else None


def cuda(case: Case, branch: str, cudas: Sequence[tuple[str, Row]]) -> list[Package]:
    """The requested CUDA and cuDNN: NVIDIA's packages, which need no packages of a driver."""
    offers = [offer for offer in offers_for(case, case.system) if offer["source_of"] == Source.NVIDIA]
    missing = [
        f"CUDA {version}" for version, _ in cudas if not offers or not software.cuda_row(case, offers[0], version)
    ]
    if case.requested.cudnn and not (offers and software.cudnn_row(case, offers[0], branch)):
        missing.append(f"cuDNN {case.requested.cudnn}")
    for each in missing:
        case.refuse(
            f"NVIDIA's repository has no {each} {case.for_system()}",
            software.cudas_of(case, offers),
            "do not request it: containers bring their own",
        )
    return [] if missing or not offers else software.cuda(case, offers[0], branch)
