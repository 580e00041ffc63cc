"""Reads SSH public keys that a new machine is to accept, and refuses everything else that such a file may contain."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from pathlib import Path

from gpunodes.errors import WrongInput

TYPES = (
    "ssh-ed25519",
    "sk-ssh-ed25519@openssh.com",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "sk-ecdsa-sha2-nistp256@openssh.com",
    "ssh-rsa",
)
"""Types of keys that sshd accepts by default (sshd_config(5), PubkeyAcceptedAlgorithms), without certificates."""
_LONGEST = 16384
"""Characters of a key's line; an RSA key of 16384 bits has 2800."""
_WANTED = "lines with a type, a key and perhaps a comment, as ssh-keygen writes them into FILE.pub"


def read(paths: Sequence[Path]) -> tuple[str, ...]:
    """The keys of all files, one line each, without repetitions.

    Raises WrongInput for a file that cannot be read, a private key, and a line that is not a plain public key: options
    before a key would run commands or limit it, and a control character could begin another line.
    """
    keys = [key for path in paths for key in _of_file(path)]
    return tuple(dict.fromkeys(keys))


def _of_file(path: Path) -> list[str]:
    try:
        text = path.expanduser().read_bytes().decode("utf-8")
    except OSError as error:
        raise WrongInput(
            f"the key {path} cannot be read: {error.strerror}", "a readable file", "correct --key"
        ) from error
    except UnicodeDecodeError as error:
        raise WrongInput(f"{path} is not a text file", _WANTED, "correct --key") from error
    if "PRIVATE KEY" in text or text.startswith("PuTTY-User-Key-File"):
        public = path.with_name(f"{path.name}.pub")
        remedy = (
            f"use --key {public}" if public.exists() else f"`ssh-keygen -y -f {path} >{public}` writes its public key"
        )
        raise WrongInput(f"{path} is a private key, which must not leave this machine", "its public key", remedy)
    lines = [line.removesuffix("\r").strip(" \t") for line in text.split("\n")]
    keys = [_key(path, number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
    if not keys:
        raise WrongInput(f"{path} contains no key", _WANTED, "correct --key")
    return keys


def _key(path: Path, number: int, line: str) -> str:
    """One key without superfluous blanks."""

    def wrong(what: str) -> WrongInput:
        return WrongInput(f"line {number} of {path} {what}", _WANTED, "correct the file, or --key")

    if len(line) > _LONGEST:
        raise wrong(f"has {len(line)} characters")
    if not line.isprintable():
        raise wrong("contains a control character")
    kind, _, rest = line.partition(" ")
    if kind not in TYPES:
        known = any(f" {each} " in line for each in TYPES)
        raise wrong("begins with options" if known else "does not begin with the type of a public key")
    encoded, _, comment = rest.strip().partition(" ")
    if _type_of(encoded) != kind:
        raise wrong(f"is not a key of type {kind}")
    return f"{kind} {encoded} {comment.strip()}".rstrip()


def _type_of(encoded: str) -> str:
    """The type inside an encoded key (RFC 4253, 6.6: a text with its length), "" if it is none."""
    if not re.fullmatch(r"[A-Za-z0-9+/]+={0,2}", encoded):
        return ""
    try:
        data = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        return ""
    length = int.from_bytes(data[:4], "big")
    # More must follow: the key itself.
    return data[4 : 4 + length].decode("ascii", "replace") if len(data) > 4 + length else ""
