"""What is in the way of an upgrade of Kubernetes, machine by machine and in the cluster. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.errors import WrongInput
from gpunodes.model import PreflightFinding, Role, Severity
from gpunodes.planner import gates, tables, versions
from gpunodes.planner.upgrade_model import CLUSTER, PROGRAMS, Subject, image_parts
from gpunodes.planner.versions import numbers

REACHABLE, SKEW = "reachable", "skew"
"""The checks that concern the whole cluster, also of machines that are not upgraded."""
_SHOWN = 5
_KUBEADM_CONFIG = "the ConfigMap kubeadm-config in kube-system"


def judge(target: str, subjects: Sequence[Subject], cluster: Mapping[str, Any]) -> list[PreflightFinding]:
    """All findings, those of machines in their order, then those of the cluster."""
    findings = []
    for subject in subjects:
        if subject.left:
            findings += [PreflightFinding(subject.name, SKEW, each) for each in _skew(target, subject, {})]
            continue
        if subject.facts is None or subject.own is None:
            problem = Problem(
                subject.unreachable or "it did not report its versions",
                "control planes that respond: they are upgraded first",
                "start it, or correct its address and SSH settings in the inventory",
            )
            findings.append(PreflightFinding(subject.name, REACHABLE, problem))
            continue
        for name, check in _OF_MACHINES.items():
            findings += [PreflightFinding(subject.name, name, each) for each in check(target, subject, subject.own)]
    findings += [*_unasked(target, subjects), *_rewritten(subjects), *_addons(target, subjects)]
    findings += _unread_metrics(subjects)
    known = {subject.node.get("name") for subject in subjects}
    for node in cluster["nodes"]:
        if node["name"] not in known:
            problem = Problem(
                f"the node {node['name']} ({node['version']}) is no machine of the inventory",
                "all nodes in the inventory",
                "add it, or upgrade it by hand",
            )
            findings.append(PreflightFinding(CLUSTER, "nodes", problem, Severity.WARNING))
            other = Subject(node["name"], Role.WORKER, None, None, node)
            findings += [PreflightFinding(node["name"], SKEW, each) for each in _skew(target, other, {})]
    return findings + [
        PreflightFinding(CLUSTER, name, each) for name, check in _OF_CLUSTER.items() for each in check(target, subjects)
    ]


def _member(_: str, subject: Subject, own: Mapping[str, Any]) -> Iterator[Problem]:
    if not subject.node:
        yield Problem("it is not a node of the cluster", "a node", f"run `gpunodes join {subject.name}` first")
    elif own["unpackaged"]:
        yield Problem(
            f"no package installed its {' and '.join(own['unpackaged'])}",
            "the packages of Kubernetes, in /usr/bin: gpunodes upgrades nothing else",
            "upgrade it by hand, as its installer's documentation says",
        )


def _manifests(_: str, __: Subject, own: Mapping[str, Any]) -> Iterator[Problem]:
    """Arguments of others that an upgrade takes away; what else it changes is a warning (:func:`_rewritten`)."""
    if found := _changed(own["lost"], arguments=True):
        yield Problem(
            f"the upgrade would change {_few(found)}: kubeadm's configuration has it otherwise",
            "arguments that stay",
            f"set it in {_KUBEADM_CONFIG} (extraArgs) or in gpunodes_kubeadm_patches, or correct the manifest",
        )


def _rewritten(subjects: Sequence[Subject]) -> Iterator[PreflightFinding]:
    for subject in subjects:
        own = subject.own or {}
        lost, reason = _changed(own.get("lost", ()), arguments=False), own.get("not_compared")
        if lost or reason:
            problem = Problem(
                f"the upgrade writes its manifests anew; that changes {_few(lost)}"
                if lost
                else f"what the upgrade changes in its manifests is unknown: {reason}",
                "changes that stay",
                f"add what must stay to {_KUBEADM_CONFIG} or to gpunodes_kubeadm_patches",
            )
            yield PreflightFinding(subject.name, "manifests", problem, Severity.WARNING)


def _changed(lost: Sequence[Mapping[str, str]], *, arguments: bool) -> list[str]:
    return [f"{each['component']} {each['name']}" for each in lost if each["name"].startswith("--") is arguments]


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(name[:100] for name in names[:_SHOWN]) + more


def _ready(_: str, subject: Subject, own: Mapping[str, Any]) -> Iterator[Problem]:
    """Of control planes: workers are passed over."""
    if subject.is_down and not own["unfinished"]:
        yield Problem(
            f"its node is not ready: {subject.node['reason']}",
            "a ready node: afterwards nobody could tell whether the upgrade is the cause",
            f"see `gpunodes health {subject.name}`",
        )


def _skew(target: str, subject: Subject, _: Mapping[str, Any]) -> Iterator[Problem]:
    yield from _control_plane_skew(target, subject.control_plane)
    if not subject.kubelet:
        return
    allowed = versions.kubelet_skew()
    own, wanted = numbers(subject.kubelet)[1], numbers(target)[1]
    if own > wanted:
        yield Problem(
            f"its kubelet is {subject.kubelet}",
            f"{target} or older: a kubelet is never newer than the control plane",
            "install an older kubelet, or choose a newer version",
        )
    elif wanted - own > allowed:
        yield Problem(
            f"its kubelet is {subject.kubelet}",
            f"1.{wanted - allowed} or newer: Kubernetes {versions.minor_of(target)} accepts no older kubelets",
            "upgrade it to the version of the cluster first, or remove it with `gpunodes remove`",
        )


def _control_plane_skew(target: str, present: str) -> Iterator[Problem]:
    """Of each control plane: an upgrade that was abandoned may have left some a minor behind that of the others."""
    allowed = versions.control_plane_skew()
    major, minor, *_ = numbers(target)
    if numbers(present) and numbers(present)[:2] < (major, minor - allowed):
        before = f"{major}.{minor - allowed}"
        yield Problem(
            f"its control plane is {present}",
            f"{before}: kubeadm upgrades a control plane by one minor at a time",
            f"finish the upgrade to {before} first: `gpunodes upgrade {before}`",
        )


def _cgroup(target: str, subject: Subject, _: Mapping[str, Any]) -> Iterator[Problem]:
    row = versions.minors()[versions.minor_of(target)]
    if subject.facts and subject.facts["cgroup"] == 1 and row["cgroup_v1"] == "refused":
        yield Problem(
            "it runs cgroup v1",
            f"cgroup v2: the kubelet of {versions.minor_of(target)} does not start with v1",
            "boot with systemd.unified_cgroup_hierarchy=1",
        )


def _runtime(target: str, subject: Subject, _: Mapping[str, Any]) -> Iterator[Problem]:
    packages = (subject.facts or {}).get("packages") or {}
    installed = str(packages.get("containerd.io") or packages.get("containerd") or "")
    for row in tables.read("upgrades")["runtime"]:
        least = row["containerd"]
        if (
            installed
            and numbers(target)[:2] >= numbers(row["from"])
            and numbers(_plain(installed))[:2] < numbers(least)
        ):
            yield Problem(
                f"containerd is {installed}",
                f"{least} or newer: the kubelet of {versions.minor_of(target)} needs it",
                "upgrade containerd first",
            )


def _plain(version: str) -> str:
    """A package's version without its epoch."""
    return version.rpartition(":")[2]


def _kubelet_gates(target: str, subject: Subject, own: Mapping[str, Any]) -> Iterator[Problem]:
    yield from _judged(target, subject.gates, "gpunodes_feature_gates")
    others = {name: value for name, value in own["kubelet_gates"].items() if name not in subject.gates}
    files = "of a file in the kubelet's --config-dir, or in its arguments"
    place = f"featureGates of the ConfigMap kubelet-config in kube-system, {files}"
    yield from _judged(target, others, place)


def _component_gates(target: str, _: Subject, own: Mapping[str, Any]) -> Iterator[Problem]:
    configured = (own.get("cluster") or {}).get("gates", {})
    yield from _judged(target, configured, _KUBEADM_CONFIG)
    for name, found in own["gates"].items():
        others = {gate: value for gate, value in found.items() if gate not in configured}
        for problem in _judged(target, others, f"/etc/kubernetes/manifests/{name}.yaml and perhaps {_KUBEADM_CONFIG}"):
            yield replace(problem, found=f"{PROGRAMS.get(name, name)}: {problem.found}")


def _judged(target: str, requested: Mapping[str, Any], place: str) -> Iterator[Problem]:
    """What the gates' table says of gates; their remedies name the place that sets them."""
    try:
        found = gates.check(versions.minor_of(target), requested) if requested else []
    except WrongInput as error:
        found = [error.problem]
    for problem in found:
        yield replace(problem, remedy=f"{problem.remedy}; it is set in {place}")


def _arguments(target: str, _: Subject, own: Mapping[str, Any]) -> Iterator[Problem]:
    for row in tables.read("upgrades")["removed_argument"]:
        kubelet = row["program"] == "kubelet"
        present = own["kubelet_arguments"] if kubelet else own["arguments"].get(row["program"], ())
        if row["name"] in present and numbers(target)[:2] >= numbers(row["removed_in"]) and row["by"] != "kubeadm":
            files = "/var/lib/kubelet/kubeadm-flags.env, KUBELET_EXTRA_ARGS in /etc/default/kubelet, or from its unit"
            place = files if kubelet else _KUBEADM_CONFIG
            yield Problem(
                f"the {row['program']} gets --{row['name']}, which Kubernetes {row['removed_in']} removes",
                "arguments that the new version knows: it does not start with another one",
                f"remove it from {place}",
            )


def _packages(target: str, _: Subject, own: Mapping[str, Any]) -> Iterator[Problem]:
    if own["unread"]:
        yield Problem(
            f"its package source for Kubernetes {versions.minor_of(target)} cannot be read: {own['unread']}",
            "a source that the machine reaches",
            "check gpunodes_kubernetes_packages_url, the mirror and the proxy",
        )
    elif versions.is_exact(target):
        missing = [name for name in ("kubeadm", "kubelet") if target not in own["offered"].get(name, ())]
        if missing:
            known = ", ".join(own["offered"].get(missing[0], [])[:5]) or "none"
            yield Problem(
                f"its package source has no {missing[0]} {target}; it offers {known}",
                f"{' and '.join(missing)} {target}",
                "choose another version, or add it to the mirror",
            )


def _images(target: str, _: Subject, own: Mapping[str, Any]) -> Iterator[Problem]:
    """Images that no registry has; registries that do not say so are a warning (:func:`_unasked`)."""
    fetched = own["fetched"]
    if fetched["version"] == target and fetched["missing"]:
        yield Problem(
            f"no registry has {', '.join(fetched['missing'])}",
            f"all images of Kubernetes {target}, or a containerd that has them already",
            "add them to the mirror (gpunodes_image_mirrors), or choose another version",
        )


def _unasked(target: str, subjects: Sequence[Subject]) -> Iterator[PreflightFinding]:
    for subject in subjects:
        fetched = (subject.own or {}).get("fetched") or {}
        if fetched.get("version") == target and fetched["unasked"]:
            problem = Problem(
                f"whether registries have the images of {target} is unknown: {fetched['unasked']}",
                "registries that respond: a machine fetches the images before it is drained",
                "check the network, the mirror and the proxy",
            )
            yield PreflightFinding(subject.name, "images", problem, Severity.WARNING)


def _deprecated(target: str, subjects: Sequence[Subject]) -> Iterator[Problem]:
    """What API servers were asked for; one that does not say so is a warning (:func:`_unread_metrics`)."""
    rows = {row["api"]: row["removed"] for subject in subjects for row in (subject.own or {}).get("deprecated", ())}
    for api, removed in rows.items():
        if numbers(removed) <= numbers(target)[:2]:
            yield Problem(
                f"a program uses the API {api}, which Kubernetes {removed} removes",
                "programs that use newer APIs",
                "find it by the audit log, and upgrade it; an API server forgets at its next start what was used",
            )


def _unread_metrics(subjects: Sequence[Subject]) -> Iterator[PreflightFinding]:
    for subject in subjects:
        if reason := (subject.own or {}).get("metrics_unread"):
            problem = Problem(
                f"which deprecated APIs its API server was asked for is unknown: {reason}",
                "API servers that respond: each counts what it was asked itself",
                "see `crictl ps -a` and `journalctl -u kubelet` on it",
            )
            yield PreflightFinding(subject.name, "deprecated", problem, Severity.WARNING)


def _etcd(target: str, subjects: Sequence[Subject]) -> Iterator[Problem]:
    wanted = str(versions.minors()[versions.minor_of(target)]["etcd"])
    members = [(each.name, each.own["images"]) for each in subjects if each.own]
    tags = {name: str(images["etcd"]) for name, images in members if "etcd" in images}
    for row in tables.read("upgrades")["etcd"]:
        crosses = numbers(wanted)[:2] >= numbers(row["to"])
        old = {name: tag for name, tag in tags.items() if numbers(tag) < numbers(row["least"])}
        if crosses and old and len(tags) > 1:
            [(name, tag), *_] = old.items()
            yield Problem(
                f"etcd has {len(tags)} members, and that of {name} is {tag}",
                f"{row['least']} or newer: older members are not compatible with members of {row['to']}",
                f"set etcd.local.imageTag: {row['stepping_stone']} in the ConfigMap kubeadm-config in kube-system, run "
                "`kubeadm upgrade apply` with the present version on the first control plane, `kubeadm upgrade node` "
                "on each other one, remove imageTag again, then run this command again",
            )


def _coredns(target: str, subjects: Sequence[Subject]) -> Iterator[Problem]:
    wanted = str(versions.minors()[versions.minor_of(target)]["coredns"])
    for own in _clusters(subjects):
        tag = str(own["cluster"]["coredns"]).rpartition(":")[2]
        if numbers(tag)[:2] > numbers(wanted)[:2]:
            yield Problem(
                f"CoreDNS is {tag}",
                f"{wanted} or older: kubeadm migrates its configuration only forwards",
                "choose a newer Kubernetes, or give CoreDNS back to kubeadm",
            )


def old_addons(target: str, images: Sequence[str]) -> dict[str, str]:
    """Add-ons by image that are older than any that gpunodes knows to work with ``target``, and the oldest of those."""
    rows = tables.read("upgrades")["addons"]
    least: Mapping[str, str] = next((row for row in rows if row["minor"] == versions.minor_of(target)), {})
    found = {}
    for image in images:
        name, tag = image_parts(image)
        if name in least and numbers(tag) and numbers(tag) < numbers(least[name]):
            found[image] = f"v{least[name]}"
    return found


def _addons(target: str, subjects: Sequence[Subject]) -> Iterator[PreflightFinding]:
    """Old add-ons, as warnings: no publisher says that they fail, and an upgrade replaces its own only at its end."""
    minor = versions.minor_of(target)
    for own in _clusters(subjects)[:1]:
        for image, least in old_addons(target, own["cluster"]["addons"]).items():
            tested = "" if versions.minors()[minor]["tested"] else f"; with {minor} none was run on machines"
            problem = Problem(
                f"{' is '.join(image_parts(image))}",
                f"{least} or newer: gpunodes knows no older one to work with Kubernetes {minor}{tested}",
                "run `gpunodes addon upgrade` first, which the upgrade does at its end only; what gpunodes did not "
                "install: as its publisher says",
            )
            yield PreflightFinding(CLUSTER, "add-ons", problem, Severity.WARNING)


def _clusters(subjects: Sequence[Subject]) -> list[Mapping[str, Any]]:
    return [each.own for each in subjects if each.role is Role.CONTROL_PLANE and each.own and each.own.get("cluster")]


_OF_MACHINES = {
    "cluster": _member,
    "ready": _ready,
    SKEW: _skew,
    "cgroup": _cgroup,
    "runtime": _runtime,
    "gates": _kubelet_gates,
    "component gates": _component_gates,
    "arguments": _arguments,
    "manifests": _manifests,
    "packages": _packages,
    "images": _images,
}
_OF_CLUSTER = {"deprecated": _deprecated, "etcd": _etcd, "coredns": _coredns}
