"""firewalld: two policies and sets of addresses, in files of their own.

The policies apply in front of all zones and only accept: what they do not mention, the zones decide. A zone of the
nodes' addresses would be no alternative: for a connection from one of them it would replace the zone that accepts SSH.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from xml.etree import ElementTree
from xml.sax.saxutils import quoteattr

from .. import disk, firewall
from ..host.spec import Firewall
from ..process import must, run
from .wanted import FAMILIES, MARK, NAMES_OF_VRRP, OPEN_VRRP, VRRP, of_family, split

ETC = "/etc/firewalld"
USR = "/usr/lib/firewalld"
INPUT, FORWARD = f"{MARK}-input", f"{MARK}-forward"
POLICIES = (INPUT, FORWARD)
_HEAD = '<?xml version="1.0" encoding="utf-8"?>\n<!-- Managed by gpunodes. -->\n'
_MADE_BY_OTHERS = re.compile(r"docker0|br-\w+|virbr\d+|cni0|flannel\.1|veth\w+")
"""Devices that their makers put into zones again after a reload."""


RUNNING = "the rules of running pods and services"


def docker_files() -> list[str]:
    """The files that Docker makes in firewalld's configuration when it first starts, and that its packages leave.

    Source: moby 26.1, libnetwork/iptables/firewalld.go (the zone); the policy is of newer versions.
    """
    return [f"{ETC}/zones/docker.xml", f"{ETC}/policies/docker-forwarding.xml"]


def is_active() -> bool:
    """Whether firewalld runs."""
    return os.path.isdir(ETC) and run(["systemctl", "is-active", "--quiet", "firewalld"]).ok


def set_name(version: int) -> str:
    """The set of the machines' addresses of an IP version."""
    return f"{MARK}-nodes-ipv{version}"


def files(wanted: Firewall) -> dict[str, str]:
    """The files by path: the policies, and the sets that they use."""
    made = {f"{ETC}/ipsets/{set_name(version)}.xml": _set(version, each) for version, each in sets(wanted).items()}
    let_in = []
    for port, sources in wanted.ports.items():
        protocol, number = split(port)
        element = f'<port port="{number}" protocol="{protocol}"/>'
        if port == VRRP:
            # From control planes only, which are few.
            let_in += _rules(sources, f'<protocol value="{protocol}"/>')
        elif not sources:
            let_in.append(f"  {element}")
        else:
            # Sources that are no machines, such as the range of pods, are few.
            let_in += _rules([each for each in sources if each not in wanted.sources], element)
            let_in += [_rule(version, f'<source ipset="{set_name(version)}"/>{element}') for version in sets(wanted)]
    forwarded = _rules(wanted.pods, "")
    for version in sets(wanted):
        forwarded += [
            _rule(version, f'<source ipset="{set_name(version)}"/><destination address={quoteattr(pods)}/>')
            for pods in of_family(wanted.pods, version)
        ]
    made[f"{ETC}/policies/{INPUT}.xml"] = _policy("HOST", let_in)
    made[f"{ETC}/policies/{FORWARD}.xml"] = _policy("ANY", forwarded)
    return made


def sets(wanted: Firewall) -> dict[int, list[str]]:
    """The machines' addresses by IP version; only versions that have some."""
    found = {version: of_family(wanted.sources, version) for version in FAMILIES}
    return {version: each for version, each in found.items() if each}


def _set(version: int, entries: Sequence[str]) -> str:
    family = "inet" if version == FAMILIES[0] else "inet6"
    lines = "".join(f"  <entry>{entry}</entry>\n" for entry in entries)
    return f'{_HEAD}<ipset type="hash:net">\n  <option name="family" value="{family}"/>\n{lines}</ipset>\n'


def _policy(egress: str, rules: Iterable[str]) -> str:
    zones = f'  <ingress-zone name="ANY"/>\n  <egress-zone name="{egress}"/>\n'
    body = "".join(f"{rule}\n" for rule in rules)
    return f'{_HEAD}<policy priority="-1" target="CONTINUE">\n{zones}{body}</policy>\n'


def _rules(sources: Sequence[str], element: str) -> list[str]:
    return [
        _rule(version, f"<source address={quoteattr(source)}/>{element}")
        for version in FAMILIES
        for source in of_family(sources, version)
    ]


def _rule(version: int, inner: str) -> str:
    return f'  <rule family="ipv{version}">{inner}<accept/></rule>'


def is_loaded(wanted: Firewall) -> bool:
    """Whether the running firewalld has what the files contain, whatever is in the sets.

    It does not load files that were written while it runs; after 5 s they are in its permanent configuration.
    """
    present = must(["firewall-cmd", "--get-ipsets"]).split()
    texts = files(wanted)
    return {set_name(version) for version in sets(wanted)} <= {*present} and all(
        _running(policy) == _in_file(texts[f"{ETC}/policies/{policy}.xml"]) for policy in POLICIES
    )


_Rules = tuple[frozenset[str], frozenset[frozenset[tuple[str, str]]]]


def _running(policy: str) -> _Rules:
    """The ports and rules of a running policy; rules by their attributes."""
    ports = run(["firewall-cmd", f"--policy={policy}", "--list-ports"]).out.split()
    rules = run(["firewall-cmd", f"--policy={policy}", "--list-rich-rules"]).out.splitlines()
    return frozenset(ports), frozenset(_attributes(rule) for rule in rules if rule.strip())


def _in_file(text: str) -> _Rules:
    lines = text.splitlines()
    ports = [dict(_attributes(line)) for line in lines if line.startswith("  <port ")]
    rules = frozenset(_attributes(line) for line in lines if line.startswith("  <rule "))
    return frozenset(f"{each['port']}/{each['protocol']}" for each in ports), rules


def _attributes(text: str) -> frozenset[tuple[str, str]]:
    return frozenset(re.findall(r'(\w+)="([^"]*)"', text))


def entries(version: int) -> list[str]:
    """The addresses in a set of the running firewalld."""
    return must(["firewall-cmd", f"--ipset={set_name(version)}", "--get-entries"]).split()


def update(version: int, add: Iterable[str], remove: Iterable[str]) -> None:
    """Add and remove addresses of a set of the running firewalld, which needs no reload."""
    options = [*(f"--add-entry={entry}" for entry in add), *(f"--remove-entry={entry}" for entry in remove)]
    for option in options:
        must(["firewall-cmd", f"--ipset={set_name(version)}", option])


def reload() -> None:
    """Check the files, and load them."""
    must(["firewall-cmd", "--check-config"])
    must(["firewall-cmd", "--reload"])


def empty() -> None:
    """Remove what the running policies let through; their files are removed already, and a reload removes the rest."""
    for policy in POLICIES:
        for kind in ("port", "rich-rule"):
            for line in run(["firewall-cmd", f"--policy={policy}", f"--list-{kind}s"]).out.splitlines():
                for value in line.split() if kind == "port" else [line.strip()]:
                    run(["firewall-cmd", f"--policy={policy}", f"--remove-{kind}={value}"])


def lost_by_reload() -> str:
    """What a reload would remove, "" for nothing.

    It loads the permanent configuration, and flushes the rules that other programs made with iptables, those of
    kube-proxy and of pods' host ports among them (seen with firewalld 1.3.3, whatever FlushAllOnReload is; kube-proxy
    makes its own again within 30 s, host ports come back with their pods).
    """
    rules = run(["iptables-save"]).out.splitlines()
    if any(firewall.KUBERNETES.search(line) for line in rules):
        return RUNNING
    if foreign := [line for line in rules if line.startswith("-A ") and not firewall.DOCKER.search(line)]:
        return f"rules that iptables added, such as `{foreign[0]}`"
    for kind in ("zones", "policies"):
        now = comparable(must(["firewall-cmd", f"--list-all-{kind}"]))
        later = comparable(must(["firewall-cmd", "--permanent", f"--list-all-{kind}"]))
        # What gpunodes itself has written or removed there is loaded, or gone, after the reload.
        for name, lines in now.items():
            lost = [line for line in lines if line not in later.get(name, ())]
            if lost and name not in POLICIES:
                return f"what was not made permanent, such as `{lost[0]}` of {name}"
    return ""


def comparable(listing: str) -> dict[str, list[str]]:
    """``firewall-cmd --list-all-zones``: the lines of each zone that say something, without what others add again."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in listing.splitlines():
        if line and not line[0].isspace():
            lines = found.setdefault(line.split()[0], [])
            continue
        key, separator, value = line.strip().partition(": ")
        if key == "interfaces":
            value = " ".join(each for each in value.split() if not _MADE_BY_OTHERS.fullmatch(each))
        if separator and value:
            lines.append(f"{key}: {value}")
        elif line.startswith("\t"):
            lines.append(line.strip())
    return found


def open_ports() -> list[str]:
    """The ports that the default zone and gpunodes' own policy let in, ``*`` for all."""
    zone = run(["firewall-cmd", "--list-all"]).out
    found: list[str] = []
    for line in zone.splitlines():
        key, _, value = line.strip().partition(": ")
        if key == "target" and value == "ACCEPT":
            return ["*"]
        if key == "ports":
            found += value.split()
        elif key == "protocols":
            found += [OPEN_VRRP for each in value.split() if each in NAMES_OF_VRRP]
        elif key == "services":
            for service in value.split():
                found += _service(service)
    for policy in glob.glob(f"{ETC}/policies/{INPUT}.xml"):
        found += _ports(disk.read(policy) or "")
    return found


def _service(name: str) -> list[str]:
    for folder in (ETC, USR):
        if re.fullmatch(r"[A-Za-z0-9_.-]+", name) and (text := disk.read(f"{folder}/services/{name}.xml")):
            return _ports(text)
    return []


def _ports(text: str) -> list[str]:
    try:
        root = ElementTree.fromstring(text)  # noqa: S314 - the machine's own configuration
    except ElementTree.ParseError:
        return []
    vrrp = [OPEN_VRRP for each in root.iter("protocol") if each.get("value") in NAMES_OF_VRRP]
    return [f"{each.get('port')}/{each.get('protocol')}" for each in root.iter("port") if each.get("port")] + vrrp
