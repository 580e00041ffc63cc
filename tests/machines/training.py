"""examples/training on machines: starts it with an overlay for the lab, and reads what its ranks print.

The overlay with NumPy as it is, but for smaller requests. Both images are one of the mirror's (`lab up --images
training`): Debian's Python with NumPy, and TensorBoard.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping

import yaml

from . import pods, unhealthy, waiting
from .conftest import CHECKOUT, LabSpec, Operator

LAB = LabSpec("debian13", workers=2, up_options=("--images", "training"), cluster=(), settings=unhealthy.TEST_SETTINGS)
WORKERS = {"worker-1", "worker-2"}
SHARE = "/srv/training"
EXAMPLE = "/root/training"
WAIT_S = 600.0
"""Seconds for pulls and starts of pods on emulated machines."""
FOR_EVER = 10**6
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


until = functools.partial(waiting.until, limit_s=WAIT_S)
got = functools.partial(waiting.got, limit_s=WAIT_S)


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


def log(operator: Operator) -> str:
    """What rank 0 has printed, "" while it does not run."""
    name, _ = ranks(operator).get("0", ("", ""))
    return operator.kubectl("logs", name, code=None) if name else ""


def continued(operator: Operator) -> int:
    """The step from which rank 0 has gone on; raises ValueError before it says so."""
    [step] = re.findall(r"^continuing after step (\d+)$", log(operator), re.M)
    return int(step)


def both(operator: Operator) -> dict[str, tuple[str, str]]:
    """The ranks as ``ranks`` has them, nothing before both run on different nodes."""
    found = ranks(operator)
    return found if {node for _, node in found.values()} == WORKERS else {}


def both_run(operator: Operator) -> bool:
    """Whether both ranks run, on different nodes."""
    return bool(both(operator))


def losses(operator: Operator) -> list[tuple[int, float]]:
    """Each step that rank 0 reported, with its loss."""
    return [(int(step), float(loss)) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", log(operator), re.M)]


def more_losses(operator: Operator, least: int) -> list[tuple[int, float]]:
    """The losses as ``losses`` has them, nothing before there are more than ``least``."""
    found = losses(operator)
    return found if len(found) > least else []


def saved(operator: Operator) -> int:
    """The step of the checkpoint: a file of NumPy is an archive of arrays, whose numbers are at the end."""
    read = f"import zipfile; print(zipfile.ZipFile('{SHARE}/checkpoints/checkpoint.npz').read('step.npy')[-8:].hex())"
    return int.from_bytes(bytes.fromhex(operator.ssh("control-1", f'python3 -c "{read}"')), "little")


def take_away(operator: Operator) -> None:
    """Delete the example, and wait until its pods have ended: until then they use the claim."""
    operator.kubectl("delete", "-k", f"{EXAMPLE}/lab", "--wait=true")
    until("no pod is left", lambda: operator.kubectl("get", "pods", "-o", "name").strip() == "")


def start(operator: Operator, kustomization: Mapping[str, object] = OVERLAY, limit_s: float = WAIT_S) -> None:
    """Start the example on storage that the control plane serves, and wait until both ranks run.

    ``limit_s`` is for each of its two waits, in which nodes pull the images.
    """
    operator.group("storage", "control-1")
    variables = operator.folder / "inventory" / "group_vars" / "all.yml"
    shares = [{"name": "training", "path": SHARE, "size": "1Gi"}]
    variables.write_text(yaml.safe_dump({**yaml.safe_load(variables.read_text()), "gpunodes_storage": shares}))
    operator.gpunodes("storage", "up")
    copy_example(operator, kustomization)
    run(operator, FOR_EVER)
    until("the images are written", lambda: complete(operator, "load-data"), limit_s=limit_s)
    assert "4096 images written" in operator.kubectl("logs", "job/load-data")
    until("both ranks run, on different nodes", lambda: both_run(operator), limit_s=limit_s)
