"""Repairs in a pool of two GPU machines: healthy machines, and too many unhealthy ones.

test_pool_guard.py has the same machines: the loop guard, and no API server.
"""

from __future__ import annotations

from . import unhealthy
from .conftest import Operator
from .unhealthy import assert_clean, fault, repaired, wait_for

GPU = ("gpu-1", "gpu-2")
LAB = unhealthy.POOL


def test_healthy_machines_are_not_repaired(operator: Operator) -> None:
    boots = [unhealthy.boot(operator, machine) for machine in GPU]
    document = operator.document("health", "gpu-*", "--reboot-hung", "--yes")
    assert {each["decision"] for each in document["machines"]} == {"nothing"}
    assert [unhealthy.boot(operator, machine) for machine in GPU] == boots
    assert_clean(operator, GPU)


def test_too_many_unhealthy_machines_stop_repairs(operator: Operator) -> None:
    for machine in GPU:
        fault(operator, machine, "lost")
    for machine in GPU:
        wait_for(operator, machine, ["reboot"])
    boots = [unhealthy.boot(operator, machine) for machine in GPU]
    document = operator.document("health", "gpu-*", "--reboot-hung", "--yes", code=3)
    assert {each["decision"] for each in document["machines"]} == {"refuse"}
    assert all("2 of 2" in each["why"] for each in document["machines"])
    assert [unhealthy.boot(operator, machine) for machine in GPU] == boots
    document = operator.document("repair", *GPU, "--max-unavailable", "100%", "--yes")
    for machine in GPU:
        repaired(document, machine)
    assert_clean(operator, GPU)


def test_no_password_leaks(operator: Operator) -> None:
    unhealthy.assert_no_password_leaks(operator)
