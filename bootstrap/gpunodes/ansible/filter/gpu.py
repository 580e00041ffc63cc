"""Filters of the roles for GPUs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import gpunodes.planner.tables as _  # noqa: F401 - checks whether the package is installed
except ModuleNotFoundError:
    # From a checkout, or from the built collection, which brings the parts of the package that this file imports.
    _HERE = Path(__file__).resolve()
    sys.path[:0] = [str(_HERE.parents[3]), str(_HERE.parents[1] / "plugin_utils")]

from ansible.errors import AnsibleFilterError


def checked_gpu_sources(
    settings: Mapping[str, Mapping[str, str]], mirrors: Mapping[str, str], image: str
) -> list[dict[str, Any]]:
    """Sources that host_facts checks on machines with GPUs: NVIDIA's package sources and the device plugin's registry.

    They have the plan's names for sources: preflight considers only those that a machine's plan uses.
    """
    from gpunodes.planner import tables

    table = tables.read("sources")
    registry = image.partition("/")[0]
    address = mirrors.get(registry, f"https://{registry}").rstrip("/") + "/v2/"
    sources: list[dict[str, Any]] = [
        {"name": f"images of {registry}", "url": address, "kind": "registry", "gpus": True}
    ]
    for name, plan_name in (("nvidia", "nvidia"), ("nvidia_toolkit", "nvidia-container-toolkit")):
        row, setting = table[name], settings[name]
        url = setting["url"] or row["url"]
        if setting["key"]:
            keys = [{"key": setting["key"], "fingerprint": setting["fingerprint"]}]
        elif "fingerprint" in row:
            keys = [{"key": row["key"], "fingerprint": setting["fingerprint"] or row["fingerprint"]}]
        else:
            keys = [
                {"key": url + known["file"], "fingerprint": setting["fingerprint"] or known["fingerprint"],
                 "systems": known["systems"]}
                for known in row["key"]
            ]  # fmt: skip
        sources += [{"name": plan_name, "url": url, "gpus": True, **key} for key in keys]
    return sources


def exact_packages(requested: Mapping[str, Any]) -> dict[str, list[str]]:
    """The packages whose versions host_facts reads, by source, because these settings request an exact one."""
    from gpunodes.errors import WrongInput
    from gpunodes.planner import exact_versions, gpu, gpu_packages

    try:
        found = gpu.requested_of({**requested, "gpunodes_feature_gates": {}}, "")
    except WrongInput as error:
        raise AnsibleFilterError(str(error)) from error
    names = gpu_packages.exact_packages(found.driver, found.cuda, found.cudnn)
    versions = (str(requested[f"gpunodes_{name}_version"]) for name in ("kubernetes", "containerd"))
    return exact_versions.packages(*versions) | ({gpu.Source.NVIDIA.value: names} if names else {})


def without_driver(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a machine without its driver: what is planned from them does not depend on the installed one."""
    from gpunodes.planner.gpu_upgrade import without_driver as compute

    return compute(facts)


def driver_upgrade_problems(facts: Mapping[str, Any], machine: str, settings: Mapping[str, Any]) -> list[str]:
    """Why the driver of a machine cannot be upgraded to the one that its settings request, one sentence each."""
    from gpunodes.errors import WrongInput
    from gpunodes.planner.gpu import requested_of
    from gpunodes.planner.gpu_upgrade import Upgrade, upgrade

    try:
        found = upgrade(machine, facts, requested_of(settings, "").without_kubernetes())
    except WrongInput as error:
        raise AnsibleFilterError(str(error)) from error
    return [] if isinstance(found, Upgrade) else [f"{machine}: {problem}" for problem in found]


def gpu_machines(facts: Iterable[Mapping[str, Any]]) -> int:
    """Number of machines with GPUs."""
    from gpunodes.planner.gpu import gpus_of

    return sum(bool(gpus_of(found)) for found in facts)


def gpu_sharing(given: Iterable[Any]) -> list[str]:
    """The different ways to share GPUs in these values of gpunodes_gpu_sharing: ``time-slicing-4``."""
    from gpunodes.errors import WrongInput
    from gpunodes.planner.gpu_sharing import all_sharing

    try:
        return all_sharing(given)
    except WrongInput as error:
        raise AnsibleFilterError(str(error)) from error


def gpus_offered(gpus: int, sharing: Any) -> int:
    """How many GPUs, shares or MIG instances a node offers with this value of gpunodes_gpu_sharing."""
    from gpunodes.ansible.module_utils import devices

    [label] = gpu_sharing([sharing]) or [""]
    return int(gpus) * devices.replicas({devices.SHARING: label})


def failed_level(levels: Sequence[Mapping[str, str]]) -> str:
    """A message about the first failed level, "" if none failed."""
    from gpunodes.ansible.module_utils.problem import Problem

    for level in levels:
        if level["state"] == "failed":
            return f"{level['level']}: {Problem(level['fact'], level['wanted'], level['remedy'])}"
    return ""


def runtimes(facts: Mapping[str, Any]) -> list[str]:
    """The container runtimes on a machine, by its packages."""
    from gpunodes.planner.gpu_installed import runtimes_of

    return runtimes_of(facts)


# A machine may report only these labels about its GPUs: other labels decide which pods may run on its node.
_LABEL = re.compile(r"gpunodes\.dev/gpu-[a-z][a-z-]{0,40}")
_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def labels(found: Mapping[str, Any], machine: str) -> dict[str, str]:
    """Validate the GPU labels that a machine reported (a result of gpu_verify) or that gpunodes set on its node."""
    for name, value in found.items():
        if not (_LABEL.fullmatch(str(name)) and isinstance(value, str) and _VALUE.fullmatch(value)):
            raise AnsibleFilterError(f"{machine}: it reports {str(name)[:60]!r}, which is not a valid GPU label")
    return dict(found)


class FilterModule:
    """The filters, as Ansible looks them up."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "checked_gpu_sources": checked_gpu_sources,
            "driver_upgrade_problems": driver_upgrade_problems,
            "exact_packages": exact_packages,
            "failed_level": failed_level,
            "gpu_labels": labels,
            "gpu_machines": gpu_machines,
            "gpu_sharing": gpu_sharing,
            "gpus_offered": gpus_offered,
            "runtimes": runtimes,
            "without_driver": without_driver,
        }
