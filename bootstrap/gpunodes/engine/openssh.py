"""How OpenSSH is started for us: host keys are learned at the first contact, but never against the user's own rules.

What we give ssh on its command line goes before the user's and the system's ssh_config. So what is stricter there is
found out first: by ssh itself, and only where some file or argument says something of it.
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
from gpunodes.engine.hostkeys import HostKeys, end_last_line

CONNECT_S = 30
_RESOLVE_S = 20
"""For ssh to read its files; a Match in them may run a command."""
_INCLUDES = 16
"""How deep ssh_config's files may include each other."""
_INCLUDE = re.compile(r'[\s"]*include\b"?[\s=]*(.*)', re.IGNORECASE)
# An Include that is still there is one that we cannot follow.
_OWN_RULES = re.compile(
    "stricthostkeychecking|(user|global)?knownhostsfile|knownhostscommand|revokedhostkeys|hostkeyalias|include",
    re.IGNORECASE,
)
_ASKS = re.compile(r"""stricthostkeychecking[\s="']+ask\b""", re.IGNORECASE)
_OTHER_CONFIG = re.compile(r"-[46AaCfGgKkMNnqsTtVvXxYy]*F(.*)")
_READING = re.compile(r"^debug1: Reading configuration data (.*?)\r?$", re.MULTILINE)
GLOBAL_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
NOTHING_FORWARDED = ("-a", "-x")
"""Of ssh's flags the last one counts, before any option: these follow whatever words the user has."""


class ResolveError(Exception):
    """ssh cannot read its own files; what it says of it."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How ssh holds the host key of a machine against what is known."""

    files: tuple[str, ...] | None = None
    """The files of host keys, the user's before the system's; None for ssh's own."""
    strict: bool = False
    """Whether a key that they do not hold is refused: what we learned does not count either."""
    revoked: tuple[str, ...] = ()
    """RevokedHostKeys."""
    command: tuple[str, ...] = ()
    """KnownHostsCommand; what stands for the key in it is still to be put in."""


def options(address: str = "", arguments: Sequence[str] = (), own: Sequence[str] = ()) -> list[str]:
    """The options with which we connect to ``address``, and whoever nobody says anything of.

    ``arguments`` are the other words for ssh: they count as the user's own, like ssh_config. Those in ``own`` are put
    before what are mere habits of ours.
    """
    strict, files = _strict(address, arguments) if address else (False, user_known_hosts())
    ours = settings.known_hosts()
    end_last_line(ours)
    # ssh looks for its tokens there.
    quoted = " ".join(f'"{file}"'.replace("%", "%%") for file in dict.fromkeys((str(ours), *files)))
    # Learned keys go to the first file; the user's own are honoured.
    learns = ["-o", f"UserKnownHostsFile={quoted}", "-o", "StrictHostKeyChecking=accept-new"]
    return [
        *(["-o", "StrictHostKeyChecking=yes"] if strict else learns),
        # Nothing of the user's goes along to a machine, and nothing of the machine's comes here.
        "-o", "ForwardAgent=no",
        "-o", "ForwardX11=no",
        "-o", "ClearAllForwardings=yes",
        "-o", "Tunnel=no",
        "-o", "PermitLocalCommand=no",
        "-o", "RemoteCommand=none",
        *own,
        "-o", "ControlMaster=auto",
        "-o", "ControlPersist=120s",
        "-o", "ServerAliveInterval=15",
        "-o", "ServerAliveCountMax=4",
        "-o", f"ConnectTimeout={CONNECT_S}",
        "-o", "PreferredAuthentications=publickey,password",
    ]  # fmt: skip


def _strict(address: str, arguments: Sequence[str]) -> tuple[bool, Sequence[str]]:
    """Whether a machine's key must be one that the user knows already; else the user's files of host keys.

    It must where those files know the machine, or a certificate authority for it: then there is no first contact.
    """
    if not has_own_rules(arguments):
        return False, user_known_hosts()
    try:
        message = resolved(address, arguments)
    except ResolveError:
        # ssh will say so itself, and learn nothing.
        return True, ()
    found = rules(message)
    name = message.get("hostkeyalias") or filed(message["hostname"], message["port"])
    known = HostKeys([Path(file) for file in found.files or ()])
    return found.strict or known.knows(name), message["userknownhostsfile"]


def has_own_rules(arguments: Sequence[str] = ()) -> bool:
    """Whether some file, or ``arguments``, may say of a single machine how its host key is checked."""
    files = (*user_known_hosts(), *GLOBAL_KNOWN_HOSTS)
    return (
        say_rules(arguments)
        or any(_OWN_RULES.match(line.lstrip(' \t"')) for line in config_lines())
        or any(_has_authority(file) for file in files)
    )


def say_rules(arguments: Sequence[str]) -> bool:
    """Whether words for ssh may say how a host key is checked; another ssh_config may."""
    return bool(other_config(arguments)) or any(_OWN_RULES.search(word) for word in arguments)


def other_config(arguments: Sequence[str]) -> list[str]:
    """The ssh_config that these words name: of all words it is what ssh hands on to a jump host."""
    for word, following in itertools.pairwise([*arguments, ""]):
        if found := _OTHER_CONFIG.match(word):
            return ["-F", found[1] or following]
    return []


def user_known_hosts() -> tuple[str, ...]:
    """ssh's default for UserKnownHostsFile."""
    return tuple(str(Path.home() / ".ssh" / name) for name in ("known_hosts", "known_hosts2"))


def config_lines() -> Iterator[str]:
    """The user's ssh_config and the system's, with what they include; the user's goes first.

    An Include that only ssh understands stays as it is.
    """
    for path in (Path.home() / ".ssh/config", Path("/etc/ssh/ssh_config")):
        if path.is_file():
            # What stands before a file's first Host is for all hosts.
            yield "Host *"
            yield from _included(path, path.parent, 0)


def _included(path: Path, folder: Path, depth: int) -> Iterator[str]:
    """The lines of a file; ``folder`` is where it, and what it includes, look for what they include."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        # ssh goes on without it.
        return
    for line in lines:
        included = _INCLUDE.match(line)
        if not included:
            # Debian's own file names defaults in comments.
            yield from [] if line.strip().startswith("#") else [line]
        elif re.search(r"""["'#$%\\]|~[^/]""", included[1]) or depth == _INCLUDES:
            yield line
        else:
            for pattern in included[1].split():
                place = str(folder / Path(pattern).expanduser())
                for file in sorted(glob.glob(place)):  # noqa: PTH207 - pathlib's * finds hidden files too
                    yield from _included(Path(file), folder, depth + 1)


def resolved(address: str, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """All that ssh would go by with a machine, by ssh_config's names in lower case; raises ResolveError.

    Of StrictHostKeyChecking it says "ask" only where nobody does: that is the default as well.
    """
    words = ["ssh", "-G", *arguments, "-v", "-E", "/dev/stderr", "--", address]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_RESOLVE_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise ResolveError(str(error)) from error
    out, err = (text.decode("utf-8", "replace") for text in (done.stdout, done.stderr))
    message: dict[str, Any] = {"identityfile": []}
    for line in out.splitlines():
        key, _, value = line.partition(" ")
        if key == "identityfile":
            message[key].append(value)
        elif value:
            message.setdefault(key, value)
    if done.returncode != 0 or "hostname" not in message:
        complaints = [line for line in err.splitlines() if line and not line.startswith(("debug", "OpenSSH_"))]
        raise ResolveError("; ".join(complaints) or "ssh -G says nothing")
    if message.get("stricthostkeychecking") == "ask" and _says_ask(arguments, err):
        message["stricthostkeychecking"] = "yes"
    tokens = _tokens(address, message)
    message["identityfile"] = [_path(file, tokens) for file in message["identityfile"]]
    for key in ("userknownhostsfile", "globalknownhostsfile", "revokedhostkeys"):
        message[key] = tuple(_path(file, tokens) for file in _files(message.get(key, "")))
    message["tokens"] = tokens
    return message


def _says_ask(arguments: Sequence[str], err: str) -> bool:
    """Whether the arguments, or one of the files that ssh says it read, have it ask; as well where that is not known.

    There is nobody to be asked.
    """
    if "OpenSSH" not in err:
        return True
    try:
        texts = [Path(file).read_text(encoding="utf-8", errors="replace") for file in _READING.findall(err)]
    except OSError:
        return True
    lines = [line.lstrip(' \t"') for text in texts for line in text.splitlines()]
    return any(_ASKS.match(line) for line in lines) or any(_ASKS.search(word) for word in arguments)


def rules(message: Mapping[str, Any]) -> Rules:
    """How ssh checks a host key, from what it ``resolved``; its defaults where it was not asked."""
    if "tokens" not in message:
        return Rules()
    command = str(message.get("knownhostscommand", "none"))
    # What it does not say of a machine is not learned: it may say more the next time.
    words = () if command.lower() == "none" else _command(command, message["tokens"])
    return Rules(
        files=(*message["userknownhostsfile"], *message["globalknownhostsfile"]),
        strict=bool(words) or message.get("stricthostkeychecking") in {"true", "yes"},
        revoked=message["revokedhostkeys"],
        command=words,
    )


def _command(command: str, tokens: Mapping[str, str]) -> tuple[str, ...]:
    try:
        words = shlex.split(command)
    except ValueError:
        # ssh does not start it either.
        words = [command]
    return tuple(expand(word, {**tokens, "%%": "%%"}) for word in words)


def filed(host: str, port: str) -> str:
    """What the host key of a machine is filed under (sshd(8), known_hosts)."""
    return host if port == "22" else f"[{host}]:{port}"


def expand(text: str, tokens: Mapping[str, str]) -> str:
    """ssh_config(5), TOKENS: those that are not in ``tokens`` stay."""
    return re.sub("%.", lambda found: tokens.get(found[0], found[0]), text)


def _tokens(address: str, message: Mapping[str, Any]) -> dict[str, str]:
    host, port, user, jump = (str(message.get(name, "")) for name in ("hostname", "port", "user", "proxyjump"))
    here = socket.gethostname()
    me = pwd.getpwuid(os.getuid())
    return {
        "%%": "%",
        "%C": hashlib.sha1(f"{here}{host}{port}{user}{jump}".encode(), usedforsecurity=False).hexdigest(),
        "%d": me.pw_dir,
        "%h": host,
        "%i": str(os.getuid()),
        "%j": jump,
        "%k": str(message.get("hostkeyalias") or address),
        "%L": here.partition(".")[0],
        "%l": here,
        "%n": address,
        "%p": port,
        "%r": user,
        "%u": me.pw_name,
    }


def _path(file: str, tokens: Mapping[str, str]) -> str:
    # ssh's home is that of passwd, whatever $HOME says.
    file = tokens["%d"] + file[1:] if file.startswith("~/") else file
    return expand(re.sub(r"\$\{(\w+)\}", lambda name: os.environ.get(name[1], name[0]), file), tokens)


def _files(line: str) -> tuple[str, ...]:
    """The files that ssh names in a line, without quotes: a blank may be part of a name."""
    found = re.split(r"\s+(?=[/~%$])", line)
    return tuple(file for file in found if file and file.lower() != "none")


def _has_authority(file: str) -> bool:
    try:
        return "@cert-authority" in Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
