"""The commands of docs/walkthroughs, line by line, on one cluster.

The guide of 2017 makes it, by addresses, in a folder of its own; the others begin with `gpunodes up`, which finds it
there. kubectl runs on the control plane, with the files of examples/. Not run yet.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import re
import shlex
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from gpunodes.inventory import Inventory

from .conftest import CHECKOUT, LabSpec, Operator, search_for_secrets

LAB = LabSpec("debian13", workers=1, gpu_workers=1)
PAGES = CHECKOUT / "docs" / "walkthroughs"
ORDER = ("kubernetes-gpu-guide", "acs-engine", "aks-engine", "cdk", "cdk-tensorflow")
"""The pages; the first one makes the cluster."""
MACHINES = {"10.0.0.1": "control-1", "10.0.0.2": "gpu-1", "10.0.0.3": "worker-1"}
"""The machines of the lab for the addresses of the guide."""
FILES = "/run/walk"
"""Where the control plane has examples/."""
UP_LIMIT_S = 3000.0
SHARE = {"name": "training", "path": "/srv/training", "size": "1Gi", "namespaces": ["team"]}


def commands(page: str) -> Iterator[list[str]]:
    """The command lines in the code blocks of a page, without comments."""
    for line in re.findall(r"^ {4}((?:gpunodes|kubectl) .*)$", (PAGES / f"{page}.md").read_text(), re.MULTILINE):
        yield shlex.split(line, comments=True)


def replaced(operator: Operator, words: list[str]) -> list[str]:
    """A command line with the addresses, the user and the key of the lab."""
    inventory = Inventory(operator.folder / "inventory" / "hosts.yml")
    found = inventory.connection("control-1")
    known = {each: inventory.select([name])[0].address for each, name in MACHINES.items()}
    known |= {"admin": str(found["ansible_user"]), "~/.ssh/id_ed25519": str(found["ansible_ssh_private_key_file"])}
    return [known.get(word, word) for word in words]


def setting(folder: Path, **values: object) -> None:
    """Add settings of all machines to an inventory."""
    path = folder / "inventory" / "group_vars" / "all.yml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **values}))


def send(operator: Operator, name: str, path: Path) -> None:
    """Copy a file or folder to the control plane, into ``FILES``."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        tar.add(path, name, filter=lambda each: None if "__pycache__" in each.name else each)
    text = base64.encodebytes(data.getvalue()).decode()
    operator.ssh("control-1", f"mkdir -p {FILES} && base64 -d <<'END' | tar -C {FILES} -xz\n{text}END")


def kubectl(operator: Operator, *words: str, code: int | None = 0) -> str:
    admin = "KUBECONFIG=/etc/kubernetes/admin.conf"
    return operator.ssh("control-1", f"cd {FILES} && {admin} kubectl {shlex.join(words)}", code)


def guide(operator: Operator) -> Operator:
    """The operator in an empty folder, whose inventory the commands write; it only has the lab's settings."""
    folder = operator.folder / "guide"
    (folder / "inventory" / "group_vars").mkdir(parents=True)
    settings = (operator.folder / "inventory" / "group_vars" / "all.yml").read_text()
    (folder / "inventory" / "group_vars" / "all.yml").write_text(settings)
    return dataclasses.replace(operator, folder=folder)


def follow(operator: Operator, shell: Operator, page: str) -> str:
    """Run the commands of a page as ``shell``; returns what they printed."""
    printed = ""
    for words in commands(page):
        if words[0] == "kubectl":
            printed += kubectl(operator, *words[1:])
            continue
        argv = replaced(operator, words[1:])
        # Without an inventory there is no mirror either: the public package sources, which the lab does not reach.
        alone = argv[:2] == ["gpu", "plan"] and "--user" in argv
        printed += shell.gpunodes(*argv, code=None if alone else 0, limit_s=UP_LIMIT_S).stdout
    return printed


def test_the_guide_of_2017_makes_a_cluster(operator: Operator) -> None:
    for folder in (operator.folder, (shell := guide(operator)).folder):
        setting(folder, gpunodes_driver_branch="580")
    send(operator, "examples", CHECKOUT / "examples")
    follow(operator, shell, ORDER[0])
    assert set(yaml.safe_load((shell.folder / "inventory" / "hosts.yml").read_text())) >= {"control_plane", "workers"}
    assert "current-context" in Path(operator.environment["KUBECONFIG"]).read_text()
    nodes = operator.document("status")["nodes"]
    assert {node["name"]: node["ready"] for node in nodes} == dict.fromkeys(MACHINES.values(), True)


def test_the_guides_pod_gets_a_gpu(operator: Operator) -> None:
    kubectl(operator, "wait", "--for=condition=Complete", "job/gpu-job", "--timeout=220s")
    assert "NVIDIA-SMI" in kubectl(operator, "logs", "job/gpu-job")
    kubectl(operator, "delete", "job", "gpu-job", "--wait=true")


@pytest.mark.parametrize("page", ORDER[1:4])
def test_a_page_of_another_tool(operator: Operator, page: str) -> None:
    follow(operator, operator, page)
    if any("gpu-job" in word for words in commands(page) for word in words):
        test_the_guides_pod_gets_a_gpu(operator)
    for written in operator.folder.glob("kubeconfig"):
        assert written.stat().st_mode & 0o777 == 0o600


def test_tensorflow_on_cdk_becomes_a_job_over_shared_storage(operator: Operator) -> None:
    """Its images are not in the lab. A user makes its objects, who may change this namespace and nothing else."""
    operator.group("storage", "control-1")
    setting(operator.folder, gpunodes_storage=[SHARE])
    alice = operator.folder / "alice.kubeconfig"
    for words in commands(ORDER[4]):
        if words[0] == "gpunodes":
            operator.gpunodes(*words[1:], limit_s=UP_LIMIT_S)
            continue
        if alice.exists():
            assert alice.stat().st_mode & 0o777 == 0o600
            send(operator, alice.name, alice)
        kubectl(operator, *words[1:])
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


def test_a_report_of_the_cluster_is_one_private_file(operator: Operator) -> None:
    operator.gpunodes("report", "-o", "report.html", code=None)
    path = operator.folder / "report.html"
    assert path.stat().st_mode & 0o777 == 0o600
    page = path.read_text()
    assert all(name in page for name in MACHINES.values())
    assert "<script" not in page
    assert {each["name"] for each in operator.document("report", code=None)["machines"]} == set(MACHINES.values())


def test_no_secret_leaks(operator: Operator) -> None:
    search_for_secrets(operator, LAB.machines)
