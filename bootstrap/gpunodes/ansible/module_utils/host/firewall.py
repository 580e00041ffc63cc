"""Opens the ports of a node in the machine's active firewalls, and removes the rules that are no longer needed.

Rules only accept, and are in front of the administrator's own, which stay as they are: what was reachable, SSH above
all, stays reachable. An inactive firewall is not touched.
"""

from __future__ import annotations

import os

from .. import disk, ledger
from ..firewalls import firewalld, nftables, ufw, wanted
from ..problem import MachineProblem
from ..process import must
from ..report import Difference
from . import files
from .changes import Changes
from .spec import File, Firewall

_ADDED = "added by gpunodes"


def open_ports(changes: Changes, firewall: Firewall) -> None:
    """Bring gpunodes' rules in all active firewalls into their desired state; raises MachineProblem if one refuses."""
    wanted.check(firewall.ports, firewall.devices, firewall.sources, firewall.pods)
    if ufw.is_active():
        _ufw(changes, firewall)
    if firewalld.is_active():
        _firewalld(changes, firewall)
    if chains := nftables.chains():
        _nftables(changes, firewall, chains)


def note_docker(changes: Changes) -> None:
    """Record what Docker will add to firewalld's configuration, before it is installed."""
    if not os.path.isdir(firewalld.ETC):
        return
    for path in firewalld.docker_files():
        if not os.path.lexists(path):
            changes.ledger.note_file(path, ledger.OldFile(None))


def _ufw(changes: Changes, firewall: Firewall) -> None:
    present, needed = ufw.added(), ufw.rules(firewall)
    # The same rule of the administrator is theirs: it stays at a reset.
    missing = [rule for rule in needed if rule not in present and not ufw.is_limited(rule, present)]
    ufw.check_vrrp(missing)
    for rule in missing:
        if opposite := ufw.opposed(rule, present):
            raise MachineProblem(
                f"ufw has the rule `ufw {opposite}`",
                f"`ufw {rule}`, which a node needs",
                f"delete it (`ufw delete {opposite}`), or set gpunodes_firewall to leave",
            )
    recorded = changes.ledger.firewalls.get("ufw", ())
    stale = [rule for rule in recorded if rule not in needed and present.get(rule) == wanted.MARK]
    if not missing and not stale:
        return
    changes.ledger.note_firewall("ufw", missing)
    difference = Difference("rules of ufw", dict.fromkeys(stale, _ADDED), dict.fromkeys(missing, _ADDED))
    if changes.step("open the ports of the node in ufw", difference):
        for rule in missing:
            ufw.add(rule)
        ufw.delete(stale)
        changes.ledger.forget_firewall("ufw", stale)
        changes.save()


def _firewalld(changes: Changes, firewall: Firewall) -> None:
    texts = firewalld.files(firewall)
    new = any(disk.read(path) != text for path, text in texts.items() if "/policies/" in path)
    reload = new or not firewalld.is_loaded(firewall)
    lost = firewalld.lost_by_reload() if reload else ""
    if lost and lost != firewalld.RUNNING:
        raise MachineProblem(
            f"a reload of firewalld would remove {lost}",
            "a firewalld whose configuration is permanent",
            "make it permanent (`firewall-cmd --runtime-to-permanent`), remove it, or open the ports yourself and set "
            "gpunodes_firewall to leave",
        )
    changes.ledger.note_firewall("firewalld", ["policies"])
    for path, text in texts.items():
        files.write(changes, File(path, text))
    if lost:
        changes.notes.append(
            f"the ports in firewalld open with its next reload or start: a reload now would remove {lost}"
        )
    elif reload:
        difference = Difference("firewalld", {"policies of gpunodes": "not loaded"}, {"policies of gpunodes": "loaded"})
        if changes.step("reload firewalld", difference):
            firewalld.reload()
    else:
        _sets(changes, firewall)


def _sets(changes: Changes, firewall: Firewall) -> None:
    """Bring the running firewalld's sets of addresses into their desired state, without a reload."""
    for version, needed in firewalld.sets(firewall).items():
        present = firewalld.entries(version)
        missing = [entry for entry in needed if entry not in present]
        stale = [entry for entry in present if entry not in needed]
        if missing or stale:
            name = firewalld.set_name(version)
            difference = Difference(f"set {name}", dict.fromkeys(stale, "in it"), dict.fromkeys(missing, "in it"))
            if changes.step(f"change the set {name} of firewalld", difference):
                firewalld.update(version, missing, stale)


def _nftables(changes: Changes, firewall: Firewall, chains: list[nftables.Chain]) -> None:
    if not nftables.is_persistent():
        raise MachineProblem(
            f"the chain {chains[0]} of nftables drops packets, and the service nftables, which would load gpunodes' "
            "rules at boot, is not enabled",
            "a ruleset that the service nftables loads",
            "enable it, or open the ports that `gpunodes ports` lists yourself and set gpunodes_firewall to leave",
        )
    # In this order: at a boot between the two, the drop-in without the file only leaves a line in the journal.
    written = [
        files.write(changes, File(nftables.DROP_IN, nftables.DROP_IN_TEXT)),
        files.write(changes, File(nftables.FILE, nftables.file_text(chains, firewall))),
    ]
    if written[0] and not changes.check:
        must(["systemctl", "daemon-reload"])
    if nftables.is_loaded(chains, firewall):
        return
    changes.ledger.note_firewall("nftables", map(str, chains))
    before = {str(chain): ", ".join(chain.jumps.values()) for chain in chains if chain.jumps}
    after = {str(chain): nftables.mark(chain, firewall) for chain in chains}
    difference = Difference("rules in chains of nftables", before, after)
    if changes.step(f"open the ports of the node in nftables ({', '.join(map(str, chains))})", difference):
        nftables.load(nftables.script(chains, firewall))
