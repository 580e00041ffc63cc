"""What optional add-ons need of the cluster itself, whatever the settings say by now."""

from __future__ import annotations

from typing import Any

import pytest
from gpunodes.ansible.module_utils import kube_api
from gpunodes.ansible.module_utils.cluster import optional, optional_needs
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.planner import addons

METRICS, CILIUM = addons.chosen("metrics-server"), addons.chosen("cilium")
COMMAND = ["kube-apiserver", "--secure-port=6443"]
VERIFIES = [*COMMAND, "--kubelet-certificate-authority=/etc/kubernetes/pki/ca.crt"]


class Cluster:
    """The API of a cluster with these API servers and nodes."""

    def __init__(self, commands: list[list[str]], ready: dict[str, str]) -> None:
        self.pods = [{"spec": {"containers": [{"name": "kube-apiserver", "command": each}]}} for each in commands]
        self.nodes = [
            {"metadata": {"name": name}, "status": {"conditions": [{"type": "Ready", "status": status}]}}
            for name, status in ready.items()
        ]

    def get(self, path: str, **_: str) -> Any:
        return {"items": self.nodes if path == "/api/v1/nodes" else self.pods}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(commands: list[list[str]], ready: dict[str, str], installed: dict[str, str]) -> None:
        monkeypatch.setattr(kube_api, "admin", lambda: Cluster(commands, ready))
        monkeypatch.setattr(optional, "installed", lambda: installed)

    return make


def check(addon: addons.Addon) -> None:
    optional_needs.check(addon.name, addon.argument, is_network=addon.network)


def test_metrics_server_needs_a_cluster_that_was_made_with_serving_certificates(made: Any) -> None:
    made([VERIFIES, VERIFIES], {}, {})
    check(METRICS)
    made([], {}, {})
    check(METRICS)  # its API servers run elsewhere
    made([VERIFIES, COMMAND], {}, {})
    with pytest.raises(MachineProblem, match="without which this cluster was made; wanted: API servers with --kubelet"):
        check(METRICS)
    check(addons.chosen("local-path"))


def test_a_network_does_not_come_beside_another_one(made: Any) -> None:
    """Flannel's nodes would have two of them as soon as the inventory says `gpunodes_network: none`."""
    made([COMMAND], {"control-1": "False", "worker-1": "True"}, {})
    with pytest.raises(MachineProblem, match="a network of pods already: node worker-1 is ready without cilium"):
        check(CILIUM)
    made([COMMAND], {"control-1": "False", "worker-1": "Unknown"}, {})
    check(CILIUM)
    made([COMMAND], {"control-1": "True"}, {"cilium": "1.20.1"})
    check(CILIUM)  # another version of it


def test_a_network_is_not_taken_away_from_nodes() -> None:
    assert [each["list"] for each in CILIUM.uses] == ["/api/v1/nodes"]
