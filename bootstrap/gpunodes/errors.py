"""The error class of gpunodes: a problem, and the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from gpunodes.ansible.module_utils.problem import Problem


class ExitCode(IntEnum):
    """Exit codes of every command."""

    DONE = 0
    FAILED = 1
    """Every machine failed, or the command itself."""
    WRONG_INPUT = 2
    """The input was wrong; nothing was changed."""
    PARTLY = 3
    """Some machines succeeded, others failed."""
    INTERRUPTED = 130


def exit_code_for(failed: int, machines: int) -> ExitCode:
    """The exit code of a command that worked on so many machines, of which ``failed`` failed."""
    if not failed:
        return ExitCode.DONE
    return ExitCode.FAILED if failed == machines else ExitCode.PARTLY


class GpunodesError(Exception):
    """An error that stops a command: its problem, and ``problems``, several where this error stands for them."""

    def __init__(self, found: str, wanted: str = "", remedy: str = "", exit_code: int = ExitCode.FAILED) -> None:
        self.problem = Problem(found, wanted, remedy)
        self.problems: Sequence[Problem] = (self.problem,)
        self.exit_code = ExitCode(exit_code)
        super().__init__(str(self.problem))


class WrongInput(GpunodesError):  # noqa: N818 - reads as a sentence: raise WrongInput(...)
    """The user's input cannot be used; nothing was changed."""

    def __init__(self, found: str, wanted: str = "", remedy: str = "") -> None:
        super().__init__(found, wanted, remedy, ExitCode.WRONG_INPUT)


class Interrupted(GpunodesError):  # noqa: N818 - names what happened
    """The user stopped a command with Ctrl-C or SIGTERM before it changed anything."""

    def __init__(self) -> None:
        super().__init__("interrupted", "", "run the same command again", ExitCode.INTERRUPTED)


def together(errors: Sequence[WrongInput]) -> WrongInput:
    """Several errors as one, to be reported at once."""
    if len(errors) == 1:
        return errors[0]
    problems = tuple(error.problem for error in errors)
    remedies = list(dict.fromkeys(problem.remedy for problem in problems if problem.remedy))
    found = WrongInput("; ".join(problem.fact for problem in problems), "", "; ".join(remedies))
    found.problems = problems
    return found


def sentence(problem: Exception) -> str:
    """Any error in one line: gpunodes' own unchanged, the system's with its reason, others with their type."""
    if isinstance(problem, GpunodesError):
        return str(problem)
    if isinstance(problem, OSError) and problem.strerror:
        return f"{problem.filename}: {problem.strerror}" if problem.filename else problem.strerror
    return " ".join(f"unexpected {type(problem).__name__}: {problem}".split())
