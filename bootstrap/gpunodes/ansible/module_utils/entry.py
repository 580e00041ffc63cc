"""The common code of every module's ``main``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from . import causes, lock, report
from .masking import Mask
from .problem import MachineProblem


def carry_out(module: Any, work: Callable[[], Mapping[str, Any]], changes: bool = True) -> None:
    """Call ``work`` and exit with its result; a MachineProblem fails the task with its message.

    ``module`` is the AnsibleModule. With ``changes``, ``work`` runs under the machine's lock, except in check mode.
    The result's ``diff`` is a list of ``report.Difference``; Ansible gets it with ``--diff``, if it shows anything.
    """
    machine_lock = lock.held() if changes and not module.check_mode else contextlib.nullcontext()
    try:
        with machine_lock:
            result = dict(work())
    except MachineProblem as error:
        # Only the log of the run has it: the message has its first cause.
        output = {"output": Mask().text(causes.bounded(error.output))} if error.output else {}
        module.fail_json(msg=str(error), **asdict(error.problem), **output)
    else:
        differences = result.pop("diff", ())
        if module._diff and (shown := report.shown(differences)):
            result["diff"] = shown
        module.exit_json(**result)
