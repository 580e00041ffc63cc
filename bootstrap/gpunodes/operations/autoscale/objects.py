"""The objects of the cluster that hold the plan and the passwords; the role `autoscaler` has all others.

They are written over the session with the API, so that no password is in a variable or a file of a run.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from gpunodes.ansible.module_utils.scaling import KEPT_OFF
from gpunodes.autoscale.store import Store
from gpunodes.engine.cluster.errors import check
from gpunodes.repair.switched_off import CONFIG_MAP as STATES
from gpunodes.shape import Many, Maybe, Named, Optional

PLAN, PASSWORDS, DEPLOYMENT = "gpunodes-autoscaler", "gpunodes-autoscaler-bmc", "gpunodes-autoscaler"
_CORE = "/api/v1/namespaces/kube-system"
_APPS = "/apis/apps/v1/namespaces/kube-system"
_APPLY = "application/apply-patch+yaml"
_LABELS = {"app.kubernetes.io/managed-by": "gpunodes"}
_OF_PODS = ("nodeSelector", "containers.resources", "initContainers.resources", "initContainers.restartPolicy")
_TEXTS = Optional(Maybe(Named(str, 1000)))
_CONTAINER = {
    "resources": Optional(Maybe({"requests": _TEXTS, "limits": _TEXTS})),
    "restartPolicy": Optional(Maybe(str)),
}
_CONTAINERS = Optional(Maybe(Many(_CONTAINER, 1000)))
_POD = {"nodeSelector": _TEXTS, "containers": _CONTAINERS, "initContainers": _CONTAINERS}
_DAEMON_SET = {"spec": {"template": {"spec": _POD}}}


class Objects(Store):
    """The cluster as `gpunodes autoscale` changes it. The methods raise as those of ``Api``."""

    def write_plan(self, plan: Mapping[str, Any], passwords: Mapping[str, str]) -> None:
        """Write both; the power server reads them again within two minutes."""
        self._apply("configmaps", PLAN, {"data": {"plan.json": json.dumps(plan, sort_keys=True)}})
        encoded = {name: base64.b64encode(text.encode()).decode() for name, text in passwords.items()}
        self._apply("secrets", PASSWORDS, {"type": "Opaque", "data": encoded})

    def plan(self) -> dict[str, Any] | None:
        """The plan in the cluster; None without an autoscaler."""
        found = self._find(f"{_CORE}/configmaps/{PLAN}")
        try:
            document = json.loads(found["data"]["plan.json"]) if found else None
        except (ValueError, LookupError, TypeError, RecursionError):
            return None
        return document if isinstance(document, dict) else None

    def delete_plan(self) -> None:
        """Delete the plan."""
        self._delete(f"{_CORE}/configmaps/{PLAN}")

    def delete_passwords(self) -> None:
        """Delete the passwords of BMCs, and the keys for jump hosts."""
        self._delete(f"{_CORE}/secrets/{PASSWORDS}")

    def is_running(self) -> bool:
        """Whether a pod of the autoscaler is ready."""
        found = self._find(f"{_APPS}/deployments/{DEPLOYMENT}")
        status = (found or {}).get("status") or {}
        return isinstance(status.get("readyReplicas"), int) and status["readyReplicas"] > 0

    def is_installed(self) -> bool:
        """Whether the cluster has an autoscaler, whether or not it runs."""
        return self._find(f"{_APPS}/deployments/{DEPLOYMENT}") is not None

    def pod_nodes(self) -> list[str]:
        """The nodes of the autoscaler's pods; one that was deleted is there until it has ended."""
        query = urlencode({"labelSelector": f"app.kubernetes.io/name={DEPLOYMENT}"})
        found = self._list(f"{_CORE}/pods?{query}", ("metadata.name", "spec.nodeName"))
        return [str((each.get("spec") or {}).get("nodeName") or "") for each in found]

    def daemon_sets(self) -> list[dict[str, Any]]:
        """The DaemonSets of the cluster, with what decides where their pods run and what they request."""
        keep = ("metadata.name", *(f"spec.template.spec.{each}" for each in _OF_PODS))
        found = self._list("/apis/apps/v1/daemonsets", keep)
        check(found, Many(_DAEMON_SET, 10_000), "its DaemonSets")
        return found

    def delete_states(self) -> None:
        """Forget the states of all machines."""
        self._delete(f"{_CORE}/configmaps/{STATES}")

    def delete_kept_off(self) -> None:
        """Forget which machines users switched off: without an autoscaler nothing switches them on."""
        self._delete(f"{_CORE}/configmaps/{KEPT_OFF}")

    def _apply(self, kind: str, name: str, content: Mapping[str, Any]) -> None:
        kinds = {"configmaps": "ConfigMap", "secrets": "Secret"}
        body = {"apiVersion": "v1", "kind": kinds[kind], "metadata": {"name": name, "labels": _LABELS}, **content}
        self._call("PATCH", f"{_CORE}/{kind}/{name}?fieldManager=gpunodes&force=true", body, _APPLY)
