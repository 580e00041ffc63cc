"""Firewall rules that a reset removes."""

from __future__ import annotations

from gpunodes.ansible.module_utils import firewall

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
