"""The shape that responses of the API must have: another program than the API server may have responded."""

from __future__ import annotations

import re
from typing import Any

from gpunodes import shape
from gpunodes.ansible.module_utils import kube_api
from gpunodes.shape import Many, Maybe, Named, Optional

ANY_NUMBER = 10_000_000
"""More than fits into an object of the API, or into a response: a node must not invalidate a list by its labels."""
_METADATA = {
    "name": str,
    "namespace": Optional(str),
    "labels": Optional(Maybe(Named(str, ANY_NUMBER))),
    "annotations": Optional(Maybe(Named(str, ANY_NUMBER))),
}
_OBJECT = {
    "metadata": {**_METADATA, "uid": str, "resourceVersion": str},
    "spec": Optional(Maybe({"taints": Optional(Maybe(Many({"key": str, "effect": str}, ANY_NUMBER)))})),
    "status": Optional(Maybe({})),
}
# A list is requested with some of these fields only.
_PARTIAL = {**_OBJECT, "metadata": _METADATA}
_OBJECTS = {"metadata": Optional(Maybe({"continue": Optional(Maybe(str))})), "items": Many(_PARTIAL, ANY_NUMBER)}

_KINDS = (
    "nodes|pods|leases|daemonsets|deployments|statefulsets|replicasets|replicationcontrollers|jobs|cronjobs|"
    "clusterrolebindings|rolebindings|serviceaccounts|secrets|persistentvolumes|persistentvolumeclaims|events|"
    "resourceslices|configmaps"
)
# A namespace, a role or another object may have the name of a kind.
_LISTS = re.compile(rf"/apis?(/[a-z0-9.]+)?/v\d\w*(/namespaces/[^/?]+)?/({_KINDS})(\?|$)")


def violation(method: str, path: str, body: Any) -> str:
    """How the body of a response contradicts its request, "" if it fits."""
    if method in {"LOCK", "DELETE"} or path == "/version" or path.endswith("/eviction"):
        return ""
    if kube_api.is_log(path):
        return shape.wrong(body, {"message": str})
    if path.endswith("&dryRun=All"):
        # An object that is not stored has no version.
        return shape.wrong(body, _PARTIAL)
    if method == "POST" and path.endswith("/token"):
        return shape.wrong(body, {"status": {"token": str, "expirationTimestamp": str}})
    is_list = method == "GET" and _LISTS.match(path)
    return shape.wrong(body, _OBJECTS if is_list else _OBJECT)
