"""The objects of notebooks in the cluster. An object that gpunodes did not make for a notebook is never touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from gpunodes.engine.cluster.api import CONFLICT
from gpunodes.engine.cluster.errors import Refused, check
from gpunodes.engine.cluster.workloads import Workloads
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.planner import notebooks, storage
from gpunodes.planner.notebooks import PATHS, Place, Request
from gpunodes.shape import Many, Optional

_SERVICE = {"spec": {"ports": Many({"nodePort": Optional(int)}, 10)}}


class Notebooks(Workloads):
    """The notebooks of a cluster. The methods raise as those of ``Api``."""

    def found(self, place: Place) -> dict[str, Any]:
        """The objects of a notebook, by kind; raises WrongInput if one of that name is not ours."""
        return {kind: each for kind in PATHS if (each := self.one(place, kind)) is not None}

    def one(self, place: Place, kind: str) -> dict[str, Any] | None:
        """One of its objects, None without it; raises WrongInput as ``found``."""
        found: dict[str, Any] | None = self._find(place.path(kind))
        if found is not None and not notebooks.is_own(found, place):
            raise WrongInput(
                f"the namespace {place.namespace} has a {kind} {place.objects} that gpunodes did not make",
                "objects of this notebook, or none",
                "give the notebook another name",
            )
        return found

    def check_namespace(self, name: str) -> None:
        """Raise WrongInput for a namespace that does not exist."""
        if self._find(f"/api/v1/namespaces/{name}") is None:
            raise WrongInput(
                f"the cluster has no namespace {name}",
                "a namespace that exists",
                f"create it first: kubectl create namespace {name}",
            )

    def claims(self, namespace: str) -> list[str]:
        """The names of the claims of `gpunodes storage` in a namespace."""
        path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims?labelSelector={quote(storage.SELECTOR)}"
        return sorted(str(each["metadata"]["name"]) for each in self._list(path, ("metadata.name",)))

    def has_claim(self, namespace: str, name: str) -> bool:
        """Whether a namespace has a claim."""
        return self._find(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}") is not None

    def make(self, place: Place, body: Mapping[str, Any], *, dry_run: bool = False) -> None:
        """Create an object; raises WrongInput if another client has just created one of its name."""
        path = f"{PATHS[body['kind']].format(place.namespace)}?fieldManager=gpunodes&fieldValidation=Strict"
        try:
            self._call("POST", path + ("&dryRun=All" if dry_run else ""), body)
        except Refused as error:
            if error.status != CONFLICT or not self._is_made(place, body):
                raise

    def _is_made(self, place: Place, body: Mapping[str, Any]) -> bool:
        """Whether an object that exists is this one: a repeated request whose first attempt succeeded."""
        now = self._find(place.path(body["kind"])) or {}
        return notebooks.is_own(now, place) and (body["kind"] != "Secret" or now.get("data") == body["data"])

    def token(self, place: Place) -> str:
        """The token of a notebook; raises GpunodesError without a valid one."""
        token = notebooks.token_of(self.one(place, "Secret") or {})
        if not token:
            raise GpunodesError(
                f"the Secret {place.objects} in the namespace {place.namespace} has no token of gpunodes",
                "the token of `gpunodes jupyter up`",
                f"run `{place.command('down')}`, then `up` again; a home on shared storage stays",
            )
        return token

    def node_port(self, place: Place) -> int | None:
        """The port of the notebook on every node; None without one."""
        service = self.one(place, "Service")
        if service is None:
            return None
        check(service, _SERVICE, f"the Service {place.objects}")
        return next((each["nodePort"] for each in service["spec"]["ports"] if each.get("nodePort")), None)

    def pod(self, place: Place) -> str:
        """The name of the pod of a notebook that is ready; "" without one."""
        deployment = self.one(place, "Deployment")
        found = self.serving_pod(place.namespace, _label(place), deployment) if deployment else None
        return "" if found is None else str(found["metadata"]["name"])

    def reason(self, place: Place, deployment: Mapping[str, Any]) -> str:
        """Why a notebook is not ready, as scheduler, kubelet or API server report it; on one line."""
        return self.reason_of(place.namespace, _label(place), deployment)

    def all(self) -> list[tuple[Place, dict[str, Any]]]:
        """The Deployments of all notebooks."""
        path = f"/apis/apps/v1/deployments?labelSelector={quote(notebooks.PART)}"
        made = []
        for each in self._list(path):
            meta = each["metadata"]
            place = Place(str((meta.get("labels") or {}).get(notebooks.LABEL, "")), str(meta.get("namespace")))
            if notebooks.is_place(place) and meta["name"] == place.objects and notebooks.is_own(each, place):
                made.append((place, each))
        return sorted(made, key=lambda each: (each[0].namespace, each[0].name))

    def remove(self, place: Place, found: Mapping[str, Any]) -> None:
        """Delete these objects of a notebook, and wait until its pods are gone; the NetworkPolicy is last."""
        for kind in reversed([kind for kind in PATHS if kind in found]):
            if kind == "NetworkPolicy":
                self.wait_gone(place.namespace, _label(place))
            self.remove_object(place.path(kind), str(found[kind]["metadata"]["uid"]))
        self.wait_gone(place.namespace, _label(place))


def missing(found: Mapping[str, Any], wanted: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The wanted objects that do not exist."""
    return [each for each in wanted if each["kind"] not in found]


def request_of(place: Place, deployment: Mapping[str, Any]) -> Request:
    """The request of a notebook that exists; raises GpunodesError if another client has overwritten it."""
    request = notebooks.requested(deployment)
    if request is None:
        raise GpunodesError(
            f"the Deployment {place.objects} in the namespace {place.namespace} has no valid {notebooks.REQUEST}",
            "a Deployment of `gpunodes jupyter up`",
            f"run `{place.command('down')}`, then `up` again; a home on shared storage stays",
        )
    return request


def _label(place: Place) -> str:
    return f"{notebooks.LABEL}={place.name}"
