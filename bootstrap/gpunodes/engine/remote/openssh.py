"""Options for ssh: host keys are learned at the first connection, unless the user's configuration is stricter.

Options on ssh's command line override the ssh_config of the user and of the system. So a stricter configuration is
detected first, by ``ssh -G``, which runs only where a file or an argument sets options for host keys.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import pwd
import re
import shlex
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpunodes import settings
from gpunodes.engine.remote.hostkeys import HostKeys, end_last_line


def _timeouts(connect_s: int, interval_s: int, missed: int) -> tuple[str, ...]:
    """ssh's options: the seconds for a connection, and how often it queries a machine until it ends the connection."""
    values = {"ConnectTimeout": connect_s, "ServerAliveInterval": interval_s, "ServerAliveCountMax": missed}
    return tuple(word for name, value in values.items() for word in ("-o", f"{name}={value}"))


_TIMEOUTS = _timeouts(30, 15, 4)
SESSION_TIMEOUTS = _timeouts(20, 10, 3)
"""For the session with the API: a repair waits for it."""
COMMAND_TIMEOUTS = _timeouts(10, 5, 3)
"""For single commands on machines that may hang or shut down."""
_RESOLVE_S = 20
"""Time limit in seconds for ``ssh -G``; a Match in ssh_config may run a command."""
_MAX_INCLUDE_DEPTH = 16
"""Maximum depth of nested Include lines in ssh_config, as in ssh."""
_INCLUDE = re.compile(r'[\s"]*include\b"?[\s=]*(.*)', re.IGNORECASE)
# An Include that is still there could not be followed.
_OWN_RULES = re.compile(
    "stricthostkeychecking|(user|global)?knownhostsfile|knownhostscommand|revokedhostkeys|hostkeyalias|include",
    re.IGNORECASE,
)
_ASK_RULE = re.compile(r"""stricthostkeychecking[\s="']+ask\b""", re.IGNORECASE)
_OTHER_CONFIG = re.compile(r"-[46AaCfGgKkMNnqsTtVvXxYy]*F(.*)")
_READING = re.compile(r"^debug1: Reading configuration data (.*?)\r?$", re.MULTILINE)
GLOBAL_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
NOTHING_FORWARDED = ("-a", "-x")
"""Flags against agent and X11 forwarding. ssh uses the last one of equal flags: these go after the user's arguments."""


class ResolveError(Exception):
    """``ssh -G`` failed; the text is its message."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How ssh checks the host key of a machine."""

    files: tuple[str, ...] | None = None
    """The known_hosts files, the user's before the system's; None for ssh's defaults."""
    strict: bool = False
    """Whether the key must be in these files: keys that gpunodes has learned do not count."""
    revoked: tuple[str, ...] = ()
    """RevokedHostKeys."""
    command: tuple[str, ...] = ()
    """KnownHostsCommand, with the tokens for the key not expanded yet."""


def options(address: str = "", arguments: Sequence[str] = (), own: Sequence[str] = ()) -> list[str]:
    """The ssh options for connections to ``address``; without one, for all machines without host key rules.

    ``arguments`` are the other arguments of ssh: they count as the user's configuration, like ssh_config. ``own``
    overrides the defaults of gpunodes, but not its options for host keys and forwarding.
    """
    strict, files = _strict(address, arguments) if address else (False, user_known_hosts())
    learned = settings.known_hosts()
    end_last_line(learned)
    # ssh expands tokens in this option.
    quoted = " ".join(f'"{file}"'.replace("%", "%%") for file in dict.fromkeys((str(learned), *files)))
    # ssh writes new keys to the first file; the user's files are read, too.
    learn = ["-o", f"UserKnownHostsFile={quoted}", "-o", "StrictHostKeyChecking=accept-new"]
    return [
        *(["-o", "StrictHostKeyChecking=yes"] if strict else learn),
        # No forwarding, and no command, between the controller and a machine.
        "-o", "ForwardAgent=no",
        "-o", "ForwardX11=no",
        "-o", "ClearAllForwardings=yes",
        "-o", "Tunnel=no",
        "-o", "PermitLocalCommand=no",
        "-o", "RemoteCommand=none",
        *own,
        "-o", "ControlMaster=auto",
        "-o", "ControlPersist=120s",
        *_TIMEOUTS,
        "-o", "PreferredAuthentications=publickey,password",
    ]  # fmt: skip


def _strict(address: str, arguments: Sequence[str]) -> tuple[bool, Sequence[str]]:
    """Whether a machine's key must be in the user's known_hosts files, and these files.

    It must be when they hold a key of the machine or a certificate authority for it: then no key is learned.
    """
    if not has_own_rules(arguments):
        return False, user_known_hosts()
    try:
        resolved_options = resolved(address, arguments)
    except ResolveError:
        # ssh fails with the same message, and learns no key.
        return True, ()
    found = rules(resolved_options)
    name = resolved_options.get("hostkeyalias") or filed(resolved_options["hostname"], resolved_options["port"])
    known = HostKeys([Path(file) for file in found.files or ()])
    return found.strict or known.knows(name), resolved_options["userknownhostsfile"]


def has_own_rules(arguments: Sequence[str] = ()) -> bool:
    """Whether a file, or ``arguments``, may set options for the host keys of single machines."""
    files = (*user_known_hosts(), *GLOBAL_KNOWN_HOSTS)
    return (
        sets_rules(arguments)
        or any(_OWN_RULES.match(line.lstrip(' \t"')) for line in config_lines())
        or any(_has_authority(file) for file in files)
    )


def sets_rules(arguments: Sequence[str]) -> bool:
    """Whether arguments of ssh may set options for host keys, directly or by another ssh_config."""
    return bool(other_config(arguments)) or any(_OWN_RULES.search(argument) for argument in arguments)


def other_config(arguments: Sequence[str]) -> list[str]:
    """The argument -F in these arguments: the only one that ssh passes on to the ssh for a jump host."""
    for argument, following in itertools.pairwise([*arguments, ""]):
        if found := _OTHER_CONFIG.match(argument):
            return ["-F", found[1] or following]
    return []


def user_known_hosts() -> tuple[str, ...]:
    """ssh's default for UserKnownHostsFile."""
    return tuple(str(Path.home() / ".ssh" / name) for name in ("known_hosts", "known_hosts2"))


def config_lines() -> Iterator[str]:
    """The lines of the user's ssh_config, then of the system's, with included files.

    An Include that only ssh can expand is not replaced.
    """
    for path in (Path.home() / ".ssh/config", Path("/etc/ssh/ssh_config")):
        if path.is_file():
            # The lines before the first Host of a file apply to all hosts.
            yield "Host *"
            yield from _included(path, path.parent, 0)


def _included(path: Path, folder: Path, depth: int) -> Iterator[str]:
    """The lines of a file, with included files; ``folder`` is the base of relative paths at every depth."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        # ssh ignores such a file, too.
        return
    for line in lines:
        included = _INCLUDE.match(line)
        if not included:
            # Comments are skipped: Debian's file lists the defaults in comments.
            yield from [] if line.strip().startswith("#") else [line]
        elif re.search(r"""["'#$%\\]|~[^/]""", included[1]) or depth == _MAX_INCLUDE_DEPTH:
            yield line
        else:
            for pattern in included[1].split():
                absolute = str(folder / Path(pattern).expanduser())
                for file in sorted(glob.glob(absolute)):  # noqa: PTH207 - pathlib's * finds hidden files too
                    yield from _included(Path(file), folder, depth + 1)


def resolved(address: str, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """All options that ssh uses for a machine, by ssh_config's names in lower case; raises ResolveError.

    The value "ask" of StrictHostKeyChecking, which is also ssh's default, becomes "yes" where a user has set it.
    """
    argv = ["ssh", "-G", *arguments, "-v", "-E", "/dev/stderr", "--", address]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_RESOLVE_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise ResolveError(str(error)) from error
    out, err = (text.decode("utf-8", "replace") for text in (done.stdout, done.stderr))
    found: dict[str, Any] = {"identityfile": []}
    for line in out.splitlines():
        key, _, value = line.partition(" ")
        if key == "identityfile":
            found[key].append(value)
        elif value:
            found.setdefault(key, value)
    if done.returncode != 0 or "hostname" not in found:
        errors = [line for line in err.splitlines() if line and not line.startswith(("debug", "OpenSSH_"))]
        raise ResolveError("; ".join(errors) or "no output of `ssh -G`")
    if found.get("stricthostkeychecking") == "ask" and _sets_ask(arguments, err):
        found["stricthostkeychecking"] = "yes"
    tokens = _tokens(address, found)
    found["identityfile"] = [_path(file, tokens) for file in found["identityfile"]]
    for key in ("userknownhostsfile", "globalknownhostsfile", "revokedhostkeys"):
        found[key] = tuple(_path(file, tokens) for file in _files(found.get(key, "")))
    found["tokens"] = tokens
    return found


def _sets_ask(arguments: Sequence[str], err: str) -> bool:
    """Whether the arguments, or a file that ssh has read, set StrictHostKeyChecking to ask; True when that is unknown.

    ssh cannot ask, because no user is at its terminal.
    """
    if "OpenSSH" not in err:
        return True
    try:
        texts = [Path(file).read_text(encoding="utf-8", errors="replace") for file in _READING.findall(err)]
    except OSError:
        return True
    lines = [line.lstrip(' \t"') for text in texts for line in text.splitlines()]
    return any(_ASK_RULE.match(line) for line in lines) or any(_ASK_RULE.search(argument) for argument in arguments)


def rules(options: Mapping[str, Any]) -> Rules:
    """How ssh checks a host key, from the result of ``resolved``; ssh's defaults for any other options."""
    if "tokens" not in options:
        return Rules()
    command = str(options.get("knownhostscommand", "none"))
    # With a command no key is learned: the command may print the right key at the next connection.
    argv = () if command.lower() == "none" else _known_hosts_command(command, options["tokens"])
    return Rules(
        files=(*options["userknownhostsfile"], *options["globalknownhostsfile"]),
        strict=bool(argv) or options.get("stricthostkeychecking") in {"true", "yes"},
        revoked=options["revokedhostkeys"],
        command=argv,
    )


def _known_hosts_command(command: str, tokens: Mapping[str, str]) -> tuple[str, ...]:
    try:
        argv = shlex.split(command)
    except ValueError:
        # ssh cannot start it either.
        argv = [command]
    return tuple(expand(argument, {**tokens, "%%": "%%"}) for argument in argv)


def filed(host: str, port: str) -> str:
    """The name of a machine in known_hosts (sshd(8))."""
    return host if port == "22" else f"[{host}]:{port}"


def expand(text: str, tokens: Mapping[str, str]) -> str:
    """Expand tokens (ssh_config(5), TOKENS); tokens that are not in ``tokens`` stay."""
    return re.sub("%.", lambda found: tokens.get(found[0], found[0]), text)


def _tokens(address: str, options: Mapping[str, Any]) -> dict[str, str]:
    host, port, user, jump = (str(options.get(name, "")) for name in ("hostname", "port", "user", "proxyjump"))
    local_host = socket.gethostname()
    account = pwd.getpwuid(os.getuid())
    return {
        "%%": "%",
        "%C": hashlib.sha1(f"{local_host}{host}{port}{user}{jump}".encode(), usedforsecurity=False).hexdigest(),
        "%d": account.pw_dir,
        "%h": host,
        "%i": str(os.getuid()),
        "%j": jump,
        "%k": str(options.get("hostkeyalias") or address),
        "%L": local_host.partition(".")[0],
        "%l": local_host,
        "%n": address,
        "%p": port,
        "%r": user,
        "%u": account.pw_name,
    }


def _path(file: str, tokens: Mapping[str, str]) -> str:
    # ssh takes the home directory from passwd, not from $HOME.
    file = tokens["%d"] + file[1:] if file.startswith("~/") else file
    return expand(re.sub(r"\$\{(\w+)\}", lambda name: os.environ.get(name[1], name[0]), file), tokens)


def _files(line: str) -> tuple[str, ...]:
    """The files in a line of ``ssh -G``, which prints them without quotes: a space may be part of a name."""
    files = re.split(r"\s+(?=[/~%$])", line)
    return tuple(file for file in files if file and file.lower() != "none")


def _has_authority(file: str) -> bool:
    try:
        return "@cert-authority" in Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
