"""The guide of 2017 in docs/walkthroughs, line by line: it makes a cluster, by addresses, in a folder of its own.

Not run yet.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import yaml

from . import walks
from .conftest import CHECKOUT, Operator, search_for_secrets
from .walks import GUIDE, MACHINES, follow, send, setting

LAB = walks.LAB


def guide(operator: Operator) -> Operator:
    """The operator in an empty folder, whose inventory the commands write; it only has the lab's settings."""
    folder = operator.folder / "guide"
    (folder / "inventory" / "group_vars").mkdir(parents=True)
    settings = (operator.folder / "inventory" / "group_vars" / "all.yml").read_text()
    (folder / "inventory" / "group_vars" / "all.yml").write_text(settings)
    return dataclasses.replace(operator, folder=folder)


def test_the_guide_of_2017_makes_a_cluster(operator: Operator) -> None:
    for folder in (operator.folder, (shell := guide(operator)).folder):
        setting(folder, gpunodes_driver_branch="580")
    send(operator, "examples", CHECKOUT / "examples")
    follow(operator, shell, GUIDE, set())
    assert set(yaml.safe_load((shell.folder / "inventory" / "hosts.yml").read_text())) >= {"control_plane", "workers"}
    assert "current-context" in Path(operator.environment["KUBECONFIG"]).read_text()
    nodes = operator.document("status")["nodes"]
    assert {node["name"]: node["ready"] for node in nodes} == dict.fromkeys(MACHINES.values(), True)


def test_the_guides_pod_gets_a_gpu(operator: Operator) -> None:
    walks.job_gets_a_gpu(operator)


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
