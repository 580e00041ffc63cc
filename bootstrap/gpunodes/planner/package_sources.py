"""The package sources of a machine, by its settings and the table of public addresses and keys. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from gpunodes.ansible.module_utils.facts import placeholders
from gpunodes.ansible.module_utils.host.spec import Repository
from gpunodes.errors import WrongInput
from gpunodes.planner import tables
from gpunodes.planner.gpu_model import Facts, Package, Source

SourceSettings = Mapping[str, Mapping[str, str]]
"""The settings of package sources by name: ``url``, ``key`` (an address or armoured text) and ``fingerprint``."""


def kubernetes(settings: SourceSettings, minor: str, package_format: str) -> Repository:
    """The source of Kubernetes' packages; ``package_format`` is deb or rpm."""
    given, public = settings["kubernetes"], tables.read("sources")["kubernetes"]
    return Repository(
        name="kubernetes",
        url=given["url"].replace("{minor}", minor).replace("{format}", package_format),
        key=given["key"].replace("{minor}", minor),
        fingerprint=_fingerprint(given, public, public["fingerprint"]),
    )


def docker(settings: SourceSettings, system: Mapping[str, Any]) -> Repository:
    """Docker's source, which has containerd too, for an operating system; the RHEL family shares one."""
    given, public = settings["docker"], tables.read("sources")["docker"]
    row = public["systems"].get(system["id"]) or public["systems"]["rhel"]
    path = row["path"].replace("{release}", major_of(system))
    return Repository(
        name="docker",
        url=given["url"].replace("{system}", row["name"]) + path,
        key=given["key"].replace("{system}", row["name"]),
        fingerprint=_fingerprint(given, public, row["fingerprint"]),
        suite=system.get("codename") or "",
        components="stable",
    )


def cri_dockerd(settings: SourceSettings) -> Repository:
    """The user's own source of cri-dockerd."""
    given = settings["cri_dockerd"]
    return Repository("cri_dockerd", given["url"], given["key"], given["fingerprint"])


def of_packages(packages: Iterable[Package], facts: Facts, settings: SourceSettings) -> Sequence[Repository]:
    """The sources of GPU software for a machine; raises WrongInput if the key of one is unknown."""
    names = {"nvidia_toolkit" if package.source is Source.TOOLKIT else package.source.value for package in packages}
    return [
        _debian(settings, facts["os"]) if name == Source.DISTRIBUTION else _nvidia(name, facts, settings[name])
        for name in sorted(names)
        if name != Source.DISTRIBUTION or facts["os"]["id"] == "debian"
    ]


def major_of(system: Mapping[str, Any]) -> str:
    """The major version of an operating system."""
    return str(system.get("version") or "").partition(".")[0]


def from_docker(system: Mapping[str, Any], source: str, docker_systems: Collection[str], *, installed: bool) -> bool:
    """Whether containerd, and Docker, come from Docker's package source; ``source`` is gpunodes_containerd_source.

    Without a setting an ``installed`` containerd.io stays: the distribution's containerd would remove it and Docker.
    """
    if not source and installed:
        return True
    return source == "docker" or (not source and f"{system['id']} {major_of(system)}" in docker_systems)


def _fingerprint(given: Mapping[str, str], public: Mapping[str, Any], known: str) -> str:
    """The fingerprint of the settings, or the known one if the key comes from its public address."""
    return given["fingerprint"] or (known if given["key"].startswith(public["keys"]) else "")


def _debian(settings: SourceSettings, system: Mapping[str, Any]) -> Repository:
    row = tables.read("sources")["debian"]
    return Repository(
        name="debian-non-free",
        url=settings["debian"]["url"] or row["url"],
        key=row["keyring"],
        suite=system["codename"],
        components=row["components"],
    )


def _nvidia(name: str, facts: Facts, given: Mapping[str, str]) -> Repository:
    row = tables.read("sources")[name]
    url = given["url"] or row["url"]
    key, fingerprint = given["key"], given["fingerprint"]
    if not key:
        known = row if "fingerprint" in row else _key_of(row["key"], facts["os"])
        key = known["key"] if "key" in known else url + known["file"]
        fingerprint = fingerprint or known["fingerprint"]
        if not fingerprint:
            raise WrongInput(
                f"the fingerprint of NVIDIA's key for {facts['os']['name'] or facts['os']['id']} is unknown",
                "a key that is checked",
                "set gpunodes_nvidia_packages_fingerprint to the one that NVIDIA publishes, or "
                "gpunodes_nvidia_packages_key to a key of your own",
            )
    for placeholder, value in placeholders(facts["os"], facts["arch"]).items():
        url, key = url.replace(placeholder, value), key if "BEGIN" in key else key.replace(placeholder, value)
    return Repository(name, url, key, fingerprint)


def _key_of(rows: Sequence[Mapping[str, Any]], system: Mapping[str, Any]) -> Mapping[str, Any]:
    for row in rows:
        for known in row["systems"]:
            id_, _, version = known.partition(" ")
            if system["id"] == id_ and (system["version"] == version or system["version"].startswith(version + ".")):
                return row
    raise WrongInput(
        f"NVIDIA's key for {system['name']} is unknown",
        "a system of the table sources, or the key in the settings",
        "set gpunodes_nvidia_packages_key and gpunodes_nvidia_packages_fingerprint",
    )
