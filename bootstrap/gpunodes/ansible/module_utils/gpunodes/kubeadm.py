"""kubeadm init, join and reset; each can be interrupted at any point and run again."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import secrets
import shutil
import string
import time
from collections.abc import Mapping, Sequence
from typing import Any

from . import disk, facts, firewall, kube_api, kubeconfig, ledger, tree
from .host import services
from .kube_api import ApiError, Client
from .problem import MachineProblem
from .process import CommandResult, run, run_while_connected

SOCKET = "unix:///run/containerd/containerd.sock"
_DOCKER_SOCKET = "/run/cri-dockerd.sock"
PRIVATE = "/run/gpunodes"
_ETCD = "/var/lib/etcd/member"
_MANIFEST = "/etc/kubernetes/manifests/kube-apiserver.yaml"
_KUBELET_CONFIG = "/var/lib/kubelet/config.yaml"
RANDOM_KEY = "{random key}"
_INIT_DESCRIPTION = "kubeadm init"
"""Description of the bootstrap token for kubeadm init."""
_POLL_S = 1.0
_RUNTIME_PAUSE_S = 5.0
_BOOT_S = 300
"""Seconds that a control plane may take to respond after its machine has booted."""
_SYSTEM = "/api/v1/namespaces/kube-system"
_APPS = "/apis/apps/v1/namespaces/kube-system"
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


# init


def init(
    documents: Sequence[Mapping[str, Any]],
    patches: Mapping[str, Mapping[str, Any]],
    files: Mapping[str, Mapping[str, Any]],
    limit_s: float,
    check: bool,
) -> list[str]:
    """Make this machine a control plane, unless it is one already; returns the actions.

    ``files`` are JSON files to which the documents refer, by path; readable by root only, and written when the control
    plane is created. ``RANDOM_KEY`` in them is replaced by a key that is generated here and never leaves the machine.

    A cluster that was usable at any time is never touched: if its API does not respond, this waits, then reports it. An
    init that gpunodes started and that did not finish is reset and started again.
    """
    machine_ledger = ledger.load()
    actions: list[str] = []
    if any(map(os.path.exists, (_MANIFEST, kubeconfig.ADMIN, _ETCD))):
        if _control_plane_works(machine_ledger, limit_s):
            if machine_ledger.kubeadm != "init started":
                return []
            if not check:
                _end_init(machine_ledger)
            return ["finish an interrupted kubeadm init"]
        actions.append("reset an interrupted kubeadm init")
    elif os.path.exists(kubeconfig.KUBELET):
        raise MachineProblem(
            "this machine is a worker of a cluster",
            "a machine outside any cluster",
            "run gpunodes reset on it",
        )
    actions.append("kubeadm init")
    if check:
        return actions
    _begin(machine_ledger, "init started")
    if len(actions) > 1 or _leftovers():
        reset()
    for path, content in files.items():
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        disk.write(path, json.dumps(content, indent=1).replace(RANDOM_KEY, _random_key()) + "\n", 0o600)
    complete = [_complete(document, new_token()) for document in documents]
    _kubeadm("init", complete, limit_s, ("--skip-token-print",), patches)
    _end_init(machine_ledger)
    return actions


def _end_init(machine_ledger: ledger.Ledger) -> None:
    """Finish after kubeadm succeeded. If this is interrupted, the next run does it."""
    client = kube_api.admin()
    # kubeadm needs a token to set up bootstrapping; joins create their own.
    for token in client.get(f"{_SYSTEM}/secrets", fieldSelector="type=bootstrap.kubernetes.io/token")["items"]:
        if (token.get("data") or {}).get("description") == base64.b64encode(_INIT_DESCRIPTION.encode()).decode():
            client.delete(f"{_SYSTEM}/secrets/{token['metadata']['name']}")
    _end(machine_ledger, "init done")


def _control_plane_works(machine_ledger: ledger.Ledger, limit_s: float) -> bool:
    """Whether the control plane on this machine works; False if it never worked and may be reset.

    Raises MachineProblem if it may have worked at any time, or if gpunodes did not start its init.
    """
    unfinished = machine_ledger.kubeadm == "init started"
    client = kube_api.admin(patience_s=0) if kubeconfig.load(kubeconfig.ADMIN) else None
    complete = client is not None and os.path.exists(_MANIFEST)
    # The control plane may be starting, because the machine booted a moment ago.
    if complete and client and _responds(client, min(limit_s, _BOOT_S if not unfinished or _finalised() else 60)):
        # With the default patience, so that a brief failure does not look like a missing part.
        client = kube_api.admin()
        missing = missing_parts(client)
        if not missing:
            return True
        if unfinished and not _in_use(client):
            return False
        raise MachineProblem(
            f"the cluster on this machine lacks {missing[0]}",
            "all parts that kubeadm init creates",
            "finish its init by hand (`kubeadm init phase ...`), or run gpunodes reset, which destroys the cluster",
        )
    if unfinished and not _finalised():
        return False
    cause = kubelet_error() or "its API server does not respond"
    raise MachineProblem(
        f"the control plane on this machine does not work: {cause}",
        "a working control plane, or none",
        "see `journalctl -u kubelet` and `crictl ps -a`; gpunodes reset destroys the cluster and frees the machine",
    )


def _finalised() -> bool:
    """Whether the API worked: kubeadm init's second last phase gives the kubelet a certificate from the API."""
    return "kubelet-client-current.pem" in (disk.read(kubeconfig.KUBELET) or "")


def _responds(client: Client, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    if not services.states(["kubelet"]).get("kubelet", {}).get("active"):
        run(["systemctl", "start", "kubelet"])
    while True:
        with contextlib.suppress(ApiError):
            client.get("/readyz")
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)


def missing_parts(client: Client) -> list[str]:
    """The parts that a finished kubeadm init creates and that are missing."""
    parts = {
        f"{_SYSTEM}/configmaps/kubeadm-config": "its own configuration (ConfigMap kubeadm-config)",
        "/api/v1/namespaces/kube-public/configmaps/cluster-info": "discovery data for joins (ConfigMap cluster-info)",
        f"{_APPS}/deployments/coredns": "its DNS (Deployment coredns)",
        f"{_APPS}/daemonsets/kube-proxy": "kube-proxy (DaemonSet kube-proxy)",
    }
    return [title for path, title in parts.items() if client.find(path) is None]


def _in_use(client: Client) -> bool:
    """Whether the cluster is in use: it has a second node, or pods outside kube-system."""
    nodes = client.get("/api/v1/nodes")["items"]
    pods = client.get("/api/v1/pods")["items"]
    return len(nodes) > 1 or any(pod["metadata"]["namespace"] != "kube-system" for pod in pods)


def _complete(document: Mapping[str, Any], token: str) -> Mapping[str, Any]:
    if document["kind"] != "InitConfiguration":
        return document
    tokens = [{"token": token, "ttl": "1h0m0s", "description": _INIT_DESCRIPTION}]
    return {**document, "bootstrapTokens": tokens, "patches": {"directory": f"{PRIVATE}/patches"}}


# join


def joined(ca_hash: str) -> bool:
    """Whether this machine is a worker of the cluster with this CA, according to the machine's files."""
    state = facts.kubernetes()
    if state["ca_hash"] and state["ca_hash"] != ca_hash and os.path.exists(kubeconfig.KUBELET):
        raise MachineProblem(
            f"this machine belongs to another cluster ({state['server']})",
            "a machine of this cluster, or outside any cluster",
            "if that cluster no longer exists, run gpunodes reset",
        )
    if state["role"] == "control_plane":
        raise MachineProblem(
            "this machine is a control plane", "a machine that can become a worker", "choose another one"
        )
    return bool(state["role"] == "worker" and state["ca_hash"] == ca_hash)


def join(
    endpoint: str, token: str, ca_hash: str, registered: bool, settings: Mapping[str, Any], limit_s: float, check: bool
) -> list[str]:
    """Make this machine a worker; returns the actions, none if it is one and its node is ``registered``."""
    machine_ledger = ledger.load()
    if joined(ca_hash) and registered:
        if machine_ledger.kubeadm != "join started":
            return []
        if not check:
            _end(machine_ledger, "join done")
        return ["finish an interrupted kubeadm join"]
    actions = ["kubeadm join"]
    leftovers = _leftovers()
    if leftovers:
        actions.insert(0, "reset an earlier join")
    if check:
        return actions
    if not token:
        raise MachineProblem(
            "no token to join with", "a fresh token", "run the complete playbook, without --tags or --start-at-task"
        )
    _begin(machine_ledger, "join started")
    if leftovers:
        reset()
    document = {
        "apiVersion": "kubeadm.k8s.io/v1beta4",
        "kind": "JoinConfiguration",
        "discovery": {
            "bootstrapToken": {"token": token, "apiServerEndpoint": endpoint, "caCertHashes": [ca_hash]},
        },
        **settings,
    }
    _kubeadm("join", [document], limit_s)
    _end(machine_ledger, "join done")
    return actions


def _leftovers() -> list[str]:
    """Existing files that would fail kubeadm's own preflight."""
    paths = (kubeconfig.KUBELET, facts.BOOTSTRAP, kubeconfig.CA, kubeconfig.ADMIN, _MANIFEST, _ETCD)
    return [path for path in paths if os.path.exists(path)]


# init and join


def _begin(machine_ledger: ledger.Ledger, stage: str) -> None:
    """Record in the ledger the state that kubeadm and the kubelet will change."""
    for name in _KUBELET_SYSCTLS:
        value = disk.read(f"/proc/sys/{name.replace('.', '/')}")
        if value is not None:
            machine_ledger.note_sysctl(name, value.strip())
    if machine_ledger.firewall_tables is None:
        machine_ledger.firewall_tables = firewall.tables()
    machine_ledger.kubeadm = stage
    machine_ledger.save()


def _kubeadm(
    verb: str,
    documents: Sequence[Mapping[str, Any]],
    limit_s: float,
    flags: Sequence[str] = (),
    patches: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Run kubeadm with a configuration file that only root can read and that is deleted afterwards."""
    tree.remove(PRIVATE)
    os.mkdir(PRIVATE, 0o700)
    path = f"{PRIVATE}/kubeadm.yaml"
    command = ["kubeadm", verb, f"--config={path}", *flags]
    began = time.time()
    try:
        # JSON is valid YAML, and Python writes it without a library.
        disk.write(path, "\n---\n".join(json.dumps(document, indent=1) for document in documents) + "\n", 0o600)
        os.mkdir(f"{PRIVATE}/patches", 0o700)
        for name, patch in (patches or {}).items():
            disk.write(f"{PRIVATE}/patches/{name}.json", json.dumps(patch), 0o600)
        deadline = time.monotonic() + limit_s
        result = run_while_connected(command, limit_s)
        while _runtime_was_slow(result) and time.monotonic() < deadline:
            time.sleep(_RUNTIME_PAUSE_S)
            result = run_while_connected(command, deadline - time.monotonic())
    finally:
        tree.remove(PRIVATE)
    if not result.ok:
        raise MachineProblem(f"kubeadm {verb}: {failure(result, kubelet_error(began))}")


def _end(machine_ledger: ledger.Ledger, stage: str) -> None:
    """Make the kubelet's configuration readable by root only, and record the finished stage in the ledger.

    kubeadm 1.36 makes the file readable by everyone (CIS benchmark 1.10, 4.1.9).
    """
    os.chmod(_KUBELET_CONFIG, 0o600)
    machine_ledger.kubeadm = stage
    machine_ledger.save()


def _random_key() -> str:
    """32 random bytes in base64: a key for secretbox (kubernetes.io, EncryptionConfiguration)."""
    return base64.b64encode(secrets.token_bytes(32)).decode("ascii")


def _runtime_was_slow(result: CommandResult) -> bool:
    """Whether only the container runtime's check timed out: kubeadm waits two seconds and has changed nothing then.

    Source: kubeadm 1.36 app/util/runtime.
    """
    checks = re.findall(r"\[ERROR [^]]+\]: .*", result.text)
    return bool(checks) and all("[ERROR CRI]" in check and "DeadlineExceeded" in check for check in checks)


def failure(result: CommandResult, kubelet: str) -> str:
    """Why kubeadm failed; with the kubelet's error if kubeadm only timed out."""
    message = kubeadm_error(result.text)
    timed_out = result.code == _TIMED_OUT or re.search(r"kubelet|timed out|deadline|wait|connect", message)
    return f"{message}; kubelet: {kubelet}" if kubelet and timed_out else message


_TIMED_OUT = 124
"""Exit code of a program that ``process.run`` stopped at its time limit."""


def kubeadm_error(text: str) -> str:
    """kubeadm's error: its failed checks, or else the line that names the phase."""
    checks = [line.strip() for line in text.splitlines() if re.match(r"\s*\[ERROR [^]]+\]: ", line)]
    if checks:
        return "; ".join(map(_first_of_many, checks))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        if re.match(r"(error: )?error execution phase ", line) or line.startswith("error: "):
            return line[len("error: ") :] if line.startswith("error: ") else line
    noise = ("To see the stack trace", "k8s.io/", "main.", "runtime.", "\t")
    return next((line for line in reversed(lines) if not line.startswith(noise)), "it failed without output")


def _first_of_many(check: str) -> str:
    """Shorten a check that lists the same error for several images to the first one."""
    first, more, _ = check.partition(", failed to pull image ")
    return f"{first}; and others" if more else check


def kubelet_error(since: float | None = None) -> str:
    """The kubelet's last error, "" if it has none: why it exited if it did, else its last error line."""
    argv = ["journalctl", "--unit=kubelet", "--boot", "--lines=300", "--output=cat", "--no-pager"]
    return parse_kubelet(run([*argv, f"--since=@{since:.0f}"] if since else argv).out)


def parse_kubelet(journal: str) -> str:
    """Parse klog lines: ``E1121 12:00:01.234567  890 file.go:12] "message" err="..."``; E is an error, F is fatal."""
    errors = []
    for line in journal.splitlines():
        found = re.match(r"[EF]\d{4} [\d:.]+\s+\d+ \S+\] (.*)", line)
        if found:
            errors.append(found.group(1))
    fatal = [line for line in errors if line.startswith('"command failed"')]
    text = (fatal or errors or [""])[-1]
    plain = re.search(r'err="((?:[^"\\]|\\.)*)"', text)
    return plain.group(1).replace('\\"', '"') if plain and fatal else text


def new_token() -> str:
    """A new bootstrap token in the form of bootstrap.kubernetes.io: [a-z0-9]{6}.[a-z0-9]{16}."""
    characters = string.ascii_lowercase + string.digits
    token = "".join(secrets.choice(characters) for _ in range(22))
    return f"{token[:6]}.{token[6:]}"


# reset

KUBELET = "/var/lib/kubelet"
_CNI_STATE = "/var/lib/cni"
_STATE = (_CNI_STATE, "/run/flannel", KUBELET, "/etc/kubernetes", "/var/lib/etcd")
_CNI_NETWORK = "cbr0"
"""Name of the network in Flannel's configuration (kube-flannel.yml)."""
_CNI = "/etc/cni/net.d"
_CNI_FILES = ("10-flannel.conflist",)
_TRIES = 2
_LINKS = ("cni0", "flannel.1", "flannel-v6.1", "kube-ipvs0", "nodelocaldns", "kube-bridge")


def reset() -> None:
    """Undo kubeadm's changes, including leftovers of the network add-on.

    Raises MachineProblem, before anything is removed, if something stays mounted in the folders to remove. Does not
    call ``kubeadm reset``, which deletes across mounts in these folders (kubeadm 1.36, app/cmd/phases/reset:
    os.RemoveAll in CleanDir), and empties etcd's folder before it checks for mounts. Otherwise does the same: stops the
    kubelet, removes the pods, and empties the same folders.
    """
    run(["systemctl", "stop", "kubelet"])
    if services.states(["kubelet"]).get("kubelet", {}).get("active"):
        raise MachineProblem("the kubelet does not stop", "a stopped kubelet", "see `journalctl -u kubelet`")
    _remove_pods()
    _stop_containers()
    _unmount()
    _check_unmounted()
    created = ledger.load().directories
    for path in _state():
        tree.remove(path, created=path in created)
    for path in _cni_files():
        disk.remove(path)
    for name in _LINKS:
        if os.path.exists(f"/sys/class/net/{name}"):
            run(["ip", "link", "delete", name])
    firewall.clean()


def _check_unmounted(stopped: bool = True) -> None:
    """Check that nothing is mounted in the folders that a reset removes.

    The kubelet's own mounts count only after it has ``stopped``.
    """
    created = ledger.load().directories
    tree.check_unmounted(
        [path for path in _STATE if stopped or path != KUBELET], created=[path for path in _STATE if path in created]
    )


def _state() -> list[str]:
    """The folders that a reset removes; networks of another container engine are kept."""
    shared = os.path.isdir(f"{_CNI_STATE}/networks") and set(os.listdir(f"{_CNI_STATE}/networks")) - {_CNI_NETWORK}
    own = (f"{_CNI_STATE}/networks/{_CNI_NETWORK}", f"{_CNI_STATE}/flannel")
    return [*(own if shared else (_CNI_STATE,)), *_STATE[1:]]


def _socket() -> str:
    """The container runtime's socket: that of cri-dockerd if it exists, else containerd's."""
    return f"unix://{_DOCKER_SOCKET}" if os.path.exists(_DOCKER_SOCKET) else SOCKET


def _cni_files() -> list[str]:
    """The network add-on's configuration files; other container engines may have files in the same folder."""
    return [path for path in (f"{_CNI}/{name}" for name in _CNI_FILES) if os.path.exists(path)]


def remains() -> list[str]:
    """Everything that a reset would remove.

    Raises MachineProblem if gpunodes did not join the machine to its cluster, or if the folders contain other mounts.
    """
    if not ledger.load().kubeadm:
        foreign = _leftovers()
        if foreign:
            raise MachineProblem(
                f"{foreign[0]} exists, but gpunodes did not create it",
                "a machine that gpunodes joined, because it undoes only its own changes",
                "run `kubeadm reset` on the machine if that cluster is not needed",
            )
        return []
    _check_unmounted(stopped=False)
    found = [path for path in _state() if tree.has_content(path)] + _cni_files()
    links = [f"link {name}" for name in _LINKS if os.path.exists(f"/sys/class/net/{name}")]
    # The packages of Kubernetes contain this folder, with nothing but an empty folder manifests.
    return [path for path in found if path != "/etc/kubernetes" or os.listdir(path) != ["manifests"]] + links + mounts()


def _remove_pods() -> None:
    """Remove all pods with their networks through the container runtime."""
    socket = _socket()
    if os.path.exists(socket[len("unix://") :]):
        command = ["crictl", f"--runtime-endpoint={socket}", "--timeout=30s", "rmp", "--force", "--all"]
        # A pod may need a second attempt, as in kubeadm (app/constants: RemoveContainerRetry).
        any(run(command, 300).ok for _ in range(_TRIES))


def _stop_containers() -> None:
    """Stop pods' containers that crictl could not remove: their shims keep running without containerd."""
    if not shutil.which("ctr", path="/usr/bin:/usr/local/bin"):
        return
    tasks = run(["ctr", "--namespace=k8s.io", "tasks", "list", "--quiet"], 30).out.split()
    for task in tasks:
        run(["ctr", "--namespace=k8s.io", "tasks", "delete", "--force", task], 30)
    containers = run(["ctr", "--namespace=k8s.io", "containers", "list", "--quiet"], 30).out.split()
    if containers:
        run(["ctr", "--namespace=k8s.io", "containers", "delete", *containers], 60)


def mounts() -> list[str]:
    """The kubelet's mounts and the network namespaces of pods, the last mounted first."""
    return [mount.point for mount in tree.below([KUBELET])] + _networks()


def _networks() -> list[str]:
    return [mount.point for mount in tree.below(["/run/netns"]) if mount.point.startswith("/run/netns/cni-")]


def _unmount() -> None:
    tree.unmount([KUBELET])
    for point in _networks():
        if run(["umount", point], 30).ok:
            # The file is busy if it was mounted twice.
            with contextlib.suppress(OSError):
                disk.remove(point)
