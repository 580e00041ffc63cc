"""Undo everything that gpunodes changed on machines."""

from gpunodes.operations import phases
from gpunodes.operations.run import Operation

OPERATION = Operation(name="reset", playbook="reset.yml", phases=(phases.MEMBER, phases.RESET), ends_cluster=True)
