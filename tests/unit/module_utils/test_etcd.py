"""The members of etcd: what etcdctl reports, which member may be removed, and when a control plane has joined."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpunodes.ansible.module_utils import containers, etcd, etcd_snapshot, kube_api, kubeconfig, ledger
from gpunodes.ansible.module_utils.cluster import membership
from gpunodes.ansible.module_utils.cluster.nodes import CONTROL_PLANE
from gpunodes.ansible.module_utils.etcd import Member
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.process import CommandResult

# etcdctl 3.6.8 of a cluster of two, and a third member that was added and has not started.
LISTED = (
    '{"header":{"cluster_id":11588568905070377092,"member_id":8927110378999362521,"raft_term":3},"members":['
    '{"ID":8927110378999362521,"name":"cp-1","peerURLs":["https://10.0.0.1:2380"],"clientURLs":["https://10.0.0.1:2379"]},'
    '{"ID":14578408409545168213,"name":"cp-2","peerURLs":["https://10.0.0.2:2380"],"clientURLs":["https://10.0.0.2:2379"]},'
    '{"ID":2,"peerURLs":["https://10.0.0.3:2380"],"isLearner":true}]}\n'
)
HEALTH = (
    '[{"endpoint":"https://10.0.0.1:2379","health":true,"took":"9.9ms"},'
    '{"endpoint":"https://10.0.0.2:2379","health":false,"took":"5.0s","error":"context deadline exceeded"}]\n'
)
STATUS = (
    '[{"Endpoint":"https://127.0.0.1:2379","Status":{"header":{"cluster_id":1,"member_id":8927110378999362521,'
    '"revision":7,"raft_term":3},"version":"3.6.8","dbSize":20480,"leader":14578408409545168213,"raftIndex":9}}]\n'
)
CONFIG = kubeconfig.Kubeconfig("https://10.0.0.100:6443", "-----BEGIN CERTIFICATE-----\n", None, None)


def member(number: int, *, learner: bool = False, started: bool = True, name: str = "") -> Member:
    address = f"10.0.0.{number}"
    url = [f"https://{address}:2379"] if started else []
    return Member(number, (name or f"cp-{number}") if started else "", [address], url, learner)


@dataclass
class Etcd:
    """etcd behind crictl: members, those that work, the leader, and the requests that were made."""

    members: list[Member]
    working: set[int]
    leads: int = 1
    asked: list[str] = field(default_factory=list)

    def run(self, argv: list[str], *_: Any) -> CommandResult:
        assert argv[:3] == ["crictl", f"--runtime-endpoint={containers.runtime_socket()}", "--timeout=30s"]
        if argv[3] == "ps":
            return CommandResult(argv, 0, "0123456789ab\n", "")
        assert argv[3:7] == ["exec", "--sync", "--timeout=30", "0123456789ab"]
        assert argv[7] == "etcdctl"
        endpoints = argv[8].partition("=")[2].split(",")
        words = argv[argv.index("--write-out=json") + 1 :]
        self.asked.append(" ".join(words))
        requests = {"member": self.member, "endpoint": self.endpoint, "move-leader": self.move_leader}
        return requests[words[0]](argv, words, endpoints)

    def member(self, argv: list[str], words: list[str], _: list[str]) -> CommandResult:
        voters = [each for each in self.members if each.votes]
        if len([each for each in voters if each.id in self.working]) < etcd.quorum(len(voters)):
            log = '{"level":"warn","msg":"retrying of unary invoker failed"}'
            return CommandResult(argv, 1, "", f"{log}\nError: context deadline exceeded\n")
        if words[1] == "remove":
            self.members = [each for each in self.members if each.number != words[2]]
        listed = [
            {
                "ID": each.id,
                "name": each.name,
                "peerURLs": [f"https://{peer}:2380" for peer in each.peers],
                "clientURLs": list(each.clients),
                **({"isLearner": True} if each.learner else {}),
            }
            for each in self.members
        ]
        return CommandResult(argv, 0, json.dumps({"members": listed}), "")

    def endpoint(self, argv: list[str], words: list[str], endpoints: list[str]) -> CommandResult:
        if words[1] == "status":
            return CommandResult(argv, 0, json.dumps([{"Status": {"leader": self.leads}}]), "")
        owners = {url: each.id for each in self.members for url in each.clients}
        found = [{"endpoint": url, "health": owners[url] in self.working} for url in endpoints]
        code = 0 if all(each["health"] for each in found) else 1
        return CommandResult(argv, code, json.dumps(found), "Error: unhealthy cluster")

    def move_leader(self, argv: list[str], words: list[str], endpoints: list[str]) -> CommandResult:
        assert endpoints == [url for each in self.members if each.id == self.leads for url in each.clients]
        self.leads = int(words[1], 16)
        return CommandResult(argv, 0, "{}", "")

    @property
    def left(self) -> list[int]:
        return [each.id for each in self.members]


def running(monkeypatch: pytest.MonkeyPatch, *members: Member, working: set[int] | None = None, leads: int = 1) -> Etcd:
    made = Etcd(list(members), {each.id for each in members} if working is None else working, leads)
    monkeypatch.setattr(containers, "run", made.run)
    nodes(monkeypatch)
    monkeypatch.setattr(membership, "_POLL_S", 0)
    monkeypatch.setattr(membership, "_STARTING_S", 0)
    return made


def nodes(monkeypatch: pytest.MonkeyPatch, *names: str, **addresses: str) -> None:
    """The nodes of the cluster: control planes with these ``addresses``, and workers that report all of them."""
    label = {CONTROL_PLANE: ""}
    listed = [
        {"metadata": {"name": name.replace("_", "-"), "labels": label}, "status": {"addresses": [{"address": address}]}}
        for name, address in addresses.items()
    ]
    everything = [{"address": f"10.0.0.{number}"} for number in range(9)]
    listed += [{"metadata": {"name": name}, "status": {"addresses": everything}} for name in names]
    monkeypatch.setattr(kube_api, "admin", lambda: SimpleNamespace(get=lambda _: {"items": listed}))


def test_what_etcdctl_prints() -> None:
    first, second, third = etcd.parse_members(LISTED)
    assert (first.name, first.peers, first.clients) == ("cp-1", ["10.0.0.1"], ["https://10.0.0.1:2379"])
    assert int(second.number, 16) == second.id == 14578408409545168213
    assert (third.started, third.votes) == (False, False)
    assert str(third) == "a member that has not started (10.0.0.3)"
    assert etcd.parse_health(HEALTH) == {"https://10.0.0.1:2379"}
    assert etcd.parse_leader(STATUS) == second.id
    assert etcd.parse_leader(STATUS.replace('"leader":14578408409545168213', '"leader":0')) == 0


def test_ids_as_texts() -> None:
    """A JSON library of protocol buffers writes them so."""
    assert etcd.parse_members(LISTED.replace("14578408409545168213", '"14578408409545168213"')) == etcd.parse_members(
        LISTED
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"ID":2', '"ID":"2; reboot"'),
        ('"ID":2', '"ID":-2'),
        ('"ID":2', '"ID":true'),
        ('"ID":2', '"ID":2.0'),
        ('"ID":2', f'"ID":{1 << 64}'),
        ('"ID":2', '"ID":8927110378999362521'),
        ('"cp-2"', '"cp-2\\u001b[2J"'),
        ('"cp-2"', '["cp-2"]'),
        ("https://10.0.0.3:2380", "https://10.0.0.3:2380/x"),
        ("https://10.0.0.3:2380", "https://root@10.0.0.3:2380"),
        ("https://10.0.0.3:2380", "https://10.0.0.3"),
        ("https://10.0.0.3:2380", "https://10.0.0.3:2380,https://10.0.0.1:2380"),
        ("https://10.0.0.3:2380", "file:///etc/shadow"),
        ("https://10.0.0.3:2380", "https://$(reboot):2380"),
        ("https://10.0.0.1:2379", "--endpoints=x"),
        ('"peerURLs":["https://10.0.0.3:2380"]', '"peerURLs":null'),
        (LISTED, '{"members":[]}'),
        (LISTED, "[]"),
        (LISTED, "[" * 100_000),
        (LISTED, ""),
    ],
)
def test_another_report_is_refused(old: str, new: str) -> None:
    assert old in LISTED
    with pytest.raises(MachineProblem, match="etcd's report of its members is invalid"):
        etcd.parse_members(LISTED.replace(old, new))


@pytest.mark.parametrize("text", ["", "{}", "[]", '[{"Status": 1}]', '[{"Status": {"leader": "x"}}]'])
def test_another_status_is_refused(text: str) -> None:
    with pytest.raises(MachineProblem, match="etcd's report"):
        etcd.parse_leader(text)


def test_etcdctl_runs_in_the_one_container_of_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    listed = ["0123456789abcdef\n"]

    def run(argv: list[str], *_: Any) -> CommandResult:
        seen.append(argv)
        return CommandResult(argv, 0, listed[-1] if argv[3] == "ps" else LISTED, "")

    monkeypatch.setattr(containers, "run", run)
    assert len(etcd.members()) == 3
    assert seen[0][3:] == [
        *("ps", "--quiet", "--name", "^etcd$", "--label", "io.kubernetes.pod.namespace=kube-system"),
    ]
    assert seen[1][6:9] == ["0123456789abcdef", "etcdctl", "--endpoints=https://127.0.0.1:2379"]
    for answer in ("", "0123456789abcdef\nfedcba9876543210\n", "--help\n"):
        listed.append(answer)
        with pytest.raises(MachineProblem, match="etcd does not run on this machine"):
            etcd.members()


def test_docker_as_runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    socket = tmp_path / "cri-dockerd.sock"
    socket.touch()
    monkeypatch.setattr(containers, "_DOCKER_SOCKET", str(socket))
    made = running(monkeypatch, member(1))
    assert etcd.members() == made.members


def test_without_a_quorum_the_message_has_etcds_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    running(monkeypatch, member(1), member(2), member(3), working={1})
    with pytest.raises(
        MachineProblem, match=r"`etcdctl member list`: Error: context deadline exceeded; wanted: an etcd"
    ):
        etcd.members()


def test_a_member_is_removed_from_those_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    made = running(monkeypatch, member(1), member(2), member(3))
    would = membership.remove("10.0.0.2", "", check=True)
    assert (made.left, would.actions) == ([1, 2, 3], ["remove etcd member cp-2"])
    assert membership.remove("10.0.0.2", "", check=False) == would
    assert made.left == [1, 3]
    assert membership.remove("10.0.0.2", "", check=False).actions == []


def test_a_member_of_another_node_is_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = running(monkeypatch, member(1), member(2), member(3, learner=True, started=False))
    with pytest.raises(MachineProblem, match=r"the address 10.0.0.2 is cp-2, not cp-9"):
        membership.remove("10.0.0.2", "cp-9", check=False)
    membership.remove("10.0.0.3", "cp-9", check=False)
    assert made.left == [1, 2]
    membership.remove("10.0.0.2", "cp-2", check=False)
    assert made.left == [1]


def test_a_member_at_another_address_than_its_node_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """kubeadm's --apiserver-advertise-address was that of another network."""
    made = running(monkeypatch, member(1), member(2), member(3))
    nodes(monkeypatch, cp_1="192.168.1.1", cp_2="192.168.1.2", cp_3="192.168.1.3")
    made.working = {2, 3}
    with pytest.raises(MachineProblem, match=r"without cp-2 \(10.0.0.2\), 1 of 2 members of etcd would work"):
        membership.remove("192.168.1.2", "cp-2", check=False)
    made.working = {1, 2, 3}
    membership.remove("192.168.1.2", "cp-2", check=False)
    assert made.left == [1, 3]


def test_a_member_that_works_is_not_removed_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence by SSH is no death: a firewall, a changed key, a machine with much work."""
    made = running(monkeypatch, member(1), member(2), member(3))
    for address in ("10.0.0.2", ""):
        with pytest.raises(MachineProblem, match=r"etcd's member cp-2 \(10.0.0.2\) works: the machine runs"):
            membership.remove(address, "", check=address != "", dead_name="cp-2")
    assert made.left == [1, 2, 3]
    made.working = {1, 3}
    membership.remove("10.0.0.2", "cp-2", check=False, dead_name="cp-2")
    assert made.left == [1, 3]


@pytest.mark.parametrize("address", ["", "192.168.7.2"])
def test_the_member_of_a_dead_machine_without_a_node_is_found_by_its_name(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """The inventory may have a DNS name, or an address of another network."""
    made = running(monkeypatch, member(1), member(2), member(3), working={1, 3})
    assert membership.remove(address or "10.0.0.9", "", check=False).actions == []
    assert membership.remove(address, "", check=False, dead_name="cp-9").actions == []
    assert membership.remove(address, "", check=False, dead_name="cp-2").actions == ["remove etcd member cp-2"]
    assert made.left == [1, 3]
    # The node's name is the member's, whatever the inventory calls the machine.
    made.members, made.working = [member(1), member(2), member(3)], {1, 2}
    nodes(monkeypatch, cp_3="10.0.0.3")
    assert membership.remove(address, "cp-3", check=False, dead_name="rack-7").actions == ["remove etcd member cp-3"]
    made.members, made.working = [member(1), member(2), member(3)], {1, 2}
    with pytest.raises(MachineProblem, match="belongs to the node cp-3"):
        membership.remove(address, "", check=False, dead_name="cp-3")


def test_the_leadership_moves_before_the_leader_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = running(monkeypatch, member(1), member(2), member(3), leads=3)
    assert membership.remove("10.0.0.3", "", check=False).actions[0] == "move the leadership of etcd"
    assert [each for each in made.asked if each.startswith(("move", "member remove"))] == [
        "move-leader 1",
        "member remove 3",
    ]
    assert (made.left, made.leads) == ([1, 2], 1)


def test_a_dead_member_is_removed_while_the_rest_has_a_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    made = running(monkeypatch, member(1), member(2), member(3), working={1, 2})
    membership.remove("10.0.0.3", "", check=False)
    assert made.left == [1, 2]


@pytest.mark.parametrize("check", [True, False])
def test_a_healthy_member_stays_while_the_rest_would_have_no_quorum(
    monkeypatch: pytest.MonkeyPatch, check: bool
) -> None:
    made = running(monkeypatch, member(1), member(2), member(3), working={1, 2})
    with pytest.raises(MachineProblem, match=r"without cp-2 \(10.0.0.2\), 1 of 2 members of etcd would work"):
        membership.remove("10.0.0.2", "", check=check)
    assert made.left == [1, 2, 3]


def test_from_two_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = running(monkeypatch, member(1), member(2))
    membership.remove("10.0.0.2", "", check=False)
    assert made.left == [1]
    with pytest.raises(MachineProblem, match=r"the last control plane; wanted: .*`gpunodes reset`"):
        membership.remove("10.0.0.1", "", check=False)
    assert made.left == [1]


def test_a_learner_does_not_count_as_a_member_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    made = running(monkeypatch, member(1), member(2, learner=True))
    with pytest.raises(MachineProblem, match="the last control plane"):
        membership.remove("10.0.0.1", "", check=False)
    membership.remove("10.0.0.2", "", check=False)
    assert made.left == [1]


@pytest.mark.parametrize("started", [True, False])
def test_a_killed_join_leaves_a_learner_that_the_next_join_removes(
    monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    made = running(monkeypatch, member(1), member(2, learner=True, started=started))
    membership.remove_leftover("10.0.0.2", "", data=started, limit_s=0, check=False)
    assert made.left == [1]


def test_the_learner_of_another_machine_is_never_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be starting: another operator joins that machine at this moment."""
    made = running(monkeypatch, member(1), member(2, learner=True, started=False))
    with pytest.raises(MachineProblem, match=r"still joining etcd: a member that has not started \(10.0.0.2\)"):
        membership.remove_leftover("10.0.0.3", "", data=False, limit_s=0, check=False)
    assert made.left == [1, 2]
    monkeypatch.setattr(kubeconfig, "load", lambda _: CONFIG)
    made.asked.clear()
    assert membership.remove_leftover("10.0.0.3", "", data=False, limit_s=0, check=True).actions == []
    assert made.asked == ["member list"]


def test_before_there_is_a_cluster_a_dry_run_asks_no_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    made = running(monkeypatch, working=set())
    monkeypatch.setattr(kubeconfig, "load", lambda _: None)
    assert membership.remove_leftover("10.0.0.2", "", data=False, limit_s=0, check=True).actions == []
    assert made.asked == []
    with pytest.raises(MachineProblem):
        membership.remove_leftover("10.0.0.2", "", data=False, limit_s=0, check=False)


def test_another_join_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = running(monkeypatch, member(1), member(2, learner=True))

    def sleep(_: float) -> None:
        made.members[1] = member(2)

    monkeypatch.setattr(time, "sleep", sleep)
    assert membership.remove_leftover("10.0.0.3", "", data=False, limit_s=60, check=False).actions == []
    assert made.left == [1, 2]


def test_a_reinstalled_machine_joins_again_while_the_rest_has_a_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    made = running(monkeypatch, member(1), member(2), member(3), working={1, 2})
    membership.remove_leftover("10.0.0.3", "", data=False, limit_s=0, check=False)
    assert made.left == [1, 2]


def test_a_member_that_works_elsewhere_with_the_address_is_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = running(monkeypatch, member(1), member(2), member(3))
    with pytest.raises(MachineProblem, match=r"cp-3 \(10.0.0.3\) works, but this machine has no data"):
        membership.remove_leftover("10.0.0.3", "", data=False, limit_s=0, check=False)
    assert made.left == [1, 2, 3]
    membership.remove_leftover("10.0.0.3", "", data=True, limit_s=0, check=False)
    assert made.left == [1, 2]


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("own", ["", "worker-9"])
def test_a_machine_that_reports_the_address_of_another_control_plane_does_not_remove_its_member(
    monkeypatch: pytest.MonkeyPatch, started: bool, own: str
) -> None:
    made = running(monkeypatch, member(1), member(2), member(3, started=started))
    nodes(monkeypatch, "worker-9", cp_1="10.0.0.1", cp_2="10.0.0.2", cp_3="10.0.0.3")
    message = "belongs to the node cp-3, and the machine"
    with pytest.raises(MachineProblem, match=message if not (own and started) else r"is cp-3, not worker-9"):
        membership.remove("10.0.0.3", own, check=False)
    with pytest.raises(MachineProblem, match=message):
        membership.remove_leftover("10.0.0.3", own, data=True, limit_s=0, check=False)
    assert made.left == [1, 2, 3]
    membership.remove_leftover("10.0.0.3", "cp-3", data=True, limit_s=0, check=False)
    assert made.left == [1, 2]


def test_the_member_of_a_node_that_reports_another_address_is_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = running(monkeypatch, member(1), member(2), member(3))
    nodes(monkeypatch, cp_3="10.9.9.9")
    with pytest.raises(MachineProblem, match="belongs to the node cp-3, and the machine has no node"):
        membership.remove("10.0.0.3", "", check=False)
    assert made.left == [1, 2, 3]


def test_a_worker_that_reports_all_addresses_keeps_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    made = running(monkeypatch, member(1), member(2), member(3))
    nodes(monkeypatch, "worker-9", cp_1="10.0.0.1")
    membership.remove("10.0.0.3", "", check=False)
    assert made.left == [1, 2]


@pytest.mark.parametrize("address", ["", "10.0.0", "cp-1", "10.0.0.1:2380", "--help"])
def test_only_an_address_names_a_member(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    made = running(monkeypatch, member(1), member(2))
    with pytest.raises(MachineProblem, match="is not the address of a member"):
        membership.remove(address, "", check=False)
    assert made.left == [1, 2]


def test_ambiguous_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Member(2, "cp-2", ["10.0.0.2", "10.0.0.3"], ["https://10.0.0.2:2379"], learner=False)
    made = running(monkeypatch, member(1), both, member(3))
    for address in ("10.0.0.2", "10.0.0.3"):
        with pytest.raises(MachineProblem, match="several members or addresses"):
            membership.remove(address, "", check=False)
    assert made.left == [1, 2, 3]


def test_a_member_among_others_is_not_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    running(monkeypatch, member(1))
    membership.check_alone(["cp-1"], required=True)
    running(monkeypatch, member(1), member(2, learner=True, started=False))
    with pytest.raises(MachineProblem, match=r"a cluster that has others \(10.0.0.2\).*`gpunodes remove`"):
        membership.check_alone(["cp-1"], required=True)
    running(monkeypatch, member(1), member(2), working={1})
    with pytest.raises(MachineProblem, match=r"may be a member of a cluster with others: .*--dead"):
        membership.check_alone(["cp-1"], required=True)
    monkeypatch.setattr(containers, "run", lambda argv, *_: CommandResult(argv, 0, "", ""))
    with pytest.raises(MachineProblem, match=r"may be a member .*etcd does not run on this machine"):
        membership.check_alone(["cp-1"], required=True)


def test_a_whole_cluster_is_reset_with_all_members_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """An inventory may know fewer control planes than the cluster has."""
    running(monkeypatch, member(1), member(2), member(3))
    with pytest.raises(MachineProblem, match=r"has others \(cp-2, cp-3\).*they must all be in the inventory"):
        membership.check_alone(["cp-1", "10.0.0.1"], required=False)
    with pytest.raises(MachineProblem, match=r"has others \(cp-3\)"):
        membership.check_alone(["cp-1", "10.0.0.2"], required=False)
    membership.check_alone(["cp-1", "cp-2", "10.0.0.3"], required=False)
    # An etcd that is just starting is waited for.
    made = running(monkeypatch, member(1), member(2), working={1})
    monkeypatch.setattr(membership, "_STARTING_S", 60)
    monkeypatch.setattr(time, "sleep", lambda _: made.working.add(2))
    with pytest.raises(MachineProblem, match=r"has others \(cp-2\)"):
        membership.check_alone(["cp-1"], required=False)
    # One that does not work has no cluster to lose, and neither has one without a quorum.
    running(monkeypatch, member(1), member(2), member(3), working={1, 2})
    membership.check_alone(["cp-1", "cp-2"], required=False)
    running(monkeypatch, member(1), member(2), working={1})
    membership.check_alone(["cp-1"], required=False)


def test_a_control_plane_that_a_restore_left_is_reset_when_the_restored_one_responds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`etcd restore` names this reset as the next step. One whose etcd was started again is a member like others."""
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger/ledger.json"))
    monkeypatch.setattr(containers, "run", lambda argv, *_: CommandResult(argv, 0, "", ""))
    with pytest.raises(MachineProblem, match="may be a member"):
        membership.check_alone(["cp-1"], required=True, responds=True)
    ledger.Ledger(etcd_restore={"snapshot": "0" * 64, "state": "stopped"}).save()
    membership.check_alone(["cp-1"], required=True, responds=True)
    with pytest.raises(MachineProblem, match="may be a member"):
        membership.check_alone(["cp-1"], required=True, responds=False)
    running(monkeypatch, member(1), member(2))
    with pytest.raises(MachineProblem, match="has others"):
        membership.check_alone(["cp-1"], required=True, responds=True)


def test_a_join_is_complete_when_member_and_api_server_work(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Api:
        def __init__(self, config: kubeconfig.Kubeconfig, patience_s: float) -> None:
            asked.append(config.server)

        def get(self, path: str) -> None:
            asked.append(path)

        def close(self) -> None:
            pass

    monkeypatch.setattr(kubeconfig, "load", lambda _: CONFIG)
    monkeypatch.setattr(kube_api, "Client", Api)
    made = running(monkeypatch, member(1), member(2))
    membership.wait_until_member("10.0.0.2", 0)
    # The kubeconfig leads to any of them: this machine's own API server counts.
    assert asked == ["https://10.0.0.2:6443", "/readyz"]
    for members, working, message in (
        ([member(1)], {1}, "etcd has no member with the address 10.0.0.2"),
        ([member(1), member(2, learner=True)], {1, 2}, "does not vote yet"),
        ([member(1), member(2, started=False)], {1, 2}, "etcd does not carry out"),
        ([member(1), member(2), member(3)], {1, 3}, "is not healthy"),
    ):
        made.members, made.working = members, working
        if message == "etcd does not carry out":
            made.working = set()
        with pytest.raises(MachineProblem, match=message):
            membership.wait_until_member("10.0.0.2", 0)


def test_members_that_hang_do_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """etcdctl 3.6 asks one after the other, 10 s each, and prints what it has at its end."""

    def execute(_: str, argv: list[str], timeout_s: int) -> CommandResult:
        words = argv[argv.index("--write-out=json") + 1 :]
        if words[0] == "member":
            return CommandResult(argv, 0, LISTED, "")
        if "--cluster" in words:
            return CommandResult(argv, 1, STATUS if timeout_s > 2 * 10 else "", "context deadline exceeded")
        return CommandResult(argv, 0, STATUS, "")

    monkeypatch.setattr(containers, "ids", lambda *_: ["0123456789ab"])
    monkeypatch.setattr(containers, "execute", execute)
    found = etcd_snapshot.members()["members"]
    assert {each["name"]: each["healthy"] for each in found} == {"cp-1": True, "cp-2": False, "": False}
