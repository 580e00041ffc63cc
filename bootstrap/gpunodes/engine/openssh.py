"""How OpenSSH is started for us: host keys are learned at the first contact, but never against the user's own rules.

What we give ssh on its command line goes before the user's and the system's ssh_config. So what is stricter there is
found out first: by ssh itself, and only where some file says something of it.
"""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpunodes import settings
from gpunodes.engine.hostkeys import HostKeys, end_last_line

CONNECT_S = 30
_RESOLVE_S = 20
"""For ssh to read its files; a Match in them may run a command."""
_INCLUDES = 8
"""How deep ssh_config's files may include each other."""
_OWN_RULES = re.compile(r"stricthostkeychecking|userknownhostsfile", re.IGNORECASE)
_ASKS = re.compile(r"""stricthostkeychecking[\s="']+ask\b""", re.IGNORECASE)
GLOBAL_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")


def options(address: str = "", arguments: Sequence[str] = ()) -> list[str]:
    """The options with which we connect to ``address``, and whoever nobody says anything of.

    ``arguments`` are the other words for ssh: they count as the user's own, like ssh_config.
    """
    files, strict = _own_rules(address, arguments) if address else (user_known_hosts(), False)
    ours = settings.known_hosts()
    end_last_line(ours)
    quoted = " ".join(f'"{file}"' for file in dict.fromkeys((str(ours), *files)))
    return [
        # Learned keys go to the first file; the user's own are honoured.
        "-o", f"UserKnownHostsFile={quoted}",
        "-o", f"StrictHostKeyChecking={'yes' if strict else 'accept-new'}",
        # Nothing of the user's goes along to a machine, and nothing of the machine's comes here.
        "-o", "ForwardAgent=no",
        "-o", "ForwardX11=no",
        "-o", "ClearAllForwardings=yes",
        "-o", "Tunnel=no",
        "-o", "PermitLocalCommand=no",
        "-o", "RemoteCommand=none",
        "-o", "ControlMaster=auto",
        "-o", "ControlPersist=120s",
        "-o", "ServerAliveInterval=15",
        "-o", "ServerAliveCountMax=4",
        "-o", f"ConnectTimeout={CONNECT_S}",
        "-o", "PreferredAuthentications=publickey,password",
    ]  # fmt: skip


def has_own_rules(text: str = "") -> bool:
    """Whether some file, or ``text``, may say of a single machine how its host key is checked."""
    files = (*user_known_hosts(), *GLOBAL_KNOWN_HOSTS)
    return bool(_OWN_RULES.search("\n".join((text, *config_lines())))) or any(_has_authority(file) for file in files)


def user_known_hosts() -> tuple[str, ...]:
    """ssh's default for UserKnownHostsFile."""
    return tuple(str(Path.home() / ".ssh" / name) for name in ("known_hosts", "known_hosts2"))


def config_lines(*more: Path) -> Iterator[str]:
    """The user's ssh_config and the system's, with what they include; the user's goes first."""
    for path in (*more, Path.home() / ".ssh/config", Path("/etc/ssh/ssh_config")):
        if path.is_file():
            # What stands before a file's first Host is for all hosts.
            yield "Host *"
            yield from _included(path, 0)


def _included(path: Path, depth: int) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        word, _, rest = line.strip().replace("=", " ", 1).partition(" ")
        if word.lower() != "include":
            # Debian's own file names defaults in comments.
            yield from [] if word.startswith("#") else [line]
        elif depth < _INCLUDES:
            for pattern in shlex.split(rest):
                place = Path(pattern).expanduser()
                place = place if place.is_absolute() else path.parent / place
                for file in sorted(Path(place.anchor).glob(str(place.relative_to(place.anchor)))):
                    yield from _included(file, depth + 1)


def _own_rules(address: str, arguments: Sequence[str]) -> tuple[Sequence[str], bool]:
    """The user's files of host keys for a machine, and whether a key that is in none of them is refused.

    It is, too, where they name a certificate authority for it: then a key that nobody vouches for is no first contact.
    """
    said = "\n".join((shlex.join(arguments), *config_lines(*_named(arguments))))
    if not has_own_rules(said):
        return user_known_hosts(), False
    words = ["ssh", "-G", *arguments, "--", address]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_RESOLVE_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        # ssh cannot read its own files: it will say so itself, and learn nothing.
        return user_known_hosts(), True
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    files = [file for file in found.get("userknownhostsfile", "").split() if file != "none"]
    everywhere = [file for file in found.get("globalknownhostsfile", "").split() if file != "none"]
    checking = found.get("stricthostkeychecking", "")
    # "ask" is the default as well; there is nobody to be asked.
    strict = checking in {"true", "yes"} or (checking == "ask" and bool(_ASKS.search(said)))
    name = found.get("hostkeyalias") or _place(found.get("hostname", address), found.get("port", "22"))
    known = HostKeys([Path(file).expanduser() for file in (*files, *everywhere)])
    return files, strict or known.certified(name)


def _named(arguments: Sequence[str]) -> list[Path]:
    """The ssh_config that ``ssh -F`` reads instead of its own."""
    words = itertools.pairwise([*arguments, ""])
    return [Path(word[2:] or following).expanduser() for word, following in words if word.startswith("-F")]


def _place(host: str, port: str) -> str:
    return host if port == "22" else f"[{host}]:{port}"


def _has_authority(file: str) -> bool:
    try:
        return "@cert-authority" in Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
