"""Runs a cell in a Jupyter server by its API, as a browser does: a kernel of its own, which is removed afterwards.

Source: jupyter-server.readthedocs.io, "The REST API" and "WebSocket kernel wire protocols"; jupyter-client's
"Messaging in Jupyter", version 5. What the server sends is data: it is neither run nor used to build a URL.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from gpunodes import shape
from gpunodes.engine.deadline import LoopbackConnection
from gpunodes.engine.jupyter.websocket import WebSocket, WebSocketError
from gpunodes.errors import GpunodesError
from gpunodes.model import printable

_CALL_S = 60.0
_MOST = 1 << 20
_MOST_OUTPUT = 64 << 10
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MESSAGE = {
    "header": {"msg_type": str},
    "parent_header": shape.Optional(shape.Maybe({"msg_id": shape.Optional(str)})),
    "content": shape.Optional(
        shape.Maybe({
            "name": shape.Optional(object),
            "text": shape.Optional(str),
            "ename": shape.Optional(str),
            "evalue": shape.Optional(str),
            "execution_state": shape.Optional(str),
        })
    ),
}  # fmt: skip


def run(port: int, token: str, code: str, limit_s: float) -> str:
    """The standard output of a cell in the server at this loopback port; raises GpunodesError."""
    headers = {"Authorization": f"token {token}"}
    deadline = time.monotonic() + limit_s
    kernel = _call(port, "POST", "/api/kernels", headers, "{}").get("id")
    if not isinstance(kernel, str) or not _ID.fullmatch(kernel):
        raise _failed("the server names no kernel that it has started")
    try:
        path = f"/api/kernels/{kernel}/channels?session_id={secrets.token_hex(8)}"
        with WebSocket(port, path, headers, min(limit_s, _CALL_S)) as channel:
            return _execute(channel, code, deadline)
    except OSError as error:
        raise _failed(str(error)) from error
    finally:
        with contextlib.suppress(GpunodesError):
            _call(port, "DELETE", f"/api/kernels/{kernel}", headers)


def _execute(channel: WebSocket, code: str, deadline: float) -> str:
    """Send the code, and collect its output until the kernel is idle again."""
    number = secrets.token_hex(16)
    header = {"msg_id": number, "username": "gpunodes", "session": number, "msg_type": "execute_request"}
    content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False, "stop_on_error": True}
    message = {
        "channel": "shell",
        "header": {**header, "version": "5.3", "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
        "parent_header": {},
        "metadata": {},
        "content": content,
        "buffers": [],
    }
    channel.send(json.dumps(message))
    output = ""
    while True:
        found = _parsed(channel.receive(deadline))
        given: Mapping[str, Any] = found.get("content") or {}
        if (found.get("parent_header") or {}).get("msg_id") != number:
            continue
        kind = found["header"]["msg_type"]
        if kind == "error":
            raise _failed(f"the cell failed: {given.get('ename')}: {given.get('evalue')}"[:500])
        if kind == "stream" and given.get("name") == "stdout":
            output += str(given.get("text") or "")
            if len(output) > _MOST_OUTPUT:
                raise _failed("the cell prints too much")
        if kind == "status" and given.get("execution_state") == "idle":
            return output


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if wrong := shape.wrong(found, _MESSAGE):
        raise WebSocketError(wrong)
    return dict(found)


def _call(port: int, method: str, path: str, headers: Mapping[str, str], body: str | None = None) -> dict[str, Any]:
    """The JSON document of a response, {} without one."""
    connection = LoopbackConnection(port, _CALL_S)
    try:
        connection.request(method, path, body, {**headers, "Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read(_MOST)
    except (OSError, http.client.HTTPException) as error:
        raise _failed(f"{method} {path} has no response: {error or type(error).__name__}") from error
    finally:
        connection.close()
    if response.status >= http.client.BAD_REQUEST:
        raise _failed(f"{method} {path}: {response.status} {http.client.responses.get(response.status, '')}".strip())
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _failed(f"{method} {path}: the response is not valid")
    return found


def _failed(found: str) -> GpunodesError:
    return GpunodesError(
        f"no cell runs in the notebook: {printable(found)}",
        "a Jupyter server with a kernel for Python",
        "open it with `gpunodes jupyter open`, and run a cell there",
    )
