"""The phases of every run, once: help, progress, --dry-run, --skip-phase and the documentation derive from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gpunodes.errors import WrongInput
from gpunodes.model import Only, Phase

PREFLIGHT = Phase(
    "preflight", "Preflight", "Look for all that would stop the run, on all machines, before anything is changed."
)
NODE = Phase("node", "Prepare the machine", "Kernel modules and settings that pods' networking needs; swap off.")
CONTAINERD = Phase("containerd", "Install containerd", "The container runtime, its configuration and image mirrors.")
KUBERNETES = Phase("kubernetes", "Install Kubernetes", "kubelet, kubeadm and kubectl at one version, pinned and held.")
DOCKER = Phase(
    "docker", "Install Docker", "Docker's engine, where it is the runtime that is wished.", only=(Only.DOCKER,)
)
CRI_DOCKERD = Phase(
    "cri_dockerd", "Install cri-dockerd", "What lets Kubernetes run containers by Docker.", only=(Only.DOCKER,)
)
DOCKER_IMAGES = Phase(
    "docker_images",
    "Load images into Docker",
    "By containerd's mirrors: Docker takes them for docker.io only.",
    only=(Only.DOCKER,),
)
GPU_DRIVER = Phase(
    "gpu_driver", "Install the GPU driver", "NVIDIA's driver, held, its modules built and loaded.", only=(Only.GPUS,)
)
CONTAINER_TOOLKIT = Phase(
    "container_toolkit",
    "Give GPUs to containers",
    "NVIDIA's container toolkit, configured in the runtime.",
    only=(Only.GPUS,),
)
CUDA = Phase(
    "cuda",
    "Install CUDA",
    "CUDA toolkits and cuDNN on the machine itself, where they are wished.",
    only=(Only.GPUS, Only.CUDA),
)
GPU_MACHINE = Phase(
    "gpu_machine",
    "Prove the GPUs on the machine",
    "The driver lists every GPU, and a container gets them.",
    only=(Only.GPUS,),
)
POOL = Phase("pool", "Label the node", "Labels and taints of its pool and its GPUs; those of others are left alone.")
DEVICE_PLUGIN = Phase(
    "device_plugin", "Offer the GPUs to pods", "NVIDIA's device plugin and the RuntimeClass nvidia.", only=(Only.GPUS,)
)
GPU_NODE = Phase(
    "gpu_node",
    "Prove that pods get the GPUs",
    "The kubelet offers them, and a job that asks for one gets it.",
    only=(Only.GPUS,),
)
GPU_IDLE = Phase("gpu_idle", "See that no pod has the GPUs", "Nothing is taken away from pods that were given GPUs.")
GPU_REMOVE = Phase(
    "gpu_remove",
    "Remove the GPU software",
    "Driver, CUDA and toolkit go, as far as they came with us; nouveau is back.",
)
CONTROL_PLANE = Phase(
    "control_plane",
    "Start the control plane",
    "kubeadm init, or nothing when it runs already.",
    only=(Only.CONTROL_PLANE,),
)
NETWORK = Phase(
    "network", "Set up the network", "The network add-on, so that pods reach each other.", only=(Only.CONTROL_PLANE,)
)
WORKER = Phase(
    "worker", "Join the cluster", "kubeadm join with a token that lives minutes; nothing when joined already."
)
READY = Phase(
    "ready", "Prove it ready", "Node Ready, kube-proxy and network running there, a pod reaches the API service."
)
DRAIN = Phase("drain", "Empty the node", "Cordon, drain with a limit, delete the node from the cluster.")
RESET = Phase("reset", "Reset the machine", "Kubernetes, its leftovers, and all that we changed, back to what it was.")
STATUS = Phase("status", "Read the cluster", "Ask the control plane about its nodes.")

PREPARE = (NODE, CONTAINERD, DOCKER, CRI_DOCKERD, KUBERNETES, DOCKER_IMAGES)
GPU = (GPU_DRIVER, CONTAINER_TOOLKIT, CUDA, GPU_MACHINE)


def skipped(phases: Sequence[Phase], skip: Sequence[str], start: str | None) -> list[str]:
    """The names of the phases left out by ``--skip-phase`` and ``--from-phase``; raises WrongInput for unknown ones."""
    names = [phase.name for phase in phases]
    for name in [*skip, *([start] if start else [])]:
        if name not in names:
            raise WrongInput(f"there is no phase {name!r} here", f"one of {', '.join(names)}")
    before = names[: names.index(start)] if start else []
    return [name for name in names if name in skip or name in before]


def not_applicable(
    phases: Sequence[Phase], machines: Collection[str], applicable: Mapping[Only, Collection[str]]
) -> dict[str, set[str]]:
    """The machines that have nothing to do in a phase, by its name."""
    return {
        phase.name: {name for name in machines if any(name not in applicable[only] for only in phase.only)}
        for phase in phases
    }
