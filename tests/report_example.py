"""A report of an invented cluster, for tests and for the pictures in docs/report.md; no machine has these names."""

from __future__ import annotations

import dataclasses
import datetime as dt
import itertools
from collections.abc import Sequence
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.engine.history import EntryKind, HistoryEntry
from gpunodes.health.model import Action, Finding, State, Verdict
from gpunodes.model import CertificateEnd, MachineCertificates, PreflightFinding, Severity
from gpunodes.operations.autoscale.commands import AutoscaleStatus, ScaledMachineStatus
from gpunodes.operations.maintenance import MaintainedNode
from gpunodes.operations.report import ClusterReport, ReportedMachine, Section
from gpunodes.operations.rolling.status import RolloutStatus
from gpunodes.operations.status import ClusterStatus, EtcdMember, NodeStatus
from gpunodes.repair.maintenance import Maintenance
from gpunodes.rollout.options import RolloutOptions
from gpunodes.rollout.record import RolloutOutcome
from gpunodes.rollout.state import Ended, Rollout
from gpunodes.views import report as view

from tests.hostile import hostile

NOW = dt.datetime(2026, 11, 25, 14, 30, tzinfo=dt.UTC).timestamp()
H, D = 3600.0, 86400.0
CONTROL_PLANES = ("cp-1", "cp-2", "cp-3")
HUNG, LOST, WARM, SILENT, OFF = "train-03", "train-07", "infer-02", "infer-05", "infer-06"
OPTIONS = RolloutOptions()
ATTACKS = (
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)' x='",
    "<script>alert(1)</script>",
    "</style></title><svg onload=alert(1)>",
    "{{ 7 * 7 }}{% for x in (1, 2) %}",
    "\u202e\u2066\x1b[31m\x00\x9b\u2028\udcff",
    "javascript:alert(1)",
    "<!-- --><![CDATA[ ]]>&lt;b&gt;",
    "<a href=//evil.example>" + "x" * 100_000,
    "e" + "\u0301" * 300,
    "\u0645\u0631\u062d\u0628\u0627",
)
WORDS = tuple(f"word-{number}" for number in range(len(ATTACKS)))

HUNG_FINDING = Finding(
    "hung-in-driver",
    "0000:4f:00.0",
    Action.REBOOT,
    State.HUNG,
    count=3,
    first="2026-11-25 13:58:02",
    last="2026-11-25 14:02:05",
    evidence=(
        "[518402.117343] INFO: task python3:48211 blocked for more than 122 seconds.",
        "[518402.117366]  os_acquire_rwlock_write+0x35/0x50 [nvidia]",
        "[518402.117371]  _nv042330rm+0x10/0x40 [nvidia]",
        "[518402.117379]  rm_cleanup_file_private+0x128/0x180 [nvidia]",
    ),
    message="A task is stuck in the NVIDIA driver: only a reboot ends it.",
    hung=True,
)
LOST_FINDING = Finding(
    "fallen-off-bus",
    "0000:9d:00.0",
    Action.REBOOT,
    State.SICK,
    first="2026-11-25 11:41:17",
    last="2026-11-25 11:41:17",
    evidence=("[402211.874410] NVRM: Xid (PCI:0000:9d:00): 79, pid=2113, GPU has fallen off the bus.",),
    message="The GPU does not respond on the PCI bus: reboot; replace it if that happens again.",
    code=79,
)
WARM_FINDING = Finding(
    "row-remap-pending",
    "0000:3b:00.0",
    Action.RESET_GPU,
    State.DEGRADED,
    evidence=("Remapped Rows: Pending: Yes",),
    message="A row of memory is remapped at the next reset of the GPU.",
    code=63,
)


def names(machines: int) -> list[tuple[str, str]]:
    """The names of workers with their pools: 8 of 14 train."""
    train = machines * 8 // 14
    width = max(2, len(str(machines)))
    return [(f"train-{number:0{width}}", "train") for number in range(1, train + 1)] + [
        (f"infer-{number:0{width}}", "infer") for number in range(1, machines - train + 1)
    ]


def _machine(name: str, number: int, pool: str, role: str, verdict: Verdict) -> ReportedMachine:
    read = name not in (SILENT, OFF)
    gpus = {"train": {"H100 SXM5 80GB": 8}, "infer": {"L40S": 4}}.get(pool, {})
    state = "off" if name == OFF else "not ready" if name in (HUNG, SILENT) else "ready"
    reason = {HUNG: "KubeletNotReady: PLEG is not healthy", SILENT: "the kubelet does not report", OFF: verdict.wanted}
    old = pool == "infer" and number % 6 == 1
    return ReportedMachine(
        name=name,
        address=f"10.20.{number // 250}.{number % 250 + 1}",
        role=role,
        pool=pool,
        node="" if name == OFF else name,
        node_state=state,
        node_reason=reason.get(name, ""),
        kubernetes="" if name == OFF else "v1.36.2" if old else "v1.36.3",
        os="Debian GNU/Linux 13 (trixie)" if read else "",
        kernel=("6.12.41+deb13-amd64" if old else "6.12.48+deb13-amd64") if read else "",
        runtime="containerd.io 2.1.4-1~debian.13~trixie" if read else "",
        driver="580.95.05" if read and pool else "",
        cuda="13.0" if read and pool == "train" else "",
        cudnn="9.14.0.64-1" if read and pool == "train" else "",
        gpus=gpus if read else {},
        health=verdict.state.value,
        not_read=""
        if read
        else verdict.wanted
        if name == OFF
        else "Failed to connect to the host via ssh: connect to host 10.20.0.16 port 22: No route to host",
    )


def verdict(name: str, pool: str) -> Verdict:
    gpus = {"train": 8, "infer": 4}.get(pool)
    common: dict[str, Any] = {"source": "live", "gpus_expected": gpus, "gpus_seen": gpus, "kernel_lines": 2184}
    found = {
        HUNG: Verdict(
            name, **common, state=State.HUNG, action=Action.REBOOT, hung_in_driver=True, findings=(HUNG_FINDING,)
        ),
        LOST: Verdict(
            name,
            **{**common, "gpus_seen": 7},
            state=State.SICK,
            action=Action.REBOOT,
            xids=(79,),
            findings=(LOST_FINDING,),
        ),
        WARM: Verdict(name, **common, state=State.DEGRADED, action=Action.RESET_GPU, findings=(WARM_FINDING,)),
        SILENT: Verdict(
            name,
            "live",
            State.UNREACHABLE,
            Action.NONE,
            findings=(Finding("unreachable", "", Action.NONE, State.UNREACHABLE, message="SSH: No route to host"),),
        ),
        OFF: Verdict(
            name, "live", State.OFF, Action.NONE, wanted="the autoscaler keeps it off since 2026-11-25 06:10 UTC"
        ),
    }
    return found.get(name) or Verdict(name, **common, state=State.HEALTHY, action=Action.NONE)


def _history() -> list[HistoryEntry]:
    made = []

    def repair(days: float, machine: str, number: int, outcome: str, step: str, why: str) -> None:
        began, by, key = NOW - days * D, "ops@admin-1", f"{machine}-{number}"
        rows: list[tuple[float, EntryKind, str, str, str, float]] = [
            (0, EntryKind.VERDICT, "hung reboot", "", why, 0),
            (4, EntryKind.STAGE, "cordon", "cordoned", "", 0),
            (130, EntryKind.STAGE, "drain", "drained", "", 126),
            (390, EntryKind.STEP, step, "ok" if outcome == "repaired" else "failed", "", 250),
            (470, EntryKind.VERIFICATION, step, "healthy" if outcome == "repaired" else "failed", "8 GPUs respond", 70),
            (474, EntryKind.END, "repair", outcome, why, 474),
        ]
        for after, kind, what, how, detail, seconds in rows:
            evidence = HUNG_FINDING.evidence[:2] if kind is EntryKind.VERDICT else ()
            made.append(
                HistoryEntry(began + after, machine, kind, what, how, detail, seconds, key, "10.20.0.1", by, evidence)
            )

    stuck = "a task is stuck in the NVIDIA driver"
    for days, machine, outcome, step in (
        (27.2, "train-02", "repaired", "reboot"),
        (26.1, "train-07", "repaired", "reboot"),
        (19.4, "train-05", "repaired", "reboot"),
        (19.2, "train-01", "repaired", "reset-gpu"),
        (19.1, "infer-04", "not-repaired", "reboot"),
        (12.8, "infer-01", "repaired", "bmc-reset"),
        (8.6, "train-04", "repaired", "reboot"),
        (8.5, "train-08", "needs-repair", "cold-cycle"),
        (3.3, "train-06", "repaired", "reboot"),
        (0.4, "train-02", "repaired", "reboot"),
    ):
        repair(days, machine, int(days * 10), outcome, step, stuck)
    made.append(
        HistoryEntry(NOW - 5.2 * H, "infer-06", EntryKind.POWER, "off", "off", "", 0, "", "10.20.0.1", "ops@admin-1")
    )
    passed = ("dcgmi -r 3", "passed", "8 GPUs, 24 tests", 1420.0)
    made.append(HistoryEntry(NOW - 2.1 * D, "train-08", EntryKind.BURN_IN, *passed, "", "10.20.0.1", "ops@admin-1"))
    return sorted(made, key=lambda each: each.time)


def _certificates(workers: Sequence[str]) -> list[MachineCertificates]:
    def one(name: str, days: int, renewal: str = "renew") -> CertificateEnd:
        path = f"/etc/kubernetes/pki/{name}.crt"
        return CertificateEnd(name, path, "kube-apiserver", int(NOW + days * D), days, renewal, "")

    found = [
        MachineCertificates(
            name,
            [one("apiserver", 21 + number), one("admin.conf", 87), one("etcd-server", 87), one("ca", 3400, "none")],
            [f"apiserver ends in {21 + number} days; `gpunodes certs renew` renews it"],
            "",
        )
        for number, name in enumerate(CONTROL_PLANES)
    ]
    for name in workers:
        if name == OFF:
            continue
        if name == SILENT:
            found.append(MachineCertificates(name, (), (), "Failed to connect to the host via ssh: No route to host"))
        else:
            found.append(MachineCertificates(name, [one("kubelet-client", 250, "kubelet")], (), ""))
    return found


def _findings(workers: Sequence[str]) -> list[PreflightFinding]:
    found = [
        PreflightFinding(
            "train-04",
            "gpu",
            Problem(
                "driver 570.172.08 is requested, and the machine has Blackwell GPUs (NVIDIA B200)",
                "a driver of branch 570.86 or newer with open modules",
                "set gpunodes_driver_branch to 580, or leave it out",
            ),
        ),
        PreflightFinding(
            "infer-03",
            "disk",
            Problem("/var/lib has 12 GiB free", "40 GiB for images", "free some space, or set gpunodes_data_directory"),
        ),
    ]
    return found + [
        PreflightFinding(
            name,
            "runtime",
            Problem(
                "it has containerd.io 2.1.4-1~debian.13~trixie, and keeps it",
                "2.2",
                f"`gpunodes runtime upgrade {name}` drains the node and replaces it",
            ),
            Severity.WARNING,
        )
        for name in workers
    ]


def _cluster(machines: Sequence[ReportedMachine]) -> ClusterStatus:
    nodes = [
        NodeStatus(
            each.name, each.name, each.role, each.node_state == "ready", each.node_reason, each.kubernetes, each.address
        )
        for each in machines
        if each.node
    ]
    return ClusterStatus(
        endpoint="k8s.example.net:6443",
        version="v1.36.3",
        nodes=[*nodes, NodeStatus("legacy-1", "", "worker", True, "", "v1.36.3", "10.20.9.4")],
        missing=(),
        off={OFF: "the autoscaler keeps it off since 2026-11-25 06:10 UTC"},
        etcd=[EtcdMember(str(n), name, False, n == 1, True, 41_300_000) for n, name in enumerate(CONTROL_PLANES, 1)],
        virtual_address="10.20.0.250",
        holders=["cp-1"],
        warnings=["cp-1: apiserver ends in 21 days; `gpunodes certs renew` renews it"],
    )


def report(machines: int = 14) -> ClusterReport:
    """A report of so many workers, most of them healthy."""
    rows = [(name, "", "control_plane") for name in CONTROL_PLANES]
    rows += [(name, pool, "worker") for name, pool in names(machines)]
    verdicts = [verdict(name, pool) for name, pool, _ in rows]
    found = [
        _machine(name, number, pool, role, each)
        for number, ((name, pool, role), each) in enumerate(zip(rows, verdicts, strict=True))
    ]
    workers = [name for name, _ in names(machines)]
    rollout = Rollout(
        id="7c1e",
        work="runtime",
        parameters={"containerd": "2.2"},
        options=OPTIONS,
        started=NOW - 3 * H,
        by="ops@admin-1",
        waiting=workers[4:],
        running=workers[2:3],
        done=workers[:2],
        ended={workers[3]: Ended(RolloutOutcome.NOT_DRAINED, "the pod team-a/eval-7 did not end within 10 minutes")},
        stopped="a machine could not be drained",
    )
    scaled = [each for each in found if each.pool == "infer"]
    return ClusterReport(
        inventory="/srv/gpunodes/inventory/hosts.yml",
        name="10.20.0.1",
        began=NOW - 48,
        ended=NOW,
        cluster=Section(_cluster(found)),
        certificates=Section(_certificates(workers)),
        findings=Section(_findings(workers[-3:])),
        health=Section(verdicts),
        history=Section(_history()),
        rollout=Section(RolloutStatus(rollout, "", {}, ())),
        maintenance=Section(
            [
                MaintainedNode(
                    "train-05",
                    "train-05",
                    Maintenance("replace a fan", "kim@admin-1", NOW - 2 * H, None, True),
                    True,
                )
            ]
        ),
        autoscale=Section(
            AutoscaleStatus(
                True,
                {"infer": {"min": 2, "max": len(scaled), "machines": len(scaled), "on": len(scaled) - 1}},
                [
                    ScaledMachineStatus(each.name, "infer", "off" if each.name == OFF else "on", NOW - 8.3 * H)
                    for each in scaled
                ],
            )
        ),
        machines=found,
    )


def document(workers: int = 14, **changes: Any) -> dict[str, Any]:
    """The document of such a report, with changes of the report."""
    return view.document_of(dataclasses.replace(report(workers), **changes))


def replaced(words: Sequence[str]) -> dict[str, Any]:
    """A document with one of ``words`` in place of every text, and of every key that is data."""
    given = document()
    made: dict[str, Any] = hostile(given, itertools.cycle(words))
    for number, machine in enumerate(made["machines"]):
        machine["gpus"] = {words[number % len(words)]: 8}
    made["autoscale"]["pools"] = {each: {"min": 1, "max": 2, "machines": 2, "on": 1} for each in words[:3]}
    made["rollout"]["rollout"]["parameters"] = dict.fromkeys(words[:2], words[-1])
    # What gpunodes itself writes, in a form that it reads again.
    return {**made, "time": given["time"], "schema": given["schema"]}
