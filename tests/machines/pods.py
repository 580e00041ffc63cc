"""Pods for tests: start them, wait for their end, and pods that try to get GPUs without a request."""

from __future__ import annotations

import json
from typing import Any

from .conftest import Operator

_SEARCH = """for file in /dev/nvidia*; do test -e "$file" && echo "got $file"; done
nvidia-smi -L 2>/dev/null | grep UUID
echo searched"""
_ALL = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}, {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "all"}]
_BY_NAME = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "nvidia.com/gpu=all"}]
_ANNOTATED = {"cdi.k8s.io/greedy": "nvidia.com/gpu=all"}
_GREEDY: dict[str, tuple[list[dict[str, str]], dict[str, str], dict[str, str]]] = {
    "greedy-variable": (_ALL, {}, {}),
    "greedy-runtime": (_ALL, {"runtimeClassName": "nvidia"}, {}),
    "greedy-name": (_BY_NAME, {"runtimeClassName": "nvidia"}, {}),
    "greedy-annotation": ([], {}, _ANNOTATED),
    "greedy-annotation-runtime": ([], {"runtimeClassName": "nvidia"}, _ANNOTATED),
}
"""Attempts to get GPUs without a request: variables, further fields of the pod, annotations."""


def start(
    operator: Operator,
    name: str,
    image: str,
    script: str,
    container: dict[str, Any],
    annotations: dict[str, str] | None = None,
    **spec: Any,
) -> None:
    """Start a pod that runs a shell script."""
    document = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations or {}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "main", "image": image, "command": ["sh", "-c", script], **container}],
            **spec,
        },
    }
    operator.ssh("control-1", f"cat >/run/pod.json <<'END'\n{json.dumps(document)}\nEND")
    operator.kubectl("apply", "-f", "/run/pod.json")


def ended(operator: Operator, name: str) -> tuple[str, str]:
    """Wait until a pod has succeeded, and delete it; returns its node and log."""
    operator.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", f"pod/{name}", "--timeout=180s")
    node = operator.kubectl("get", "pod", name, "-o", "jsonpath={.spec.nodeName}").strip()
    log = operator.kubectl("logs", name)
    operator.kubectl("delete", "pod", name, "--wait=true")
    return node, log


def greedy(operator: Operator, node: str, image: str) -> dict[str, str]:
    """Run pods on a GPU node that try to get a GPU without a request; returns the log of each."""
    for name, (variables, spec, notes) in _GREEDY.items():
        start(operator, name, image, _SEARCH, {"env": variables}, notes, nodeName=node, **spec)
    return {name: ended(operator, name)[1].strip() for name in _GREEDY}


NOTHING = dict.fromkeys(_GREEDY, "searched")
"""The result of ``greedy`` where only pods with a request get GPUs."""
