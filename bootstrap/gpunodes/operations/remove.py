"""Drain a node, delete it from the cluster and reset its machine."""

from gpunodes.operations import phases
from gpunodes.operations.run import Operation

OPERATION = Operation(name="remove", playbook="remove.yml", phases=(phases.DRAIN, phases.RESET))
