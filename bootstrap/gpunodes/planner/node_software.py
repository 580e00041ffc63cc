"""The software of every node, by role, as the module host gets it: kernel, container runtime, Kubernetes. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpunodes.ansible.module_utils.facts import KUBELET_ORDER
from gpunodes.ansible.module_utils.host.spec import File, Repository, Service, Spec
from gpunodes.ansible.module_utils.packages import RequestedPackage
from gpunodes.planner import versions
from gpunodes.planner.gpu_case import version_of
from gpunodes.planner.package_sources import major_of

# Kernel modules for containerd's snapshots and pod networking, and kernel settings for the latter.
# Source: kubernetes.io, "Container Runtimes".
KERNEL = Spec(
    modules=("overlay", "br_netfilter"),
    sysctls={
        "net.bridge.bridge-nf-call-iptables": "1",
        "net.bridge.bridge-nf-call-ip6tables": "1",
        "net.ipv4.ip_forward": "1",
    },
    swap_off=True,
    # Each containerd-shim, kubelet and many programs in pods hold inotify instances and watches of root: with the
    # kernel's 128 instances pods fail with "too many open files". Sources: kind.sigs.k8s.io, "Known Issues" (watches,
    # and at least 512 instances); github.com/k3s-io/k3s, issues 10020 and 10325 (the shims; 256 instances are too few).
    # An instance costs memory only while it is open.
    # kernel.pid_max: the kernel's maximum, which systemd sets on 64 bits, too (sysctl.d/50-pid-max.conf); without it
    # some systems have 32768. Source: kubernetes.io, "Process ID Limits And Reservations".
    raised={
        "fs.inotify.max_user_instances": "8192",
        "fs.inotify.max_user_watches": "524288",
        "kernel.pid_max": "4194304",
    },
)


def node(time: Spec, moved: Mapping[str, str], data_directory: str) -> Spec:
    """The kernel of a node, its time service, and where the data of its services is."""
    return replace(
        time,
        modules=KERNEL.modules,
        sysctls=KERNEL.sysctls,
        raised=KERNEL.raised,
        swap_off=KERNEL.swap_off,
        moved=moved,
        data_directory=data_directory,
    )


def sandbox(minor: str) -> str:
    """The image that holds a pod's namespaces; of the newest minor if ``minor`` is unknown."""
    known = versions.minors()
    row = known.get(minor) or list(known.values())[-1]
    return f"registry.k8s.io/pause:{row['pause']}"


# containerd

# Configuration by containerd's major version. Drop-ins are left to others, such as GPU runtimes.
# Image layers are synced to disk: otherwise an image that was unpacked just before a power cut can contain empty files,
# and containerd never detects that (containerd issues 8895 and 8973; the settings: its pull requests 9401 in 1.7, 10284
# in 2.0).
_CONFIG_V2 = """\
# Managed by gpunodes. Drop-ins belong into /etc/containerd/conf.d.
version = 2
imports = ["/etc/containerd/conf.d/*.toml"]

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{sandbox}"
  image_pull_with_sync_fs = true

[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/opt/cni/bin"
  conf_dir = "/etc/cni/net.d"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  SystemdCgroup = true

[plugins."io.containerd.grpc.v1.cri".registry]
  config_path = "/etc/containerd/certs.d"
"""
_CONFIG_V3 = """\
# Managed by gpunodes. Drop-ins belong into /etc/containerd/conf.d.
version = 3
imports = ["/etc/containerd/conf.d/*.toml"]

[plugins."io.containerd.service.v1.diff-service"]
  sync_fs = true

[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{sandbox}"

[plugins."io.containerd.cri.v1.images".registry]
  config_path = "/etc/containerd/certs.d"

[plugins."io.containerd.cri.v1.runtime".cni]
  conf_dir = "/etc/cni/net.d"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
  SystemdCgroup = true
"""


# containerd creates /etc/cni at its first start, regardless of its configuration.
CONTAINERD_FOLDERS = ("/etc/cni", "/etc/containerd", "/opt/containerd", "/run/containerd", "/var/lib/containerd")


def containerd(
    repositories: Sequence[Repository],
    sandbox_image: str,
    mirrors: Mapping[str, str],
    images: Sequence[str],
    *,
    community: bool,
    version: str = "",
) -> Spec:
    """containerd 1.7 or 2.x, of a pattern of versions: containerd.io with ``community``, else the distribution's.

    It pulls ``images`` in the background.
    """
    package = "containerd.io" if community else "containerd"
    contents = {"1.[67].*": _CONFIG_V2, "2.*": _CONFIG_V3}
    config = File(
        path="/etc/containerd/config.toml",
        package=package,
        contents={pattern: text.replace("{sandbox}", sandbox_image) for pattern, text in contents.items()},
    )
    return Spec(
        repositories=repositories,
        packages=(RequestedPackage(package, version, hold=True),),
        files=(config, *registry_hosts(mirrors)),
        directories=CONTAINERD_FOLDERS,
        services=(Service("containerd", proxied=True),),
        images=images,
    )


def registry_hosts(mirrors: Mapping[str, str]) -> list[File]:
    """containerd's hosts.toml for every mirrored registry (containerd, docs/hosts.md)."""
    servers = {"docker.io": "registry-1.docker.io"}
    return [
        File(
            f"/etc/containerd/certs.d/{registry}/hosts.toml",
            "# Managed by gpunodes.\n"
            f'server = "https://{servers.get(registry, registry)}"\n\n'
            f'[host."{mirror.rstrip("/")}"]\n  capabilities = ["pull", "resolve"]\n',
        )
        for registry, mirror in sorted(mirrors.items())
    ]


# Docker


def docker(
    repositories: Sequence[Repository], system: Mapping[str, Any], users: Sequence[str], *, community: bool
) -> Spec:
    """Docker's engine: docker-ce with ``community``, else the distribution's. It uses the machine's containerd.

    ``users`` are members of the group docker. It needs no /etc/docker/daemon.json: with cgroup v2 Docker uses the
    systemd cgroup driver by default.
    """
    # Since Debian 13 the client is a separate package.
    split = system["id"] == "debian" and version_of(major_of(system)) >= (13,)
    distribution = ("docker.io", "docker-cli") if split else ("docker.io",)
    names = ("docker-ce", "docker-ce-cli") if community else distribution
    return Spec(
        repositories=repositories,
        packages=tuple(RequestedPackage(name, hold=True) for name in names),
        groups=("docker",),
        members={"docker": users},
        # Docker sets the policy DROP when it switches forwarding on, as long as Kubernetes has not done so before.
        forwards=True,
        directories=("/etc/docker", "/var/lib/docker", "/run/docker"),
        services=(Service("docker", proxied=True),),
    )


_CRI_DOCKERD_UNIT = """\
# Managed by gpunodes.
[Service]
ExecStart=
ExecStart=/usr/bin/cri-dockerd --container-runtime-endpoint fd:// --pod-infra-container-image={sandbox}
"""


def cri_dockerd(repository: Repository, sandbox_image: str) -> Spec:
    """cri-dockerd: Kubernetes uses Docker through it since 1.24 removed dockershim."""
    path = "/etc/systemd/system/cri-docker.service.d/10-gpunodes.conf"
    return Spec(
        repositories=(repository,),
        packages=(RequestedPackage("cri-dockerd", hold=True),),
        files=(File(path, _CRI_DOCKERD_UNIT.replace("{sandbox}", sandbox_image)),),
        directories=("/var/lib/cri-dockerd",),
        services=(Service("cri-docker"),),
    )


# Kubernetes

# kubeadm calls conntrack, ip and mount. iptables shows the rules of kube-proxy and flannel, crictl (cri-tools) shows
# containers; kubeadm's package does not depend on crictl any more (kubernetes/release, pull request 3626).
_TOOLS = {
    "apt": ("conntrack", "cri-tools", "ethtool", "iptables"),
    "dnf": ("conntrack-tools", "cri-tools", "ethtool", "iptables-nft"),
}
# The kubelet's unit waits for the network only (kubernetes/release, kubelet.service). At boot it then starts before its
# runtime, fails, and restarts after 10 s. systemd ignores units that are not installed.
_ORDER = File(
    KUBELET_ORDER,
    "# Managed by gpunodes.\n[Unit]\nAfter=containerd.service docker.service cri-docker.service\n",
)
_DIRECTORIES = (
    "/etc/kubernetes",
    "/etc/cni",
    "/opt/cni",
    "/run/flannel",
    "/usr/libexec/kubernetes",
    "/var/lib/cni",
    "/var/lib/etcd",
    "/var/lib/kubelet",
    "/var/log/containers",
    "/var/log/kubernetes",
    "/var/log/pods",
)


def kubernetes(
    version: str,
    repository: Repository,
    *,
    package_manager: str,
    kubectl: bool,
    socket: str,
    gates: Mapping[str, bool],
    pod_pids_limit: int,
    images: Sequence[str],
    prepares: bool = False,
    replace: bool = False,
) -> Spec:
    """kubelet, kubeadm and, with ``kubectl``, kubectl, at one version: a minor or an exact one.

    With ``replace`` other versions are upgraded or downgraded to it.
    ``package_manager`` is apt or dnf, ``socket`` that of the runtime. An unknown gate would stop the kubelet: preflight
    refuses it. A pod may have ``pod_pids_limit`` processes, -1 for any number. containerd pulls ``images`` in the
    background, with ``{kubelet}`` replaced by the kubelet's version.
    If the machine only ``prepares``, its kubelet is off: without a configuration it would fail every ten seconds.
    """
    pattern = f"{version}-*" if versions.is_exact(version) else f"{version}.*"
    names = ("kubelet", "kubeadm", *(("kubectl",) if kubectl else ()))
    crictl = f"# Managed by gpunodes.\nruntime-endpoint: {socket}\nimage-endpoint: {socket}\n"
    own, unused = _kubelet_files(gates, pod_pids_limit)
    return Spec(
        repositories=(repository,),
        packages=(
            *(RequestedPackage(name, pattern, hold=True, replace=replace) for name in names),
            *(RequestedPackage(name) for name in _TOOLS[package_manager]),
        ),
        files=(File("/etc/crictl.yaml", crictl), _ORDER, *own),
        absent=unused,
        directories=_DIRECTORIES,
        # The kubelet calls only the API server; the plugins that it starts for credentials of registries inherit this.
        services=(
            Service("kubelet", off=True)
            if prepares
            else Service("kubelet", when_exists="/var/lib/kubelet/config.yaml", proxied=True),
        ),
        images=images,
    )


KUBELET_CONFIG = "/etc/gpunodes/kubelet.conf.d"
"""Drop-ins of the kubelet's configuration, for one node: all nodes share kubeadm's kubelet configuration.

Source: kubernetes.io, "Set Kubelet Parameters Via A Configuration File" (--config-dir, from 1.30 on).
"""


def config_arguments(more: str = "") -> str:
    """The line of a systemd unit by which the kubelet reads the drop-ins, with ``more`` arguments."""
    return (
        f'Environment="KUBELET_CONFIG_ARGS=--config=/var/lib/kubelet/config.yaml --config-dir={KUBELET_CONFIG}{more}"\n'
    )


def _kubelet_files(gates: Mapping[str, bool], pod_pids_limit: int) -> tuple[Sequence[File], Sequence[str]]:
    """The kubelet's configuration of this node only, and the paths of files that it does not need."""
    wanted: dict[str, dict[str, Any]] = {
        f"{KUBELET_CONFIG}/10-feature-gates.conf": {"featureGates": dict(gates)} if gates else {},
        f"{KUBELET_CONFIG}/10-pod-pids-limit.conf": {"podPidsLimit": pod_pids_limit} if pod_pids_limit >= 0 else {},
    }
    kind = {"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration"}
    files = [
        File(path, json.dumps({**kind, **content}, sort_keys=True) + "\n")
        for path, content in wanted.items()
        if content
    ]
    unit = File(
        "/etc/systemd/system/kubelet.service.d/20-gpunodes.conf",
        f"# Managed by gpunodes.\n[Service]\n{config_arguments()}",
    )
    unused = [path for path, content in wanted.items() if not content]
    return ([*files, unit], unused) if files else ([], [*unused, unit.path])


def kept_by_others(wanted: Mapping[str, Spec], facts: Mapping[str, Any], target: str) -> Mapping[str, Spec]:
    """``wanted``, or for an upgrade to ``target`` of a node that others made, Kubernetes' packages alone.

    Their container runtime may get GPUs and private registries by its configuration, their kubelet settings by files of
    its unit: an upgrade leaves both as they are.
    """
    own = facts.get("kubernetes") or {}
    if not target or own.get("configured", True):
        return wanted
    kubernetes = wanted["kubernetes"]
    replaced = Spec(
        repositories=kubernetes.repositories,
        packages=tuple(package for package in kubernetes.packages if package.replace),
        services=kubernetes.services,
    )
    return {**dict.fromkeys(wanted, Spec()), "kubernetes": replaced}
