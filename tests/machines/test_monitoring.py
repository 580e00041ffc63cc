"""Prometheus in the cluster, on machines: what it reads, and who else may. Not run on machines yet.

The mirror has the images of the add-on, and of the one that enforces its network policies.
"""

from __future__ import annotations

import functools
import json

from . import optional_addons, pods
from .conftest import Operator, search_for_secrets
from .optional_addons import IMAGE, comes, goes, installed, refusal, until

LAB = optional_addons.lab("addons", "monitoring")
MACHINES = LAB.machines
TARGETS = {(job, node) for job in ("node-exporter", "kubelet", "cadvisor") for node in MACHINES} | {
    ("apiserver", "control-1"),
    ("kube-state-metrics", "cluster"),
    ("prometheus", "127.0.0.1:9090"),
}
"""Job and instance of all that Prometheus reads here."""
# A slow API server logs the names of events, POD.TIME. With six letters before the point that looks like a token.
READER = "curious"


def series(operator: Operator, expression: str) -> list[dict[str, str]]:
    """The labels of the series that a query gives. Prometheus listens in its pod only: promtool asks there."""
    query = ("/bin/promtool", "query", "--format=json", "instant", "http://127.0.0.1:9090", expression)
    answer = operator.kubectl("-n", "gpunodes-monitoring", "exec", "deployment/prometheus", "--", *query, code=None)
    return [each["metric"] for each in json.loads(answer or "[]") or ()]


def targets(operator: Operator, expression: str) -> set[tuple[str, str]]:
    """Job and instance of the series that a query gives."""
    return {(each["job"], each["instance"]) for each in series(operator, expression)}


def names_all(operator: Operator, metric: str, label: str) -> bool:
    """Whether a metric names all machines in a label."""
    return {each[label] for each in series(operator, metric)} == set(MACHINES)


def test_prometheus_reads_the_nodes_and_the_cluster(operator: Operator) -> None:
    comes(operator, "monitoring")
    until("all targets are up", lambda: targets(operator, "up == 1") == TARGETS)
    for metric, label in (("node_memory_MemTotal_bytes", "instance"), ("kube_node_info", "node")):
        until(f"{metric} is there", functools.partial(names_all, operator, metric, label))
    used = 'container_memory_working_set_bytes{pod="etcd-control-1"}'
    until("the usage of a pod is there", lambda: series(operator, used))


def test_of_all_pods_prometheus_alone_reads_the_exporters(operator: Operator) -> None:
    service = "http://kube-state-metrics.gpunodes-monitoring.svc.cluster.local:8080/metrics"
    read = ("exec", READER, "--", "wget", "-q", "-T", "20", "-O", "-", service)
    pods.start(operator, READER, IMAGE, "sleep 86400", {}, nodeName="worker-1")
    operator.kubectl("wait", "--for=condition=Ready", f"pod/{READER}", "--timeout=180s")
    until("everybody reads it", lambda: "kube_node_info" in operator.kubectl(*read, code=None))
    operator.gpunodes("addon", "up", "network-policy")
    until("the policies are enforced", lambda: not operator.kubectl(*read, code=None))
    # Policies are about new connections: new pods have no others.
    for name in ("node-exporter", "kube-state-metrics"):
        operator.kubectl("delete", "pods", "--all-namespaces", "-l", f"app={name}", "--wait=true")
    since = operator.ssh("control-1", "date +%s").strip()
    read_again = f"timestamp(up) > {since} and up == 1"
    until("Prometheus has read all", lambda: targets(operator, read_again) == TARGETS)
    assert not operator.kubectl(*read, code=None)
    assert "network policies, which nothing would enforce then" in refusal(operator, "network-policy")
    goes(operator, "monitoring")
    goes(operator, "network-policy")
    operator.kubectl("delete", "pod", READER, "--grace-period=1")
    assert installed(operator) == set()


def test_no_secret_leaks(operator: Operator) -> None:
    search_for_secrets(operator, MACHINES)
