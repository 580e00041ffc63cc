"""An inventory of addresses, for one command: what the user typed, in a private file that ends with the process."""

from __future__ import annotations

import atexit
import functools
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gpunodes.errors import WrongInput
from gpunodes.inventory import GROUPS, Inventory
from gpunodes.inventory.names import check_address, machine_name
from gpunodes.model import Kubeconfig, Role

KEY = "addresses"
"""The key of the history of machines that are given by their addresses."""
_SHOWN = 5


def inventory(
    addresses: Sequence[str],
    connection: Mapping[str, object],
    kubeconfig: Kubeconfig | None = None,
    settings: Mapping[str, Any] | None = None,
    role: Role = Role.WORKER,
) -> Inventory:
    """The machines at ``addresses``, in the group of ``role``; raises WrongInput for something else.

    ``connection`` has Ansible's connection variables, ``settings`` variables that stay in memory: secrets may be there.
    """
    for address in addresses:
        check_address(address)
    names = {machine_name(address): address for address in addresses}
    if len({name.lower() for name in names}) < len(set(addresses)):
        raise WrongInput("two of the addresses are one", "each address once", "leave one out")
    hosts = {name: {"ansible_host": address, **connection} for name, address in names.items()}
    path = file_of({GROUPS[role]: {"hosts": hosts}})
    key = f"{KEY} {kubeconfig.path.absolute()} {kubeconfig.context}".rstrip() if kubeconfig else KEY
    return Inventory(path, kubeconfig, cluster=key, more=settings or {}, given=_few(addresses))


def _few(addresses: Sequence[str]) -> str:
    more = f" and {len(addresses) - _SHOWN} more" if len(addresses) > _SHOWN else ""
    return ", ".join(addresses[:_SHOWN]) + more


def file_of(document: Mapping[str, Any]) -> Path:
    """A private file with an inventory; it ends with the process. Raises WrongInput as ``check_plain``."""
    check_plain(document)
    folder = Path(tempfile.mkdtemp(prefix="gpunodes-"))
    atexit.register(functools.partial(shutil.rmtree, folder, ignore_errors=True))
    path = folder / "addresses.yml"
    path.write_text(yaml.safe_dump(dict(document), sort_keys=False), encoding="utf-8")
    return path


def check_plain(document: Mapping[str, Any]) -> None:
    """Raise WrongInput for a template in an inventory: Ansible would render it, and a cluster may have named it."""
    if found := re.search(r"\{[{%#].{0,40}", yaml.safe_dump(dict(document), width=10_000)):
        raise WrongInput(f"an inventory would have the template {found[0]!r}", "plain values", "correct that value")
