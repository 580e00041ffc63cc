"""Let the workers of pools that scale register their nodes by themselves; `join` does that, too."""

from gpunodes.operations import phases
from gpunodes.operations.run import Operation

OPERATION = Operation(
    name="registration",
    playbook="registration.yml",
    phases=(phases.PREFLIGHT, phases.REGISTRATION, phases.GPU_IDLE, phases.POOL),
    needs_cluster=True,
)
