"""The members of etcd, through etcdctl.

What etcd reports is data: it is parsed strictly, and only numbers and addresses from it become arguments.
"""

from __future__ import annotations

import ipaddress
import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from . import etcdctl
from .problem import MachineProblem
from .process import CommandResult

_LARGEST_ID = (1 << 64) - 1
_LONGEST_NAME = 253


@dataclass(frozen=True)
class Member:
    """A member of etcd. A member that was added and has not started yet has no name and no client address."""

    id: int
    name: str
    peers: Sequence[str]
    """The hosts of its peer URLs: addresses in their normal form."""
    clients: Sequence[str]
    """Its client URLs."""
    learner: bool

    @property
    def started(self) -> bool:
        return bool(self.name)

    @property
    def votes(self) -> bool:
        return not self.learner

    @property
    def number(self) -> str:
        """Its id as etcdctl writes it, hexadecimal."""
        return f"{self.id:x}"

    def __str__(self) -> str:
        return f"{self.name or 'a member that has not started'} ({', '.join(self.peers)})"


def members(limit_s: float = 0) -> list[Member]:
    """The members of etcd, as this control plane's etcd knows them; waits up to ``limit_s`` until it runs.

    Raises MachineProblem if it does not run or reports something else than members.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return parse_members(etcdctl.must(["member", "list"]))
        except MachineProblem:
            if time.monotonic() >= deadline:
                raise
            time.sleep(1)


def healthy(asked: Iterable[Member]) -> set[int]:
    """The ids of those members that take part in a request now, which needs a quorum; learners never do."""
    urls = {url: member.id for member in asked if member.votes for url in member.clients[:1]}
    if not urls:
        return set()
    # It fails if one endpoint is unhealthy, and still reports all of them.
    done = etcdctl.run(["endpoint", "health"], list(urls))
    return {urls[url] for url in parse_health(done.out, done) if url in urls}


def leader() -> int:
    """The id of the leader, 0 for none."""
    return parse_leader(etcdctl.must(["endpoint", "status"]))


def remove_member(member: Member) -> None:
    """Remove a member; etcd itself refuses this without a quorum."""
    etcdctl.must(["member", "remove", member.number])


def move_leader(old: Member, new: Member) -> None:
    """Give the leadership of ``old`` to ``new``."""
    # Only the leader itself can give it away.
    etcdctl.must(["move-leader", new.number], list(old.clients[:1]))


def quorum(voters: int) -> int:
    """How many of so many voting members must work."""
    return voters // 2 + 1


def at(found: Sequence[Member], address: str) -> Member | None:
    """The member whose only peer address this is; raises MachineProblem if several have it, or it has others, too."""
    try:
        wanted = str(ipaddress.ip_address(address))
    except ValueError:
        raise MachineProblem(
            f"{address!r} is not the address of a member of etcd", "an IP address", "set gpunodes_node_address"
        ) from None
    own = [member for member in found if wanted in member.peers]
    if len(own) > 1 or any(set(member.peers) != {wanted} for member in own):
        raise MachineProblem(
            f"several members or addresses of etcd belong to {wanted}: {'; '.join(map(str, own))}",
            "one member with one address for each control plane",
            "see `etcdctl member list`, and correct it by hand",
        )
    return own[0] if own else None


def parse_members(text: str) -> list[Member]:
    """Parse ``etcdctl member list -w json``; raises MachineProblem for another text."""
    try:
        listed = json.loads(text)["members"]
        found = [
            Member(
                _id(each["ID"]),
                _name(each.get("name") or ""),
                [_host_of(url) for url in each["peerURLs"]],
                [_url(url) for url in each.get("clientURLs") or ()],
                each.get("isLearner", False) is True,
            )
            for each in listed
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _invalid("members") from error
    if not found or len({member.id for member in found}) < len(found):
        raise _invalid("members")
    return found


def parse_health(text: str, done: CommandResult | None = None) -> set[str]:
    """The healthy endpoints in the output of ``etcdctl endpoint health -w json``; raises MachineProblem."""
    try:
        return {str(each["endpoint"]) for each in json.loads(text) if each["health"] is True}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if done is not None and not done.ok and not text.strip():
            return set()
        raise _invalid("health") from error


def parse_leader(text: str) -> int:
    """The leader in the output of ``etcdctl endpoint status -w json`` of one endpoint; raises MachineProblem."""
    try:
        [status] = json.loads(text)
        found = status["Status"].get("leader", 0)
        return _id(found) if found not in {0, "0"} else 0
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _invalid("status") from error


def _invalid(what: str) -> MachineProblem:
    return MachineProblem(
        f"etcd's report of its {what} is invalid",
        "the output of etcdctl 3.4 or newer",
        "see `crictl logs` of the etcd container on the control plane",
    )


def _id(value: Any) -> int:
    """A member's id; JSON libraries write large numbers as texts."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,20}", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _LARGEST_ID:
        raise ValueError(value)
    return value


def _name(value: Any) -> str:
    """A member's name: kubeadm gives it that of the node, others give it any."""
    if not isinstance(value, str) or len(value) > _LONGEST_NAME or not value.isprintable():
        raise ValueError(value)
    return value


def _url(value: Any) -> str:
    """A URL of a member in its normal form: ``https://HOST:PORT`` alone."""
    parts = urlsplit(value)
    if parts.scheme not in {"http", "https"} or parts.port is None or parts.username is not None:
        raise ValueError(value)
    host = _host(parts.hostname or "")
    url = f"{parts.scheme}://[{host}]:{parts.port}" if ":" in host else f"{parts.scheme}://{host}:{parts.port}"
    if value != url:
        raise ValueError(value)
    return url


def _host_of(value: Any) -> str:
    return _host(urlsplit(_url(value)).hostname or "")


def _host(text: str) -> str:
    """An address in its normal form, or a DNS name."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        if not re.fullmatch(r"(?!-)[a-z0-9.-]{1,253}", text):
            raise
        return text
