"""The shape of reports from machines and clusters: results of host_facts, cluster_info and other modules.

Values that become names, paths, addresses or versions must match a pattern; free text is not restricted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpunodes.shape import Many, Maybe, Moment, Named, Optional, Pattern, one_of, wrong

_WORD = Pattern("plain word", r"[A-Za-z0-9][A-Za-z0-9._+~-]{0,99}")
_VERSION = Pattern("version", r"[A-Za-z0-9][A-Za-z0-9.+:~^_-]{0,127}")
_NUMBERS = Pattern("version", r"([0-9]{1,4}\.[0-9]{1,4}\.[0-9]{1,4})?")
_PACKAGE = Pattern("package's name", r"[A-Za-z0-9][A-Za-z0-9.+:_-]{0,199}")
_PCI = Pattern("PCI address", r"[0-9A-Fa-f:.]{1,32}")
_HEX = Pattern("hexadecimal number", r"[0-9A-Fa-f]{1,8}")
_ADDRESS = Pattern("IP address", r"[0-9A-Fa-f:.]{0,45}")
_IPV4 = Pattern(
    "IPv4 address",
    r"((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])",
)
_HOST = Pattern("host name", r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252})?")
# Kubernetes, "Object Names and IDs": a DNS subdomain.
_NODE = Pattern("node's name", r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_ENDPOINT = Pattern("host:port", r"([A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?")
_CA_HASH = Pattern("pin of a CA (sha256:...)", r"sha256:[0-9a-f]{64}")
_FOLDER = Pattern("folder", r"(/[A-Za-z0-9._-]+)+")
_UNIT = Pattern("systemd unit", r"[A-Za-z0-9:_.\\@-]{1,200}")
_OWN_SERVICE = Pattern("time service", r"(systemd-timesyncd|chronyd)?")
_ROLE = one_of("control_plane", "worker")

_FUNCTION = {
    "address": _PCI,
    "vendor": _HEX,
    "device": _HEX,
    "class": _HEX,
    "subsystem": Optional(Maybe(str)),
    "driver": Optional(Maybe(_WORD)),
}
_GPU = {
    "functions": Many(_FUNCTION, 1000),
    "nvswitches": Optional(int),
    "nouveau": Optional(one_of("loaded", "blacklisted", "available", "absent")),
    "secure_boot": Optional(Maybe(bool)),
    "mok": Optional({"key": Maybe(str), "enrolled": bool}),
    "headers": Optional({"running": bool, "package": Optional(Maybe(_PACKAGE))}),
    "driver": Optional(
        {
            "module": Maybe(_VERSION),
            "loaded": bool,
            "origin": Maybe(_WORD),
            "packages": Named(_VERSION, 1000, _PACKAGE),
            "flavour": Maybe(one_of("open", "proprietary")),
        }
    ),
    "cuda": Optional(Named(_WORD, 100)),
    "cudnn": Optional(Named(_VERSION, 100, _PACKAGE)),
    "toolkit": Optional(Named(_VERSION, 100, _PACKAGE)),
    "runtimes": Optional(Named(_VERSION, 100, _PACKAGE)),
    "clients": Optional(Maybe(int)),
    "expected": Optional(Many(_HEX, 16)),
}
# These two are part of commands in messages.
_DEVICE = Pattern("network device's name", r"[A-Za-z0-9_.:@+-]{1,15}")
_UNIT = Pattern("unit's name", r"[A-Za-z0-9:_.\\@-]{1,255}")
_CIDR = Pattern("network", r"[0-9A-Fa-f:.]{2,45}(/[0-9]{1,3})?")
_LINK = Pattern("network device's name", rf"({_DEVICE.pattern})?")
_TABLE = Pattern("routing table", r"[A-Za-z0-9_.?-]{0,32}")
_NETWORK = {
    "devices": Many({"name": _DEVICE, "addresses": Many(_CIDR, 1000), "udp_port": Maybe(int)}, 10_000),
    "routes": Many({"to": _CIDR, "device": _LINK, "gateway": _ADDRESS, "table": Optional(_TABLE)}, 100_000),
    "docker_bridge": Pattern("network", rf"({_CIDR.pattern})?"),
}
_SOCKET = {
    "protocol": one_of("tcp", "udp"),
    "address": _ADDRESS,
    "port": int,
    "pid": Maybe(int),
    "program": Maybe(str),
    "unit": Maybe(_UNIT),
    "interface": Maybe(_DEVICE),
}
_FIREWALL = {
    "name": one_of("ufw", "firewalld", "nftables", "iptables"),
    "open": Many(Pattern("port", r"\*|[0-9]{1,5}(-[0-9]{1,5})?(/(tcp|udp|vrrp))?"), 200),
    "writable": bool,
    "chains": Many(Pattern("chain", r"[A-Za-z0-9_-]{1,121}( [A-Za-z0-9_-]{1,121}){0,2}"), 100),
}
_MAC = Pattern("MAC address", r"([0-9a-f]{2}(:[0-9a-f]{2}){5})?")
_VIRTUAL_ADDRESS = {
    "held": bool,
    "managed": bool,
    "foreign": bool,
    "others": Many(_IPV4, 100),
    "mac": _MAC,
    "answers": Many(_MAC, 100),
    "confined": Optional(bool),
}
_ENDPOINT_FACTS = {
    "virtual_address": Maybe(_VIRTUAL_ADDRESS),
    "endpoints": Many(
        {"endpoint": _ENDPOINT, "resolved": Many(_IPV4, 100), "error": str, "names": Many(_HOST, 1000)}, 100
    ),
}
_WORDS = Pattern("plain words", r"[A-Za-z0-9 ._+~-]{0,300}")
_SYSTEM = {
    "id": Maybe(_WORD),
    "version": Maybe(_VERSION),
    "codename": Maybe(_WORD),
    "name": Maybe(str),
    "like": Optional(Maybe(_WORDS)),
    "base": Optional(Maybe(_WORD)),
}
_MACHINE = {
    "os": _SYSTEM,
    "arch": _WORD,
    "kernel": _WORD,
    "python": Pattern("version", r"[0-9]+(\.[0-9]+){1,3}"),
    "cpus": int,
    "memory_mib": int,
    "disks": Many({"path": _FOLDER, "device": int, "mount": str, "free_mib": int}, 100),
    "data_directory": {
        "path": Pattern("folder", rf"({_FOLDER.pattern})?"),
        "problem": Maybe({"found": str, "wanted": str, "remedy": str}),
    },
    "clock": {"began": float, "synchronised": Maybe(bool), "services": Many(_UNIT, 100), "own": _OWN_SERVICE},
    "cgroup": int,
    "swap": Many(str, 1000),
    "hostname": _HOST,
    "machine_id": Maybe(str),
    "product_uuid": Maybe(str),
    "boot_id": Maybe(str),
    "time": Moment(),
    "default_address": Maybe(_ADDRESS),
    "addresses": Optional(Many(_IPV4, 1000)),
    "network": Maybe(_NETWORK),
    "sockets": Many(_SOCKET, 1000),
    "firewalls": Many(_FIREWALL, 10),
    "modules": Named(_WORD, 100, _WORD),
    "package_manager": Maybe(one_of("apt", "dnf")),
    "packages": Named(Maybe(_VERSION), 100, _PACKAGE),
    "kubernetes": {
        "role": Maybe(_ROLE),
        "ca_hash": Maybe(_CA_HASH),
        "server": Maybe(str),
        "advertised": Optional(Maybe(_ADDRESS)),
        "before": Optional(_NUMBERS),
        **{name: Optional(bool) for name in ("unfinished", "etcd", "foreign_etcd", "ended", "configured")},
        "restore": Optional(one_of("", "unfinished", "aborted", "done")),
    },
    "ledger": bool,
    **{name: Optional(shape) for name, shape in _ENDPOINT_FACTS.items()},
    "gpu": _GPU,
    "proxies": Optional(Many({"url": str, "error": str}, 2)),
    "sources": Many({"name": str, "url": str, "ok": bool, "error": Maybe(str)}, 100),
    "versions": Optional(Named(Named(Many(_VERSION, 200), 200, _PACKAGE), 3, _WORD)),
}
_CLUSTER_NODE = {
    "name": _NODE,
    "role": _ROLE,
    "uid": str,
    "address": _ADDRESS,
    "addresses": Many(str, 1000),
    "version": Pattern("version", rf"({_VERSION.pattern})?"),
    "runtime": Pattern("runtime", r"[a-z0-9-]{0,50}"),
    "ready": bool,
    "reason": str,
    "maintenance": str,
    "schedulable": bool,
    "provider_id": Optional(Pattern("providerID", r"[!-~]{0,300}")),
    "starting": Optional(bool),
    "machine_id": str,
    "product_uuid": str,
    "boot_id": str,
    "verified": bool,
    "gpus": int,
    "gpus_verified": bool,
    "plugin_away": Optional(bool),
    "managed": {
        "labels": Named(str, 1000),
        "taints": Many({"key": str, "value": Optional(str), "effect": str}, 1000),
    },
}
_CERTIFICATE = {
    "name": Pattern("certificate's name", r"[a-z0-9.-]{1,60}"),
    "path": Pattern("path", r"(/[A-Za-z0-9._-]+)+"),
    "subject": str,
    "not_after": Maybe(int),
    "problem": str,
    "renewal": one_of("renew", "kubelet", "none"),
}
_ETCD = {
    "problem": str,
    "members": Many(
        {
            "id": Pattern("id of a member", r"[0-9a-f]{1,16}"),
            "name": str,
            "learner": bool,
            "leader": bool,
            "healthy": bool,
            "db_size": int,
        },
        100,
    ),
}
_CERTIFICATES = Many(_CERTIFICATE, 100)
# They become a path, and a file that a container runtime trusts.
_HOST_PORT = Pattern("IPv4 address with a port", r"([0-9]{1,3}\.){3}[0-9]{1,3}:[0-9]{1,5}")
_PEM = Pattern(
    "one or two certificates in PEM",
    r"(-----BEGIN CERTIFICATE-----\n([A-Za-z0-9+/=]{1,76}\n){1,60}-----END CERTIFICATE-----\n){1,2}",
)
NODES = Many(_CLUSTER_NODE, 20_000)
_CLUSTER = {
    "version": Pattern("version", r"v[0-9]+\.[0-9]+\.[0-9]+[0-9A-Za-z.+-]{0,60}"),
    "endpoint": _ENDPOINT,
    "leader_election": Optional(bool),
    "ca_hash": _CA_HASH,
    "nodes": NODES,
    "certificates": Optional(_CERTIFICATES),
    "registry": Optional(Maybe({"address": _HOST_PORT, "ca": _PEM})),
}
_LEVELS = Many(
    {"level": str, "state": one_of("ok", "failed", "skipped"), "fact": str, "wanted": str, "remedy": str}, 100
)


_TAG = Pattern("tag of an image", r"[A-Za-z0-9_.-]{1,128}")
_IMAGE = Pattern("name of an image", r"[A-Za-z0-9./:_@-]{0,300}")
_ARGUMENTS = Many(Pattern("name of an argument", r"[a-z0-9-]{1,100}"), 500)
_GATES = Named(bool, 500, Pattern("feature gate", r"[A-Za-z0-9]{1,100}"))
_COMPONENT = one_of("kube-apiserver", "kube-controller-manager", "kube-scheduler")
_STATIC_POD = one_of("kube-apiserver", "kube-controller-manager", "kube-scheduler", "etcd")
_API = Pattern("API", r"[a-z0-9./-]{1,200} [a-z0-9.-]{1,100}")
_UPGRADE = {
    "kubeadm": _NUMBERS,
    "kubelet": _NUMBERS,
    "images": Named(_TAG, 4, _STATIC_POD),
    "arguments": Named(_ARGUMENTS, 3, _COMPONENT),
    "gates": Named(_GATES, 3, _COMPONENT),
    "kubelet_arguments": _ARGUMENTS,
    "kubelet_gates": _GATES,
    "unpackaged": Many(one_of("kubeadm", "kubelet"), 2),
    "unfinished": bool,
    "lost": Many({"component": _STATIC_POD, "name": str}, 200),
    "not_compared": str,
    "offered": Named(Many(_NUMBERS, 1000), 3, one_of("kubeadm", "kubectl", "kubelet")),
    "unread": str,
    "fetched": {"version": _NUMBERS, "missing": Many(_IMAGE, 50), "unasked": str},
    "deprecated": Many({"api": _API, "removed": Pattern("minor", r"[1-9][0-9]?\.[0-9]{1,3}")}, 200),
    "metrics_unread": str,
    "cluster": Maybe(
        {
            "configured": _NUMBERS,
            "gates": _GATES,
            "coredns": _IMAGE,
            "proxy": _IMAGE,
            "addons": Many(_IMAGE, 200),
        }
    ),
}


def machine_problem(facts: object) -> str:
    """What is wrong with a result of host_facts, "" if it is correct. Never raises."""
    return wrong(facts, _MACHINE)


def cluster_problem(cluster: object) -> str:
    """The same for a result of cluster_info."""
    return wrong(cluster, _CLUSTER)


def certificates_problem(certificates: object) -> str:
    """The same for a result of certificate_ends."""
    return wrong(certificates, _CERTIFICATES)


def etcd_problem(etcd: object) -> str:
    """The same for a result of etcd_members."""
    return wrong(etcd, _ETCD)


_PENDING = {
    "packages": Many(
        {
            "name": _PACKAGE,
            "old": Pattern("version", rf"({_VERSION.pattern})?"),
            "new": _VERSION,
            "security": bool,
            "kernel_meta": bool,
        },
        20_000,
    ),
    "kernels": Many(_WORD, 50),
    "kept_back": Many(_PACKAGE, 20_000),
    "held": Many(_PACKAGE, 100),
    "reboot": Many(str, 20),
}


def pending_problem(pending: object) -> str:
    """The same for a result of os_pending."""
    return wrong(pending, _PENDING)


_RUNTIME = {
    "packages": Many({"name": _PACKAGE, "old": Pattern("version", rf"({_VERSION.pattern})?"), "new": _VERSION}, 1000),
    "changes": Many(str, 1000),
}


def runtime_problem(pending: object) -> str:
    """The same for a result of runtime_pending."""
    return wrong(pending, _RUNTIME)


_ADDONS = Many(
    {
        "name": _WORD,
        "wanted": Many(_IMAGE, 20),
        "running": Named(int, 1000, _IMAGE),
        "changes": Many(str, 100),
        "behind": Many(str, 20_000),
    },
    20,
)


def addons_problem(addons: object) -> str:
    """The same for a result of addon_pending."""
    return wrong(addons, _ADDONS)


_INSTALLED = Named(Pattern("version", r"[A-Za-z0-9.+~_-]{0,99}"), 1000, _WORD)


def installed_problem(installed: object) -> str:
    """The same for the versions of optional add-ons in a result of addon."""
    return wrong(installed, _INSTALLED)


def changes_problem(changes: object) -> str:
    """The same for the names of objects in a result of addon."""
    return wrong(changes, Many(str, 5000))


def upgrade_problem(own: object) -> str:
    """The same for a result of upgrade_facts."""
    return wrong(own, _UPGRADE)


_DRIFT = {
    "managed": bool,
    "problem": str,
    "unverified": bool,
    "left_out": int,
    "differences": Many(
        {
            "component": str,
            "name": str,
            "running": Maybe(str),
            "wanted": Maybe(str),
            "kind": one_of("settings", "foreign", "fixed"),
        },
        200,
    ),
}


def drift_problem(drift: object) -> str:
    """The same for a result of control_plane_drift."""
    return wrong(drift, _DRIFT)


_FIELDS = Named(str, 100, Pattern("field of a configuration", r"[A-Za-z0-9]{1,100}"))
_KUBELET_SETTINGS = {
    "problem": str,
    "cluster": _FIELDS,
    "nodes": Named(_FIELDS, 20_000, _NODE),
    "silent": Named(str, 20_000, _NODE),
}


def kubelet_settings_problem(found: object) -> str:
    """The same for a result of kubelet_settings; planner/kubelet_drift.py reads the JSON of its fields."""
    return wrong(found, _KUBELET_SETTINGS)


def levels_problem(levels: object) -> str:
    """The same for the levels of a GPU verification."""
    return wrong(levels, _LEVELS)


def saved_problem(facts: Mapping[str, Any]) -> str:
    """The same for facts from a file, where facts may be missing."""
    system = {name: Optional(shape) for name, shape in _SYSTEM.items()} | {"id": _SYSTEM["id"]}
    return wrong(facts, {name: Optional(shape) for name, shape in _MACHINE.items()} | {"os": system})
