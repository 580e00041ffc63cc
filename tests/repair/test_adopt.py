"""What `gpunodes adopt` reads of a real API server, whose objects are those of kubeadm and Calico."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from gpunodes.ansible.module_utils import kubeconfig
from gpunodes.ansible.module_utils.cluster import objects
from gpunodes.engine import control_planes
from gpunodes.engine.cluster.adopted import Adopted
from gpunodes.engine.cluster.connection import here
from gpunodes.errors import GpunodesError
from gpunodes.inventory import addressed
from gpunodes.model import Role
from gpunodes.operations import adopt
from gpunodes.planner import adoption
from gpunodes.planner.adoption import AdoptedNode

from . import apiserver, kwok
from .apiserver import ApiServer

MERGE = "application/merge-patch+json"
PLUGIN = "nvcr.io/nvidia/k8s-device-plugin:v0.17.0"
CONFIGURATION = """\
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: v1.36.3
controlPlaneEndpoint: 10.0.0.1:6443
networking: {dnsDomain: cluster.local, podSubnet: 192.168.0.0/16, serviceSubnet: 10.96.0.0/12}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with apiserver.running(tmp_path_factory.mktemp("cluster")) as made:
        for number, name in enumerate(("control-1", "gpu-1")):
            labels = {"node-role.kubernetes.io/control-plane": ""} if name == "control-1" else {}
            made.call("POST", "/api/v1/nodes", kwok.node(name, labels))
            status: dict[str, Any] = {
                "addresses": [{"type": "InternalIP", "address": f"10.0.0.{number + 1}"}],
                "nodeInfo": {"kubeletVersion": "v1.36.3", "containerRuntimeVersion": "containerd://2.1.4"},
            }
            made.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, MERGE)
        yield made


def test_kubeadm_s_cluster_is_read(server: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without kubeadm's ConfigMap it is refused."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    transport = here(sys.executable, server.kubeconfig)
    monkeypatch.setattr(control_planes, "over_ssh", lambda *_, **__: transport)
    first = addressed.inventory(["10.0.0.1"], {}, role=Role.CONTROL_PLANE)
    with pytest.raises(GpunodesError, match=r"no ConfigMap kubeadm-config .* help --page other-clusters"):
        adopt.read(first)
    about = {"name": "kubeadm-config", "namespace": "kube-system"}
    found = {"metadata": about, "data": {"ClusterConfiguration": CONFIGURATION}}
    server.call("POST", "/api/v1/namespaces/kube-system/configmaps", found)
    selected = {"k8s-app": "calico-node"}
    pods = {"metadata": {"labels": selected}, "spec": {"containers": [{"name": "x", "image": "calico/node:v3.30"}]}}
    daemons = {"metadata": {"name": "calico-node"}, "spec": {"selector": {"matchLabels": selected}, "template": pods}}
    server.call("POST", "/apis/apps/v1/namespaces/kube-system/daemonsets", daemons)
    read = adopt.read(first)
    assert list(read.nodes) == [
        AdoptedNode("control-1", "10.0.0.1", Role.CONTROL_PLANE),
        AdoptedNode("gpu-1", "10.0.0.2", Role.WORKER),
    ]
    assert read.settings == {
        "gpunodes_kubernetes_version": "1.36",
        "gpunodes_pod_subnet": "192.168.0.0/16",
        "gpunodes_service_subnet": "10.96.0.0/12",
        "gpunodes_control_plane_endpoint": "10.0.0.1:6443",
        "gpunodes_network": "none",
    }
    assert [each.found for each in read.rows if each.what == "network add-on"] == ["Calico"]
    gpus = [each.found for each in read.rows if each.what == "GPUs of pods"]
    assert gpus == ["control-1, gpu-1 offer them, by a program of no known name"]
    plugin = {"metadata": {"labels": selected}, "spec": {"containers": [{"name": "x", "image": PLUGIN}]}}
    theirs = {"metadata": {"name": "theirs"}, "spec": {"selector": {"matchLabels": selected}, "template": plugin}}
    server.call("POST", "/apis/apps/v1/namespaces/default/daemonsets", theirs)
    gpus = [each.found for each in adopt.read(first).rows if each.what == "GPUs of pods"]
    assert gpus == ["device plugin (default/theirs)"]


def test_a_cluster_of_gpunodes_whose_inventory_is_lost(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its network add-on is recognised as it is applied; pods of others with its label are not."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(kubeconfig, "ADMIN", str(server.kubeconfig))
    transport = here(sys.executable, server.kubeconfig)
    monkeypatch.setattr(control_planes, "over_ssh", lambda *_, **__: transport)

    def network() -> str:
        with control_planes.connected(addressed.inventory(["10.0.0.1"], {}, role=Role.CONTROL_PLANE), Adopted) as api:
            return adoption._network(api.read().daemon_sets)[1]

    labels = {"a": "b", "gpunodes.dev/network": "flannel"}
    pods = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "x", "image": "x"}]}}
    daemons = {"metadata": {"name": "x"}, "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": pods}}
    server.call("POST", "/apis/apps/v1/namespaces/default/daemonsets", daemons)
    assert network() == "none"
    template = (Path(__file__).parents[2] / "roles/network/templates/flannel.yml.j2").read_text()
    images = {"daemon": "registry.example/x:1", "plugin": "registry.example/y:1"}
    variables = {"network_images": images, "network_pod_subnet": "10.244.0.0/16", "network_endpoint": "10.0.0.1:6443"}
    made = Templar(DataLoader(), variables=variables).template(trust_as_template(template))
    objects.apply([each for each in yaml.safe_load_all(made) if each], check=False)
    assert network() == "flannel"
