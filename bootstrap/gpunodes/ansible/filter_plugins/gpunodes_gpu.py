"""Filters of the roles for GPUs: the plan for a machine, in the words of the modules that carry it out."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import gpunodes.planner.tables as _  # noqa: F401 - to see whether the package is installed
except ModuleNotFoundError:
    # ansible-playbook of another Python, from a checkout.
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from ansible.errors import AnsibleFilterError


def gpu_plan(facts: Mapping[str, Any], machine: str, settings: Mapping[str, Any], kubernetes: str) -> dict[str, Any]:
    """What a machine with GPUs gets (docs/json.md, gpunodes.gpu-plan/1, `plan`); fails with every conflict at once."""
    from gpunodes.errors import WrongInput
    from gpunodes.planner.gpu import Plan, plan, requested_of

    try:
        found = plan(machine, facts, requested_of(settings, kubernetes))
    except WrongInput as error:
        raise AnsibleFilterError(str(error)) from error
    if not isinstance(found, Plan):
        lines = [f"{machine}: {one.fact}; wanted: {one.limit}; {one.remedy}" for one in found]
        raise AnsibleFilterError("\n".join(lines))
    # Plain strings: Ansible takes no enumerations.
    made: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(found)))
    return made


# What each concern installs, by the plan's groups.
_CONCERNS = {"driver": ("headers", "driver", "fabric_manager"), "cuda": ("cuda", "cudnn"), "toolkit": ("toolkit",)}


def gpu_install(plan: Mapping[str, Any]) -> dict[str, Any]:
    """A plan (the result of gpunodes_gpu_plan) as the roles carry it out; ``gpus`` is 0 where there is nothing to do.

    Packages come by concern, as the module host takes them, with the names of the sources that have them.
    """
    made: dict[str, Any] = {
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
    for concern, groups in _CONCERNS.items():
        wanted = [package for package in plan["packages"] if package["group"] in groups]
        made[concern] = {
            "packages": [
                {
                    "name": package["name"],
                    "version": package["version"],
                    "same_as": package["same_version_as"],
                    # What pins a branch works on all that is chosen after it; headers that come after the driver's
                    # source build it a second time.
                    "first": package["group"] == "headers" or "-pinning-" in package["name"],
                    "hold": package["group"] != "headers",
                }
                for package in wanted
            ],
            # Headers are the system's own, whatever brings the driver.
            "sources": sorted({_source(package["source"]) for package in wanted if package["group"] != "headers"}),
        }
    cuda = [package for package in plan["packages"] if package["group"] == "cuda"]
    made["cuda"]["homes"] = {_cuda_version(package): _cuda_home(package) for package in cuda}
    cudnn = [package["version"].partition(".")[0] for package in plan["packages"] if package["group"] == "cudnn"]
    made["cuda"]["libraries"] = [f"libcudart.so.{version.partition('.')[0]}" for version in made["cuda"]["homes"]] + [
        f"libcudnn.so.{major}" for major in cudnn
    ]
    return made


def _cuda_version(package: Mapping[str, str]) -> str:
    """The version of CUDA that a package is: its name says it (cuda-toolkit-13-0), or its version."""
    named = re.search(r"-(\d+)-(\d+)$", package["name"])
    return ".".join(named.groups()) if named else package["version"].removesuffix(".*")


def _cuda_home(package: Mapping[str, str]) -> str:
    """Where NVIDIA's packages, or the distribution's, put a CUDA."""
    return "/usr" if package["source"] == "distribution" else f"/usr/local/cuda-{_cuda_version(package)}"


def _source(name: str) -> str:
    """A source of the plan by its name in the table of sources, which is also that in the settings."""
    return {"nvidia-container-toolkit": "nvidia_toolkit"}.get(name, name)


def gpu_sources(
    names: Sequence[str], facts: Mapping[str, Any], settings: Mapping[str, Mapping[str, str]]
) -> list[dict[str, Any]]:
    """The package sources of these names for a machine, as the module host takes them.

    ``settings`` are address, key and fingerprint by source; empty ones stand for those that NVIDIA publishes.
    """
    from gpunodes.ansible.module_utils.gpunodes.facts import placeholders
    from gpunodes.planner import tables

    table = tables.read("sources")
    system = facts["os"]
    words = placeholders(system, facts["arch"])
    made = []
    for name in names:
        if name == "distribution":
            if system["id"] == "debian":
                row = table["debian"]
                made.append(
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
        for word, value in words.items():
            url, key = url.replace(word, value), key if "BEGIN" in key else key.replace(word, value)
        made.append({"name": name, "url": url, "key": key, "fingerprint": fingerprint, "suite": "/"})
    return made


def gpu_asked(
    settings: Mapping[str, Mapping[str, str]], mirrors: Mapping[str, str], image: str
) -> list[dict[str, Any]]:
    """What host_facts is to ask on machines with GPUs: NVIDIA's package sources, and where the device plugin is from.

    They have the plan's names for sources: preflight minds those that a machine's plan takes packages from.
    """
    from gpunodes.planner import tables

    table = tables.read("sources")
    registry = image.partition("/")[0]
    address = mirrors.get(registry, f"https://{registry}").rstrip("/") + "/v2/"
    made: list[dict[str, Any]] = [{"name": f"images of {registry}", "url": address, "kind": "registry", "gpus": True}]
    for name, called in (("nvidia", "nvidia"), ("nvidia_toolkit", "nvidia-container-toolkit")):
        row, own = table[name], settings[name]
        url = own["url"] or row["url"]
        if own["key"]:
            keys = [{"key": own["key"], "fingerprint": own["fingerprint"]}]
        elif "fingerprint" in row:
            keys = [{"key": row["key"], "fingerprint": own["fingerprint"] or row["fingerprint"]}]
        else:
            keys = [
                {"key": url + known["file"], "fingerprint": own["fingerprint"] or known["fingerprint"],
                 "systems": known["systems"]}
                for known in row["key"]
            ]  # fmt: skip
        made += [{"name": called, "url": url, "gpus": True, **key} for key in keys]
    return made


def _key_of(rows: Sequence[Mapping[str, Any]], system: Mapping[str, str]) -> Mapping[str, Any]:
    """The key of a system; raises AnsibleFilterError for one that has none."""
    for row in rows:
        for known in row["systems"]:
            id_, _, version = known.partition(" ")
            if system["id"] == id_ and (system["version"] == version or system["version"].startswith(version + ".")):
                return row
    raise AnsibleFilterError(
        f"NVIDIA's key for {system['name']} is not known here; set gpunodes_nvidia_packages_key and _fingerprint"
    )


def gpu_machines(facts: Iterable[Mapping[str, Any]]) -> int:
    """How many of these machines have GPUs."""
    from gpunodes.planner.gpu import gpus_of

    return sum(bool(gpus_of(found)) for found in facts)


def failed_level(levels: Sequence[Mapping[str, str]]) -> str:
    """The first level that failed, in a sentence; "" when none did."""
    for level in levels:
        if level["state"] == "failed":
            return f"{level['level']}: {level['fact']}; wanted: {level['wanted']}; {level['remedy']}"
    return ""


def runtimes(facts: Mapping[str, Any]) -> list[str]:
    """What runs containers on a machine now, by its packages."""
    there = {name for name, version in {**facts["packages"], **facts["gpu"].get("runtimes", {})}.items() if version}
    known = {"containerd": {"containerd", "containerd.io"}, "docker": {"docker.io", "docker-ce"}}
    return [name for name, packages in known.items() if packages & there]


def cuda_checks(homes: Mapping[str, str], libraries: Sequence[str]) -> list[dict[str, Any]]:
    """Checks for the module host: each version's compiler runs, and each library loads."""
    compilers = [
        {"command": [f"{home}/bin/nvcc", "--version"], "output": f"release {version}"}
        for version, home in homes.items()
    ]
    return compilers + [
        {"command": ["python3", "-c", f"import ctypes; ctypes.CDLL('{library}')"]} for library in libraries
    ]


# A machine tells of its GPUs by labels of ours, and by no other: those of others decide what may run there.
_LABEL = re.compile(r"gpunodes\.dev/gpu-[a-z][a-z-]{0,40}")
_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def labels(found: Mapping[str, Any], machine: str) -> dict[str, str]:
    """The labels of GPUs that a machine reported (a result of gpu_verify), or that its node has from us."""
    for name, value in found.items():
        if not (_LABEL.fullmatch(str(name)) and isinstance(value, str) and _VALUE.fullmatch(value)):
            raise AnsibleFilterError(f"{machine}: its answer has no label of a GPU in {str(name)[:60]!r}")
    return dict(found)


def services(names: Sequence[str]) -> list[dict[str, str]]:
    """``names`` as the module host takes services."""
    return [{"name": name} for name in names]


class FilterModule:
    """Ansible's way to find filters."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "gpunodes_gpu_plan": gpu_plan,
            "gpunodes_cuda_checks": cuda_checks,
            "gpunodes_gpu_asked": gpu_asked,
            "gpunodes_failed_level": failed_level,
            "gpunodes_gpu_install": gpu_install,
            "gpunodes_gpu_labels": labels,
            "gpunodes_gpu_machines": gpu_machines,
            "gpunodes_gpu_sources": gpu_sources,
            "gpunodes_runtimes": runtimes,
            "gpunodes_services": services,
        }
