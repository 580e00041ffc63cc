"""The walk-throughs for other tools, line by line: the first one makes the cluster of all. Not run yet.

test_walkthrough_guide.py has the guide of 2017.
"""

from __future__ import annotations

import pytest

from . import walks
from .conftest import CHECKOUT, Operator, search_for_secrets
from .walks import OTHERS, follow, job_gets_a_gpu, kubectl, send, setting

LAB = walks.LAB
SHARE = {"name": "training", "path": "/srv/training", "size": "1Gi", "namespaces": ["team"]}
_done: set[tuple[str, ...]] = set()
"""What an earlier page ran runs once: each page begins with the cluster that the one before it has verified."""


@pytest.mark.parametrize("page", OTHERS[:-1])
def test_a_page_of_another_tool(operator: Operator, page: str) -> None:
    if not _done:
        setting(operator.folder, gpunodes_driver_branch="580")
        send(operator, "examples", CHECKOUT / "examples")
    follow(operator, operator, page, _done)
    if any("gpu-job" in word for words in walks.commands(page) for word in words):
        job_gets_a_gpu(operator)
    for written in operator.folder.glob("*kubeconfig"):
        assert written.stat().st_mode & 0o777 == 0o600


def test_tensorflow_on_cdk_becomes_a_job_over_shared_storage(operator: Operator) -> None:
    """Its images are not in the lab. A user makes its objects, who may change this namespace and nothing else."""
    operator.group("storage", "control-1")
    setting(operator.folder, gpunodes_storage=[SHARE])
    follow(operator, operator, OTHERS[-1], _done)
    alice = operator.folder / "alice.kubeconfig"
    assert alice.stat().st_mode & 0o777 == 0o600
    hers = ("--kubeconfig", alice.name)
    assert kubectl(operator, *hers, "-n", "team", "get", "job", "train", "-o", "name").strip() == "job.batch/train"
    for forbidden in (("get", "nodes"), ("get", "secrets", "-A"), ("-n", "default", "get", "pods")):
        kubectl(operator, *hers, *forbidden, code=1)
    claim = kubectl(operator, "-n", "team", "get", "pvc", "training", "-o", "jsonpath={.status.phase}")
    assert claim.strip() == "Bound"
    assert "30060" in kubectl(operator, "-n", "team", "get", "service", "tensorboard", "-o", "jsonpath={.spec.ports}")
    kubectl(operator, *hers, "-n", "team", "delete", "-k", "examples/training/overlays/gpu", "--wait=true")
    assert kubectl(operator, "-n", "team", "get", "jobs,services,deployments", "-o", "name").strip() == ""
    kubectl(operator, "-n", "team", "wait", "--for=delete", "pods", "--all", "--timeout=180s", code=None)
    operator.gpunodes("kubeconfig", "--remove-user", "alice")
    kubectl(operator, *hers, "-n", "team", "get", "pods", code=1)
    operator.gpunodes("storage", "down", "--yes")


def test_no_secret_leaks(operator: Operator) -> None:
    search_for_secrets(operator, LAB.machines)
