"""Filters of the roles for GPUs: convert a machine's plan into parameters of the modules."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import gpunodes.planner.tables as _  # noqa: F401 - checks whether the package is installed
except ModuleNotFoundError:
    # ansible-playbook runs from a checkout, with a Python that does not have the package.
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from ansible.errors import AnsibleFilterError


def gpu_plan(facts: Mapping[str, Any], machine: str, settings: Mapping[str, Any], kubernetes: str) -> dict[str, Any]:
    """The plan for a machine's GPUs (docs/json.md, gpunodes.gpu-plan/1, `plan`); fails with all conflicts at once."""
    from gpunodes.errors import WrongInput
    from gpunodes.planner.gpu import Plan, plan, requested_of

    try:
        found = plan(machine, facts, requested_of(settings, kubernetes))
    except WrongInput as error:
        raise AnsibleFilterError(str(error)) from error
    if not isinstance(found, Plan):
        raise AnsibleFilterError("\n".join(f"{machine}: {conflict}" for conflict in found))
    # Through JSON, so that Ansible gets strings instead of enums.
    document: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(found)))
    return document


# The plan's groups of packages that each role installs.
_ROLES = {"driver": ("headers", "driver", "fabric_manager"), "cuda": ("cuda", "cudnn"), "toolkit": ("toolkit",)}


def gpu_install(plan: Mapping[str, Any]) -> dict[str, Any]:
    """A plan (the result of gpunodes_gpu_plan) as variables for the roles; ``gpus`` is 0 without GPUs.

    Packages are grouped by role, in the form of the module host, with the names of their package sources.
    """
    variables: dict[str, Any] = {
        "gpus": len(plan["gpus"]),
        "module_stream": plan["module_stream"],
        "holds": list(plan["hold"]),
        "conflicting_module": "nouveau" if plan["blacklist_nouveau"] else "",
        "services": (["nvidia-persistenced"] if plan["persistence"] else [])
        + (["nvidia-fabricmanager"] if plan["fabric_manager"] else []),
        "gates": dict(plan["gates"]),
        "labels": dict(plan["labels"]),
        "runtime": plan["runtime"],
        "cri_dockerd": plan["cri_dockerd"],
    }
    for role, groups in _ROLES.items():
        wanted = [package for package in plan["packages"] if package["group"] in groups]
        variables[role] = {
            "packages": [
                {
                    "name": package["name"],
                    "version": package["version"],
                    "same_as": package["same_version_as"],
                    # A pinning package determines the versions of all packages chosen after it. Headers that are
                    # installed after the driver's source would build the driver a second time.
                    "first": package["group"] == "headers" or "-pinning-" in package["name"],
                    "hold": package["group"] != "headers",
                }
                for package in wanted
            ],
            # Headers always come from the operating system's own source.
            "sources": sorted({_source(package["source"]) for package in wanted if package["group"] != "headers"}),
        }
    cuda = [package for package in plan["packages"] if package["group"] == "cuda"]
    homes = {_cuda_version(package): _cuda_home(package) for package in cuda}
    cudnn = [package["version"].partition(".")[0] for package in plan["packages"] if package["group"] == "cudnn"]
    variables["cuda"]["homes"] = homes
    variables["cuda"]["libraries"] = [
        *(f"libcudart.so.{version.partition('.')[0]}" for version in homes),
        *(f"libcudnn.so.{major}" for major in cudnn),
    ]
    return variables


def _cuda_version(package: Mapping[str, str]) -> str:
    """The CUDA version of a package, from its name (cuda-toolkit-13-0) or its version."""
    match = re.search(r"-(\d+)-(\d+)$", package["name"])
    return ".".join(match.groups()) if match else package["version"].removesuffix(".*")


def _cuda_home(package: Mapping[str, str]) -> str:
    """The folder in which NVIDIA's or the distribution's packages install a CUDA toolkit."""
    return "/usr" if package["source"] == "distribution" else f"/usr/local/cuda-{_cuda_version(package)}"


def _source(name: str) -> str:
    """A plan's source by its name in the table of sources and in the settings."""
    return {"nvidia-container-toolkit": "nvidia_toolkit"}.get(name, name)


def gpu_sources(
    names: Sequence[str], facts: Mapping[str, Any], settings: Mapping[str, Mapping[str, str]]
) -> list[dict[str, Any]]:
    """The package sources with these names for a machine, in the form of the module host.

    ``settings`` are address, key and fingerprint by source; if empty, the values that NVIDIA publishes are used.
    """
    from gpunodes.ansible.module_utils.gpunodes.facts import placeholders
    from gpunodes.planner import tables

    table = tables.read("sources")
    system = facts["os"]
    values = placeholders(system, facts["arch"])
    sources = []
    for name in names:
        if name == "distribution":
            if system["id"] == "debian":
                row = table["debian"]
                sources.append(
                    {
                        "name": "debian-non-free",
                        "url": settings["debian"]["url"] or row["url"],
                        "key": row["keyring"],
                        "suite": system["codename"],
                        "components": row["components"],
                    }
                )
            continue
        row = table[name]
        url = settings[name]["url"] or row["url"]
        key, fingerprint = settings[name]["key"], settings[name]["fingerprint"]
        if not key:
            known = row if "fingerprint" in row else _key_of(row["key"], system)
            key = known["key"] if "key" in known else url + known["file"]
            fingerprint = fingerprint or known["fingerprint"]
        for placeholder, value in values.items():
            url, key = url.replace(placeholder, value), key if "BEGIN" in key else key.replace(placeholder, value)
        sources.append({"name": name, "url": url, "key": key, "fingerprint": fingerprint, "suite": "/"})
    return sources


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


def _key_of(rows: Sequence[Mapping[str, Any]], system: Mapping[str, str]) -> Mapping[str, Any]:
    """The key for an operating system; raises AnsibleFilterError if there is none."""
    for row in rows:
        for known in row["systems"]:
            id_, _, version = known.partition(" ")
            if system["id"] == id_ and (system["version"] == version or system["version"].startswith(version + ".")):
                return row
    raise AnsibleFilterError(
        f"NVIDIA's key for {system['name']} is unknown; set gpunodes_nvidia_packages_key and "
        "gpunodes_nvidia_packages_fingerprint"
    )


def gpu_machines(facts: Iterable[Mapping[str, Any]]) -> int:
    """Number of machines with GPUs."""
    from gpunodes.planner.gpu import gpus_of

    return sum(bool(gpus_of(found)) for found in facts)


def failed_level(levels: Sequence[Mapping[str, str]]) -> str:
    """A message about the first failed level, "" if none failed."""
    from gpunodes.ansible.module_utils.gpunodes.problem import Problem

    for level in levels:
        if level["state"] == "failed":
            return f"{level['level']}: {Problem(level['fact'], level['wanted'], level['remedy'])}"
    return ""


def runtimes(facts: Mapping[str, Any]) -> list[str]:
    """The container runtimes on a machine, according to its packages."""
    present = {name for name, version in {**facts["packages"], **facts["gpu"].get("runtimes", {})}.items() if version}
    known = {"containerd": {"containerd", "containerd.io"}, "docker": {"docker.io", "docker-ce"}}
    return [name for name, packages in known.items() if packages & present]


def cuda_checks(homes: Mapping[str, str], libraries: Sequence[str]) -> list[dict[str, Any]]:
    """Checks for the module host: each version's compiler runs, and each library loads."""
    compilers = [
        {"command": [f"{home}/bin/nvcc", "--version"], "output": f"release {version}"}
        for version, home in homes.items()
    ]
    return compilers + [
        {"command": ["python3", "-c", f"import ctypes; ctypes.CDLL('{library}')"]} for library in libraries
    ]


# A machine may report only these labels about its GPUs: other labels decide which pods may run on its node.
_LABEL = re.compile(r"gpunodes\.dev/gpu-[a-z][a-z-]{0,40}")
_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def labels(found: Mapping[str, Any], machine: str) -> dict[str, str]:
    """Validate the GPU labels that a machine reported (a result of gpu_verify) or that gpunodes set on its node."""
    for name, value in found.items():
        if not (_LABEL.fullmatch(str(name)) and isinstance(value, str) and _VALUE.fullmatch(value)):
            raise AnsibleFilterError(f"{machine}: it reports {str(name)[:60]!r}, which is not a valid GPU label")
    return dict(found)


def services(names: Sequence[str]) -> list[dict[str, str]]:
    """Services for the module host."""
    return [{"name": name} for name in names]


class FilterModule:
    """The filters, as Ansible looks them up."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "gpunodes_checked_gpu_sources": checked_gpu_sources,
            "gpunodes_cuda_checks": cuda_checks,
            "gpunodes_failed_level": failed_level,
            "gpunodes_gpu_install": gpu_install,
            "gpunodes_gpu_labels": labels,
            "gpunodes_gpu_machines": gpu_machines,
            "gpunodes_gpu_plan": gpu_plan,
            "gpunodes_gpu_sources": gpu_sources,
            "gpunodes_runtimes": runtimes,
            "gpunodes_services": services,
        }
