"""The objects of the registry in the cluster. An object that gpunodes did not make for it is never touched."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from gpunodes import shape
from gpunodes.engine.cluster.errors import Refused, check
from gpunodes.engine.cluster.workloads import Workloads, line
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.planner import registry, storage
from gpunodes.planner.registry import NAME, NAMESPACE

_APPLY = "application/apply-patch+yaml"
_GONE_S = 120.0
_PATHS = {
    "Namespace": "/api/v1/namespaces",
    "PersistentVolume": "/api/v1/persistentvolumes",
    "PersistentVolumeClaim": f"/api/v1/namespaces/{NAMESPACE}/persistentvolumeclaims",
    "Secret": f"/api/v1/namespaces/{NAMESPACE}/secrets",
    "ConfigMap": f"/api/v1/namespaces/{NAMESPACE}/configmaps",
    "Service": f"/api/v1/namespaces/{NAMESPACE}/services",
    "Deployment": f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments",
    "Pod": f"/api/v1/namespaces/{NAMESPACE}/pods",
}
_LABEL = f"app.kubernetes.io/name={NAME}"
_VERIFYING = "app.kubernetes.io/name=verify"
_PUBLIC = {
    "data": {
        "address": shape.Pattern("HOST:PORT", r"(\d{1,3}\.){3}\d{1,3}:\d{1,5}"),
        "ca.crt": str,
        "tls.crt": str,
    }
}
_SERVICE = {"spec": {"clusterIP": shape.Pattern("an IPv4 address", r"(\d{1,3}\.){3}\d{1,3}")}}
_RECORD = {"data": {"uid": shape.Pattern("a UID", r"[A-Za-z0-9-]{1,64}")}}
_SECRET = {"data": shape.Named(str, 100)}
_NODE = {
    "metadata": {"name": shape.Pattern("a node's name", r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")},
    "status": {
        "nodeInfo": {"architecture": str},
        "conditions": shape.Optional(shape.Many({"type": str, "status": str}, 100)),
    },
}
_REFUSED = (400, 403, 422)
"""What an object that the API server does not allow is answered with."""


@dataclass(frozen=True, slots=True)
class Public:
    """What everyone may know of the registry."""

    address: str
    ca: str
    certificate: str


class RegistryServer(Workloads):
    """The registry as the cluster has it. The methods raise as those of ``Api``."""

    def public(self) -> Public | None:
        """What `registry up` has published; None without it."""
        found = self._own("ConfigMap", NAME)
        if found is None:
            return None
        check(found, _PUBLIC, f"the ConfigMap {NAMESPACE}/{NAME}")
        return Public(*(str(found["data"][key]) for key in ("address", "ca.crt", "tls.crt")))

    def address(self) -> str:
        """HOST:PORT of the registry: what is published, or that of its Service if that is not valid; "" for none."""
        found = self._own("ConfigMap", NAME)
        if found is not None and not shape.wrong(found, _PUBLIC):
            return str(found["data"]["address"])
        service = self._own("Service", NAME)
        if service is None or shape.wrong(service, _SERVICE):
            return ""
        return f"{service['spec']['clusterIP']}:{registry.PORT}"

    def folder(self) -> str:
        """SERVER:PATH of the images that it serves, or served until it was stopped; "" if that is unknown."""
        found = self.deployment() or self._own("ConfigMap", NAME) or {}
        notes = (found.get("metadata") or {}).get("annotations") or {}
        return line(notes.get(registry.SHARE_NOTE, ""))

    def secret(self) -> dict[str, str] | None:
        """The content of the Secret, decoded; None without it. Raises GpunodesError if it cannot be decoded."""
        found = self._own("Secret", NAME)
        if found is None:
            return None
        check(found, _SECRET, f"the Secret {NAMESPACE}/{NAME}")
        try:
            return {key: base64.b64decode(text, validate=True).decode() for key, text in found["data"].items()}
        except (binascii.Error, ValueError):
            return {}

    def recorded(self, namespace: str) -> str:
        """The UID of the Secret that `registry login` made in a namespace for this registry; "" if none is known."""
        found = self._own("ConfigMap", registry.record_name(namespace))
        return "" if found is None or shape.wrong(found, _RECORD) else str(found["data"]["uid"])

    def recorded_namespaces(self) -> list[str]:
        """The namespaces that have such a record."""
        labels = quote(",".join(f"{key}={value}" for key, value in registry.LABELS.items()))
        found = self._list(f"{_PATHS['ConfigMap']}?labelSelector={labels}", ("metadata.name",))
        first = registry.record_name("")
        names = [str(each["metadata"]["name"]) for each in found]
        return [each.removeprefix(first) for each in names if each.startswith(first)]

    def forget(self, namespace: str) -> None:
        """Delete the record of a login; one that is gone is no error."""
        name = registry.record_name(namespace)
        if self._own("ConfigMap", name) is not None:
            self._delete(f"{_PATHS['ConfigMap']}/{quote(name, safe='')}")

    def deployment(self) -> dict[str, Any] | None:
        """The Deployment; None without it."""
        return self._own("Deployment", NAME)

    def shares(self, name: str) -> bool:
        """Whether `gpunodes storage up` has made volumes of a share."""
        path = f"{_PATHS['PersistentVolume']}?labelSelector={quote(f'{storage.SELECTOR},{storage.SHARE_LABEL}={name}')}"
        return bool(self._list(path, ("metadata.name",)))

    def has_namespace(self) -> bool:
        """Whether the namespace exists; raises GpunodesError while it is being deleted."""
        found = self._own("Namespace", NAMESPACE)
        if found is not None and "deletionTimestamp" in found["metadata"]:
            raise GpunodesError(
                f"the namespace {NAMESPACE} is being deleted", "none, or one that stays", "run the command again later"
            )
        return found is not None

    def apply(self, wanted: Mapping[str, Any], *, dry_run: bool = False) -> str:
        """Bring an object to its wanted state; its kind and name if that is a change, else "".

        Raises WrongInput for an object of another owner, and for one that the API server does not allow.
        """
        kind, name = str(wanted["kind"]), str(wanted["metadata"]["name"])
        before = self._own(kind, name)
        query = "fieldManager=gpunodes&force=true&fieldValidation=Strict"
        path = f"{_PATHS[kind]}/{name}?{query}{'&dryRun=All' if dry_run else ''}"
        try:
            after = self._call("PATCH", path, wanted, _APPLY).body
        except Refused as error:
            if error.status not in _REFUSED:
                raise
            raise WrongInput(
                f"the API server refuses the {kind} {name}: {line(error)}",
                "settings of the registry that the cluster allows",
                f"set {registry.ADDRESS} to a free address of Services" if kind == "Service" else "correct that",
            ) from error
        changed = before is None or _comparable(before) != _comparable(after)
        return f"{kind} {name}" if changed else ""

    def why_not_ready(self, deployment: Mapping[str, Any]) -> str:
        """Why the registry is not ready; "" if it is."""
        return "" if self.is_ready(deployment) else self.reason_of(NAMESPACE, _LABEL, deployment)

    def pod(self) -> str:
        """The name of the pod that serves; raises GpunodesError without one."""
        deployment = self.deployment()
        found = self.serving_pod(NAMESPACE, _LABEL, deployment) if deployment else None
        if found is None:
            raise GpunodesError("the registry has no pod that is ready", "one that is", "run the same command again")
        return str(found["metadata"]["name"])

    def ready_nodes(self) -> dict[str, str]:
        """The architecture of each ready node, by name."""
        keep = ("metadata.name", "status.nodeInfo.architecture", "status.conditions")
        found = {}
        for node in self._list("/api/v1/nodes", keep):
            if shape.wrong(node, _NODE):
                continue
            conditions = {each["type"]: each["status"] for each in node["status"].get("conditions") or ()}
            if conditions.get("Ready") == "True":
                found[str(node["metadata"]["name"])] = str(node["status"]["nodeInfo"]["architecture"])
        return found

    def start(self, pod: Mapping[str, Any]) -> None:
        """Create a verifying pod."""
        self._call("POST", f"{_PATHS['Pod']}?fieldValidation=Strict", pod)

    def verifying(self) -> list[dict[str, Any]]:
        """The verifying pods."""
        return self.labelled_pods(NAMESPACE, _VERIFYING)

    def end_verifying(self, names: Iterable[str]) -> None:
        """Delete these verifying pods; one that is gone is no error."""
        for each in names:
            self._delete(f"{_PATHS['Pod']}/{quote(each, safe='')}")

    def stop(self) -> bool:
        """Delete the Deployment, and wait until its pod has ended; whether there was one."""
        found = self.deployment()
        if found is not None:
            self.remove_object(f"{_PATHS['Deployment']}/{NAME}", str(found["metadata"]["uid"]))
        self.wait_gone(NAMESPACE, _LABEL)
        return found is not None

    def remove(self) -> list[str]:
        """Delete the namespace with all that is in it, and the volumes; the images stay. Returns what was deleted."""
        removed = []
        for kind, name in [("Namespace", NAMESPACE), *(("PersistentVolume", name) for name in self.volumes())]:
            if (found := self._own(kind, name)) is not None:
                self.remove_object(f"{_PATHS[kind]}/{quote(name, safe='')}", str(found["metadata"]["uid"]))
                removed.append(f"{kind} {name}")
        self._wait_removed()
        return removed

    def volumes(self) -> list[str]:
        """The volumes of shares whose claim is in the namespace of the registry, or was."""
        path = f"{_PATHS['PersistentVolume']}?labelSelector={quote(storage.SELECTOR)}"
        volumes = self._list(path, ("metadata.name", "spec.claimRef"))
        return [
            str(each["metadata"]["name"])
            for each in volumes
            if ((each.get("spec") or {}).get("claimRef") or {}).get("namespace") == NAMESPACE
        ]

    def _wait_removed(self) -> None:
        """Wait for the volumes, too: what `registry up` applied to one that is being deleted would go with it."""
        deadline = time.monotonic() + _GONE_S
        while left := self._left():
            if time.monotonic() > deadline:
                raise GpunodesError(
                    f"the {left} is being deleted, and is still there after {_GONE_S:.0f} s",
                    "an object that is gone",
                    f"see `kubectl describe {left}`, then run the same command again",
                )
            time.sleep(1)

    def _left(self) -> str:
        """What is still there of the namespace and the volumes, "" for nothing."""
        if self._find(f"{_PATHS['Namespace']}/{NAMESPACE}") is not None:
            return f"namespace {NAMESPACE}"
        return next((f"persistentvolume {name}" for name in self.volumes()), "")

    def _own(self, kind: str, name: str) -> dict[str, Any] | None:
        """An object of the registry; None without it. Raises WrongInput if gpunodes did not make it."""
        found: dict[str, Any] | None = self._find(f"{_PATHS[kind]}/{quote(name, safe='')}")
        if found is not None and not registry.is_own(found):
            where = "" if kind in {"Namespace", "PersistentVolume"} else f" in the namespace {NAMESPACE}"
            raise WrongInput(
                f"the cluster has a {kind} {name}{where} that gpunodes did not make",
                "objects of the registry, or none",
                "delete it if nothing needs it",
            )
        return found


def _comparable(found: Mapping[str, Any]) -> Any:
    """An object without what changes by itself."""
    metadata = {
        key: value
        for key, value in found["metadata"].items()
        if key not in {"managedFields", "resourceVersion", "generation", "creationTimestamp", "uid"}
    }
    return {key: value for key, value in found.items() if key not in {"status", "metadata"}} | {"metadata": metadata}
