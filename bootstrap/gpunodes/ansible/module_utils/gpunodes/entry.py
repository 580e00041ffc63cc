"""The common code of every module's ``main``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from . import lock
from .problem import MachineProblem


def carry_out(module: Any, work: Callable[[], Mapping[str, Any]], changes: bool = True) -> None:
    """Call ``work`` and exit with its result; a MachineProblem fails the task with its message.

    ``module`` is the AnsibleModule. With ``changes``, ``work`` runs under the machine's lock, except in check mode.
    """
    machine_lock = lock.held() if changes and not module.check_mode else contextlib.nullcontext()
    try:
        with machine_lock:
            result = work()
    except MachineProblem as problem:
        module.fail_json(msg=str(problem), found=problem.found, wanted=problem.wanted, remedy=problem.remedy)
    else:
        module.exit_json(**result)
