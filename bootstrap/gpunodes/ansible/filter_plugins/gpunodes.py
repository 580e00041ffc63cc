"""Filters of the roles. They run on the controlling machine, with the installed package or from a checkout."""

from __future__ import annotations

import base64
import dataclasses
import functools
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
    from gpunodes.planner.gpu import requested_of
    from gpunodes.planner.preflight import MachineFacts, judge, requirements_of

    try:
        candidates = [
            MachineFacts(name=name, role=Role(roles[name]), facts=found, requested=requested_of(settings[name], ""))
            for name, found in facts.items()
        ]
    except WrongInput as error:
        raise AnsibleFilterError(str(error)) from error
    requirements = requirements_of(cluster, kubernetes)
    return [str(finding) for finding in judge(candidates, requirements) if finding.severity is Severity.ERROR]


def match(
    nodes: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
    name: str,
    machines: Mapping[str, str],
    cluster: str,
    *,
    joins: bool = False,
) -> dict[str, Any]:
    """The node that the machine ``name`` is: ``node`` ({} for none), ``by`` what, or ``problem``, why it is refused.

    ``facts`` are a result of host_facts, empty where the machine does not answer; ``machines`` the inventory's
    addresses by name; ``cluster`` is what its records are filed under; ``joins``: the machine is about to.
    """
    from gpunodes.ansible.module_utils.gpunodes import identity
    from gpunodes.engine import identities

    known = identities.recall_all(cluster, {each: address or each for each, address in machines.items()})
    if facts:
        known[name] = identity.reported(name, machines[name] or name, facts)
    matcher = identity.Matcher([identity.described(node) for node in nodes], known.values())
    found = matcher.joining(known[name]) if joins else matcher.match(known[name])
    own = found.node.name if found.node else ""
    return {
        "node": next((dict(node) for node in nodes if own and node["name"] == own), {}),
        "by": found.by,
        "problem": f"{found.contradiction}; {_REMEDY}" if found.contradiction else "",
    }


_REMEDY = (
    "wanted: one node that is this machine beyond doubt; see `kubectl get nodes -o wide` and the inventory, and delete "
    "a node whose machine is gone"
)


def packages(names: Sequence[str], version: str = "") -> list[dict[str, Any]]:
    """``names`` as the module host takes packages; those with a version are held at it."""
    return [{"name": name, "version": version, "hold": bool(version)} for name in names]


def program(name: str) -> str:
    """The text of a program that becomes a file on a machine; it stands among what travels to machines."""
    return (Path(__file__).parents[1] / "module_utils" / "gpunodes" / f"{name}.py").read_text(encoding="utf-8")


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
    wrong = shape.violation(facts)
    verdict = judge.unreachable(name, "probe_failed", wrong) if wrong else judge.judge_facts(name, facts, rules)
    # Through JSON: templates get plain strings for enums.
    told: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(verdict)))
    action = "" if verdict.action == "none" else f", {verdict.action.replace('_', ' ')}"
    why = "".join(f"; {finding.gpu + ': ' if finding.gpu else ''}{finding.message}" for finding in verdict.findings)
    return {**told, "text": f"{name}: {verdict.state}{action}{why}"}


@functools.lru_cache(maxsize=2)  # a large cluster's document is read by many variables of one task
def data(text: str | None) -> Any:
    """A document from outside that the command line handed to the play (engine/runner.py); None stays None."""
    return None if text is None else json.loads(base64.b64decode(text))


def machine(facts: Any, name: str) -> Any:
    """What a machine reported (a result of host_facts), once its shape is seen to be right; {} for one that is gone."""
    from gpunodes.planner import reports

    if facts and (wrong := reports.of_machine(facts)):
        raise AnsibleFilterError(f"{name}: {wrong}")
    return facts


def cluster_problem(cluster: Any, name: str) -> str:
    """What is wrong with what the control plane ``name`` reports of its cluster (cluster_info), "" when nothing is."""
    from gpunodes.planner import reports

    wrong = "" if cluster is None else reports.of_cluster(cluster)
    return f"{name}: of its cluster, {wrong}" if wrong else ""


def kubeconfig(text: str, name: str) -> str:
    """What of the administrator's kubeconfig of the control plane ``name`` may lie on this machine, as a file."""
    import yaml

    from gpunodes.errors import GpunodesError
    from gpunodes.kubeconfig import taken

    try:
        return str(yaml.safe_dump(taken(text, name), sort_keys=False))
    except GpunodesError as error:
        raise AnsibleFilterError(str(error)) from None


def calms(_: object) -> bool:
    """Whether the callback gpunodes_printable is at work: Ansible goes on without one that it does not find."""
    from ansible import constants
    from ansible.utils.display import Display

    return getattr(Display.display, "gpunodes_calms", False) and "ansible_stats" in constants.INTERNAL_RESULT_KEYS


class FilterModule:
    """Ansible's way to find filters."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "gpunodes_calms": calms,
            "gpunodes_cluster_complaint": cluster_problem,
            "gpunodes_data": data,
            "gpunodes_health": health,
            "gpunodes_key": key_text,
            "gpunodes_kubeconfig": kubeconfig,
            "gpunodes_machine": machine,
            "gpunodes_node": match,
            "gpunodes_packages": packages,
            "gpunodes_preflight": preflight,
            "gpunodes_program": program,
            "gpunodes_registries": registries,
            "gpunodes_registry_hosts": registry_hosts,
        }
