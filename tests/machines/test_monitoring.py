"""Prometheus in the cluster, and addresses for Services, on machines. Not run on machines yet."""

from __future__ import annotations

import ipaddress
import json

import yaml

from . import pods
from .conftest import Operator, search_for_secrets
from .optional_addons import IMAGE, LAB, READY, SERVES, comes, goes, installed, refusal, until

MACHINES = LAB.machines
TARGETS = {(job, node) for job in ("node-exporter", "kubelet", "cadvisor") for node in MACHINES} | {
    ("apiserver", "control-1"),
    ("kube-state-metrics", "cluster"),
    ("prometheus", "127.0.0.1:9090"),
}
"""Job and instance of all that Prometheus reads here."""
NODE_ADDRESS = "jsonpath={.status.addresses[?(@.type=='InternalIP')].address}"


def series(operator: Operator, expression: str) -> list[dict[str, str]]:
    """The labels of the series that a query gives. Prometheus listens in its pod only: promtool asks there."""
    query = ("promtool", "query", "--format=json", "instant", "http://127.0.0.1:9090", expression)
    answer = operator.kubectl("-n", "gpunodes-monitoring", "exec", "deployment/prometheus", "--", *query, code=None)
    return [each["metric"] for each in json.loads(answer or "[]") or ()]


def targets(operator: Operator, expression: str) -> set[tuple[str, str]]:
    """Job and instance of the series that a query gives."""
    return {(each["job"], each["instance"]) for each in series(operator, expression)}


def test_prometheus_reads_the_nodes_and_the_cluster(operator: Operator) -> None:
    comes(operator, "monitoring")
    until("all targets are up", lambda: targets(operator, "up == 1") == TARGETS)
    assert targets(operator, "up == 0") == set()
    assert {each["instance"] for each in series(operator, "node_memory_MemTotal_bytes")} == set(MACHINES)
    assert {each["node"] for each in series(operator, "kube_node_info")} == set(MACHINES)
    assert series(operator, 'container_memory_working_set_bytes{pod="etcd-control-1"}')


def test_of_all_pods_prometheus_alone_reads_the_exporters(operator: Operator) -> None:
    service = "http://kube-state-metrics.gpunodes-monitoring.svc.cluster.local:8080/metrics"
    read = ("exec", "client", "--", "wget", "-q", "-T", "5", "-O", "-", service)
    pods.start(operator, "client", IMAGE, "sleep 86400", {}, nodeName="worker-1")
    operator.kubectl("wait", "--for=condition=Ready", "pod/client", "--timeout=180s")
    assert "kube_node_info" in operator.kubectl(*read)
    operator.gpunodes("addon", "up", "network-policy")
    until("the policies are enforced", lambda: not operator.kubectl(*read, code=None))
    # Policies are about new connections: new pods have no others.
    for name in ("node-exporter", "kube-state-metrics"):
        operator.kubectl("delete", "pods", "--all-namespaces", "-l", f"app={name}", "--wait=true")
    since = operator.ssh("control-1", "date +%s").strip()
    until("Prometheus has read all", lambda: targets(operator, f"timestamp(up == 1) > {since}") == TARGETS)
    assert not operator.kubectl(*read, code=None)
    assert "network policies, which nothing would enforce then" in refusal(operator, "network-policy")
    goes(operator, "monitoring")
    goes(operator, "network-policy")
    operator.kubectl("delete", "pod", "client", "--grace-period=1")


def answered(operator: Operator, address: str) -> list[str]:
    """The machines that get the page of the server at an address."""
    read = f"curl -s --noproxy '*' -m 5 http://{address}:8080/"
    return [machine for machine, lines in operator.each(MACHINES, read, code=None).items() if lines == ["served"]]


def holders(operator: Operator, address: str) -> list[str]:
    """The machines with an address."""
    found = operator.each(MACHINES, f"ip -o -4 address show to {address}")
    return [machine for machine, lines in found.items() if lines]


def test_a_service_gets_an_address_for_which_one_node_answers(operator: Operator) -> None:
    own = operator.kubectl("get", "node", "control-1", "-o", NODE_ADDRESS).strip()
    subnet = ipaddress.ip_network(f"{own}/24", strict=False)
    first, second = str(subnet[200]), str(subnet[201])
    path = operator.folder / "inventory" / "host_vars" / "control-1.yml"
    settings = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**settings, "gpunodes_load_balancer_addresses": [f"{first}-{second}"]}))
    comes(operator, "load-balancer")
    pods.start(operator, "server", IMAGE, SERVES, READY, nodeName="worker-1")
    operator.kubectl("label", "pod", "server", "test=server")
    operator.kubectl("wait", "--for=condition=Ready", "pod/server", "--timeout=180s")
    operator.kubectl("expose", "pod", "server", "--type=LoadBalancer", "--port=8080")
    given = "jsonpath={.status.loadBalancer.ingress[0].ip}"
    until("the Service has its address", lambda: first == operator.kubectl("get", "svc", "server", "-o", given).strip())
    until("all machines reach it", lambda: set(MACHINES) == set(answered(operator, first)))
    [holder] = holders(operator, first)
    asked = f"kube-vip.io/loadbalancerIPs={subnet[254]}"
    operator.kubectl("annotate", "svc", "server", asked, "--overwrite", code=1)
    assert "there are Services of type LoadBalancer (server)" in refusal(operator, "load-balancer")
    another_holder(operator, first, holder)
    operator.kubectl("delete", "svc", "server")
    until("no machine has the address", lambda: not holders(operator, first))
    goes(operator, "load-balancer")
    operator.kubectl("delete", "pod", "server", "--grace-period=1")
    assert installed(operator) == set()


def another_holder(operator: Operator, address: str, holder: str) -> None:
    """Another node answers when the pod of the one that did has gone."""
    found = f"spec.nodeName={holder}"
    operator.kubectl("-n", "kube-vip", "delete", "pods", "-l", "app=kube-vip", "--field-selector", found)
    until("all machines reach it again", lambda: set(MACHINES) == set(answered(operator, address)))
    until("one machine has it", lambda: len(holders(operator, address)) == 1)
    operator.gpunodes("addon", "verify", "load-balancer")


def test_no_secret_leaks(operator: Operator) -> None:
    search_for_secrets(operator, MACHINES)
