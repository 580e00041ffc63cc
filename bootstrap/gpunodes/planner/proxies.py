"""The HTTP proxies of machines, and the hosts that are reached without them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from gpunodes.ansible.module_utils.proxies import (
    CREDENTIALS,
    EXCEPTIONS_WANTED,
    URL,
    URL_WANTED,
    Proxies,
    is_exception,
    listed,
    without_covered,
)
from gpunodes.errors import WrongInput

_LONGEST = 100_000
"""Linux limits a variable to 128 KiB (MAX_ARG_STRLEN)."""
_OWN = ("localhost", "127.0.0.0/8", "::1", ".svc", ".cluster.local")
"""The machine itself, and the names of services: the cluster's domain is always that of kubeadm's default."""


def proxies(settings: Mapping[str, Any], machines: Iterable[str]) -> Proxies | None:
    """The proxies by the settings of a machine, with ``{credentials}`` in place of secrets; None without a proxy.

    ``machines`` are the names and addresses of all machines. Those that another entry includes are left out, so that a
    list with the machines' network stays the same when a machine is added.

    Raises WrongInput for a setting of another form, without its value: it may contain a password.
    """
    urls = _urls(settings)
    if not any(urls.values()):
        return None
    for name, url in urls.items():
        if url and not re.fullmatch(URL, url):
            setting = f"gpunodes_{name}_proxy"
            raise WrongInput(f"{setting} cannot be used", URL_WANTED, "correct this setting")
    wrong = [entry for entry in listed(settings["gpunodes_no_proxy"]) if not is_exception(entry)]
    if wrong:
        raise WrongInput(f"gpunodes_no_proxy contains {wrong[0]!r}", EXCEPTIONS_WANTED, "correct this setting")
    subnets = [each for name in ("pod", "service") for each in listed(settings[f"gpunodes_{name}_subnet"])]
    given = tuple(dict.fromkeys([*_OWN, *subnets, *listed(settings["gpunodes_no_proxy"])]))
    return with_hosts(Proxies(_hidden(urls["http"]), _hidden(urls["https"]), given), machines)


def with_hosts(found: Proxies, hosts: Iterable[str]) -> Proxies:
    """``found`` with more hosts that are reached directly: names, addresses, or these with a port, never a network.

    Raises WrongInput for more than an environment variable can hold: no service would start.
    """
    names = [name for host in hosts if (name := _without_port(str(host)).lower()) and is_exception(name)]
    hosts = without_covered((name for name in names if "/" not in name), found.no_proxy)
    complete = replace(found, no_proxy=(*found.no_proxy, *hosts))
    if len(",".join(complete.no_proxy)) > _LONGEST:
        raise WrongInput(
            f"the list of {len(complete.no_proxy)} hosts that no proxy is for has more than {_LONGEST} characters",
            "one that fits into an environment variable",
            "name the machines' networks and domains in gpunodes_no_proxy: these machines are then left out",
        )
    return complete


def credentials(settings: Mapping[str, Any]) -> dict[str, str]:
    """USER:PASSWORD of the proxies that have some, by ``http`` and ``https``."""
    matches = {name: re.fullmatch(URL, url) for name, url in _urls(settings).items()}
    return {name: found["credentials"] for name, found in matches.items() if found and found["credentials"]}


def _urls(settings: Mapping[str, Any]) -> dict[str, str]:
    """The proxies' URLs. Without one for https that for http is used: apt does so, and has no option against it."""
    http, https = (str(settings[f"gpunodes_{name}_proxy"] or "").strip() for name in ("http", "https"))
    return {"http": http, "https": https or http}


def _hidden(url: str) -> str:
    found = re.fullmatch(URL, url)
    return url.replace(f"//{found['credentials']}@", f"//{CREDENTIALS}@") if found and found["credentials"] else url


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0] if host.count(":") == 1 else host
