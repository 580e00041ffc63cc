"""Firewall rules that a reset removes."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpunodes.ansible.module_utils import disk, firewall, ledger, undo
from gpunodes.ansible.module_utils.host import kernel
from gpunodes.ansible.module_utils.host.changes import Changes
from gpunodes.ansible.module_utils.host.spec import Spec

RULES = (
    "*nat\n:PREROUTING ACCEPT [0:0]\n:KUBE-SERVICES - [0:0]\n:MINE - [0:0]\n"
    '-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES\n'
    "-A PREROUTING -j MINE\n-A KUBE-SERVICES -j RETURN\n"
    '-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG\nCOMMIT\n'
)


def test_only_ours_go() -> None:
    kept = firewall.without(RULES, firewall.KUBERNETES)
    assert kept == "*nat\n:PREROUTING ACCEPT [0:0]\n:MINE - [0:0]\n-A PREROUTING -j MINE\nCOMMIT\n"
    assert firewall.without(kept, firewall.KUBERNETES) == kept


def test_docker_leaves_no_rule() -> None:
    # What Docker 26 has in its tables, between two rules of somebody else.
    rules = (
        "*nat\n:POSTROUTING ACCEPT [0:0]\n:DOCKER - [0:0]\n"
        "-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER\n-A POSTROUTING -j MINE\n"
        "-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE\n-A DOCKER -i docker0 -j RETURN\nCOMMIT\n"
        "*filter\n:DOCKER-USER - [0:0]\n-A FORWARD -j DOCKER-USER\n-A FORWARD -j DOCKER-ISOLATION-STAGE-1\n"
        "-A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n"
        "-A FORWARD -i docker0 ! -o docker0 -j ACCEPT\n-A FORWARD -i docker01 -j ACCEPT\n"
        "-A DOCKER-USER -j RETURN\nCOMMIT\n"
    )
    assert firewall.without(rules, firewall.DOCKER) == (
        "*nat\n:POSTROUTING ACCEPT [0:0]\n-A POSTROUTING -j MINE\nCOMMIT\n"
        "*filter\n-A FORWARD -i docker01 -j ACCEPT\nCOMMIT\n"
    )


def test_tables() -> None:
    assert firewall.parse_tables("table ip nat\ntable inet mine\n") == ["ip nat", "inet mine"]


def test_empty_tables() -> None:
    chain = "table ip nat {\n\tchain PREROUTING {\n\t\ttype nat hook prerouting priority dstnat; policy accept;\n"
    assert firewall.has_no_rules(chain + "\t}\n}\n")
    assert not firewall.has_no_rules(chain + "\t\ttcp dport 22 accept\n\t}\n}\n")
    assert not firewall.has_no_rules(chain.replace("accept", "drop") + "\t}\n}\n")


def test_networks_of_users_go_with_docker_and_other_bridges_stay() -> None:
    rules = (
        "*filter\n:FORWARD DROP [0:0]\n-A FORWARD -o br-0123456789ab -j ACCEPT\n-A FORWARD -i br-lan -j ACCEPT\n"
        "-A FORWARD -i docker0 ! -o docker0 -j ACCEPT\n-A FORWARD -o docker_gwbridge\n-A FORWARD -i docker01 -j MINE\n"
    )
    assert firewall.without(rules, firewall.DOCKER) == (
        "*filter\n:FORWARD DROP [0:0]\n-A FORWARD -i br-lan -j ACCEPT\n-A FORWARD -i docker01 -j MINE\n"
    )


@pytest.mark.parametrize(
    ("rules", "policy"),
    [
        ("*filter\n:INPUT DROP [0:0]\n:FORWARD ACCEPT [1:2]\n", "ACCEPT"),
        ("*filter\n:FORWARD DROP [1:2]\n", "DROP"),
        ("", "ACCEPT"),
        ("-A INPUT -m comment --comment :FORWARD DROP \n", "ACCEPT"),
        (":FORWARD --flush [0:0]\n", "ACCEPT"),
    ],
)
def test_the_policy_for_forwarded_packets(rules: str, policy: str) -> None:
    assert firewall.parse_policy(rules) == policy


def test_forwarding_before_docker_is_recorded_once_and_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker switches it on, and sets the policy DROP."""
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger.json"))
    state = {"iptables": "ACCEPT", "ip6tables": "ACCEPT"}
    monkeypatch.setattr(firewall, "forward_policies", lambda: dict(state))
    monkeypatch.setattr(firewall, "tables", list)
    monkeypatch.setattr(firewall, "clean", lambda *_: None)
    changes = Changes(Spec(forwards=True))
    monkeypatch.setattr(disk, "read", lambda _: "0\n")
    kernel.note_forwarding(changes)
    state["iptables"] = "DROP"
    monkeypatch.setattr(disk, "read", lambda _: "1\n")
    kernel.note_forwarding(changes)
    assert changes.ledger.forward_policies == {"iptables": "ACCEPT", "ip6tables": "ACCEPT"}
    assert changes.ledger.sysctls["net.ipv4.ip_forward"] == "0"
    assert changes.ledger.firewall_tables == []

    ran: list[list[str]] = []
    monkeypatch.setattr(undo, "run", lambda argv, *_: ran.append(argv))
    (tmp_path / "links").mkdir()
    for link in ("docker0", "br-0123456789ab", "br-lan", "eth0"):
        (tmp_path / "links" / link).touch()
    monkeypatch.setattr(undo, "_LINKS", str(tmp_path / "links"))
    monkeypatch.setattr(ledger, "load", lambda _: changes.ledger)
    undoer = undo.Undoer()
    undoer._docker()
    assert ran == [], "a user's own Docker keeps its links and its policy"
    changes.ledger.note_service("docker", {"enabled": False, "active": False})
    undoer._docker()
    assert ran == [
        ["ip", "link", "delete", "br-0123456789ab"],
        ["ip", "link", "delete", "docker0"],
        ["iptables", "--policy", "FORWARD", "ACCEPT"],
    ]
