"""Read when the certificates of all nodes end."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gpunodes.engine import events, journal, runner
from gpunodes.errors import ExitCode, Interrupted, exit_code_for
from gpunodes.inventory import Inventory
from gpunodes.model import CertificateEnd, Machine, MachineCertificates
from gpunodes.operations import phases
from gpunodes.operations.tracker import RunView, Tracker
from gpunodes.planner import certificates, reports

PHASES = (phases.CERTIFICATE_ENDS,)


def run(inventory: Inventory, machines: Sequence[Machine], view: RunView) -> list[MachineCertificates]:
    """Read the certificates of ``machines``; nothing is changed."""
    tracker = Tracker(machines, PHASES, view)
    view.begin("certs", machines)
    folder = journal.open_run("certs")
    names = [machine.name for machine in machines]
    ended = runner.run(runner.Play("certs.yml", inventory, names), folder, tracker.on_event)
    if ended.interrupted:
        raise Interrupted
    tracker.check_controller(ended)
    return reported(tracker, names, "" if ended.ok else ended.error_text)


def reported(tracker: Tracker, names: Sequence[str], error: str) -> list[MachineCertificates]:
    """What these machines reported in a run; ``error`` is the run's, for a machine without a failure of its own."""
    found = tracker.answers.get("certificates", {})
    causes = {name: events.cause(failure) for name, failure in tracker.failures.items()}
    return [assemble(name, found.get(name), causes.get(name) or error, time.time()) for name in names]


def assemble(name: str, report: object, cause: str, now: float) -> MachineCertificates:
    """A machine's certificates from its own report; ``cause`` is why it is missing."""
    if report is None:
        return MachineCertificates(name, (), (), cause or "its certificates could not be read")
    if problem := reports.certificates_problem(report):
        return MachineCertificates(name, (), (), problem)
    assert isinstance(report, list)  # noqa: S101 - for the type checker
    rows = [
        CertificateEnd(
            name=each["name"],
            path=each["path"],
            subject=each["subject"],
            not_after=each["not_after"],
            days=None if each["not_after"] is None else certificates.days_left(each["not_after"], now),
            renewal=each["renewal"],
            problem=each["problem"],
        )
        for each in report
    ]
    warnings = [str(each) for each in certificates.ending(report, now)]
    return MachineCertificates(name, sorted(rows, key=_end), warnings, "")


def _end(each: CertificateEnd) -> int:
    return each.not_after or 0


def exit_code(found: Sequence[MachineCertificates]) -> ExitCode:
    """PARTLY while a certificate ends soon; as every command if machines did not report."""
    failed = exit_code_for(sum(bool(each.cause) for each in found), len(found))
    return ExitCode.PARTLY if failed is ExitCode.DONE and any(each.warnings for each in found) else failed
