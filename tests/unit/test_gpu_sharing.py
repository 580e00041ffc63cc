"""GPUs that pods share: the setting, the node's label, the plan, and the objects of the device plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from gpunodes import settings
from gpunodes.ansible.filter import gpu as filters
from gpunodes.ansible.module_utils import devices
from gpunodes.errors import WrongInput
from gpunodes.planner import gpu, gpu_sharing, pools
from gpunodes.views import gpu as view

from tests.unit.planner.test_gpu_plan import machine

ROLE = Path(__file__).parents[2] / "roles" / "device_plugin"
FOUR = {"mode": "time-slicing", "replicas": 4}
MPS = {"mode": "mps", "replicas": 4}


def rendered(*sharing: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The role's objects by kind and name."""
    loader = DataLoader()
    defaults = loader.load_from_file(str(ROLE / "defaults/main.yml"), trusted_as_template=True)
    text = trust_as_template((ROLE / "templates/nvidia.yml.j2").read_text())
    made = Templar(loader, variables={**defaults, "device_plugin_sharing": list(sharing)}).template(text)
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(made) if each}


@pytest.mark.parametrize(
    "value",
    [
        {"mode": "time-slicing"},
        {"mode": "time-slicing", "replicas": 1},
        {"mode": "time-slicing", "replicas": 49},
        {"mode": "time-slicing", "replicas": True},
        {"mode": "time-slicing", "replicas": "4"},
        {"mode": "mps", "replicas": 49},
        {"mode": ["mps"], "replicas": 4},
        {"mode": "none", "replicas": 4},
        {"replicas": 4},
        {**FOUR, "profile": "1g.10gb"},
    ],
)
def test_values_that_are_refused(value: dict[str, Any]) -> None:
    found = list(settings.problems({"gpunodes_gpu_sharing": value}))
    assert [each.wanted for each in found] == [devices.SHARING_WANTED]
    with pytest.raises(WrongInput, match="gpunodes_gpu_sharing is"):
        gpu_sharing.sharing({"gpunodes_gpu_sharing": value})
    with pytest.raises(AnsibleFilterError):
        filters.gpu_sharing([{}, value])


@pytest.mark.parametrize(
    ("value", "label", "count"),
    [({}, "", 1), ({"mode": "none"}, "", 1), (FOUR, "time-slicing-4", 4), ({**MPS, "replicas": 48}, "mps-48", 48)],
)
def test_values_and_the_label_that_follows(value: dict[str, Any], label: str, count: int) -> None:
    given = settings.resolve({"gpunodes_gpu_sharing": value})
    assert not list(settings.problems({"gpunodes_gpu_sharing": value}))
    assert pools.labels(given, []) == ({devices.SHARING: label} if label else {})
    assert devices.replicas(pools.labels(given, [])) == count
    assert gpu_sharing.setting_of(label) == (value if count > 1 else {})


@pytest.mark.parametrize(
    "label", ["", "time-slicing-", "time-slicing-0", "time-slicing-100", "mps-", "mps-4-4", "4", "\u0664"]
)
def test_a_label_that_gpunodes_did_not_set_counts_as_none(label: str) -> None:
    assert devices.replicas({devices.SHARING: label}) == 1


def test_the_ways_of_all_machines_once_each() -> None:
    given = [{}, FOUR, {**FOUR, "replicas": 12}, MPS, FOUR]
    assert filters.gpu_sharing(given) == ["mps-4", "time-slicing-4", "time-slicing-12"]


def test_the_plan_shows_the_shares() -> None:
    given = settings.resolve({"gpunodes_gpu_sharing": FOUR})
    requested = gpu.requested_of(given, "1.36")
    assert gpu.requested_of({**given, **requested.settings()}, "1.36") == requested
    planned = gpu.planned("gpu-1", machine("H100", "H100"), requested)
    assert "2 GPUs x 4 = 8 shares by time-slicing" in view.plans(gpu.Plans("1.36", [planned]))
    without = gpu.planned("gpu-1", machine("H100"), requested.without_kubernetes())
    assert "shares" not in view.plans(gpu.Plans("", [without])), "a machine that is no node has no device plugin"


def test_every_node_with_gpus_has_one_plugin() -> None:
    found = rendered("time-slicing-2", "time-slicing-4")
    plugins = {name: each["spec"]["template"]["spec"] for (kind, name), each in found.items() if kind == "DaemonSet"}
    assert list(plugins) == [
        f"nvidia-device-plugin-{each}" for each in ("daemonset", "time-slicing-2", "time-slicing-4")
    ]
    (term,) = plugins["nvidia-device-plugin-daemonset"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    without = [{"key": key, "operator": "DoesNotExist"} for key in (devices.SHARING, devices.SERVING)]
    assert term == {"matchExpressions": without}
    for count in (2, 4):
        name = f"time-slicing-{count}"
        plugin = plugins[f"nvidia-device-plugin-{name}"]
        assert plugin["nodeSelector"] == {"gpunodes.dev/gpu": "true", devices.SHARING: name}
        config = yaml.safe_load(found["ConfigMap", f"nvidia-device-plugin-{name}"]["data"]["config.yaml"])
        assert config["sharing"]["timeSlicing"]["resources"] == [{"name": "nvidia.com/gpu", "replicas": count}]


def test_the_plugins_differ_in_their_configuration_only() -> None:
    """The image, the tolerations and the least mounts and rights are those of the plugin without sharing."""
    found = rendered("time-slicing-4")
    plain, shared = (
        found["DaemonSet", f"nvidia-device-plugin-{each}"]["spec"]["template"]["spec"]
        for each in ("daemonset", "time-slicing-4")
    )
    for each in (plain, shared):
        each.pop("affinity", None)
        each["nodeSelector"].pop(devices.SHARING, None)
    container = shared["containers"][0]
    assert container["env"].pop() == {"name": "CONFIG_FILE", "value": "/etc/device-plugin/config.yaml"}
    assert container["volumeMounts"].pop()["readOnly"] is True
    assert shared["volumes"].pop()["configMap"] == {"name": "nvidia-device-plugin-time-slicing-4"}
    assert shared == plain


def test_another_configuration_replaces_the_pods() -> None:
    notes = [
        rendered(f"time-slicing-{count}")["DaemonSet", f"nvidia-device-plugin-time-slicing-{count}"]["spec"][
            "template"
        ]["metadata"]
        for count in (2, 4)
    ]
    assert notes[0]["annotations"]["gpunodes.dev/config"] != notes[1]["annotations"]["gpunodes.dev/config"]


def test_mps_has_a_daemon_and_the_plugin_no_more_rights() -> None:
    found = rendered("mps-4")
    config = yaml.safe_load(found["ConfigMap", "nvidia-device-plugin-mps-4"]["data"]["config.yaml"])
    assert config["sharing"] == {"mps": {"resources": [{"name": "nvidia.com/gpu", "replicas": 4}]}}
    plain, plugin, daemon = (
        found["DaemonSet", f"nvidia-device-plugin-{each}"]["spec"]["template"]["spec"]
        for each in ("daemonset", "mps-4", "mps-4-daemon")
    )
    [container] = plugin["containers"]
    assert container["securityContext"] == plain["containers"][0]["securityContext"]
    assert {"name": "MPS_ROOT", "value": plugin["volumes"][-2]["hostPath"]["path"]} in container["env"]
    assert [each["mountPath"] for each in container["volumeMounts"][-2:]] == ["/mps", "/dev/shm"]
    assert plugin["nodeSelector"] == daemon["nodeSelector"] == {"gpunodes.dev/gpu": "true", devices.SHARING: "mps-4"}
    assert daemon["tolerations"] == plain["tolerations"]
    assert daemon["automountServiceAccountToken"] is False
