"""Rulesets of nftables that an administrator wrote: gpunodes' own chains in their tables, and a jump to these.

A packet must be accepted by every base chain of its hook: an accept in a table of our own does not override the drop of
another one. So each chain that drops what nothing accepts gets a jump as its first rule, to a chain that only accepts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import disk
from ..host.spec import Firewall
from ..process import must, run
from .wanted import FAMILIES, MARK, NAMES_OF_VRRP, OPEN_VRRP, VRRP, of_family, split

SERVICE = "nftables"
FILE = "/etc/gpunodes/firewall.nft"
DROP_IN = "/etc/systemd/system/nftables.service.d/50-gpunodes.conf"
# The service loads the administrator's ruleset, which flushes everything, at boot and whenever it is reloaded. A
# failure (they may have renamed a chain) is no failure of their service.
DROP_IN_TEXT = f"""\
# Managed by gpunodes: its rules are added to the ruleset after each load.
[Service]
ExecStartPost=-/usr/sbin/nft -f {FILE}
ExecReload=-/usr/sbin/nft -f {FILE}
"""
HOOKS = ("input", "forward")
_FAMILIES = {"ip": (4,), "ip6": (6,), "inet": FAMILIES}
_MADE_BY_PROGRAMS = re.compile(
    r"kube-proxy|firewalld|flannel-\S+|cni\S*|docker\S*|libvirt\S*|f2b-\S+|crowdsec\S*|nm-\S+|podman\S*|netavark\S*"
)
"""Tables of programs, which make them anew: their chains are none of an administrator's."""
_OF_IPTABLES = {"filter", "nat", "mangle", "raw", "security"}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,120}")


@dataclass(frozen=True)
class Chain:
    """A base chain that drops what nothing accepts."""

    family: str
    table: str
    name: str
    hook: str
    jumps: Mapping[int, str] = field(default_factory=dict)
    """gpunodes' jumps in it: their comments by handle."""

    def __str__(self) -> str:
        return f"{self.family} {self.table} {self.name}"

    @property
    def own(self) -> str:
        """The name of gpunodes' chain in its table."""
        return f"{MARK}_{self.hook}"


def chains() -> list[Chain]:
    """The chains of the administrator's ruleset that gpunodes must add to; none without nft or a ruleset."""
    return [chain for rules in _tables() for chain in dropping(rules)]


def is_persistent() -> bool:
    """Whether the service nftables loads a ruleset at boot: only then gpunodes can add its rules after it."""
    return run(["systemctl", "is-enabled", "--quiet", SERVICE]).ok


def _tables() -> Iterator[list[Mapping[str, Any]]]:
    """The content of each table of the administrator, as nft's JSON (libnftables-json(5))."""
    listing = run(["nft", "-j", "list", "tables"])
    if not listing.ok:
        return
    for item in _items(listing.out):
        table = item.get("table", {})
        family, name = str(table.get("family")), str(table.get("name"))
        if family in _FAMILIES and _NAME.fullmatch(name) and not _MADE_BY_PROGRAMS.fullmatch(name):
            found = run(["nft", "-j", "list", "table", family, name])
            if found.ok:
                yield _items(found.out)


def _items(text: str) -> list[Mapping[str, Any]]:
    try:
        return [item for item in json.loads(text)["nftables"] if isinstance(item, dict)]
    except (ValueError, KeyError, TypeError):
        return []


def _is_of_iptables(chain: Mapping[str, Any]) -> bool:
    """Whether iptables made a base chain: their names are in capitals."""
    return chain["family"] != "inet" and chain["table"] in _OF_IPTABLES and str(chain["name"]).isupper()


def dropping(items: Sequence[Mapping[str, Any]]) -> list[Chain]:
    """The base chains of a table for incoming and forwarded packets that drop what nothing accepts.

    A chain that only drops some packets, such as those of banned addresses, is left alone.
    """
    rules = [item["rule"] for item in items if "rule" in item]
    found = []
    for item in items:
        chain = item.get("chain", {})
        if chain.get("hook") not in HOOKS or not _NAME.fullmatch(str(chain.get("name"))) or _is_of_iptables(chain):
            continue
        if chain.get("policy") == "drop" or _drops_the_rest(chain["name"], rules, set()):
            jumps = {
                rule["handle"]: str(rule.get("comment", ""))
                for rule in rules
                if rule["chain"] == chain["name"] and f"{MARK}_{chain['hook']}" in _targets(rule["expr"])
            }
            found.append(Chain(chain["family"], chain["table"], chain["name"], chain["hook"], jumps))
    return found


def _drops_the_rest(name: str, rules: Sequence[Mapping[str, Any]], seen: set[str]) -> bool:
    """Whether a chain, or one that it jumps to, has a rule that drops every packet that reaches it."""
    seen.add(name)
    for rule in rules:
        if rule["chain"] != name:
            continue
        verdicts = {key for part in rule["expr"] for key in part}
        if verdicts & {"drop", "reject"} and verdicts <= {"drop", "reject", "counter", "log"}:
            return True
        targets = [target for target in _targets(rule["expr"]) if target not in seen]
        if any(_drops_the_rest(target, rules, seen) for target in targets):
            return True
    return False


def _targets(part: Any) -> Iterator[str]:
    """The chains that an expression jumps to, also by a map of verdicts."""
    if isinstance(part, list):
        for each in part:
            yield from _targets(each)
    elif isinstance(part, dict):
        for key, value in part.items():
            if key in {"jump", "goto"} and isinstance(value, dict):
                yield str(value.get("target"))
            else:
                yield from _targets(value)


def body(hook: str, family: str, wanted: Firewall) -> list[str]:
    """The rules of gpunodes' chain for a hook, in a table of this family."""
    versions = _FAMILIES[family]
    found = []
    if hook == "input":
        for port, sources in wanted.ports.items():
            protocol, number = split(port)
            rule = f"meta l4proto {number} accept" if port == VRRP else f"{protocol} dport {number} accept"
            found += _from(sources, versions, rule) if sources else [rule]
        return found
    devices = _set(f'"{device}"' for device in wanted.devices)
    if wanted.devices:
        found += [f"iifname {devices} accept", f"oifname {devices} ct state established,related accept"]
        found += _from([*wanted.sources, *wanted.pods], versions, f"oifname {devices} accept")
    return found


def _from(sources: Iterable[str], versions: Iterable[int], rule: str) -> list[str]:
    names = {4: "ip", 6: "ip6"}
    texts = [*sources]
    return [
        f"{names[version]} saddr {_set(each)} {rule}" for version in versions if (each := of_family(texts, version))
    ]


def _set(each: Iterable[str]) -> str:
    return f"{{ {', '.join(each)} }}"


def mark(chain: Chain, wanted: Firewall) -> str:
    """The comment of the jump: it tells one version of the rules from another."""
    text = "\n".join(body(chain.hook, chain.family, wanted))
    return f"{MARK} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def script(targets: Sequence[Chain], wanted: Firewall) -> str:
    """The commands that add the rules to a ruleset, with or without earlier ones; all or none take effect."""
    lines = []
    for chain in targets:
        where = f"{chain.family} {chain.table}"
        rules = "".join(f"    {rule}\n" for rule in body(chain.hook, chain.family, wanted))
        lines += [
            f"add chain {where} {chain.own}",
            f"flush chain {where} {chain.own}",
            f"table {where} {{\n  chain {chain.own} {{\n{rules}  }}\n}}",
            *(f"delete rule {where} {chain.name} handle {handle}" for handle in chain.jumps),
            f'insert rule {where} {chain.name} jump {chain.own} comment "{mark(chain, wanted)}"',
        ]
    return "\n".join(lines) + "\n"


def file_text(targets: Sequence[Chain], wanted: Firewall) -> str:
    """The commands for a ruleset that was just loaded, without any rule of gpunodes."""
    fresh = [Chain(chain.family, chain.table, chain.name, chain.hook) for chain in targets]
    head = "# Managed by gpunodes: the ports of a node, added to the ruleset of the service nftables.\n"
    return head + script(fresh, wanted)


def load(text: str) -> None:
    """Run commands of nft; raises MachineProblem, and changes nothing, if it rejects one."""
    must(["nft", "-c", "-f", "-"], stdin=text)
    must(["nft", "-f", "-"], stdin=text)


def removal() -> str:
    """The commands that remove gpunodes' chains and the jumps to them, "" if there are none."""
    lines = []
    for items in _tables():
        rules = [item["rule"] for item in items if "rule" in item]
        own = [
            item["chain"] for item in items if item.get("chain", {}).get("name") in {f"{MARK}_{hook}" for hook in HOOKS}
        ]
        for chain in own:
            where = f"{chain['family']} {chain['table']}"
            lines += [
                f"delete rule {where} {rule['chain']} handle {rule['handle']}"
                for rule in rules
                if chain["name"] in _targets(rule["expr"])
            ]
            lines += [f"flush chain {where} {chain['name']}", f"delete chain {where} {chain['name']}"]
    return "\n".join(lines) + "\n" if lines else ""


def open_ports() -> list[str]:
    """The ports that any rule for incoming packets accepts, ``*`` for all; whose packets, is not examined."""
    found: list[str] = []
    for items in _tables():
        hooks = {item["chain"]["name"]: item["chain"].get("hook") for item in items if "chain" in item}
        for item in items:
            rule = item.get("rule", {})
            verdicts = {key for part in rule.get("expr", ()) for key in part}
            # A chain without a hook may be reached from an input chain.
            if "accept" in verdicts and hooks.get(rule.get("chain")) in {None, "input"}:
                found += _accepted(rule["expr"])
    return found


def _accepted(expression: Sequence[Mapping[str, Any]]) -> list[str]:
    """The ports in the matches of a rule; ``*`` for a rule that only names sources."""
    matches = [part["match"] for part in expression if "match" in part]
    for match in matches:
        payload = match.get("left", {}).get("payload", {}) if isinstance(match.get("left"), dict) else {}
        if payload.get("field") == "dport" and match.get("op") in {"==", "in"}:
            protocol = payload.get("protocol")
            suffix = f"/{protocol}" if protocol in {"tcp", "udp"} else ""
            return [f"{number}{suffix}" for number in _numbers(match["right"])]
        if _protocol(match, payload) in NAMES_OF_VRRP and match.get("op") in {"==", "in"}:
            return [OPEN_VRRP]
    fields = [
        (match.get("left") or {}).get("payload", {}).get("field")
        for match in matches
        if isinstance(match.get("left"), dict)
    ]
    return ["*"] if fields and all(each == "saddr" for each in fields) else []


def _protocol(match: Mapping[str, Any], payload: Mapping[str, Any]) -> str | int:
    """The protocol that a match requires (``meta l4proto``, ``ip protocol``), "" for another match."""
    left = match.get("left")
    key = left.get("meta", {}).get("key") if isinstance(left, dict) else ""
    wanted = match.get("right") if key == "l4proto" or payload.get("field") == "protocol" else ""
    return wanted if isinstance(wanted, (str, int)) else ""


def _numbers(right: Any) -> list[str]:
    if isinstance(right, int):
        return [str(right)]
    if isinstance(right, dict):
        if "range" in right:
            return ["-".join(map(str, right["range"]))]
        return [number for each in right.get("set", ()) for number in _numbers(each)] if "set" in right else []
    return []


def is_loaded(targets: Sequence[Chain], wanted: Firewall) -> bool:
    """Whether each chain has exactly one jump, to the rules as they should be."""
    return all([*chain.jumps.values()] == [mark(chain, wanted)] for chain in targets)


def is_present() -> bool:
    """Whether gpunodes' files exist."""
    return os.path.exists(FILE) and disk.read(DROP_IN) == DROP_IN_TEXT
