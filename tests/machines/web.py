"""A Service of two pods, of which a disruption budget keeps one, and a program on a machine that counts its answers."""

from __future__ import annotations

import json
from typing import Any

from .conftest import LONG, Operator, lines

IMAGE = "registry.k8s.io/e2e-test-images/busybox:1.37.0-1"
# As the readiness probe below: on an emulated machine whose host starts an API server, an answer takes seconds.
_COUNTER = """
while [ ! -e /run/stop ]; do
    if curl -sf -m 5 http://$1:8080/ >/dev/null; then echo ok; else echo failed; fi
    sleep 0.2
done >/run/requests
"""


def serve(operator: Operator) -> None:
    """Two pods that answer, of which one must always be there, and a program that counts the answers."""
    labels = {"app": "web"}
    container = {
        "name": "web",
        "image": IMAGE,
        "command": ["busybox", "sh", "-c", "echo hello >/tmp/index.html; exec busybox httpd -f -p 8080 -h /tmp"],
        # Within a second an emulated machine under load does not always answer.
        "readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1, "timeoutSeconds": 5},
        # A request that began is answered; kube-proxy forgets the pod meanwhile.
        "lifecycle": {"preStop": {"exec": {"command": ["busybox", "sleep", "10"]}}},
    }
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 15},
    }
    objects: list[dict[str, Any]] = [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "web"},
            "spec": {"replicas": 2, "selector": {"matchLabels": labels}, "template": template},
        },
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "web"},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": labels}},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web"},
            "spec": {"selector": labels, "ports": [{"port": 8080}]},
        },
    ]
    document = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    operator.ssh("control-1", f"cat >/run/web.json <<'END'\n{document}\nEND")
    operator.kubectl("apply", "-f", "/run/web.json")
    operator.kubectl("rollout", "status", "deployment/web", "--timeout=300s", limit_s=LONG)
    address = operator.kubectl("get", "service", "web", "-o", "jsonpath={.spec.clusterIP}").strip()
    operator.ssh("control-1", f"cat >/run/count.sh <<'END'\n{_COUNTER}\nEND")
    operator.ssh("control-1", f"systemd-run --unit=counter --collect sh /run/count.sh {address}")


def answers(operator: Operator) -> list[str]:
    """Stop counting; "ok" or "failed" for each request."""
    operator.ssh("control-1", "touch /run/stop; sleep 7")
    return lines(operator.ssh("control-1", "cat /run/requests"))
