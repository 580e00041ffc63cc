"""A session with the Kubernetes API, for one that has only a pipe to this machine.

It reads requests and prints answers, one JSON document a line; several are carried out side by side. Nothing of the
kubeconfig is ever in an answer. A request: ``id``, ``method``, ``path`` (with its query), ``body`` (or null),
``type`` (of the body), ``keep`` (dotted paths; of the items of a list only these come back). An answer: ``id``,
``status`` (0: the API does not answer; -1: this machine runs no cluster), ``body``, ``error``, ``time`` (this machine's
clock, seconds since 1970). The method LOCK asks who holds the lock of commands on this machine.
"""

from __future__ import annotations

import fcntl
import json
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import kubeconfig
from .kube_api import ApiError, Client

COMMAND_LOCK = "/run/gpunodes-cluster.lock"
"""What a command holds where it has no API to take Leases from (engine/locks.py)."""
_AT_ONCE = 4
_MOST = 32 << 20
"""Bytes of an answer."""


def serve(path: str) -> None:
    """Answer requests until standard input ends. ``path`` is a kubeconfig's."""
    config = kubeconfig.load(path)
    guard, local = threading.Lock(), threading.local()

    def answer(line: str) -> None:
        request = json.loads(line)
        if request["method"] == "LOCK":
            message: dict[str, Any] = {"status": 200, "body": lock_holder(COMMAND_LOCK), "error": ""}
        elif config is None:
            message = {"status": -1, "body": None, "error": f"there is no {path} on this machine"}
        else:
            if not hasattr(local, "client"):
                local.client = Client(config, patience_s=-1)
            message = _call(local.client, request)
        text = json.dumps({"id": request["id"], "time": time.time(), **message})
        if len(text) > _MOST:
            text = json.dumps(
                {"id": request["id"], "time": time.time(), "status": 0, "body": None, "error": "the answer is too long"}
            )
        with guard:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for line in sys.stdin:
            if line.strip():
                pool.submit(answer, line)


def lock_holder(path: str) -> Any:
    """What the holder of a lock wrote into its file; None where nobody holds it."""
    try:
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return json.loads(file.read(4096) or b"{}")
    except (OSError, ValueError, RecursionError):
        pass
    return None


def _call(client: Client, request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        body = client.call(
            str(request["method"]), str(request["path"]), request.get("body"), None, str(request["type"])
        )
    except ApiError as error:
        return {"status": error.status, "body": None, "error": str(error)}
    keep = request.get("keep")
    if keep and isinstance(body, dict) and "items" in body:
        body["items"] = [pruned(item, keep) for item in body["items"]]
    return {"status": 200, "body": body, "error": ""}


def pruned(thing: Mapping[str, Any], keep: list[str]) -> dict[str, Any]:
    """``thing`` with only the dotted paths ``keep`` of it."""
    result: dict[str, Any] = {}
    for path in keep:
        source: Any = thing
        target = result
        names = path.split(".")
        for name in names[:-1]:
            source = source.get(name) if isinstance(source, Mapping) else None
            if not isinstance(source, Mapping):
                break
            target = target.setdefault(name, {})
        if isinstance(source, Mapping) and names[-1] in source:
            target[names[-1]] = source[names[-1]]
    return result
