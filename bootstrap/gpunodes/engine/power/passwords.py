"""New passwords of BMCs, in a file of the user."""

from __future__ import annotations

import os
import re
import secrets
import string
from pathlib import Path

from gpunodes.errors import WrongInput

PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{7,19}")
"""A password that every BMC takes and no program splits: IPMI 2.0 allows 20 bytes (22.30)."""
_WANTED = "8 to 20 letters, digits, dots, underscores and hyphens, the first a letter or digit"
_LENGTH = 16
_CLASSES = (string.ascii_uppercase, string.ascii_lowercase, string.digits, "._-")
"""BMCs may refuse a password that lacks one of them."""


def new(path: Path) -> str:
    """The password in ``path``; a random one if there is no such file, written there before it is returned.

    So a password is never lost: a command that was killed continues with the same one. Raises WrongInput for a file
    that others may read, and for a text that a BMC may not take.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _read(path)
    except OSError as error:
        raise WrongInput(f"{path} cannot be written: {error.strerror}", "a path for a new file", "") from error
    password = _random()
    with os.fdopen(descriptor, "w") as file:
        file.write(password + "\n")
        file.flush()
        os.fsync(file.fileno())
    return password


def _read(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise WrongInput(f"{path} cannot be read: {error.strerror}", "a file with a password", "") from error
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
        content = file.read(1024)
    if mode & 0o077:
        raise WrongInput(f"{path} has the mode {mode:04o}", "a file that only its owner can read", f"chmod 600 {path}")
    lines = content.decode("utf-8", "replace").splitlines()
    if len(lines) != 1 or not PATTERN.fullmatch(lines[0]):
        raise WrongInput(f"{path} contains no password that BMCs take", f"one line: {_WANTED}", "delete or correct it")
    return lines[0]


def _random() -> str:
    alphabet = "".join(_CLASSES)
    while True:
        found = "".join(secrets.choice(alphabet) for _ in range(_LENGTH))
        if PATTERN.fullmatch(found) and all(set(found) & set(each) for each in _CLASSES):
            return found
