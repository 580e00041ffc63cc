"""The lab's requests to a BMC, with a server that records them."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from gpunodes.errors import GpunodesError
from gpunodes.lab import bmc
from gpunodes.lab.layout import LabMachine, LabRecord, LabRole, System

Requests = list[tuple[str, str, object]]


@pytest.fixture
def server() -> Iterator[tuple[LabRecord, LabMachine, Requests]]:
    seen: Requests = []
    machine = LabMachine(
        "control-1", LabRole.CONTROL_PLANE, "127.0.0.11", "52:54:00:00:00:01", "1-2-3", 4096, 2, 0, "secret"
    )
    expected = "Basic " + base64.b64encode(f"admin:{machine.bmc_password}".encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: object) -> None:
            seen.append((self.command, self.path, body))
            authorized = self.headers["Authorization"] == expected
            text = b'{"PowerState": "On"}' if self.command == "GET" else b""
            self.send_response(200 if authorized else 401)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        # The gateway, where BMCs listen, is the first address of the subnet.
        lab = LabRecord("lab", System.DEBIAN13, "127.0.0.0/24", "tcg", (machine,), "/somewhere/inventory", None)
        yield lab, replace(machine, bmc_port=listening.server_port), seen
        listening.shutdown()
        thread.join()


def test_a_cycle_switches_the_power_off_and_on(server: tuple[LabRecord, LabMachine, Requests]) -> None:
    lab, machine, seen = server
    bmc.power(lab, machine, bmc.LabPowerAction.CYCLE)
    path = f"/redfish/v1/Systems/{machine.uuid}/Actions/ComputerSystem.Reset"
    assert seen == [("POST", path, {"ResetType": "ForceOff"}), ("POST", path, {"ResetType": "On"})]


def test_a_wrong_password_is_an_error(server: tuple[LabRecord, LabMachine, Requests]) -> None:
    lab, machine, _ = server
    with pytest.raises(GpunodesError, match="refused \\(401\\)"):
        bmc.power(lab, replace(machine, bmc_password="guessed"), bmc.LabPowerAction.ON)
