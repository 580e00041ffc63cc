"""Preflight findings on machines that cannot become nodes: one named case for each check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from gpunodes.model import PreflightFinding, Role, Severity
from gpunodes.planner import reports
from gpunodes.planner.candidates import ClusterRequirements, MachineFacts
from gpunodes.planner.gpu import RequestedSoftware
from gpunodes.planner.membership import ETCD_IN_THE_WAY
from gpunodes.planner.preflight import CHECKS, judge

from tests.stand_ins import facts, listener

WANTS = ClusterRequirements(kubernetes="1.36")


def check(
    changes: Mapping[str, Any], role: Role = Role.WORKER, requirements: ClusterRequirements = WANTS
) -> list[PreflightFinding]:
    return judge([MachineFacts("worker-1", role, facts(**changes), read_at=1000.0)], requirements)


def test_a_good_machine_passes() -> None:
    assert check({}) == []


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("os", {"os": {"id": "debian", "version": "11", "codename": "bullseye", "name": "Debian 11"}}, "Debian 11"),
        ("os", {"os": {"id": "arch", "version": None, "codename": None, "name": "Arch Linux"}}, "Arch Linux"),
        ("arch", {"arch": "i686"}, "i686"),
        ("python", {"python": "3.6.8"}, "3.6.8"),
        ("cpus", {"cpus": 0}, "0 CPUs"),
        ("memory", {"memory_mib": 512}, "512 MiB"),
        ("disk", {"disks": [{"path": "/var/lib", "device": 1, "mount": "/", "free_mib": 100}]}, "100 MiB"),
        (
            "data_directory",
            {"data_directory": {"path": "/data", "problem": {"found": "no", "wanted": "a disk", "remedy": "mount it"}}},
            "no",
        ),
        ("time", {"clock": {"began": 1000.0, "synchronised": False, "services": [], "own": ""}}, "no time service"),
        ("cgroup", {"cgroup": 1}, "cgroup v1"),
        ("hostname", {"hostname": "localhost"}, "localhost"),
        ("hostname", {"hostname": "gpu_1"}, "gpu_1"),
        ("clock", {"time": 1500.0}, "500 s ahead"),
        ("clock", {"time": 400.0}, "600 s behind"),
        ("ports", {"sockets": [listener(10250, "nginx", "nginx.service")]}, "tcp 10250 is in use by nginx"),
        ("network", {"network": None}, "ip -json address"),
        ("modules", {"modules": {"overlay": "missing", "br_netfilter": "loaded"}}, "no module overlay"),
        (
            "sources",
            {"sources": [{"name": "kubernetes", "url": "http://m", "ok": False, "error": "no route"}]},
            "no route",
        ),
        ("address", {"default_address": None, "addresses": []}, "no IPv4 default route"),
        (
            "proxy",
            {"proxies": [{"url": "http://proxy:3128", "error": "timed out"}]},
            "http://proxy:3128 cannot be used",
        ),
        ("version", {"packages": {"kubelet": "1.34.2-1.1", "kubeadm": None}}, "kubelet 1.34.2"),
        (
            "gpu",
            {
                "gpu": {
                    "functions": [{"address": "3b:00.0", "vendor": "10de", "device": "102d", "class": "030200"}],
                    "headers": {"running": True, "package": None},
                }
            },
            "Kepler",
        ),
    ],
)
def test_each_check_finds_its_problem(name: str, changes: Mapping[str, Any], message: str) -> None:
    found = check(changes)
    assert [finding.check for finding in found] == [name]
    assert message in found[0].problem.found
    assert found[0].problem.wanted
    assert found[0].problem.remedy


def test_every_check_has_a_case() -> None:
    cases = next(mark for mark in test_each_check_finds_its_problem.pytestmark if mark.name == "parametrize").args[1]
    assert {check.name for check in CHECKS} - {case[0] for case in cases} == {
        *("swap", "cluster", "gates", "runtime"),
        *("ranges", "firewall"),  # in test_network_checks.py
        "endpoint",  # in test_endpoint.py
    }


def test_swap_is_a_warning() -> None:
    assert [finding.severity for finding in check({"swap": ["/dev/sda2"]})] == [Severity.WARNING]


def test_an_unknown_feature_gate_is_refused() -> None:
    requested = RequestedSoftware("", gates={"Accelerators": True, "ResourceHealthStatus": True})
    found = judge([MachineFacts("worker-1", Role.WORKER, facts(), requested=requested)], WANTS)
    assert [finding.check for finding in found] == ["gates"]
    assert "1.11" in found[0].problem.found


def test_nvidia_s_sources_matter_only_if_packages_come_from_them() -> None:
    unreachable = [{"name": "nvidia", "url": "http://m", "ok": False, "error": "no route"}]
    functions = [{"address": "3b:00.0", "vendor": "10de", "device": "2330", "class": "030200"}]
    gpu = {"functions": functions, "headers": {"running": True, "package": None}}
    assert [found.check for found in check({"gpu": gpu, "sources": unreachable})] == ["sources"]
    assert check({"sources": unreachable}) == []
    elsewhere = MachineFacts(
        "worker-1",
        Role.WORKER,
        facts(gpu=gpu, sources=unreachable),
        requested=RequestedSoftware("", source="distribution"),
    )
    assert judge([elsewhere], WANTS) == []


def test_a_node_keeps_the_runtime_with_which_it_joined() -> None:
    node = {"name": "worker-1", "machine_id": "0a", "product_uuid": "1a", "runtime": "containerd"}
    requirements = ClusterRequirements(kubernetes="1.36", nodes=[node])
    requesting = MachineFacts("worker-1", Role.WORKER, facts(), requested=RequestedSoftware("", runtime="docker"))
    assert [(finding.check, finding.problem.remedy) for finding in judge([requesting], requirements)] == [
        ("runtime", "run `gpunodes remove worker-1`, then join it again")
    ]
    assert judge([requesting], ClusterRequirements(kubernetes="1.36", nodes=[{**node, "runtime": "docker"}])) == []


def test_a_warning_of_a_plan_is_a_warning() -> None:
    functions = [{"address": "3b:00.0", "vendor": "10de", "device": "3500", "class": "030200"}]
    headers = {"running": True, "package": None}
    found = check({"gpu": {"functions": functions, "headers": headers}})
    assert [(finding.check, finding.severity) for finding in found] == [("gpu", Severity.WARNING)]


def test_an_old_kubernetes_accepts_cgroup_v1() -> None:
    assert check({"cgroup": 1}, requirements=ClusterRequirements(kubernetes="1.34")) == []


def test_a_control_plane_needs_more() -> None:
    taken = [listener(6443, "haproxy", "haproxy.service"), listener(2379, "etcd", "etcd.service")]
    found = check({"cpus": 1, "memory_mib": 1000, "sockets": taken}, Role.CONTROL_PLANE)
    assert [finding.check for finding in found] == ["cpus", "memory", "ports"]


def test_all_problems_of_all_machines_are_reported_at_once() -> None:
    found = judge(
        [
            MachineFacts("a", Role.WORKER, facts(cpus=0, arch="i686", hostname="a", machine_id="1", product_uuid="1")),
            MachineFacts("b", Role.WORKER, None, unreachable="SSH does not respond (timed out)"),
            MachineFacts("c", Role.WORKER, facts(cgroup=1, hostname="c", machine_id="3", product_uuid="3")),
        ],
        WANTS,
    )
    assert [(finding.machine, finding.check) for finding in found] == [
        ("a", "arch"),
        ("a", "cpus"),
        ("b", "reachable"),
        ("c", "cgroup"),
    ]


JOINED = {"role": "worker", "ca_hash": "sha256:aa", "server": "https://10.0.0.1:6443"}
CLUSTER = ClusterRequirements("1.36.3", "sha256:aa", [{"name": "worker-1", "machine_id": "0a", "product_uuid": "1a"}])


def test_a_node_of_this_cluster_passes_although_its_ports_and_its_name_are_in_use() -> None:
    own = [listener(10250, "kubelet", "kubelet.service"), listener(10256, "kube-proxy", "pods")]
    assert check({"kubernetes": JOINED, "sockets": own, "disks": []}, requirements=CLUSTER) == []


def test_a_node_of_another_cluster_is_refused() -> None:
    other = {**JOINED, "ca_hash": "sha256:bb", "server": "https://10.9.9.9:6443"}
    (finding,) = check({"kubernetes": other}, requirements=CLUSTER)
    assert "another cluster (https://10.9.9.9:6443)" in finding.problem.found


def test_a_control_plane_is_not_a_worker() -> None:
    assert [
        finding.check for finding in check({"kubernetes": {**JOINED, "role": "control_plane"}}, requirements=CLUSTER)
    ] == ["cluster"]


def test_a_users_own_etcd_is_in_the_way_of_a_control_plane() -> None:
    own = {"role": None, "ca_hash": None, "server": None, "foreign_etcd": True}
    assert reports.machine_problem(facts(kubernetes=own, gpu={"functions": []})) == ""
    found = [each.problem for each in check({"kubernetes": own}, Role.CONTROL_PLANE) if each.check == "cluster"]
    assert found == [ETCD_IN_THE_WAY]
    assert check({"kubernetes": own}) == []


def test_an_interrupted_join_is_the_same_machine() -> None:
    assert check({}, requirements=CLUSTER) == []


def test_another_machine_with_a_nodes_name_is_refused() -> None:
    found = check({"machine_id": "9", "product_uuid": "9"}, requirements=CLUSTER)
    assert [finding.check for finding in found] == ["hostname"]
    assert "node worker-1" in found[0].problem.found


def test_boards_with_a_placeholder_uuid_are_accepted() -> None:
    """Two boards with the vendor's default UUID can join one cluster; two machines with a copied UUID cannot."""

    def judged(uuid: str) -> list[str]:
        pair = [
            MachineFacts(name, Role.WORKER, facts(hostname=name, product_uuid=uuid, machine_id=name))
            for name in ("a", "b")
        ]
        return [finding.check for finding in judge(pair, WANTS)]

    assert judged("03000200-0400-0500-0006-000700080009") == []
    assert judged("FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF") == []
    assert judged("4c4c4544-0042-4810-8052-b2c04f595331") == ["product_uuid", "product_uuid"]


def test_copied_disks_are_found() -> None:
    twins = [
        MachineFacts(name, Role.WORKER, facts(hostname=name, product_uuid=name, machine_id="same"))
        for name in ("a", "b")
    ]
    assert [(finding.machine, finding.check) for finding in judge(twins, WANTS)] == [
        ("a", "machine_id"),
        ("b", "machine_id"),
    ]


KUBERNETES = {name: ["1.36.3-1.1", "1.36.1-1.1"] for name in ("kubeadm", "kubectl", "kubelet")}


def lines(role: Role = Role.WORKER, kubernetes: str = "1.36", containerd: str = "", **changes: Any) -> list[str]:
    candidate = MachineFacts("worker-1", role, facts(**changes), read_at=1000.0, containerd=containerd)
    found = judge([candidate], ClusterRequirements(kubernetes=kubernetes))
    assert {(each.check, each.severity) for each in found} <= {("sources", Severity.ERROR)}
    return [str(each.problem) for each in found]


@pytest.mark.parametrize(
    ("role", "missing"),
    [(Role.WORKER, "kubeadm and kubelet"), (Role.CONTROL_PLANE, "kubeadm and kubelet and kubectl")],
)
def test_an_exact_kubernetes_is_looked_for_in_its_source(role: Role, missing: str) -> None:
    [found] = lines(role, "1.36.99", versions={"kubernetes": KUBERNETES})
    assert found == (
        "its package source has no kubeadm 1.36.99; it offers 1.36.3-1.1, 1.36.1-1.1; "
        f"wanted: {missing} 1.36.99; request another version (gpunodes_kubernetes_version), or add it to the mirror"
    )
    assert lines(role, "1.36.3", versions={"kubernetes": KUBERNETES}) == []
    assert lines(role, "1.36", versions={"kubernetes": {}}) == [], "a minor is its newest patch"
    assert lines(role, "1.36.99") == [], "a source that was not read is another check's problem"
    [nothing] = lines(role, "1.36.3", versions={"kubernetes": {}})
    assert "it offers none" in nothing


def test_what_is_installed_needs_no_source() -> None:
    there = {"kubelet": "1.36.99-1.1", "kubeadm": "1.36.99-1.1", "containerd.io": "2.1.99-1"}
    listed = {"kubernetes": KUBERNETES, "docker": {"containerd.io": ["2.1.4-1~debian.13~trixie"]}}
    assert lines(Role.WORKER, "1.36.99", "2.1.99", packages=there, versions=listed) == []


@pytest.mark.parametrize(
    ("source", "package", "version"),
    [("docker", "containerd.io", "2.1.4-1~debian.13~trixie"), ("system", "containerd", "2.1.4~ds1-6+b4")],
)
@pytest.mark.parametrize(("requested", "good"), [("2.1.99", False), ("2.1.4", True), ("2.1", True), ("2.2", False)])
def test_a_version_of_containerd_is_looked_for_in_its_source(
    source: str, package: str, version: str, requested: str, good: bool
) -> None:
    found = lines(containerd=requested, versions={source: {package: [version]}})
    words = (
        f"its package source has no {package} {requested}; it offers {version}; wanted: {package} {requested}; "
        "request another version (gpunodes_containerd_version), or add it to the mirror"
    )
    assert found == ([] if good else [words])
    assert lines(versions={source: {package: [version]}}) == []


def test_sources_of_another_system_say_nothing_of_containerd() -> None:
    mint = {"id": "linuxmint", "version": "22", "codename": "wilma", "name": "Linux Mint 22", "like": "ubuntu debian"}
    mint["base"] = "noble"
    treated = RequestedSoftware("", unsupported_os=True)
    machine = facts(os=mint, versions={"system": {"containerd": ["1.7.24-1"]}})
    candidate = MachineFacts("w", Role.WORKER, machine, read_at=1000.0, requested=treated, containerd="2.1.4")
    assert not [each for each in judge([candidate], WANTS) if each.severity is Severity.ERROR]
