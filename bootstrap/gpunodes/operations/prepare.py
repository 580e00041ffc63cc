"""Install what a join would install, without joining: for images of the disk, or to join later in minutes."""

from gpunodes.operations import phases
from gpunodes.operations.run import Operation

OPERATION = Operation(
    name="prepare",
    playbook="prepare.yml",
    phases=(phases.PREFLIGHT, *phases.PREPARE, *phases.GPU, phases.PREPARED),
    without_cluster=True,
)
