"""The etcd member of one control plane: removed before the machine joins again or leaves, and checked after its join.

A machine is recognised by the address in its member's peer URL, which is that of its node: names may be missing. Where
kubeadm was told another address for the API (--apiserver-advertise-address), the name of its node is its member's. The
address of a machine without a node is only what the machine reports: a member of another node is never removed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from .. import etcd, kube_api, kubeconfig, ledger
from ..etcd import Member
from ..problem import MachineProblem
from ..report import Difference, Report
from .nodes import CONTROL_PLANE

_POLL_S = 2.0
_STARTING_S = 15.0
"""How long an etcd that is just starting is waited for before it counts as broken."""
_LEAVES = (
    "`gpunodes remove` of this machine (with --dead if it does not respond) removes it from the cluster; "
    "`gpunodes reset` of all control planes at once destroys the cluster: they must all be in the inventory"
)


def remove(address: str, name: str, check: bool, dead_name: str = "") -> Report:
    """Remove the member of the machine with this address; the report is empty if there is none.

    Its leadership is moved first. ``name`` is that of the machine's node, which kubeadm gives the member, "" for none;
    a member with another address is found by it. ``dead_name`` is the name of a machine that is gone, "" for one that
    is not: its node may be deleted already, and its member is found by this name then. Raises MachineProblem if the
    remaining members would have no quorum, if the member has another name, or belongs to another node, and if the
    member of a machine that is gone works.
    """
    found = etcd.members()
    member = etcd.at(found, address) if address or not dead_name else None
    if member is None and (own := name or dead_name):
        member = next((each for each in found if each.name == own), None)
    if member is not None and member.started and name and member.name != name:
        raise MachineProblem(
            f"etcd's member with the address {address} is {member.name}, not {name}",
            "a member with the name and the address of the machine's node",
            "compare `kubectl get nodes -o wide` with the inventory",
        )
    report = Report()
    if member is not None:
        _check_own(member, name)
        working = etcd.healthy(found)
        if dead_name and member.id in working:
            raise MachineProblem(
                f"etcd's member {member} works: the machine runs, although it does not respond by SSH",
                "a control plane that is gone and switched off (--dead)",
                "switch it off; or correct its address and SSH settings in the inventory, and remove it without --dead",
            )
        _remove(report, found, member, working, check)
    return report


def remove_leftover(address: str, name: str, data: bool, limit_s: float, check: bool) -> Report:
    """Remove what an interrupted join, or a lost installation, of this machine left in etcd, before it joins.

    ``name`` is that of the machine's node, "" for none. ``data``: the machine has etcd's data. Members of other
    machines are never touched: one that is still joining is waited for up to ``limit_s``, since etcd allows one at a
    time. Raises MachineProblem if it does not finish, if the remaining members would have no quorum, and if another
    machine works as this member, or another node has it.
    """
    if check and kubeconfig.load(kubeconfig.ADMIN) is None:
        return Report()  # the cluster does not exist yet
    deadline = time.monotonic() + (0 if check else limit_s)
    while True:
        found = etcd.members()
        member = etcd.at(found, address)
        joining = [each for each in found if each.learner and each != member]
        if not joining or time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    if joining and not check:
        raise MachineProblem(
            f"another control plane is still joining etcd: {joining[0]}",
            "one that joins at a time",
            "finish its join by `gpunodes join` of that machine, or remove it by `gpunodes remove`",
        )
    report = Report()
    if member is None:
        return report
    working = etcd.healthy(found)
    if member.id in working and not data:
        raise MachineProblem(
            f"etcd's member {member} works, but this machine has no data of etcd",
            "an address that no other machine has",
            "check which machine responds at that address, and correct the inventory",
        )
    _check_own(member, name)
    _remove(report, found, member, working, check)
    return report


def check_removable(found: Sequence[Member], member: Member, working: Collection[int]) -> None:
    """Raise MachineProblem if etcd would stop without this member; ``working`` are the ids of healthy members."""
    if member.learner:
        return
    others = [each for each in found if each.votes and each.id != member.id]
    if not others:
        raise MachineProblem(
            f"{member} is the only member of etcd: the last control plane",
            "another control plane that keeps the cluster",
            "`gpunodes reset` of this machine ends the cluster",
        )
    count, least = sum(each.id in working for each in others), etcd.quorum(len(others))
    if count < least:
        raise MachineProblem(
            f"without {member}, {count} of {len(others)} members of etcd would work",
            f"at least {least}: with fewer the cluster stops",
            "repair or remove the control planes that do not work first",
        )


def _check_own(member: Member, name: str) -> None:
    """Raise MachineProblem if the member belongs to another node than ``name``, the machine's own; "" for none."""
    for node in kube_api.admin().get("/api/v1/nodes")["items"]:
        metadata, listed = node["metadata"], (node.get("status") or {}).get("addresses") or ()
        other = str(metadata["name"])
        # A worker could report any address, and so keep a member that is to leave.
        shares = CONTROL_PLANE in (metadata.get("labels") or {}) and any(
            each.get("address") in member.peers for each in listed
        )
        if other != name and (shares or other == member.name):
            raise MachineProblem(
                f"etcd's member {member} belongs to the node {other}, and the machine "
                f"{f'is the node {name}' if name else 'has no node'}",
                "a member of no other node: the machine reports an address that another control plane has",
                "check the machine's address, and correct the inventory; nothing was removed",
            )


def check_alone(leaving: Collection[str], required: bool, responds: bool = False) -> None:
    """Raise MachineProblem if a reset of this control plane would leave others without it, or if that is unknown.

    ``leaving``: names and addresses of the machines that are reset together, with its own. ``required``: others of the
    inventory stay, so the members must be known. Without others a broken cluster is ended as well, and only members
    that work are in the way: the inventory does not know them. ``responds``: the API of its cluster responds on another
    control plane. A restore of etcd stops all control planes, so that is the restored cluster, and one that the restore
    left stopped is no member of it.
    """
    wanted = "a machine that is no member, or the only one, as its running etcd reports"
    try:
        found = etcd.members(0 if required else _STARTING_S)
    except MachineProblem as error:
        if not required or (responds and ledger.load().etcd_restore.get("state") == "stopped"):
            return
        raise MachineProblem(
            f"this control plane may be a member of a cluster with others: {error.problem.found}", wanted, _LEAVES
        ) from error
    staying = [each for each in found if not {each.name, *each.peers} & set(leaving)]
    if staying and not required:
        working = etcd.healthy(staying)
        staying = [each for each in staying if each.id in working]
    if len(found) > 1 and staying:
        names = ", ".join(member.name or member.peers[0] for member in staying)
        raise MachineProblem(f"this control plane belongs to a cluster that has others ({names})", wanted, _LEAVES)


def wait_until_member(address: str, limit_s: float) -> None:
    """Wait until this machine's etcd is a healthy voting member, and its API server is ready; raises MachineProblem."""
    deadline = time.monotonic() + limit_s
    while True:
        missing = _missing(address) or _api_problem(address)
        if not missing:
            return
        if time.monotonic() >= deadline:
            raise MachineProblem(
                f"the control plane on this machine is not complete: {missing}",
                "a voting, healthy member of etcd and an API server that is ready",
                "see `crictl ps -a` and `journalctl -u kubelet`; if its member is gone, run `gpunodes remove` of this "
                "machine and join it again",
            )
        time.sleep(_POLL_S)


def _missing(address: str) -> str:
    """What this machine's member of etcd lacks, "" if nothing."""
    try:
        found = etcd.members()
        member = etcd.at(found, address)
        if member is None:
            return f"etcd has no member with the address {address}"
        if not member.started or member.learner:
            return f"etcd's member {member} does not vote yet"
        return "" if member.id in etcd.healthy([member]) else f"etcd's member {member} is not healthy"
    except MachineProblem as error:
        return error.problem.found


def _api_problem(address: str) -> str:
    """Why the API server of this very machine is not ready, "" if it is: the kubeconfig may lead to another one."""
    if kubeconfig.load(kubeconfig.ADMIN) is None:
        return f"{kubeconfig.ADMIN} does not exist"
    return kube_api.local_problem(address)


def _remove(report: Report, found: Sequence[Member], member: Member, working: Collection[int], check: bool) -> None:
    check_removable(found, member, working)
    heir = next((each for each in found if each.votes and each.id in working and each.id != member.id), None)
    leads = member.votes and heir is not None and member.id in working and etcd.leader() == member.id
    if leads:
        report.add(
            "move the leadership of etcd", Difference("leader of etcd", {"id": member.number}, {"id": "another"})
        )
    title = member.name or member.number
    report.add(f"remove etcd member {title}", Difference("members of etcd", {title: ", ".join(member.peers)}, {}))
    if check:
        return
    if leads and heir is not None:
        etcd.move_leader(member, heir)
    etcd.remove_member(member)
