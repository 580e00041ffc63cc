"""Notebooks: what is requested, and the objects that the cluster gets for it. Pure.

The server listens on the loopback address of its pod: neither other pods nor nodes reach it, whether or not the network
add-on enforces NetworkPolicies. `gpunodes jupyter open` forwards a port to it as `kubectl port-forward` does.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from gpunodes import shape
from gpunodes.ansible.module_utils.devices import GPU, SHARING
from gpunodes.errors import WrongInput, together
from gpunodes.planner import namespaces

LABEL = "gpunodes.dev/notebook"
"""The label with the notebook's name, of its objects and its pod."""
PART = "app.kubernetes.io/part-of=gpunodes-jupyter"
REQUEST = "gpunodes.dev/notebook-request"
"""The annotation of the Deployment with the request, as JSON."""
PORT = 8888
DEFAULT = "notebook"
_HOME = "/home/jovyan"
_SECRETS = "/run/secrets/gpunodes-jupyter"
# The user of the Jupyter Docker Stacks, and its group. Source: jupyter/docker-stacks, docker-stacks-foundation.
_USER, _GROUP = 1000, 100
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_CLAIM = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_POOL = re.compile(r"(?=.{1,63}$)[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}")
TOKEN = re.compile(r"[A-Za-z0-9_-]{32,128}")
# The server is ready when it answers; only a program in the pod reaches it.
_READY = (
    "import urllib.request as u;"
    f"u.build_opener(u.ProxyHandler({{}})).open('http://127.0.0.1:{PORT}/api', timeout=5).read()"
)
# Kind -> the path of its objects, with the namespace; in the order in which they are made. The policy is first.
PATHS = {
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Service": "/api/v1/namespaces/{}/services",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a notebook is: the identity of its objects."""

    name: str
    namespace: str = "default"

    @property
    def objects(self) -> str:
        """The name of its objects."""
        return f"jupyter-{self.name}"

    @property
    def folder(self) -> str:
        """Its home in a share, which is one folder for all its namespaces. Neither name has a dot."""
        return f"{self.objects}.{self.namespace}"

    def path(self, kind: str) -> str:
        """The path of one of its objects in the API."""
        return f"{PATHS[kind].format(self.namespace)}/{self.objects}"

    def command(self, name: str) -> str:
        """A command line for it."""
        words = ["gpunodes jupyter", name, *([] if self.name == DEFAULT else [self.name])]
        return " ".join([*words, *([] if self.namespace == "default" else [f"--namespace {self.namespace}"])])

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Request:
    """What a notebook gets. It is fixed while the notebook exists: a change would end its kernels."""

    image: str
    gpus: int = 1
    cpus: int = 4
    memory: int = 16
    """GiB."""
    storage: str = ""
    """The claim with its home folder; "" for a folder that ends with the pod."""
    pool: str = ""
    """The pool of its node; "" for any."""
    node_port: bool = False


_SHAPE = {
    "image": shape.Pattern("an image", _IMAGE.pattern),
    "gpus": int,
    "cpus": int,
    "memory": int,
    "storage": str,
    "pool": str,
    "node_port": bool,
}


_VOLUME_MOUNTS = shape.Optional(shape.Many({"subPath": shape.Optional(str)}, 100))
_CONTAINERS = shape.Many({"volumeMounts": _VOLUME_MOUNTS}, 100)
_MOUNTS = {"spec": {"template": {"spec": {"containers": _CONTAINERS}}}}


def is_place(place: Place) -> bool:
    """Whether both names are valid."""
    return bool(_NAME.fullmatch(place.name) and namespaces.is_name(place.namespace))


def check_place(place: Place) -> None:
    """Raise WrongInput for what is no name of a notebook or no namespace."""
    if not _NAME.fullmatch(place.name):
        raise WrongInput(
            f"{place.name!a} is not the name of a notebook",
            "lower-case letters, digits and dashes, at most 40",
            "name it otherwise",
        )
    namespaces.check(place.namespace)


def check(request: Request) -> None:
    """Raise WrongInput for everything that is wrong with a request."""
    wrong = [
        WrongInput(f"{value!a} is not {what}", wanted, f"correct {option}")
        for value, pattern, what, wanted, option in (
            (request.image, _IMAGE, "an image", "one such as registry.example/name:1.0", "--image"),
            (request.storage or "x", _CLAIM, "the name of a claim", "one of `kubectl get pvc`", "--storage"),
            (request.pool or "x", _POOL, "the name of a pool", "a group of the inventory", "--pool"),
        )
        if not pattern.fullmatch(value)
    ]
    if wrong:
        raise together(wrong)


def labels(place: Place) -> dict[str, str]:
    """The labels of a notebook's objects."""
    key, _, value = PART.partition("=")
    return {"app.kubernetes.io/managed-by": "gpunodes", key: value, LABEL: place.name}


def is_own(found: Mapping[str, Any], place: Place) -> bool:
    """Whether gpunodes made an object, for this notebook."""
    given = (found.get("metadata") or {}).get("labels") or {}
    return all(given.get(key) == value for key, value in labels(place).items())


def requested(deployment: Mapping[str, Any]) -> Request | None:
    """The request in the annotation of a Deployment; None without a valid one."""
    try:
        found = json.loads(((deployment.get("metadata") or {}).get("annotations") or {}).get(REQUEST, ""))
    except (ValueError, RecursionError, TypeError):
        return None
    if shape.wrong(found, _SHAPE):
        return None
    request = Request(**{each.name: found[each.name] for each in fields(Request)})
    try:
        check(request)
    except WrongInput:
        return None
    return request


def folder_of(deployment: Mapping[str, Any], place: Place) -> str:
    """The home that a notebook has in its share: one of an earlier version has the folder without the namespace."""
    if shape.wrong(deployment, _MOUNTS):
        return place.folder
    containers = deployment["spec"]["template"]["spec"]["containers"]
    used = {each.get("subPath") for one in containers for each in one.get("volumeMounts", ())}
    return place.objects if place.objects in used else place.folder


def differences(before: Request, given: Mapping[str, Any]) -> list[str]:
    """What the user gave and a notebook does not have, as `gpus 1, not 2`."""
    old = asdict(before)
    return [
        f"{name} {old[name] or 'none'}, not {value or 'none'}" for name, value in given.items() if old[name] != value
    ]


def objects(place: Place, request: Request, token: str) -> list[dict[str, Any]]:
    """The objects of a notebook, in the order in which they are made."""
    made = [_policy(place, request), _secret(place, token)]
    if request.node_port:
        made.append(_service(place))
    return [*made, _deployment(place, request)]


def token_of(secret: Mapping[str, Any]) -> str:
    """The token in a Secret; "" for what is none of ours."""
    encoded = (secret.get("data") or {}).get("token")
    try:
        text = base64.b64decode(str(encoded), validate=True).decode("ascii")
    except ValueError:
        return ""
    return text if TOKEN.fullmatch(text) else ""


def _policy(place: Place, request: Request) -> dict[str, Any]:
    """Nothing reaches the pod, nor other programs that its user starts there; with a node port, the server only."""
    ports: list[dict[str, Any]] = [{"ports": [{"protocol": "TCP", "port": PORT}]}] if request.node_port else []
    spec = {"podSelector": {"matchLabels": {LABEL: place.name}}, "policyTypes": ["Ingress"], "ingress": ports}
    return _object("networking.k8s.io/v1", "NetworkPolicy", place, spec=spec)


def _secret(place: Place, token: str) -> dict[str, Any]:
    data = {"token": base64.b64encode(token.encode()).decode()}
    return _object("v1", "Secret", place, type="Opaque", immutable=True, data=data)


def _service(place: Place) -> dict[str, Any]:
    port = {"name": "http", "port": PORT, "targetPort": PORT, "protocol": "TCP"}
    spec = {"type": "NodePort", "selector": {LABEL: place.name}, "ports": [port]}
    return _object("v1", "Service", place, spec=spec)


def _deployment(place: Place, request: Request) -> dict[str, Any]:
    """One pod. A new one starts after the old one has released its GPUs and its home."""
    template = {"metadata": {"labels": labels(place)}, "spec": _pod(place, request)}
    spec = {
        "replicas": 1,
        "revisionHistoryLimit": 0,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": {LABEL: place.name}},
        "template": template,
    }
    made = _object("apps/v1", "Deployment", place, spec=spec)
    made["metadata"]["annotations"] = {REQUEST: json.dumps(asdict(request), sort_keys=True)}
    return made


def _pod(place: Place, request: Request) -> dict[str, Any]:
    """It conforms to the Pod Security Standard "restricted"."""
    home = {"persistentVolumeClaim": {"claimName": request.storage}} if request.storage else {"emptyDir": {}}
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _GROUP,
            "fsGroup": _GROUP,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(place, request)],
        "volumes": [
            {"name": "home", **home},
            # The group of the pod may read it.
            {"name": "token", "secret": {"secretName": place.objects, "defaultMode": 0o440}},
            # Processes of PyTorch exchange data there; the runtime's default is 64 MiB.
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        ],
    }
    if request.pool:
        pod["nodeSelector"] = {"gpunodes.dev/pool": request.pool}
    if request.gpus:
        pod["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    if request.gpus > 1:
        # Several shares of a node may be of one GPU: who requests several GPUs wants whole ones.
        terms = [{"matchExpressions": [{"key": SHARING, "operator": "DoesNotExist"}]}]
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        pod["affinity"] = {"nodeAffinity": required}
    return pod


def _container(place: Place, request: Request) -> dict[str, Any]:
    address = "*" if request.node_port else "127.0.0.1"
    limits = {"cpu": str(request.cpus), "memory": f"{request.memory}Gi"}
    return {
        "name": "jupyter",
        "image": request.image,
        # Not the entry point: that of an image prepares its environment.
        "args": ["jupyter", "lab", f"--ip={address}", f"--port={PORT}", "--ServerApp.port_retries=0", "--no-browser"],
        "workingDir": _HOME,
        # The token is in a file: a variable would be in the environment of every cell, and in what `env` prints there.
        "env": [{"name": "HOME", "value": _HOME}, {"name": "JUPYTER_TOKEN_FILE", "value": f"{_SECRETS}/token"}],
        "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
        "readinessProbe": {
            "exec": {"command": ["python3", "-c", _READY]},
            "periodSeconds": 10,
            "timeoutSeconds": 10,
        },
        "resources": {
            "requests": {"cpu": "250m", "memory": "512Mi"},
            "limits": {**limits, **({GPU: str(request.gpus)} if request.gpus else {})},
        },
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            # A folder of its own in the share: the kubelet makes it, with the mode of the share.
            {"name": "home", "mountPath": _HOME, **({"subPath": place.folder} if request.storage else {})},
            {"name": "token", "mountPath": _SECRETS, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - a path of the container
        ],
    }


def _object(version: str, kind: str, place: Place, **content: Any) -> dict[str, Any]:
    metadata = {"name": place.objects, "namespace": place.namespace, "labels": labels(place)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}
