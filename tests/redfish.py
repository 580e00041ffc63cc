"""A faulty BMC: a minimal Redfish service."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ROOT, SYSTEMS, SYSTEM = "/redfish/v1/", "/redfish/v1/Systems", "/redfish/v1/Systems/1"
RESET = f"{SYSTEM}/Actions/ComputerSystem.Reset"
DOCUMENTS: dict[str, dict[str, Any]] = {
    ROOT: {"Id": "RootService", "Name": "fake", "RedfishVersion": "1.6.0", "Systems": {"@odata.id": SYSTEMS}},
    SYSTEMS: {"Name": "systems", "Members": [{"@odata.id": SYSTEM}], "Members@odata.count": 1},
    SYSTEM: {
        "Id": "1",
        "Name": "gpu-1",
        "Status": {},
        "Actions": {
            "#ComputerSystem.Reset": {
                "target": RESET,
                "ResetType@Redfish.AllowableValues": ["On", "ForceOff", "GracefulShutdown", "ForceRestart"],
            }
        },
    },
}
INTERFACES = f"{SYSTEM}/EthernetInterfaces"
DRIP_S = 0.1


def held() -> None:
    """Confirm a lock that is held, before an order."""


class _Bmc(BaseHTTPRequestHandler):
    """``manner``: ``refuses`` rejects every reset; ``hangs-up`` closes the connection on a reset; ``loses`` obeys, and
    its response is lost; ``lies`` accepts it and still reports the earlier ``state``; ``obeys`` changes the state;
    ``drips`` sends a response body forever, byte by byte; ``drips-headers`` the same with headers; ``hangs`` obeys, but
    its system does not end when asked to; ``relapses`` hangs, and reports once that it is off when its power is
    switched off, but never again.

    ``odd`` has raw responses by path: status, headers and body. ``hardware`` has the identities that it reports of its
    machine: ``UUID``, ``SerialNumber``, and ``macs``. ``orders`` and ``resets`` record the paths and types of resets.
    """

    manner = "lies"
    state = "Off"
    odd: Mapping[str, tuple[int, Mapping[str, str], bytes]]
    orders: list[str]
    hardware: Mapping[str, Any]
    resets: list[str]

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.manner.startswith("drips"):
            self.drip()
            return
        documents = DOCUMENTS | self.machine()
        # Before the response: what comes after it may come after the next request, in another thread.
        if self.manner == "relapses" and self.path == SYSTEM:
            type(self).state = "On"
        self.answer(200, documents.get(self.path) or documents.get(f"{self.path}/") or {})

    def machine(self) -> dict[str, dict[str, Any]]:
        """The documents on its machine."""
        found = {key: value for key, value in self.hardware.items() if key != "macs"}
        documents = {SYSTEM: {**DOCUMENTS[SYSTEM], "PowerState": self.state, **found}}
        if macs := self.hardware.get("macs"):
            paths = [f"{INTERFACES}/{number}" for number in range(len(macs))]
            members = [{"@odata.id": path} for path in paths]
            documents[SYSTEM]["EthernetInterfaces"] = {"@odata.id": INTERFACES}
            documents[INTERFACES] = {"Name": "interfaces", "Members": members, "Members@odata.count": len(members)}
            documents |= {
                path: {"Id": "1", "Name": "nic", "MACAddress": mac} for path, mac in zip(paths, macs, strict=True)
            }
        return documents

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == RESET:
            self.orders.append(self.path)
            reset = json.loads(body)["ResetType"]
            self.resets.append(reset)
            obeys = self.manner in {"obeys", "loses"} or reset != "GracefulShutdown"
            if obeys and self.manner in {"obeys", "loses", "hangs", "relapses"}:
                type(self).state = "Off" if reset in {"ForceOff", "GracefulShutdown"} else "On"
        if self.manner == "refuses":
            self.answer(500, {"error": {"code": "Base.1.0.GeneralError", "message": "the fuse is blown"}})
        elif self.manner in {"hangs-up", "loses"} and self.path == RESET:
            self.close_connection = True
        else:
            self.answer(200, {})

    def answer(self, status: int, document: dict[str, Any]) -> None:
        status, headers, data = self.odd.get(self.path, (status, {}, json.dumps(document).encode()))
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def drip(self) -> None:
        self.send_response(200)
        if self.manner == "drips":
            self.send_header("Content-Length", "1000000")
            self.end_headers()
        else:
            self.flush_headers()
        try:
            while True:
                self.wfile.write(b" " if self.manner == "drips" else b"x")
                time.sleep(DRIP_S)
        except OSError:
            self.close_connection = True


def fake(
    manner: str,
    context: ssl.SSLContext | None = None,
    state: str = "Off",
    odd: Mapping[str, tuple[int, Mapping[str, str], bytes]] | None = None,
    orders: list[str] | None = None,
    hardware: Mapping[str, Any] | None = None,
    resets: list[str] | None = None,
    address: str = "127.0.0.1",
) -> ThreadingHTTPServer:
    """Serve such a BMC on this machine until ``shutdown`` is called; ``orders`` and ``resets`` receive its resets."""
    more = {"manner": manner, "state": state, "odd": odd or {}, "orders": [] if orders is None else orders}
    more |= {"hardware": hardware or {}, "resets": [] if resets is None else resets}
    family = {"address_family": socket.AF_INET6 if ":" in address else socket.AF_INET}
    server: ThreadingHTTPServer = type("Server", (ThreadingHTTPServer,), family)(
        (address, 0), type("Bmc", (_Bmc,), more)
    )
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


def dripping_handshake() -> socket.socket:
    """A port with a TLS handshake that is sent byte by byte and never completes, until the socket is closed."""
    listening = socket.create_server(("127.0.0.1", 0))

    def drip(peer: socket.socket) -> None:
        with peer:
            try:
                # The header of a TLS handshake record of 16 KiB.
                peer.sendall(b"\x16\x03\x03\x40\x00")
                while True:
                    peer.sendall(b"\x02")
                    time.sleep(DRIP_S)
            except OSError:
                return

    def serve() -> None:
        while True:
            try:
                peer, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=drip, args=(peer,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return listening
