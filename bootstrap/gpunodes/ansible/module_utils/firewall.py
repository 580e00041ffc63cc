"""Finds and removes the firewall rules of kube-proxy, flannel, the CNI plugins and Docker."""

from __future__ import annotations

import re
import shutil

from .process import run

_NFT_TABLES = ("kube-proxy", "flannel-ipv4", "flannel-ipv6", "cni_hostport", "cni_plugins_masquerade")


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
DOCKER = _rules_of("DOCKER", r"\s-[io] docker0\b")


def clean(pattern: re.Pattern[str] = KUBERNETES) -> None:
    """Remove the rules and chains of Kubernetes components, or of Docker; all other rules stay."""
    for family in ("iptables", "ip6tables"):
        if _is_installed(f"{family}-save"):
            rules = run([f"{family}-save"]).out
            remaining = without(rules, pattern)
            if remaining != rules:
                run([f"{family}-restore"], stdin=remaining)
    for table in tables() or ():
        if pattern is KUBERNETES and table.split()[-1] in _NFT_TABLES:
            run(["nft", "delete", "table", *table.split()])


def without(rules: str, pattern: re.Pattern[str]) -> str:
    """``iptables-save`` output without the lines that match ``pattern``."""
    return "".join(line for line in rules.splitlines(keepends=True) if not pattern.search(line))


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
