"""examples/training with PyTorch on machines: torchrun on two nodes, over gloo, and a rank that is deleted.

Not run on machines yet. PyTorch is Debian's (`lab up --images torch`), in an image with the name and tag of the
example's. Emulated machines import it slowly, so this is a slow part. A repair in the middle is in test_training.py.
"""

from __future__ import annotations

import yaml

from . import training, unhealthy
from .conftest import LabSpec, Operator
from .training import OVERLAY, PATCHES, SHARE, losses, ranks, until

IMAGES = ("--images", "training", "--images", "torch")
LAB = LabSpec("debian13", workers=2, up_options=IMAGES, cluster=(), settings=unhealthy.TEST_SETTINGS)
# Debian builds PyTorch without libuv, and torchrun 2.6 and its processes ask for it, whatever USE_LIBUV says. Python
# imports this module at its start.
WITHOUT_LIBUV = """import functools
import importlib
for name in ("torch.distributed.rendezvous", "torch.distributed.elastic.rendezvous.static_tcp_rendezvous"):
    module = importlib.import_module(name)
    module.TCPStore = functools.partial(module.TCPStore, use_libuv=False)
"""
# The example itself; the requests, TensorBoard's image and that module are the lab's.
TORCH = {
    **OVERLAY,
    "resources": ["../base"],
    "configMapGenerator": [
        {"name": "training", "behavior": "merge", "literals": [f"sitecustomize.py={WITHOUT_LIBUV}"]}
    ],
    "patches": [
        *PATCHES,
        {
            "target": {"kind": "Job", "name": "train"},
            "patch": yaml.safe_dump([
                {
                    "op": "add",
                    "path": "/spec/template/spec/containers/0/env/-",
                    "value": {"name": "PYTHONPATH", "value": "/job"},
                }
            ]),
        },
    ],
}  # fmt: skip
LONG_S = 1800.0
"""Seconds until two nodes have unpacked the image, 560 MB, and until the first steps: a pod imports PyTorch twice."""


def test_torchrun_starts_on_two_nodes(operator: Operator) -> None:
    training.start(operator, TORCH, LONG_S)
    for name, _ in training.got("both ranks run", lambda: training.both(operator)).values():
        command = operator.kubectl("exec", name, "--", "cat", "/proc/1/cmdline").replace("\0", " ")
        assert "torchrun --nnodes=2 --nproc-per-node=1" in command
        assert "--backend=gloo" in command


def test_the_loss_falls(operator: Operator) -> None:
    found = training.got("there are steps", lambda: training.more_losses(operator, 4), limit_s=LONG_S)
    assert found[-1][1] < found[0][1]
    assert operator.ssh("control-1", f"ls {SHARE}/logs").split()


def test_a_rank_that_is_deleted_ends_the_other_and_both_go_on(operator: Operator) -> None:
    before = training.got("both ranks run", lambda: training.both(operator))
    known = training.got("there are losses", lambda: losses(operator))
    (step, _), first = known[-1], known[0][1]
    operator.kubectl("delete", "pod", before["1"][0], "--wait=true")
    until(
        "both ranks run again",
        lambda: training.both_run(operator) and ranks(operator).get("0") not in {None, before["0"]},
        limit_s=LONG_S,
    )
    again = training.got("they go on", lambda: training.more_losses(operator, 1), limit_s=LONG_S)
    assert training.got("they say from where", lambda: training.continued(operator)) >= step
    assert again[-1][1] < first


def test_one_command_takes_it_away_and_all_steps_end(operator: Operator) -> None:
    training.take_away(operator)
    step = training.saved(operator)
    training.run(operator, step + 50)
    until("all steps are done", lambda: training.complete(operator, "train"), limit_s=LONG_S)
    assert training.saved(operator) == step + 50
    training.take_away(operator)
    operator.gpunodes("storage", "down", "--yes")
    assert operator.ssh("control-1", f"ls {SHARE}").split() == ["checkpoints", "data", "logs"]
