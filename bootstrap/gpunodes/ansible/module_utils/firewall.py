"""Finds and removes the firewall rules of Kubernetes' components and add-ons, and of Docker."""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil

from . import nft_tables
from .process import run

_FAMILIES = ("iptables", "ip6tables")
# The last one asks a program of the add-on network-policy about each packet: without it the kernel drops them all.
_NFT_TABLES = (
    *("kube-proxy", "flannel-ipv4", "flannel-ipv6", "cni_hostport", "cni_plugins_masquerade"),
    "kube-network-policies",
)


def tables() -> list[str] | None:
    """``family name`` of the kernel's nft tables; None without nft."""
    if not _is_installed("nft"):
        return None
    return parse_tables(run(["nft", "list", "tables"]).out)


def parse_tables(listing: str) -> list[str]:
    """``nft list tables``: lines of ``table FAMILY NAME``."""
    return [line[len("table ") :].strip() for line in listing.splitlines() if line.startswith("table ")]


def _rules_of(prefixes: str, other: str) -> re.Pattern[str]:
    """A pattern for lines of ``iptables-save`` that define or use chains with these prefixes, or match ``other``."""
    return re.compile(rf"^:(?:{prefixes})|^-A (?:{prefixes})|\s-[jg] (?:{prefixes})|{other}", re.IGNORECASE)


KUBERNETES = _rules_of("KUBE-|FLANNEL-|CNI-|cali-", r"--comment \"?(?:kubernetes|flanneld|cni)")
DOCKER_LINK = r"docker0|docker_gwbridge|br-[0-9a-f]{12}"
"""The links of Docker's networks: its default network, Swarm's, and those that users create."""
DOCKER = _rules_of("DOCKER", rf"\s-[io] (?:{DOCKER_LINK})\s")


def clean(pattern: re.Pattern[str] = KUBERNETES) -> None:
    """Remove the rules and chains of Kubernetes components, or of Docker; all other rules stay."""
    for family in _FAMILIES:
        if _is_installed(f"{family}-save"):
            rules = run([f"{family}-save"]).out
            remaining = without(rules, pattern)
            if remaining != rules:
                run([f"{family}-restore"], stdin=remaining)
    if pattern is KUBERNETES:
        for family, name in itertools.product(nft_tables.FAMILIES, _NFT_TABLES):
            # A program that still owns its table keeps it; the table ends with the program.
            with contextlib.suppress(OSError):
                nft_tables.delete(family, name)


def without(rules: str, pattern: re.Pattern[str]) -> str:
    """``iptables-save`` output without the lines that match ``pattern``."""
    return "".join(line for line in rules.splitlines(keepends=True) if not pattern.search(line))


def forward_policies() -> dict[str, str]:
    """The policy for forwarded packets by program, iptables and ip6tables; ACCEPT where there is no such chain."""
    saved = {each: run([f"{each}-save", "-t", "filter"]).out for each in _FAMILIES if _is_installed(f"{each}-save")}
    return {each: parse_policy(saved.get(each, "")) for each in _FAMILIES}


def parse_policy(rules: str) -> str:
    """The policy of the chain FORWARD in the output of ``iptables-save``."""
    found = re.search(r"^:FORWARD (ACCEPT|DROP) ", rules, re.MULTILINE)
    return found.group(1) if found else "ACCEPT"


def remove_empty_tables(before: list[str] | None) -> None:
    """Remove the empty tables that iptables created for Kubernetes' rules, if the tables ``before`` are known."""
    if before is None:
        return
    for table in tables() or ():
        family, name = table.split()
        if table in before or name not in {"filter", "nat", "mangle", "raw"} or family not in {"ip", "ip6"}:
            continue
        if has_no_rules(run(["nft", "list", "table", family, name]).out):
            run(["nft", "delete", "table", family, name])


def has_no_rules(listing: str) -> bool:
    """Whether ``nft list table`` shows only chains with their types and policies, and no rules."""
    lines = [line.strip() for line in listing.splitlines()]
    no_rule = re.compile(r"^(#.*|table .*\{|chain .*\{|type .* policy accept;|\}|)$")
    return all(no_rule.match(line) for line in lines)


def _is_installed(program: str) -> bool:
    return shutil.which(program, path="/usr/sbin:/sbin:/usr/bin:/usr/local/sbin") is not None
