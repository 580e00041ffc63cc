"""The curve and the end of examples/training on machines: TensorBoard, a checkpoint that stays, data that is kept.

Not run on machines yet.
"""

from __future__ import annotations

import functools
import json
import re
import shlex

from . import training
from .conftest import Operator
from .training import SHARE, complete, losses, run, saved, take_away, until

LAB = training.LAB


def test_one_command_takes_it_away_and_the_checkpoint_stays(operator: Operator) -> None:
    training.start(operator)
    until("there is a checkpoint", lambda: len(losses(operator)) > 1)
    take_away(operator)
    kinds = "all,configmaps,jobs"
    assert operator.kubectl("get", kinds, "-l", "app.kubernetes.io/part-of=training", "-o", "name").strip() == ""
    step = saved(operator)
    run(operator, step + 200)
    until("all steps are done", lambda: complete(operator, "train") and complete(operator, "load-data"))
    assert "the images are there already" in operator.kubectl("logs", "job/load-data")
    printed = operator.kubectl("logs", "-l", "batch.kubernetes.io/job-completion-index=0", "--tail=-1")
    # As often as rank 0 started: a rank that starts again before both have met has done no step.
    continued = re.findall(r"^continuing after step (\d+)$", printed, re.M)
    assert set(map(int, continued)) == {step}
    assert f"step {step + 200} loss" in printed


def curve(operator: Operator, address: str) -> list[tuple[int, float]]:
    """Steps and losses that TensorBoard gives at the port of a node; empty while it has read none."""
    url = f"http://{address}:30060/data/plugin/scalars/scalars?run=.&tag=loss"
    read = f"import urllib.request as web; print(web.urlopen('{url}', timeout=60).read().decode())"
    found = operator.ssh("control-1", f"python3 -c {shlex.quote(read)} 2>/dev/null", code=None)
    return [(int(step), loss) for _, step, loss in json.loads(found or "[]")]


def has_read(operator: Operator, address: str, step: int) -> bool:
    """Whether TensorBoard has read the curve up to a step."""
    return any(found >= step for found, _ in curve(operator, address))


def test_the_curve_is_served_at_a_port_of_each_node(operator: Operator) -> None:
    ready = ("get", "deployment/tensorboard", "-o", "jsonpath={.status.readyReplicas}")
    until("the server is ready", lambda: operator.kubectl(*ready).strip() == "1")
    names = operator.ssh("control-1", f"ls {SHARE}/logs").split()
    assert len(names) > 1, "one file for each start of rank 0"
    step = saved(operator)
    addresses = "jsonpath={.items[*].status.addresses[?(@.type=='InternalIP')].address}"
    for address in operator.kubectl("get", "nodes", "-o", addresses).split():
        # It reads the files one after the other.
        until("it has read the last file", functools.partial(has_read, operator, address, step))
        found = curve(operator, address)
        assert found[-1][1] < found[0][1]
        page = f"curl -s --noproxy '*' http://{address}:30060/"
        assert "<title>TensorBoard</title>" in operator.ssh("control-1", page)


def test_the_storage_goes_and_keeps_the_data(operator: Operator) -> None:
    take_away(operator)
    operator.gpunodes("storage", "down", "--yes")
    assert operator.ssh("control-1", f"ls {SHARE}").split() == ["checkpoints", "data", "logs"]
