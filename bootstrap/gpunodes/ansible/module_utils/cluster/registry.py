"""The registry of the cluster, as `gpunodes registry up` has published it for nodes."""

from __future__ import annotations

import re
from typing import Any

from ..kube_api import Client

_PATH = "/api/v1/namespaces/gpunodes-registry/configmaps/registry"
_LABEL = "app.kubernetes.io/managed-by"
# As planner/reports.py has them: what is something else is left out here, since nothing else depends on it.
_ADDRESS = re.compile(r"(\d{1,3}\.){3}\d{1,3}:\d{1,5}")
_CA = re.compile(r"(-----BEGIN CERTIFICATE-----\n([A-Za-z0-9+/=]{1,76}\n){1,60}-----END CERTIFICATE-----\n){1,2}")


def published(client: Client) -> dict[str, str] | None:
    """Its address and its CA; None without a registry."""
    found: Any = client.find(_PATH) or {}
    data, labels = found.get("data") or {}, (found.get("metadata") or {}).get("labels") or {}
    address, ca = str(data.get("address") or ""), str(data.get("ca.crt") or "")
    if labels.get(_LABEL) != "gpunodes" or not _ADDRESS.fullmatch(address) or not _CA.fullmatch(ca):
        return None
    return {"address": address, "ca": ca}
