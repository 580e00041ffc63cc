"""What flannel's account may change of nodes, with a real API server: its token is on every node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from gpunodes.ansible.module_utils.cluster import objects

from tests.repair.addon_accounts import MERGE, OWNER, STRATEGIC, Account, cluster, field
from tests.repair.apiserver import ApiServer

SPACE = "/api/v1/namespaces/kube-flannel"
OWN, OTHER = "/api/v1/nodes/w1", "/api/v1/nodes/w2"
KEYS = ("public-ip", "backend-data", "backend-type", "kube-subnet-manager")
READY = {"type": "Ready", "status": "True", "reason": "x", "message": ""}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    template = (Path(__file__).parents[2] / "roles/network/templates/flannel.yml.j2").read_text()
    images = {"daemon": "registry.example/x:1", "plugin": "registry.example/y:1"}
    variables = {"network_images": images, "network_pod_subnet": "10.244.0.0/16", "network_endpoint": "10.0.0.1:6443"}
    rendered = Templar(DataLoader(), variables=variables).template(trust_as_template(template))
    wanted = [each for each in yaml.safe_load_all(rendered) if each]
    with cluster(tmp_path_factory.mktemp("cluster")) as made:
        assert objects.apply(wanted, check=False)[0]
        assert objects.apply(wanted, check=False)[0] == []
        for name in ("w1", "w2"):
            node = {"metadata": {"name": name, "labels": {"gpunodes.dev/pool": "a"}, "annotations": {"a": "b"}}}
            made.call("POST", "/api/v1/nodes", node)
            status = {"conditions": [READY], "addresses": [{"type": "InternalIP", "address": "10.0.0.7"}]}
            made.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, MERGE)
        yield made


@pytest.fixture(scope="module")
def flannel(server: ApiServer) -> Account:
    """The token of the pod on w1, as its kubelet gets it."""
    spec = {"nodeName": "w1", "serviceAccountName": "flannel", "containers": [{"name": "x", "image": "x"}]}
    pod = server.call("POST", f"{SPACE}/pods", {"metadata": {"name": "flannel-1"}, "spec": spec})["metadata"]
    bound = {"apiVersion": "v1", "kind": "Pod", "name": pod["name"], "uid": pod["uid"]}
    asked = {"spec": {"boundObjectRef": bound}}
    made = Account(server, str(server.call("POST", f"{SPACE}/serviceaccounts/flannel/token", asked)["status"]["token"]))
    labels = {"metadata": {"labels": {"x": "y"}}}
    made.until_refused("gpunodes-flannel", "PATCH", f"{OWN}/status?dryRun=All", labels, STRATEGIC)
    return made


def annotated(**values: str | None) -> dict[str, Any]:
    """What flannel patches (AcquireLease)."""
    return {"metadata": {"annotations": {f"flannel.alpha.coreos.com/{key}": value for key, value in values.items()}}}


def test_flannel_does_its_work_on_its_own_node(server: ApiServer, flannel: Account) -> None:
    for value in ("1", "2"):
        assert not flannel.refusal("PATCH", f"{OWN}/status", annotated(**dict.fromkeys(KEYS, value)), STRATEGIC)
    condition = {"type": "NetworkUnavailable", "status": "False", "reason": "FlannelIsUp", "message": "x"}
    condition |= {"lastTransitionTime": "2026-01-01T00:00:00Z", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}
    for status in ("True", "False"):
        patch = {"status": {"conditions": [condition | {"status": status}]}}
        assert not flannel.refusal("PATCH", f"{OWN}/status", patch, STRATEGIC)
    assert not flannel.refusal("PATCH", f"{OWN}/status", annotated(**{"public-ip": None}), STRATEGIC)
    assert len(server.call("GET", OWN)["status"]["conditions"]) == 2


CONTROL_PLANE = "node-role.kubernetes.io/control-plane"
THEFTS: dict[str, Callable[[Any], None]] = {
    "a control plane": field("metadata", "labels", to={CONTROL_PLANE: ""}),
    "another pool": field("metadata", "labels", to={"gpunodes.dev/pool": "b"}),
    "no pool": field("metadata", "labels", to={"gpunodes.dev/pool": None}),
    "a note of gpunodes": field("metadata", "annotations", to={"gpunodes.dev/x": "y"}),
    "an owner": field("metadata", "ownerReferences", to=OWNER),
    "a finalizer": field("metadata", "finalizers", to=["example.org/x"]),
    "an address": field("status", "addresses", to=[{"type": "InternalIP", "address": "10.0.0.1"}]),
    "GPUs": field("status", "capacity", to={"nvidia.com/gpu": "8"}),
    "not ready": field("status", "conditions", to=[READY | {"status": "False"}]),
}


@pytest.mark.parametrize("what", THEFTS)
def test_its_token_changes_nothing_else(flannel: Account, what: str) -> None:
    patch: dict[str, Any] = {}
    THEFTS[what](patch)
    refused = flannel.refusal("PATCH", f"{OWN}/status", patch, STRATEGIC)
    assert "ValidatingAdmissionPolicy 'gpunodes-flannel'" in refused


def test_its_token_changes_no_other_node(flannel: Account) -> None:
    """Traffic to that node's pods would go where its annotations say."""
    refused = flannel.refusal("PATCH", f"{OTHER}/status", annotated(**{"public-ip": "10.0.0.66"}), STRATEGIC)
    assert "flannel changes its own node only" in refused
