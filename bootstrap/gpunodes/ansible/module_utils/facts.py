"""Reads all facts of a machine that preflight needs. Changes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import re
import shlex
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from . import (
    addresses,
    certificates,
    clock,
    data_directory,
    der,
    disk,
    endpoints,
    etcd_data,
    gpu_facts,
    kubeconfig,
    ledger,
    network,
    packages,
    sockets,
    source_versions,
    virtual_address,
)
from .firewalls import reading
from .host import keys, swap
from .host.spec import Repository, data_folders
from .probe import identity
from .problem import MachineProblem
from .proxies import Proxies, opener, public, unreachable, within

PACKAGES = ("kubelet", "kubeadm", "kubectl", "containerd", "containerd.io", "docker.io", "docker-ce")
MODULES = ("overlay", "br_netfilter")
_SPACE = ("/usr", "/var/lib", "/var/cache", "/boot", "/tmp")  # noqa: S108 - only its free space is read
"""Where software is installed and built: the file systems whose free space counts."""
_RESPONSE_LIMIT_S = 20
_WHOLE_S = 60
_UNAUTHORIZED = 401
_PROXY_AUTHENTICATION_REQUIRED = 407


def read(
    sources: Sequence[Mapping[str, Any]] = (),
    proxies: Proxies | None = None,
    directory: str = "",
    runtime: str = "containerd",
    expected_gpus: Sequence[str] = (),
    exact_packages: Mapping[str, Sequence[str]] | None = None,
    vip: str = "",
    api_servers: Sequence[str] = (),
) -> dict[str, Any]:
    """The facts; ``sources`` are checked meanwhile, through ``proxies``.

    ``exact_packages``: the packages whose versions in their source are read, by source (``source_versions``).

    A source whose proxy does not work is left out: the proxy is reported instead, once. ``directory`` is
    gpunodes_data_directory, and ``runtime`` the container runtime whose data it is for. ``expected_gpus``: see
    ``gpu_facts.read``. ``vip`` is the virtual address of the control planes, and ``api_servers`` are HOST:PORT where
    API servers are or will be: see ``virtual_address.read`` and ``endpoints.read``.
    """
    began = time.time()
    system = parse_os_release(disk.read("/etc/os-release") or "")
    gpus = gpu_facts.present() or bool(expected_gpus)
    wanted = [filled(source, system) for source in sources if applies(source, system, gpus)]
    failed = unreachable(proxies) if proxies and wanted else {}
    checks = [
        SourceCheck(source, proxies)
        for source in wanted
        if not {proxy_of(str(source[field]), proxies) for field in ("url", "key")} & {*failed}
    ]
    for check in checks:
        check.start()
    facts = {**_machine(), "virtual_address": virtual_address.read(vip), "endpoints": endpoints.read(api_servers)}
    if (facts["virtual_address"] or {}).get("managed"):
        # It belongs to the cluster, and is on another machine tomorrow.
        facts["addresses"] = [address for address in facts["addresses"] if address != vip]
    facts |= {"gpu": gpu_facts.read(expected=expected_gpus)}
    for check in checks:
        check.join()
        failed.update(check.refused)
    facts["sources"] = [check.result for check in checks if not check.refused]
    if exact_packages:
        facts["versions"] = source_versions.of_sources(wanted, exact_packages, facts["packages"], proxies)
    facts["proxies"] = [{"url": url, "error": reason} for url, reason in failed.items()]
    facts["data_directory"] = _data_directory(directory, runtime)
    # Each of the folders may be on a disk of its own.
    data = [*data_folders("docker").values(), facts["data_directory"]["path"]]
    facts["disks"] = data_directory.free([*_SPACE, *filter(None, data)])
    # Last: what the module took in between is no part of the round trip (planner/preflight.py).
    facts["clock"] = {**clock.read(), "began": began}
    facts["time"] = time.time()
    return facts


def proxy_of(url: str, proxies: Proxies | None) -> str:
    """The URL of the proxy for an address, without credentials; "" for none."""
    with contextlib.suppress(ValueError):
        address = urlsplit(url)
        return public(proxies.of(address.scheme, address.hostname or "")) if proxies else ""
    return ""


def _data_directory(directory: str, runtime: str) -> dict[str, Any]:
    """The directory, "" for none or an invalid path, and what is wrong with it; None if nothing is."""
    problem = None
    try:
        data_directory.check(directory, data_folders(runtime).values(), ledger.load())
    except MachineProblem as error:
        problem = dataclasses.asdict(error.problem)
    return {"path": directory if data_directory.is_path(directory) else "", "problem": problem}


def _machine() -> dict[str, Any]:
    kernel = platform.release()
    manager: packages.Manager | None = None
    with contextlib.suppress(MachineProblem):
        manager = packages.detect()
    installed = manager.installed(PACKAGES) if manager else {}
    links = network.read()
    return {
        "os": parse_os_release(disk.read("/etc/os-release") or ""),
        "arch": platform.machine(),
        "kernel": kernel,
        "python": ".".join(map(str, sys.version_info[:3])),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_mib": parse_memory(disk.read("/proc/meminfo") or ""),
        "cgroup": 2 if os.path.exists("/sys/fs/cgroup/cgroup.controllers") else 1,
        "swap": swap.active_swaps(disk.read("/proc/swaps") or ""),
        "hostname": socket.gethostname(),
        "machine_id": _line("/etc/machine-id"),
        "product_uuid": _line("/sys/class/dmi/id/product_uuid"),
        "product_serial": _line("/sys/class/dmi/id/product_serial"),
        "macs": identity.macs(),
        "boot_id": _line("/proc/sys/kernel/random/boot_id"),
        "default_address": _default_address(),
        "addresses": addresses.own(),
        "network": links,
        "sockets": sockets.read(links["devices"] if links else ()),
        "firewalls": reading.read(),
        "modules": {name: _module(name, kernel) for name in MODULES},
        "package_manager": None if manager is None else "apt" if isinstance(manager, packages.Apt) else "dnf",
        "packages": {name: installed[name].version if name in installed else None for name in PACKAGES},
        "kubernetes": kubernetes(),
        "ledger": os.path.exists(ledger.PATH),
    }


def kubernetes() -> dict[str, Any]:
    """The machine's role in a cluster. ``role`` is None while a join is unfinished.

    ``unfinished``: kubeadm may have succeeded, but the steps after it were interrupted. ``before``: the version of the
    kubelet before the last upgrade. ``etcd``: it has data of kubeadm's etcd, ``foreign_etcd``: files of others in
    etcd's folder. ``restore``: of etcd, see ``etcd_data.restore``. ``ended``: the certificate of its kubelet
    has ended, so that it must join again. ``configured``: gpunodes joined it, or configured its kubelet.
    """
    kubelet = kubeconfig.load(kubeconfig.KUBELET)
    admin = kubeconfig.load(kubeconfig.ADMIN)
    # The CA's file is written before kubelet.conf: it identifies the cluster of an interrupted join.
    ca = disk.read(kubeconfig.CA)
    ca_hash = None
    with contextlib.suppress(MachineProblem):
        ca_hash = kubelet.ca_hash if kubelet else kubeconfig.ca_hash(ca) if ca else None
    role, unfinished, before, joined, etcd, in_the_way = None, False, "", False, True, False
    restore = ""
    manifest = disk.read(API_SERVER)
    with contextlib.suppress(MachineProblem):
        found = ledger.load()
        unfinished, before, joined = found.kubeadm.endswith(" started"), found.kubelet_before, bool(found.kubeadm)
        etcd, in_the_way = etcd_data.is_kubeadms(found), etcd_data.is_in_the_way(found)
        restore = etcd_data.restore(found)
        if manifest is None:
            # An interrupted restart may have left it away.
            manifest = disk.read(found.manifests.get("kube-apiserver", ""))
    if admin is not None or manifest is not None:
        role = "control_plane"
    elif kubelet and ca and disk.read("/var/lib/kubelet/config.yaml") and not os.path.exists(BOOTSTRAP):
        role = "worker" if os.path.exists(CLIENT_CERTIFICATE) else None
    return {
        "role": role,
        "ca_hash": ca_hash,
        "server": kubelet.server if kubelet else None,
        "advertised": advertised_address(manifest or ""),
        "unfinished": unfinished,
        "before": before,
        "etcd": os.path.isdir(etcd_data.MEMBER) and etcd,
        "foreign_etcd": in_the_way,
        "restore": restore,
        "ended": _has_ended(CLIENT_CERTIFICATE),
        "configured": joined or os.path.exists(KUBELET_ORDER),
    }


def _has_ended(path: str) -> bool:
    """Whether a certificate has ended, by the machine's clock; one that cannot be read has not."""
    try:
        found = certificates.of_file(path)
    except (der.Invalid, OSError):
        return False
    return found is not None and found.not_after <= time.time()


API_SERVER = "/etc/kubernetes/manifests/kube-apiserver.yaml"
KUBELET_ORDER = "/etc/systemd/system/kubelet.service.d/15-gpunodes-runtime.conf"
"""The file of the kubelet's unit that gpunodes writes on each node that it configures."""
BOOTSTRAP = "/etc/kubernetes/bootstrap-kubelet.conf"
CLIENT_CERTIFICATE = "/var/lib/kubelet/pki/kubelet-client-current.pem"


def advertised_address(manifest: str) -> str | None:
    """The address at which the machine's API server is known to its cluster, from the server's manifest."""
    found = re.search(r"--advertise-address=([0-9A-Fa-f.:]+)", manifest)
    return found.group(1) if found else None


def parse_os_release(text: str) -> dict[str, str | None]:
    """os-release(5)."""
    values = {}
    for line in text.splitlines():
        name, separator, value = line.partition("=")
        if separator and not name.startswith("#"):
            with contextlib.suppress(ValueError):
                values[name.strip()] = "".join(shlex.split(value))
    return {
        "id": values.get("ID"),
        "version": values.get("VERSION_ID"),
        "codename": values.get("VERSION_CODENAME"),
        "like": values.get("ID_LIKE"),
        # The code name of the system that it derives from.
        "base": values.get("UBUNTU_CODENAME") or values.get("DEBIAN_CODENAME"),
        "name": _pretty(text),
    }


def _pretty(text: str) -> str | None:
    found = re.search(r"^PRETTY_NAME=[\"']?([^\"'\n]+)", text, re.MULTILINE)
    return found.group(1) if found else None


def parse_memory(text: str) -> int:
    """MemTotal of /proc/meminfo, in MiB."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", text, re.MULTILINE)
    return int(found.group(1)) // 1024 if found else 0


def _module(name: str, kernel: str) -> str:
    if os.path.exists(f"/sys/module/{name}"):
        return "loaded"
    for file in ("modules.dep", "modules.builtin"):
        if re.search(rf"/{name}\.ko", disk.read(f"/lib/modules/{kernel}/{file}") or ""):
            return "available"
    return "missing"


def _line(path: str) -> str | None:
    try:
        return (disk.read(path) or "").strip() or None
    except OSError:
        return None


def _default_address() -> str | None:
    """The source address of the default route. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1, RFC 5737
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        return address


def applies(source: Mapping[str, Any], system: Mapping[str, str | None], gpus: bool = False) -> bool:
    """Whether a machine with this operating system, with or without ``gpus``, uses the source."""
    version = system["version"] or ""
    names = {f"{system['id']} {version}", f"{system['id']} {version.partition('.')[0]}"}
    return (gpus or not source.get("gpus")) and (not source.get("systems") or not names.isdisjoint(source["systems"]))


def placeholders(system: Mapping[str, str | None], architecture: str) -> dict[str, str]:
    """Values of the placeholders in the address, key and suite of a package source."""
    apt = system["id"] in {"debian", "ubuntu"}
    version = system["version"] or ""
    arm = architecture == "aarch64"
    return {
        "{system}": str(system["id"]) if apt else "rhel",
        "{release}": version.replace(".", "") if system["id"] == "ubuntu" else version.partition(".")[0],
        "{format}": "deb" if apt else "rpm",
        "{codename}": system["codename"] or "",
        "{package_arch}": ("arm64" if arm else "amd64") if apt else architecture,
        "{cuda_arch}": "sbsa" if arm else architecture,
    }


def filled(source: Mapping[str, Any], system: Mapping[str, str | None]) -> dict[str, Any]:
    """``source`` with its placeholders replaced, and the address of its release file as ``url``."""
    apt = system["id"] in {"debian", "ubuntu"}
    values = placeholders(system, platform.machine())
    result = dict(source)
    for field in ("url", "key", "suite", "index"):
        for placeholder, value in values.items():
            result[field] = (result.get(field) or "").replace(placeholder, value)
    if source.get("kind") != "registry":
        base = result["url"].rstrip("/")
        if not apt:
            result["url"] = f"{base}/repodata/repomd.xml"
        else:
            result["url"] = (
                f"{base}/InRelease" if result["suite"] == "/" else f"{base}/dists/{result['suite']}/InRelease"
            )
    return result


class SourceCheck(threading.Thread):
    """Checks that one outside source is reachable and that its key has the expected fingerprint."""

    def __init__(self, source: Mapping[str, Any], proxies: Proxies | None = None) -> None:
        super().__init__(daemon=True)
        self._source = source
        self._proxies = proxies
        self.refused: dict[str, str] = {}
        """The proxy that refused to pass the request on, and its reason."""
        self.result: dict[str, Any] = {"name": source["name"], "url": source["url"], "ok": True, "error": None}

    def run(self) -> None:
        try:
            check_source(self._source, self._proxies)
        except ProxyRefused as refusal:
            self.refused = {refusal.url: str(refusal)}
        except MachineProblem as problem:
            self.result.update(ok=False, error=str(problem))
        except Exception as error:
            self.result.update(ok=False, error=f"{type(error).__name__}: {error}")


class ProxyRefused(MachineProblem):
    """The proxy ``url`` wants other credentials."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(reason)
        self.url = url


def check_source(source: Mapping[str, Any], proxies: Proxies | None = None) -> None:
    """Raise MachineProblem unless the source is reachable through the proxies and its key is right."""
    import urllib.error

    url = str(source["url"])
    if not url.startswith(("http://", "https://")):
        raise MachineProblem("it is not an http or https address", "", "correct the setting")

    def answer() -> None:
        with opener(proxies).open(url, timeout=_RESPONSE_LIMIT_S) as response:
            response.read(1)

    try:
        within(_WHOLE_S, answer)
    except urllib.error.HTTPError as error:
        if error.code == _PROXY_AUTHENTICATION_REQUIRED and (proxy := proxy_of(url, proxies)):
            raise ProxyRefused(proxy, f"it responds {error.code} {error.reason}") from error
        # A registry that requires a token is reachable.
        if not (error.code == _UNAUTHORIZED and source.get("kind") == "registry"):
            raise MachineProblem(f"it responds {error.code} {error.reason}") from error
    except OSError as error:
        reason = str(getattr(error, "reason", None) or error)
        tunnel = f"Tunnel connection failed: {_PROXY_AUTHENTICATION_REQUIRED}"
        if tunnel in reason and (proxy := proxy_of(url, proxies)):
            raise ProxyRefused(proxy, reason.replace("Tunnel connection failed:", "it responds")) from error
        raise MachineProblem(f"it does not respond: {reason}") from error
    if key := source.get("key"):
        repository = Repository(str(source["name"]), url, str(key), str(source.get("fingerprint") or ""))
        keys.checked_key(keys.fetch(repository.key, proxies) if "://" in repository.key else repository.key, repository)
