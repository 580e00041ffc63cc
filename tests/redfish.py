"""A BMC that misbehaves: a Redfish service in little."""

from __future__ import annotations

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Bmc(BaseHTTPRequestHandler):
    """It ``refuses`` every reset, or ``lies``: takes it, and says ``state`` as before."""

    manner = "lies"
    state = "Off"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        system = "/redfish/v1/Systems/1"
        documents: dict[str, dict[str, Any]] = {
            "/redfish/v1/": {"Id": "RootService", "Name": "fake", "RedfishVersion": "1.6.0"}
            | {"Systems": {"@odata.id": "/redfish/v1/Systems"}},
            "/redfish/v1/Systems": {"Name": "systems", "Members": [{"@odata.id": system}], "Members@odata.count": 1},
            system: {"Id": "1", "Name": "gpu-1", "PowerState": self.state, "Status": {}}
            | {
                "Actions": {
                    "#ComputerSystem.Reset": {
                        "target": f"{system}/Actions/ComputerSystem.Reset",
                        "ResetType@Redfish.AllowableValues": ["On", "ForceOff", "ForceRestart"],
                    }
                }
            },
        }
        self.answer(200, documents.get(self.path) or documents.get(f"{self.path}/") or {})

    def do_POST(self) -> None:
        if self.manner == "refuses":
            self.answer(500, {"error": {"code": "Base.1.0.GeneralError", "message": "the fuse is blown"}})
        else:
            self.answer(200, {})

    def answer(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def fake(manner: str, context: ssl.SSLContext | None = None, state: str = "Off") -> ThreadingHTTPServer:
    """Serve such a BMC on this machine until ``shutdown`` is called."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bmc", (_Bmc,), {"manner": manner, "state": state}))
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
