"""The verification with a pod: its result is recorded, and its job is deleted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

testinfra_hosts = ["control-1"]


def test_the_node_records_the_boot_in_which_its_gpus_were_verified(node: dict[str, Any]) -> None:
    assert node["metadata"]["annotations"]["gpunodes.dev/gpu-boot"] == node["status"]["nodeInfo"]["bootID"]


def test_no_job_is_left(get: Callable[[str], Any]) -> None:
    jobs = get("/apis/batch/v1/namespaces/kube-system/jobs")["items"]
    assert [job["metadata"]["name"] for job in jobs if job["metadata"]["name"].startswith("gpunodes-verify-")] == []
