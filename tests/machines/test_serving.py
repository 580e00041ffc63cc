"""examples/serving on machines: the servers of a checkpoint of examples/training are asked while their node is drained.

Not run on machines yet.
"""

from __future__ import annotations

import json
import re

from . import pods, training
from .conftest import CHECKOUT, LONG, Operator
from .training import losses, saved, take_away, until

LAB = training.LAB
SERVING = "/root/serving"
# The status of each request; a client tries a second time when its connection is refused.
ASK = """while sleep 0.5; do
  {request} --retry 1 --retry-connrefused -o /dev/null -w '%{{http_code}}\\n' >>/run/answers
done"""


def test_the_example_has_a_checkpoint(operator: Operator) -> None:
    training.start(operator)
    until("there is a checkpoint", lambda: len(losses(operator)) > 1)
    take_away(operator)
    assert saved(operator)


def servers(operator: Operator) -> list[str]:
    """The nodes of the servers that are ready."""
    found = json.loads(operator.kubectl("get", "pods", "-l", "app=serve", "-o", "json"))["items"]
    return [
        pod["spec"]["nodeName"]
        for pod in found
        if "deletionTimestamp" not in pod["metadata"]
        and ("Ready", "True") in {(each["type"], each["status"]) for each in pod["status"].get("conditions", [])}
    ]


def test_the_servers_of_the_checkpoint_survive_a_drain(operator: Operator) -> None:
    """Both run on the node that is drained: the second leaves when the first has a ready replacement."""
    pods.copy(operator, CHECKOUT / "examples" / "serving", SERVING)
    operator.kubectl("cordon", "worker-2")
    operator.kubectl("apply", "-k", SERVING)
    until("both servers are ready", lambda: servers(operator) == ["worker-1"] * 2)
    operator.kubectl("uncordon", "worker-2")
    address = operator.kubectl("get", "svc", "serve", "-o", "jsonpath={.spec.clusterIP}").strip()
    request = f"curl -s --noproxy '*' --max-time 60 --data-binary @/run/image http://{address}/predict"
    # A server may be ready before kube-proxy knows it.
    again = f"{request} --retry 5 --retry-connrefused --retry-delay 2"
    found = json.loads(operator.ssh("control-1", f"head -c 784 /dev/zero >/run/image; {again}"))
    assert found["step"] == saved(operator)
    operator.ssh("control-1", f"cat >/run/ask <<'END'\n{ASK.format(request=request)}\nEND")
    operator.ssh("control-1", "systemd-run --unit=ask sh /run/ask")
    drain = ("drain", "worker-1", "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=600s")
    printed = operator.kubectl(*drain, limit_s=LONG)
    assert len(re.findall(r"^pod/serve-\S+ evicted$", printed, re.M)) == 2, printed
    until("both are ready elsewhere", lambda: servers(operator) == ["worker-2"] * 2)
    answers = operator.ssh("control-1", "systemctl stop ask; cat /run/answers").split()
    assert (set(answers), len(answers) > 10) == ({"200"}, True), answers
    operator.kubectl("uncordon", "worker-1")
    operator.kubectl("delete", "-k", SERVING, "--wait=true")
    until("no pod is left", lambda: operator.kubectl("get", "pods", "-o", "name").strip() == "")
