"""Patches of the operating system of a GPU node, in stages: they leave driver, Kubernetes and containerd alone."""

from __future__ import annotations

from . import unhealthy
from .conftest import LONG, Operator

LAB = unhealthy.LAB


def test_the_plan_of_the_operating_system_touches_nothing(operator: Operator) -> None:
    before = operator.ssh("gpu-1", "dpkg-query -W; ls -l --time-style=full-iso /var/lib/apt/lists")
    [machine] = operator.document("os", "plan", "gpu-1")["machines"]
    assert not machine["unreadable"]
    assert operator.ssh("gpu-1", "dpkg-query -W; ls -l --time-style=full-iso /var/lib/apt/lists") == before


def test_an_upgrade_of_the_operating_system_keeps_driver_and_kubernetes(operator: Operator) -> None:
    versions = "dpkg-query -W 'nvidia-*' 'kube*' containerd"
    before = operator.ssh("gpu-1", versions, code=None)
    words = ("--limit", "gpu-1", "--tags", "prepare,apply,verify")
    for _ in range(2):
        operator.gpunodes("playbook", "os_upgrade", *words, limit_s=2 * LONG)
    assert operator.ssh("gpu-1", versions, code=None) == before
    assert [each for each in operator.document("os", "plan", "gpu-1")["machines"][0]["packages"] if each["old"]] == []
