"""Commands as root on a machine, with a sudo that asks and one that does not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from gpunodes.engine import shell

# Like sudo -S: reads one line, byte by byte, when it asks.
_SUDO = """#!/bin/sh
if [ -n "$ASKS" ]; then
    [ "$1" = -S ] || { echo "sudo: a password is required" >&2; exit 1; }
    IFS= read -r said
    [ "$said" = "$ASKS" ] || { echo "Sorry, try again." >&2; exit 1; }
fi
if [ "$1" = -S ]; then shift 3; else shift; fi
exec "$@"
"""


def _say(tmp_path: Path, variables: dict[str, str], user: str, asks: str) -> subprocess.CompletedProcess[str]:
    for name, text in (("sudo", _SUDO), ("id", f"#!/bin/sh\necho {user}\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return subprocess.run(
        ["sh", "-c", shell.as_root("sh -c 'echo it is \"$(cat)\"'", variables)],
        input=shell.for_sudo(variables) + "first\nsecond",
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "ASKS": asks},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("user", ["0", "1000"])
@pytest.mark.parametrize("asks", ["", 'pa ss"w\\n$x'])
def test_the_password_goes_to_sudo_and_the_rest_to_the_command(tmp_path: Path, user: str, asks: str) -> None:
    variables = {"ansible_become_password": 'pa ss"w\\n$x'}
    assert _say(tmp_path, variables, user, asks).stdout == "it is first\nsecond\n"
    assert "pa ss" not in shell.as_root("true", variables)


def test_without_a_password_nothing_stands_before_the_input(tmp_path: Path) -> None:
    assert _say(tmp_path, {}, "1000", "").stdout == "it is first\nsecond\n"
    assert "a password is required" in _say(tmp_path, {}, "1000", "x").stderr


def test_a_wrong_password_is_said(tmp_path: Path) -> None:
    assert "try again" in _say(tmp_path, {"ansible_become_pass": "wrong"}, "1000", "right").stderr
