"""The example with Envoy Gateway fits what the add-on load-balancer does."""

from __future__ import annotations

from pathlib import Path

import yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "serving" / "gateway.yml"


def test_any_node_may_answer_for_its_address() -> None:
    """kube-vip chooses one node for all addresses, whether or not it runs a pod of the Service."""
    found = {each["kind"]: each for each in yaml.safe_load_all(EXAMPLE.read_text()) if each}
    proxy = found["EnvoyProxy"]
    assert proxy["spec"]["provider"]["kubernetes"]["envoyService"] == {"externalTrafficPolicy": "Cluster"}
    wanted = {"group": "gateway.envoyproxy.io", "kind": "EnvoyProxy", "name": proxy["metadata"]["name"]}
    assert found["Gateway"]["spec"]["infrastructure"]["parametersRef"] == wanted
