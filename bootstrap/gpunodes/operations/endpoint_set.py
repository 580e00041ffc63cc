"""Move an existing cluster to another endpoint: its API servers, its own configuration, and its nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from gpunodes import settings
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.engine import journal
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, MachineResult, Outcome, PreflightFinding, Role, RunResult, Severity
from gpunodes.operations import nodes, phases, preflight
from gpunodes.operations.run import Operation, RunOptions, carry_out
from gpunodes.operations.tracker import RunView
from gpunodes.planner import endpoint, endpoint_checks
from gpunodes.planner.candidates import requirements_of

OPERATION = Operation(
    name="endpoint set",
    playbook="endpoint_set.yml",
    phases=(
        phases.ENDPOINT,
        phases.API_CERTIFICATE,
        phases.CLUSTER_ENDPOINT,
        phases.NODE_ENDPOINT,
        phases.ENDPOINT_VERIFIED,
        phases.ENDPOINT_RELEASED,
    ),
    needs_cluster=True,
)
_CHECK = "endpoint"


def parse(text: str) -> str:
    """HOST:PORT of an argument; raises WrongInput for anything else."""
    found = re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?)(:(\d{1,5}))?", text.strip())
    port = int(found[4] or endpoint.PORT) if found else 0
    if found is None or not 0 < port < 65536:  # noqa: PLR2004 - the range of TCP ports
        raise WrongInput(
            f"{text!r} is no endpoint",
            "ADDRESS or ADDRESS:PORT with an IPv4 address or a DNS name, such as api.example:6443",
            "correct the argument; clusters with IPv6 are not supported",
        )
    return f"{found[1]}:{port}"


def run(inventory: Inventory, target: str, view: RunView, options: RunOptions) -> RunResult:
    """Move the cluster to ``target`` (HOST:PORT).

    Control planes must all respond, workers that do not are part of the result, and of the next run. Raises WrongInput
    if the settings request another endpoint, and GpunodesError if there is no cluster; nothing is changed then.
    """
    controls = inventory.control_planes()
    for machine in controls:
        _check_settings(inventory, machine, target)
    machines = inventory.machines(Role.CONTROL_PLANE, Role.WORKER)
    vip = bool(settings.resolve(inventory.with_rendered(controls[0].name, [endpoint.VIP]))[endpoint.VIP])
    variables = {**options.variables, **({} if vip else {endpoint.ENDPOINT: target})}
    view.begin(OPERATION.name, machines)
    folder = journal.open_run(OPERATION.name)
    seen = preflight.inspect(inventory, machines, folder, view, variables)
    findings = () if seen.interrupted else _findings(seen, target, vip=vip)
    if not (seen.interrupted or seen.cluster):
        finding = seen.no_cluster()
        raise GpunodesError(f"{finding.machine}: {finding.problem.found}", "a cluster that responds", _RESTORE)
    view.findings(findings)
    if seen.interrupted or any(finding.severity is Severity.ERROR for finding in findings):
        skipped = [MachineResult(machine.name, Outcome.SKIPPED) for machine in machines]
        return RunResult(OPERATION.name, skipped, findings, str(seen.log), options.dry_run, seen.interrupted)
    matched = nodes.match(inventory, machines, seen)
    members = [each for each in machines if each.name in seen.facts and matched[each.name].node]
    absent = [each for each in machines if each.name not in seen.facts]
    forgotten = _forgotten(seen, {match.node.name for match in matched.values() if match.node})
    view.findings(forgotten)
    # A virtual address is given up only when nothing uses it any more. A machine that joined and has no node now does.
    outside = [name for name, own in seen.facts.items() if own["kubernetes"]["role"] and not matched[name].node]
    moving = [] if absent or forgotten or outside else [each.name for each in members]
    wiring = {"wiring_new_endpoint": target, "wiring_moving": moving}
    run_options = replace(options, variables={**variables, **wiring}, seen=seen)
    result = carry_out(OPERATION, inventory, members, view, run_options)
    unreachable = [
        MachineResult(each.name, Outcome.UNREACHABLE, cause="it still uses the earlier endpoint; run this again later")
        for each in absent
    ]
    return replace(
        result,
        machines=[*result.machines, *unreachable],
        findings=[*findings, *forgotten, *result.findings],
    )


_RESTORE = "restore it first, or correct the inventory; nothing was changed"


def _check_settings(inventory: Inventory, machine: Machine, target: str) -> None:
    """Raise WrongInput if the settings of a control plane request another one: later runs would refuse this one."""
    found = endpoint.settings_of(settings.resolve(inventory.with_rendered(machine.name, endpoint.SETTINGS)))
    if found.requested and found.requested != target:
        setting = endpoint.VIP if found.vip else endpoint.ENDPOINT
        raise WrongInput(
            f"{setting} of {machine.name} requests the endpoint {found.requested}, not {target}",
            "the endpoint of the settings",
            f"correct {setting} in {inventory.path} first, or run `gpunodes endpoint set {found.requested}`",
        )


def _findings(seen: preflight.Inspection, target: str, *, vip: bool) -> Sequence[PreflightFinding]:
    """What stops the move, before anything is changed; and workers that do not respond, as warnings."""
    requirements = requirements_of(seen.cluster, "")
    macs = frozenset(endpoint_checks.macs(list(seen.facts.values())))
    requirements = replace(requirements, macs=macs)
    found = []
    for candidate in seen.candidates:
        if candidate.facts is None:
            severity = Severity.ERROR if candidate.role is Role.CONTROL_PLANE else Severity.WARNING
            problem = Problem(
                candidate.unreachable,
                "a reachable machine",
                "start it, or remove it from the cluster and the inventory"
                if severity is Severity.ERROR
                else "run this command again when it responds: until then it uses the earlier endpoint",
            )
            found.append(PreflightFinding(candidate.name, "reachable", problem, severity))
            continue
        problems = [*endpoint_checks.before_move(candidate, candidate.facts, requirements)]
        if not vip:
            reached = {each["endpoint"]: each for each in candidate.facts.get("endpoints") or ()}
            if target in reached:
                problems += endpoint_checks.unusable(reached[target], connects=True, named=False)
        found += [PreflightFinding(candidate.name, _CHECK, problem) for problem in problems]
    return found


def _forgotten(seen: preflight.Inspection, known: set[str]) -> list[PreflightFinding]:
    """The nodes whose machines are not in the inventory: nobody moves them."""
    return [
        PreflightFinding(
            str(node["name"]),
            _CHECK,
            Problem(
                "its machine is not in the inventory, so it keeps the earlier endpoint",
                "every node's machine in the inventory",
                "add it and run this command again, or delete the node if the machine is gone",
            ),
            Severity.WARNING,
        )
        for node in (seen.cluster or {}).get("nodes", ())
        if node["name"] not in known
    ]
