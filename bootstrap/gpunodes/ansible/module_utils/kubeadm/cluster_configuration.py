"""Changes kubeadm's ClusterConfiguration, as kubeadm stores it in the cluster (ConfigMap kubeadm-config).

The machines' Python has no YAML parser. kubeadm writes this text with sorted keys and an indentation of two spaces: the
few lines that are read and written here have one form. A text of another form is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..problem import MachineProblem

_NAME = re.compile(r"[A-Za-z0-9*]([A-Za-z0-9.*-]{0,252})?")
_SCALAR = re.compile(r"[A-Za-z0-9._:/-]{1,253}")


def value(text: str, path: str) -> str:
    """A scalar by its path, ``networking.serviceSubnet``; "" if it is missing or has an unexpected form."""
    section, _, key = path.rpartition(".")
    body, indent = (_section(text, section), "  ") if section else (text, "")
    found = re.search(rf"^{indent}{re.escape(key)}:[ ]+[\"']?([^\s\"']+)[\"']?[ ]*$", body, re.MULTILINE)
    return found.group(1) if found and _SCALAR.fullmatch(found.group(1)) else ""


def names(text: str) -> list[str]:
    """The additional names of the API server's certificate (apiServer.certSANs)."""
    found = re.search(r"^  certSANs:\n((?:  - .*\n)*)", _section(text, "apiServer"), re.MULTILINE)
    return [line[len("  - ") :].strip().strip("\"'") for line in found.group(1).splitlines()] if found else []


def changed(text: str, endpoint: str, certificate_names: Sequence[str]) -> str:
    """The text with this endpoint and these additional names; raises MachineProblem if kubeadm did not write it."""
    if not all(map(_NAME.fullmatch, certificate_names)):
        raise MachineProblem("a name for the API server's certificate is invalid", "DNS names and IPv4 addresses")
    if text.count("\nkind: ClusterConfiguration\n") + text.startswith("kind: ClusterConfiguration\n") != 1 or not (
        re.match(r"apiServer:( \{\})?\n", text)
    ):
        raise MachineProblem(
            "the ConfigMap kubeadm-config in kube-system has a form that kubeadm does not write",
            "the ClusterConfiguration as kubeadm writes it",
            "upload it again: `kubeadm init phase upload-config kubeadm --config FILE`",
        )
    listed = "  certSANs:\n" + "".join(f"  - {name}\n" for name in certificate_names)
    own = _section(text, "apiServer")
    rest = text[len(own) :]
    own = "apiServer:\n" if own.startswith("apiServer: {}") else own
    own = re.sub(r"^  certSANs:( \[\])?\n(?:  - .*\n)*", "", own, flags=re.MULTILINE)
    own = own.replace("apiServer:\n", f"apiServer:\n{listed}", 1)
    line = f"controlPlaneEndpoint: {endpoint}\n"
    rest, present = re.subn(r"^controlPlaneEndpoint:.*\n", line, rest, flags=re.MULTILINE)
    if not present:
        # In the order of kubeadm: it is compared with what kubeadm writes later.
        rest = re.sub(r"^(?=(?:controllerManager|dns|etcd|kind):)", line, rest, count=1, flags=re.MULTILINE)
    return own + rest


def _section(text: str, name: str) -> str:
    """A key of the first level with the lines that belong to it; "" without it."""
    found = re.search(rf"^{re.escape(name)}:.*\n(?:[ -].*\n)*", text, re.MULTILINE)
    return found.group(0) if found else ""
