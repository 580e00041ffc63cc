"""The Gateway API with a real API server: its kinds come as a manifest, check the example, and stay while it is there.

Envoy Gateway itself does not run: its manifest and images cannot be fetched here.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml
from gpunodes.ansible.module_utils import kubeconfig
from gpunodes.ansible.module_utils.cluster import optional
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.errors import GpunodesError
from gpunodes.lab.mirror import gobuild, pins
from gpunodes.lab.mirror.programs import run
from gpunodes.planner import addons

from tests.repair import apiserver
from tests.repair.apiserver import ApiServer

MODULE = "sigs.k8s.io/gateway-api@v1.6.1"
"""What the go.mod of Envoy Gateway v1.9.0 requires."""
EXAMPLE = Path(__file__).parents[2] / "examples" / "serving" / "gateway.yml"
GROUP = "/apis/gateway.networking.k8s.io/v1"
PATHS = {
    "GatewayClass": f"{GROUP}/gatewayclasses",
    "Gateway": f"{GROUP}/namespaces/default/gateways",
    "HTTPRoute": f"{GROUP}/namespaces/default/httproutes",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with apiserver.running(tmp_path_factory.mktemp("gateway")) as made:
        yield made


@pytest.fixture(autouse=True)
def admin(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeconfig, "ADMIN", str(server.kubeconfig))


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The objects that the Gateway API consists of, from its Go module."""
    go = gobuild.toolchain(apiserver.cache(), pins.load(), print)
    try:
        # In a folder without a go.mod; a module that is in the cache is not downloaded again.
        about = run([go, "mod", "download", "-json", MODULE], cwd=tmp_path_factory.mktemp("go"))
    except GpunodesError as error:
        pytest.skip(f"{MODULE} is not available: {error}")
    files = sorted(Path(json.loads(about)["Dir"], "config", "crd", "standard").glob("*.yaml"))
    return [each for path in files for each in yaml.load_all(path.read_text(), yaml.CSafeLoader) if each]


@pytest.fixture(scope="module")
def example() -> dict[str, dict[str, Any]]:
    """The objects of the example, by kind, without Envoy Gateway's own."""
    found = {each["kind"]: each for each in yaml.safe_load_all(EXAMPLE.read_text()) if each}
    del found["EnvoyProxy"]
    return found


def up(kinds: list[dict[str, Any]], *, check: bool = False) -> list[str]:
    return optional.up(kinds, "gateway", addons.chosen("gateway").version, check)[0]


def refusal(server: ApiServer, given: dict[str, Any]) -> str:
    """Why the API server does not accept an object, "" if it does; unknown fields are refused."""
    try:
        server.call("POST", f"{PATHS[given['kind']]}?dryRun=All&fieldValidation=Strict", given)
    except HTTPError as error:
        return error.read().decode()
    return ""


def test_the_kinds_come_by_the_manifest_and_are_found_unchanged(kinds: list[dict[str, Any]]) -> None:
    titles = {f"{each['kind']} {each['metadata']['name']}" for each in kinds}
    assert len(titles) > 10
    assert set(up(kinds, check=True)) == titles
    assert set(up(kinds)) == titles
    assert up(kinds) == []
    assert optional.installed()["gateway"] == addons.chosen("gateway").version


def test_the_example_is_accepted(server: ApiServer, example: dict[str, dict[str, Any]]) -> None:
    assert example.keys() == PATHS.keys()
    assert [refusal(server, each) for each in example.values()] == ["", "", ""]


def changed(given: dict[str, Any], change: Callable[[Any], object]) -> dict[str, Any]:
    made = copy.deepcopy(given)
    change(made["spec"])
    return made


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("Gateway", lambda spec: spec["listeners"][0].update(tls={}), "tls must not be specified for protocols"),
        ("Gateway", lambda spec: spec["listeners"].append(spec["listeners"][0]), "Duplicate value"),
        ("Gateway", lambda spec: spec["listeners"][0].update(hostname="1.2.3.4:80"), "hostname"),
        ("Gateway", lambda spec: spec.update(listner=[]), "unknown field"),
        ("HTTPRoute", lambda spec: spec["rules"][0]["matches"][0]["path"].update(value="predict"), "absolute path"),
        ("HTTPRoute", lambda spec: spec["rules"][0]["backendRefs"][0].pop("port"), "Must have port for Service"),
    ],
)
def test_a_mistake_in_it_is_refused(
    server: ApiServer,
    example: dict[str, dict[str, Any]],
    kind: str,
    change: Callable[[Any], object],
    reason: str,
) -> None:
    assert reason in refusal(server, changed(example[kind], change))


def test_the_kinds_stay_while_there_are_objects_of_them(server: ApiServer, example: dict[str, dict[str, Any]]) -> None:
    for each in example.values():
        server.call("POST", PATHS[each["kind"]], each)
    with pytest.raises(MachineProblem, match=r"in use: there are objects of the kind GatewayClass \(envoy\)"):
        optional.down("gateway", (), False)
    for each in example.values():
        server.call("DELETE", f"{PATHS[each['kind']]}/{each['metadata']['name']}")
    assert "CustomResourceDefinition gateways.gateway.networking.k8s.io" in optional.down("gateway", (), False)[0]
    assert "gateway" not in optional.installed()
