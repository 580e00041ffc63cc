"""A session with the Kubernetes API for the controller, which has only an SSH connection to this machine.

It reads requests from standard input and prints responses, one JSON document per line; it processes several requests
in parallel. A response never contains anything of the kubeconfig. A request has ``id``, ``method``, ``path`` (with its
query), ``body`` (or null), ``type`` (content type of the body) and ``keep`` (dotted paths: the fields to return of the
items of a list; a backslash before a dot makes it part of a name). With ``ca``, the hash of a CA, it is only for a
cluster with that CA. A response has ``id``, ``status`` (0: the API does not respond; -1: this machine runs no cluster;
-4: its cluster has another CA; -6: the response is too large), ``body``, ``error``, ``time`` (this machine's clock,
seconds since 1970) and ``ca``, the hash of the CA of this machine's cluster. The method LOCK returns the holder of the
command lock on this machine.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import command_lock, kubeconfig
from .kube_api import ApiError, Client, Limits
from .problem import MachineProblem

_PARALLEL_REQUESTS = 4
_MAX_BYTES = 32 << 20
"""Maximum size of a response."""
_LIMITS = Limits(most=64 << 20)
"""Those of the API's responses, of which ``keep`` leaves only some fields."""
_TOO_LARGE: Mapping[str, Any] = {"status": -6, "body": None, "error": "the response is too large"}
_DOT = re.compile(r"(?<!\\)\.")


def main(options: Mapping[str, Any]) -> None:
    """Process requests until standard input ends. The option ``kubeconfig`` is the path of one."""
    path = str(options["kubeconfig"])
    config = kubeconfig.load(path)
    ca = _ca_of(config)
    output_lock, local = threading.Lock(), threading.local()

    def respond(line: str) -> None:
        request = json.loads(line)
        if request["method"] == "LOCK":
            response: dict[str, Any] = {"status": 200, "body": command_lock.holder(), "error": ""}
        elif config is None:
            response = {"status": -1, "body": None, "error": f"{path} does not exist on this machine"}
        elif request.get("ca") and request["ca"] != ca:
            response = {"status": -4, "body": None, "error": "it belongs to another cluster"}
        else:
            if not hasattr(local, "client"):
                local.client = Client(config, patience_s=-1, limits=_LIMITS)
            response = _call(local.client, request)
        response["ca"] = ca
        text = json.dumps({"id": request["id"], "time": time.time(), **response})
        if len(text) > _MAX_BYTES:
            text = json.dumps({"id": request["id"], "time": time.time(), **_TOO_LARGE, "ca": ca})
        with output_lock:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    with ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
        for line in sys.stdin:
            if line.strip():
                pool.submit(respond, line)


def _ca_of(config: kubeconfig.Kubeconfig | None) -> str:
    """The hash of the CA in a kubeconfig, "" for an invalid one."""
    try:
        return config.ca_hash if config else ""
    except MachineProblem:
        return ""


def _call(client: Client, request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        body = client.call(
            str(request["method"]), str(request["path"]), request.get("body"), None, str(request["type"])
        )
    except ApiError as error:
        if error.is_too_large:
            return {**_TOO_LARGE}
        return {"status": error.status, "body": None, "error": str(error)}
    keep = request.get("keep")
    if keep and isinstance(body, dict) and "items" in body:
        body["items"] = [pruned(item, keep) for item in body["items"]]
    return {"status": 200, "body": body, "error": ""}


def pruned(item: Mapping[str, Any], keep: list[str]) -> dict[str, Any]:
    """``item`` with only the fields at the dotted paths ``keep``; a path leads through the items of a list."""
    fields: dict[str, Any] = {}
    for path in keep:
        inner = fields
        for name in _DOT.split(path):
            inner = inner.setdefault(name.replace("\\.", "."), {})
    result: dict[str, Any] = _kept(item, fields)
    return result


def _kept(value: Any, fields: Mapping[str, Any]) -> Any:
    if not fields:
        return value
    if isinstance(value, list):
        return [_kept(each, fields) for each in value if isinstance(each, Mapping)]
    found = {name: (value[name], inner) for name, inner in fields.items() if name in value}
    # The value of an inner path that is neither an object nor a list has no such field.
    return {
        name: _kept(each, inner) for name, (each, inner) in found.items() if not inner or isinstance(each, (dict, list))
    }
