"""One command on one machine over OpenSSH, with a hard deadline and bounded output.

A machine that goes down, or hangs, can keep an SSH session open for ever: the deadline is kept on our side.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path
from typing import IO, Any

from gpunodes import settings
from gpunodes.engine import openssh
from gpunodes.engine.targets import PASSWORDS, PYTHON, first, ssh_argv
from gpunodes.inventory import SUDO_PASSWORDS

_CONNECT_S = 10


class Reached(StrEnum):
    """How far the command came."""

    ENDED = "ended"
    """It ran and ended by itself."""
    REFUSED = "refused"
    """The machine's kernel answers and no sshd does, or none that greets."""
    SILENT = "silent"
    """No connection."""
    LATE = "late"
    """It was connected and did not end within the deadline."""


@dataclass(frozen=True, slots=True)
class RemoteResult:
    """What came of a command."""

    reached: Reached
    code: int = 255
    out: bytes = b""
    err: str = ""
    cut: bool = False
    """There was more output than allowed."""

    @property
    def ok(self) -> bool:
        return self.reached is Reached.ENDED and self.code == 0


def command(address: str, variables: Mapping[str, Any], *more: str) -> list[str]:
    """The ssh command that reaches a machine with these inventory variables; the words to run there follow it.

    It is to be started with their ``environment``.
    """
    words = ssh_argv(variables)
    ours = [*more, *openssh.options(address, words), "-o", "ControlMaster=no", "-o", "ControlPath=none"]
    ssh = ["ssh", "-T", "-o", "BatchMode=yes"]
    if first(variables, PASSWORDS):
        ssh = ["env", f"{_PROMPT}={_prompt(address, words)}", "ssh", "-T", "-o", "NumberOfPasswordPrompts=1"]
    return [*ssh, *ours, *words, *openssh.NOTHING_FORWARDED, "--", address]


def _prompt(address: str, words: Sequence[str]) -> str:
    """How ssh asks for a machine's password (sshconnect2.c); for that of a jump host it asks by another name."""
    try:
        message = openssh.resolved(address, words)
    except openssh.ResolveError:
        # ssh will say why: it does not come to ask.
        return ""
    return f"{message['user']}@{message.get('hostkeyalias') or message['hostname']}'s password: "


def environment(variables: Mapping[str, Any]) -> dict[str, str] | None:
    """The environment for ``command``: it holds the login's password where the inventory has one; None for our own."""
    password = first(variables, PASSWORDS)
    if not password:
        return None
    return {**os.environ, "SSH_ASKPASS": str(_askpass()), "SSH_ASKPASS_REQUIRE": "force", _LOGIN: password}


def _askpass() -> Path:
    """What tells ssh a password: it takes one from a terminal or from a program, ssh(1), SSH_ASKPASS."""
    path = settings.state_home() / "askpass"
    if not path.exists() or path.read_text(encoding="utf-8") != _ASKPASS:
        # Whole at once: other threads and commands may be running it.
        fresh = path.with_suffix(f".{threading.get_native_id()}")
        fresh.write_text(_ASKPASS, encoding="utf-8")
        fresh.chmod(0o700)
        fresh.replace(path)
    return path


_LOGIN, _PROMPT = "GPUNODES_LOGIN_PASSWORD", "GPUNODES_LOGIN_PROMPT"
# Neither a key's passphrase nor a jump host's password is what we have: that one's own ssh asks here too.
_ASKPASS = f"""#!/bin/sh
[ -n "$1" ] && [ "$1" = "${_PROMPT}" ] && printf '%s\\n' "${_LOGIN}"
"""


class Become(Enum):
    """Whether a program becomes root, by sudo where the login is not root."""

    NEVER = "never"
    IF_POSSIBLE = "if possible"
    """Where sudo asks for a password and the inventory has none, the program runs as who logs in."""
    ALWAYS = "always"


def remote(words: Sequence[str], variables: Mapping[str, Any], become: Become = Become.ALWAYS) -> str:
    """What the login shell of a machine, whichever it is, is told to run the program ``words``.

    ``unframed`` finds what it writes. Its standard input must begin with ``for_sudo`` of the same variables, unless it
    never rises.
    """
    password = "" if become is Become.NEVER else for_sudo(variables)
    # sudo may not ask: what it leaves of those lines is skipped. Both read byte by byte, and so no further.
    skip = f'while IFS= read -r line && [ "$line" != {_AFTER} ]; do :; done; ' if password else ""
    script = [f'{skip}echo; echo {_ANSWER}; exec "$@"', "gpunodes"]
    if become is not Become.NEVER:
        optional = become is Become.IF_POSSIBLE and not password
        stay = '[ "$(id -u)" = 0 ]' + (" || ! sudo -n true 2>/dev/null" if optional else "")
        sudo = 'sudo -S -p ""' if password else "sudo -n"
        script = [f'if {stay}; then exec sh -c "$@"; else exec {sudo} sh -c "$@"; fi', "gpunodes", *script]
    return " ".join(quoted(word) for word in ("exec", "/bin/sh", "-c", *script, *words))


def quoted(word: str) -> str:
    """A word for whatever shell a login has: sh, csh and fish read it alike. It may hold no control characters."""
    if not word.isprintable():
        raise ValueError(f"{word!r} is for no command line")
    if re.fullmatch(r"[A-Za-z0-9_./:=,@+-]+", word):
        return word
    # csh replaces ! between quotes, fish a backslash; neither is anything else outside of them.
    parts = re.findall(r"[^'!\\]+|['!\\]", word)
    return "".join(_ODD.get(part) or f"'{part}'" for part in parts) or "''"


def python(variables: Mapping[str, Any], source: str, *arguments: str) -> list[str]:
    """The words that run a Python program on a machine with these variables."""
    found = str(variables.get("ansible_python_interpreter") or PYTHON)
    # No word may hold a line's end: the program comes as one text.
    program = source if source.isprintable() else f"exec({source!a})"
    return [*(shlex.split(found) if found.startswith("/") else [PYTHON]), "-c", program, *arguments]


def unframed(out: bytes | bytearray) -> bytes | None:
    """What a ``remote`` program wrote; None as long as it has not begun: a login shell may greet before it."""
    _, marker, answer = bytes(out).partition(f"\n{_ANSWER}\n".encode())
    return answer if marker else None


def skip_banner(out: IO[str]) -> None:
    """Read up to what a ``remote`` program writes, or to the end."""
    while (line := out.readline()) and line != f"{_ANSWER}\n":
        pass


def for_sudo(variables: Mapping[str, Any]) -> str:
    """The first lines for a ``remote`` program: sudo's password, where the inventory has one, on no command line."""
    found = first(variables, SUDO_PASSWORDS)
    return f"{found}\n{_AFTER}\n" if found else ""


_ANSWER = "gpunodes-answer-follows"
_AFTER = "gpunodes-begins-here"
_ODD = {"'": '"\'"', "!": "\\!", "\\": "\\\\"}


def run(
    address: str,
    variables: Mapping[str, Any],
    words: str,
    *,
    deadline_s: float,
    most: int = 1 << 20,
    stdin: bytes = b"",
    enough: Callable[[bytes | bytearray], bool] = lambda _: False,
) -> RemoteResult:
    """Run the shell command ``words`` on a machine; never raises for what happens there.

    ``most`` bounds standard output in bytes; the connection is cut when more comes. It is cut as well when ``enough``
    says so of what has come: a machine that goes down may leave a connection open.
    """
    # The first of two equal options counts: these stand before those of every connection.
    patient = ("-o", f"ConnectTimeout={_CONNECT_S}", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
    local_argv = [*command(address, variables, *patient), words]
    return local(local_argv, deadline_s=deadline_s, most=most, stdin=stdin, env=environment(variables), enough=enough)


def local(
    words: Sequence[str],
    *,
    deadline_s: float,
    most: int = 1 << 20,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    enough: Callable[[bytes | bytearray], bool] = lambda _: False,
) -> RemoteResult:
    """Run a program here within the same bounds; its whole process group is ended with it."""
    process = subprocess.Popen(
        words,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + deadline_s
    try:
        out, err, late = _exchange(process, stdin, deadline, most, enough)
        if not late and len(out) < most and not enough(out):
            # A process that ends closes its output a moment before there is an exit status.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        with contextlib.suppress(ProcessLookupError):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    text = err.decode("utf-8", "replace").strip()
    cut = len(out) >= most
    if late and not cut:
        return RemoteResult(Reached.LATE, out=out, err=text)
    return RemoteResult(_reached(code, text), code, out, text, cut)


def _reached(code: int, text: str) -> Reached:
    if code != 255:  # noqa: PLR2004 - ssh(1): 255 when it could not connect
        return Reached.ENDED
    if "Connection refused" in text or "banner exchange" in text or "Connection reset" in text:
        return Reached.REFUSED
    return Reached.SILENT


def _exchange(
    process: subprocess.Popen[bytes],
    stdin: bytes,
    deadline: float,
    most: int,
    enough: Callable[[bytes | bytearray], bool],
) -> tuple[bytes, bytes, bool]:
    """Feed and read a process until it ends its output, says enough or too much, or the deadline passes."""
    assert process.stdin is not None  # noqa: S101 - for the type checker
    assert process.stdout is not None  # noqa: S101 - as above
    assert process.stderr is not None  # noqa: S101 - as above
    pipes: dict[Any, bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    waiting = memoryview(stdin)
    late = False
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        if waiting:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        else:
            process.stdin.close()
        while selector.get_map() and len(pipes[process.stdout]) < most and not enough(pipes[process.stdout]):
            left = deadline - time.monotonic()
            if left <= 0:
                late = True
                break
            for key, _ in selector.select(left):
                if key.fileobj is process.stdin:
                    try:
                        waiting = waiting[os.write(key.fd, waiting[:65536]) :]
                    except BrokenPipeError:
                        waiting = waiting[:0]
                    if not waiting:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                data = os.read(key.fd, 65536)
                held = pipes[key.fileobj]
                # What a machine says on standard error is for people: a page of it is enough.
                held += data if key.fileobj is process.stdout else data[: max(0, 65536 - len(held))]
                if not data:
                    selector.unregister(key.fileobj)
    for pipe in (process.stdin, *pipes):
        with contextlib.suppress(OSError):
            pipe.close()
    return bytes(pipes[process.stdout][:most]), bytes(pipes[process.stderr]), late
