"""Pools that scale, and how the kubelets of their machines register their nodes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from gpunodes import settings
from gpunodes.ansible.module_utils.host.spec import Spec
from gpunodes.planner import registration, scaled_pools
from gpunodes.planner.desired import Desired, desired
from gpunodes.planner.scaled_pools import Scaling

from tests.stand_ins import filtered, given, gpu_machine

GPU = {"address": "0000:3b:00.0", "vendor": "10de", "device": "2330", "class": "030200", "driver": None}
POOLS = {"h100": {"min": 1, "max": 4, "priority": 50}, "cpu": {}}
OFF = "/usr/local/sbin/gpunodes-power-off"
CONFIG, UNIT = (
    "/etc/gpunodes/kubelet.conf.d/20-registration.conf",
    "/etc/systemd/system/kubelet.service.d/40-gpunodes-registration.conf",
)


def made(*groups: str, found: dict[str, Any] | None = None, **more: Any) -> Desired:
    request = given(found or gpu_machine(GPU), groups=("workers", *groups), gpunodes_pools=POOLS, **more)
    state = desired(request)
    assert isinstance(state, Desired), state
    return state


def written(spec: Spec) -> dict[str, str]:
    return {file.path: file.content for file in spec.files}


# The setting


@pytest.mark.parametrize(
    "pools",
    [
        {},
        {"h100": {}, "cpu": None},
        {"h100": {"max": 0}},
        {"h100": {"min": 2, "max": 2, "priority": 10, "spare": 1}, "cpu": {}},
    ],
)
def test_pools_may_scale(pools: dict[str, Any]) -> None:
    assert list(settings.problems({"gpunodes_pools": pools})) == []


@pytest.mark.parametrize(
    "entry",
    [
        {"min": 1},
        {"max": -1},
        {"min": 3, "max": 2},
        {"max": "4"},
        {"max": True},
        {"max": 1.5},
        {"max": 4, "maximum": 5},
        {"max": 4, "priority": None},
        ["max"],
        4,
        "x",
    ],
)
def test_a_wrong_pool_is_one_problem_with_the_form(entry: Any) -> None:
    problem, *others = settings.problems({"gpunodes_pools": {"h100": entry}})
    assert not others
    assert problem.key == "gpunodes_pools"
    assert "max" in str(problem)


def test_a_pool_scales_by_its_maximum_alone() -> None:
    assert scaled_pools.scaling(POOLS, "h100") == Scaling(1, 4, 50, 0)
    assert [scaled_pools.scales(POOLS, name) for name in ("h100", "cpu", "t4", "")] == [True, False, False, False]
    assert scaled_pools.any_scales(POOLS)
    assert not any(map(scaled_pools.any_scales, ({}, {"cpu": {}}, None, "{{ pools }}")))


# The registration


def test_the_kubelet_of_a_machine_whose_pool_scales_registers_everything() -> None:
    state = made(
        "h100",
        gpunodes_node_labels={"example.com/team": "ml", "node-role.kubernetes.io/gpu": "", "a.k8s.io/b": "c"},
        gpunodes_node_taints=[{"key": "team", "value": "ml", "effect": "NoSchedule"}],
        gpunodes_gpu_taint=True,
    )
    files = written(state.wanted["registration"])
    assert state.scales
    document = json.loads(files[CONFIG])
    assert document["providerID"] == "gpunodes://gpu-1"
    assert document["registerWithTaints"] == [
        {"key": "team", "value": "ml", "effect": "NoSchedule"},
        {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},
        {"key": "gpunodes.dev/starting", "value": "", "effect": "NoSchedule"},
    ]
    arguments = files[UNIT].split('"')[1].removeprefix("KUBELET_CONFIG_ARGS=").split()
    assert arguments[:2] == ["--config=/var/lib/kubelet/config.yaml", "--config-dir=/etc/gpunodes/kubelet.conf.d"]
    labels = dict(pair.split("=") for pair in arguments[2].removeprefix("--node-labels=").split(","))
    assert labels == {
        "gpunodes.dev/pool": "h100",
        "example.com/team": "ml",
        "gpunodes.dev/gpu": "true",
        "gpunodes.dev/gpu-count": "1",
        "gpunodes.dev/gpu-generation": "hopper",
        "gpunodes.dev/gpu-product": labels["gpunodes.dev/gpu-product"],
    }, "those that a kubelet may not set are set through the API"


def test_the_unit_has_no_text_that_is_no_label() -> None:
    spec = registration.registered("n", {"a": 'x" ; rm', "b\nExecStart=": "1", "c": "%n", "d": "e"}, [])
    assert written(spec)[UNIT].count("--node-labels=") == 1
    assert "--node-labels=d=e" in written(spec)[UNIT]


def test_a_node_keeps_its_name() -> None:
    node = {"name": "other", "provider_id": "gpunodes://other"}
    assert '"gpunodes://other"' in written(made("h100", node=node).wanted["registration"])[CONFIG]


@pytest.mark.parametrize("more", [{}, {"gpunodes_pool": "cpu"}])
def test_what_was_configured_is_removed_when_the_pool_does_not_scale(more: dict[str, Any]) -> None:
    groups = ("h100",) if more else ("cpu",)
    state = made(*groups, **more)
    assert not state.scales
    assert state.wanted["registration"].files == ()
    assert set(state.wanted["registration"].absent) >= {CONFIG, UNIT, OFF}


def test_a_machine_without_a_bmc_shuts_itself_down() -> None:
    files = written(made("h100", gpunodes_bmc_type="wol").wanted["registration"])
    assert "Wants=gpunodes-power-off.service" in files[UNIT]
    assert 'NODE = "gpu-1"' in files[OFF]
    assert OFF not in written(made("h100", gpunodes_bmc_type="redfish").wanted["registration"])


def test_control_planes_and_prepared_machines_are_left_alone() -> None:
    control = desired(given(gpu_machine(), groups=("control_plane", "h100"), gpunodes_pools=POOLS))
    assert isinstance(control, Desired)
    assert not control.scales
    assert "registration" not in control.wanted
    assert "registration" not in made("h100", prepares=True).wanted


def test_a_node_of_another_provider_is_refused_before_anything_changes() -> None:
    node = {"name": "gpu-1", "provider_id": "aws:///eu-1/i-0a"}
    request = given(gpu_machine(), groups=("h100",), gpunodes_pools=POOLS, node=node)
    with pytest.raises(AnsibleFilterError, match="its node has the providerID aws:///eu-1/i-0a, and its pool scales"):
        filtered(request)
    assert not made("cpu", node=node).scales, "elsewhere it does not matter"
    assert made("h100", node={"name": "gpu-1", "provider_id": ""}).scales
