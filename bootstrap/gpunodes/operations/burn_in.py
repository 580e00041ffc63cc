"""Burn in the GPUs of machines before they take work."""

from dataclasses import replace

from gpunodes.model import Only
from gpunodes.operations import phases
from gpunodes.operations.run import Operation

OPERATION = Operation(
    name="gpu burn-in",
    playbook="gpu_burn_in.yml",
    phases=(replace(phases.BURN_IN, only=(Only.GPUS,)),),
)
