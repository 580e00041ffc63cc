"""Filters of the roles. They run on the controller, with the installed package or from a checkout."""

from __future__ import annotations

import base64
import dataclasses
import functools
import io
import json
import os
import stat
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import gpunodes.planner.preflight as _  # noqa: F401 - checks whether the package is installed
except ModuleNotFoundError:
    # From a checkout, or from the built collection, which brings the parts of the package that this file imports.
    _HERE = Path(__file__).resolve()
    sys.path[:0] = [str(_HERE.parents[3]), str(_HERE.parents[1] / "plugin_utils")]

from ansible.errors import AnsibleFilterError

_ARCHIVED = ("index.json", "manifest.json")
"""The files of an archive that name its image, for containerd and for Docker."""


def preflight(
    facts: Mapping[str, Mapping[str, Any]],
    roles: Mapping[str, str],
    cluster: Mapping[str, Any] | None,
    kubernetes: str,
    settings: Mapping[str, Mapping[str, Any]],
    addresses: Mapping[str, str],
    *,
    joins: bool,
    prepares: bool = False,
    control_planes: Mapping[str, Any] | None = None,
    storage: Sequence[str] = (),
) -> list[str]:
    """All errors of all machines, one line each.

    By machine: ``settings`` that are checked, and ``addresses`` of the inventory, of those that join later, too.
    ``joins``, ``prepares``: see candidates.py; ``control_planes``: control_planes.py; ``storage``: who serves shares.
    """
    from gpunodes.errors import WrongInput
    from gpunodes.model import Role, Severity
    from gpunodes.planner.candidates import MachineFacts, requirements_of
    from gpunodes.planner.control_planes import given
    from gpunodes.planner.endpoint import settings_of as endpoint_settings
    from gpunodes.planner.gpu import requested_of
    from gpunodes.planner.networks import settings_of
    from gpunodes.planner.node_address import SETTING
    from gpunodes.planner.preflight import judge

    try:
        candidates = [
            MachineFacts(
                name=name,
                role=Role(roles[name]),
                facts=found,
                requested=requested_of(settings[name], ""),
                address=addresses[name],
                node_address=str(settings[name][SETTING]),
                network=settings_of(settings[name], storage=name in storage),
                endpoint=endpoint_settings(settings[name]),
                containerd=str(settings[name].get("gpunodes_containerd_version", "")),
            )
            for name, found in facts.items()
        ]
    except WrongInput as error:
        raise AnsibleFilterError(str(error)) from error
    elects = (cluster or {}).get("leader_election", True)
    controls = given(**control_planes, leader_election=elects) if control_planes else None
    requirements = requirements_of(
        cluster, kubernetes, joins=joins, prepares=prepares, control_planes=controls, listed=addresses
    )
    return [str(finding) for finding in judge(candidates, requirements) if finding.severity is Severity.ERROR]


def membership(facts: Mapping[str, Any], machine: str) -> str:
    """Why a machine cannot be prepared for a later join, "" if it can: it is a node already."""
    from gpunodes.planner.membership import membership as found

    return str(found(machine, facts) or "")


def desired(facts: Mapping[str, Any], machine: str, **given: Any) -> dict[str, Any]:
    """The desired state of a machine (planner/desired.py) as plain data; fails with all conflicts at once.

    Its strings are no templates: they come from JSON, and ``given`` is rendered before it arrives here.
    """
    from gpunodes.errors import WrongInput
    from gpunodes.planner.desired import Desired, Given
    from gpunodes.planner.desired import desired as compute

    try:
        programs = {"api_check": program("api_check"), "mig_program": program("mig")}
        found = compute(Given(machine, facts, **{**programs, **given}))
    except WrongInput as error:
        raise AnsibleFilterError(str(error)) from error
    if not isinstance(found, Desired):
        raise AnsibleFilterError("\n".join(f"{machine}: {conflict}" for conflict in found))
    document: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(found)))
    return document


def registry_distrust(address: str) -> dict[str, Any]:
    """The desired state for the module host without the CA of the registry at an address; {} for none."""
    from gpunodes.planner.registry import distrust

    return dataclasses.asdict(distrust(address)) if address else {}


def upgrade_images(version: str, control_plane: bool) -> list[str]:
    """The images of a Kubernetes version that a machine fetches before it is drained; a minor's have ``{version}``."""
    from gpunodes.planner.upgrade import images

    return images(version, control_plane)


def match(
    nodes: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
    name: str,
    machines: Mapping[str, str],
    cluster: Sequence[str],
    *,
    joins: bool = False,
) -> dict[str, Any]:
    """The node of the machine ``name``: ``node`` ({} for none), ``by`` (the criterion), and ``problem`` if ambiguous.

    ``facts`` are a result of host_facts, empty if the machine does not respond; ``machines`` are the inventory's
    addresses by name; ``cluster`` are the control planes' names, under whose key identities are stored; ``joins``: the
    machine will join.
    """
    from gpunodes import clusters
    from gpunodes.ansible.module_utils.problem import Problem
    from gpunodes.engine import identities
    from gpunodes.identity.matcher import Matcher
    from gpunodes.identity.model import described, reported

    key = clusters.key([machines.get(each) or each for each in cluster])
    known = identities.recall_all(key, {machine: address or machine for machine, address in machines.items()})
    if facts:
        known[name] = reported(name, machines[name] or name, facts)
    matcher = Matcher([described(node) for node in nodes], known.values())
    found = matcher.joining(known[name]) if joins else matcher.match(known[name])
    node_name = found.node.name if found.node else ""
    return {
        "node": next((dict(node) for node in nodes if node_name and node["name"] == node_name), {}),
        "by": found.by,
        "problem": str(Problem(found.contradiction, *_ONE_NODE)) if found.contradiction else "",
    }


_ONE_NODE = (
    "exactly one node that matches this machine",
    "compare `kubectl get nodes -o wide` with the inventory, and delete nodes whose machines no longer exist",
)


def program(name: str) -> str:
    """The source of a program that is installed on a machine; it is one of the module_utils."""
    return (Path(__file__).parents[1] / "module_utils" / f"{name}.py").read_text(encoding="utf-8")


def key_text(key: str) -> str:
    """A package source's key: an address or armoured text is returned unchanged, a file on the controller is read."""
    if not key or "://" in key or key.lstrip().startswith("-----BEGIN"):
        return key
    try:
        return Path(key).expanduser().read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise AnsibleFilterError(f"the key file {key} cannot be read: {error}") from error


def os_request(facts: Mapping[str, Any], pending: Any, name: str, *, security: bool) -> dict[str, Any]:
    """What is requested of an upgrade of the operating system of a machine, for the module os_upgrade.

    ``facts`` are its facts, ``pending`` what it reports that would be upgraded (a result of os_pending).
    """
    from gpunodes.planner import kernels, reports

    if problem := reports.pending_problem(pending):
        raise AnsibleFilterError(f"{name}: of its pending upgrades, {problem}")
    return {
        "security": security,
        "keep": kernels.kept_packages(),
        "refused": kernels.refused(facts, pending["kernels"]),
        "driver": kernels.has_built_driver(facts),
    }


def runtime_wanted(state: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a desired state (``desired``) that an upgrade of the container runtime replaces, by role."""
    from gpunodes.planner.runtime_versions import ROLES

    wanted = {**state["wanted"], **state["gpu"]["wanted"]}
    # On a node Docker for people has members of its group only.
    return {role: wanted[role] for role in ROLES if role in wanted and wanted[role]["packages"]}


def registries(mirrors: Mapping[str, str], image: str) -> list[dict[str, str]]:
    """Sources that host_facts checks: the registries of the cluster's images."""
    hosts = dict.fromkeys(["registry.k8s.io", "ghcr.io", image.split("/", maxsplit=1)[0]])
    return [
        {
            "name": f"images of {registry}",
            "url": mirrors.get(registry, f"https://{registry}").rstrip("/") + "/v2/",
            "kind": "registry",
        }
        for registry in hosts
    ]


def proxies(settings: Mapping[str, Any], machines: Sequence[str] = (), addresses: Sequence[str] = ()) -> dict[str, Any]:
    """The HTTP proxies of a machine by its settings, without their credentials; {} for none.

    ``machines`` and ``addresses`` are those of the whole inventory.
    """
    from gpunodes.errors import WrongInput
    from gpunodes.planner.proxies import proxies as compute

    try:
        found = compute(settings, [*machines, *addresses])
    except WrongInput as error:
        raise AnsibleFilterError(str(error)) from error
    return {} if found is None else {**dataclasses.asdict(found), "no_proxy": list(found.no_proxy)}


def proxy_credentials(settings: Mapping[str, Any]) -> dict[str, str]:
    """The credentials of these proxies: USER:PASSWORD by ``http`` and ``https``."""
    from gpunodes.planner.proxies import credentials

    return credentials(settings)


def health(
    facts: Mapping[str, Any],
    name: str,
    xids: Mapping[Any, str] | None = None,
    sxids: Mapping[Any, str] | None = None,
) -> dict[str, Any]:
    """The verdict on a machine from the result of gpu_probe; ``text`` summarises it in one line."""
    from gpunodes.errors import GpunodesError
    from gpunodes.health import judge, shape, site

    try:
        rules = site.rules(xids or {}, sxids or {})
    except GpunodesError as error:
        raise AnsibleFilterError(str(error)) from error
    violation = shape.violation(facts)
    verdict = judge.unreachable(name, "probe_failed", violation) if violation else judge.judge_facts(name, facts, rules)
    # Through JSON, so that templates get strings instead of enums.
    document: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(verdict)))
    action = "" if verdict.action == "none" else f", {verdict.action}"
    why = "".join(f"; {finding.gpu + ': ' if finding.gpu else ''}{finding.message}" for finding in verdict.findings)
    return {**document, "text": f"{name}: {verdict.state}{action}{why}"}


@functools.lru_cache(maxsize=2)  # many variables of one task read the document, which is long for a large cluster
def data(text: str | None) -> Any:
    """Unseal a document that the command line passed to the play (engine/runner.py); None stays None."""
    return None if text is None else json.loads(base64.b64decode(text))


def machine(facts: Any, name: str) -> Any:
    """A machine's facts (a result of host_facts), checked for their form; {} for a machine that does not respond."""
    from gpunodes.planner import reports

    if facts and (problem := reports.machine_problem(facts)):
        raise AnsibleFilterError(f"{name}: {problem}")
    return facts


def cluster_problem(cluster: Any, name: str) -> str:
    """What is wrong with the cluster facts that the control plane ``name`` reports (cluster_info), "" if nothing is."""
    from gpunodes.planner import reports

    problem = "" if cluster is None else reports.cluster_problem(cluster)
    return f"{name}: of its cluster, {problem}" if problem else ""


def kubeconfig(text: str, name: str) -> str:
    """The parts of the administrator's kubeconfig of control plane ``name`` that may be stored on the controller."""
    import yaml

    from gpunodes.errors import GpunodesError
    from gpunodes.kubeconfig import from_control_plane

    try:
        return str(yaml.safe_dump(from_control_plane(text, name), sort_keys=False))
    except GpunodesError as error:
        raise AnsibleFilterError(str(error)) from None


def exposed(path: str) -> str:
    """Why a secret must not be written to a file of the controller, "" if it may.

    Ansible replaces a file with its owner: to another user it would give the secret. In a sticky folder (/tmp) nobody
    else can replace a file that is this user's.
    """
    target = Path(path).expanduser()
    try:
        folder, found = target.parent.stat(), target.lstat()
    except FileNotFoundError:
        return ""
    if folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
        return f"everyone may replace {target}; wanted: a folder of yours; correct gpunodes_kubeconfig_path"
    if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
        return f"{target} is not a file of this user; wanted: one, or nothing; move it away, or choose another path"
    return ""


def sanitizes_output(_: object) -> bool:
    """Whether the callback gpunodes.bootstrap.printable is active: Ansible does not fail if it finds no callback."""
    from ansible import constants
    from ansible.utils.display import Display

    is_wrapped = getattr(Display.display, "gpunodes_sanitizes", False)
    return is_wrapped and "ansible_stats" in constants.INTERNAL_RESULT_KEYS


def image_archive(path: str) -> dict[str, str]:
    """The ``name`` of the image in an archive of ``make image``, and the digests of its manifest and ``config``."""
    try:
        with tarfile.open(Path(path).expanduser()) as archive:
            index, [document] = (json.load(archive.extractfile(name) or io.BytesIO()) for name in _ARCHIVED)
        [entry] = index["manifests"]
        return {
            "name": str(entry["annotations"]["io.containerd.image.name"]),
            "digest": str(entry["digest"]),
            "config": f"sha256:{document['Config'].rpartition('/')[2]}",
        }
    except (OSError, tarfile.TarError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise AnsibleFilterError(
            f"{path} has no image ({error}); wanted: an archive that `make image` built; build it again"
        ) from error


def addon(
    name: str, images: Mapping[str, Any], settings: Mapping[str, Any], addresses: Sequence[str] = ()
) -> dict[str, Any]:
    """A row of the table of add-ons, and the problem with its settings; empty without a name."""
    from gpunodes.errors import WrongInput
    from gpunodes.planner import addons

    if not name:
        own = {"version": "", "uses": [], "network": False, "problem": ""}
        return {**own, **{key: {} for key in ("images", "settings", "proof", "argument")}}
    try:
        found = addons.chosen(name)
        replaced = addons.images_of(found, images)
    except WrongInput as error:
        raise AnsibleFilterError(str(error)) from error
    problem = str(addons.refusal(found, settings, addresses) or "")
    return {
        "version": found.version,
        "images": replaced,
        "settings": {} if problem else addons.values_of(found, settings),
        "proof": dict(found.proof),
        "uses": list(found.uses),
        "argument": dict(found.argument),
        "network": found.network,
        "problem": problem,
    }


class FilterModule:
    """The filters, as Ansible looks them up."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "addon": addon,
            "cluster_problem": cluster_problem,
            "data": data,
            "desired": desired,
            "exposed": exposed,
            "health": health,
            "key": key_text,
            "image_archive": image_archive,
            "kubeconfig": kubeconfig,
            "machine": machine,
            "membership": membership,
            "node": match,
            "os_request": os_request,
            "preflight": preflight,
            "program": program,
            "proxies": proxies,
            "proxy_credentials": proxy_credentials,
            "registries": registries,
            "registry_distrust": registry_distrust,
            "runtime_wanted": runtime_wanted,
            "sanitizes_output": sanitizes_output,
            "upgrade_images": upgrade_images,
        }
