"""The host keys of machines, in OpenSSH's own files: learned at the first contact, held against ever after."""

from __future__ import annotations

import base64
import binascii
import contextlib
import fnmatch
import hmac
import os
import threading
import time
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.serialization import SSHCertificate

_AUTHORITY, _REVOKED = "@cert-authority", "@revoked"


class Trust(Enum):
    """What we know of a key that a machine shows."""

    KNOWN = "known"
    NEW = "new"
    UNKNOWN = "is not known"
    """And not to be learned, or its file cannot be written."""
    CHANGED = "has changed"
    REVOKED = "is revoked"
    INVALID = "has a certificate that is not valid for it"


class HostKeys:
    """Files in the format of known_hosts (sshd(8)), read once; new keys go to the first."""

    def __init__(self, files: Sequence[Path], more: str = "") -> None:
        """``more`` are lines beside those of the files."""
        self._learned = files[0] if files else None
        self._guard = threading.Lock()
        self._plain: dict[str, list[tuple[str, str, str]]] = {}
        self._hashed: list[tuple[bytes, bytes, tuple[str, str, str]]] = []
        self._patterns: list[tuple[str, tuple[str, str, str]]] = []
        self._revoked: set[tuple[str, str]] = set()
        for file in files:
            # What cannot be read, ssh does not read either.
            with contextlib.suppress(OSError):
                more += "\n" + file.read_text(encoding="utf-8", errors="replace")
        for line in more.splitlines():
            self._read(line)

    def types(self, name: str) -> tuple[str, ...]:
        """The kinds of keys known of a machine, in the order in which they were found."""
        with self._guard:
            found = [kind for each in _names(name) for kind, _ in self._of(each)]
        return tuple(dict.fromkeys(found))

    def certified(self, name: str) -> bool:
        """Whether some certificate authority vouches for a machine."""
        with self._guard:
            return any(self._of(each, _AUTHORITY) for each in _names(name))

    def knows(self, name: str) -> bool:
        """Whether a machine has a key, or a certificate authority, already."""
        with self._guard:
            known = bool(self._of(name))
        return known or self.certified(name)

    def judge(self, name: str, kind: str, key: bytes, certificate: bytes = b"", *, strict: bool = False) -> Trust:
        """Hold a machine's key against what is known; a new one is learned, unless it is ``strict``.

        ``certificate`` is the one that it shows, as on the wire. A machine that is known by keys of other kinds only
        has changed too: who stands in between could choose the kind. One that a certificate authority vouches for has
        no first contact.
        """
        shown = (kind, base64.b64encode(key).decode())
        with self._guard:
            signed_by = _authority(certificate)
            if shown in self._revoked or signed_by in self._revoked:
                return Trust.REVOKED
            vouched = False
            # A machine at another port may be known by its address alone.
            for each in _names(name):
                authorities = self._of(each, _AUTHORITY)
                vouched = vouched or bool(authorities)
                if signed_by and signed_by in authorities:
                    return Trust.KNOWN if _is_valid(certificate, _names(name)) else Trust.INVALID
                if shown in self._of(each):
                    return Trust.KNOWN
            if self._of(name):
                return Trust.CHANGED
            if strict or vouched or self._learned is None:
                return Trust.UNKNOWN
            return self._learn(self._learned, name, shown)

    def _learn(self, path: Path, name: str, shown: tuple[str, str]) -> Trust:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            end_last_line(path)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(f"{name} {' '.join(shown)}\n")
        except OSError:
            # Whoever cannot be remembered would be new again the next time, whatever key it shows.
            return Trust.UNKNOWN
        self._plain[name.lower()] = [("", *shown)]
        return Trust.NEW

    def _of(self, name: str, marker: str = "") -> list[tuple[str, str]]:
        lowered = name.lower()
        found = list(self._plain.get(lowered, ()))
        found += [
            entry
            for salt, digest, entry in self._hashed
            if hmac.compare_digest(hmac.digest(salt, lowered.encode(), "sha1"), digest)
        ]
        found += [entry for pattern, entry in self._patterns if _matches(lowered, pattern)]
        return [(kind, key) for mark, kind, key in found if mark == marker]

    def _read(self, line: str) -> None:
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#") or marker not in {"", _AUTHORITY, _REVOKED}:  # noqa: PLR2004 - names, kind, key
            return
        names, entry = words[0].lower() if not words[0].startswith("|") else words[0], (marker, words[1], words[2])
        if marker == _REVOKED:
            self._revoked.add((words[1], words[2]))
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


def lines_of(text: str, name: str) -> str:
    """The lines that say something of a machine by this very name, and all that revoke keys."""

    def says(line: str) -> bool:
        keys = HostKeys((), line)
        return bool(keys._revoked or keys._of(name) or keys._of(name, _AUTHORITY))

    return "\n".join(line for line in text.splitlines() if says(line))


def end_last_line(path: Path) -> None:
    """End the last line of a file, where there is one that is not: what is appended would spoil it.

    OpenSSH's own programs spoil it, up to 9.2 at least. A file that may not be written stays as it is.
    """
    with contextlib.suppress(OSError), path.open("rb+") as file:
        if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
            file.write(b"\n")


def _names(name: str) -> list[str]:
    """What a machine is filed under: ``[host]:port``, and then the host alone, as with ssh."""
    return [name, name[1:].rpartition("]:")[0]] if name.startswith("[") and "]:" in name else [name]


def _authority(certificate: bytes) -> tuple[str, str] | None:
    """The key that signed a certificate; None where there is none, or none that can be read."""
    read = _certificate(certificate)
    if read is None:
        return None
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    kind, key = read.signature_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode().split()[:2]
    return kind, key


def _is_valid(certificate: bytes, names: Sequence[str]) -> bool:
    """Whether a certificate whose authority is known is one of a host, of this name, now (PROTOCOL.certkeys)."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import SSHCertificateType

    read = _certificate(certificate)
    if read is None or read.type is not SSHCertificateType.HOST or read.critical_options:
        return False
    try:
        read.verify_cert_signature()
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    principals = [principal.decode("utf-8", "replace").lower() for principal in read.valid_principals]
    mine = any(_matches(names[-1].lower(), principal) for principal in principals) or not principals
    return mine and read.valid_after <= time.time() < read.valid_before


def _certificate(certificate: bytes) -> SSHCertificate | None:
    if not certificate:
        return None
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    try:
        read = serialization.load_ssh_public_identity(kind(certificate).encode() + b" " + base64.b64encode(certificate))
    except (ValueError, UnsupportedAlgorithm):
        return None
    return read if isinstance(read, serialization.SSHCertificate) else None


def kind(blob: bytes) -> str:
    """The kind of a key or a certificate, as on the wire."""
    return blob[4 : 4 + int.from_bytes(blob[:4], "big")].decode("ascii", "replace")


def is_among(text: str, key: bytes, certificate: bytes) -> bool:
    """Whether a text of public keys, one a line, holds this key, or the authority of its certificate."""
    wanted = {base64.b64encode(key).decode()}
    if authority := _authority(certificate):
        wanted.add(authority[1])
    return any(word in wanted or _certified_key(word) in wanted for word in text.split())


def _certified_key(word: str) -> str:
    """The key that is certified, where a word is a certificate in base64."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    try:
        read = _certificate(base64.b64decode(word, validate=True))
    except (binascii.Error, ValueError):
        return ""
    return read.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode().split()[1] if read else ""


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
