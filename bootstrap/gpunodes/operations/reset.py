"""Bring machines back to what they were before us."""

from gpunodes.operations import phases
from gpunodes.operations.run import Operation

OPERATION = Operation(name="reset", playbook="reset.yml", phases=(phases.RESET,), ends_cluster=True)
