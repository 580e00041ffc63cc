"""Which pods use GPUs: objects of the API in, a decision out."""

from __future__ import annotations

from typing import Any

import pytest
from gpunodes.ansible.module_utils.cluster.gpu_pods import requested, uses_gpu


def pod(status: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c"}], **spec}, "status": status or {}}


def limited(**resources: Any) -> dict[str, Any]:
    return pod(containers=[{"name": "a"}, {"name": "b", "resources": resources}])


def claim(name: str, request: dict[str, Any], driver: str = "") -> dict[str, Any]:
    results = [{"driver": driver}] if driver else []
    return {
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [request]}},
        "status": {"allocation": {"devices": {"results": results}}} if driver else {},
    }


CLAIMED = pod(resourceClaims=[{"name": "gpu", "resourceClaimName": "one"}])


@pytest.mark.parametrize(
    "found",
    [
        limited(limits={"nvidia.com/gpu": "1"}),
        limited(requests={"nvidia.com/gpu": 2}),
        limited(limits={"nvidia.com/mig-1g.5gb": "1"}),
        limited(limits={"nvidia.com/gpu.shared": "1"}),
        pod(initContainers=[{"resources": {"limits": {"nvidia.com/gpu": "1"}}}]),
        limited(limits={"deviceclass.resource.kubernetes.io/gpu.nvidia.com": "1"}),
        pod(runtimeClassName="nvidia"),
        pod(volumes=[{"hostPath": {"path": "/dev/nvidia0"}}]),
        CLAIMED,
    ],
)
def test_it_uses_a_gpu(found: dict[str, Any]) -> None:
    assert uses_gpu(found)
    assert not uses_gpu({**found, "status": {"phase": "Succeeded"}})
    assert uses_gpu({**found, "status": {"phase": "Running"}})


@pytest.mark.parametrize(
    "found",
    [
        pod(),
        {},
        {"spec": None, "status": None},
        limited(limits={"cpu": "1", "amd.com/gpu": "1"}),
        limited(limits={"nvidia.com/gpu": "0"}),
        limited(limits={"nvidia.com/gpu": "-1\x1b[2J"}, requests=None),
        limited(limits={"xnvidia.com/gpu": "1"}),
        limited(limits={"deviceclass.resource.kubernetes.io/nic.example": "1"}),
        pod(runtimeClassName="nvidia\n"),
        pod(runtimeClassName="runc", volumes=[{"hostPath": {"path": "/dev"}}, {"emptyDir": {}}, {"hostPath": None}]),
        pod(containers=None, initContainers=None, volumes=None, resourceClaims=None),
    ],
)
def test_it_uses_none(found: dict[str, Any]) -> None:
    assert not uses_gpu(found)


@pytest.mark.parametrize(
    ("claims", "uses"),
    [
        ([claim("one", {"exactly": {"deviceClassName": "gpu.nvidia.com"}})], True),
        ([claim("one", {"deviceClassName": "mig.nvidia.com"})], True),
        ([claim("one", {"firstAvailable": [{"deviceClassName": "x"}, {"deviceClassName": "gpu.nvidia.com"}]})], True),
        ([claim("one", {"exactly": {"deviceClassName": "ours"}}, driver="gpu.nvidia.com")], True),
        ([claim("one", {"exactly": {"deviceClassName": "nic.example"}}, driver="nic.example")], False),
        ([claim("one", {"exactly": {"deviceClassName": "fakenvidia.com"}})], False),
        # Another claim: nobody knows what this pod's is for.
        ([claim("two", {"exactly": {"deviceClassName": "nic.example"}})], True),
        ([], True),
        (None, True),
    ],
)
def test_a_claim_counts_if_it_is_for_gpus_or_unknown(claims: Any, uses: bool) -> None:
    assert uses_gpu(CLAIMED, claims) is uses
    template = pod(
        {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "one"}]},
        resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "t"}],
    )
    assert uses_gpu(template, claims) is uses
    assert not uses_gpu(pod(), claims)


def container(gpus: int, **more: str) -> dict[str, Any]:
    return {"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}, **more}


@pytest.mark.parametrize(
    ("before", "containers", "wanted"),
    [
        ([], [container(1), container(2)], 3),
        # A sidecar runs beside the others, and another init container before them.
        ([container(1, restartPolicy="Always")], [container(2)], 3),
        ([container(4)], [container(1), container(2)], 4),
        ([container(2)], [container(1), container(2)], 3),
        ([container(1, restartPolicy="Always"), container(4)], [container(1)], 5),
        ([container(4), container(1, restartPolicy="Always")], [container(1)], 4),
    ],
)
def test_gpus_are_counted_as_the_scheduler_does(before: Any, containers: Any, wanted: int) -> None:
    found = pod(initContainers=before, containers=containers)
    assert requested(found) == {"nvidia.com/gpu": wanted}
    assert not requested({**found, "status": {"phase": "Failed"}})
