"""Pods for tests: start them, wait for their end, examples of a page, pods that try to get GPUs without a request."""

from __future__ import annotations

import base64
import io
import json
import re
import tarfile
import textwrap
from pathlib import Path
from typing import Any

import yaml

from .conftest import LONG, Operator

GPU_IMAGE = "nvcr.io/nvidia/k8s-device-plugin:v0.19.0"
_SCHEDULING = Path(__file__).parents[2] / "docs" / "scheduling.md"

_SEARCH = """for file in /dev/nvidia*; do test -e "$file" && echo "got $file"; done
nvidia-smi -L 2>/dev/null | grep UUID
echo "searched as $NVIDIA_VISIBLE_DEVICES"
"""
_ALL = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}, {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "all"}]
_BY_NAME = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "nvidia.com/gpu=all"}]
_ANNOTATED = {"cdi.k8s.io/greedy": "nvidia.com/gpu=all"}
_GREEDY: dict[str, tuple[list[dict[str, str]], dict[str, str], dict[str, str]]] = {
    # The image sets the variable itself.
    "greedy-image": ([], {}, {}),
    "greedy-image-runtime": ([], {"runtimeClassName": "nvidia"}, {}),
    "greedy-variable": (_ALL, {}, {}),
    "greedy-runtime": (_ALL, {"runtimeClassName": "nvidia"}, {}),
    "greedy-name": (_BY_NAME, {"runtimeClassName": "nvidia"}, {}),
    "greedy-annotation": ([], {}, _ANNOTATED),
    "greedy-annotation-runtime": ([], {"runtimeClassName": "nvidia"}, _ANNOTATED),
}
"""Attempts to get GPUs without a request: variables of the pod, its further fields, annotations."""


def copy(operator: Operator, folder: Path, target: str) -> None:
    """Copy a folder of the checkout to the control plane."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        tar.add(folder, arcname=".")
    encoded = base64.b64encode(data.getvalue()).decode()
    operator.ssh("control-1", f"mkdir -p {target} && base64 -d <<'END' | tar -xzC {target}\n{encoded}\nEND")


def start(
    operator: Operator,
    name: str,
    image: str,
    script: str,
    container: dict[str, Any],
    annotations: dict[str, str] | None = None,
    namespace: str = "default",
    **spec: Any,
) -> None:
    """Start a pod that runs a shell script."""
    document = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "annotations": annotations or {}},
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
    # A pod with a volume that is made for it starts after the pod that makes it.
    succeeded = "--for=jsonpath={.status.phase}=Succeeded"
    operator.kubectl("wait", succeeded, f"pod/{name}", "--timeout=600s", limit_s=LONG)
    node = operator.kubectl("get", "pod", name, "-o", "jsonpath={.spec.nodeName}").strip()
    log = operator.kubectl("logs", name)
    operator.kubectl("delete", "pod", name, "--wait=true")
    return node, log


def greedy(operator: Operator, node: str, image: str) -> dict[str, str]:
    """Run pods of one of NVIDIA's images on a GPU node that try to get a GPU without a request; returns their logs."""
    for name, (variables, spec, notes) in _GREEDY.items():
        start(operator, name, image, _SEARCH, {"env": variables}, notes, nodeName=node, **spec)
    return {name: ended(operator, name)[1].strip() for name in _GREEDY}


NOTHING = {
    name: f"searched as {variables[0]['value'] if variables else 'all'}" for name, (variables, *_) in _GREEDY.items()
}
"""The result of ``greedy`` where only pods with a request get GPUs: the variable of each, its own or its image's."""


def examples(heading: str) -> list[str]:
    """The examples below a heading of docs/scheduling.md."""
    sections = re.split(r"^#+ ", _SCHEDULING.read_text(), flags=re.MULTILINE)
    [section] = [section for section in sections if section.startswith(f"{heading}\n")]
    return [textwrap.dedent(block) for block in re.findall(r"(?:^ {4}.*\n)+", section, re.MULTILINE)]


def example(heading: str) -> dict[str, Any]:
    """The last example below a heading: a part of a pod."""
    part: dict[str, Any] = yaml.safe_load(examples(heading)[-1])
    return part


def levels(machine: dict[str, Any]) -> dict[str, str]:
    """The states of a machine in a document of `gpu verify`, by level."""
    return {level["level"]: level["state"] for level in machine["levels"]}


ALL_OK = dict.fromkeys(("host", "container", "kubelet", "pod"), "ok")
"""The levels of a GPU node that serves its GPUs."""
