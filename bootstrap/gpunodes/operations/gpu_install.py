"""Install the GPU software on machines that are in a cluster, or in none."""

from gpunodes.operations import phases
from gpunodes.operations.run import Operation

OPERATION = Operation(
    name="gpu-install",
    playbook="gpu_install.yml",
    phases=(phases.PREFLIGHT, *phases.GPU, phases.POOL, phases.DEVICE_PLUGIN, phases.GPU_NODE),
)
