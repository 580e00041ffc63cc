"""kubeadm init, join and reset, so that each may be interrupted at any point and run again."""

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

from . import disk, facts, firewall, host, kube_api, kubeconfig, ledger, tree
from .kube_api import ApiError, Client
from .problem import MachineProblem
from .process import CommandResult, run, run_while_heard

SOCKET = "unix:///run/containerd/containerd.sock"
_DOCKER_SOCKET = "/run/cri-dockerd.sock"
PRIVATE = "/run/gpunodes"
_ETCD = "/var/lib/etcd/member"
_MANIFEST = "/etc/kubernetes/manifests/kube-apiserver.yaml"
_KUBELET_CONFIG = "/var/lib/kubelet/config.yaml"
RANDOM_KEY = "{random key}"
_OF_INIT = "kubeadm init"
"""The description of the token that an init is given."""
_POLL_S = 1.0
_RUNTIME_PAUSE_S = 5.0
_BOOT_S = 300
"""How long a control plane may take to answer after its machine has booted."""
_SYSTEM = "/api/v1/namespaces/kube-system"
_APPS = "/apis/apps/v1/namespaces/kube-system"
_KUBELET_SYSCTLS = (
    # What the kubelet and kube-proxy set for themselves (pkg/kubelet/cm, pkg/proxy: 1.36).
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
    """Make this machine a control plane, or see that it is one; the actions taken.

    ``files`` are what the documents name: JSON by path, for root alone, written when the control plane is made.
    ``RANDOM_KEY`` in them stands for a key that is made here and leaves the machine never.

    A cluster that ever became usable is never touched: one whose API does not answer is waited for, then reported.
    An init that we started and that never finished is reset and started over.
    """
    book = ledger.load()
    actions: list[str] = []
    if any(map(os.path.exists, (_MANIFEST, kubeconfig.ADMIN, _ETCD))):
        if _stands(book, limit_s):
            if book.kubeadm != "init started":
                return []
            if not check:
                _end_init(book)
            return ["finish an interrupted kubeadm init"]
        actions.append("reset what an interrupted kubeadm init left")
    elif os.path.exists(kubeconfig.KUBELET):
        raise MachineProblem(
            "this machine is a worker of a cluster",
            "a machine that is in none",
            "gpunodes reset makes it free",
        )
    actions.append("kubeadm init")
    if check:
        return actions
    _begin(book, "init started")
    if len(actions) > 1 or _leftovers():
        reset()
    for path, content in files.items():
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        disk.write(path, json.dumps(content, indent=1).replace(RANDOM_KEY, _random_key()) + "\n", 0o600)
    complete = [_complete(document, new_token()) for document in documents]
    _kubeadm("init", complete, limit_s, ("--skip-token-print",), patches)
    _end_init(book)
    return actions


def _end_init(book: ledger.Ledger) -> None:
    """What is left to do once kubeadm has ended well. A kill may come before it: the next run does it then."""
    client = kube_api.admin()
    # kubeadm needs a token to set up bootstrapping; joins make their own.
    for token in client.get(f"{_SYSTEM}/secrets", fieldSelector="type=bootstrap.kubernetes.io/token")["items"]:
        if (token.get("data") or {}).get("description") == base64.b64encode(_OF_INIT.encode()).decode():
            client.delete(f"{_SYSTEM}/secrets/{token['metadata']['name']}")
    _end(book, "init done")


def _stands(book: ledger.Ledger, limit_s: float) -> bool:
    """Whether the control plane that left files here works; False when it never came to work and may be reset.

    Raises MachineProblem when it may have worked, or is not ours to judge.
    """
    ours_unfinished = book.kubeadm == "init started"
    client = kube_api.admin(patience_s=0) if kubeconfig.load(kubeconfig.ADMIN) else None
    whole = client is not None and os.path.exists(_MANIFEST)
    # What is running now may only just have been started: the machine may have booted a moment ago.
    if whole and client and _answers(client, min(limit_s, _BOOT_S if not ours_unfinished or _finalised() else 60)):
        # Now that it answers, a hiccup must not look like a part that lacks.
        client = kube_api.admin()
        missing = missing_parts(client)
        if not missing:
            return True
        if ours_unfinished and not _in_use(client):
            return False
        raise MachineProblem(
            f"the cluster on this machine lacks {missing[0]}",
            "what kubeadm init makes",
            "finish its init by hand (`kubeadm init phase ...`), or gpunodes reset, which destroys the cluster",
        )
    if ours_unfinished and not _finalised():
        return False
    cause = kubelet_error() or "its API server does not answer"
    raise MachineProblem(
        f"there is a control plane on this machine that does not work: {cause}",
        "one that answers, or none",
        "see `journalctl -u kubelet` and `crictl ps -a`; gpunodes reset destroys it and makes the machine free",
    )


def _finalised() -> bool:
    """kubeadm init's second last phase makes the kubelet use a certificate from the API, which thus had worked."""
    return "kubelet-client-current.pem" in (disk.read(kubeconfig.KUBELET) or "")


def _answers(client: Client, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    if not host.service_states(["kubelet"]).get("kubelet", {}).get("active"):
        run(["systemctl", "start", "kubelet"])
    while True:
        with contextlib.suppress(ApiError):
            client.get("/readyz")
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)


def missing_parts(client: Client) -> list[str]:
    """What a finished kubeadm init has made and is not there."""
    parts = {
        f"{_SYSTEM}/configmaps/kubeadm-config": "its own configuration (ConfigMap kubeadm-config)",
        "/api/v1/namespaces/kube-public/configmaps/cluster-info": "what joins need (ConfigMap cluster-info)",
        f"{_APPS}/deployments/coredns": "its DNS (Deployment coredns)",
        f"{_APPS}/daemonsets/kube-proxy": "kube-proxy (DaemonSet kube-proxy)",
    }
    return [title for path, title in parts.items() if client.find(path) is None]


def _in_use(client: Client) -> bool:
    """Whether anybody has come to use the cluster: a second node, or pods outside kube-system."""
    nodes = client.get("/api/v1/nodes")["items"]
    pods = client.get("/api/v1/pods")["items"]
    return len(nodes) > 1 or any(pod["metadata"]["namespace"] != "kube-system" for pod in pods)


def _complete(document: Mapping[str, Any], token: str) -> Mapping[str, Any]:
    if document["kind"] != "InitConfiguration":
        return document
    tokens = [{"token": token, "ttl": "1h0m0s", "description": _OF_INIT}]
    return {**document, "bootstrapTokens": tokens, "patches": {"directory": f"{PRIVATE}/patches"}}


# join


def joined(ca_hash: str) -> bool:
    """Whether this machine is a worker of the cluster with this CA, as far as the machine itself can know."""
    state = facts.kubernetes()
    if state["ca_hash"] and state["ca_hash"] != ca_hash and os.path.exists(kubeconfig.KUBELET):
        raise MachineProblem(
            f"this machine belongs to another cluster ({state['server']})",
            "a machine that is in none, or in this one",
            "if that cluster is gone: gpunodes reset",
        )
    if state["role"] == "control_plane":
        raise MachineProblem("this machine is a control plane", "one that can be a worker", "choose another machine")
    return bool(state["role"] == "worker" and state["ca_hash"] == ca_hash)


def join(
    endpoint: str, token: str, ca_hash: str, registered: bool, settings: Mapping[str, Any], limit_s: float, check: bool
) -> list[str]:
    """Make this machine a worker; the actions taken, none when it is one and the cluster has it ``registered``."""
    book = ledger.load()
    if joined(ca_hash) and registered:
        if book.kubeadm != "join started":
            return []
        if not check:
            _end(book, "join done")
        return ["finish an interrupted kubeadm join"]
    actions = ["kubeadm join"]
    dirty = _leftovers()
    if dirty:
        actions.insert(0, "reset what an earlier join left")
    if check:
        return actions
    if not token:
        raise MachineProblem(
            "there is no token to join with", "a fresh one", "run the whole playbook, not a part of it"
        )
    _begin(book, "join started")
    if dirty:
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
    _end(book, "join done")
    return actions


def _leftovers() -> list[str]:
    """Files that kubeadm's own preflight would stumble over."""
    paths = (kubeconfig.KUBELET, facts.BOOTSTRAP, kubeconfig.CA, kubeconfig.ADMIN, _MANIFEST, _ETCD)
    return [path for path in paths if os.path.exists(path)]


# what both share


def _begin(book: ledger.Ledger, stage: str) -> None:
    """Note in the ledger what kubeadm and the kubelet are about to change."""
    for name in _KUBELET_SYSCTLS:
        value = disk.read(f"/proc/sys/{name.replace('.', '/')}")
        if value is not None:
            book.note_sysctl(name, value.strip())
    if book.firewall_tables is None:
        book.firewall_tables = firewall.tables()
    book.kubeadm = stage
    book.save()


def _kubeadm(
    verb: str,
    documents: Sequence[Mapping[str, Any]],
    limit_s: float,
    flags: Sequence[str] = (),
    patches: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Run kubeadm with a configuration file that only root can read, removed afterwards."""
    tree.remove(PRIVATE)
    os.mkdir(PRIVATE, 0o700)
    path = f"{PRIVATE}/kubeadm.yaml"
    command = ["kubeadm", verb, f"--config={path}", *flags]
    began = time.time()
    try:
        # JSON is YAML, and needs no library to write.
        disk.write(path, "\n---\n".join(json.dumps(document, indent=1) for document in documents) + "\n", 0o600)
        os.mkdir(f"{PRIVATE}/patches", 0o700)
        for name, patch in (patches or {}).items():
            disk.write(f"{PRIVATE}/patches/{name}.json", json.dumps(patch), 0o600)
        deadline = time.monotonic() + limit_s
        done = run_while_heard(command, limit_s)
        while _runtime_was_slow(done) and time.monotonic() < deadline:
            time.sleep(_RUNTIME_PAUSE_S)
            done = run_while_heard(command, deadline - time.monotonic())
    finally:
        tree.remove(PRIVATE)
    if not done.ok:
        raise MachineProblem(f"kubeadm {verb}: {failure(done, kubelet_error(began))}")


def _end(book: ledger.Ledger, stage: str) -> None:
    """Leave the kubelet's configuration to root, and note in the ledger that all is done.

    kubeadm 1.36 writes the file for all to read (CIS benchmark 1.10, 4.1.9).
    """
    os.chmod(_KUBELET_CONFIG, 0o600)
    book.kubeadm = stage
    book.save()


def _random_key() -> str:
    """32 random bytes in base64: a key for secretbox (kubernetes.io, EncryptionConfiguration)."""
    return base64.b64encode(secrets.token_bytes(32)).decode("ascii")


def _runtime_was_slow(done: CommandResult) -> bool:
    """kubeadm's checks give the container runtime two seconds to answer, and have changed nothing when they fail.

    Source: kubeadm 1.36 app/util/runtime.
    """
    checks = re.findall(r"\[ERROR [^]]+\]: .*", done.text)
    return bool(checks) and all("[ERROR CRI]" in check and "DeadlineExceeded" in check for check in checks)


def failure(done: CommandResult, kubelet: str) -> str:
    """Why kubeadm failed; the kubelet's own word is added where kubeadm only says that it waited in vain."""
    message = kubeadm_error(done.text)
    waited = done.code == 124 or re.search(r"kubelet|timed out|deadline|wait|connect", message)  # noqa: PLR2004 - our code
    return f"{message}; the kubelet says: {kubelet}" if kubelet and waited else message


def kubeadm_error(text: str) -> str:
    """kubeadm's own error: its failed checks, or else the line that names the phase."""
    checks = [line.strip() for line in text.splitlines() if re.match(r"\s*\[ERROR [^]]+\]: ", line)]
    if checks:
        return "; ".join(map(_first_of_many, checks))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        if re.match(r"(error: )?error execution phase ", line) or line.startswith("error: "):
            return line[len("error: ") :] if line.startswith("error: ") else line
    known = ("To see the stack trace", "k8s.io/", "main.", "runtime.", "\t")
    return next((line for line in reversed(lines) if not line.startswith(known)), "it failed without a word")


def _first_of_many(check: str) -> str:
    """A check that lists the same trouble for image after image says it once."""
    first, more, _ = check.partition(", failed to pull image ")
    return f"{first}; and others" if more else check


def kubelet_error(since: float | None = None) -> str:
    """The kubelet's last error, "" when it has none: why it ended if it ended, else its last error line."""
    words = ["journalctl", "--unit=kubelet", "--boot", "--lines=300", "--output=cat", "--no-pager"]
    return parse_kubelet(run([*words, f"--since=@{since:.0f}"] if since else words).out)


def parse_kubelet(journal: str) -> str:
    """klog's lines: ``E1121 12:00:01.234567  890 file.go:12] "message" err="..."``; E is an error, F a fatal one."""
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
    """A bootstrap token, as bootstrap.kubernetes.io has them: [a-z0-9]{6}.[a-z0-9]{16}."""
    signs = string.ascii_lowercase + string.digits
    word = "".join(secrets.choice(signs) for _ in range(22))
    return f"{word[:6]}.{word[6:]}"


# reset

KUBELET = "/var/lib/kubelet"
_CNI_STATE = "/var/lib/cni"
_STATE = (_CNI_STATE, "/run/flannel", KUBELET, "/etc/kubernetes", "/var/lib/etcd")
_CNI_NETWORK = "cbr0"
"""The network of Flannel's configuration (kube-flannel.yml)."""
_CNI = "/etc/cni/net.d"
_CNI_FILES = ("10-flannel.conflist",)
_TRIES = 2
_LINKS = ("cni0", "flannel.1", "flannel-v6.1", "kube-ipvs0", "nodelocaldns", "kube-bridge")


def reset() -> None:
    """Take kubeadm's work back, and what the network add-on left.

    Raises MachineProblem when something stays mounted in what is to go; nothing was removed then. It does not call
    ``kubeadm reset``, which empties folders across whatever is mounted in them (kubeadm 1.36, app/cmd/phases/reset:
    os.RemoveAll in CleanDir), and etcd's before it looks for mounts. Else that stops the kubelet, removes the pods, and
    empties the same folders.
    """
    run(["systemctl", "stop", "kubelet"])
    if host.service_states(["kubelet"]).get("kubelet", {}).get("active"):
        raise MachineProblem("the kubelet does not stop", "one that mounts nothing more", "see `journalctl -u kubelet`")
    _remove_pods()
    _stop_containers()
    _unmount()
    _see_bare()
    ours = ledger.load().directories
    for path in _state():
        tree.remove(path, made=path in ours)
    for path in _cni_files():
        disk.remove(path)
    for name in _LINKS:
        if os.path.exists(f"/sys/class/net/{name}"):
            run(["ip", "link", "delete", name])
    firewall.clean()


def _see_bare(stopped: bool = True) -> None:
    """See that nothing is mounted in what a reset removes; the kubelet's own mounts only count once it has stopped."""
    made = ledger.load().directories
    tree.see_bare(
        [path for path in _STATE if stopped or path != KUBELET], made=[path for path in _STATE if path in made]
    )


def _state() -> list[str]:
    """The folders that a reset removes; where another container engine keeps its networks beside ours, ours alone."""
    shared = os.path.isdir(f"{_CNI_STATE}/networks") and set(os.listdir(f"{_CNI_STATE}/networks")) - {_CNI_NETWORK}
    own = (f"{_CNI_STATE}/networks/{_CNI_NETWORK}", f"{_CNI_STATE}/flannel")
    return [*(own if shared else (_CNI_STATE,)), *_STATE[1:]]


def _socket() -> str:
    """Where the container runtime listens; kubeadm needs to be told where there are two."""
    return f"unix://{_DOCKER_SOCKET}" if os.path.exists(_DOCKER_SOCKET) else SOCKET


def _cni_files() -> list[str]:
    """The network add-on's configuration; another container engine may keep its own beside it."""
    return [path for path in (f"{_CNI}/{name}" for name in _CNI_FILES) if os.path.exists(path)]


def remains() -> list[str]:
    """What a reset would have to take away.

    Raises MachineProblem for a cluster membership that is not our work, and for what somebody has mounted there.
    """
    if not ledger.load().kubeadm:
        foreign = _leftovers()
        if foreign:
            raise MachineProblem(
                f"{foreign[0]} is here and gpunodes did not make it",
                "only its own work is taken back",
                "run `kubeadm reset` there if that cluster is not needed",
            )
        return []
    _see_bare(stopped=False)
    found = [path for path in _state() if tree.holds_anything(path)] + _cni_files()
    links = [f"link {name}" for name in _LINKS if os.path.exists(f"/sys/class/net/{name}")]
    # The packages of Kubernetes bring this folder along, empty.
    return [path for path in found if path != "/etc/kubernetes" or os.listdir(path) != ["manifests"]] + links + mounts()


def _remove_pods() -> None:
    """Remove all pods with their networks, as their container runtime does it."""
    socket = _socket()
    if os.path.exists(socket[len("unix://") :]):
        command = ["crictl", f"--runtime-endpoint={socket}", "--timeout=30s", "rmp", "--force", "--all"]
        # A pod may need a second try, as in kubeadm (app/constants: RemoveContainerRetry).
        any(run(command, 300).ok for _ in range(_TRIES))


def _stop_containers() -> None:
    """Pods' containers that crictl could not remove: their shims outlive containerd."""
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
            # It may have been mounted twice.
            with contextlib.suppress(OSError):
                disk.remove(point)
