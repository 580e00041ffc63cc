"""The phases of all operations: source of help, progress, --dry-run, --skip-phase and the documentation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gpunodes.errors import WrongInput
from gpunodes.model import Only, Phase

PREFLIGHT = Phase(
    "preflight", "Preflight", "Check all machines for anything that would stop the run, before changing anything."
)
NODE = Phase(
    "node",
    "Prepare the machine",
    "Load kernel modules and set kernel settings for pod networking; disable swap; open ports in active firewalls.",
)
NFS_CLIENT = Phase(
    "nfs_client",
    "Install the NFS client",
    "mount.nfs, by which the kubelet mounts shared storage.",
    only=(Only.STORAGE,),
)
REGISTRY_TRUST = Phase(
    "registry_trust",
    "Trust the registry",
    "The CA of the registry of `gpunodes registry up`, for the container runtime.",
    only=(Only.REGISTRY,),
)
REGISTRY_DISTRUST = Phase(
    REGISTRY_TRUST.name, "Remove the registry's CA", "The same role removes it; the runtime reads it at each pull."
)
CONTAINERD = Phase("containerd", "Install containerd", "The container runtime, its configuration and image mirrors.")
KUBERNETES = Phase("kubernetes", "Install Kubernetes", "kubelet, kubeadm and kubectl at one version, pinned and held.")
DOCKER = Phase(
    "docker",
    "Install Docker",
    "Docker Engine, if it is the selected container runtime; members of the group docker.",
    only=(Only.WITH_DOCKER,),
)
CRI_DOCKERD = Phase(
    "cri_dockerd", "Install cri-dockerd", "The adapter through which the kubelet uses Docker.", only=(Only.DOCKER,)
)
DOCKER_IMAGES = Phase(
    "docker_images",
    "Load images into Docker",
    "Pull images through containerd's mirrors, since Docker supports mirrors of docker.io only.",
    only=(Only.DOCKER,),
)
GPU_DRIVER = Phase(
    "gpu_driver",
    "Install the GPU driver",
    "Install and hold NVIDIA's driver; build and load its kernel modules.",
    only=(Only.GPUS,),
)
CONTAINER_TOOLKIT = Phase(
    "container_toolkit",
    "Install the container toolkit",
    "NVIDIA's container toolkit, configured in the container runtime.",
    only=(Only.GPUS,),
)
CUDA = Phase(
    "cuda",
    "Install CUDA",
    "CUDA toolkits and cuDNN on the machine itself, if requested.",
    only=(Only.GPUS, Only.CUDA),
)
GPU_MIG = Phase(
    "gpu_mig",
    "Slice the GPUs",
    "Make MIG instances by gpunodes_gpu_sharing, or take them away; nothing on other machines.",
    only=(Only.GPUS,),
)
GPU_MACHINE = Phase(
    "gpu_machine",
    "Verify the GPUs on the machine",
    "The driver lists every GPU, and a container can use them.",
    only=(Only.GPUS,),
)
POOL = Phase("pool", "Label the node", "Set the labels and taints of its pool and GPUs; others stay unchanged.")
DEVICE_PLUGIN = Phase(
    "device_plugin",
    "Deploy the device plugin",
    "NVIDIA's device plugin and the RuntimeClass nvidia.",
    only=(Only.GPUS,),
)
GPU_NODE = Phase(
    "gpu_node",
    "Verify the GPUs in pods",
    "The kubelet reports them as allocatable, and a job that requests one gets it.",
    only=(Only.GPUS,),
)
BURN_IN = Phase(
    "burn_in",
    "Burn in the GPUs",
    "Test the GPUs by DCGM or a CUDA program, and NCCL between nodes; a taint keeps pods off until they passed.",
    only=(Only.GPUS, Only.BURN_IN),
)
STARTED = Phase(
    "started",
    "Let pods onto the node",
    "Remove the taint with which nodes of pools that scale register.",
    only=(Only.SCALING,),
)
GPU_IDLE = Phase(
    "gpu_idle", "Check that no pod uses the GPUs", "Stop if pods use GPUs that are to be served otherwise, or removed."
)
GPU_REMOVE = Phase(
    "gpu_remove",
    "Remove the GPU software",
    "Remove driver, CUDA and container toolkit that gpunodes installed; allow nouveau again.",
)
ENDPOINT = Phase(
    "endpoint",
    "Keep the virtual address",
    "keepalived on every control plane, if gpunodes_control_plane_vip is set.",
    only=(Only.VIRTUAL_ADDRESS,),
)
CONTROL_PLANE = Phase(
    "control_plane",
    "Start the control plane",
    "kubeadm init; nothing if the control plane already runs.",
    only=(Only.CONTROL_PLANE,),
)
DRIFT = Phase(
    CONTROL_PLANE.name,
    "Compare the control plane with its settings",
    "The same role reads how a control plane that exists differs from its settings.",
    only=(Only.CONTROL_PLANES,),
)
MEMBER = Phase(
    "member",
    "Check the member of etcd",
    "Remove what an interrupted join left in etcd, or the member and the node of a control plane that leaves.",
    only=(Only.OTHER_CONTROL_PLANES,),
)
CERTIFICATES = Phase(
    "certificates",
    "Share the certificates",
    "Upload the control planes' certificates, encrypted with a new key, for one that joins.",
    only=(Only.OTHER_CONTROL_PLANES,),
)
CONTROL_PLANE_JOIN = Phase(
    "control_plane_join",
    "Join as a control plane",
    "kubeadm join with a token and a key valid for minutes; one machine after the other.",
    only=(Only.OTHER_CONTROL_PLANES,),
)
NETWORK = Phase("network", "Set up the network", "The network add-on that connects pods.", only=(Only.CONTROL_PLANE,))
API_CERTIFICATE = Phase(
    "api_certificate",
    "Renew the API servers' certificates",
    "Add the new endpoint's name to the certificate of each API server, and restart one after the other.",
    only=(Only.CONTROL_PLANES,),
)
CLUSTER_ENDPOINT = Phase(
    "cluster_endpoint",
    "Move the cluster",
    "Change the endpoint of kubeadm, of machines that join, of kube-proxy and of the network add-on.",
    only=(Only.CONTROL_PLANE,),
)
NODE_ENDPOINT = Phase(
    "node_endpoint",
    "Move the nodes",
    "Change the kubeconfigs of each machine, restart its kubelet, and wait until its node is ready.",
)
ENDPOINT_VERIFIED = Phase(
    "endpoint_verified", "Verify the endpoint", "Nothing in the cluster or on the machine uses another endpoint."
)
ENDPOINT_RELEASED = Phase(
    "endpoint_released",
    "Give the earlier virtual address up",
    "Stop keepalived where nothing uses its address any more.",
    only=(Only.CONTROL_PLANES,),
)
FIREWALL = Phase(
    "firewall",
    "Update the firewalls of other nodes",
    "Let the machines that join through the firewalls in which gpunodes opened ports.",
)
REGISTRATION = Phase(
    "registration",
    "Configure the registration",
    "The kubelet of a machine whose pool scales registers its node by itself at each start.",
    only=(Only.SCALING,),
)
WORKER = Phase("worker", "Join the cluster", "kubeadm join with a token valid for minutes; nothing if already joined.")
READY = Phase(
    "ready",
    "Verify that the node is ready",
    "Node Ready, kube-proxy and network running, a pod reaches the API service.",
)
PREPARED = Phase(
    "prepared",
    "Complete the machine",
    "Wait until all images are pulled; remove the ids that containerd and Docker gave the machine.",
)
DRAIN = Phase("drain", "Drain the node", "Cordon, drain within a time limit, delete the node from the cluster.")
STORAGE = Phase(
    "storage",
    "Offer the shares to pods",
    "A PersistentVolume and its claim for each share and namespace.",
    only=(Only.CONTROL_PLANE,),
)
STORAGE_VERIFIED = Phase(
    "storage_verified",
    "Verify the shares",
    "The server answers each node, the claims are bound, and a pod reads what a pod on another node wrote.",
)
STORAGE_IDLE = Phase("storage_idle", "Check that no share is mounted", "Stop if a node has a share mounted.")
STORAGE_REMOVED = Phase(
    STORAGE.name,
    "Remove volumes and claims",
    "The same role deletes them; the data stays.",
    only=(Only.CONTROL_PLANE,),
)
NFS_CLIENT_REMOVED = Phase(
    NFS_CLIENT.name, "Remove the NFS client", "The same role removes it, if gpunodes installed it."
)
RESET = Phase(
    "reset", "Reset the machine", "Remove Kubernetes and its leftovers; undo everything that gpunodes changed."
)
CERTIFICATE_ENDS = Phase("certificate_ends", "Read the certificates", "When each certificate of the nodes ends.")
ETCD_CERTIFICATES = Phase(
    "etcd_certificates",
    "Renew ended certificates of etcd",
    "Where members of etcd no longer accept each other, all machines get new files first; nothing is restarted.",
)
CERTIFICATES_RENEWED = Phase(
    "certificates_renewed",
    "Renew the certificates",
    "kubeadm certs renew all; the static pods are restarted one at a time, and serve the new ones.",
)
ETCD_STOPPED = Phase(
    "etcd_stopped", "Stop the control planes", "Move the manifests of their static pods away; they stay stopped."
)
ETCD_RESTORED = Phase(
    "etcd_restored",
    "Restore etcd",
    "Make a new member's data from the snapshot, start the first control plane, and verify that it works.",
    only=(Only.CONTROL_PLANE,),
)
ETCD_RESTORE_ABORTED = Phase(
    "etcd_restore_aborted",
    "Start the old data",
    "Put the data of etcd from before a restore back, start all control planes, and wait until they work.",
)
OS_PENDING = Phase("os_pending", "Read the pending upgrades", "Read what the package manager would upgrade.")
RUNTIME_PENDING = Phase(
    "runtime_pending",
    "Read the container runtime",
    "Compare the packages of the container runtime and the container toolkit with those in the package sources.",
)
STATUS = Phase("status", "Read the cluster", "Query the control plane for its nodes.")
UPGRADE_FACTS = Phase(
    "upgrade_facts",
    "Read the versions",
    "Versions, arguments and feature gates of each machine, and its package source.",
)

# The lists that several operations share; their playbooks share playbooks/tasks/prepare.yml, gpu.yml,
# endpoint.yml and create.yml.
PREPARE = (NODE, NFS_CLIENT, CONTAINERD, DOCKER, REGISTRY_TRUST, CRI_DOCKERD, KUBERNETES, DOCKER_IMAGES)
GPU = (GPU_DRIVER, CONTAINER_TOOLKIT, CUDA, GPU_MIG, GPU_MACHINE)
CREATE = (ENDPOINT, CONTROL_PLANE, NETWORK)
GROW = (MEMBER, CERTIFICATES, CONTROL_PLANE_JOIN)

_PACKAGES = "installing packages"
LONG_TASKS = {
    "Install the driver and load it": "installing packages, building the kernel modules",
    "Install and configure containerd": "installing packages, pulling images",
    "Install Kubernetes' packages": "installing packages, pulling images",
    "Install Docker": _PACKAGES,
    "Install cri-dockerd": _PACKAGES,
    "Install and configure the container toolkit": _PACKAGES,
    "Install CUDA": _PACKAGES,
    "Bring the MIG instances to their layout": "waiting for processes to release the GPUs",
    "Load images into Docker": "pulling images",
    "Wait until all images are pulled, and remove ids of the machine": "pulling images",
    "Read the lists of packages": "fetching lists",
    "Download the packages": "downloading packages",
    "Upgrade the packages and the kernel": "installing packages, building the kernel modules",
    "Download the driver, and keep the installed one": "downloading packages",
    "Replace the driver and load it": "installing packages, building the kernel modules",
    "Load the driver after the reboot": "loading the driver",
    "Reboot the machine": "waiting for the machine to boot",
    "Keep the virtual address on the control planes": "waiting for keepalived",
    "Tell the other control planes about the new ones": "waiting for keepalived on the other control planes",
    "Start the control plane": "waiting for the API server",
    "Make the API server's certificate for the new endpoint": "waiting for the API server",
    "Move the cluster to the new endpoint": "waiting for pods of kube-proxy and the network",
    "Move the node to the new endpoint": "waiting for the node to be ready",
    "Create a token": "waiting for the API server",
    "Remove what an earlier join left in etcd": "waiting for other control planes that are joining",
    "Verify the control plane": "waiting for etcd and the API server",
    "Install the NFS client": _PACKAGES,
    "Check that no share is mounted on the machine": "waiting for the kubelet to unmount",
    "Verify that pods use the shares": "waiting for the claims and a pod on two nodes",
    "Join the cluster": "waiting for the kubelet to register its node",
    "Verify that nodes are ready": "waiting for the nodes and their pods",
    "Verify that pods get the GPUs": "waiting for the device plugin and a pod on each node",
    "Keep pods off the node": "waiting for its pods to end",
    "Burn in the GPUs": "testing the GPUs, which takes minutes to hours",
    "Test NCCL between the nodes": "waiting for pods that use all GPUs",
    "Stop the control plane": "waiting for its static pods to end",
    "Restore etcd": "restoring the snapshot, waiting for the control plane",
    "Wait until the control plane works": "waiting for etcd, the API server, the controllers and the scheduler",
    "Bring the control plane to its settings": "restarting static pods one at a time",
    "Renew the certificates": "restarting the static pods one at a time",
    "Remove the node from the cluster": "waiting for its pods to end",
    "Download the packages and pull the images": "downloading packages, pulling images",
    "Read what an upgrade of the container runtime would do": "fetching lists",
    "Download the packages of the runtime, and keep the installed ones": "downloading packages",
    "Replace the container runtime and the container toolkit": _PACKAGES,
    "Put the old packages of the runtime back": _PACKAGES,
    "Wait until the node reports the runtime": "waiting for the node and its pods",
    "Wait until the node reports the old runtime": "waiting for the node and its pods",
    "Update the network add-on": "waiting for its pods on all nodes",
    "Update the device plugin": "waiting for its pods on all nodes",
    "Upgrade the control plane": "waiting for the new static pods",
    "Upgrade the kubelet": "installing packages",
    "Verify that the node was upgraded": "waiting for the node and its pods",
}
"""What tasks that may take minutes do for most of that time, by their names in the roles."""


def what_runs(task: str) -> str:
    """What a machine does, or waits for, while this task runs on it."""
    return LONG_TASKS.get(task, task)


def skipped(phases: Sequence[Phase], skip: Sequence[str], start: str | None) -> list[str]:
    """The names of the phases skipped by ``--skip-phase`` and ``--from-phase``; raises WrongInput for unknown ones."""
    names = [phase.name for phase in phases]
    for name in [*skip, *([start] if start else [])]:
        if name not in names:
            raise WrongInput(f"unknown phase {name!r}", f"one of {', '.join(names)}")
    before = names[: names.index(start)] if start else []
    return [name for name in names if name in skip or name in before]


def by_cluster(cluster: Mapping[str, Any] | None) -> dict[Only, set[str]]:
    """No machines for phases about what this cluster does not have; {} if it was not read."""
    return {} if cluster is None or cluster.get("registry") else {Only.REGISTRY: set()}


def not_applicable(
    phases: Sequence[Phase], machines: Collection[str], applicable: Mapping[Only, Collection[str]]
) -> dict[str, set[str]]:
    """The machines to which a phase does not apply, by the phase's name."""
    return {
        phase.name: {name for name in machines if any(name not in applicable[only] for only in phase.only)}
        for phase in phases
    }
