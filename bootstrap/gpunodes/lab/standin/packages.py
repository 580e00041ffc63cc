"""The packages of the stand-in tree: NVIDIA's names and dependencies, with the stand-in's code.

Names and dependencies follow NVIDIA's CUDA repository for Debian (driver installation guide, "Debian" and "Version
locking"; dpkg listings of machines that use it), as far as installing, pinning, holding and removing need them.
Packages for displays are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpunodes.lab.mirror.deb import DebPackage
from gpunodes.lab.mirror.tree import TreeEntry
from gpunodes.lab.standin.objects import SOURCES, Objects

DRIVERS = ("580.65.06", "590.44.01", "595.45.04")
"""Driver versions in the tree: a long-term branch, a newer one that pins must prevent, and one that does not build."""
CUDA = ("13.0", "13.1")
CUDNN = "9.14.0.64"
STUBS = ("libcuda.so.1", "libcudart.so.13", "libcudnn.so.9")
"""Libraries without functions: they can be loaded."""

_MAINTAINER = "gpunodes lab <nobody@localhost>"
_ABOUT = "(stand-in of the gpunodes lab)"
_LIBRARIES = "/usr/lib/x86_64-linux-gnu"
_FIRST_WITH_STABLE_NAMES = 590
"""From this branch on package names do not contain the branch (driver installation guide, "Recent Updates")."""

Parts = tuple[DebPackage, list[TreeEntry]]

# make's command line passes STANDIN_FLAGS to Kbuild.
_DKMS = """PACKAGE_NAME="nvidia"
PACKAGE_VERSION="{version}"
MAKE[0]="make -C ${{kernel_source_dir}} M=${{dkms_tree}}/nvidia/{version}/build STANDIN_VERSION={version} \
STANDIN_FLAGS={flags} modules"
CLEAN="true"
BUILT_MODULE_NAME[0]="nvidia"
DEST_MODULE_LOCATION[0]="/updates/dkms"
BUILT_MODULE_NAME[1]="nvidia-uvm"
DEST_MODULE_LOCATION[1]="/updates/dkms"
AUTOINSTALL="yes"
"""
_DKMS_POSTINST = """#!/bin/sh
set -e
if [ "$1" = configure ]; then
    /usr/lib/dkms/common.postinst nvidia {version} "" "" "$2"
fi
"""
_DKMS_PRERM = """#!/bin/sh
set -e
case "$1" in
    remove|upgrade|deconfigure) dkms remove nvidia/{version} --all || true ;;
esac
"""
_FLAGS = {"595.45.04": "-include/gpunodes-no-such-header.h"}
_NOUVEAU = b"# The stand-in's packages disable it, as NVIDIA's do.\nblacklist nouveau\noptions nouveau modeset=0\n"
_SOFTDEP = b"softdep nvidia post: nvidia-uvm\n"

_MODPROBE = b"""#!/bin/sh
# Stand-in: the driver creates its device nodes itself.
exec modprobe nvidia
"""
_PERSISTENCED = b"""#!/bin/sh
# Stand-in: like the real daemon it loads the driver and keeps the GPUs open.
nvidia-modprobe
if ! [ -c /dev/nvidiactl ]; then
    echo "Failed to query NVIDIA devices. Please ensure that the NVIDIA device files (/dev/nvidia*) exist" >&2
    exit 1
fi
for node in /dev/nvidia[0-9]*; do
    if [ -c "$node" ]; then
        ( exec 3<"$node" && exec sleep infinity ) &
    fi
done
exec sleep infinity 3</dev/nvidiactl
"""
_PERSISTENCED_SERVICE = b"""[Unit]
Description=NVIDIA Persistence Daemon (stand-in)

[Service]
ExecStart=/usr/bin/nvidia-persistenced

[Install]
WantedBy=multi-user.target
"""
# The user of the real package, which a purge does not remove (nvidia-persistenced 550.163.01-1, postinst).
_PERSISTENCED_THEN = """\
getent passwd nvpd >/dev/null || useradd --system --user-group --home-dir /var/run/nvpd --no-create-home \\
    --shell /usr/sbin/nologin --comment 'NVIDIA Persistence Daemon' nvpd
    systemctl enable nvidia-persistenced.service"""
# As the real one it exits when its version is not the driver's, or without an NVSwitch.
_FABRICMANAGER = """#!/bin/sh
loaded=$(cat /sys/module/nvidia/version 2>/dev/null)
if [ "$loaded" != {version} ]; then
    echo "fabric manager version {version} does not match the driver's version ${{loaded:-none}}" >&2
    exit 1
fi
if ! grep -q 0x068000 /sys/bus/pci/devices/*/class; then
    echo "no NVSwitch found" >&2
    exit 1
fi
exec sleep infinity
"""
_FABRICMANAGER_SERVICE = b"""[Unit]
Description=NVIDIA fabric manager service (stand-in)

[Service]
ExecStart=/usr/bin/nv-fabricmanager

[Install]
WantedBy=multi-user.target
"""
_NVCC = """#!/bin/sh
case "$1" in
--version|-V)
    echo "nvcc: NVIDIA (R) Cuda compiler driver"
    echo "Cuda compilation tools, release {version}, V{version}.0 (stand-in of the gpunodes lab)"
    ;;
*)
    echo "nvcc: the stand-in cannot compile" >&2
    exit 1
    ;;
esac
"""
_PINNED = """# The packages of this branch only (apt_preferences(5)).
Package: nvidia-* libnvidia-* libcuda1 cuda-drivers*
Pin: version {branch}.*
Pin-Priority: 1000
"""
# Packages with versions other than the driver's.
_UNPINNED = """
Package: nvidia-container-toolkit* libnvidia-container* nvidia-driver-pinning-*
Pin: version *
Pin-Priority: 500
"""

_POSTINST = """#!/bin/sh
set -e
if [ "$1" = configure ] && [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    {then}
fi
"""
_PRERM = """#!/bin/sh
set -e
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
    systemctl disable --now {unit}
fi
"""
_CUDA_POSTINST = """#!/bin/sh
set -e
update-alternatives --install /usr/local/cuda cuda {home} {priority}
ldconfig
"""
_CUDA_PRERM = """#!/bin/sh
set -e
if [ "$1" = remove ]; then
    update-alternatives --remove cuda {home}
fi
"""
_LDCONFIG = (("postinst", "#!/bin/sh\nset -e\nldconfig\n"), ("postrm", "#!/bin/sh\nset -e\nldconfig\n"))


def _service(unit: str, then: str) -> tuple[tuple[str, str], ...]:
    return ("postinst", _POSTINST.format(then=then)), ("prerm", _PRERM.format(unit=unit))


def _package(
    name: str,
    version: str,
    text: str,
    depends: Sequence[str] = (),
    scripts: tuple[tuple[str, str], ...] = (),
    section: str = "admin",
    instead_of: str = "",
    provides: str = "",
) -> DebPackage:
    """A package of the stand-in; ``instead_of`` is a package that cannot be installed at the same time."""
    return DebPackage(
        name,
        version,
        "amd64",
        _MAINTAINER,
        f"{text} {_ABOUT}",
        depends=", ".join(depends),
        scripts=scripts,
        section=section,
        provides=provides,
        conflicts=instead_of,
        replaces=instead_of,
    )


def driver(version: str, objects: Objects) -> list[Parts]:
    """All packages of one driver version."""
    branch = version.partition(".")[0]
    full = f"{version}-1"

    def same(*names: str) -> list[str]:
        return [f"{name} (= {full})" for name in names]

    def meta(name: str, depends: Sequence[str]) -> Parts:
        return _package(name, full, "NVIDIA driver metapackage", depends, section="metapackages"), []

    open_modules = same("nvidia-driver", "nvidia-driver-cuda", "nvidia-kernel-open-dkms")
    proprietary = same("nvidia-driver", "nvidia-driver-cuda", "nvidia-kernel-dkms")
    parts = [
        _pinning(branch),
        _dkms("nvidia-kernel-open-dkms", "nvidia-kernel-dkms", version, flags=_FLAGS.get(version, "")),
        _dkms("nvidia-kernel-dkms", "nvidia-kernel-open-dkms", version, flags="-DSTANDIN_PROPRIETARY"),
        (
            _package("nvidia-kernel-support", full, "NVIDIA kernel module support files"),
            [
                TreeEntry("/usr/lib/modprobe.d/nvidia-blacklists-nouveau.conf", _NOUVEAU),
                TreeEntry("/usr/lib/modprobe.d/nvidia.conf", _SOFTDEP),
            ],
        ),
        (
            _package("nvidia-modprobe", full, "utility to load NVIDIA kernel modules", ["kmod"]),
            [TreeEntry("/usr/bin/nvidia-modprobe", _MODPROBE, 0o755)],
        ),
        _library("libnvidia-ml1", version, "libnvidia-ml.so", objects.library(f"libnvidia-ml.so.{version}")),
        _library("libcuda1", version, "libcuda.so", objects.library("libcuda.so.1")),
        (
            _package(
                "nvidia-persistenced", full, "daemon to keep GPUs initialised", same("nvidia-modprobe"),
                _service("nvidia-persistenced.service", _PERSISTENCED_THEN),
            ),
            [
                TreeEntry("/usr/bin/nvidia-persistenced", _PERSISTENCED, 0o755),
                TreeEntry("/usr/lib/systemd/system/nvidia-persistenced.service", _PERSISTENCED_SERVICE),
            ],
        ),
        (
            _package(
                "nvidia-driver-cuda", full, "NVIDIA driver CUDA integration components, with NVIDIA's own nvidia-smi",
                same("libcuda1", "libnvidia-ml1", "nvidia-modprobe", "nvidia-persistenced"),
                provides="nvidia-smi", instead_of="nvidia-smi",
            ),
            [
                TreeEntry("/usr/bin/nvidia-smi", objects.nvidia_smi, 0o755),
                TreeEntry("/usr/share/doc/nvidia-driver-cuda/copyright", objects.library("copyright")),
            ],
        ),
        meta("nvidia-driver", same("nvidia-driver-cuda")),
        meta("nvidia-open", open_modules),
        meta("cuda-drivers", proprietary),
        (
            _package(
                "nvidia-fabricmanager", full, "fabric manager for NVSwitch machines",
                scripts=_service("nvidia-fabricmanager.service", ":"),
            ),
            [
                TreeEntry("/usr/bin/nv-fabricmanager", _FABRICMANAGER.format(version=version).encode(), 0o755),
                TreeEntry("/usr/lib/systemd/system/nvidia-fabricmanager.service", _FABRICMANAGER_SERVICE),
            ],
        ),
    ]  # fmt: skip
    if int(branch) < _FIRST_WITH_STABLE_NAMES:
        # They do not depend on an exact version, which is why the guide recommends to pin the branch.
        for name in ("nvidia-open", "cuda-drivers"):
            needs = [f"{name} (>= {full})"]
            parts.append((_package(f"{name}-{branch}", full, "NVIDIA driver metapackage", needs), []))
    return parts


def _pinning(branch: str) -> Parts:
    text = _PINNED.format(branch=branch) + _UNPINNED
    name = f"nvidia-driver-pinning-{branch}"
    others = ", ".join(name.replace(branch, each[:3]) for each in DRIVERS if not each.startswith(branch))
    path = f"/etc/apt/preferences.d/{name}"
    # A conffile, as debhelper makes all files of /etc: it stays when the package is removed and not purged.
    package = _package(name, f"{branch}-1", "keeps to a driver branch", instead_of=others)
    return replace(package, conffiles=(path,)), [TreeEntry(path, text.encode())]


def _dkms(name: str, other: str, version: str, flags: str) -> Parts:
    package = _package(
        name,
        f"{version}-1",
        "NVIDIA kernel module DKMS source",
        ["dkms", f"nvidia-kernel-support (= {version}-1)"],
        (("postinst", _DKMS_POSTINST.format(version=version)), ("prerm", _DKMS_PRERM.format(version=version))),
        provides=f"nvidia-kernel-{version}",
        instead_of=other,
    )
    folder = f"/usr/src/nvidia-{version}"
    files = [TreeEntry(f"{folder}/{path.name}", path) for path in sorted((SOURCES / "nvidia").iterdir())]
    return package, [*files, TreeEntry(f"{folder}/dkms.conf", _DKMS.format(version=version, flags=flags).encode())]


def _library(name: str, version: str, link: str, file: Path) -> Parts:
    package = _package(name, f"{version}-1", "NVIDIA library", ["libc6"], _LDCONFIG, section="libs")
    return package, [
        TreeEntry(f"{_LIBRARIES}/{link}.{version}", file, 0o644),
        TreeEntry(f"{_LIBRARIES}/{link}.1", link=f"{link}.{version}"),
    ]


def cuda_toolkit(version: str, objects: Objects) -> Parts:
    """cuda-toolkit-13-0 and the like: a compiler that prints its version, a run-time library without functions."""
    dashed, home = version.replace(".", "-"), f"/usr/local/cuda-{version}"
    runtime = f"libcudart.so.{version.partition('.')[0]}"
    alternatives = (
        ("postinst", _CUDA_POSTINST.format(home=home, priority=version.replace(".", ""))),
        ("prerm", _CUDA_PRERM.format(home=home)),
        _LDCONFIG[1],
    )
    package = _package(
        f"cuda-toolkit-{dashed}", f"{version}.0-1", "CUDA toolkit", scripts=alternatives, section="devel"
    )
    return package, [
        TreeEntry(f"{home}/bin/nvcc", _NVCC.format(version=version).encode(), 0o755),
        TreeEntry(f"{home}/lib64/{runtime}", objects.library(runtime)),
        TreeEntry(f"{home}/version.json", f'{{"cuda": {{"name": "CUDA SDK", "version": "{version}.0"}}}}\n'.encode()),
        TreeEntry(f"/etc/ld.so.conf.d/989_cuda-{dashed}.conf", f"{home}/lib64\n".encode()),
    ]


def cudnn(cuda: str, objects: Objects) -> list[Parts]:
    """The metapackage cudnn9-cuda-13 and its library."""
    major = CUDNN.partition(".")[0]
    name = f"libcudnn{major}-cuda-{cuda}"
    package = _package(name, f"{CUDNN}-1", "cuDNN runtime library", ["libc6"], _LDCONFIG, section="libs")
    files = [
        TreeEntry(f"{_LIBRARIES}/libcudnn.so.{CUDNN.rpartition('.')[0]}", objects.library("libcudnn.so.9")),
        TreeEntry(f"{_LIBRARIES}/libcudnn.so.{major}", link=f"libcudnn.so.{CUDNN.rpartition('.')[0]}"),
    ]
    meta = _package(
        f"cudnn{major}-cuda-{cuda}",
        f"{CUDNN}-1",
        "cuDNN metapackage",
        [f"{name} (= {CUDNN}-1)"],
        section="metapackages",
    )
    return [(package, files), (meta, [])]


def container_toolkit(version: str, binaries: Path, source: Path) -> list[Parts]:
    """NVIDIA's own programs and unit files; libnvidia-container, which CDI does not use, is a name only."""
    full = f"{version}-1"
    units, rules = source / "deployments" / "systemd", source / "deployments" / "udev"
    configure = "nvidia-ctk --quiet config --config-file=/etc/nvidia-container-runtime/config.toml --in-place"
    started = "nvidia-cdi-refresh.path nvidia-cdi-refresh.service"
    postinst, prerm = _service(started, f"systemctl enable {started}")
    base = _package(
        "nvidia-container-toolkit-base",
        full,
        "NVIDIA Container Toolkit Base",
        scripts=((postinst[0], postinst[1].replace("if [", f"{configure}\nif [", 1)), prerm),
    )
    programs = ("nvidia-container-runtime", "nvidia-container-runtime.cdi", "nvidia-container-runtime.legacy",
                "nvidia-cdi-hook", "nvidia-ctk")  # fmt: skip
    system = "/usr/lib/systemd/system"
    base_files = [
        *(TreeEntry(f"/usr/bin/{name}", binaries / name, 0o755) for name in programs),
        TreeEntry(f"{system}/nvidia-cdi-refresh.service", units / "nvidia-cdi-refresh.service"),
        TreeEntry(f"{system}/nvidia-cdi-refresh.path", units / "nvidia-cdi-refresh.path"),
        TreeEntry(
            f"{system}/nvidia-cdi-refresh.service.d/10-container-engines.conf", units / "10-container-engines.conf"
        ),
        TreeEntry("/etc/nvidia-container-toolkit/nvidia-cdi-refresh.env", units / "nvidia-cdi-refresh.env"),
        TreeEntry("/usr/lib/udev/rules.d/99-nvidia-cdi-refresh.rules", rules / "99-nvidia-cdi-refresh.rules"),
    ]
    needs = [f"{name} (= {full})" for name in ("nvidia-container-toolkit-base", "libnvidia-container-tools")]
    cli = b"#!/bin/sh\necho 'stand-in: this lab supports CDI only' >&2\nexit 1\n"
    hook = TreeEntry("/usr/bin/nvidia-container-runtime-hook", binaries / "nvidia-container-runtime-hook", 0o755)
    return [
        (base, base_files),
        (_package("nvidia-container-toolkit", full, "NVIDIA Container toolkit", needs), [hook]),
        (
            _package("libnvidia-container-tools", full, "NVIDIA container runtime library tools",
                     [f"libnvidia-container1 (= {full})"]),
            [TreeEntry("/usr/bin/nvidia-container-cli", cli, 0o755)],
        ),
        (_package("libnvidia-container1", full, "NVIDIA container runtime library", section="libs"), []),
    ]  # fmt: skip


def cri_dockerd(version: str, suite: str, binaries: Path, source: Path) -> Parts:
    """Mirantis' cri-dockerd as its releases package it (PACKAGE.VERSION-0.debian-SUITE)."""
    units = source / "packaging" / "systemd"
    package = DebPackage(
        "cri-dockerd",
        f"{version}.3-0~debian-{suite}",
        "amd64",
        "Mirantis <support@mirantis.com>",
        "CRI interface for Docker Application Container Engine",
        scripts=_service(
            "cri-docker.service cri-docker.socket", "systemctl enable cri-docker.service cri-docker.socket"
        ),
    )
    return package, [
        TreeEntry("/usr/bin/cri-dockerd", binaries / "cri-dockerd", 0o755),
        TreeEntry("/usr/lib/systemd/system/cri-docker.service", units / "cri-docker.service"),
        TreeEntry("/usr/lib/systemd/system/cri-docker.socket", units / "cri-docker.socket"),
    ]
