"""examples/training on machines: two ranks on two nodes, over shared storage; a node is repaired in the middle.

Not run on machines yet. test_training_curve.py and test_serving.py have the rest of it.
"""

from __future__ import annotations

import re

from . import training, unhealthy
from .conftest import Operator
from .training import SHARE, both_run, log, losses, ranks, until
from .unhealthy import entry

LAB = training.LAB


def test_the_example_is_started(operator: Operator) -> None:
    training.start(operator)


def test_the_loss_falls(operator: Operator) -> None:
    until("there is a checkpoint", lambda: len(losses(operator)) > 4)
    found = losses(operator)
    assert found[-1][1] < found[0][1]
    # Beside it there is a new one, while that is written.
    listing = f"ls {SHARE}/checkpoints"
    until("there is one file", lambda: operator.ssh("control-1", listing).split() == ["checkpoint.npz"])


def test_the_job_goes_on_from_its_checkpoint_after_a_repair(operator: Operator) -> None:
    (step, loss), before = losses(operator)[-1], ranks(operator)
    first = losses(operator)[0][1]
    node = before["0"][1]
    booted = unhealthy.boot(operator, node)
    done = entry(operator.document("repair", node, "--yes", "--reason", "a trial"), node)
    assert done["outcome"] == "repaired", done
    assert unhealthy.boot(operator, node) != booted
    until("both ranks run again, on different nodes", lambda: both_run(operator))
    assert ranks(operator)["0"][0] != before["0"][0], "another pod"
    until("it goes on", lambda: len(losses(operator)) > 1)
    [continued] = re.findall(r"^continuing after step (\d+)$", log(operator), re.M)
    assert int(continued) >= step
    again = losses(operator)
    assert again[0][0] > int(continued)
    assert again[-1][1] < first, f"{loss} before the repair"
