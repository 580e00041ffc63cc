"""Stand-in BMCs, and the kubelets of their machines, in a process of their own: what they cost is not measured.

One Redfish service over HTTP on loopback. Each account sees the one system of the machine with its name.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any

from gpunodes.autoscale import plan

from tests.power_fleet import uuid
from tests.redfish import DOCUMENTS, RESET, ROOT, SYSTEM
from tests.repair.apiserver import ApiServer
from tests.repair.autoscaling import SimulatedMachines

PASSWORD = "stand-in"
_SERVICE = f"{ROOT}SessionService"
_SESSIONS = f"{_SERVICE}/Sessions"
_DOCUMENTS = DOCUMENTS | {
    ROOT: DOCUMENTS[ROOT]
    | {"SessionService": {"@odata.id": _SERVICE}, "Links": {"Sessions": {"@odata.id": _SESSIONS}}},
    _SERVICE: {"Id": "SessionService", "Name": "sessions", "Sessions": {"@odata.id": _SESSIONS}},
}


@dataclass(frozen=True)
class Seen:
    """What the BMCs have seen until now."""

    requests: int
    started: int
    on: int


class _Service(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, machines: SimulatedMachines) -> None:
        super().__init__(("127.0.0.1", 0), _Bmc)
        self.machines = machines
        self.requests = 0
        self.mutex = threading.Lock()

    def seen(self) -> Seen:
        orders = list(self.machines.orders)
        return Seen(self.requests, sum(order == "on" for _, order in orders), len(self.machines.on))


class _Bmc(BaseHTTPRequestHandler):
    server: _Service

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        name = self.machine()
        if self.path.rstrip("/") == ROOT.rstrip("/"):
            self.answer(200, _DOCUMENTS[ROOT])
        elif not name:
            self.answer(401, {})
        elif self.path == SYSTEM:
            state = "On" if name in self.server.machines.on else "Off"
            self.answer(200, {**_DOCUMENTS[SYSTEM], "PowerState": state, "UUID": uuid(name)})
        else:
            self.answer(200 if self.path in _DOCUMENTS else 404, _DOCUMENTS.get(self.path, {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        machines = self.server.machines
        if self.path == _SESSIONS:
            right = body.get("Password") == PASSWORD and body.get("UserName") in machines.plan.machines
            more = {"X-Auth-Token": str(body.get("UserName")), "Location": f"{_SESSIONS}/1"} if right else {}
            self.answer(201 if right else 401, {"Id": "1", "Name": "session"}, more)
        elif self.path != RESET or not (name := self.machine()):
            self.answer(401 if self.path == RESET else 404, {})
        else:
            if body["ResetType"] == "On":
                machines.switch_on(name, lambda: None, again=True)
            else:
                machines.switch_off(name, lambda: None, lambda: None)
            self.answer(204, {})

    def do_DELETE(self) -> None:
        self.answer(204, {})

    def machine(self) -> str:
        """The machine of the session, "" without one."""
        name = self.headers.get("X-Auth-Token", "")
        return name if name in self.server.machines.plan.machines else ""

    def answer(self, status: int, document: dict[str, Any], more: dict[str, str] | None = None) -> None:
        with self.server.mutex:
            self.server.requests += 1
        data = b"" if status == 204 else json.dumps(document).encode()
        self.send_response(status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(more or {})}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


def _serve(server: ApiServer, document: dict[str, Any], pipe: Connection) -> None:
    """Until None comes: the port first, then what was seen for each question."""
    service = _Service(SimulatedMachines(server, plan.parse(document)))
    threading.Thread(target=service.serve_forever, daemon=True).start()
    pipe.send(service.server_port)
    while pipe.recv() is not None:
        pipe.send(service.seen())


class Bmcs:
    """The BMCs of the machines in a plan: where they listen, and what they saw."""

    def __init__(self, port: int, pipe: Connection) -> None:
        self.port = port
        self._pipe = pipe

    def settings(self, name: str) -> dict[str, str]:
        """The settings of a machine for its BMC."""
        return {
            "gpunodes_bmc_type": "redfish",
            "gpunodes_bmc_address": f"http://127.0.0.1:{self.port}",
            "gpunodes_bmc_user": name,
            "gpunodes_bmc_verify": "true",
            "gpunodes_bmc_identity": "check",
        }

    def seen(self) -> Seen:
        self._pipe.send("seen")
        found: Seen = self._pipe.recv()
        return found


@contextlib.contextmanager
def running(server: ApiServer, document: dict[str, Any]) -> Iterator[Bmcs]:
    """The BMCs of the machines in a plan's document, whose kubelets register at ``server``."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    # The other processes of the API server's object are nobody else's.
    known = ApiServer(server.folder, server.port, server.kubeconfig)
    process = context.Process(target=_serve, args=(known, document, there), daemon=True)
    process.start()
    try:
        yield Bmcs(here.recv(), here)
    finally:
        with contextlib.suppress(OSError):
            here.send(None)
        process.join(30)
        if process.is_alive():
            process.kill()
            process.join()
