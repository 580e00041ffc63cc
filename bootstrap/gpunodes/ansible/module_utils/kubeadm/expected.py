"""The manifests that kubeadm would write now, and YAML as plain data; nothing on the machine is changed.

kubeadm writes them into a folder of its own with a dry run of its phases (kubeadm 1.34 to 1.37, app/cmd/init.go). The
machines' Python has no YAML parser: kubectl converts, without a cluster.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from typing import Any

from .. import disk, tree
from ..containers import runtime_socket
from ..problem import MachineProblem
from ..process import CommandResult, last_line, run
from . import command, drift

FOLDER = "/run"
_LIMIT_S = 60
_API_VERSION = "kubeadm.k8s.io/v1beta4"
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9./:_@-]{0,299}")
_TAGGED = re.compile(r"(.+)/etcd:([A-Za-z0-9_.-]+)")


class Workshop:
    """A folder for one comparison, removed afterwards: it does not disturb other runs of kubeadm on this machine."""

    def __init__(self) -> None:
        self._folder = ""

    def __enter__(self) -> Workshop:
        self._folder = tempfile.mkdtemp(prefix="gpunodes-expected-", dir=FOLDER)
        return self

    def __exit__(self, *_: object) -> None:
        tree.remove(self._folder)

    def data(self, text: str, what: str) -> dict[str, Any]:
        """A YAML document; raises MachineProblem for one that kubectl cannot read, ``what`` names it."""
        path = f"{self._folder}/document.yaml"
        disk.write(path, text, 0o600)
        flags = ["--local", "--kubeconfig=/dev/null", "--type=merge", "--patch={}", "--output=json"]
        done = run(["kubectl", "patch", *flags, f"--filename={path}"], _LIMIT_S)
        try:
            found = json.loads(done.out) if done.ok else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise MachineProblem(
                f"{what} cannot be read: {_reason(done)}", "one document of YAML", "correct it, or restore a backup"
            )
        return found

    def manifests(
        self,
        configuration: Mapping[str, Any],
        place: Mapping[str, str],
        patches: Mapping[str, Mapping[str, Any]],
        timeouts: Mapping[str, Any],
        pods: Mapping[str, Any],
    ) -> dict[str, str]:
        """The manifests of a ClusterConfiguration by component, each with the image with which its pod runs.

        ``place`` are ``name`` and ``address`` of this machine in the cluster; kubeadm gives each static pod the time of
        ``timeouts`` to start. Raises MachineProblem for settings that kubeadm refuses.
        """
        out, folder = f"{self._folder}/out", f"{self._folder}/patches"
        for each in (out, folder):
            tree.remove(each)
            os.mkdir(each, 0o700)
        for name, patch in patches.items():
            disk.write(f"{folder}/{name}.json", json.dumps(patch), 0o600)
        path = f"{self._folder}/kubeadm.yaml"
        documents = [{**init_document(place, folder), "timeouts": timeouts}, _with_images(configuration, pods)]
        disk.write(path, "\n---\n".join(json.dumps(each) for each in documents) + "\n", 0o600)
        environment = {**command.without_proxies(), "KUBEADM_INIT_DRYRUN_DIR": out}
        for phase in ("control-plane all", "etcd local"):
            argv = ["kubeadm", "init", "phase", *phase.split(), f"--config={path}", "--dry-run"]
            done = run(argv, _LIMIT_S, environment=environment)
            if not done.ok:
                raise MachineProblem(
                    f"kubeadm refuses the settings of the control plane: {_reason(done)}",
                    "settings that kubeadm accepts",
                    "correct gpunodes_component_arguments or gpunodes_kubeadm_patches",
                    output=done.text,
                )
        found = {component: disk.read(f"{out}/{component}.yaml") for component in drift.SECTIONS}
        for component, text in found.items():
            if text is None:
                raise MachineProblem(
                    f"kubeadm wrote no manifest of {component}", "one of each static pod", "report this"
                )
        return {component: text for component, text in found.items() if text is not None}


def init_document(place: Mapping[str, str], patches: str) -> dict[str, Any]:
    """The InitConfiguration that belongs to this machine."""
    return {
        "apiVersion": _API_VERSION,
        "kind": "InitConfiguration",
        "localAPIEndpoint": {"advertiseAddress": place["address"]},
        "nodeRegistration": {"name": place["name"], "criSocket": runtime_socket()},
        "patches": {"directory": patches},
    }


def check_version(configuration: Mapping[str, Any]) -> None:
    """Raise MachineProblem unless the ClusterConfiguration has the format of supported versions of kubeadm."""
    if configuration.get("apiVersion") != _API_VERSION or configuration.get("kind") != "ClusterConfiguration":
        raise MachineProblem(
            "the ConfigMap kubeadm-config has another format than that of kubeadm 1.31 and newer",
            f"a ClusterConfiguration of {_API_VERSION}",
            "upload it again: `kubeadm config migrate`, then `kubeadm init phase upload-config kubeadm --config FILE`",
        )


def with_image(text: str, component: str, made: Any, running: Any) -> str:
    """The manifest with the image that runs: versions are the business of upgrades.

    ``made`` is the manifest ``text`` as data. Raises MachineProblem if the image cannot be kept.
    """
    wanted, present = drift.image(made, component), drift.image(running, component)
    if wanted == present:
        return text
    line = f" image: {wanted}\n"
    if not _IMAGE.fullmatch(present) or text.count(line) != 1:
        raise MachineProblem(
            f"the image of {component} is {present[:100]!r}, which cannot be kept",
            f"an image as kubeadm writes it: {wanted}",
            f"correct the manifest of {component}",
        )
    return text.replace(line, f" image: {present}\n")


def _with_images(configuration: Mapping[str, Any], pods: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the version and the image of etcd that run, so that kubeadm writes their arguments."""
    made: dict[str, Any] = json.loads(json.dumps(configuration))
    version = re.search(r":(v\d+\.\d+\.\d+)$", drift.image(pods.get(drift.API_SERVER), drift.API_SERVER))
    if version:
        made["kubernetesVersion"] = version.group(1)
    etcd = _TAGGED.fullmatch(drift.image(pods.get(drift.ETCD), drift.ETCD))
    if etcd:
        made["etcd"]["local"] |= {"imageRepository": etcd.group(1), "imageTag": etcd.group(2)}
    return made


def _reason(done: CommandResult) -> str:
    """What a program says is wrong: kubeadm's last lines are often hints."""
    lines = [line.strip() for line in done.err.splitlines() if line.strip()]
    found = next((line for line in lines if line.lower().startswith(("error:", "error "))), "")
    return (found or last_line(done.err) or last_line(done.out) or "no output")[:300]
