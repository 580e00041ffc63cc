"""The plan of the power server, from settings and what is known of machines and nodes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gpunodes.ansible.module_utils import devices
from gpunodes.errors import WrongInput
from gpunodes.identity.model import MachineIdentity
from gpunodes.planner import node_templates, spare
from gpunodes.planner.scaled_pools import Scaling, scaled

_LIMITS = {
    "idle_s": "gpunodes_autoscale_idle_timeout",
    "boot_s": "gpunodes_autoscale_boot_timeout",
    "scan_s": "gpunodes_autoscale_scan_interval",
}
_BMC = ("type", "address", "user", "system", "verify", "command", "identity", "mac")
"""The settings gpunodes_bmc_* of the plan; the password is in a Secret."""


@dataclass(frozen=True, slots=True)
class ScaledMachine:
    """A machine of a pool that scales, as far as it is known."""

    name: str
    pool: str
    settings: Mapping[str, Any]
    identity: MachineIdentity
    node: str = ""
    """The name of its node, also while the machine is off; "" if it never joined."""
    address: str = ""
    """The address of its node, or of the machine while it is off."""
    template: Mapping[str, Any] | None = None
    """Labels, taints and capacity of its node; None if they are unknown."""
    jump: str = ""
    """The name of the jump hosts before its BMC in the plan, "" for none."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """The labels of its node by its settings."""
    serves: bool = False
    """Whether it serves shared storage."""


def problems(machines: Sequence[ScaledMachine], *, own_image: bool) -> Iterator[tuple[str, str]]:
    """Machines that cannot be switched by the power server, each with the reason; ``own_image``: the user's image."""
    for each in machines:
        kind = str(each.settings["gpunodes_bmc_type"] or "")
        checks = (
            (
                not each.node,
                "no node is certainly its own: join it first, or run `gpunodes status` while it is on if it joined",
            ),
            (
                # Its NFS server is no pod: the autoscaler would take it for idle.
                each.serves,
                "it serves shared storage: put it into a pool that does not scale, or serve from another machine",
            ),
            (not kind, "it has no BMC: set gpunodes_bmc_type and gpunodes_bmc_address"),
            (
                kind in ("redfish", "ipmi")
                and each.settings["gpunodes_bmc_identity"] != "any"
                and not each.identity.has_hardware,
                "its hardware is unknown, by which its BMC is verified: run `gpunodes status` while it is on",
            ),
            (
                kind == "command" and not own_image,
                "gpunodes_bmc_command is a program of the controller: name an image with it in gpunodes_power_image",
            ),
            (
                bool(each.settings["gpunodes_bmc_jump"]) and not each.settings["gpunodes_bmc_jump_key"],
                "the power server has no SSH keys of yours: set gpunodes_bmc_jump_key for its gpunodes_bmc_jump",
            ),
            (
                kind == "wol" and not (each.settings["gpunodes_bmc_mac"] or each.identity.macs),
                "it never reported a MAC address: set gpunodes_bmc_mac",
            ),
            (
                # cluster-autoscaler, processors/customresources/gpu_processor.go
                len(devices.layout(each.labels.get(devices.SHARING, ""))) > 1,
                f"with several MIG profiles its node offers no {devices.GPU}, and would never count as ready: use one",
            ),
        )
        why = next((why for wrong, why in checks if wrong), "")
        if why:
            yield each.name, why


def document(
    settings: Mapping[str, Any],
    machines: Sequence[ScaledMachine],
    cas: Mapping[str, str],
    jumps: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    earlier: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> dict[str, Any]:
    """The plan (``autoscale/plan.py``); ``cas`` are the texts of the CA files of gpunodes_bmc_verify, by path.

    ``jumps`` are the jump hosts, by their names in the plan; ``earlier`` the templates of pools in the present plan.

    Raises WrongInput for a pool without a machine.
    """
    pools = scaled(settings["gpunodes_pools"])
    _check(pools, machines)
    given = {name: _given([each for each in machines if each.pool == name]) for name in pools}
    templates = _templates(machines, given, earlier)
    used = {str(each.settings["gpunodes_bmc_verify"]).strip() for each in machines}
    return {
        "version": 1,
        **{key: float(settings[name]) for key, name in _LIMITS.items()},
        "proof_image": str(settings["gpunodes_device_plugin_image"]),
        # Of an add-on of the user's nothing is known.
        "network": settings["gpunodes_network"] == "flannel",
        # Once for all machines: the plan must fit into one ConfigMap.
        "authorities": {path: text for path, text in cas.items() if path in used},
        "jumps": {name: dict(each) for name, each in jumps.items()},
        "pools": {
            name: {
                "min": each.least,
                "max": each.most,
                "priority": each.priority,
                "template": templates[name],
                "given": given[name],
            }
            for name, each in pools.items()
        },
        "machines": {
            each.node: {
                "pool": each.pool,
                "bmc": {**_bmc(each.settings), "gpunodes_bmc_jump": each.jump},
                "identity": {
                    "uuid": each.identity.system_uuid,
                    "serial": each.identity.serial,
                    "macs": list(each.identity.macs),
                    "machine_id": each.identity.machine_id,
                },
                "address": each.address,
                "capacity": (each.template or {}).get("capacity") or templates[each.pool]["capacity"],
            }
            for each in machines
        },
    }


def _templates(
    machines: Sequence[ScaledMachine], given: Mapping[str, Any], earlier: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The template of each pool."""
    return {
        name: node_templates.template(
            [each.template for each in machines if each.pool == name and each.template],
            own,
            earlier.get(name, node_templates.NOTHING),
        )
        for name, own in given.items()
    }


def _given(machines: Sequence[ScaledMachine]) -> dict[str, Any]:
    """The labels and taints that all these machines have by their settings."""
    return {
        "labels": node_templates.labels_in_common([each.labels for each in machines]),
        "taints": node_templates.taints_in_common([each.settings["gpunodes_node_taints"] or [] for each in machines]),
        "capacity": {},
    }


def _check(pools: Mapping[str, Scaling], machines: Sequence[ScaledMachine]) -> None:
    """Raise WrongInput for a pool without a machine, two machines with one node, and spare machines that cannot be."""
    for pool in pools:
        if not any(each.pool == pool for each in machines):
            raise WrongInput(
                f"the pool {pool} of gpunodes_pools has no machine",
                "workers in its group that gpunodes_pool does not put into another pool",
                "correct it",
            )
    deployments: dict[str, str] = {}
    for pool in (name for name, each in pools.items() if each.spare):
        # As the role `autoscaler` names it.
        other = deployments.setdefault(re.sub("[^a-z0-9.]", "-", pool.lower()), pool)
        if other != pool:
            raise WrongInput(
                f"the pools {other} and {pool} of gpunodes_pools have spare machines, and would have one Deployment",
                "names that differ not only in case or in characters such as _",
                "rename a pool, or set its spare to 0",
            )
    for pool in deployments.values():
        _check_shares(pool, [each for each in machines if each.pool == pool])
    names = {each.node: each.name for each in machines}
    if len(names) < len(machines):
        twice = sorted(each.name for each in machines if names[each.node] != each.name)
        raise WrongInput(
            f"{', '.join(twice)}: another machine has the same node", "one node each", "see `gpunodes status`"
        )


def _check_shares(pool: str, machines: Sequence[ScaledMachine]) -> None:
    """Raise WrongInput for a pool with spare machines whose pods share GPUs by MPS."""
    shared = [each.name for each in machines if each.labels.get(devices.SHARING, "").startswith(f"{devices.MPS}-")]
    if shared:
        raise WrongInput(
            f"the pool {pool} of gpunodes_pools has spare machines, and pods share the GPUs of {shared[0]} by MPS",
            "a pod that fills a machine; with MPS a pod may request one share only",
            f"set spare of {pool} to 0, or gpunodes_gpu_sharing to time-slicing",
        )


def role_pools(
    settings: Mapping[str, Any], plan: Mapping[str, Any], daemons: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """What the role `autoscaler` needs of each pool: its priority, and what pods on spare machines ask for.

    ``daemons`` are the DaemonSets of the cluster. Raises WrongInput if too little is known of a pool with spare
    machines.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, pool in scaled(settings["gpunodes_pools"]).items():
        template = plan["pools"][name]["template"]
        taints = [dict(taint) for taint in template["taints"]]
        found[name] = {"priority": pool.priority, "spare": pool.spare, "taints": taints}
        if pool.spare:
            capacities = [each["capacity"] for each in plan["machines"].values() if each["pool"] == name]
            found[name]["resources"] = spare.resources(name, capacities, daemons, template["labels"])
    return found


def _bmc(settings: Mapping[str, Any]) -> dict[str, str]:
    found = {f"gpunodes_bmc_{key}": str(settings[f"gpunodes_bmc_{key}"] or "") for key in _BMC}
    verify = settings["gpunodes_bmc_verify"]
    text = "true" if verify in (None, "") else str(verify).strip()
    return {**found, "gpunodes_bmc_verify": text.lower() if text.lower() in ("true", "false") else text}
