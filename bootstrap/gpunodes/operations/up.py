"""Bring the whole inventory up: all prepared side by side, the control plane made meanwhile, then the workers."""

from gpunodes.operations import phases
from gpunodes.operations.run import Operation

OPERATION = Operation(
    name="up",
    playbook="up.yml",
    phases=(
        phases.PREFLIGHT,
        *phases.PREPARE,
        *phases.GPU,
        phases.CONTROL_PLANE,
        phases.NETWORK,
        phases.WORKER,
        phases.POOL,
        phases.DEVICE_PLUGIN,
        phases.READY,
        phases.GPU_NODE,
    ),
    after_interruption="revoke.yml",
)
