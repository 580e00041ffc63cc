"""The logins that namespaces have at the registry of the cluster, and a new password in them.

Who may write Secrets of a namespace can make one that looks like a login. So a new password goes only into Secrets
whose UID is recorded in the namespace of the registry, where `registry login` writes it and no team can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpunodes.engine.cluster.errors import Refused
from gpunodes.engine.cluster.registries import Login, Registries
from gpunodes.engine.cluster.workloads import line
from gpunodes.engine.registry.objects import RegistryServer
from gpunodes.errors import GpunodesError
from gpunodes.operations.registry_server.material import Material
from gpunodes.planner import registry
from gpunodes.planner.registry import NAMESPACE


@dataclass(frozen=True, slots=True)
class Renewed:
    """The namespaces whose login got the present password, and those whose login has another one and was left."""

    namespaces: Sequence[str] = ()
    left: Sequence[str] = ()


def own(api: RegistryServer, address: str) -> list[Login]:
    """The logins that namespaces have at this address."""
    return [each for each in Registries(api.session).logins() if each.server == address]


def record(api: RegistryServer, address: str, namespaces: Sequence[str]) -> None:
    """Record the logins that these namespaces have at this address now."""
    for each in own(api, address):
        if each.namespace in namespaces:
            api.apply(registry.login_record(each.namespace, each.uid))


def forget(api: RegistryServer, namespaces: Sequence[str] = ()) -> None:
    """Delete the records of these namespaces, of all by default; also of logins that are no longer listed."""
    for each in namespaces or api.recorded_namespaces():
        api.forget(each)


def renew(api: RegistryServer, address: str, found: Material, *, dry_run: bool = False) -> Renewed:
    """Bring the password into all recorded logins that have another one; with a dry run only say which.

    Raises GpunodesError for those that refuse it, after all others have it.
    """
    cluster = Registries(api.session)
    namespaces, left, refused = [], [], []
    for each in own(api, address):
        if not cluster.differs(each, found.user, found.password):
            continue
        if not _is_recorded(api, each):
            left.append(each.namespace)
        elif reason := "" if dry_run else _refusal(cluster, each, found):
            refused.append(f"{each.namespace} ({reason})")
        else:
            namespaces.append(each.namespace)
    if refused:
        raise GpunodesError(
            f"the new password could not be stored in {', '.join(refused)}",
            "Secrets that can be changed",
            f"`gpunodes registry logout {address} --namespace NAME`, then `login` there again",
        )
    return Renewed(namespaces, left)


def _is_recorded(api: RegistryServer, login: Login) -> bool:
    # `registry verify` makes the one in the registry's own namespace, where no team may write.
    return login.namespace == NAMESPACE or (bool(login.uid) and api.recorded(login.namespace) == login.uid)


def _refusal(cluster: Registries, login: Login, found: Material) -> str:
    """Why a login does not take the password; "" if it did. Its namespace's users may have made it immutable."""
    try:
        cluster.renew(login, found.user, found.password)
    except Refused as error:
        return line(error)
    return ""
