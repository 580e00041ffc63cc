"""Install the GPU software on machines that are in a cluster, or in none."""

from dataclasses import replace

from gpunodes.model import Only
from gpunodes.operations import phases
from gpunodes.operations.run import Operation

# A machine in no cluster stays in none.
_OFFER = (phases.POOL, phases.DEVICE_PLUGIN, phases.GPU_NODE)

OPERATION = Operation(
    name="gpu-install",
    playbook="gpu_install.yml",
    phases=(phases.PREFLIGHT, *phases.GPU, *(replace(each, only=(*each.only, Only.NODES)) for each in _OFFER)),
)
