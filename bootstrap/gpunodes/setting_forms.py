"""The form that the value of each setting must have: what is wanted, and a test for it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpunodes.ansible.module_utils import devices, proxies


def subnets(value: Any) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """The networks of a setting, none for anything else."""
    try:
        return [ipaddress.ip_network(part.strip(), strict=False) for part in str(value).split(",") if "/" in part]
    except ValueError:
        return []


def _is_ipv4_network(text: str) -> bool:
    """Whether a text is an IPv4 network in CIDR notation, or an IPv4 address."""
    try:
        ipaddress.IPv4Network(text, strict=False)
    except ValueError:
        return False
    return True


def _text(pattern: str) -> Callable[[Any], bool]:
    """Whether a value, as text, matches a pattern as a whole."""
    return lambda value: re.fullmatch(pattern, str(value).strip()) is not None


def _each(pattern: str) -> Callable[[Any], bool]:
    """The same for each value of a list."""
    return lambda value: all(map(_text(pattern), value if isinstance(value, list) else str(value).split(",")))


def _entries(name: str, pattern: str) -> Callable[[Any], bool]:
    """Whether each name and each value of a mapping match their patterns; a text is left to Ansible."""
    return lambda value: (
        not isinstance(value, Mapping)
        or all(_text(name)(key) and _text(pattern)(inner) for key, inner in value.items())
    )


def _number(least: int, most: int = 10**9) -> Callable[[Any], bool]:
    return lambda value: least <= int(value) <= most


def _pids(value: Any) -> bool:
    """Whether a pod with this limit can work, and the kernel can have as many processes (PID_MAX_LIMIT)."""
    return int(value) == -1 or 1024 <= int(value) <= 4194304  # noqa: PLR2004 - the limits in the message


def _taint(value: Any) -> bool:
    return isinstance(value, Mapping) and (
        set(value) <= {"key", "value", "effect"}
        and bool(value.get("key"))
        and value.get("effect") in {"NoSchedule", "PreferNoSchedule", "NoExecute"}
    )


def are_taints(value: Any) -> bool:
    """Whether a value, which Ansible has rendered, is a list of taints, or empty."""
    return not value or (isinstance(value, list) and all(map(_taint, value)))


def _is_pool(value: Any) -> bool:
    """Whether the value of a pool is empty, or says how the pool scales: whole numbers, with max."""
    if value is None or value == {}:
        return True
    if not isinstance(value, Mapping) or not {"max"} <= set(value) <= {"min", "max", "priority", "spare"}:
        return False
    numbers = [
        each
        for each in value.values()
        if isinstance(each, int) and not isinstance(each, bool) and 0 <= each <= _MOST_MACHINES
    ]
    return len(numbers) == len(value) and value.get("min", 0) <= value["max"]


def _arguments(value: Any) -> bool:
    """Whether kubeadm accepts these arguments: known components, and texts (its configuration has no other types)."""
    argument = _text(r"[A-Za-z0-9][A-Za-z0-9-]*")
    return not isinstance(value, Mapping) or all(
        component in {"apiServer", "controllerManager", "scheduler", "etcd"}
        and isinstance(given, Mapping)
        and all(argument(name) and isinstance(text, str) for name, text in given.items())
        for component, given in value.items()
    )


def _exceptions(value: Any) -> bool:
    return all(map(proxies.is_exception, proxies.listed(value)))


_URL = r"https?://[^\s/]+\S*"
_HOP = r"([A-Za-z0-9_][A-Za-z0-9._-]*@)?([A-Za-z0-9_][A-Za-z0-9._-]*|\[[0-9A-Fa-f:]+\])(:\d{1,5})?"
_LABEL = r"([A-Za-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_LABEL_VALUE = r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?"
_TARGET = r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?:[1-9]\d{0,4}"
_TARGETS = 'a list of HOST:PORT in quotes, such as ["10.0.0.1:9836"]'
_ONLY_IPV4 = "; clusters with IPv6 are not supported"
_POOLS = (
    "groups whose names are valid values of a node label, each empty, or with whole numbers if the pool scales: max, "
    "and min (at most max), priority and spare if needed, such as {h100: {max: 4, priority: 50}, cpu: {}}"
)
_MOST_MACHINES = 100_000
_SECONDS = ("a number of seconds, 1 or more", _number(1))

FORMS: Sequence[tuple[str, str, Callable[[Any], bool]]] = (
    (
        "gpunodes_kubernetes_version",
        'a minor or an exact version, such as "1.36" or "1.36.3"',
        _text(r"1\.\d+(\.\d+)?"),
    ),
    (
        "gpunodes_containerd_version",
        'a minor or an exact version, such as "2.1" or "2.1.4"',
        _text(r"\d{1,3}\.\d{1,3}(\.\d{1,3})?"),
    ),
    (
        "gpunodes_control_plane_endpoint",
        f"HOST:PORT, such as api.example:6443{_ONLY_IPV4}",
        _text(r"[A-Za-z0-9.-]+(:\d{1,5})?"),
    ),
    (
        "gpunodes_control_plane_vip",
        f"an IPv4 address that no machine has, such as 10.0.0.10{_ONLY_IPV4}",
        _text(r"(?!0|127\.|169\.254\.|22[4-9]\.|2[3-5]\d\.)\d{1,3}(\.\d{1,3}){3}"),
    ),
    (
        "gpunodes_control_plane_vip_router_id",
        "a number, 1 to 255, or 0 for the last byte of the address",
        _number(0, 255),
    ),
    ("gpunodes_control_plane_vip_interval", "a number of seconds, 1 to 40", _number(1, 40)),
    ("gpunodes_api_kubeconfig", "an absolute path, or one that begins with ~/", _text(r"(~/|/)[^\x00-\x1f]+")),
    (
        "gpunodes_node_address",
        f"an IPv4 address of the machine, or a network such as 10.0.0.0/24 that contains it{_ONLY_IPV4}",
        lambda value: _is_ipv4_network(str(value).strip()),
    ),
    (
        "gpunodes_*_subnet",
        f"a network in CIDR notation, such as 10.244.0.0/16{_ONLY_IPV4}",
        lambda value: "/" in str(value) and _is_ipv4_network(str(value).strip()),
    ),
    ("gpunodes_*_packages_url", "an http or https URL", _text(_URL)),
    (
        "gpunodes_*_packages_fingerprint",
        "the 40 hexadecimal digits of a fingerprint",
        _text(r"([0-9A-Fa-f] ?:?){40,64}"),
    ),
    (
        "gpunodes_image_mirrors",
        "URLs by registry, such as {registry.k8s.io: https://mirror.example}",
        _entries(r"[^\s/]+", _URL),
    ),
    ("gpunodes_no_proxy", proxies.EXCEPTIONS_WANTED, _exceptions),
    (
        "gpunodes_http*_proxy",
        proxies.URL_WANTED,
        _text(proxies.URL),
    ),
    (
        "gpunodes_driver_branch",
        'a branch of the driver, such as "580", or an exact version, such as "580.95.05"',
        _text(r"\d{3}(\.\d{1,4}){0,2}"),
    ),
    (
        "gpunodes_cuda_versions",
        'a list of versions in quotes, such as ["13.0"] or ["13.0.2"]',
        _each(r"\d+\.\d+(\.\d+)?"),
    ),
    ("gpunodes_cudnn_version", 'a version, such as "9", "9.10" or "9.14.0.64"', _text(r"\d+(\.\d+)*")),
    (
        "gpunodes_prepare_gpus",
        'PCI device ids in quotes, four hexadecimal digits each, such as ["2330"]',
        _each(r"[0-9A-Fa-f]{4}"),
    ),
    # As in useradd(8); directory services allow @ and backslashes.
    (
        "gpunodes_docker_users",
        "a list of names of users, such as [alice]",
        _each(r"[A-Za-z_][A-Za-z0-9_.@\\-]{0,63}\$?"),
    ),
    (
        "gpunodes_registry_address",
        "an IPv4 address of Services that no Service has, such as 10.96.0.15",
        _text(r"(\d{1,3}(\.\d{1,3}){3})?"),
    ),
    ("gpunodes_registry_share", "the name of a share of gpunodes_storage", _text(r"[a-z0-9-]{0,63}")),
    ("gpunodes_*_image", "an image, such as registry.example/name:1.0", _text(r"[A-Za-z0-9][^\s]*")),
    (
        "gpunodes_monitoring_retention",
        "a duration, such as 15d or 12h",
        _text(r"[1-9]\d{0,5}[hdwy]"),
    ),
    ("gpunodes_monitoring_memory", "an amount of memory, such as 2Gi", _text(r"[1-9]\d{0,5}[MG]i")),
    (
        "gpunodes_monitoring_claim",
        "the name of a PersistentVolumeClaim",
        _text(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?"),
    ),
    ("gpunodes_monitoring_targets", _TARGETS, _each(_TARGET)),
    ("gpunodes_monitoring_alertmanagers", _TARGETS, _each(_TARGET)),
    ("gpunodes_pool", "the value of a node label", _text(_LABEL_VALUE)),
    (
        "gpunodes_pools",
        _POOLS,
        lambda value: (
            not isinstance(value, Mapping)
            or all(_text(_LABEL_VALUE)(name) and name and _is_pool(each) for name, each in value.items())
        ),
    ),
    ("gpunodes_gpu_sharing", devices.SHARING_WANTED, lambda value: devices.requested_sharing(value) is not None),
    ("gpunodes_node_labels", "labels of a node, such as {rack: r7}", _entries(_LABEL, _LABEL_VALUE)),
    (
        "gpunodes_node_taints",
        "taints with key, value and effect (NoSchedule, PreferNoSchedule or NoExecute)",
        lambda value: not isinstance(value, list) or all(map(_taint, value)),
    ),
    (
        "gpunodes_time_servers",
        "a list of host names or addresses, such as [ntp.example]",
        _each(r"[A-Za-z0-9][A-Za-z0-9.:_-]{0,252}"),
    ),
    (
        "gpunodes_data_directory",
        "the path of a directory, of letters, digits and . _ -, such as /data",
        _text(r"((/(?!\.{1,2}(/|$))[A-Za-z0-9._-]+)+)?"),
    ),
    ("gpunodes_pod_pids_limit", "a number of processes, 1024 to 4194304, or -1", _pids),
    ("gpunodes_feature_gates", "true or false by feature gate", _entries(r"[A-Za-z0-9]+", "(?i:true|false)")),
    (
        "gpunodes_component_arguments",
        'arguments in quotes, by apiServer, controllerManager, scheduler, etcd: {etcd: {election-timeout: "5000"}}',
        _arguments,
    ),
    (
        "gpunodes_kubeadm_timeouts",
        "durations, such as {kubernetesAPICall: 5m0s}",
        _entries(r"\w+", r"(\d+(\.\d+)?(ms|s|m|h))+"),
    ),
    (
        "gpunodes_*_max_unavailable",
        "a number of machines, or a percentage such as 10%",
        _text(r"0*[1-9]\d{0,5}|0*([1-9]\d?|100)\s*%"),
    ),
    (
        "gpunodes_rollout_windows",
        'a list of hours of a day in quotes, such as ["22:00-05:00"]',
        _each(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d"),
    ),
    ("gpunodes_repair_unhealthy_percent", "a percentage, 0 to 100", _number(0, 100)),
    ("gpunodes_repair_pool_label", "the name of a node label", _text(_LABEL)),
    ("gpunodes_health_gpus", "a number of GPUs, 0 or more", _number(0)),
    (
        "gpunodes_health_*xids",
        "actions by code, such as {79: repair}",
        _entries(r"\d+", "none|restart_app|reset_gpu|reboot|repair"),
    ),
    (
        "gpunodes_bmc_mac",
        # Without quotes YAML reads one that has only digits as a number to the base 60.
        'a MAC address in quotes, such as "52:54:00:12:34:56"',
        _text(r"[0-9A-Fa-f]{2}([:-][0-9A-Fa-f]{2}){5}"),
    ),
    (
        "gpunodes_bmc_jump",
        "USER@HOST, USER@HOST:PORT, or a host of ssh_config; several with commas",
        _text(rf"({_HOP}(,{_HOP})*)?"),
    ),
    ("gpunodes_repair_guard_*", "a number, 1 or more", _number(1)),
    ("gpunodes_repair_evidence_*", "a number, 0 or more", _number(0)),
    ("gpunodes_repair_*_pause", "a number of seconds, 0 or more", _number(0)),
    ("gpunodes_repair_settle", "a number of seconds, 0 or more", _number(0)),
    ("gpunodes_*_timeout", *_SECONDS),
    ("gpunodes_autoscale_scan_interval", *_SECONDS),
    ("gpunodes_*_timeout_hung", *_SECONDS),
    ("gpunodes_kubeadm_limit", *_SECONDS),
    ("gpunodes_join_token_ttl", *_SECONDS),
)
"""The form of settings whose type allows more than they can be: names, what is wanted, and whether a value is that."""
