"""One run of kubeadm, with its progress in the ledger."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .. import disk, firewall, process, tree
from ..ledger import Ledger
from ..process import CommandResult, run_while_connected
from . import given
from .errors import cause_of_wait, failure

PRIVATE = "/run/gpunodes"
KUBELET_CONFIG = "/var/lib/kubelet/config.yaml"
_PAUSE_S = 5.0
_SLOW_RUNTIME = (
    r"\[ERROR (CRI|ContainerRuntimeVersion|ImagePull(?=\]: could not connect to the container runtime: ))\]"
    ".*DeadlineExceeded"
)
"""The runtime did not respond to a check in two seconds. ImagePull has other errors, of images.

Source: kubeadm 1.36 app/util/runtime, app/preflight/checks.go.
"""
_SLOW_JOB = r"\[ERROR CreateJob\]: .* did not complete in "
"""The job that tests a cluster before its upgrade took longer than a minute. Source: app/phases/upgrade/health.go."""
_JOB_ATTEMPTS = 3
_KUBELET_SYSCTLS = (
    # Settings that the kubelet and kube-proxy change (pkg/kubelet/cm, pkg/proxy: 1.36).
    "vm.overcommit_memory",
    "vm.panic_on_oom",
    "kernel.panic",
    "kernel.panic_on_oops",
    "kernel.keys.root_maxkeys",
    "kernel.keys.root_maxbytes",
    "net.ipv4.conf.all.route_localnet",
    "net.netfilter.nf_conntrack_max",
    "net.netfilter.nf_conntrack_tcp_timeout_established",
    "net.netfilter.nf_conntrack_tcp_timeout_close_wait",
)


def begin(machine_ledger: Ledger, stage: str, *, taken_over: bool = False) -> None:
    """Record in the ledger the state that kubeadm and the kubelet will change.

    ``taken_over``: others ran kubeadm here before.
    """
    for name in _KUBELET_SYSCTLS:
        value = disk.read(f"/proc/sys/{name.replace('.', '/')}")
        if value is not None:
            machine_ledger.note_sysctl(name, value.strip())
    if machine_ledger.firewall_tables is None:
        machine_ledger.firewall_tables = firewall.tables()
    if not machine_ledger.kubeadm:
        machine_ledger.given = given.files(machine_ledger, taken_over=taken_over)
    machine_ledger.kubeadm = stage
    machine_ledger.save()


def run(
    verb: str,
    documents: Sequence[Mapping[str, Any]],
    limit_s: float,
    flags: Sequence[str] = (),
    patches: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    finishes: bool = False,
) -> None:
    """Run kubeadm with a configuration file that only root can read and that is deleted afterwards.

    ``verb`` may be several words, ``init phase certs apiserver``. With ``finishes`` it is not stopped when the
    controller disconnects.
    """
    execute = process.run_to_end if finishes else run_while_connected
    tree.remove(PRIVATE)
    os.mkdir(PRIVATE, 0o700)
    path = f"{PRIVATE}/kubeadm.yaml"
    command = ["kubeadm", *verb.split(), f"--config={path}", *flags]
    began = time.time()
    try:
        # JSON is valid YAML, and Python writes it without a library.
        disk.write(path, "\n---\n".join(json.dumps(document, indent=1) for document in documents) + "\n", 0o600)
        os.mkdir(f"{PRIVATE}/patches", 0o700)
        for name, patch in (patches or {}).items():
            disk.write(f"{PRIVATE}/patches/{name}.json", json.dumps(patch), 0o600)
        deadline = time.monotonic() + limit_s
        result = execute(command, limit_s, without_proxies())
        attempts = 1
        while time.monotonic() < deadline and (
            _only(_SLOW_RUNTIME, result) or (_only(_SLOW_JOB, result) and attempts < _JOB_ATTEMPTS)
        ):
            time.sleep(_PAUSE_S)
            result = execute(command, deadline - time.monotonic(), without_proxies())
            attempts += 1
    finally:
        tree.remove(PRIVATE)
    if not result.ok:
        raise failure(verb, result, cause_of_wait(began))


def without_proxies() -> dict[str, str]:
    """Overrides that empty the proxy variables of this process, which a machine's /etc/environment may set.

    kubeadm copies those that are not empty into the static pods of the control plane and into kube-proxy, where they
    would stay: a list of exceptions that lacks an address of the cluster then breaks it, and no setting changes it.
    kubeadm itself needs no proxy: the runtime pulls images, and the version is given.
    Source: kubeadm 1.36 app/util/env.go, GetProxyEnvVars.
    """
    return {name: "" for name in os.environ if name.lower().endswith("_proxy")}


def end(machine_ledger: Ledger, stage: str) -> None:
    """Make the kubelet's configuration readable by root only, and record the finished stage in the ledger.

    kubeadm 1.36 makes the file readable by everyone (CIS benchmark 1.10, 4.1.9).
    """
    os.chmod(KUBELET_CONFIG, 0o600)
    machine_ledger.kubeadm = stage
    machine_ledger.save()


def _only(pattern: str, result: CommandResult) -> bool:
    """Whether all errors of kubeadm's checks are this one: it has changed nothing then."""
    errors = re.findall(r"\[ERROR [^]]+\]: .*", result.text)
    return bool(errors) and all(re.match(pattern, error) for error in errors)
