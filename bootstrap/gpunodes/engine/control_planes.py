"""The control planes of an inventory: the session with their API, and the choice of the one that a run uses."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from gpunodes import clusters
from gpunodes.engine import group_lock
from gpunodes.engine.cluster.api import Api
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.connection import Response, Transport, over_ssh
from gpunodes.engine.cluster.direct import ByKubeconfig
from gpunodes.engine.cluster.errors import NoResponse, OtherCluster, Refused
from gpunodes.engine.cluster.session import Session
from gpunodes.inventory import Inventory, addressed
from gpunodes.model import Machine

_Api = TypeVar("_Api", bound=Api)
_READ = "/api/v1/namespaces/kube-system"
"""What a control plane reads from etcd to show that its API works."""
_CONFIRMED: dict[str, str] = {}
"""The uids of clusters of machines that are in no inventory, by the key of their history; nothing of them is kept."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The control plane that a run uses, and the names of others that were tried, with why they do not respond."""

    machine: Machine
    failures: Sequence[tuple[str, str]] = ()


def responding(inventory: Inventory, choice: Choice) -> list[Machine]:
    """The inventory's control planes but those that did not respond to the choice, in its order."""
    silent = {name for name, _ in choice.failures}
    return [machine for machine in inventory.control_planes() if machine.name not in silent]


def session(inventory: Inventory, changed: Collection[str] = ()) -> Session:
    """A session with the API of the inventory's control planes, which opens at the first request.

    They are tried in the inventory's order, but those that the command changes, ``changed``, last. With a kubeconfig
    it goes to the API itself.
    """
    if found := inventory.kubeconfig:
        key = inventory.cluster
        known = functools.partial(_confirm_here if key.startswith(addressed.KEY) else clusters.confirm, key)
        return Session(ByKubeconfig(found.path, found.context, known))
    machines = sorted(inventory.control_planes(), key=lambda machine: machine.name in changed)
    transports = [_transport(inventory, machine) for machine in machines]
    if len(machines) == 1:
        return Session(transports)
    cluster = inventory.cluster
    return Session(transports, clusters.ca(cluster), functools.partial(clusters.remember_ca, cluster))


def _transport(inventory: Inventory, machine: Machine) -> Transport:
    return over_ssh(machine.address, inventory.connection(machine.name), machine=machine.name)


def _confirm_here(key: str, uid: str) -> bool:
    """Whether all sessions of this process with a kubeconfig lead to one cluster: its file may change between two."""
    return _CONFIRMED.setdefault(key, uid) == uid


@contextlib.contextmanager
def connected(inventory: Inventory, kind: Callable[[Session], _Api]) -> Iterator[_Api]:
    """The API, as ``kind`` sees it, in a session that ends afterwards; raises NoResponse if it does not respond."""
    with contextlib.closing(session(inventory)) as opened:
        api = kind(opened)
        api.call_once("GET", "/version")
        yield api


def lock(
    inventory: Inventory, command: str, holder: str = "", *, restarts: bool = False
) -> contextlib.AbstractContextManager[group_lock.GroupLock]:
    """The lock over SSH on the inventory's control planes; arguments and errors as of ``group_lock.hold``."""
    machines = [
        group_lock.Member(each.name, each.address, inventory.connection(each.name))
        for each in inventory.control_planes()
    ]
    return group_lock.hold(machines, command, holder, restarts=restarts)


def used(inventory: Inventory, opened: Session) -> Choice:
    """The choice after a request of a session: the control plane in use, or the first one if none has responded."""
    machines = {machine.name: machine for machine in inventory.control_planes()}
    first = next(iter(machines.values()))
    if not opened.responded:
        return Choice(first)
    chosen = machines.get(opened.machine, first)
    return Choice(chosen, [(name, opened.failures[name]) for name in machines if name in opened.failures])


def responses(inventory: Inventory, machines: Sequence[Machine]) -> dict[str, Response]:
    """The response of each of these machines by its name: its status is NO_CLUSTER if it certainly runs no cluster."""

    def ask(machine: Machine) -> Response:
        with contextlib.closing(Session(_transport(inventory, machine))) as opened:
            return opened.request("GET", "/version")

    with ThreadPoolExecutor(max(1, len(machines))) as pool:
        return dict(zip([machine.name for machine in machines], pool.map(ask, machines), strict=True))


def choose(inventory: Inventory, changed: Collection[str] = (), *, every: bool = False) -> Choice:
    """The first control plane, in the order of ``session``, whose API responds; the first one if none does.

    A single one is not contacted. ``every``: the others are checked, too. Raises OtherCluster if only machines of
    another cluster respond.
    """
    machines = inventory.control_planes()
    if len(machines) == 1:
        return Choice(machines[0])
    with contextlib.closing(session(inventory, changed)) as opened:
        try:
            Cluster(opened).call_once("GET", _READ)
        except OtherCluster:
            raise
        except (NoResponse, Refused):
            # The play reports why the first one does not respond.
            return Choice(machines[0])
        if every:
            opened.check_others(_READ)
        return used(inventory, opened)
