"""The GPU software of a machine, by role, as the module host gets it, from the machine's plan. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from gpunodes.ansible.module_utils.host.spec import Driver, File, Generated, OutputCheck, Service, Spec
from gpunodes.ansible.module_utils.packages import RequestedPackage
from gpunodes.errors import WrongInput
from gpunodes.planner import gpu_mig, package_sources
from gpunodes.planner.gpu_model import Facts, Group, Package, Plan, Source

_SECTION = "gpu"
"""The section of the ledger that records GPU software: it can be removed separately."""


def services(plan: Plan) -> tuple[str, ...]:
    """The services of the driver: persistence daemon, Fabric Manager."""
    return (
        *(("nvidia-persistenced",) if plan.persistence else ()),
        *(("nvidia-fabricmanager",) if plan.fabric_manager else ()),
    )


def by_role(
    plan: Plan,
    facts: Facts,
    sources: package_sources.SourceSettings,
    runtimes: Sequence[str],
    mig_program: str = "",
) -> dict[str, Spec]:
    """What each role of GPU software installs; nothing without GPUs.

    ``runtimes`` are those that get the container toolkit's configuration, ``mig_program`` is the source of
    module_utils/mig.py. Raises WrongInput for an unknown runtime and
    for an unknown key of a package source.
    """

    def packages(*groups: Group) -> Spec:
        wanted = [package for package in plan.packages if package.group in groups]
        # Headers always come from the operating system's own source.
        foreign = [package for package in wanted if package.group is not Group.HEADERS]
        return Spec(
            section=_SECTION,
            repositories=package_sources.of_packages(foreign, facts, sources),
            packages=tuple(map(_requested, wanted)),
        )

    if not plan.gpus:
        return {}
    if unknown := sorted(set(runtimes) - set(_CONFIGURATION)):
        remedy = "install the GPU software of this machine by hand"
        raise WrongInput(f"the container runtime is {unknown[0]}", " or ".join(_CONFIGURATION), remedy)
    driver = packages(Group.HEADERS, Group.DRIVER, Group.FABRIC_MANAGER)
    of_driver = {} if plan.source is Source.EXISTING else {"gpu_driver": _driver(driver, plan, str(facts["kernel"]))}
    cuda = packages(Group.CUDA, Group.CUDNN)
    return {
        **of_driver,
        "container_toolkit": _container_toolkit(packages(Group.TOOLKIT), plan, runtimes),
        # Not on a machine whose disk others will boot: they slice their own GPUs.
        "gpu_mig": gpu_mig.spec(_SECTION, "" if plan.expected else plan.sharing, mig_program),
        **({"cuda": replace(cuda, checks=_cuda_checks(plan))} if cuda.packages else {}),
    }


def _requested(package: Package) -> RequestedPackage:
    return RequestedPackage(
        name=package.name,
        version=package.version,
        hold=package.group is not Group.HEADERS,
        same_as=package.same_version_as,
        # A pinning package determines the versions of all packages chosen after it. Headers that are installed after
        # the driver's source would build the driver a second time.
        first=package.group is Group.HEADERS or "-pinning-" in package.name,
    )


def _driver(packages: Spec, plan: Plan, kernel: str) -> Spec:
    """The driver; the modules that are built for it are in the folder of the running ``kernel``."""
    modules = ("nvidia", "nvidia-uvm")
    conflicting = "nouveau" if plan.blacklist_nouveau else ""
    mark = "# Managed by gpunodes.\n"
    files = [File("/etc/modules-load.d/gpunodes-gpu.conf", mark + "".join(f"{name}\n" for name in modules))]
    if conflicting:
        text = f"{mark}blacklist {conflicting}\noptions {conflicting} modeset=0\n"
        files.append(File("/etc/modprobe.d/gpunodes-gpu.conf", text))
    return replace(
        packages,
        module_stream=plan.module_stream if packages.packages else "",
        holds=plan.hold,
        # Users that Debian's and NVIDIA's packages of nvidia-persistenced create; purging the packages does not delete
        # them.
        users=("nvpd", "nvidia-persistenced"),
        files=files,
        # Data of DKMS, including its signing key.
        directories=("/var/lib/dkms", f"/lib/modules/{kernel}/updates"),
        driver=Driver(modules, conflicting, loaded=not plan.expected),
        # Without a GPU these do not start.
        services=tuple(Service(name, started=not plan.expected) for name in services(plan)),
    )


# NVIDIA's devices are created without udev: systemd finds them by these links when it renews containers' device rules.
# Source: github.com/NVIDIA/nvidia-container-toolkit, issue 48.
_UDEV = File(
    "/etc/udev/rules.d/71-gpunodes-nvidia.rules",
    '# Managed by gpunodes.\nACTION=="add", DEVPATH=="/bus/pci/drivers/nvidia", '
    'RUN+="/usr/bin/nvidia-ctk system create-dev-char-symlinks --create-all"\n',
)
# An environment variable does not give an unprivileged container a GPU: images set such variables by themselves. The
# mounts that the kubelet adds for a pod with an allocated GPU count instead.
# Source: NVIDIA/k8s-device-plugin, README, DEVICE_LIST_STRATEGY; nvidia-container-toolkit, api/config/v1.
_REQUESTS = Generated(
    "/etc/nvidia-container-runtime/config.toml",
    (
        "nvidia-ctk",
        "config",
        "--config-file=%o",
        "--in-place",
        "--set=accept-nvidia-visible-devices-envvar-when-unprivileged=false",
        "--set=accept-nvidia-visible-devices-as-volume-mounts=true",
    ),
)
# Docker before 29.2 passes `docker run --gpus` on as that variable, and adds NVIDIA's hook. Neither images nor pods can
# add a hook, so the variable counts in containers with the hook only. In JSON a text contains no quotes without a
# backslash, so no name or variable of a container can look like a hook.
# Source: github.com/moby/moby, daemon/nvidia_linux.go of 26.1 and daemon/devices_nvidia_linux.go of 29.2.
_DOCKER_REQUESTS = Generated(
    "/etc/nvidia-container-runtime/gpunodes-docker.toml",
    (
        "nvidia-ctk",
        "config",
        "--config-file=%i",
        "--output=%o",
        "--set=accept-nvidia-visible-devices-envvar-when-unprivileged=true",
    ),
    input=_REQUESTS.path,
    when_exists=_REQUESTS.path,
)
_DOCKER_RUNTIME = File(
    "/usr/local/libexec/gpunodes/nvidia-container-runtime",
    f"""\
#!/bin/sh
# Managed by gpunodes. Docker starts containers with it: NVIDIA's runtime, which gives a container the GPUs of
# `docker run --gpus`, and none because of a variable that its image sets.
bundle=. previous=
for argument; do
    case $previous in --bundle | -b) bundle=$argument ;; esac
    case $argument in --bundle=*) bundle=${{argument#--bundle=}} ;; esac
    previous=$argument
done
if grep -qs '"path":"[^"]*/nvidia-container-runtime-hook","args":\\[' "$bundle/config.json"; then
    NVIDIA_CTK_CONFIG_FILE_PATH={_DOCKER_REQUESTS.path}
    export NVIDIA_CTK_CONFIG_FILE_PATH
fi
exec /usr/bin/nvidia-container-runtime "$@"
""",
    mode="0755",
)
_CONFIGURE = ("nvidia-ctk", "runtime", "configure")
_CONFIGURATION = {
    # In containerd 1.x a drop-in's section replaces the whole section of config.toml: nvidia-ctk starts from a copy of
    # it.
    "containerd": Generated(
        "/etc/containerd/conf.d/99-nvidia.toml",
        (
            *_CONFIGURE,
            "--runtime=containerd",
            "--config-source=file",
            "--config=%i",
            "--drop-in-config=%o",
            "--cdi.enabled",
        ),
        input="/etc/containerd/config.toml",
        when_exists="/etc/containerd/config.toml",
    ),
    # cri-dockerd does not pass CDI names on (0.4.0): pods get their GPU through NVIDIA's runtime, which does not change
    # containers without a GPU.
    "docker": Generated(
        "/etc/docker/daemon.json",
        (
            *_CONFIGURE,
            "--runtime=docker",
            "--config=%o",
            f"--nvidia-runtime-path={_DOCKER_RUNTIME.path}",
            "--nvidia-set-as-default",
            "--cdi.enabled",
        ),
        # The client, because Debian installs the daemon in /usr/sbin.
        when_exists="/usr/bin/docker",
    ),
}


def _container_toolkit(packages: Spec, plan: Plan, runtimes: Sequence[str]) -> Spec:
    return replace(
        packages,
        holds=plan.hold,
        files=(_UDEV, *((_DOCKER_RUNTIME,) if "docker" in runtimes else ())),
        generated=(
            _REQUESTS,
            *((_DOCKER_REQUESTS,) if "docker" in runtimes else ()),
            *(_CONFIGURATION[name] for name in runtimes),
        ),
        directories=(
            "/etc/containerd/conf.d",
            "/etc/nvidia-container-runtime",
            "/etc/nvidia-container-toolkit",
            "/run/cdi",
        ),
        devices=not plan.expected,
        services=tuple(map(Service, runtimes)),
    )


def _cuda_checks(plan: Plan) -> tuple[OutputCheck, ...]:
    """The checks in NVIDIA's installation guide that do not need a GPU: compilers run, and libraries load."""
    homes = {_cuda_version(package): _cuda_home(package) for package in plan.group(Group.CUDA)}
    libraries = (
        *(f"libcudart.so.{version.partition('.')[0]}" for version in homes),
        *(f"libcudnn.so.{package.version.partition('.')[0]}" for package in plan.group(Group.CUDNN)),
    )
    return (
        *(OutputCheck((f"{home}/bin/nvcc", "--version"), f"release {version}") for version, home in homes.items()),
        *(OutputCheck(("python3", "-c", f"import ctypes; ctypes.CDLL('{library}')")) for library in libraries),
    )


def _cuda_version(package: Package) -> str:
    """The CUDA version of a package, from its name (cuda-toolkit-13-0) or its version."""
    match = re.search(r"-(\d+)-(\d+)$", package.name)
    return ".".join(match.groups()) if match else package.version.removesuffix(".*")


def _cuda_home(package: Package) -> str:
    """The folder in which NVIDIA's or the distribution's packages install a CUDA toolkit."""
    return "/usr" if package.source is Source.DISTRIBUTION else f"/usr/local/cuda-{_cuda_version(package)}"
