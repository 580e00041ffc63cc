"""Filters of the roles. They run on the controlling machine, with the installed package or from a checkout."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import gpunodes.planner.preflight as _  # noqa: F401 - to see whether the package is installed
except ModuleNotFoundError:
    # ansible-playbook of another Python, from a checkout.
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from ansible.errors import AnsibleFilterError


def preflight(
    facts: Mapping[str, Mapping[str, Any]],
    roles: Mapping[str, str],
    cluster: Mapping[str, Any] | None,
    kubernetes: str,
    settings: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Every finding of every machine, one line each; ``settings`` are those that hold wishes, by machine."""
    from gpunodes.errors import WrongInput
    from gpunodes.model import Role, Severity
    from gpunodes.planner.gpu import wishes_of
    from gpunodes.planner.preflight import Candidate, judge, wants_of

    try:
        candidates = [
            Candidate(name=name, role=Role(roles[name]), facts=found, wishes=wishes_of(settings[name], ""))
            for name, found in facts.items()
        ]
    except WrongInput as error:
        raise AnsibleFilterError(str(error)) from error
    wants = wants_of(cluster, kubernetes)
    return [str(finding) for finding in judge(candidates, wants) if finding.severity is Severity.ERROR]


def node_of(nodes: Sequence[Mapping[str, Any]], names: Sequence[str | None]) -> dict[str, Any]:
    """The node that one of ``names`` (host name, inventory name, address) stands for; {} when none does."""
    for name in names:
        for node in nodes:
            if name and (node["name"] == name.lower() or node["address"] == name):
                return dict(node)
    return {}


def packages(names: Sequence[str], version: str = "") -> list[dict[str, Any]]:
    """``names`` as the module host takes packages; those with a version are held at it."""
    return [{"name": name, "version": version, "hold": bool(version)} for name in names]


def registry_hosts(mirrors: Mapping[str, str]) -> list[dict[str, str]]:
    """containerd's hosts.toml for every mirrored registry (containerd, docs/hosts.md)."""
    servers = {"docker.io": "registry-1.docker.io"}
    return [
        {
            "path": f"/etc/containerd/certs.d/{registry}/hosts.toml",
            "content": (
                "# Managed by gpunodes.\n"
                f'server = "https://{servers.get(registry, registry)}"\n\n'
                f'[host."{mirror.rstrip("/")}"]\n  capabilities = ["pull", "resolve"]\n'
            ),
        }
        for registry, mirror in sorted(mirrors.items())
    ]


def key_text(key: str) -> str:
    """A package source's key: an address or an armoured text stays; a file of the controlling machine is read."""
    if not key or "://" in key or key.lstrip().startswith("-----BEGIN"):
        return key
    try:
        return Path(key).expanduser().read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise AnsibleFilterError(f"the key file {key} cannot be read: {error}") from error


def registries(mirrors: Mapping[str, str], image: str) -> list[dict[str, str]]:
    """What host_facts is to ask of the registries that the cluster's images come from."""
    named = dict.fromkeys(["registry.k8s.io", "ghcr.io", image.split("/", maxsplit=1)[0]])
    return [
        {
            "name": f"images of {registry}",
            "url": mirrors.get(registry, f"https://{registry}").rstrip("/") + "/v2/",
            "kind": "registry",
        }
        for registry in named
    ]


def health(
    facts: Mapping[str, Any],
    name: str,
    xids: Mapping[Any, str] | None = None,
    sxids: Mapping[Any, str] | None = None,
) -> dict[str, Any]:
    """The verdict on a machine by what gpu_probe found; ``text`` says it in a line."""
    from gpunodes.errors import GpunodesError
    from gpunodes.health import judge, shape, site

    try:
        rules = site.rules(xids or {}, sxids or {})
    except GpunodesError as error:
        raise AnsibleFilterError(str(error)) from error
    wrong = shape.complaint(facts)
    verdict = judge.unreachable(name, "probe_failed", wrong) if wrong else judge.judge_facts(name, facts, rules)
    # Through JSON: templates get plain strings for enums.
    told: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(verdict)))
    action = "" if verdict.action == "none" else f", {verdict.action.replace('_', ' ')}"
    why = "".join(f"; {finding.gpu + ': ' if finding.gpu else ''}{finding.said}" for finding in verdict.findings)
    return {**told, "text": f"{name}: {verdict.state}{action}{why}"}


class FilterModule:
    """Ansible's way to find filters."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "gpunodes_health": health,
            "gpunodes_key": key_text,
            "gpunodes_node": node_of,
            "gpunodes_packages": packages,
            "gpunodes_preflight": preflight,
            "gpunodes_registries": registries,
            "gpunodes_registry_hosts": registry_hosts,
        }
