"""The registry of a cluster: its settings, the objects that the cluster gets for it, and how nodes trust it. Pure.

Nodes reach it at a fixed address of a Service, by kube-proxy: names of the cluster's DNS are unknown to them.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpunodes.ansible.module_utils.host.spec import File, Spec
from gpunodes.errors import WrongInput
from gpunodes.planner import storage

SHARE, ADDRESS, IMAGE = "gpunodes_registry_share", "gpunodes_registry_address", "gpunodes_registry_image"
SUBNET = "gpunodes_service_subnet"
NAMESPACE, NAME = "gpunodes-registry", "registry"
PORT = 5000
USER = "gpunodes"
"""The user that the registry has; each user of it may push and pull."""
FOLDER = "gpunodes-registry"
"""The folder of the share with the images."""
LABELS = {"app.kubernetes.io/managed-by": "gpunodes", "app.kubernetes.io/part-of": "gpunodes-registry"}
POD_LABELS = {**LABELS, "app.kubernetes.io/name": NAME}
SHARE_NOTE = "gpunodes.dev/registry-share"
"""The annotation with SERVER:PATH of the folder that has the images: of the Deployment, and of what is published."""
_CONTENT = "gpunodes.dev/registry-content"
_CONTROL_PLANE = "node-role.kubernetes.io/control-plane"
# Which address of the range of Services. The API server gives out addresses by itself above the first 16 to 256 (a 16th
# of the range), and uses these only when all others are taken: they are for fixed ones. The API has the 1st, the
# cluster's DNS the 10th. Sources: kubernetes.io, "Service ClusterIP allocation"; kubeadm, GetDNSIP.
_OFFSET = 15
_USER_ID = 65532
_CERTIFICATES = "/run/secrets/gpunodes-registry"
_DATA = "/var/lib/registry"
_CONFIG = "/etc/gpunodes-registry"
# Source: distribution.github.io, "Configuring a registry". Deleting is how `gpunodes registry verify` leaves nothing.
CONFIG = f"""\
version: 0.1
log:
  level: info
storage:
  filesystem:
    rootdirectory: {_DATA}
  delete:
    enabled: true
http:
  addr: :{PORT}
  tls:
    certificate: {_CERTIFICATES}/tls.crt
    key: {_CERTIFICATES}/tls.key
    minimumtls: tls1.2
  headers:
    X-Content-Type-Options: [nosniff]
auth:
  htpasswd:
    realm: gpunodes
    path: {_CERTIFICATES}/htpasswd
"""


@dataclass(frozen=True, slots=True)
class Request:
    """What the settings request."""

    address: str
    """HOST:PORT, as the names of images begin."""
    image: str
    share: str
    """The name of the share in gpunodes_storage."""
    folder: str
    """SERVER:PATH of the images."""
    volumes: Sequence[Mapping[str, Any]]
    """The volume and the claim of the share in the namespace of the registry."""
    others: Sequence[str] = ()
    """The namespaces that have claims of the share, too."""

    @property
    def host(self) -> str:
        return self.address.partition(":")[0]


def requested(settings: Mapping[str, Any], own_server: str) -> Request:
    """The request of these settings of the cluster; ``own_server`` is the address of the machine of the group storage.

    Raises WrongInput for an address that is none of the cluster's Services, and for no or several possible shares.
    """
    host = _address(str(settings[ADDRESS]).strip(), str(settings[SUBNET]).strip())
    entry = _share(settings[storage.SETTING], str(settings[SHARE]))
    volumes = storage.objects([{**entry, "namespaces": [NAMESPACE]}], own_server)
    folder = f"{storage.sources(volumes)[0].rstrip('/')}/{FOLDER}"
    others = [each for each in storage.shares([entry])[0].namespaces if each != NAMESPACE]
    return Request(f"{host}:{PORT}", str(settings[IMAGE]), str(entry["name"]), folder, volumes, others)


def _address(given: str, subnet: str) -> str:
    network = ipaddress.IPv4Network(subnet, strict=False)
    if not given:
        if network.num_addresses <= _OFFSET + 1:
            raise WrongInput(
                f"{SUBNET} is {subnet}, which is too small for a fixed address",
                "a free address of Services",
                f"set {ADDRESS} to one",
            )
        return str(network[_OFFSET])
    try:
        wrong = not network[0] < ipaddress.IPv4Address(given) < network[-1]
    except ValueError:
        wrong = True
    if wrong:
        raise WrongInput(f"{ADDRESS} is {given!a}", f"an address of Services: of {SUBNET}, {subnet}", "correct it")
    return given


def _share(value: Any, name: str) -> Mapping[str, Any]:
    """The entry of gpunodes_storage that has the images."""
    names = [each.name for each in storage.shares(value)]
    remedy = "see `gpunodes help --page registry`"
    if not names:
        raise WrongInput(f"{storage.SETTING} has no share", "one that keeps the images of the registry", remedy)
    if name and name not in names:
        raise WrongInput(f"{SHARE} is {name!a}, which {storage.SETTING} does not have", f"one of {', '.join(names)}")
    if not name and len(names) > 1:
        raise WrongInput(
            f"{storage.SETTING} has the shares {', '.join(names)}", f"one of them in {SHARE}", "set it to one of them"
        )
    found: Mapping[str, Any] = value[names.index(name or names[0])]
    return found


# What the cluster gets


def namespace() -> dict[str, Any]:
    """The namespace, of which Pod Security admits the strictest pods only."""
    labels = {**LABELS, "pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}


def secret(data: Mapping[str, str]) -> dict[str, Any]:
    """All that is made once: CA, certificate, user and password (operations/registry_server/material.py)."""
    return _object("v1", "Secret", type="Opaque", stringData=dict(data))


def public(request: Request, ca: str, certificate: str) -> dict[str, Any]:
    """What nodes and commands read: they need no access to the Secret."""
    data = {"address": request.address, "ca.crt": ca, "tls.crt": certificate, "config.yml": CONFIG}
    made = _object("v1", "ConfigMap", data=data)
    made["metadata"]["annotations"] = {SHARE_NOTE: request.folder}
    return made


def service(request: Request) -> dict[str, Any]:
    """The fixed address."""
    ports = [{"name": "https", "port": PORT, "targetPort": PORT, "protocol": "TCP"}]
    spec = {"clusterIP": request.host, "selector": _selector(), "ports": ports}
    return _object("v1", "Service", spec=spec)


def login_record(namespace: str, uid: str) -> dict[str, Any]:
    """That an administrator gave a namespace its login, in a Secret with this UID.

    Who may write Secrets of a namespace could make one that looks like a login, and wait there for a new password.
    """
    made = _object("v1", "ConfigMap", data={"uid": uid})
    made["metadata"]["name"] = record_name(namespace)
    return made


def record_name(namespace: str) -> str:
    """The name of that object."""
    return f"login-{namespace}"


def deployment(request: Request, certificate: str, htpasswd: str) -> dict[str, Any]:
    """One pod, which is replaced when its certificate, login or configuration changes.

    It reads certificate and configuration at its start only, and the kubelet brings it a new login with a delay. Two
    pods would write the same files: a new one starts after the old one has ended.
    """
    content = hashlib.sha256(f"{CONFIG}{certificate}{htpasswd}".encode()).hexdigest()
    metadata = {"labels": POD_LABELS, "annotations": {_CONTENT: content}}
    spec = {
        "replicas": 1,
        "revisionHistoryLimit": 0,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": _selector()},
        "template": {"metadata": metadata, "spec": _pod(request)},
    }
    made = _object("apps/v1", "Deployment", spec=spec)
    made["metadata"]["annotations"] = {SHARE_NOTE: request.folder}
    return made


def _pod(request: Request) -> dict[str, Any]:
    """It conforms to the Pod Security Standard "restricted"."""
    keys = [{"key": key, "path": key} for key in ("htpasswd", "tls.crt", "tls.key")]
    worker = {"matchExpressions": [{"key": _CONTROL_PLANE, "operator": "DoesNotExist"}]}
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": worker}]}
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # As add-ons: where all workers have a taint, such as that of GPUs, control planes have it.
        "tolerations": [{"key": _CONTROL_PLANE, "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"nodeAffinity": preferred},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER_ID,
            "runAsGroup": _USER_ID,
            "fsGroup": _USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(request)],
        "volumes": [
            {"name": "data", "persistentVolumeClaim": {"claimName": request.share}},
            {"name": "config", "configMap": {"name": NAME, "items": [{"key": "config.yml", "path": "config.yml"}]}},
            # Neither the CA's key nor the password itself.
            {"name": "certificates", "secret": {"secretName": NAME, "defaultMode": 0o440, "items": keys}},
        ],
    }


def _container(request: Request) -> dict[str, Any]:
    # It needs no login, and shows that the server answers with its certificate.
    probe = {"httpGet": {"path": "/", "port": PORT, "scheme": "HTTPS"}, "timeoutSeconds": 10}
    return {
        "name": NAME,
        "image": request.image,
        "command": ["registry", "serve", f"{_CONFIG}/config.yml"],
        # Otherwise it sends traces to a collector that nobody runs (distribution 3, tracing/tracing.go).
        "env": [{"name": "OTEL_TRACES_EXPORTER", "value": "none"}],
        "ports": [{"name": "https", "containerPort": PORT, "protocol": "TCP"}],
        "readinessProbe": {**probe, "periodSeconds": 10},
        "livenessProbe": {**probe, "periodSeconds": 30, "failureThreshold": 6},
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            # A folder of its own in the share: the kubelet makes it, with the mode of the share.
            {"name": "data", "mountPath": _DATA, "subPath": FOLDER},
            {"name": "config", "mountPath": _CONFIG, "readOnly": True},
            {"name": "certificates", "mountPath": _CERTIFICATES, "readOnly": True},
        ],
    }


def verifying_pod(name: str, node: str, image: str, secret_name: str) -> dict[str, Any]:
    """A pod on a node, whatever its taints, that runs an image of the registry once and ends."""
    container = {
        "name": "verify",
        "image": image,
        "imagePullPolicy": "Always",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {
        "nodeName": node,
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "tolerations": [{"operator": "Exists"}],
        "imagePullSecrets": [{"name": secret_name}],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
    }
    made = _object("v1", "Pod", spec=spec)
    made["metadata"] |= {"name": name, "labels": {**LABELS, "app.kubernetes.io/name": "verify"}}
    return made


def is_own(found: Mapping[str, Any]) -> bool:
    """Whether gpunodes made an object for the registry, or for the storage that it uses."""
    given = (found.get("metadata") or {}).get("labels") or {}
    return any(all(given.get(key) == value for key, value in own.items()) for own in (LABELS, storage.LABELS))


def _selector() -> dict[str, str]:
    return {"app.kubernetes.io/name": NAME}


def _object(version: str, kind: str, **content: Any) -> dict[str, Any]:
    metadata = {"name": NAME, "namespace": NAMESPACE, "labels": dict(LABELS)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}


# What nodes get

# As cluster_info reports it (ansible/module_utils/cluster/nodes.py).
_HOST_PORT = re.compile(r"(\d{1,3}\.){3}\d{1,3}:\d{1,5}")


def is_trusted(found: Mapping[str, str], settings: Mapping[str, Any]) -> bool:
    """Whether nodes may trust the registry that a cluster reports: only at an address of its Services.

    Who may make namespaces could publish a CA of their own for a registry elsewhere, and replace its owner's files.
    """
    try:
        host = ipaddress.IPv4Address(str(found.get("address", "")).partition(":")[0])
        return host in ipaddress.IPv4Network(str(settings[SUBNET]).strip(), strict=False)
    except ValueError:
        return False


def trust(address: str, ca: str, runtimes: Collection[str]) -> Spec:
    """The files by which the runtimes of a node trust the registry; both read them at each pull, without a restart.

    Sources: containerd, docs/hosts.md; docs.docker.com, "Verify repository client with certificates".
    """
    found = _files(address, ca).items()
    return Spec(files=tuple(File(path, content) for path, content in found if path.split("/")[2] in runtimes))


def distrust(address: str) -> Spec:
    """The removal of these files, and of the folders that are only for this registry."""
    paths = list(_files(address, ""))
    folders = {f"{path.rpartition('/')[0]}/" for path in paths}
    return Spec(absent=(*paths, *sorted(folders)))


def _files(address: str, ca: str) -> dict[str, str]:
    if not _HOST_PORT.fullmatch(address):
        raise WrongInput(f"{address!a} is not the address of a registry", "HOST:PORT, as `registry up` sets it")
    containerd = f"/etc/containerd/certs.d/{address}"
    hosts = f'# Managed by gpunodes.\nserver = "https://{address}"\nca = "{containerd}/ca.crt"\n'
    return {
        f"{containerd}/ca.crt": ca,
        f"{containerd}/hosts.toml": hosts,
        f"/etc/docker/certs.d/{address}/ca.crt": ca,
    }
