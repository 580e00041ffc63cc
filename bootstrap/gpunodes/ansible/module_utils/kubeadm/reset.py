"""Undoes kubeadm's changes to a machine."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence

from .. import data_directory, disk, etcd_data, facts, firewall, kubeconfig, ledger, tree
from ..containers import runtime_socket
from ..host import services
from ..problem import MachineProblem
from ..process import run
from ..report import Difference, Report
from . import given

ETCD = etcd_data.MEMBER
MANIFEST = "/etc/kubernetes/manifests/kube-apiserver.yaml"
KUBELET = "/var/lib/kubelet"
_CNI_STATE = "/var/lib/cni"
# The files that tell that etcd's data is kubeadm's are in the last one.
_STATE = (_CNI_STATE, "/run/flannel", KUBELET, etcd_data.FOLDER, given.FOLDER)
_CNI_NETWORK = "cbr0"
"""Name of the network in Flannel's configuration (kube-flannel.yml)."""
_CNI = "/etc/cni/net.d"
_CNI_FILES = ("10-flannel.conflist",)
_LOAD_BALANCER = "kube-vip"
"""The namespace of the add-on load-balancer."""
_TRIES = 2
_LINKS = ("cni0", "flannel.1", "flannel-v6.1", "kube-ipvs0", "nodelocaldns", "kube-bridge")


def report(remaining: Sequence[str]) -> Report:
    """The actions and differences of a reset that removes ``remaining``."""
    made = Report()
    for name in remaining:
        made.add(f"remove {name}", Difference("changes of kubeadm", {name: "present"}, {}))
    return made


def reset(ca_hash: str = "") -> None:
    """Undo kubeadm's changes, including leftovers of the network add-on.

    Raises MachineProblem, before anything is removed, if something stays mounted in the folders to remove. Does not
    call ``kubeadm reset``, which deletes across mounts in these folders (kubeadm 1.36, app/cmd/phases/reset:
    os.RemoveAll in CleanDir), and empties etcd's folder before it checks for mounts. Otherwise does the same: stops the
    kubelet, removes the pods, and empties the same folders, without the files that were there before kubeadm.
    ``ca_hash`` is that of the cluster that the machine leaves ("sha256:..."): that cluster's CA does not stay.
    """
    run(["systemctl", "stop", "kubelet"])
    if services.states(["kubelet"]).get("kubelet", {}).get("active"):
        raise MachineProblem("the kubelet does not stop", "a stopped kubelet", "see `journalctl -u kubelet`")
    _remove_pods()
    _stop_containers()
    _unmount()
    _check_unmounted()
    kept = _take_over(ca_hash)
    created = _created()
    for path in _state():
        tree.remove(path, created=path in created, kept=kept if path == given.FOLDER else ())
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
    machine_ledger = ledger.load()
    if not machine_ledger.kubeadm:
        found = leftovers()
        # A CA alone makes no member: its user put it there, and the reset of a control plane has left it.
        if not found or (found == [kubeconfig.CA] and not _has_ca(ca_hash)):
            return []
        check_own(found, ca_hash)
    _check_unmounted(stopped=False)
    found = [path for path in _state() if path != given.FOLDER and tree.has_content(path)]
    # The packages of Kubernetes contain this folder, with nothing but an empty folder manifests.
    found += [given.FOLDER] if given.others(_kept(machine_ledger, ca_hash)) else []
    links = [f"link {name}" for name in _LINKS if os.path.exists(f"/sys/class/net/{name}")]
    return found + _cni_files() + links + _mounts()


def _kept(machine_ledger: ledger.Ledger, ca_hash: str) -> list[str]:
    """The files below /etc/kubernetes that stay."""
    found = machine_ledger.given if machine_ledger.kubeadm else given.files(machine_ledger, taken_over=True)
    return given.without_pki(found) if _has_ca(ca_hash) else found


def _has_ca(ca_hash: str) -> bool:
    return bool(ca_hash) and bool(facts.kubernetes()["ca_hash"] == ca_hash)


def _take_over(ca_hash: str) -> list[str]:
    """The files that stay; noted, as is that this is allowed: an interrupted reset has removed the CA that says so."""
    found = ledger.load()
    found.given = _kept(found, ca_hash)
    found.kubeadm = found.kubeadm or "join done"
    found.save()
    return found.given


def check_own(found: Sequence[str], ca_hash: str) -> None:
    """Raise MachineProblem for these ``leftovers`` of others, unless they are of the cluster with this CA, "" for none.

    Only on a machine that gpunodes did not join.
    """
    if not _has_ca(ca_hash):
        raise MachineProblem(
            f"{found[0]} exists, but gpunodes did not create it",
            "a machine that gpunodes joined" + (", or one of this cluster" if ca_hash else ""),
            "run `kubeadm reset` on the machine if that cluster is not needed; move a CA away that is alone there",
        )


def leftovers(control_plane: bool = False) -> list[str]:
    """Existing files that would fail kubeadm's own preflight, for a worker or a ``control_plane``.

    Not those that were there before gpunodes called kubeadm: it began with them.
    """
    machine_ledger = ledger.load()
    paths = (kubeconfig.KUBELET, facts.BOOTSTRAP, kubeconfig.CA, kubeconfig.ADMIN, MANIFEST)
    etcd = [ETCD] if control_plane or etcd_data.is_kubeadms(machine_ledger) else []
    return [path for path in (*paths, *etcd) if os.path.exists(path) and path not in machine_ledger.given]


def _check_unmounted(stopped: bool = True) -> None:
    """Check that nothing is mounted in the folders that a reset removes.

    The kubelet's own mounts count only after it has ``stopped``.
    """
    created = _created()
    state = _folders()
    tree.check_unmounted(
        [path for path in state if stopped or path != KUBELET], created=[path for path in state if path in created]
    )


def _created() -> set[str]:
    """The folders that gpunodes created, without those that it mounts on a data directory.

    These are emptied like a disk that was mounted before; host_undo unmounts and removes them.
    """
    found = ledger.load()
    return set(found.directories) - set(data_directory.mounted(found))


def _folders() -> list[str]:
    """Where kubeadm and the kubelet have their state; not etcd's folder with the data of a user's own etcd."""
    etcd = etcd_data.is_kubeadms(ledger.load())
    return [path for path in _STATE if etcd or path != etcd_data.FOLDER]


def _state() -> list[str]:
    """The folders that a reset removes; networks of another container engine are kept."""
    shared = os.path.isdir(f"{_CNI_STATE}/networks") and set(os.listdir(f"{_CNI_STATE}/networks")) - {_CNI_NETWORK}
    own = (f"{_CNI_STATE}/networks/{_CNI_NETWORK}", f"{_CNI_STATE}/flannel")
    return [*(own if shared else (_CNI_STATE,)), *_folders()[1:]]


def _cni_files() -> list[str]:
    """The network add-on's configuration files; other container engines may have files in the same folder."""
    return [path for path in (f"{_CNI}/{name}" for name in _CNI_FILES) if os.path.exists(path)]


def _remove_pods() -> None:
    """Remove all pods with their networks through the container runtime."""
    socket = runtime_socket()
    if os.path.exists(socket[len("unix://") :]):
        crictl = ["crictl", f"--runtime-endpoint={socket}"]
        # Only SIGTERM lets it take its addresses from this machine's network card: another node has them soon.
        balancer = run([*crictl, "ps", "--quiet", f"--label=io.kubernetes.pod.namespace={_LOAD_BALANCER}"], 30)
        if containers := balancer.out.split():
            run([*crictl, "--timeout=60s", "stop", "--timeout=25", *containers], 90)
        command = [*crictl, "--timeout=30s", "rmp", "--force", "--all"]
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
