"""Running a program of the machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .problem import MachineProblem

INHERITED: list[int] = []
"""Descriptors that every program gets: the machine's lock, so that it outlives us while they run."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Done:
    """How a program ended."""

    argv: Sequence[str]
    code: int
    out: str
    err: str

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def text(self) -> str:
        """All that it said."""
        return "\n".join(part for part in (self.out, self.err) if part)


def run(
    argv: Sequence[str],
    timeout_s: float = 120,
    stdin: str = "",
    environment: Mapping[str, str] | None = None,
) -> Done:
    """Run ``argv``, no shell, in the C locale; a program that is missing or too slow is a result, not an exception."""
    variables = {**os.environ, "PATH": PATH, "LC_ALL": "C", "LANGUAGE": "C", **(environment or {})}
    try:
        done = subprocess.run(
            list(argv),
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=variables,
            pass_fds=INHERITED,
            check=False,
        )
    except FileNotFoundError:
        return Done(argv, 127, "", f"{argv[0]} is not installed")
    except subprocess.TimeoutExpired as error:
        said = "".join(
            part.decode(errors="replace") if isinstance(part, bytes) else part or ""
            for part in (error.stdout, error.stderr)
        )
        return Done(argv, 124, said, f"{argv[0]} did not end within {timeout_s:.0f} s")
    return Done(argv, done.returncode, done.stdout, done.stderr)


def must(
    argv: Sequence[str],
    timeout_s: float = 120,
    stdin: str = "",
    environment: Mapping[str, str] | None = None,
) -> str:
    """The output of ``argv``; raises MachineProblem with the last line it said when it fails."""
    done = run(argv, timeout_s, stdin, environment)
    if not done.ok:
        raise MachineProblem(f"`{' '.join(argv[:3])}` failed: {last_line(done.err) or last_line(done.out)}")
    return done.out


def last_line(text: str) -> str:
    """The last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
