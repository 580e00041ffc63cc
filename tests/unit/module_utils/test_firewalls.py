"""Firewalls of a machine. Rules and listings were recorded with ufw 0.36.2, firewalld 1.3.3 and nftables 1.0.6."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from gpunodes.ansible.module_utils import ledger, packages, undo
from gpunodes.ansible.module_utils.firewalls import firewalld, iptables, nftables, reading, ufw, wanted
from gpunodes.ansible.module_utils.host import firewall, installation
from gpunodes.ansible.module_utils.host.changes import Changes
from gpunodes.ansible.module_utils.host.converge import converge, diff
from gpunodes.ansible.module_utils.host.sources import Sources
from gpunodes.ansible.module_utils.host.spec import Firewall, Spec
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.process import CommandResult
from gpunodes.planner import reports

from tests.stand_ins import facts

MACHINES = ["10.0.0.1", "10.0.0.2", "fd00::1"]
PODS = ["10.244.0.0/16"]
WANTED = Firewall(
    ports={"tcp 6443": [], "tcp 10250": [*MACHINES, *PODS], "udp 8472": MACHINES},
    devices=("cni0", "flannel.1"),
    sources=MACHINES,
    pods=PODS,
)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a firewall, whose files are those of the test."""
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "state/ledger.json"))
    monkeypatch.setattr(ufw, "PROGRAM", str(tmp_path / "program"))
    monkeypatch.setattr(ufw, "CONFIG", str(tmp_path / "ufw.conf"))
    monkeypatch.setattr(ufw, "DEFAULTS", str(tmp_path / "ufw"))
    monkeypatch.setattr(firewalld, "ETC", str(tmp_path / "firewalld"))
    monkeypatch.setattr(nftables, "FILE", str(tmp_path / "gpunodes/firewall.nft"))
    monkeypatch.setattr(nftables, "DROP_IN", str(tmp_path / "nftables.service.d/50-gpunodes.conf"))
    monkeypatch.setattr(nftables, "chains", list)
    monkeypatch.setattr(firewalld, "is_active", lambda: False)
    return tmp_path


def opened(check: bool = False, rules: Firewall = WANTED) -> Changes:
    changes = Changes(Spec(firewall=rules), check)
    firewall.open_ports(changes, rules)
    return changes


@pytest.mark.parametrize(
    "rules",
    [
        Firewall(ports={"tcp 22; flush ruleset": []}),
        Firewall(ports={"icmp 1": []}),
        Firewall(ports={"tcp 22": ["0.0.0.0/0 accept; drop"]}),
        Firewall(ports={"tcp 22": ["gpu-1"]}),
        Firewall(devices=['x" accept; #']),
        Firewall(sources=["10.0.0.1 comment x"]),
        Firewall(pods=["10.244.0.1/16"]),
    ],
)
def test_only_ports_devices_and_addresses_become_rules(rules: Firewall) -> None:
    with pytest.raises(MachineProblem, match="cannot be opened"):
        opened(rules=rules)


def test_addresses_are_not_joined_and_those_inside_of_a_network_are_left_out() -> None:
    texts = ["10.0.0.3", "10.0.0.2", "10.244.7.1", "10.244.0.0/16", "fd00::1"]
    assert wanted.of_family(texts, 4) == ["10.0.0.2", "10.0.0.3", "10.244.0.0/16"]
    assert wanted.of_family(texts, 6) == ["fd00::1"]


def test_a_machine_without_an_active_firewall_is_not_changed(machine: Path) -> None:
    assert opened().actions == []
    (machine / "program").touch()
    (machine / "ufw.conf").write_text("# ENABLED=yes\nENABLED=no\n")
    assert opened().actions == []
    (machine / "program").unlink()
    (machine / "ufw.conf").write_text("ENABLED=yes\n")
    assert opened().actions == []
    assert not (machine / "state").exists()


# ufw

ADDED = """Added user rules (see 'ufw status' for running firewall):
ufw route allow in on cni0 comment 'gpunodes'
ufw allow 6443/tcp comment 'mine'
ufw allow 22/tcp
ufw deny from 10.9.0.0/16
ufw limit 2222/tcp
ufw allow OpenSSH
ufw allow from 10.7.0.0/16
ufw allow 8000:8010/tcp
ufw allow 53
ufw allow out 9999/tcp
ufw allow from 10.0.0.1 to any port 10250 proto tcp comment 'gpunodes'
"""


class Ufw:
    """ufw's rules by its own commands: what `ufw show added` prints, and the ledger at each change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, listing: str = ADDED) -> None:
        self.rules = ufw.parse(listing)
        self.recorded: list[list[str]] = []
        monkeypatch.setattr(ufw, "must", self.must)
        Path(ufw.CONFIG).write_text("ENABLED=yes\n")
        Path(ufw.PROGRAM).touch()

    def must(self, argv: list[str]) -> str:
        words = [word for word in argv[1:] if word != "--force"]
        if words == ["show", "added"]:
            return "".join(f"ufw {rule}{f' comment {text!r}' if text else ''}\n" for rule, text in self.rules.items())
        self.recorded.append(ledger.load().firewalls["ufw"])
        if "delete" in words:
            self.rules.pop(" ".join(word for word in words if word != "delete"), None)
            return ""
        assert words[-2:] == ["comment", "gpunodes"]
        assert words[0] == "prepend" or words[:2] == ["route", "prepend"]
        self.rules[" ".join(word for word in words[:-2] if word != "prepend")] = "gpunodes"
        return ""


def test_ufw_gets_what_is_missing_and_keeps_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Ufw(monkeypatch)
    before = dict(there.rules)
    assert opened(check=True).actions == ["open the ports of the node in ufw"]
    assert there.rules == before
    changes = opened()
    assert there.rules.items() >= before.items()
    assert there.rules["allow from fd00::1 to any port 8472 proto udp"] == "gpunodes"
    assert there.rules["route allow out on flannel.1 from 10.0.0.2"] == "gpunodes"
    assert there.rules["allow 6443/tcp"] == "mine"
    # Each rule was in the ledger before it was added.
    assert all("allow from 10.0.0.2 to any port 8472 proto udp" in each for each in there.recorded)
    assert "allow 6443/tcp" not in changes.ledger.firewalls["ufw"]
    assert opened().actions == []


def test_a_machine_that_left_the_cluster_loses_its_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Ufw(monkeypatch)
    opened()
    fewer = Firewall({"tcp 10250": ["10.0.0.2"]}, WANTED.devices, ["10.0.0.2"], PODS)
    assert opened(rules=fewer).actions
    left = [rule for rule, text in there.rules.items() if text == "gpunodes" and "10.0.0." in rule]
    # A rule of an earlier installation, which is not in the ledger, stays.
    assert sorted(rule for rule in left if "10.0.0.1" in rule) == ["allow from 10.0.0.1 to any port 10250 proto tcp"]
    assert "allow from 10.0.0.2 to any port 10250 proto tcp" in there.rules
    assert "allow from 10.0.0.2 to any port 8472 proto udp" not in there.rules
    assert opened(rules=fewer).actions == []


def test_a_rule_of_the_administrator_that_refuses_the_same_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """ufw skips a new rule that differs from an existing one in its action only."""
    there = Ufw(monkeypatch, "ufw reject 6443/tcp\n")
    with pytest.raises(MachineProblem, match="ufw reject 6443/tcp"):
        opened()
    assert there.rules == {"reject 6443/tcp": ""}
    there.rules = {"limit 6443/tcp": ""}
    opened()
    assert "allow 6443/tcp" not in there.rules


def test_ufw_without_ipv6_gets_no_ipv6_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Ufw(monkeypatch, "")
    Path(ufw.DEFAULTS).write_text("IPV6=no\n")
    opened()
    assert not [rule for rule in there.rules if "fd00" in rule]


def test_a_reset_restores_ufw(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Ufw(monkeypatch)
    before = dict(there.rules)
    opened()
    undoer = undo.Undoer(check=True)
    undoer._firewalls()
    assert undoer.actions == ["remove the rules of gpunodes from ufw"]
    assert there.rules != before
    # An administrator took over one of the rules: it is theirs now.
    there.rules["route allow in on flannel.1"] = "ours"
    undo.Undoer()._firewalls()
    assert there.rules == {**before, "route allow in on flannel.1": "ours"}
    # ufw was removed, and its configuration stays.
    Path(ufw.PROGRAM).unlink()
    undo.Undoer()._firewalls()


def test_ports_that_ufw_lets_in() -> None:
    assert ufw.open_ports(ufw.parse(ADDED)) == [
        "6443/tcp",
        "22/tcp",
        "2222/tcp",
        "*",
        "8000-8010/tcp",
        "53",
        "10250/tcp",
    ]


# nftables


def base(name: str, hook: str, policy: str = "accept", family: str = "inet", table: str = "filter") -> dict[str, Any]:
    return {"chain": {"family": family, "table": table, "name": name, "hook": hook, "policy": policy, "prio": 0}}


def rule(chain: str, *expr: dict[str, Any], handle: int = 9, **more: Any) -> dict[str, Any]:
    return {"rule": {"family": "inet", "table": "filter", "chain": chain, "handle": handle, "expr": list(expr), **more}}


def tcp(right: Any) -> dict[str, Any]:
    return {"match": {"op": "==", "left": {"payload": {"protocol": "tcp", "field": "dport"}}, "right": right}}


SADDR = {"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "saddr"}}, "right": "@admins"}}


@pytest.mark.parametrize(
    ("items", "names"),
    [
        ([base("input", "input", "drop"), base("forward", "forward", "drop")], ["input", "forward"]),
        ([base("input", "input")], []),
        ([base("output", "output", "drop")], []),
        # A last rule that drops everything, with a counter and a log line.
        ([base("in", "input"), rule("in", {"counter": {}}, {"log": None}, {"reject": {"type": "icmpx"}})], ["in"]),
        # Bans, as fail2ban makes them.
        ([base("in", "input"), rule("in", tcp(22), SADDR, {"reject": None})], []),
        ([base("in", "input"), rule("in", {"limit": {"rate": 9}}, {"drop": None})], []),
        # The drop is in a chain that the base chain jumps to, also by a map, and chains that jump to each other.
        ([base("in", "input"), rule("in", {"jump": {"target": "a"}}), rule("a", {"drop": None})], ["in"]),
        (
            [
                base("in", "input"),
                rule("in", {"vmap": {"key": {}, "data": {"set": [["eth0", {"goto": {"target": "a"}}]]}}}),
                rule("a", {"jump": {"target": "in"}}),
                rule("a", {"drop": None}),
            ],
            ["in"],
        ),
        # iptables' own chains, and a chain of the administrator beside them.
        ([base("INPUT", "input", "drop", "ip"), base("input", "input", "drop", "ip")], ["input"]),
        ([base("in; flush ruleset", "input", "drop")], []),
    ],
)
def test_chains_that_drop_what_nothing_accepts(items: list[dict[str, Any]], names: list[str]) -> None:
    assert [chain.name for chain in nftables.dropping(items)] == names


CHAINS = [
    nftables.Chain("inet", "filter", "input", "input"),
    nftables.Chain("ip", "own", "fwd", "forward", {7: "gpunodes old"}),
]


def test_the_commands_of_nftables() -> None:
    text = nftables.script(CHAINS, WANTED)
    assert "tcp dport 6443 accept\n" in text
    assert "ip saddr { 10.0.0.1, 10.0.0.2, 10.244.0.0/16 } tcp dport 10250 accept" in text
    assert "ip6 saddr { fd00::1 } udp dport 8472 accept" in text
    assert 'iifname { "cni0", "flannel.1" } accept' in text
    assert "delete rule ip own fwd handle 7" in text
    assert "ip6" not in text[text.index("add chain ip own") :]
    assert "handle" not in nftables.file_text(CHAINS, WANTED)
    # Rules only accept, and nothing is flushed but gpunodes' own chains.
    assert "drop" not in text
    assert "reject" not in text
    assert [line for line in text.splitlines() if "flush" in line] == [
        "flush chain inet filter gpunodes_input",
        "flush chain ip own gpunodes_forward",
    ]


def test_nftables_is_changed_once_and_recorded_first(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    current = list(CHAINS)
    loaded: list[str] = []

    def load(text: str) -> None:
        assert ledger.load().firewalls == {"nftables": ["inet filter input", "ip own fwd"]}
        assert str(machine / "gpunodes/firewall.nft") in ledger.load().files
        loaded.append(text)
        current[:] = [
            nftables.Chain(each.family, each.table, each.name, each.hook, {1: nftables.mark(each, WANTED)})
            for each in current
        ]

    monkeypatch.setattr(nftables, "chains", lambda: list(current))
    monkeypatch.setattr(nftables, "load", load)
    monkeypatch.setattr(nftables, "is_persistent", lambda: True)
    monkeypatch.setattr(firewall, "must", lambda _: "")
    assert len(opened(check=True).actions) == 3
    assert loaded == []
    assert diff({"node": {"firewall": vars(WANTED)}})[0] == ["node"]
    assert len(opened().actions) == 3
    assert opened().actions == []
    # A reload of the ruleset without the drop-in: the rules are added again.
    current[:] = CHAINS
    assert opened().actions == ["open the ports of the node in nftables (inet filter input, ip own fwd)"]


def test_a_ruleset_that_nothing_loads_at_boot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nftables, "chains", lambda: list(CHAINS))
    monkeypatch.setattr(nftables, "is_persistent", lambda: False)
    with pytest.raises(MachineProblem, match="gpunodes_firewall to leave"):
        opened()
    assert not Path(nftables.FILE).exists()


def test_a_failing_load_never_stops_the_service_of_the_administrator() -> None:
    assert nftables.DROP_IN_TEXT.count("=-/usr/sbin/nft -f") == 2


def listing(monkeypatch: pytest.MonkeyPatch, items: list[dict[str, Any]], names: tuple[str, ...] = ("filter",)) -> None:
    def run(argv: list[str], *_: Any) -> CommandResult:
        tables = [{"table": {"family": "inet", "name": name}} for name in names]
        return CommandResult(argv, 0, json.dumps({"nftables": tables if argv[-1] == "tables" else items}), "")

    monkeypatch.setattr(nftables, "run", run)


def test_a_reset_removes_only_gpunodes_chains_and_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"chain": {"family": "inet", "table": "filter", "name": "gpunodes_input"}}
    jump = rule("input", {"jump": {"target": "gpunodes_input"}}, handle=12, comment="gpunodes 1")
    items = [base("input", "input", "drop"), own, jump, rule("input", tcp(22), {"accept": None}, handle=13)]
    listing(monkeypatch, items)
    assert nftables.removal().splitlines() == [
        "delete rule inet filter input handle 12",
        "flush chain inet filter gpunodes_input",
        "delete chain inet filter gpunodes_input",
    ]
    ledger.Ledger(firewalls={"nftables": ["inet filter input"]}).save()
    done: list[str] = []
    monkeypatch.setattr(nftables, "load", done.append)
    undo.Undoer(check=True)._firewalls()
    assert done == []
    undo.Undoer()._firewalls()
    assert done == [nftables.removal()]
    listing(monkeypatch, [base("input", "input", "drop")])
    assert nftables.removal() == ""


def test_tables_of_programs_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("kube-proxy", "firewalld", "flannel-ipv4", "f2b-table", "docker-bridges", "bad name; flush ruleset")
    listing(monkeypatch, [base("input", "input", "drop")], names)
    assert list(nftables._tables()) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"nftables": 5}', '{"nftables": [5]}', "no such program"])
def test_an_unreadable_ruleset_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(nftables, "run", lambda argv: CommandResult(argv, 0 if text else 127, text, ""))
    assert list(nftables._tables()) == []


def test_ports_that_nftables_lets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = {"accept": None}
    items = [
        base("input", "input", "drop"),
        base("forward", "forward", "drop"),
        {"chain": {"family": "inet", "table": "filter", "name": "other"}},
        rule("input", tcp({"set": [22, {"range": [8000, 8010]}]}), accept),
        rule("other", tcp(10250), accept),
        rule("forward", tcp(99), accept),
        rule("input", tcp(98), {"drop": None}),
        rule("input", {"match": {"op": "in", "left": {"ct": {"key": "state"}}, "right": ["established"]}}, accept),
        rule("input", tcp("@ports"), accept),
    ]
    listing(monkeypatch, items)
    assert nftables.open_ports() == ["22/tcp", "8000-8010/tcp", "10250/tcp"]
    listing(monkeypatch, [*items, rule("input", SADDR, accept)])
    assert nftables.open_ports()[-1] == "*"


# firewalld


class Firewalld:
    """The running firewalld: what it loaded, and what it was told since."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: dict[str, str] = {}
        self.sets: dict[str, list[str]] = {}
        self.reloads = 0
        self.lost = ""
        monkeypatch.setattr(firewalld, "is_active", lambda: True)
        monkeypatch.setattr(firewalld, "must", self.must)
        monkeypatch.setattr(firewalld, "lost_by_reload", lambda: self.lost)
        monkeypatch.setattr(firewalld, "_running", lambda policy: firewalld._in_file(self.texts.get(policy, "")))

    def must(self, argv: list[str]) -> str:
        first = argv[1]
        if first == "--reload":
            self.reloads += 1
            root = Path(firewalld.ETC)
            self.texts = {path.stem: path.read_text() for path in root.glob("policies/*.xml")}
            self.sets = {
                path.stem: [line[9:-8] for line in path.read_text().splitlines() if line.startswith("  <entry>")]
                for path in root.glob("ipsets/*.xml")
            }
        elif first == "--get-ipsets":
            return " ".join(self.sets)
        elif first.startswith("--ipset="):
            entries = self.sets[first.partition("=")[2]]
            option, _, value = argv[2].partition("=")
            if option == "--get-entries":
                return "\n".join(entries)
            getattr(entries, {"--add-entry": "append", "--remove-entry": "remove"}[option])(value)
        return ""


def test_firewalld_is_reloaded_once_and_then_only_its_sets_change(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Firewalld(monkeypatch)
    assert opened(check=True).actions[-1] == "reload firewalld"
    assert running.reloads == 0
    opened()
    assert running.reloads == 1
    assert running.sets["gpunodes-nodes-ipv4"] == ["10.0.0.1", "10.0.0.2"]
    assert opened().actions == []
    one_more = [*MACHINES, "10.0.0.3"]
    more = Firewall(
        {"tcp 6443": [], "tcp 10250": [*one_more, *PODS], "udp 8472": one_more}, WANTED.devices, one_more, PODS
    )
    assert "change the set gpunodes-nodes-ipv4 of firewalld" in opened(rules=more).actions
    assert running.sets["gpunodes-nodes-ipv4"] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert running.reloads == 1
    opened()
    assert "10.0.0.3" not in running.sets["gpunodes-nodes-ipv4"]


def test_an_interrupted_change_of_firewalld_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Firewalld(monkeypatch)
    monkeypatch.setattr(firewalld, "reload", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        opened()
    monkeypatch.setattr(firewalld, "reload", lambda: running.must(["", "--reload"]))
    assert opened().actions == ["reload firewalld"]
    assert opened().actions == []


def test_firewalld_of_a_running_node_is_not_reloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Firewalld(monkeypatch)
    running.lost = firewalld.RUNNING
    changes = opened()
    assert running.reloads == 0
    assert "next reload" in changes.notes[0]
    again = opened()
    assert (again.actions, again.notes) == ([], changes.notes)
    running.must(["", "--reload"])
    assert (opened().actions, opened().notes) == ([], [])


def test_what_is_not_permanent_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Firewalld(monkeypatch)
    running.lost = "what was not made permanent, such as `ports: 22/tcp` of public"
    with pytest.raises(MachineProblem, match="runtime-to-permanent"):
        opened()
    assert running.reloads == 0
    assert not Path(firewalld.ETC).exists()


def test_a_reset_removes_the_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Firewalld(monkeypatch)
    opened()
    assert all(path in ledger.load().files for path in firewalld.files(WANTED))
    emptied: list[bool] = []
    monkeypatch.setattr(firewalld, "empty", lambda: emptied.append(True))
    forget = undo.Undoer()._how_firewalld_forgets()
    assert (running.reloads, emptied) == (1, [])
    # firewalld notices after some seconds that files are gone: that is no reason to keep the policies.
    running.lost = "something"
    forget()
    assert running.reloads == 2
    undo.Undoer()._how_firewalld_forgets()()
    assert (running.reloads, emptied) == (2, [True])


def test_a_reset_removes_what_docker_made_in_firewalld() -> None:
    """Docker makes its zone when it first starts, and its packages leave that. A zone that was there before stays."""
    zone, policy = map(Path, firewalld.docker_files())
    changes = Changes(Spec(forwards=True))
    firewall.note_docker(changes)
    assert changes.ledger.files == {}, "a machine without firewalld"
    policy.parent.mkdir(parents=True)
    policy.write_text("of the administrator's own Docker")
    firewall.note_docker(changes)
    changes.save()
    zone.parent.mkdir()
    zone.write_text("<zone/>")
    undo.Undoer()._files()
    assert not zone.exists()
    assert policy.exists()


def test_docker_is_recorded_before_its_packages() -> None:
    Path(firewalld.ETC).mkdir()
    noted: list[bool] = []

    class Manager:
        def effects(self, *_: Any, **__: Any) -> packages.Effects:
            return packages.Effects(["docker.io"], [], [])

        def install(self, *_: Any, **__: Any) -> None:
            noted.append(set(firewalld.docker_files()) <= ledger.load().files.keys())

    changes = Changes(Spec(forwards=True))
    sources = Sources(changes)
    sources.manager = cast("packages.Manager", Manager())
    installation._install(changes, sources, {"docker.io": "26.1.5"})
    assert noted == [True]


ZONES = """docker (active)
  target: ACCEPT
  interfaces: docker0
  rich rules:

public (active)
  target: default
  interfaces: eth0 cni0
  ports: 8443/tcp
  services: ssh
  rich rules:
\trule family="ipv4" source address="10.0.0.9" accept
"""


def test_the_configuration_that_a_reload_would_remove(monkeypatch: pytest.MonkeyPatch) -> None:
    assert firewalld.comparable(ZONES)["public"] == [
        "target: default",
        "interfaces: eth0",
        "ports: 8443/tcp",
        "services: ssh",
        'rule family="ipv4" source address="10.0.0.9" accept',
    ]
    assert firewalld.comparable(ZONES)["docker"] == ["target: ACCEPT"]
    rules = ""
    permanent = ZONES.replace(" (active)", "")
    # The files of gpunodes' own policies are removed already.
    policies = f"{firewalld.POLICIES[0]} (active)\n  ports: 6443/tcp\n"
    monkeypatch.setattr(firewalld, "run", lambda argv: CommandResult(argv, 0, rules, ""))

    def listing(argv: list[str]) -> str:
        if "policies" in argv[-1]:
            return "" if "--permanent" in argv else policies
        return permanent if "--permanent" in argv else ZONES

    monkeypatch.setattr(firewalld, "must", listing)
    assert firewalld.lost_by_reload() == ""
    rules = ":KUBE-SERVICES - [0:0]\n"
    assert firewalld.lost_by_reload() == firewalld.RUNNING
    rules = "-A INPUT -p tcp -j ACCEPT\n"
    assert "-A INPUT" in firewalld.lost_by_reload()
    rules = "-A DOCKER -i docker0 -j RETURN\n"
    permanent = permanent.replace("  ports: 8443/tcp\n", "")
    assert "`ports: 8443/tcp` of public" in firewalld.lost_by_reload()


def test_the_policies_of_firewalld() -> None:
    found = {path.rpartition("/")[2]: text for path, text in firewalld.files(WANTED).items()}
    assert '<egress-zone name="HOST"/>' in found["gpunodes-input.xml"]
    assert '<port port="6443" protocol="tcp"/>\n' in found["gpunodes-input.xml"]
    assert (
        '<rule family="ipv4"><source address="10.244.0.0/16"/><port port="10250" protocol="tcp"/><accept/></rule>'
        in found["gpunodes-input.xml"]
    )
    assert found["gpunodes-input.xml"].count('ipset="gpunodes-nodes-ipv6"') == 2
    assert (
        '<source ipset="gpunodes-nodes-ipv4"/><destination address="10.244.0.0/16"/><accept/></rule>'
        in found["gpunodes-forward.xml"]
    )
    assert all('target="CONTINUE"' in text for name, text in found.items() if "nodes" not in name)
    # As `firewall-cmd --list-rich-rules` prints it.
    printed = 'rule family="ipv4" source ipset="gpunodes-nodes-ipv4" port port="8472" protocol="udp" accept'
    assert firewalld._attributes(printed) in firewalld._in_file(found["gpunodes-input.xml"])[1]


# iptables, and all together


@pytest.mark.parametrize(
    ("rules", "dropping"),
    [
        (":INPUT DROP [0:0]\n", True),
        (":INPUT ACCEPT [0:0]\n-A INPUT -j REJECT --reject-with icmp-host-prohibited\n", True),
        (
            ":INPUT ACCEPT [0:0]\n:FORWARD DROP [0:0]\n-A INPUT -s 1.2.3.4/32 -j DROP\n-A INPUT -j KUBE-FIREWALL\n",
            False,
        ),
        ("", False),
    ],
)
def test_iptables(rules: str, dropping: bool) -> None:
    assert iptables.is_dropping(rules) is dropping


def test_ports_that_iptables_lets_in() -> None:
    rules = (
        "-A INPUT -p tcp -m tcp --dport 10250 -j ACCEPT\n-A INPUT -p udp -m multiport --dports 53,8472 -j ACCEPT\n"
        "-A INPUT -s 10.0.0.0/8 -j ACCEPT\n-A INPUT -i lo -j ACCEPT\n-A FORWARD -p tcp --dport 1 -j ACCEPT\n"
    )
    assert iptables.open_ports(rules) == ["10250/tcp", "53/udp", "8472/udp", "*"]


def test_vrrp_that_firewalls_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = "-A INPUT -s 10.0.0.2/32 -p {} -j ACCEPT\n"
    assert iptables.open_ports(saved.format("vrrp")) == iptables.open_ports(saved.format("112")) == ["112/vrrp"]
    assert iptables.open_ports(saved.format("icmp")) == []
    assert ufw.open_ports(["allow from 10.0.0.2 proto vrrp", "deny from any proto vrrp"]) == ["112/vrrp"]
    for left, right in (
        ({"meta": {"key": "l4proto"}}, "vrrp"),
        ({"meta": {"key": "l4proto"}}, 112),
        ({"payload": {"protocol": "ip", "field": "protocol"}}, 112),
        ({"payload": {"protocol": "ip", "field": "protocol"}}, "icmp"),
        ({"meta": {"key": "iifname"}}, "vrrp"),
    ):
        match = {"match": {"op": "==", "left": left, "right": right}}
        listing(monkeypatch, [base("input", "input", "drop"), rule("input", SADDR, match, {"accept": None})])
        assert nftables.open_ports() == (["112/vrrp"] if right != "icmp" and "iifname" not in str(left) else [])
    zone = "public\n  target: default\n  ports: 22/tcp\n  protocols: vrrp icmp\n"
    monkeypatch.setattr(firewalld, "run", lambda argv: CommandResult(argv, 0, zone, ""))
    assert firewalld.open_ports() == ["22/tcp", "112/vrrp"]


def test_ports_of_other_protocols_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ufw, "is_active", lambda: False)
    monkeypatch.setattr(firewalld, "is_active", lambda: True)
    monkeypatch.setattr(firewalld, "open_ports", lambda: ["22/tcp", "5000/sctp"])
    monkeypatch.setattr(nftables, "chains", list)
    monkeypatch.setattr(iptables, "rules", lambda: "")
    (found,) = reading.read()
    assert found["open"] == ["22/tcp"]
    assert reports.machine_problem(facts(gpu={"functions": []}, firewalls=[found])) == ""


def test_what_is_active_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = ":INPUT DROP [0:0]\n"
    monkeypatch.setattr(iptables, "rules", lambda: saved)
    monkeypatch.setattr(nftables, "chains", lambda: list(CHAINS))
    monkeypatch.setattr(nftables, "open_ports", lambda: ["22/tcp", "22/tcp"])
    monkeypatch.setattr(nftables, "is_persistent", lambda: False)
    assert reading.read() == [
        {"name": "nftables", "open": ["22/tcp"], "writable": False, "chains": ["inet filter input", "ip own fwd"]},
        {"name": "iptables", "open": [], "writable": False, "chains": ["INPUT"]},
    ]
    Ufw(monkeypatch)
    monkeypatch.setattr(nftables, "chains", list)
    assert [each["name"] for each in reading.read()] == ["ufw"]


def test_a_setting_of_leave_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Ufw(monkeypatch)
    before = dict(there.rules)
    assert converge(Spec()).actions == []
    assert there.rules == before
