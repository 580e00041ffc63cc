"""Join machines to the cluster: control planes one after the other, then workers."""

from gpunodes.operations import phases
from gpunodes.operations.run import Operation

OPERATION = Operation(
    name="join",
    playbook="join.yml",
    phases=(
        phases.PREFLIGHT,
        *phases.PREPARE,
        *phases.GPU,
        phases.FIREWALL,
        phases.ENDPOINT,
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
    needs_cluster=True,
    after_interruption="revoke.yml",
)
