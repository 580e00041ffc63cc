"""Create a cluster with this machine as its control plane."""

from gpunodes.operations import phases
from gpunodes.operations.run import Operation

OPERATION = Operation(
    name="init-master",
    playbook="init_master.yml",
    phases=(phases.PREFLIGHT, *phases.PREPARE, *phases.CREATE, phases.READY),
)
