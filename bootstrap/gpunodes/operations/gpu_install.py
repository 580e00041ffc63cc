"""Install the GPU software on machines, whether or not they are in a cluster."""

from dataclasses import replace

from gpunodes.model import Only
from gpunodes.operations import phases
from gpunodes.operations.run import Operation

# Docker is the runtime that people use on GPU hosts.
_DOCKER_PHASES = (phases.DOCKER, replace(phases.DOCKER_IMAGES, only=(Only.WITH_DOCKER,)))
# These phases are skipped on machines that are not in a cluster.
_NODE_PHASES = (phases.GPU_IDLE, phases.POOL, phases.DEVICE_PLUGIN, phases.GPU_NODE)

OPERATION = Operation(
    name="gpu install",
    playbook="gpu_install.yml",
    phases=(
        phases.PREFLIGHT,
        *_DOCKER_PHASES,
        *phases.GPU,
        *(replace(each, only=(*each.only, Only.NODES)) for each in _NODE_PHASES),
    ),
)
