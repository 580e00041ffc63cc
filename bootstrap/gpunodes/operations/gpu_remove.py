"""Remove the GPU software from machines."""

from gpunodes.operations import phases
from gpunodes.operations.run import Operation

OPERATION = Operation(
    name="gpu remove", playbook="gpu_remove.yml", phases=(phases.GPU_IDLE, phases.POOL, phases.GPU_REMOVE)
)
