"""Command lines for the login shell of a machine, and the only place where a program there becomes root."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gpunodes.ansible.module_utils.sent import MARK
from gpunodes.engine.remote.targets import first
from gpunodes.inventory import SUDO_PASSWORDS

_INPUT_MARK = "gpunodes-begins-here"
_ESCAPED = {"'": '"\'"', "!": "\\!", "\\": "\\\\"}


class Become(Enum):
    """Whether a program runs as root, by sudo where the login is not root."""

    NEVER = "never"
    IF_POSSIBLE = "if possible"
    """Where sudo asks for a password and the inventory has none, the program runs as the login user."""
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class RemoteCommand:
    """A command line for any login shell, and its standard input, which begins with sudo's password if there is one."""

    line: str
    stdin: bytes = field(default=b"", repr=False)


def remote(
    argv: Sequence[str],
    variables: Mapping[str, Any],
    become: Become = Become.ALWAYS,
    stdin: bytes = b"",
    *,
    marks: bool = False,
) -> RemoteCommand:
    """The command that runs the program ``argv`` on a machine with these inventory variables.

    ``marks``: the program itself prints the mark before its output (``answers.unframed``); else the shell does.
    """
    # The password is on no command line.
    password = "" if become is Become.NEVER else first(variables, SUDO_PASSWORDS)
    # sudo may not ask for the password: then these lines are skipped. sudo and read stop at the end of a line.
    skip = f'while IFS= read -r line && [ "$line" != {_INPUT_MARK} ]; do :; done; ' if password else ""
    mark = "" if marks else f"echo; echo {MARK}; "
    script = [f'{skip}{mark}exec "$@"', "gpunodes"]
    if become is not Become.NEVER:
        optional = become is Become.IF_POSSIBLE and not password
        no_sudo = '[ "$(id -u)" = 0 ]' + (" || ! sudo -n true 2>/dev/null" if optional else "")
        sudo = 'sudo -S -p ""' if password else "sudo -n"
        script = [f'if {no_sudo}; then exec sh -c "$@"; else exec {sudo} sh -c "$@"; fi', "gpunodes", *script]
    line = " ".join(quoted(word) for word in ("exec", "/bin/sh", "-c", *script, *argv))
    return RemoteCommand(line, (f"{password}\n{_INPUT_MARK}\n".encode() if password else b"") + stdin)


def quoted(word: str) -> str:
    """A word quoted for any login shell: sh, csh and fish read it alike. It must not hold control characters."""
    if not word.isprintable():
        raise ValueError(f"{word!r} cannot be quoted for a command line")
    if re.fullmatch(r"[A-Za-z0-9_./:=,@+-]+", word):
        return word
    # Between quotes csh expands ! and fish a backslash; both are escaped outside of quotes.
    parts = re.findall(r"[^'!\\]+|['!\\]", word)
    return "".join(_ESCAPED.get(part) or f"'{part}'" for part in parts) or "''"
