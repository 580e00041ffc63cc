"""Install the GPU software on machines, whether or not they are in a cluster."""

from dataclasses import replace

from gpunodes.model import Only
from gpunodes.operations import phases
from gpunodes.operations.run import Operation

# These phases are skipped on machines that are not in a cluster.
_NODE_PHASES = (phases.POOL, phases.DEVICE_PLUGIN, phases.GPU_NODE)

OPERATION = Operation(
    name="gpu install",
    playbook="gpu_install.yml",
    phases=(phases.PREFLIGHT, *phases.GPU, *(replace(each, only=(*each.only, Only.NODES)) for each in _NODE_PHASES)),
)
