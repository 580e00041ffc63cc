"""The ports of a cluster, for people and as a JSON document."""

from __future__ import annotations

from gpunodes.planner import firewall
from gpunodes.planner.ports import Port, all_ports
from gpunodes.views import document as documents
from gpunodes.views.text import table

ON = {"control_plane": "the control plane", "node": "every machine", "storage": "the storage server"}


def text(columns: int | None = None) -> str:
    """A table of ports, those that must be open first, for a screen of ``columns``, if any."""
    rows = [("PORT", "ON", "FROM", "FOR")]
    rows += [(port.text, ON[port.on], firewall.who(port), port.purpose) for port in sorted_ports()]
    return table(rows, columns)


def sorted_ports() -> list[Port]:
    """All ports; those that only the machine itself uses come last."""
    return sorted(all_ports(), key=lambda port: port.from_ == "machine")


def document() -> str:
    """``gpunodes.ports/1``"""
    return documents.dump(
        {
            "schema": "gpunodes.ports/1",
            "ports": [
                {
                    "port": port.port,
                    "protocol": port.protocol,
                    "on": port.on,
                    "from": port.from_,
                    "listener": port.listener or port.device,
                    "purpose": port.purpose,
                }
                for port in sorted_ports()
            ],
        }
    )
