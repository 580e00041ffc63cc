"""Set up the whole inventory: prepare all machines in parallel, create the control plane, then join the others."""

from gpunodes.operations import phases
from gpunodes.operations.run import Operation

OPERATION = Operation(
    name="up",
    playbook="up.yml",
    phases=(
        phases.PREFLIGHT,
        *phases.PREPARE,
        *phases.GPU,
        *phases.CREATE,
        *phases.GROW,
        phases.REGISTRATION,
        phases.WORKER,
        phases.GPU_IDLE,
        phases.POOL,
        phases.DEVICE_PLUGIN,
        phases.READY,
        phases.GPU_NODE,
        phases.BURN_IN,
        phases.STARTED,
    ),
    after_interruption="revoke.yml",
)
