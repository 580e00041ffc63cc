"""The packages of a plan: headers, driver, Fabric Manager, CUDA, cuDNN, container toolkit."""

from __future__ import annotations

from collections.abc import Sequence

from gpunodes.ansible.module_utils.packages import RequestedPackage, fits
from gpunodes.planner import tables
from gpunodes.planner.gpu_case import Case, Row, cite, exceeds, fill, number, product, version_of
from gpunodes.planner.gpu_model import SOURCES, Flavour, Group, Package, Source

_EXACT_CUDNN = 4
"""The numbers of an exact version of cuDNN."""
_SHOWN = 8
"""Versions of a package that a message lists."""


def minor_of(version: str) -> str:
    """The minor version of a CUDA version: ``13.0`` of 13.0.2."""
    return ".".join(version.split(".")[:2])


def pattern_of(version: str, *, exact: bool) -> str:
    """The pattern of a package's version: ``580.*``, or ``580.95.05-*`` for an exact version."""
    return f"{version}-*" if exact else f"{version}.*"


def check_sources(case: Case, packages: Sequence[Package]) -> None:
    """Refuse exact versions that the package's source does not have, if its versions were read."""
    listed = case.facts.get("versions") or {}
    for package in packages:
        if package.source not in listed or not package.version.endswith("-*"):
            continue
        versions = listed[package.source].get(package.name, ())
        if any(fits(RequestedPackage(package.name, package.version), version) for version in versions):
            continue
        more = ", ..." if len(versions) > _SHOWN else ""
        case.refuse(
            f"{SOURCES[package.source]} has no {package.name} {package.version.removesuffix('-*')}",
            f"one of {', '.join(versions[:_SHOWN])}{more}" if versions else "a version that it has: it has none",
            "choose one of these" if versions else "check the version, or request only the branch or the minor version",
        )


def exact_packages(driver: str, cudas: Sequence[str], cudnn: str) -> list[str]:
    """The packages of any system in which a requested exact version may be: their sources are read before anything."""
    branch, _, rest = driver.partition(".")
    found = []
    for offer in tables.read("drivers")["offer"]:
        if rest and branch in offer["branches"]:
            found += [*offer["open"], *offer["proprietary"], offer["fabric_manager"]]
            found += [name for names in offer.get("exact_with", {}).values() for name in names]
    for row in tables.read("cuda")["toolkit"]:
        found += [
            row["package"].replace("{version}", minor_of(version).replace(".", "-"))
            for version in cudas
            if version != minor_of(version)
        ]
    if len(version_of(cudnn)) == _EXACT_CUDNN:
        found += [row["package"] for row in tables.read("cuda")["cudnn"]]
    names = [name.replace("{branch}", branch) for name in found]
    return sorted({name for name in names if name and "{" not in name})


def headers(case: Case, *, signed: bool) -> list[Package]:
    if signed:
        return []
    row = next((row for row in tables.read("drivers")["headers"] if case.id in row["systems"]), None)
    headers = case.gpu.get("headers") or {}
    kernel = case.kernel()
    if row is None:
        return []
    if not headers.get("running") and not headers.get("package"):
        case.refuse(
            f"the headers of the running kernel {kernel} are neither installed nor available",
            f"{fill(row['package'], '', case.facts)}: the driver's modules are built with it",
            "install the system's own kernel with its headers, and reboot into it",
        )
        return []
    name = str(headers.get("package") or fill(row["package"], "", case.facts))
    why = "the driver's modules are built for the running kernel"
    case.explain(name, why, cite("drivers", row))
    if headers.get("running") and not headers.get("package"):
        return []  # installed, but not from a package that could be named
    return [Package(Group.HEADERS, name, "", "", Source.DISTRIBUTION, why)]


def driver(case: Case, offer: Row, branch: str, flavour: Flavour) -> list[Package]:
    source = Source(offer["source_of"])
    found = []
    if offer["pin"]:
        why = f"keeps all driver packages at the branch {branch}"
        found.append(Package(Group.DRIVER, fill(offer["pin"], branch, case.facts), "", "", source, why))
        case.explain(found[0].name, why, cite("drivers", offer))
    for name in offer[flavour.value]:
        # Debian builds these packages separately from the driver, with older versions.
        own = name == "nvidia-persistenced" or name.startswith("linux-modules-")
        why = f"the driver, with {flavour} modules"
        version = "" if own else _driver_pattern(case, branch)
        found.append(Package(Group.DRIVER, fill(name, branch, case.facts), version, "", source, why))
    if case.requested.exact_driver:
        for name in offer.get("exact_with", {}).get(flavour.value, ()):
            why = "it depends on exactly its own version of all other packages"
            found.append(Package(Group.DRIVER, name, _driver_pattern(case, branch), "", source, why))
    return found


def _driver_pattern(case: Case, branch: str) -> str:
    exact = case.requested.exact_driver
    return pattern_of(exact or branch, exact=bool(exact))


def fabric_manager(case: Case, offer: Row, branch: str, flavour: Flavour) -> list[Package]:
    if not case.switched():
        return []
    source = Source(offer["source_of"])
    driver = fill(offer[flavour.value][0], branch, case.facts)
    why = "NVSwitches need it; its version must be exactly the driver's"
    name = fill(offer["fabric_manager"], branch, case.facts)
    found = [Package(Group.FABRIC_MANAGER, name, _driver_pattern(case, branch), driver, source, why)]
    case.explain(name, why, cite("drivers", tables.read("drivers")["subnet_manager"]))
    if any(product(gpu).get("switched") for gpu in case.gpus) and source is Source.NVIDIA:
        row = tables.read("drivers")["subnet_manager"]
        why = "fourth-generation NVSwitches need it in addition to Fabric Manager"
        found.append(Package(Group.FABRIC_MANAGER, row["package"], "", "", source, why))
        case.explain(row["package"], why, cite("drivers", row))
    return found


def requested_cudas(case: Case) -> list[tuple[str, Row]]:
    """The requested CUDA versions that are in the table, each with the row of its major version."""
    found = []
    for version in dict.fromkeys(case.requested.cuda):
        row = next((row for row in tables.read("cuda")["cuda"] if minor_of(version) in row["minors"]), None)
        if row is None:
            continue  # reported as a conflict
        for generation in case.generations:
            last = generation["last_cuda"]
            if last and exceeds(version, last):
                named = last if "." in last else f"{last}.x"
                case.refuse(
                    f"CUDA {version} does not support {generation['title']} GPUs ({case.products(generation)})",
                    f"CUDA {named}, the last version for these GPUs ({cite('drivers', generation)})",
                    f"request CUDA {named}, or take those GPUs out",
                )
        found.append((version, row))
    return found


def cuda_row(case: Case, offer: Row, version: str) -> Row | None:
    """The row of this CUDA version in the driver's source for the machine, None if it is not available.

    Versions of distributions' packages do not have the numbers of NVIDIA's releases: no exact version is available.
    """
    minor = minor_of(version)
    for row in tables.read("cuda")["toolkit"]:
        if (
            row["source_of"] == offer["source_of"]
            and case.system in row["systems"]
            and (version == minor or row["source_of"] == Source.NVIDIA)
            and version_of(row["first"]) <= version_of(minor)
            and (not row["last"] or version_of(minor) <= version_of(row["last"]))
        ):
            found: Row = row
            return found
    return None


def cudas_of(case: Case, offers: Sequence[Row]) -> str:
    sources = {offer["source_of"] for offer in offers}
    rows = [
        row for row in tables.read("cuda")["toolkit"] if row["source_of"] in sources and case.system in row["systems"]
    ]
    spans = [
        row["first"] if row["first"] == row["last"] else f"{row['first']} to {row['last'] or 'the newest'}"
        for row in rows
    ]
    return f"CUDA {' or '.join(spans)}" if spans else "no CUDA version: none is available"


def cuda(case: Case, offer: Row, branch: str) -> list[Package]:
    source = Source(offer["source_of"])
    found = []
    for version in dict.fromkeys(case.requested.cuda):
        row = cuda_row(case, offer, version)
        if row is None:
            continue  # an unknown version, reported as a conflict
        minor = minor_of(version)
        name = row["package"].replace("{version}", minor.replace(".", "-"))
        exact = version != minor
        pattern = pattern_of(version, exact=exact) if row["last"] or exact else ""
        why = f"CUDA {version} is requested"
        found.append(Package(Group.CUDA, name, pattern, "", source, why))
        case.explain(name, why, cite("cuda", row))
    return [*found, *_cudnn(case, offer, branch)]


def _cudnn(case: Case, offer: Row, branch: str) -> list[Package]:
    request = case.requested.cudnn
    row = cudnn_row(case, offer, branch) if request else None
    if row is None:
        return []
    majors = cuda_majors(case)
    if len(majors) > 1:
        case.warnings.append(f"cuDNN is installed only for CUDA {majors[-1]}, the newest requested version")
    last = _last_cudnn(case)
    minor = next((version for version in (request, row["version"], last) if "." in version), request)
    why = f"cuDNN {request} is requested; for CUDA {row['cuda']}"
    if minor == last != request:
        why += f"; {last} is the last version for these GPUs"
    case.explain(row["package"], why, cite("cuda", row))
    pattern = pattern_of(minor, exact=len(version_of(minor)) == _EXACT_CUDNN)
    return [Package(Group.CUDNN, row["package"], pattern, "", Source(offer["source_of"]), why)]


def _last_cudnn(case: Case) -> str:
    """The last minor version of cuDNN 9 that supports all GPUs, empty for no limit."""
    limits = [row["last_cudnn"] for row in case.generations if row["last_cudnn"] not in {"", "none"}]
    return min(limits, key=version_of, default="")


def cudnn_limits(case: Case) -> None:
    request = case.requested.cudnn
    matrix = tables.read("cuda")["sources"]["cudnn-matrix"]
    for generation in case.generations:
        limit = generation["last_cudnn"]
        fact = f"cuDNN {request} does not support {generation['title']} GPUs ({case.products(generation)})"
        if limit == "none" and version_of(request) >= (9,):
            case.refuse(fact, f"cuDNN 8, the last version for these GPUs ({matrix})", "do not request cuDNN")
        elif limit not in {"", "none"} and "." in request and exceeds(request, limit):
            case.refuse(fact, f"cuDNN {limit}, the last version for these GPUs ({matrix})", f"request {limit}, or 9")


def cudnn_row(case: Case, offer: Row, branch: str) -> Row | None:
    """cuDNN for the newest requested CUDA version, else for the newest that the driver and all GPUs support."""
    by_cuda = {row["cuda"]: row for row in _cudnn_rows(case, offer["source_of"])}
    if majors := cuda_majors(case):
        return by_cuda.get(majors[-1])
    for row in reversed(tables.read("cuda")["cuda"]):
        if (
            row["major"] in by_cuda
            and number(branch) >= number(row["least_driver"])
            and all(
                not generation["last_cuda"] or not exceeds(row["major"], generation["last_cuda"])
                for generation in case.generations
            )
        ):
            return by_cuda[row["major"]]
    return None


def _cudnn_rows(case: Case, source: str) -> list[Row]:
    """The rows of the requested cuDNN version in a source."""
    return [
        row
        for row in tables.read("cuda")["cudnn"]
        if row["source_of"] == source
        and (not row["systems"] or case.system in row["systems"])
        and _same_release(case.requested.cudnn, row["version"])
    ]


def knows_cudnn(request: str) -> bool:
    """Whether any source has the requested cuDNN version for any machine."""
    numbers = all(part.isdecimal() for part in request.split("."))
    return numbers and any(_same_release(request, row["version"]) for row in tables.read("cuda")["cudnn"])


def _same_release(request: str, version: str) -> bool:
    """Whether one version contains the other: ``9.12`` belongs to 9, and 8.5 meets a request for ``8``."""
    return f"{request}.".startswith(f"{version}.") or f"{version}.".startswith(f"{request}.")


def cuda_majors(case: Case) -> list[str]:
    return sorted({version.partition(".")[0] for version in case.requested.cuda}, key=int)


def container_toolkit(case: Case) -> list[Package]:
    row = tables.read("toolkit")["packages"]
    first = row["names"][0]
    why = "gives containers access to GPUs; its four packages must have the same version"
    case.explain(first, why, cite("toolkit", row))
    return [
        Package(Group.TOOLKIT, name, row["version"], "" if name == first else first, Source.TOOLKIT, why)
        for name in row["names"]
    ]
