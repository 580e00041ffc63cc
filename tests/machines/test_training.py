"""examples/training on machines: two ranks on two nodes, over shared storage; a node is repaired in the middle.

Not run on machines yet. test_training_curve.py and test_serving.py have the rest of it.
"""

from __future__ import annotations

from . import training, unhealthy
from .conftest import Operator
from .training import SHARE, both, continued, got, losses, more_losses, until
from .unhealthy import entry

LAB = training.LAB


def test_the_example_is_started(operator: Operator) -> None:
    training.start(operator)


def test_the_loss_falls(operator: Operator) -> None:
    found = got("there is a checkpoint", lambda: more_losses(operator, 4))
    assert found[-1][1] < found[0][1]
    # Beside it there is a new one, while that is written.
    listing = f"ls {SHARE}/checkpoints"
    until("there is one file", lambda: operator.ssh("control-1", listing).split() == ["checkpoint.npz"])


def test_the_job_goes_on_from_its_checkpoint_after_a_repair(operator: Operator) -> None:
    before = got("both ranks run", lambda: both(operator))
    known = got("there are losses", lambda: losses(operator))
    (step, loss), first = known[-1], known[0][1]
    node = before["0"][1]
    booted = unhealthy.boot(operator, node)
    done = entry(operator.document("repair", node, "--yes", "--reason", "a trial"), node)
    assert done["outcome"] == "repaired", done
    assert unhealthy.boot(operator, node) != booted
    now = got("both ranks run again, on different nodes", lambda: both(operator))
    assert now["0"][0] != before["0"][0], "another pod"
    again = got("it goes on", lambda: more_losses(operator, 1))
    since = got("it says from where", lambda: continued(operator))
    assert since >= step
    assert again[0][0] > since
    assert again[-1][1] < first, f"{loss} before the repair"
