"""The Debian packages that the mirror builds, with the layout of their publishers."""

from __future__ import annotations

from pathlib import Path

from gpunodes.lab.mirror.deb import DebPackage
from gpunodes.lab.mirror.tree import TreeEntry

REVISION = "1.1"
"""The revision of the first build of a release on pkgs.k8s.io."""

KUBERNETES = "Kubernetes Authors <dev@kubernetes.io>"

KUBELET_SERVICE = """\
[Unit]
Description=kubelet: The Kubernetes Node Agent
Documentation=https://kubernetes.io/docs/
Wants=network-online.target
After=network-online.target

[Service]
ExecStart=/usr/bin/kubelet
Restart=always
StartLimitInterval=0
RestartSec=10

[Install]
WantedBy=multi-user.target
"""

# kubeadm writes kubeadm-flags.env; /etc/default/kubelet is the administrator's.
KUBEADM_DROP_IN = """\
[Service]
Environment="KUBELET_KUBECONFIG_ARGS=--bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf \
--kubeconfig=/etc/kubernetes/kubelet.conf"
Environment="KUBELET_CONFIG_ARGS=--config=/var/lib/kubelet/config.yaml"
EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env
EnvironmentFile=-/etc/default/kubelet
ExecStart=
ExecStart=/usr/bin/kubelet $KUBELET_KUBECONFIG_ARGS $KUBELET_CONFIG_ARGS $KUBELET_KUBEADM_ARGS $KUBELET_EXTRA_ARGS
"""

CONTAINERD_SERVICE = """\
[Unit]
Description=containerd container runtime
Documentation=https://containerd.io
After=network.target dbus.service

[Service]
ExecStartPre=-/sbin/modprobe overlay
ExecStart=/usr/bin/containerd
Type=notify
Delegate=yes
KillMode=process
Restart=always
RestartSec=5
LimitNPROC=infinity
LimitCORE=infinity
TasksMax=infinity
OOMScoreAdjust=-999

[Install]
WantedBy=multi-user.target
"""

# Docker's package disables the CRI plugin: Docker Engine does not need it.
CONTAINERD_CONFIG = 'disabled_plugins = ["cri"]\n'

_POSTINST = """\
#!/bin/sh
set -e
if [ "$1" = configure ] && [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    {then}
fi
"""
_PRERM = """\
#!/bin/sh
set -e
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
    systemctl disable --now {unit}
fi
"""
_POSTRM = """\
#!/bin/sh
set -e
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
fi
"""


def _scripts(unit: str, then: str) -> tuple[tuple[str, str], ...]:
    return (
        ("postinst", _POSTINST.format(then=then)),
        ("prerm", _PRERM.format(unit=unit)),
        ("postrm", _POSTRM),
    )


def kubernetes(version: str, architecture: str, binaries: Path) -> list[tuple[DebPackage, list[TreeEntry]]]:
    """kubelet, kubeadm and kubectl; with the dependencies of 1.32 and later."""

    def tool(name: str, description: str) -> tuple[DebPackage, list[TreeEntry]]:
        package = DebPackage(name, f"{version}-{REVISION}", architecture, KUBERNETES, description)
        return package, [TreeEntry(f"/usr/bin/{name}", binaries / name, 0o755)]

    drop_in = TreeEntry("/usr/lib/systemd/system/kubelet.service.d/10-kubeadm.conf", KUBEADM_DROP_IN.encode())
    kubeadm, kubeadm_files = tool("kubeadm", "Command-line utility for administering a Kubernetes cluster")

    kubelet = DebPackage(
        "kubelet",
        f"{version}-{REVISION}",
        architecture,
        KUBERNETES,
        "Node agent for Kubernetes clusters",
        section="net",
        depends="kubernetes-cni (>= 1.2.0), mount, util-linux",
        recommends="iptables (>= 1.8.4)",
        conffiles=("/etc/default/kubelet",),
        scripts=_scripts("kubelet.service", ":"),
    )
    return [
        (
            kubelet,
            [
                TreeEntry("/usr/bin/kubelet", binaries / "kubelet", 0o755),
                TreeEntry("/usr/lib/systemd/system/kubelet.service", KUBELET_SERVICE.encode(), 0o600),
                TreeEntry("/etc/default/kubelet", b"KUBELET_EXTRA_ARGS=\n"),
                TreeEntry("/etc/kubernetes/manifests/.kubelet-keep", b""),
                TreeEntry("/var/lib/kubelet/.kubelet-keep", b""),
            ],
        ),
        (kubeadm, [*kubeadm_files, drop_in]),
        tool("kubectl", "Command-line utility for interacting with a Kubernetes cluster"),
    ]


def cri_tools(version: str, architecture: str, binaries: Path) -> tuple[DebPackage, list[TreeEntry]]:
    """crictl."""
    package = DebPackage(
        "cri-tools",
        f"{version}-{REVISION}",
        architecture,
        KUBERNETES,
        "Command-line utility for interacting with a container runtime",
    )
    return package, [TreeEntry("/usr/bin/crictl", binaries / "crictl", 0o755)]


def kubernetes_cni(version: str, architecture: str, binaries: Path) -> tuple[DebPackage, list[TreeEntry]]:
    """The CNI plugins, in /opt/cni/bin."""
    package = DebPackage(
        "kubernetes-cni",
        f"{version}-{REVISION}",
        architecture,
        KUBERNETES,
        "Binaries required to provision kubernetes container networking",
        section="net",
    )
    return package, [TreeEntry(f"/opt/cni/bin/{file.name}", file, 0o755) for file in sorted(binaries.iterdir())]


def containerd_io(
    version: str, debian: tuple[str, int], architecture: str, containerd: Path, runc: Path
) -> tuple[DebPackage, list[TreeEntry]]:
    """Docker's containerd.io for the Debian release ``debian`` (code name, number): containerd and runc."""
    codename, number = debian
    package = DebPackage(
        "containerd.io",
        f"{version}-1~debian.{number}~{codename}",
        architecture,
        "Containerd team <help@containerd.io>",
        "An open and reliable container runtime",
        section="devel",
        provides="containerd, runc",
        conflicts="containerd, runc",
        replaces="containerd, runc",
        conffiles=("/etc/containerd/config.toml",),
        scripts=_scripts("containerd.service", "systemctl enable --now containerd.service"),
    )
    programs = [TreeEntry(f"/usr/bin/{file.name}", file, 0o755) for file in sorted(containerd.iterdir())]
    return package, [
        *programs,
        TreeEntry("/usr/bin/runc", runc / "runc", 0o755),
        TreeEntry("/usr/lib/systemd/system/containerd.service", CONTAINERD_SERVICE.encode()),
        TreeEntry("/etc/containerd/config.toml", CONTAINERD_CONFIG.encode()),
    ]
