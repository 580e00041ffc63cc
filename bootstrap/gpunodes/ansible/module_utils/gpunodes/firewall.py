"""The packet filter: what kube-proxy, flannel, the CNI plugins and Docker put there, and taking it away again."""

from __future__ import annotations

import re
import shutil

from .process import run

_NFT_TABLES = ("kube-proxy", "flannel-ipv4", "flannel-ipv6", "cni_hostport", "cni_plugins_masquerade")


def tables() -> list[str] | None:
    """``family name`` of the kernel's nft tables; None where nft cannot list them."""
    if not _there("nft"):
        return None
    return parse_tables(run(["nft", "list", "tables"]).out)


def parse_tables(listing: str) -> list[str]:
    """``nft list tables``: lines of ``table FAMILY NAME``."""
    return [line[len("table ") :].strip() for line in listing.splitlines() if line.startswith("table ")]


def _rules_of(prefixes: str, more: str) -> re.Pattern[str]:
    """Lines of ``iptables-save`` that are chains with these prefixes, or name one, or match ``more``."""
    return re.compile(rf"^:(?:{prefixes})|^-A (?:{prefixes})|\s-[jg] (?:{prefixes})|{more}", re.IGNORECASE)


KUBERNETES = _rules_of("KUBE-|FLANNEL-|CNI-|cali-", r"--comment \"?(?:kubernetes|flanneld|cni)")
DOCKER = _rules_of("DOCKER", r"\s-[io] docker0\b")


def clean(ours: re.Pattern[str] = KUBERNETES) -> None:
    """Remove the rules and chains of Kubernetes' parts, or of Docker; everybody else's stay."""
    for family in ("iptables", "ip6tables"):
        if _there(f"{family}-save"):
            rules = run([f"{family}-save"]).out
            kept = without(rules, ours)
            if kept != rules:
                run([f"{family}-restore"], stdin=kept)
    for table in tables() or ():
        if ours is KUBERNETES and table.split()[-1] in _NFT_TABLES:
            run(["nft", "delete", "table", *table.split()])


def without(rules: str, ours: re.Pattern[str]) -> str:
    """``iptables-save`` output without the lines that are ``ours``."""
    return "".join(line for line in rules.splitlines(keepends=True) if not ours.search(line))


def remove_empty_tables(before: list[str] | None) -> None:
    """Remove the empty tables that iptables made for Kubernetes' rules, where it is known what was there before."""
    if before is None:
        return
    for table in tables() or ():
        family, name = table.split()
        if table in before or name not in {"filter", "nat", "mangle", "raw"} or family not in {"ip", "ip6"}:
            continue
        if has_no_rules(run(["nft", "list", "table", family, name]).out):
            run(["nft", "delete", "table", family, name])


def has_no_rules(listing: str) -> bool:
    """Whether ``nft list table`` shows chains only: their types and policies, no rule."""
    body = [line.strip() for line in listing.splitlines()]
    plain = re.compile(r"^(#.*|table .*\{|chain .*\{|type .* policy accept;|\}|)$")
    return all(plain.match(line) for line in body)


def _there(program: str) -> bool:
    return shutil.which(program, path="/usr/sbin:/sbin:/usr/bin:/usr/local/sbin") is not None
