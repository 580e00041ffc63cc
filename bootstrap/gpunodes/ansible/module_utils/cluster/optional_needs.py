"""What an optional add-on needs of the cluster itself: settings may have changed since it was made."""

from __future__ import annotations

from collections.abc import Mapping

from .. import kube_api
from ..kube_api import Client
from ..problem import MachineProblem
from . import optional
from .nodes import not_ready


def check(name: str, argument: Mapping[str, str], *, is_network: bool) -> None:
    """Check what an add-on that is to be installed needs of the cluster.

    ``argument`` (``name``, ``setting``): one that API servers get by a setting when the cluster is made.
    ``is_network``: it is the network of pods, and must not come beside another one: then a node is ready without it.
    Raises MachineProblem.
    """
    client = kube_api.admin()
    if argument and not _have(client, argument["name"]):
        raise MachineProblem(
            f"{name} needs {argument['setting']}, without which this cluster was made",
            f"API servers with {argument['name']}",
            "that is decided when a cluster is made: leave the add-on out, or make the cluster again",
        )
    if is_network and name not in optional.installed():
        ready = [each["metadata"]["name"] for each in client.get("/api/v1/nodes")["items"] if not not_ready(each)]
        if ready:
            raise MachineProblem(
                f"the cluster has a network of pods already: node {ready[0]} is ready without {name}",
                f"{name} as the only one: two of them separate new pods from those that run",
                "a network add-on comes before the first node is ready, and stays",
            )


def _have(client: Client, argument: str) -> bool:
    """Whether all API servers have an argument; those that run elsewhere are not seen, and count as having it."""
    pods = client.get(f"{kube_api.SYSTEM}/pods", labelSelector="component=kube-apiserver")["items"]
    words = [
        [*map(str, container.get("command") or ()), *map(str, container.get("args") or ())]
        for pod in pods
        for container in pod["spec"]["containers"][:1]
    ]
    return all(any(word.startswith(f"{argument}=") for word in each) for each in words)
