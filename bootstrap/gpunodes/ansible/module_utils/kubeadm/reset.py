"""Undoes kubeadm's changes to a machine."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence

from .. import data_directory, disk, facts, firewall, kubeconfig, ledger, tree
from ..containers import runtime_socket
from ..host import services
from ..problem import MachineProblem
from ..process import run
from ..report import Difference, Report

ETCD = facts.ETCD
MANIFEST = "/etc/kubernetes/manifests/kube-apiserver.yaml"
KUBELET = "/var/lib/kubelet"
_CNI_STATE = "/var/lib/cni"
_STATE = (_CNI_STATE, "/run/flannel", KUBELET, "/etc/kubernetes", "/var/lib/etcd")
_CNI_NETWORK = "cbr0"
"""Name of the network in Flannel's configuration (kube-flannel.yml)."""
_CNI = "/etc/cni/net.d"
_CNI_FILES = ("10-flannel.conflist",)
_TRIES = 2
_LINKS = ("cni0", "flannel.1", "flannel-v6.1", "kube-ipvs0", "nodelocaldns", "kube-bridge")


def report(remaining: Sequence[str]) -> Report:
    """The actions and differences of a reset that removes ``remaining``."""
    made = Report()
    for name in remaining:
        made.add(f"remove {name}", Difference("changes of kubeadm", {name: "present"}, {}))
    return made


def reset() -> None:
    """Undo kubeadm's changes, including leftovers of the network add-on.

    Raises MachineProblem, before anything is removed, if something stays mounted in the folders to remove. Does not
    call ``kubeadm reset``, which deletes across mounts in these folders (kubeadm 1.36, app/cmd/phases/reset:
    os.RemoveAll in CleanDir), and empties etcd's folder before it checks for mounts. Otherwise does the same: stops the
    kubelet, removes the pods, and empties the same folders.
    """
    _take_over()
    run(["systemctl", "stop", "kubelet"])
    if services.states(["kubelet"]).get("kubelet", {}).get("active"):
        raise MachineProblem("the kubelet does not stop", "a stopped kubelet", "see `journalctl -u kubelet`")
    _remove_pods()
    _stop_containers()
    _unmount()
    _check_unmounted()
    created = _created()
    for path in _state():
        tree.remove(path, created=path in created)
    for path in _cni_files():
        disk.remove(path)
    for name in _LINKS:
        if os.path.exists(f"/sys/class/net/{name}"):
            run(["ip", "link", "delete", name])
    firewall.clean()


def remains(ca_hash: str = "") -> list[str]:
    """Everything that a reset would remove.

    ``ca_hash`` is that of the cluster that the machine leaves ("sha256:..."), "" if it is not known: the machine may
    have been joined by others. Raises MachineProblem if neither gpunodes joined it nor it has this CA, or if the
    folders contain other mounts.
    """
    if not ledger.load().kubeadm:
        foreign = leftovers()
        if not foreign:
            return []
        if not ca_hash or facts.kubernetes()["ca_hash"] != ca_hash:
            raise MachineProblem(
                f"{foreign[0]} exists, but gpunodes did not create it",
                "a machine that gpunodes joined" + (", or one of this cluster" if ca_hash else ""),
                "run `kubeadm reset` on the machine if that cluster is not needed",
            )
    _check_unmounted(stopped=False)
    found = [path for path in _state() if tree.has_content(path)] + _cni_files()
    links = [f"link {name}" for name in _LINKS if os.path.exists(f"/sys/class/net/{name}")]
    # The packages of Kubernetes contain this folder, with nothing but an empty folder manifests.
    found = [path for path in found if path != "/etc/kubernetes" or os.listdir(path) != ["manifests"]]
    return found + links + _mounts()


def _take_over() -> None:
    """Note that this reset was allowed: an interrupted one has removed the CA that allowed it."""
    found = ledger.load()
    if not found.kubeadm:
        found.kubeadm = "join done"
        found.save()


def leftovers() -> list[str]:
    """Existing files that would fail kubeadm's own preflight."""
    paths = (kubeconfig.KUBELET, facts.BOOTSTRAP, kubeconfig.CA, kubeconfig.ADMIN, MANIFEST, ETCD)
    return [path for path in paths if os.path.exists(path)]


def _check_unmounted(stopped: bool = True) -> None:
    """Check that nothing is mounted in the folders that a reset removes.

    The kubelet's own mounts count only after it has ``stopped``.
    """
    created = _created()
    tree.check_unmounted(
        [path for path in _STATE if stopped or path != KUBELET], created=[path for path in _STATE if path in created]
    )


def _created() -> set[str]:
    """The folders that gpunodes created, without those that it mounts on a data directory.

    These are emptied like a disk that was mounted before; host_undo unmounts and removes them.
    """
    found = ledger.load()
    return set(found.directories) - set(data_directory.mounted(found))


def _state() -> list[str]:
    """The folders that a reset removes; networks of another container engine are kept."""
    shared = os.path.isdir(f"{_CNI_STATE}/networks") and set(os.listdir(f"{_CNI_STATE}/networks")) - {_CNI_NETWORK}
    own = (f"{_CNI_STATE}/networks/{_CNI_NETWORK}", f"{_CNI_STATE}/flannel")
    return [*(own if shared else (_CNI_STATE,)), *_STATE[1:]]


def _cni_files() -> list[str]:
    """The network add-on's configuration files; other container engines may have files in the same folder."""
    return [path for path in (f"{_CNI}/{name}" for name in _CNI_FILES) if os.path.exists(path)]


def _remove_pods() -> None:
    """Remove all pods with their networks through the container runtime."""
    socket = runtime_socket()
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


def _mounts() -> list[str]:
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
