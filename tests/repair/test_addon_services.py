"""Which Services kube-vip's accounts may change, and how, with a real API server: the token of one is on every node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gpunodes.planner import addons

from tests.repair.addon_accounts import MERGE, OWNER, STRATEGIC, Account, account, cluster, field, put
from tests.repair.apiserver import ApiServer

SERVICES = "/api/v1/namespaces/default/services"
ASKED, HOST = "kube-vip.io/loadbalancerIPs", "kube-vip.io/vipHost"
CLEANUP = "service.kubernetes.io/load-balancer-cleanup"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with cluster(tmp_path_factory.mktemp("cluster"), "load-balancer") as made:
        yield made


@pytest.fixture(scope="module")
def vip(server: ApiServer) -> Account:
    """kube-vip, whose token is on every node."""
    found = account(server, "kube-vip", "kube-vip")
    server.call("POST", SERVICES, service("probe"))
    wrong = server.call("GET", f"{SERVICES}/probe")
    wrong["spec"]["selector"] = {"app": "evil"}
    found.until_refused("gpunodes-load-balancer-accounts", "PUT", f"{SERVICES}/probe?dryRun=All", wrong)
    return found


@pytest.fixture(scope="module")
def provider(server: ApiServer, vip: Account) -> Account:
    """The cloud provider, which gives addresses; the policy is that of ``vip``."""
    assert vip
    return account(server, "kube-vip", "kube-vip-cloud-provider")


def service(name: str, **spec: Any) -> dict[str, Any]:
    wanted = {"type": "LoadBalancer", "selector": {"app": name}, "ports": [{"port": 80}], **spec}
    return {"metadata": {"name": name, "labels": {"team": "a"}, "annotations": {"a": "b"}}, "spec": wanted}


def gives(address: str) -> Callable[[Any], None]:
    """What the cloud provider writes into a Service without an address."""

    def change(found: Any) -> None:
        found["metadata"]["labels"]["implementation"] = "kube-vip"
        found["metadata"]["annotations"][ASKED] = address
        found["spec"]["loadBalancerIP"] = address

    return change


def reports(*addresses: str, **more: str) -> Callable[[Any], None]:
    """What kube-vip writes into the status of a Service for whose addresses its node answers."""

    def change(found: Any) -> None:
        ports = [{"port": 80, "protocol": "TCP"}]
        found["status"]["loadBalancer"] = {"ingress": [{"ip": each, "ports": ports, **more} for each in addresses]}

    return change


def annotates(key: str, value: str) -> Callable[[Any], None]:
    return lambda found: found["metadata"]["annotations"].update({key: value})


def test_kube_vip_and_its_cloud_provider_do_their_work(server: ApiServer, vip: Account, provider: Account) -> None:
    server.call("POST", SERVICES, service("web"))
    web = f"{SERVICES}/web"
    # The finalizer is patched with the status (k8s.io/cloud-provider, service/helpers).
    added = {"metadata": {"finalizers": [CLEANUP]}}
    assert not provider.refusal("PATCH", f"{web}/status", added, STRATEGIC)
    assert not put(provider, web, gives("10.0.0.201"))
    assert not put(vip, web, annotates(HOST, "w1"))
    assert not put(vip, web, reports("10.0.0.201"), "/status")
    # Another node takes over.
    assert not put(vip, web, annotates(HOST, "w2"))
    assert not put(vip, web, reports("10.0.0.201"), "/status")
    found = server.call("GET", web)
    assert found["status"]["loadBalancer"]["ingress"][0]["ip"] == "10.0.0.201"
    assert (found["metadata"]["annotations"][HOST], found["metadata"]["finalizers"]) == ("w2", [CLEANUP])
    removed = {"metadata": {"$deleteFromPrimitiveList/finalizers": [CLEANUP]}, "status": {"loadBalancer": None}}
    assert not provider.refusal("PATCH", f"{web}/status", removed, STRATEGIC)
    assert server.call("GET", web)["status"] == {"loadBalancer": {}}
    server.call("DELETE", web)


def test_a_service_that_named_its_address_keeps_it(server: ApiServer, vip: Account, provider: Account) -> None:
    named = service("named")
    named["metadata"]["annotations"][ASKED] = "10.0.0.202"
    server.call("POST", SERVICES, named)
    labels = {"metadata": {"labels": {"implementation": "kube-vip"}}}
    path = f"{SERVICES}/named"
    assert not provider.refusal("PATCH", path, labels, MERGE)
    assert not put(vip, path, reports("10.0.0.202"), "/status")
    assert "a Service without an address gets one" in put(provider, path, annotates(ASKED, "10.0.0.203"))
    server.call("POST", SERVICES, service("legacy", loadBalancerIP="10.0.0.203"))
    assert not put(provider, f"{SERVICES}/legacy", annotates(ASKED, "10.0.0.203"))
    for name in ("named", "legacy"):
        server.call("DELETE", f"{SERVICES}/{name}")


def test_addresses_of_an_earlier_setting_are_still_reported(server: ApiServer, vip: Account) -> None:
    """Another node takes over, and the Service has another port."""
    server.call("POST", SERVICES, service("old"))
    path = f"{SERVICES}/old"
    status = {"status": {"loadBalancer": {"ingress": [{"ip": "10.0.9.9"}]}}}
    server.call("PATCH", f"{path}/status", status, MERGE)
    assert not put(vip, path, annotates(HOST, "w2"))
    assert not put(vip, path, reports("10.0.9.9"), "/status")
    server.call("DELETE", path)


FOR_BOTH = {
    "another selector": field("spec", "selector", to={"app": "others"}),
    "no selector": lambda found: found["spec"].pop("selector"),
    "another port": field("spec", "ports", to=[{"port": 443, "targetPort": 8443}]),
    "externalIPs": field("spec", "externalIPs", to=["10.0.0.1"]),
    "externalIPs of the setting": field("spec", "externalIPs", to=["10.0.0.200"]),
    "another type": field("spec", "type", to="NodePort"),
    "another policy": field("spec", "externalTrafficPolicy", to="Local"),
    "a label": field("metadata", "labels", "service.kubernetes.io/service-proxy-name", to="x"),
    "no label": field("metadata", "labels", to={}),
    "an annotation": annotates("kube-vip.io/egress", "true"),
    "no annotation": field("metadata", "annotations", to={}),
    "an owner": field("metadata", "ownerReferences", to=OWNER),
    "a finalizer": lambda found: found["metadata"]["finalizers"].append("example.org/x"),
}
HIJACKS = {
    "the API's address": reports("10.96.0.1"),
    "the gateway's": reports("10.0.0.1"),
    "beside its own": reports("10.0.0.200", "10.0.0.1"),
    "that of another Service": reports("10.0.0.210"),
    "no address": field("status", "loadBalancer", to={"ingress": [{"hostname": "x.example"}]}),
    "a name": reports("10.0.0.200", hostname="x.example"),
}


@pytest.fixture(scope="module")
def hostile(server: ApiServer, vip: Account) -> str:
    """A Service whose pods are on the node of the thief, and which has an address."""
    assert vip
    found = service("evil")
    found["metadata"]["annotations"][ASKED] = "10.0.0.200"
    server.call("POST", SERVICES, found)
    return f"{SERVICES}/evil"


@pytest.mark.parametrize("what", FOR_BOTH)
def test_what_a_service_leads_to_stays(hostile: str, vip: Account, provider: Account, what: str) -> None:
    for who in (vip, provider):
        for sub in ("", "/status"):
            refused = put(who, hostile, FOR_BOTH[what], sub)
            # The API itself keeps the specification in a request for the status.
            kept = not refused and sub and who.server.call("GET", hostile)["spec"]["selector"] == {"app": "evil"}
            assert "ValidatingAdmissionPolicy 'gpunodes-load-balancer-accounts'" in refused or kept
    assert "externalIPs" not in vip.server.call("GET", hostile)["spec"]


@pytest.mark.parametrize("what", HIJACKS)
def test_an_address_of_others_is_not_reported(hostile: str, vip: Account, provider: Account, what: str) -> None:
    for who in (vip, provider):
        refused = put(who, hostile, HIJACKS[what], "/status")
        assert "the address that is reported is none that this Service asks for" in refused


def test_nobody_gives_an_address_of_others(server: ApiServer, hostile: str, vip: Account, provider: Account) -> None:
    server.call("POST", SERVICES, service("new"))
    new = f"{SERVICES}/new"
    for address in ("10.0.0.1", "10.0.0.200,10.0.0.1", "gateway.example", "10.0.0.204", ""):
        assert put(provider, new, gives(address)) or not address
    assert "a Service without an address gets one" in put(provider, hostile, gives("10.0.0.201"))
    assert "kube-vip does not change this annotation" in put(vip, new, annotates(ASKED, "10.0.0.201"))
    assert "kube-vip does not change what" in put(vip, new, field("spec", "loadBalancerIP", to="10.0.0.201"))
    assert "kube-vip does not change this annotation" in put(vip, new, annotates(ASKED, "10.0.0.201"), "/status")
    for who in (vip, provider):
        assert "forbidden" in who.refusal("POST", SERVICES, service("made", externalIPs=["10.0.0.1"]))
        assert "forbidden" in who.refusal("DELETE", new)
    server.call("DELETE", new)


def test_the_programs_are_those_that_were_read() -> None:
    """The policy allows what these versions write: read the source of others before they are used."""
    images = addons.chosen("load-balancer").images
    assert images["balancer"].endswith(":v1.0.0")
    assert images["addresses"].endswith(":v0.0.12")
