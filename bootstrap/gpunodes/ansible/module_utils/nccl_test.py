"""Tests NCCL between nodes: ``all_reduce_perf`` of nccl-tests over all GPUs, in one pod a node.

The image needs what images for the MPI Operator have: Open MPI, an SSH server and client, nccl-tests built with MPI.
Source: github.com/kubeflow/mpi-operator, build/base, and pkg/controller (how keys and servers are mounted).
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import os
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from . import burn_in_results, burn_in_taint, devices, kube_api
from .cluster.nodes import pod_problem
from .kube_api import ApiError, Client
from .problem import MachineProblem
from .process import is_disconnected, must

_PODS = f"{kube_api.SYSTEM}/pods"
_POLL_S = 2.0
_PORT = 2222
_KEY = "/root/.ssh/id_ed25519"
_SSH_CONFIG = f"""\
Host *
  Port {_PORT}
  IdentityFile {_KEY}
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
# The values that vary are arguments of the script, never part of it. The server gives its sessions the image's paths,
# which mpirun's programs need.
_SERVER = (
    "mkdir -p /run/sshd && exec /usr/sbin/sshd -De -h " + _KEY + f" -p {_PORT} -o StrictModes=no -o UsePAM=no"
    " -o PermitRootLogin=prohibit-password -o PasswordAuthentication=no"
    ' -o "SetEnv=PATH=$PATH LD_LIBRARY_PATH=$LD_LIBRARY_PATH"'
)
_LAUNCHER = (
    "program=$(command -v all_reduce_perf_mpi || command -v all_reduce_perf"
    " || ls /opt/nccl-tests/build/all_reduce_perf /opt/nccl_tests/build/all_reduce_perf 2>/dev/null | head -n 1);"
    ' test -n "$program" || { echo "the image has no all_reduce_perf" >&2; exit 127; };'
    ' exec mpirun --allow-run-as-root -np "$1" --host "$2" --bind-to none -x PATH -x LD_LIBRARY_PATH'
    ' "$program" -b 1G -e 4G -f 2 -g 1'
)


def measure(
    nodes: Mapping[str, int], image: str, resources: Mapping[str, str], minimum_gbs: float, limit_s: float
) -> dict[str, Any]:
    """Measure all_reduce between nodes (name: number of GPUs).

    Returns the bandwidth in GB/s, and as sentences a summary, what failed, and why it was skipped. Pods and key are
    deleted in any case. Raises MachineProblem if the test could not run to its end.
    """
    client = kube_api.admin()
    if why := _impossible(client, nodes):
        return {"gbs": 0.0, "summary": "", "failed": "", "skipped": why}
    run = f"gpunodes-nccl-{secrets.token_hex(4)}"
    deadline = time.monotonic() + limit_s
    try:
        names = [f"{run}-{position}" for position in range(len(nodes))]
        for name, (node, gpus) in zip(names, nodes.items()):
            client.call(
                "POST", _PODS, _pod(name, run, node, image, [_SERVER], limit_s, {devices.GPU: str(gpus), **resources})
            )
        # Deleted with its first pod, also if this program is killed.
        owner = client.get(f"{_PODS}/{names[0]}")["metadata"]
        client.call("POST", f"{kube_api.SYSTEM}/secrets", _secret(run, owner))
        addresses = _wait_ready(client, names, deadline)
        hosts = ",".join(f"{address}:{gpus}" for address, gpus in zip(addresses, nodes.values()))
        arguments = [_LAUNCHER, "mpirun", str(sum(nodes.values())), hosts]
        first = next(iter(nodes))
        client.call("POST", _PODS, _pod(f"{run}-launcher", run, first, image, arguments, limit_s, {}))
        text = _wait_end(client, f"{run}-launcher", deadline)
    finally:
        _clean(client, run)
    return judge(text, list(nodes), minimum_gbs)


def judge(text: str, nodes: Sequence[str], minimum_gbs: float) -> dict[str, Any]:
    """The result from the output of ``all_reduce_perf``; a minimum of 0 only reports."""
    found = burn_in_results.bandwidth(text)
    where = ", ".join(nodes)
    if found is None:
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        raise MachineProblem(
            f"all_reduce_perf between {where} gave no result: {''.join(lines[-1:])[:300] or 'it printed nothing'}",
            "its bus bandwidth",
            "see the requirements of gpunodes_burn_in_nccl_image; the taints stay until a burn-in passes",
        )
    summary = f"NCCL all_reduce between {len(nodes)} nodes: {found.gbs:g} GB/s bus bandwidth"
    failed = ""
    if found.wrong:
        failed = f"NCCL all_reduce between {where}: {found.wrong} wrong values"
    elif found.gbs < minimum_gbs:
        failed = (
            f"NCCL all_reduce between {where}: {found.gbs:g} GB/s bus bandwidth; wanted: at least {minimum_gbs:g} GB/s"
            " (gpunodes_burn_in_nccl_bandwidth); which node or link is slow is unknown: test them in pairs"
        )
    return {"gbs": found.gbs, "summary": summary, "failed": failed, "skipped": ""}


def _impossible(client: Client, nodes: Mapping[str, int]) -> str:
    """Why these nodes cannot be tested together, "" if they can."""
    for name, gpus in nodes.items():
        node = client.get(f"/api/v1/nodes/{name}")
        offered = devices.counts(node["status"].get("allocatable", {}))
        if offered != {devices.GPU: gpus}:
            shown = ", ".join(f"{each}: {count}" for each, count in offered.items()) or "no GPU"
            return f"NCCL was not tested: {name} offers {shown} instead of {gpus} whole GPUs"
    return ""


def _wait_ready(client: Client, names: Sequence[str], deadline: float) -> list[str]:
    """The addresses of the pods when all are ready; raises MachineProblem after the deadline."""
    while True:
        pods = [client.get(f"{_PODS}/{name}") for name in names]
        waiting = [pod for pod in pods if not _is_ready(pod)]
        if not waiting:
            return [_address(pod) for pod in pods]
        ended = [pod for pod in waiting if pod["status"].get("phase") in {"Succeeded", "Failed"}]
        if ended or time.monotonic() > deadline or is_disconnected():
            pod = (ended or waiting)[0]
            why = pod_problem(pod) or f"it is {pod['status'].get('phase', 'unknown')}"
            raise MachineProblem(
                f"a pod with all GPUs does not start on {pod['spec'].get('nodeName', 'its node')}: {why}",
                "a pod with an SSH server on each node",
                "see gpunodes_burn_in_nccl_image and gpunodes_burn_in_nccl_resources",
            )
        time.sleep(_POLL_S)


def _address(pod: Mapping[str, Any]) -> str:
    """The pod's address, which its node reports, and which becomes an argument of mpirun."""
    try:
        return str(ipaddress.IPv4Address(str(pod["status"].get("podIP"))))
    except ValueError:
        raise MachineProblem(
            f"the pod {pod['metadata']['name']} reports no IPv4 address",
            "pods with IPv4 addresses, which mpirun needs",
            "leave gpunodes_burn_in_nccl_image empty in this cluster",
        ) from None


def _is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _wait_end(client: Client, name: str, deadline: float) -> str:
    """The output of a pod at its end."""
    while True:
        pod = client.get(f"{_PODS}/{name}")
        if pod["status"].get("phase") in {"Succeeded", "Failed"}:
            return str(client.get(f"{_PODS}/{name}/log", tailLines="200").get("message", ""))
        if time.monotonic() > deadline or is_disconnected():
            raise MachineProblem(
                f"all_reduce_perf did not end in time; {pod_problem(pod) or 'it still runs'}",
                "a test that ends",
                "NCCL may not reach the other nodes: see the network of their pods, and run the command again",
            )
        time.sleep(_POLL_S)


def _clean(client: Client, run: str) -> None:
    with contextlib.suppress(ApiError):
        for pod in client.get(_PODS, labelSelector=f"{burn_in_taint.LABEL}={run}")["items"]:
            with contextlib.suppress(ApiError):
                client.delete(f"{_PODS}/{pod['metadata']['name']}")
    with contextlib.suppress(ApiError):
        client.delete(f"{kube_api.SYSTEM}/secrets/{run}")


def _secret(run: str, owner: Mapping[str, Any]) -> dict[str, Any]:
    """A new SSH key for the pods of one run."""
    with tempfile.TemporaryDirectory(dir="/run") as folder:
        path = os.path.join(folder, "key")
        must(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", path])
        with open(path, encoding="ascii") as private, open(f"{path}.pub", encoding="ascii") as public:
            files = {"key": private.read(), "public": public.read(), "config": _SSH_CONFIG}
    reference = {"apiVersion": "v1", "kind": "Pod", "name": owner["name"], "uid": owner["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": run, "labels": {burn_in_taint.LABEL: run}, "ownerReferences": [reference]},
        "data": {name: base64.b64encode(text.encode()).decode() for name, text in files.items()},
    }


def _pod(
    name: str, run: str, node: str, image: str, script: Sequence[str], limit_s: float, resources: Mapping[str, str]
) -> dict[str, Any]:
    """A pod on a node, which tolerates its taints; with resources it runs the SSH server, and is ready when that is."""
    files = [("key", "id_ed25519"), ("public", "authorized_keys"), ("config", "config")]
    items = [{"key": key, "path": path} for key, path in files]
    container: dict[str, Any] = {
        "name": "nccl",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/sh", "-c", *script],
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "volumeMounts": [{"name": "ssh", "mountPath": "/root/.ssh"}, {"name": "memory", "mountPath": "/dev/shm"}],  # noqa: S108 - the shared memory of the container
    }
    if resources:
        container["resources"] = {"limits": dict(resources)}
        container["readinessProbe"] = {"tcpSocket": {"port": _PORT}, "periodSeconds": 2}
    this_node = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {burn_in_taint.LABEL: run, "app.kubernetes.io/managed-by": "gpunodes"},
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": int(limit_s) + 60,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            "affinity": {
                "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [this_node]}}
            },
            "containers": [container],
            "volumes": [
                {"name": "ssh", "secret": {"secretName": run, "defaultMode": 0o600, "items": items}},
                # NCCL exchanges data of one node through shared memory; the default has 64 MiB.
                {"name": "memory", "emptyDir": {"medium": "Memory"}},
            ],
        },
    }
