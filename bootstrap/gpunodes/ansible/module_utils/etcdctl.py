"""etcdctl in the etcd container of this control plane."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence

from . import containers
from .problem import MachineProblem
from .process import CommandResult, last_line

PKI = "/etc/kubernetes/pki/etcd"
HERE = "https://127.0.0.1:2379"
"""The member of this machine."""
_LIMIT_S = 10
"""Seconds for one request; etcdctl's own default is 5, which a slow disk exceeds."""
_MARGIN_S = 20
"""Seconds that etcdctl may take beyond its request, which lasts to its end if one member has no power."""


def container() -> str:
    """The id of this machine's running etcd container; raises MachineProblem if there is none."""
    found = containers.ids("etcd")
    if len(found) != 1 or not re.fullmatch(r"[0-9a-f]{8,128}", found[0]):
        raise MachineProblem(
            "etcd does not run on this machine",
            "a control plane with one running etcd container",
            "see `crictl ps -a --name etcd` and `journalctl -u kubelet` there",
        )
    return found[0]


def run(
    words: Sequence[str], endpoints: Sequence[str] = (HERE,), limit_s: int = _LIMIT_S, requests: int = 1
) -> CommandResult:
    """Run etcdctl, which writes JSON; raises MachineProblem if etcd does not run on this machine.

    ``limit_s`` is for each of its ``requests``, which follow one another.
    """
    command = [
        *("etcdctl", f"--endpoints={','.join(endpoints)}", f"--command-timeout={limit_s}s", f"--cacert={PKI}/ca.crt"),
        *(f"--cert={PKI}/healthcheck-client.crt", f"--key={PKI}/healthcheck-client.key", "--write-out=json"),
        *words,
    ]
    return containers.execute(container(), command, requests * limit_s + _MARGIN_S)


def must(words: Sequence[str], endpoints: Sequence[str] = (HERE,), limit_s: int = _LIMIT_S) -> str:
    """The output of etcdctl; raises MachineProblem with its reason if it fails."""
    done = run(words, endpoints, limit_s)
    if not done.ok:
        raise MachineProblem(
            f"etcd does not carry out `etcdctl {' '.join(words[:2])}`: {reason(done)}",
            "an etcd that has a leader: more than half of its members run",
            "start the other control planes; see `crictl ps -a --name etcd` and `crictl logs` on this one",
            output=done.text,
        )
    return done.out


def reason(done: CommandResult) -> str:
    """Why etcdctl or etcdutl failed, in one line: an error among lines of its log, which are JSON, or the last."""
    lines = [line for line in done.err.splitlines() if line.strip() and not line.startswith("{")]
    errors = [line for line in lines if line.startswith("Error:")]
    if errors or lines:
        return (errors or lines)[-1].strip()
    line = last_line(done.err) or last_line(done.out)
    with contextlib.suppress(ValueError, RecursionError):
        parsed = json.loads(line)
        if isinstance(parsed, Mapping):
            return str(parsed.get("error") or parsed.get("msg") or line)
    return line
