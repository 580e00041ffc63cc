"""The host keys of machines, in OpenSSH's own files: learned at the first contact, held against ever after."""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hmac
import os
import threading
from collections.abc import Sequence
from enum import Enum
from pathlib import Path


class Trust(Enum):
    """What we know of a key that a machine shows."""

    KNOWN = "known"
    NEW = "new"
    CHANGED = "changed"
    REVOKED = "revoked"


class HostKeys:
    """Files in the format of known_hosts (sshd(8)), read once; new keys go to the first.

    Lines for certificate authorities are left out: nothing here checks host certificates.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._learned = files[0]
        self._guard = threading.Lock()
        self._plain: dict[str, list[tuple[str, str]]] = {}
        self._hashed: list[tuple[bytes, bytes, tuple[str, str]]] = []
        self._patterns: list[tuple[str, tuple[str, str]]] = []
        self._revoked: set[tuple[str, str]] = set()
        for file in files:
            if file.is_file():
                for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                    self._read(line)

    def types(self, name: str) -> tuple[str, ...]:
        """The kinds of keys known of a machine, in the order in which they were found."""
        with self._guard:
            return tuple(dict.fromkeys(kind for kind, _ in self._of(name)))

    def judge(self, name: str, kind: str, key: bytes) -> Trust:
        """Hold a machine's key against what is known; a new one is learned.

        A machine that is known by keys of other kinds only has changed too: who stands in between could choose the
        kind.
        """
        shown = (kind, base64.b64encode(key).decode())
        with self._guard:
            if shown in self._revoked:
                return Trust.REVOKED
            known = self._of(name)
            if shown in known:
                return Trust.KNOWN
            if known:
                return Trust.CHANGED
            self._plain[name.lower()] = [shown]
            self._learned.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._learned, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(f"{name} {kind} {shown[1]}\n")
            return Trust.NEW

    def _of(self, name: str) -> list[tuple[str, str]]:
        lowered = name.lower()
        found = list(self._plain.get(lowered, ()))
        found += [
            entry
            for salt, digest, entry in self._hashed
            if hmac.compare_digest(hmac.digest(salt, lowered.encode(), "sha1"), digest)
        ]
        return found + [entry for pattern, entry in self._patterns if _matches(lowered, pattern)]

    def _read(self, line: str) -> None:
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#") or marker == "@cert-authority":  # noqa: PLR2004 - names, kind, key
            return
        names, entry = words[0].lower() if not words[0].startswith("|") else words[0], (words[1], words[2])
        if marker == "@revoked":
            self._revoked.add(entry)
        elif names.startswith("|1|"):
            try:
                salt, digest = (base64.b64decode(part) for part in names[3:].split("|"))
            except (binascii.Error, ValueError):
                return
            self._hashed.append((salt, digest, entry))
        elif any(sign in names for sign in "*?!"):
            self._patterns.append((names, entry))
        else:
            for name in names.split(","):
                self._plain.setdefault(name, []).append(entry)


def _matches(name: str, patterns: str) -> bool:
    """OpenSSH's pattern lists: one that is negated and matches outweighs the others."""
    found = False
    for pattern in patterns.split(","):
        # Only * and ? are special there; fnmatch's brackets are part of `[host]:port`.
        if fnmatch.fnmatchcase(name, pattern.removeprefix("!").replace("[", "[[]")):
            if pattern.startswith("!"):
                return False
            found = True
    return found
