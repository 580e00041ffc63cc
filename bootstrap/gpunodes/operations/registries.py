"""Logins at private image registries, for the pods of some namespaces."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence

from gpunodes import settings
from gpunodes.engine import control_planes
from gpunodes.engine.cluster.registries import Login, Registries
from gpunodes.errors import WrongInput, together
from gpunodes.inventory import Inventory
from gpunodes.model import Role
from gpunodes.planner.namespaces import check as check_namespace

_HOST = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_SERVER = re.compile(rf"(?=.{{1,253}}$){_HOST}(\.{_HOST})*(:\d{{1,5}})?(/[a-z0-9][a-z0-9._/-]*)?")
_USER = re.compile(r"[!-9;-~]{1,255}")
_PASSWORD = re.compile(r"[^\x00-\x1f\x7f]{1,65536}")
_MIRRORS = "gpunodes_image_mirrors"


def check(server: str, namespaces: Sequence[str] = ()) -> None:
    """Raise WrongInput for what is no registry or no namespace."""
    if not _SERVER.fullmatch(server):
        raise WrongInput(
            f"{server!a} is not a registry",
            "its name as images have it: registry.example:5000, ghcr.io, nvcr.io, docker.io",
            "leave out https:// and tags",
        )
    for each in namespaces:
        check_namespace(each)


def check_credentials(user: str, password: str) -> None:
    """Raise WrongInput for a user name or password that no registry accepts; the password is not quoted."""
    if not _USER.fullmatch(user):
        raise WrongInput(f"{user!a} is not the name of a user", "printable letters without a colon", "correct --user")
    if not _PASSWORD.fullmatch(password):
        raise WrongInput("the password is empty, or contains a control character", "one line", "give it again")


def warnings(inventory: Inventory, server: str) -> list[str]:
    """What to know before a login at a registry: its password may get to a mirror of it.

    The kubelet gives containerd the credentials of an image without the server that they are for.
    """
    host = server.partition("/")[0]
    for machine in inventory.machines(Role.CONTROL_PLANE, Role.WORKER):
        mirrors = settings.resolve(inventory.rendered(machine.name, _MIRRORS))[_MIRRORS]
        if isinstance(mirrors, Mapping) and host in mirrors:
            return [f"{_MIRRORS} has a mirror of {host}: if it asks for a login, nodes send it this user and password"]
    return []


def login(inventory: Inventory, server: str, namespaces: Sequence[str], user: str, password: str) -> list[Login]:
    """Make a login, or bring it to this user and password; returns the logins at this registry.

    All namespaces are checked before anything is changed; raises WrongInput for those that do not exist.
    """
    check(server, namespaces)
    check_credentials(user, password)
    with _connected(inventory) as cluster:
        return logged_in(cluster, server, namespaces, user, password)


def logged_in(cluster: Registries, server: str, namespaces: Sequence[str], user: str, password: str) -> list[Login]:
    """The same with a session."""
    missing = [each for each in namespaces if not cluster.has_namespace(each)]
    if missing:
        raise together(
            [
                WrongInput(
                    f"the cluster has no namespace {each}",
                    "one with its service account `default`",
                    f"create it first: kubectl create namespace {each}",
                )
                for each in missing
            ]
        )
    for each in namespaces:
        cluster.login(each, server, user, password)
    return [each for each in cluster.logins() if each.server == server]


def logout(inventory: Inventory, server: str, namespaces: Sequence[str] = ()) -> list[Login]:
    """Delete the logins at a registry in these namespaces, in all by default; returns them.

    Raises WrongInput if there are none.
    """
    check(server, namespaces)
    with _connected(inventory) as cluster:
        return logged_out(cluster, server, namespaces)


def logged_out(cluster: Registries, server: str, namespaces: Sequence[str] = ()) -> list[Login]:
    """The same with a session."""
    if namespaces:
        found = [login for each in dict.fromkeys(namespaces) if (login := cluster.login_at(server, each))]
    else:
        found = [each for each in cluster.logins() if each.server == server]
    if not found:
        where = f" in {', '.join(namespaces)}" if namespaces else ""
        raise WrongInput(
            f"no login at {server}{where}", "one that `gpunodes registry login` made", "see `gpunodes registry list`"
        )
    for each in found:
        cluster.logout(each)
    return found


def logins(inventory: Inventory) -> list[Login]:
    """All logins that gpunodes made."""
    with _connected(inventory) as cluster:
        return cluster.logins()


def _connected(inventory: Inventory) -> contextlib.AbstractContextManager[Registries]:
    return control_planes.connected(inventory, Registries)
