"""Whether a machine belongs to a cluster already, so that it cannot be prepared for a later join. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem

_ROLES = {"control_plane": "a control plane", "worker": "a worker"}


ETCD_IN_THE_WAY = Problem(
    "/var/lib/etcd has files, and they are of no cluster of kubeadm",
    "a machine where this folder is empty: the etcd of the cluster has its data there",
    "move what is in it to another folder, and its etcd with it, or use another machine",
)
"""On a machine that is to be a control plane."""


def membership(machine: str, facts: Mapping[str, Any]) -> Problem | None:
    """Why a machine cannot be prepared: it is a node, or an interrupted join left it half joined; None if it can be.

    ``facts`` is a result of host_facts.
    """
    own = facts["kubernetes"]
    if own["role"]:
        found = f"it is already {_ROLES[own['role']]}" + (f" ({own['server']})" if own["server"] else "")
    elif own["ca_hash"] or own.get("unfinished"):
        found = "an interrupted join left files of a cluster on it"
    else:
        return None
    return Problem(
        found,
        "a machine of no cluster: it is prepared for a later join",
        f"run `gpunodes join` or `up` to bring a node up to date, or `gpunodes reset {machine}` to make it bare",
    )
