"""Network policies on machines: the add-on that enforces them, with those of examples/tenants. Not run yet.

The mirror has its image (`lab up --images addons`).
"""

from __future__ import annotations

import functools
from typing import Any

from . import optional_addons, pods
from .conftest import CHECKOUT, LONG, Operator, search_for_secrets
from .optional_addons import IMAGE, READY, SERVER, SERVES, comes, goes, installed, refusal, until

LAB = optional_addons.lab("addons")
TEAM, TENANTS = "vision", "/root/tenants"
MATE, STRANGER = ("mate", TEAM), ("stranger", "default")
RESTRICTED = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
# As the example's namespace demands, and small enough for a worker of the lab.
OF_TEAM: dict[str, Any] = {
    **READY,
    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
}


def reaches(operator: Operator, pod: tuple[str, str], server: tuple[str, str] = (SERVER, TEAM)) -> bool:
    """Whether a pod gets the page of another one, which is on another node. Pods are names with their namespaces."""
    (name, space), (target, of) = pod, server
    address = operator.kubectl("-n", of, "get", "pod", target, "-o", "jsonpath={.status.podIP}").strip()
    read = ("wget", "-q", "-T", "5", "-O", "-", f"http://{address}:8080/")
    return operator.kubectl("-n", space, "exec", name, "--", *read, code=None).strip() == "served"


def resolves(operator: Operator) -> bool:
    """Whether a pod of the team gets an answer of the cluster's DNS."""
    lookup = ("exec", MATE[0], "--", "nslookup", "kubernetes.default.svc.cluster.local")
    return "Name:" in operator.kubectl("-n", TEAM, *lookup, code=None)


def test_without_enforcement_a_policy_stops_nothing(operator: Operator) -> None:
    """Otherwise the next test proves nothing."""
    pods.copy(operator, CHECKOUT / "examples" / "tenants", TENANTS)
    operator.kubectl("apply", "-k", f"{TENANTS}/{TEAM}")
    for wanted in (("serviceaccount", "default", "name"), ("quota", "team", "jsonpath={.status.hard.pods}")):
        ready = ("-n", TEAM, "get", *wanted[:2], "-o", wanted[2])
        until(f"the {wanted[0]} is ready", functools.partial(operator.kubectl, *ready, code=None))
    spec: dict[str, Any] = {"securityContext": RESTRICTED, "volumes": [{"name": "tmp", "emptyDir": {}}]}
    for name, node in ((SERVER, "worker-1"), (MATE[0], "worker-2")):
        pods.start(operator, name, IMAGE, SERVES, OF_TEAM, namespace=TEAM, nodeName=node, **spec)
    pods.start(operator, STRANGER[0], IMAGE, SERVES, READY, nodeName="control-1")
    for name, space in ((SERVER, TEAM), MATE, STRANGER):
        operator.kubectl("-n", space, "wait", "--for=condition=Ready", f"pod/{name}", "--timeout=180s")
    until("everybody reaches the team", lambda: reaches(operator, STRANGER))
    until("the team reaches everybody", lambda: reaches(operator, MATE, STRANGER))


def test_the_policies_of_the_tenants_keep_their_pods_apart(operator: Operator) -> None:
    comes(operator, "network-policy")
    until("nobody else reaches the team", lambda: not reaches(operator, STRANGER))
    until("the team reaches nobody else", lambda: not reaches(operator, MATE, STRANGER))
    until("the team reaches the team", lambda: reaches(operator, MATE))
    until("the team has DNS", lambda: resolves(operator))
    operator.kubectl("-n", TEAM, "delete", "networkpolicy", "dns")
    until("without its policy there is no DNS", lambda: not resolves(operator))
    operator.kubectl("apply", "-k", f"{TENANTS}/{TEAM}")
    until("with its policy there is", lambda: resolves(operator))
    agents = ("-n", "kube-system", "delete", "pods", "-l", "k8s-app=kube-network-policies", "--wait=true")
    operator.kubectl(*agents)
    operator.gpunodes("addon", "verify", "network-policy")
    until("new agents let the team pass", lambda: reaches(operator, MATE))
    # While there was no agent, everybody may have reached the team.
    until("and nobody else", lambda: not reaches(operator, STRANGER))
    # The kubelet's probes are not packets of a pod.
    ready = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
    assert operator.kubectl("-n", TEAM, "get", "pod", SERVER, "-o", ready).strip() == "True"


def test_enforcement_ends_with_the_add_on(operator: Operator) -> None:
    refused = refusal(operator, "network-policy")
    assert "network policies, which nothing would enforce then (deny, dns, team)" in refused
    operator.kubectl("-n", TEAM, "delete", "networkpolicy", "deny", "dns", "team")
    until("all pods reach the server", lambda: reaches(operator, STRANGER))
    goes(operator, "network-policy")
    # Its rules stay in the kernel until the next boot; without policies they concern no pod.
    until("the team still reaches the team", lambda: reaches(operator, MATE))
    operator.kubectl("delete", "pod", STRANGER[0], "--grace-period=1")
    operator.kubectl("delete", "-k", f"{TENANTS}/{TEAM}", "--ignore-not-found", limit_s=LONG)
    assert installed(operator) == set()


def test_no_secret_leaks(operator: Operator) -> None:
    search_for_secrets(operator, LAB.machines)
