"""Optional add-ons on machines: each comes, is found unchanged, and goes. The mirror of the lab has their images."""

from __future__ import annotations

import functools

from . import waiting
from .conftest import LabSpec, Operator

IMAGE = "registry.k8s.io/e2e-test-images/busybox:1.37.0-1"
WAIT_S = 300.0
"""Seconds for what controllers and add-ons do on emulated machines."""
SERVES = "mkdir /tmp/www && echo served >/tmp/www/index.html && exec httpd -f -p 8080 -h /tmp/www"
# A slow API server logs the names of their events, POD.TIME. With six letters before the point that looks like a token.
SERVER = "page"
"""The name of a pod that runs ``SERVES``."""
# Within a second an emulated machine under load does not always answer.
READY = {"readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 5, "timeoutSeconds": 5}}
"""Of a container that runs ``SERVES``."""


def lab(*images: str) -> LabSpec:
    """A lab with a mirror that has these further images."""
    options = tuple(word for name in images for word in ("--images", name))
    # Kubelets have serving certificates, which metrics-server and Prometheus verify.
    # Emulated machines pull and unpack the largest images for minutes.
    settings = {"gpunodes_serving_certificates": True, "gpunodes_ready_timeout": 1200}
    return LabSpec("debian13", workers=2, up_options=options, cluster=(), settings=settings)


until = functools.partial(waiting.until, limit_s=WAIT_S)


def apply(operator: Operator, manifest: str) -> None:
    operator.ssh("control-1", f"cat >/run/addon.yml <<'END'\n{manifest}\nEND")
    operator.kubectl("apply", "-f", "/run/addon.yml")


def installed(operator: Operator) -> set[str]:
    return {each["name"] for each in operator.document("addon", "list")["addons"] if each["installed"]}


def comes(operator: Operator, name: str) -> None:
    """Install an add-on: a dry run changes nothing, and neither does a second run."""
    would = operator.document("addon", "up", name, "--dry-run")["changes"]
    assert would
    assert name not in installed(operator)
    assert sorted(operator.document("addon", "up", name)["changes"]) == sorted(would)
    assert name in installed(operator)
    operator.gpunodes("addon", "verify", name)
    assert operator.document("addon", "up", name)["changes"] == []


def goes(operator: Operator, name: str) -> None:
    """Remove an add-on: no object of any kind remains."""
    assert operator.document("addon", "down", name, "--yes")["changes"]
    assert name not in installed(operator)
    # The cluster deletes what belongs to the objects, such as pods, afterwards.
    until(f"nothing of {name} is left", lambda: not labelled(operator, name))
    assert operator.document("addon", "down", name, "--yes")["changes"] == []


def labelled(operator: Operator, name: str) -> str:
    kubectl = "kubectl --kubeconfig /etc/kubernetes/admin.conf"
    kinds = f"{kubectl} api-resources --verbs=list -o name | grep -v '^componentstatuses$' | paste -sd,"
    return operator.ssh("control-1", f'{kubectl} get "$({kinds})" -A -l gpunodes.dev/addon={name} -o name').strip()


def refusal(operator: Operator, name: str) -> str:
    """Why an add-on is not removed."""
    return " ".join(operator.gpunodes("addon", "down", name, "--yes", code=1).stderr.split())
