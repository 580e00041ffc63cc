"""The host keys of machines, in OpenSSH's files: learned at the first connection, and verified from then on."""

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
    """The result of the check of a machine's host key. The values complete the sentence "its host key ..."."""

    KNOWN = "known"
    NEW = "new"
    UNKNOWN = "is not known"
    """The key must not be learned, or known_hosts cannot be written."""
    CHANGED = "has changed"
    REVOKED = "is revoked"
    INVALID = "has a certificate that is not valid for it"


class HostKeys:
    """Files in the format of known_hosts (sshd(8)), read once; new keys are written to the first file."""

    def __init__(self, files: Sequence[Path], more: str = "") -> None:
        """``more`` holds further lines."""
        self._learned = files[0] if files else None
        self._mutex = threading.Lock()
        self._plain: dict[str, list[tuple[str, str, str]]] = {}
        self._hashed: list[tuple[bytes, bytes, tuple[str, str, str]]] = []
        self._patterns: list[tuple[str, tuple[str, str, str]]] = []
        self._revoked: set[tuple[str, str]] = set()
        for file in files:
            # As ssh does, skip a file that cannot be read.
            with contextlib.suppress(OSError):
                more += "\n" + file.read_text(encoding="utf-8", errors="replace")
        for line in more.splitlines():
            self._read(line)

    def types(self, name: str) -> tuple[str, ...]:
        """The types of the known keys of a machine, in the order of the files."""
        with self._mutex:
            types = [kind for each in _lookup_names(name) for kind, _ in self._entries(each)]
        return tuple(dict.fromkeys(types))

    def certified(self, name: str) -> bool:
        """Whether a certificate authority is known for a machine."""
        with self._mutex:
            return any(self._entries(each, _AUTHORITY) for each in _lookup_names(name))

    def knows(self, name: str) -> bool:
        """Whether a key, or a certificate authority, is known for a machine."""
        with self._mutex:
            known = bool(self._entries(name))
        return known or self.certified(name)

    def judge(self, name: str, kind: str, key: bytes, certificate: bytes = b"", *, strict: bool = False) -> Trust:
        """Check a machine's key; a new key is learned unless ``strict``.

        ``certificate`` is the machine's certificate in wire format. A key of a new type counts as changed when keys of
        other types are known: an attacker in between could choose the type. A key is never learned when a certificate
        authority is known for the machine.
        """
        shown = (kind, base64.b64encode(key).decode())
        with self._mutex:
            signed_by = _signing_key(certificate)
            if shown in self._revoked or signed_by in self._revoked:
                return Trust.REVOKED
            has_authority = False
            # A machine with another port may be known by its address only.
            for each in _lookup_names(name):
                authorities = self._entries(each, _AUTHORITY)
                has_authority = has_authority or bool(authorities)
                if signed_by and signed_by in authorities:
                    return Trust.KNOWN if _is_valid(certificate, _lookup_names(name)) else Trust.INVALID
                if shown in self._entries(each):
                    return Trust.KNOWN
            if self._entries(name):
                return Trust.CHANGED
            if strict or has_authority or self._learned is None:
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
            # A key that cannot be saved would be new again at the next connection, and so would any other key.
            return Trust.UNKNOWN
        self._plain[name.lower()] = [("", *shown)]
        return Trust.NEW

    def _entries(self, name: str, marker: str = "") -> list[tuple[str, str]]:
        lowered = name.lower()
        found = list(self._plain.get(lowered, ()))
        found += [
            entry
            for salt, digest, entry in self._hashed
            if hmac.compare_digest(hmac.digest(salt, lowered.encode(), "sha1"), digest)
        ]
        found += [entry for pattern, entry in self._patterns if _matches_pattern(lowered, pattern)]
        return [(kind, key) for mark, kind, key in found if mark == marker]

    def _read(self, line: str) -> None:
        fields = line.split()
        marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
        if len(fields) < 3 or fields[0].startswith("#") or marker not in {"", _AUTHORITY, _REVOKED}:  # noqa: PLR2004 - names, type, key
            return
        names, entry = fields[0].lower() if not fields[0].startswith("|") else fields[0], (marker, fields[1], fields[2])
        if marker == _REVOKED:
            self._revoked.add((fields[1], fields[2]))
        elif names.startswith("|1|"):
            try:
                salt, digest = (base64.b64decode(part) for part in names[3:].split("|"))
            except (binascii.Error, ValueError):
                return
            self._hashed.append((salt, digest, entry))
        elif any(character in names for character in "*?!"):
            self._patterns.append((names, entry))
        else:
            for name in names.split(","):
                self._plain.setdefault(name, []).append(entry)


def lines_of(text: str, name: str) -> str:
    """The lines with keys or authorities for exactly this name, and all lines that revoke keys."""

    def is_relevant(line: str) -> bool:
        keys = HostKeys((), line)
        return bool(keys._revoked or keys._entries(name) or keys._entries(name, _AUTHORITY))

    return "\n".join(line for line in text.splitlines() if is_relevant(line))


def lines_with(text: str, name: str) -> str:
    """The lines by which ``HostKeys`` checks a machine, and all that revoke keys; "" without a key or an authority."""
    names = _lookup_names(name)
    found = list(dict.fromkeys(line for each in names for line in lines_of(text, each).splitlines()))
    keys = HostKeys((), "\n".join(found))
    return "\n".join(found) if any(map(keys.knows, names)) else ""


def end_last_line(path: Path) -> None:
    """Add a missing line break at the end of a file, so that an appended key does not join the last line.

    OpenSSH itself, up to 9.2 at least, appends to an incomplete line. A file that is not writable stays unchanged.
    """
    with contextlib.suppress(OSError), path.open("rb+") as file:
        if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
            file.write(b"\n")


def _lookup_names(name: str) -> list[str]:
    """The names to look up a machine by, as ssh does: ``[host]:port``, then the host only."""
    return [name, name[1:].rpartition("]:")[0]] if name.startswith("[") and "]:" in name else [name]


def _signing_key(certificate: bytes) -> tuple[str, str] | None:
    """The key that signed a certificate; None for a missing or invalid certificate."""
    parsed = _certificate(certificate)
    if parsed is None:
        return None
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    kind, key = parsed.signature_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode().split()[:2]
    return kind, key


def _is_valid(certificate: bytes, names: Sequence[str]) -> bool:
    """Whether a certificate is a host certificate for one of these names, and valid now (PROTOCOL.certkeys)."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import SSHCertificateType

    parsed = _certificate(certificate)
    if parsed is None or parsed.type is not SSHCertificateType.HOST or parsed.critical_options:
        return False
    try:
        parsed.verify_cert_signature()
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    principals = [principal.decode("utf-8", "replace").lower() for principal in parsed.valid_principals]
    has_name = any(_matches_pattern(names[-1].lower(), principal) for principal in principals) or not principals
    return has_name and parsed.valid_after <= time.time() < parsed.valid_before


def _certificate(certificate: bytes) -> SSHCertificate | None:
    if not certificate:
        return None
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    try:
        line = kind(certificate).encode() + b" " + base64.b64encode(certificate)
        identity = serialization.load_ssh_public_identity(line)
    except (ValueError, UnsupportedAlgorithm):
        return None
    return identity if isinstance(identity, serialization.SSHCertificate) else None


def kind(blob: bytes) -> str:
    """The type of a key or a certificate in wire format."""
    return blob[4 : 4 + int.from_bytes(blob[:4], "big")].decode("ascii", "replace")


def is_among(text: str, key: bytes, certificate: bytes) -> bool:
    """Whether a list of public keys, one a line, holds this key, or the authority of its certificate."""
    searched = {base64.b64encode(key).decode()}
    if authority := _signing_key(certificate):
        searched.add(authority[1])
    return any(field in searched or _certified_key(field) in searched for field in text.split())


def _certified_key(text: str) -> str:
    """The key in a certificate in base64, "" for any other text."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    try:
        parsed = _certificate(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        return ""
    if parsed is None:
        return ""
    return parsed.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode().split()[1]


def _matches_pattern(name: str, patterns: str) -> bool:
    """Whether a name matches a pattern list of OpenSSH: a negated pattern that matches overrides the others."""
    matched = False
    for pattern in patterns.split(","):
        # OpenSSH knows only * and ?; the brackets of `[host]:port` must not be special to fnmatch.
        if fnmatch.fnmatchcase(name, pattern.removeprefix("!").replace("[", "[[]")):
            if pattern.startswith("!"):
                return False
            matched = True
    return matched
