"""examples/training on machines: two ranks on two nodes, over shared storage; a node is repaired in the middle.

Not run on machines yet. The overlay with NumPy as it is, but for smaller requests. Both images are one of the mirror's
(`lab up --images training`): Debian's Python with NumPy, and TensorBoard.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import time
from collections.abc import Callable, Mapping

import yaml

from . import pods, unhealthy
from .conftest import CHECKOUT, LONG, LabSpec, Operator
from .unhealthy import entry

LAB = LabSpec("debian13", workers=2, up_options=("--images", "training"), cluster=(), settings=unhealthy.TEST_SETTINGS)
WORKERS = {"worker-1", "worker-2"}
SHARE = "/srv/training"
EXAMPLE, SERVING = "/root/training", "/root/serving"
WAIT_S = 600.0
"""Seconds for pulls and starts of pods on emulated machines."""
FOR_EVER = 10**6
# The status of each request; a client tries a second time when its connection is refused.
ASK = """while sleep 0.5; do
  {request} --retry 1 --retry-connrefused -o /dev/null -w '%{{http_code}}\\n' >>/run/answers
done"""
PATCHES = [
    # A worker of the lab has one processor and 2 GiB.
    {
        "target": {"kind": "Job", "name": "train"},
        "patch": yaml.safe_dump([
            {
                "op": "replace",
                "path": "/spec/template/spec/containers/0/resources",
                "value": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
            }
        ]),
    },
    {
        "target": {"kind": "Deployment", "name": "tensorboard"},
        "patch": yaml.safe_dump([
            {"op": "replace", "path": "/spec/template/spec/containers/0/resources/requests/memory", "value": "64Mi"}
        ]),
    },
]  # fmt: skip
OVERLAY = {
    "resources": ["../overlays/numpy"],
    "images": [{"name": "tensorflow/tensorflow", "newName": "quay.io/jupyter/scipy-notebook", "newTag": "2025-12-31"}],
    "patches": PATCHES,
}


def until(what: str, seen: Callable[[], object], limit_s: float = WAIT_S) -> None:
    began = time.monotonic()
    while not seen():
        assert time.monotonic() - began < limit_s, f"not within {limit_s:.0f} s: {what}"
        time.sleep(3)
    print(f"{what}: {time.monotonic() - began:.0f} s")


def copy_example(operator: Operator, kustomization: Mapping[str, object]) -> None:
    """Copy the example to the control plane, with an overlay for the lab."""
    pods.copy(operator, CHECKOUT / "examples" / "training", EXAMPLE)
    overlay = yaml.safe_dump(dict(kustomization))
    operator.ssh("control-1", f"mkdir {EXAMPLE}/lab && cat >{EXAMPLE}/lab/kustomization.yml <<'END'\n{overlay}\nEND")


def run(operator: Operator, steps: int) -> None:
    """Apply the example with this number of steps."""
    kubectl = "kubectl --kubeconfig /etc/kubernetes/admin.conf"
    options = f"s#--tensorboard=/training/logs#& --steps={steps} --every=10#"
    operator.ssh("control-1", f"{kubectl} kustomize {EXAMPLE}/lab | sed '{options}' | {kubectl} apply -f -")


def complete(operator: Operator, job: str) -> bool:
    done = "jsonpath={.status.conditions[?(@.type=='Complete')].status}"
    return operator.kubectl("get", f"job/{job}", "-o", done).strip() == "True"


def ranks(operator: Operator) -> dict[str, tuple[str, str]]:
    """The name and the node of each rank whose pod runs."""
    pods = operator.kubectl("get", "pods", "-l", "job-name=train", "-o", "json", code=None)
    found = json.loads(pods or '{"items": []}')
    return {
        pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"]: (
            pod["metadata"]["name"],
            pod["spec"]["nodeName"],
        )
        for pod in found["items"]
        if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
    }


def both_run(operator: Operator) -> bool:
    """Whether both ranks run, on different nodes."""
    return {node for _, node in ranks(operator).values()} == WORKERS


def log(operator: Operator) -> str:
    """What rank 0 has printed, "" while it does not run."""
    name, _ = ranks(operator).get("0", ("", ""))
    return operator.kubectl("logs", name, code=None) if name else ""


def losses(operator: Operator) -> list[tuple[int, float]]:
    """Each step that rank 0 reported, with its loss."""
    return [(int(step), float(loss)) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", log(operator), re.M)]


def saved(operator: Operator) -> int:
    """The step of the checkpoint: a file of NumPy is an archive of arrays, whose numbers are at the end."""
    read = f"import zipfile; print(zipfile.ZipFile('{SHARE}/checkpoints/checkpoint.npz').read('step.npy')[-8:].hex())"
    return int.from_bytes(bytes.fromhex(operator.ssh("control-1", f'python3 -c "{read}"')), "little")


def take_away(operator: Operator) -> None:
    """Delete the example, and wait until its pods have ended: until then they use the claim."""
    operator.kubectl("delete", "-k", f"{EXAMPLE}/lab", "--wait=true")
    until("no pod is left", lambda: operator.kubectl("get", "pods", "-o", "name").strip() == "")


def start(operator: Operator, kustomization: Mapping[str, object] = OVERLAY) -> None:
    """Start the example on storage that the control plane serves, and wait until both ranks run."""
    operator.group("storage", "control-1")
    variables = operator.folder / "inventory" / "group_vars" / "all.yml"
    shares = [{"name": "training", "path": SHARE, "size": "1Gi"}]
    variables.write_text(yaml.safe_dump({**yaml.safe_load(variables.read_text()), "gpunodes_storage": shares}))
    operator.gpunodes("storage", "up")
    copy_example(operator, kustomization)
    run(operator, FOR_EVER)
    until("the images are written", lambda: complete(operator, "load-data"))
    assert "4096 images written" in operator.kubectl("logs", "job/load-data")
    until("both ranks run, on different nodes", lambda: both_run(operator))


def test_the_example_is_started(operator: Operator) -> None:
    start(operator)


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
    step = losses(operator)[0][0]
    addresses = "jsonpath={.items[*].status.addresses[?(@.type=='InternalIP')].address}"
    for address in operator.kubectl("get", "nodes", "-o", addresses).split():
        # It reads the files one after the other.
        until("it has read the last file", functools.partial(has_read, operator, address, step))
        found = curve(operator, address)
        assert found[-1][1] < found[0][1]
        page = f"curl -s --noproxy '*' http://{address}:30060/"
        assert "<title>TensorBoard</title>" in operator.ssh("control-1", page)


def test_one_command_takes_it_away_and_the_checkpoint_stays(operator: Operator) -> None:
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
    take_away(operator)


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
    found = json.loads(operator.ssh("control-1", f"head -c 784 /dev/zero >/run/image; {request}"))
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


def test_the_storage_goes_and_keeps_the_data(operator: Operator) -> None:
    operator.gpunodes("storage", "down", "--yes")
    assert operator.ssh("control-1", f"ls {SHARE}").split() == ["checkpoints", "data", "logs"]
