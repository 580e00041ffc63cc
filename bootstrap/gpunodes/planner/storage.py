"""Shared storage: the shares of gpunodes_storage, and what a server, a node and the cluster get for them. Pure."""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpunodes.ansible.module_utils.host.spec import File, Firewall, Service, Spec, data_folders
from gpunodes.ansible.module_utils.packages import RequestedPackage
from gpunodes.errors import WrongInput, together
from gpunodes.planner import firewall, storage_access
from gpunodes.planner.node_templates import amount

SETTING = "gpunodes_storage"
GROUP = "storage"
"""The group of the machine that serves the shares without a server of their own."""
PORT = "tcp 2049"
CLIENT_SECTION, SERVER_SECTION = "nfs_client", "nfs_server"
"""The sections of the ledger."""
EXPORTS = "/etc/exports.d/gpunodes.exports"
LABEL = "app.kubernetes.io/part-of"
LABELS = {"app.kubernetes.io/managed-by": "gpunodes", LABEL: "gpunodes-storage"}
SELECTOR = f"{LABEL}={LABELS[LABEL]}"
SHARE_LABEL = "gpunodes.dev/share"
# Debian and Ubuntu split the package. Sources: packages.debian.org (nfs-common, nfs-kernel-server); RHEL 9 and 10,
# "Managing file systems", chapter on NFS (nfs-utils; the service is nfs-server on both).
_CLIENT = {"apt": "nfs-common", "dnf": "nfs-utils"}
_SERVER = {"apt": "nfs-kernel-server", "dnf": "nfs-utils"}
_SERVICE = "nfs-server"
# What their scripts create and do not delete: the users of rpc.statd and rpcbind. /var/lib/nfs only where nothing is
# mounted in it: rpc_pipefs is in /run on Debian and Ubuntu. Sources: postinst of nfs-common, rpcbind; nfs-utils.spec.
_USERS = {"apt": ("_rpc", "statd"), "dnf": ("rpc", "rpcuser")}
_FOLDERS: Mapping[str, Sequence[str]] = {"apt": ("/var/lib/nfs",), "dnf": ()}
# hard: a write waits for a server that is away, instead of failing (nfs(5)); soft mounts lose data. nconnect: several
# TCP connections, for a network that one connection does not fill. noresvport: after a lost connection the client takes
# any port, which nfs(5) recommends where many mounts would use up the privileged ones.
DEFAULT_OPTIONS = ("hard", "nconnect=4", "noresvport", "nfsvers=4.2")
# insecure: noresvport uses ports above 1023, which exportfs refuses by default (exports(5)). That would keep no pod
# away: a container may use ports below 1024, and masquerading keeps them there (nf_nat_l4proto_unique_tuple in the
# kernel's net/netfilter/nf_nat_core.c). root_squash: root in a pod of any node would else be root on the server's disk,
# and NFS knows a node by its address only. subtree_check: without it a client that makes up file handles reads the
# whole file system of a shared folder as any user but root, /etc/shadow by its group too (exports(5)).
_EXPORT = "rw,sync,root_squash,subtree_check,insecure,sec=sys"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_PATH = re.compile(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._-]+)+")
_SIZE = re.compile(r"[1-9]\d{0,11}(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?")
_OPTION = re.compile(r"[a-z0-9_]+(=[A-Za-z0-9._:-]+)?")
_KEYS = ("name", "server", "path", "size", "options", "namespaces")
# Folders that a system needs, and folders whose content is not data.
_SYSTEM = {"/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/root", "/run", "/sbin", "/sys", "/usr"}
_SYSTEM |= {"/var", "/var/lib", "/var/log"}
_BELOW = (
    *("/boot/", "/dev/", "/etc/", "/proc/", "/root/", "/run/", "/sys/", "/usr/", "/var/lib/containerd/"),
    *("/var/lib/docker/", "/var/lib/etcd/", "/var/lib/gpunodes/", "/var/lib/kubelet/", "/var/log/"),
)


@dataclass(frozen=True, slots=True)
class Share:
    """An entry of gpunodes_storage."""

    name: str
    server: str
    """Empty for the machine of the group storage."""
    path: str
    size: str
    options: tuple[str, ...] = DEFAULT_OPTIONS
    namespaces: tuple[str, ...] = ("default",)

    def volume(self, namespace: str) -> str:
        """The name of its PersistentVolume for a namespace. Neither name has a dot, so no two are the same."""
        return _volume(self.name, namespace)


def _volume(name: str, namespace: str) -> str:
    return f"gpunodes-{name}.{namespace}"


def problems(value: Any) -> Iterator[tuple[str, str]]:
    """What is wrong with a value of gpunodes_storage: what was found, after the setting's name, and what is wanted."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        yield "is no list", "a list of shares, each with name, path and size"
        return
    names: list[str] = []
    served: list[str] = []
    for number, entry in enumerate(value, 1):
        if not isinstance(entry, Mapping):
            yield f"has {entry!r} as entry {number}", "shares, each with name, path and size"
            continue
        yield from _problems_of(entry, f"{entry.get('name') or f'entry {number}'}")
        names.append(str(entry.get("name")))
        served += [] if entry.get("server") else [str(entry.get("path"))]
    for name in _repeated(names):
        yield f"has several shares named {name}", "a name for each share"
    for path in _repeated(served):
        yield f"has several shares that serve {path}", "a folder for each share, or one share for several namespaces"
    for outer, inner in itertools.combinations(sorted(set(served)), 2):
        if inner.startswith(f"{outer}/"):
            # Who may write in the outer one may put a link to /etc in the place of the inner one, which is then served.
            yield f"has a share that serves {inner}, which is in the share {outer}", "folders beside each other"


def moved(value: Sequence[Mapping[str, Any]], directory: str) -> Iterator[tuple[str, str]]:
    """The same for shares that would contain, or be in, the data of services in ``directory``.

    It is gpunodes_data_directory of the machine that serves them.
    """
    # Where module_utils/data_directory.py puts it.
    data = [f"{directory}/{each.rpartition('/')[2]}/" for each in data_folders("docker").values()]
    for entry in value:
        path = f"{entry['path']}/"
        if not entry.get("server") and any(each.startswith(path) or path.startswith(each) for each in data):
            yield (
                f"has the path {entry['path']!r} in {entry['name']}, where gpunodes_data_directory has other data",
                f"a folder for data, such as {directory}/training",
            )


def _problems_of(entry: Mapping[str, Any], which: str) -> Iterator[tuple[str, str]]:
    """The same for one share."""
    if unknown := [str(key) for key in entry if key not in _KEYS]:
        yield f"has {unknown[0]!r} in {which}", f"no other keys than {', '.join(_KEYS)}"
    server, path = entry.get("server"), str(entry.get("path") or "")
    if not _NAME.fullmatch(str(entry.get("name") or "")):
        yield f"names a share {entry.get('name')!r}", "lower-case letters, digits and dashes, at most 63"
    if server is not None and not _HOST.fullmatch(str(server)):
        yield f"has the server {server!r} in {which}", "a host name or an IPv4 address, or none for the group storage"
    if not _PATH.fullmatch(path) and not (server and path == "/"):
        yield (
            f"has the path {path!r} in {which}",
            "an absolute path of letters, digits and . _ -, without . and .. alone",
        )
    elif not server and (path in _SYSTEM or f"{path}/".startswith(_BELOW)):
        yield f"has the path {path!r} in {which}, which the system needs", "a folder for data, such as /srv/training"
    if not _SIZE.fullmatch(str(entry.get("size") or "")):
        yield f"has the size {entry.get('size')!r} in {which}", "a quantity such as 900Gi"
    for key, pattern, wanted in (
        ("options", _OPTION, "a list of mount options of NFS, such as [hard, nfsvers=4.2]"),
        ("namespaces", _NAME, "a list of different namespaces, such as [default]"),
    ):
        listed = entry.get(key, ["default"])
        filled = listed or key == "namespaces"
        right = isinstance(listed, list) and filled and all(pattern.fullmatch(str(each)) for each in listed)
        if not right or _repeated(list(map(str, listed))):
            yield f"has {key} {listed!r} in {which}", wanted


def _repeated(texts: Sequence[str]) -> list[str]:
    return sorted({text for text in texts if texts.count(text) > 1})


def shares(value: Any) -> tuple[Share, ...]:
    """The shares of a value of gpunodes_storage; raises WrongInput for everything that is wrong with it."""
    if wrong := list(problems(value)):
        raise together([WrongInput(f"{SETTING} {found}", wanted, "correct it") for found, wanted in wrong])
    return tuple(
        Share(
            str(each["name"]),
            str(each.get("server") or ""),
            str(each["path"]),
            str(each["size"]),
            tuple(map(str, each.get("options") or DEFAULT_OPTIONS)),
            tuple(map(str, each.get("namespaces", ("default",)))),
        )
        for each in value
    )


def own_names(value: Any) -> list[str]:
    """The names of the shares that the machine of the group storage serves."""
    return [each.name for each in shares(value) if not each.server]


def serves(value: Any, groups: Collection[str]) -> bool:
    """Whether a machine in these groups serves a share."""
    return GROUP in groups and bool(own_names(value))


def address(reached: str, node_address: str) -> str:
    """The address at which nodes mount from the machine of the group storage: gpunodes_node_address, if it is one."""
    return firewall.usable([node_address])[0] if firewall.usable([node_address]) else reached


# What machines get


def clients(settings: Mapping[str, Any], package_manager: str) -> dict[str, Spec]:
    """mount.nfs, which the kubelet calls, by the role that installs it; nothing without shares.

    With the rules that keep pods from the servers. ``settings`` are those of the machine by name.
    """
    found = shares(settings[SETTING])
    # A machine with another package manager is refused before anything is installed.
    if not found or package_manager not in _CLIENT:
        return {}
    client = _software(_CLIENT, package_manager, CLIENT_SECTION)
    options = [option for share in found for option in share.options]
    return {"nfs_client": storage_access.guarded(client, str(settings["gpunodes_pod_subnet"]), options)}


def _software(names: Mapping[str, str], package_manager: str, section: str) -> Spec:
    return Spec(
        packages=(RequestedPackage(names[package_manager]),),
        users=_USERS[package_manager],
        directories=_FOLDERS[package_manager],
        section=section,
    )


@dataclass(frozen=True, slots=True)
class Server:
    """What the machine of the group storage gets, in this order. The folders of the shares come between the two."""

    software: Spec
    exports: Spec
    """Without services, so that other files never restart the server: clients would wait for its grace period."""
    firewall: Firewall
    folders: Sequence[str]


def server(package_manager: str, value: Any, addresses: Iterable[str]) -> Server:
    """What serves the shares to nodes at these addresses; what is no address is left out.

    Raises WrongInput if there is none: an export without clients would be one to everyone.
    """
    clients = firewall.usable(addresses)
    own = [each for each in shares(value) if not each.server]
    if own and not clients:
        raise WrongInput(
            "no address of a node is known",
            "addresses of nodes, to which the shares are exported",
            "give the machines an ansible_host that is an address, or start the control plane",
        )
    return Server(
        replace(_software(_SERVER, package_manager, SERVER_SECTION), services=(Service(_SERVICE),)),
        Spec(files=(File(EXPORTS, exports(own, clients)),), section=SERVER_SECTION),
        Firewall(ports={PORT: clients}, sources=clients),
        [each.path for each in own],
    )


def exports(own: Iterable[Share], clients: Sequence[str]) -> str:
    """The file for exportfs, one line a share."""
    lines = ["# Managed by gpunodes."]
    for each in own:
        # Fixed: a server that was installed again is the same one for its clients, and their file handles stay valid.
        options = f"{_EXPORT},fsid={uuid.uuid5(uuid.NAMESPACE_URL, f'gpunodes:{each.path}')}"
        lines.append(" ".join([each.path, *(f"{client}({options})" for client in clients)]))
    return "\n".join(lines) + "\n"


# What the cluster gets


def objects(value: Any, own_server: str) -> list[dict[str, Any]]:
    """A PersistentVolume and its claim for each share and namespace; a volume binds one claim only."""
    found: list[dict[str, Any]] = []
    for share in shares(value):
        for namespace in share.namespaces:
            name, labels = share.volume(namespace), {**LABELS, SHARE_LABEL: share.name}
            common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
            found.append(
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolume",
                    "metadata": {"name": name, "labels": labels},
                    "spec": {
                        **common,
                        "capacity": {"storage": share.size},
                        "persistentVolumeReclaimPolicy": "Retain",
                        "mountOptions": list(share.options),
                        "nfs": {"server": share.server or own_server, "path": share.path},
                        # No other claim can bind it.
                        "claimRef": {
                            "apiVersion": "v1",
                            "kind": "PersistentVolumeClaim",
                            "name": share.name,
                            "namespace": namespace,
                        },
                    },
                }
            )
            found.append(
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "metadata": {"name": share.name, "namespace": namespace, "labels": labels},
                    "spec": {
                        **common,
                        "resources": {"requests": {"storage": share.size}},
                        "volumeName": name,
                    },
                }
            )
    return found


def servers(value: Any, own_server: str) -> list[str]:
    """The NFS servers, each once."""
    return list(dict.fromkeys(each.server or own_server for each in shares(value)))


def folders(value: Any, own_server: str) -> list[str]:
    """SERVER:PATH of the shares, as mounts have it; without ``own_server`` only those of other servers."""
    found = [(each.server or own_server, each.path) for each in shares(value)]
    return list(dict.fromkeys(f"{server}:{path}" for server, path in found if server))


def claims(value: Any) -> list[dict[str, str]]:
    """The claims of the shares, for the module storage_claims."""
    return [{"namespace": each, "name": share.name} for share in shares(value) for each in share.namespaces]


def conflicts(wanted: Sequence[Mapping[str, Any]], present: Mapping[tuple[str, str, str], Any]) -> list[WrongInput]:
    """Objects that cannot become the ``wanted`` ones; ``present`` are those that exist, by kind, namespace and name."""
    found = []
    for each in wanted:
        meta, kind = each["metadata"], each["kind"]
        title = f"the {kind} {meta.get('namespace', '')}{'/' if 'namespace' in meta else ''}{meta['name']}"
        old = present.get((kind, meta.get("namespace", ""), meta["name"]))
        if old is None:
            continue
        if not _is_own(old):
            remedy = "rename the share, or delete the object if nothing needs it"
            found.append(WrongInput(f"{title} exists, and is not of gpunodes", "a name of its own", remedy))
        elif differing := [key for key in ("nfs", "volumeName", "resources") if _differs(each, old, key)]:
            now, then = (_shown(given, differing[0]) for given in (old, each))
            remedy = "give the share another name; or `gpunodes storage down` first, which keeps the data"
            if differing[0] == "nfs" and now.partition(":")[0] != then.partition(":")[0]:
                # It undoes what the group has: the machine that served before would serve on, and for nobody.
                remedy += f", with the machine that is {now.partition(':')[0]} in the group {GROUP} if that served it"
            found.append(WrongInput(f"{title} exists with {now}", f"{then}, which cannot be changed", remedy))
    return found


def _is_own(found: Mapping[str, Any]) -> bool:
    return bool(((found.get("metadata") or {}).get("labels") or {}).get(LABEL) == LABELS[LABEL])


def is_claim(found: Mapping[str, Any]) -> bool:
    """Whether a claim with the labels is one of ``objects``: a copy of it for another volume has them, too."""
    meta = found["metadata"]
    wanted = _volume(meta["name"], meta.get("namespace", ""))
    return bool((found.get("spec") or {}).get("volumeName") == wanted)


def _differs(wanted: Mapping[str, Any], old: Mapping[str, Any], key: str) -> bool:
    if key not in wanted["spec"]:
        return False
    then, now = _shown(wanted, key), _shown(old, key)
    # The API server writes quantities its own way: 1024Gi as 1Ti, 1000G as 1T.
    return amount(then) != amount(now) if key == "resources" else then != now


def _shown(found: Mapping[str, Any], key: str) -> str:
    value = (found.get("spec") or {}).get(key)
    if isinstance(value, Mapping):
        value = value.get("requests") or f"{value.get('server')}:{value.get('path')}"
    return str(value.get("storage")) if isinstance(value, Mapping) else str(value)


def sources(volumes: Iterable[Mapping[str, Any]]) -> list[str]:
    """SERVER:PATH of PersistentVolumes, as mounts have it; what has no valid one is left out."""
    found = []
    for each in volumes:
        nfs = (each.get("spec") or {}).get("nfs") or {}
        host, path = str(nfs.get("server") or ""), str(nfs.get("path") or "")
        if _HOST.fullmatch(host) and (_PATH.fullmatch(path) or path == "/"):
            found.append(f"{host}:{path}")
    return list(dict.fromkeys(found))


def users(pods: Iterable[Mapping[str, Any]], used: Collection[tuple[str, str]]) -> list[str]:
    """The pods, NAMESPACE/NAME, that use one of these claims (namespace, name), also those that have ended.

    Kubernetes keeps a claim until these are deleted, too. Source: podUsesPVCForDeletion in
    pkg/controller/volume/pvcprotection/pvc_protection_controller.go, 1.36.
    """
    found = []
    for pod in pods:
        namespace, name = str(pod["metadata"].get("namespace")), str(pod["metadata"].get("name"))
        volumes = (pod.get("spec") or {}).get("volumes") or ()
        named = {str((each.get("persistentVolumeClaim") or {}).get("claimName")) for each in volumes}
        if any((namespace, each) in used for each in named):
            found.append(f"{namespace}/{name}")
    return sorted(set(found))
