"""A cluster that kubeadm made without gpunodes: what its inventory gets, and what a hostile one cannot put there."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.inventory import Inventory, addressed, edit
from gpunodes.operations import checked
from gpunodes.planner import adoption
from gpunodes.planner.adoption import Adoption, Fit
from gpunodes.views import adoption as view

from tests import hostile

CONFIGURATION = {
    "apiVersion": "kubeadm.k8s.io/v1beta4",
    "controlPlaneEndpoint": "api.example:6443",
    "networking": {"dnsDomain": "cluster.local", "podSubnet": "10.10.0.0/16", "serviceSubnet": "10.96.0.0/12"},
}
ATTACKS = [*hostile.ATTACKS, "{% for %}", "a\nall:", "x" * 400, "\x1b[2J", "-oProxyCommand=id", "..", ""]


def node(name: str, address: str, *, control: bool = False, runtime: str = "containerd://2.1.4") -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"node-role.kubernetes.io/control-plane": ""} if control else {}},
        "status": {
            "addresses": [{"type": "Hostname", "address": name}, {"type": "InternalIP", "address": address}],
            "nodeInfo": {"kubeletVersion": "v1.36.3", "containerRuntimeVersion": runtime},
        },
    }


def daemon_set(name: str, namespace: str = "kube-system", **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace}, "spec": {"template": {"metadata": {"labels": labels}}}}


NODES = [node("control-1", "10.0.0.1", control=True), node("gpu-1", "10.0.0.2")]


def adopted(change: Callable[[Any], None] = lambda _: None, **more: Any) -> Adoption:
    given: dict[str, Any] = {"version": "v1.36.3", "configuration": CONFIGURATION, "nodes": NODES}
    given = copy.deepcopy(given | {"sets": [daemon_set("calico-node")]} | more)
    change(given)
    return adoption.adopted(**given)


def fits(found: Adoption) -> Mapping[tuple[str, str], Fit]:
    return {(row.machine, row.what): row.fit for row in found.rows}


def test_the_inventory_has_its_machines_and_settings(tmp_path: Path) -> None:
    """It can be read, and a machine joins by its address later."""
    found = adopted()
    path = tmp_path / "hosts.yml"
    edit.create(path, adoption.document(found, {"ansible_user": "admin"}))
    assert yaml.safe_load(path.read_text()) == {
        "control_plane": {"hosts": {"control-1": {"ansible_host": "10.0.0.1", "ansible_user": "admin"}}},
        "workers": {"hosts": {"gpu-1": {"ansible_host": "10.0.0.2", "ansible_user": "admin"}}},
        "all": {
            "vars": {
                "gpunodes_kubernetes_version": "1.36",
                "gpunodes_pod_subnet": "10.10.0.0/16",
                "gpunodes_service_subnet": "10.96.0.0/12",
                "gpunodes_control_plane_endpoint": "api.example:6443",
                "gpunodes_network": "none",
            }
        },
    }
    assert [each.name for each in checked.inventory(path).control_planes()] == ["control-1"]
    from gpunodes.model import Role

    change = edit.Tentative(path)
    assert edit.add(path, Role.WORKER, ["10.0.0.9"], {}) == ["10.0.0.9"]
    assert Inventory(path).variables("10.0.0.9")["ansible_user"] == "admin"
    change.drop(["10.0.0.9"])
    assert [each.name for each in Inventory(path).machines()] == ["control-1", "gpu-1"]
    with pytest.raises(WrongInput, match="exists already"):
        edit.create(path, {})


def test_what_differs_is_reported() -> None:
    sick = [
        *NODES,
        node("old-1", "10.0.0.3", runtime="cri-o://1.30.0"),
        node("docker-1", "10.0.0.4", runtime="docker://29.0.1"),
    ]
    sick[2]["status"]["nodeInfo"]["kubeletVersion"] = "v1.31.0"
    sick[3]["status"]["nodeInfo"]["kubeletVersion"] = "v1.35.2"
    found = fits(adopted(nodes=sick, configuration={"networking": {"dnsDomain": "corp.local"}}))
    assert found["", "Kubernetes"] is Fit.SAME
    assert found["", "domain of services"] is Fit.OTHER
    assert found["", "network of pods"] is Fit.OTHER
    assert found["", "network add-on"] is Fit.OTHER
    assert (found["old-1", "kubelet"], found["old-1", "container runtime"]) == (Fit.WRONG, Fit.WRONG)
    assert (found["docker-1", "kubelet"], found["docker-1", "container runtime"]) == (Fit.OTHER, Fit.SAME)
    assert found["gpu-1", "kubelet"] is Fit.SAME


def test_several_control_planes_need_an_endpoint() -> None:
    several = [*NODES, node("control-2", "10.0.0.3", control=True)]
    assert fits(adopted(nodes=several))["", "controlPlaneEndpoint"] is Fit.SAME
    assert fits(adopted(nodes=several, configuration={}))["", "controlPlaneEndpoint"] is Fit.WRONG
    assert fits(adopted(configuration={}))["", "controlPlaneEndpoint"] is Fit.SAME


def serving(name: str, namespace: str = "kube-system", image: str = "x", *, own: bool = False) -> dict[str, Any]:
    """A DaemonSet of one container."""
    made = daemon_set(name, namespace)
    made["metadata"]["labels"] = {"app.kubernetes.io/managed-by": "gpunodes"} if own else {}
    made["spec"]["template"]["spec"] = {"containers": [{"image": image}]}
    return made


PLUGIN = "nvcr.io/nvidia/k8s-device-plugin:v0.17.0"


@pytest.mark.parametrize(
    ("sets", "found", "fit"),
    [
        ([], "none is offered to pods", Fit.SAME),
        ([serving("kube-proxy")], "none is offered to pods", Fit.SAME),
        ([serving("nvidia-device-plugin-daemonset", own=True)], "device plugin of gpunodes", Fit.SAME),
        ([serving("nvidia-dra-driver", own=True)], "driver for dynamic resource allocation of gpunodes", Fit.SAME),
        ([serving("nvidia-device-plugin-daemonset")], "device plugin (kube-system/nvidia-device-plugin-d", Fit.WRONG),
        ([serving("mine", "team", PLUGIN)], "device plugin (team/mine)", Fit.WRONG),
        # The label is anybody's who may make DaemonSets in some namespace.
        ([serving("nvidia-device-plugin-daemonset", "team", own=True)], "device plugin (team/nvidia-d", Fit.WRONG),
        (
            [serving("nvidia-device-plugin-daemonset", "gpu-operator", PLUGIN), serving("x", "gpu-operator")],
            "GPU Operator (gpu-operator/nvidia-device-plugin-daemonset)",
            Fit.WRONG,
        ),
        ([serving("nvidia-container-toolkit-daemonset", "x")], "GPU Operator (x/nvidia-container-toolk", Fit.WRONG),
        # Without its driver, toolkit and device plugin.
        ([serving("nvidia-dcgm-exporter", "gpu-operator")], "none is offered to pods", Fit.SAME),
    ],
)
def test_what_serves_gpus(sets: list[dict[str, Any]], found: str, fit: Fit) -> None:
    [row] = [each for each in adopted(sets=sets).rows if each.what == "GPUs of pods"]
    assert row.found.startswith(found)
    assert row.fit is fit
    assert ("before GPU software" in row.wanted) is (fit is Fit.WRONG)


def test_gpus_that_something_unknown_serves() -> None:
    offering = node("gpu-1", "10.0.0.2")
    offering["status"]["allocatable"] = {"cpu": "8", "nvidia.com/gpu": "4"}
    slices = [{"spec": {"driver": "gpu.nvidia.com", "nodeName": "gpu-1"}}]
    for more in ({"nodes": [NODES[0], offering]}, {"slices": slices}):
        [row] = [each for each in adopted(**more).rows if each.what == "GPUs of pods"]
        assert (row.found, row.fit) == ("gpu-1 offer them, by a program of no known name", Fit.WRONG)


def test_settings_that_follow_from_the_cluster() -> None:
    label = {"gpunodes.dev/network": "flannel"}
    own = adopted(sets=[daemon_set("kube-flannel-ds", "kube-flannel", **label)])
    assert own.settings["gpunodes_network"] == "flannel"
    assert adopted(sets=[daemon_set("kube-flannel-ds", "kube-flannel")]).settings["gpunodes_network"] == "none"
    for others in (daemon_set("mine", "team", **label), daemon_set("kube-flannel-ds", "team", **label)):
        assert adopted(sets=[others]).settings["gpunodes_network"] == "none"
    docker = [node("c", "10.0.0.1", control=True, runtime="docker://29.0.1")]
    assert adopted(nodes=docker).settings["gpunodes_runtime"] == "docker"
    assert "gpunodes_runtime" not in adopted().settings


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"version": "v1.20.4"}, "upgrade it first"),
        ({"version": "2"}, "reports the version"),
        ({"nodes": NODES[1:]}, "control planes that are nodes"),
        ({"nodes": [*NODES, node("gpu-2", "10.0.0.2")]}, "gpu-1 and gpu-2 have the address 10.0.0.2"),
        ({"nodes": [*NODES, node("gpu-2", "fd00::2")]}, "clusters with IPv6 are not supported"),
        *(
            ({"nodes": [*NODES, node("gpu-2", each)]}, "an IPv4 address of a machine")
            for each in ("127.0.0.1", "0.1.2.3", "169.254.169.254", "224.0.0.1", "255.255.255.255")
        ),
        ({"configuration": {"networking": {"podSubnet": "10.1.0.0/16,fd00::/64"}}}, "clusters with IPv6"),
        ({"configuration": {"networking": {"podSubnet": "10.1.0.1/16"}}}, "one IPv4 network"),
    ],
)
def test_what_cannot_be_adopted(more: dict[str, Any], message: str) -> None:
    with pytest.raises(GpunodesError, match=message):
        adopted(**more)


@pytest.mark.parametrize("attack", ATTACKS, ids=ascii)
def test_no_text_of_the_cluster_becomes_a_template_or_a_variable(attack: str) -> None:
    """Each text is refused, or it is only shown."""

    def places(given: dict[str, Any]) -> list[tuple[Any, str]]:
        return [
            (given, "version"),
            (given["configuration"], "controlPlaneEndpoint"),
            *((given["configuration"]["networking"], key) for key in ("dnsDomain", "podSubnet", "serviceSubnet")),
            (given["nodes"][1]["metadata"], "name"),
            (given["nodes"][1]["status"]["addresses"][1], "address"),
            *((given["nodes"][1]["status"]["nodeInfo"], key) for key in ("kubeletVersion", "containerRuntimeVersion")),
            *((given["sets"][0]["metadata"], key) for key in ("name", "namespace")),
            (given["sets"][0]["spec"]["template"]["spec"]["containers"][0], "image"),
        ]

    def put(given: dict[str, Any], number: int) -> None:
        part, key = places(given)[number]
        part[key] = attack

    for number in range(12):
        try:
            found = adopted(functools.partial(put, number=number), sets=[serving("mine", "team", PLUGIN)])
        except GpunodesError:
            continue
        document = adoption.document(found, {})
        assert attack == "" or attack not in str(document)
        assert hostile.is_plain(view.table(found.rows, None))
        path = addressed.file_of(document)
        assert {each.name for each in checked.inventory(path).machines()} == {"control-1", "gpu-1"}


@pytest.mark.parametrize("attack", ATTACKS, ids=ascii)
def test_a_program_that_offers_gpus_is_shown_as_text(attack: str) -> None:
    slices = [{"spec": {"driver": "gpu.nvidia.com", "nodeName": attack}}]
    assert hostile.is_plain(view.table(adopted(slices=slices).rows, None))


@pytest.mark.parametrize("configuration", [None, [], "x", {"networking": 5}, {"networking": {"podSubnet": ["x"]}}])
def test_a_configuration_of_another_shape(configuration: Any) -> None:
    assert adopted(configuration=configuration).settings.keys() == {"gpunodes_kubernetes_version", "gpunodes_network"}
