"""The settings of HTTP proxies: their forms, the hosts that are reached directly, and the desired state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from gpunodes import settings
from gpunodes.ansible.filter.general import proxies as proxies_filter
from gpunodes.ansible.filter.general import proxy_credentials
from gpunodes.errors import WrongInput
from gpunodes.model import Role
from gpunodes.planner import preflight, reports
from gpunodes.planner.candidates import ClusterRequirements, MachineFacts
from gpunodes.planner.desired import Desired, desired
from gpunodes.planner.proxies import credentials, proxies

from tests.stand_ins import facts, given, gpu_machine

URL = "http://builder:s%40fe!word@proxy.example:3128"
SECRET = "s%40fe!word"
HIDDEN = "http://{credentials}@proxy.example:3128"
OWN = ("localhost", "127.0.0.0/8", "::1", ".svc", ".cluster.local", "10.244.0.0/16", "10.96.0.0/12")


def of(**changes: Any) -> dict[str, Any]:
    return settings.resolve({f"gpunodes_{name}": value for name, value in changes.items()})


def exceptions(machines: list[str], **changes: Any) -> list[str]:
    found = proxies(of(http_proxy="http://proxy.example:3128", **changes), machines)
    assert found
    return [entry for entry in found.no_proxy if entry not in OWN]


def test_without_a_proxy_there_is_nothing() -> None:
    assert proxies(of(no_proxy=["a"]), ["m"]) is None
    assert proxies_filter(of(no_proxy=["a"]), ["m"]) == {}
    assert credentials(of()) == {}


def test_https_uses_the_proxy_for_http_unless_it_has_one() -> None:
    both = proxies(of(http_proxy="http://a:1"), [])
    other = proxies(of(http_proxy="http://a:1", https_proxy="http://b:2"), [])
    only = proxies(of(https_proxy="http://b:2"), [])
    assert both
    assert other
    assert only
    assert [(each.http, each.https) for each in (both, other, only)] == [
        ("http://a:1", "http://a:1"),
        ("http://a:1", "http://b:2"),
        ("", "http://b:2"),
    ]


def test_credentials_are_kept_apart() -> None:
    found = proxies_filter(of(http_proxy=URL, https_proxy="http://open.example:1"), [])
    assert (found["http"], found["https"]) == (HIDDEN, "http://open.example:1")
    assert proxy_credentials(of(http_proxy=URL, https_proxy="http://open.example:1")) == {"http": f"builder:{SECRET}"}
    assert proxy_credentials(of(http_proxy=URL)) == dict.fromkeys(("http", "https"), f"builder:{SECRET}")


def test_the_cluster_is_excepted() -> None:
    assert exceptions(["worker-1", "10.0.0.7", "Worker-1", "", "gpu.example"]) == [
        "worker-1",
        "10.0.0.7",
        "gpu.example",
    ]
    found = proxies(of(http_proxy=URL, pod_subnet="10.1.0.0/16,fd00::/56"), [])
    assert found
    assert {"10.1.0.0/16", "fd00::/56", "10.96.0.0/12"} <= set(found.no_proxy)


@pytest.mark.parametrize("given_list", [["10.0.0.0/8", ".example"], "10.0.0.0/8, .example"])
def test_a_new_machine_in_an_excepted_network_changes_nothing(given_list: Any) -> None:
    """Otherwise the runtimes of all machines would restart."""
    before = exceptions(["10.0.0.1", "gpu-1.example"], no_proxy=given_list)
    assert before == ["10.0.0.0/8", ".example"]
    assert exceptions(["10.0.0.1", "gpu-1.example", "10.0.0.2", "gpu-2.example"], no_proxy=given_list) == before


@pytest.mark.parametrize("name", ["{{ lookup('pipe', 'id') }}", 'a"b', "a\nHTTP_PROXY=x", "a b", "a,b", "*"])
def test_a_name_of_another_form_is_no_exception(name: str) -> None:
    """Names of machines in an inventory that a plugin lists."""
    assert exceptions([name]) == []


WRONG_URLS = (
    "proxy.example:3128",
    "https://proxy.example:3128",
    "socks5://proxy.example:1080",
    "http://proxy.example",
    f"http://user:{SECRET}@x@proxy.example:3128",
    f"http://{SECRET}@proxy.example:3128",
    f'http://user:{SECRET}"@proxy.example:3128',
    f"http://user:{SECRET}$x@proxy.example:3128",
    f"http://user:{SECRET}/x@proxy.example:3128",
    f"http://user:{SECRET}@proxy.example:3128/path",
    f"http://user:{SECRET}@proxy.example:3128\nx",
)


@pytest.mark.parametrize("url", WRONG_URLS)
def test_a_wrong_url_is_refused_without_its_password(url: str) -> None:
    for key in ("http_proxy", "https_proxy"):
        found = list(settings.problems({f"gpunodes_{key}": url}))
        assert [problem.found for problem in found] == ["cannot be used"]
        with pytest.raises(WrongInput) as error:
            settings.report_all(Path("hosts.yml"), {"worker-1": found})
        with pytest.raises(AnsibleFilterError, match="cannot be used") as plain:
            proxies_filter(of(**{key: url}), [])
        assert SECRET not in f"{error.value}{plain.value}"


@pytest.mark.parametrize("url", [URL, "http://10.0.0.1:3128/", "http://[fd00::1]:3128", "{{ vault_proxy }}", ""])
def test_a_right_url_is_accepted(url: str) -> None:
    assert list(settings.problems({"gpunodes_http_proxy": url})) == []


@pytest.mark.parametrize(
    "entries", [["a.example", ".b", "10.0.0.0/8", "fd00::/8", "::1"], "a.example,10.0.0.1", "", []]
)
def test_right_exceptions_are_accepted(entries: Any) -> None:
    assert list(settings.problems({"gpunodes_no_proxy": entries})) == []


@pytest.mark.parametrize("entry", ["*", "*.example", "a:8080", "10.0.0.0/99", "http://a", 'a"', "a;b", "a\nb"])
def test_exceptions_that_not_all_programs_understand_are_refused(entry: str) -> None:
    found = list(settings.problems({"gpunodes_no_proxy": ["ok.example", entry]}))
    assert [problem.key for problem in found] == ["gpunodes_no_proxy"]
    with pytest.raises(WrongInput, match="gpunodes_no_proxy"):
        proxies(of(http_proxy=URL, no_proxy=["ok.example", entry]), [])


# The desired state


def state(more: Mapping[str, Any], **proxy_settings: Any) -> Desired:
    made = desired(given(proxies=proxies_filter(of(**proxy_settings), []), **more))
    assert isinstance(made, Desired), made
    return made


def test_every_role_gets_the_proxies_and_no_role_the_password() -> None:
    made = state({"endpoint": "api.corp:6443"}, http_proxy=URL)
    for spec in made.wanted.values():
        assert spec.proxies
        assert spec.proxies.https == HIDDEN
        assert "api.corp" in spec.proxies.no_proxy
    assert SECRET not in repr(made)
    assert all(spec.proxies is None for spec in state({}).wanted.values())


@pytest.mark.parametrize(
    ("endpoint", "entry"), [("10.9.9.9:6443", "10.9.9.9"), ("[fd00::9]:6443", "fd00::9"), ("api", "api"), ("", None)]
)
def test_the_api_server_is_excepted(endpoint: str, entry: str | None) -> None:
    spec = state({"endpoint": endpoint}, http_proxy=URL).wanted["kubernetes"]
    assert spec.proxies
    assert (entry in spec.proxies.no_proxy) is (entry is not None)


def test_the_machine_itself_is_excepted() -> None:
    """kubeadm points the kubelet of a control plane at its own API server."""
    found = gpu_machine()
    found |= {"default_address": "192.0.2.7", "kubernetes": {**found["kubernetes"], "server": "https://192.0.2.8:6443"}}
    spec = state({"found": found}, http_proxy=URL).wanted["kubernetes"]
    assert spec.proxies
    assert {"192.0.2.7", "192.0.2.8"} <= set(spec.proxies.no_proxy)


@pytest.mark.parametrize(
    "server", ["https://0.0.0.0/0", "https://[::/0]:1", "x", "https://[bad", "https://a,b:1", None]
)
def test_a_machine_excepts_no_network(server: str | None) -> None:
    found = gpu_machine()
    found |= {"default_address": "0.0.0.0/0", "kubernetes": {**found["kubernetes"], "server": server}}
    spec = state({"found": found}, http_proxy=URL).wanted["kubernetes"]
    assert spec.proxies
    assert {entry for entry in spec.proxies.no_proxy if "/" in entry} == {entry for entry in OWN if "/" in entry}


def test_a_list_that_no_variable_can_hold_is_refused() -> None:
    with pytest.raises(AnsibleFilterError, match="name the machines' networks"):
        proxies_filter(of(http_proxy=URL), [f"machine-{number}.a-long-domain.example" for number in range(5000)])


def test_services_that_make_requests_are_proxied() -> None:
    wanted = state({"gpunodes_runtime": "docker"}).wanted
    assert {service.name: service.proxied for spec in wanted.values() for service in spec.services} == {
        "containerd": True,
        "docker": True,
        "kubelet": True,
        # It only calls Docker, over a socket.
        "cri-docker": False,
    }


# Preflight


def test_a_proxy_that_does_not_work_is_one_error() -> None:
    broken = [{"url": "http://proxy.example:3128", "error": "Connection refused"}]
    findings = preflight.judge(
        [MachineFacts("worker-1", Role.WORKER, facts(proxies=broken, sources=[]), read_at=1000.0)],
        ClusterRequirements(kubernetes="1.36"),
    )
    assert [finding.check for finding in findings] == ["proxy"]
    assert str(findings[0]).startswith(
        "worker-1: proxy: the proxy http://proxy.example:3128 cannot be used: Connection refused; wanted: "
    )


@pytest.mark.parametrize("reported", ["x", [{"url": "x"}], [{"url": "x", "error": 1}], [{"url": "", "error": ""}] * 3])
def test_a_report_of_another_shape_is_refused(reported: Any) -> None:
    assert "proxies" in reports.machine_problem(facts(proxies=reported, gpu={"functions": []}))
    assert reports.machine_problem(json.loads(json.dumps(facts(proxies=[], gpu={"functions": []})))) == ""
