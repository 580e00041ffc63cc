"""systemd services."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from .. import causes
from ..causes import Program
from ..problem import MachineProblem
from ..process import must, run
from ..report import Difference
from .changes import Changes


def start_all(changes: Changes) -> None:
    """Enable and start the services of the desired state; restart those whose files or packages have changed.

    Services that are to be off are stopped and disabled.
    """
    found = states([service.name for service in changes.spec.services])
    for service in changes.spec.services:
        state = found.get(service.name, {"enabled": False, "active": False})
        wanted = service.started and (not service.when_exists or os.path.exists(service.when_exists))
        changes.ledger.note_service(service.name, state)
        if service.off:
            _turn_off(changes, service.name, state)
            continue
        restart = service.name in changes.ledger.restarts
        if restart and not changes.check:
            run(["systemctl", "daemon-reload"])
        title = f"service {service.name}"
        enabled = Difference(title, {"enabled": False}, {"enabled": True})
        restarted = Difference(title, {"started with": "earlier files"}, {"started with": "present files"})
        if not state["enabled"] and changes.step(f"enable {service.name}", enabled):
            must(["systemctl", "enable", service.name])
        if wanted and changes.reboot and not state["active"]:
            continue  # it starts with the reboot
        if wanted and not state["active"]:
            if changes.step(f"start {service.name}", Difference(title, {"active": False}, {"active": True})):
                start(service.name, "start")
        elif wanted and restart and changes.step(f"restart {service.name}", restarted):
            start(service.name, "restart")
        changes.ledger.restarted(service.name)


def _turn_off(changes: Changes, name: str, state: Mapping[str, bool]) -> None:
    """Stop and disable a service that its package has started; one that was on before gpunodes stays on."""
    title, before = f"service {name}", changes.ledger.services[name]
    stopped = Difference(title, {"active": True}, {"active": False})
    disabled = Difference(title, {"enabled": True}, {"enabled": False})
    if state["active"] and not before["active"] and changes.step(f"stop {name}", stopped):
        must(["systemctl", "stop", name])
        run(["systemctl", "reset-failed", name])
    if state["enabled"] and not before["enabled"] and changes.step(f"disable {name}", disabled):
        must(["systemctl", "disable", name])
    changes.ledger.restarted(name)


def start(name: str, verb: str) -> None:
    """Start or restart a service; raises MachineProblem with the first cause in its journal if it fails."""
    run(["systemctl", "reset-failed", name])
    began = time.time()
    result = run(["systemctl", verb, name], 300)
    if not result.ok:
        journal = [
            "journalctl",
            "--unit",
            name,
            f"--since=@{began - 1:.0f}",
            "--lines=500",
            "--output=cat",
            "--no-pager",
        ]
        output = run(journal).out
        cause = causes.find(Program.SERVICE, output) or causes.of(Program.SERVICE, result.text)
        see = f"see `journalctl -u {name}`"
        remedy = f"{cause.remedy}; {see}" if cause.remedy else see
        raise MachineProblem(f"{name} does not start: {cause.found}", "", remedy, f"{result.text}\n{output}")


def states(names: Sequence[str]) -> dict[str, dict[str, bool]]:
    """Whether each service is enabled and active; a service that does not exist is neither."""
    properties = "Id,UnitFileState,ActiveState"
    return parse(run(["systemctl", "show", f"--property={properties}", "--", *(f"{n}.service" for n in names)]).out)


def parse(listing: str) -> dict[str, dict[str, bool]]:
    """Parse ``systemctl show``: blocks of NAME=VALUE, separated by empty lines."""
    found = {}
    for block in listing.strip().split("\n\n"):
        values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if "Id" in values:
            found[values["Id"].rpartition(".service")[0]] = {
                # A static unit cannot be enabled: another unit starts it.
                "enabled": values.get("UnitFileState", "").startswith(("enabled", "static")),
                "active": values.get("ActiveState") in {"active", "activating", "reloading"},
            }
    return found
