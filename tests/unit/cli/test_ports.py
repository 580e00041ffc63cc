"""gpunodes ports, and what the documentation says of ports."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from gpunodes.cli.ports import command
from gpunodes.planner import firewall
from gpunodes.planner.ports import all_ports

ROOT = Path(__file__).parents[3]


def test_every_port_is_listed_with_who_must_reach_it() -> None:
    output = CliRunner().invoke(command, []).output
    for port in all_ports():
        (line,) = [line for line in output.splitlines() if line.startswith(f"{port.text} ")]
        assert firewall.who(port) in line


def test_the_document() -> None:
    document = json.loads(CliRunner().invoke(command, ["--json"]).output)
    assert document["schema"] == "gpunodes.ports/1"
    found = {(each["protocol"], each["port"]): each for each in document["ports"]}
    assert len(found) == len(all_ports())
    assert found["udp", "8472"] == {
        "port": "8472",
        "protocol": "udp",
        "on": "node",
        "from": "nodes",
        "listener": "flannel.1",
        "purpose": "the pod network: flannel's VXLAN",
    }


def test_the_quick_start_names_the_ports_that_others_must_reach() -> None:
    text = (ROOT / "docs/quickstart.md").read_text()
    assert [
        port.text for port in all_ports() if port.from_ in {"users", "cluster", "nodes"} and port.port not in text
    ] == []
