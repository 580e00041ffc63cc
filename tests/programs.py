"""Programs that tests start beside them: servers of Kubernetes, sshd and others."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

_SETPRIV = shutil.which("setpriv")


def ending(argv: Sequence[str | Path]) -> list[str]:
    """The command of a program that the kernel kills when the thread that starts it ends, also by kill -9.

    No fixture ends the programs of a run that was killed: they would keep their ports, memory and processor. The
    program keeps the process id with which it is started. Without util-linux (on macOS) it is the command itself.
    """
    words = [str(word) for word in argv]
    return [_SETPRIV, "--pdeathsig", "KILL", "--", *words] if _SETPRIV else words
