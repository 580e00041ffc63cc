"""Encrypts and decrypts streams by age or gpg on the controller: the plain text never touches a disk.

A recipient's form says which program it is for. An OpenPGP key is named by its whole fingerprint: shorter names can be
those of another user's key.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from gpunodes.errors import GpunodesError, WrongInput

_AGE = re.compile(r"age1[a-z0-9]{20,4000}|ssh-(ed25519|rsa) [A-Za-z0-9+/=]{40,4000}( [^\x00-\x1f]{0,200})?")
_FINGERPRINT = re.compile(r"(0x)?([0-9A-Fa-f]{40}|[0-9A-Fa-f]{64})")
_AGE_HEADER = b"age-encryption.org/v1\n"
_TAR_MAGIC = (257, b"ustar")
_END_S = 60


def argv_for(recipient: str) -> list[str]:
    """The program that encrypts to a recipient; raises WrongInput for another form, and for a missing program."""
    if _AGE.fullmatch(recipient):
        return [_program("age"), "--encrypt", "--recipient", recipient, "--output", "-"]
    if _FINGERPRINT.fullmatch(recipient.replace(" ", "")):
        fingerprint = recipient.replace(" ", "").removeprefix("0x").upper()
        return [*_gpg(), "--trust-model", "always", "--recipient", fingerprint, "--output", "-", "--encrypt"]
    raise WrongInput(
        f"{recipient!r} is not a recipient",
        "an age recipient (age1..., ssh-ed25519 ..., ssh-rsa ...) or the whole fingerprint of an OpenPGP key",
        "correct --encrypt-to",
    )


def _gpg() -> list[str]:
    return [_program("gpg"), "--batch", "--no-tty", "--quiet"]


def _program(name: str) -> str:
    if found := shutil.which(name):
        return found
    raise WrongInput(
        f"{name} is not installed on this machine", f"the program {name}", f"install {name}, then run again"
    )


@contextlib.contextmanager
def encrypting(argv: Sequence[str], out: IO[bytes]) -> Iterator[IO[bytes]]:
    """A stream whose data is encrypted into the open file ``out``; raises GpunodesError if the program fails.

    If the block fails, the program is killed: it must not end a file that is incomplete.
    """
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(list(argv), stdin=subprocess.PIPE, stdout=out, stderr=errors)
        assert process.stdin  # noqa: S101 - for the type checker
        try:
            yield process.stdin
            process.stdin.close()
            code = process.wait(_END_S)
        except BrokenPipeError:
            code = process.wait(_END_S) or 1
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()
        _check(argv[0], code, errors)


@contextlib.contextmanager
def opened(path: Path, identity: Path | None) -> Iterator[IO[bytes]]:
    """The plain content of a file, decrypted if it is encrypted; raises WrongInput and GpunodesError.

    ``identity``: age's identity file. gpg uses its own keyring and agent.
    """
    # Without a buffer: a program that inherits the file begins where it is.
    with path.open("rb", buffering=0) as file:
        start = file.read(512)
        file.seek(0)
        where, magic = _TAR_MAGIC
        if start[where : where + len(magic)] == magic:
            yield file
            return
        if start.startswith(_AGE_HEADER):
            if identity is None:
                raise WrongInput(f"{path} is encrypted with age", "its identity file", "name it with --identity")
            argv = [_program("age"), "--decrypt", "--identity", str(identity), "-"]
        elif _is_openpgp(start):
            argv = [*_gpg(), "--decrypt", "--output", "-"]
        else:
            yield file  # its reader says what is wrong with it
            return
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(argv, stdin=file, stdout=subprocess.PIPE, stderr=errors)
            assert process.stdout  # noqa: S101 - for the type checker
            try:
                yield process.stdout
                # age and gpg report a changed file at its end only.
                code = process.wait(_END_S)
            except WrongInput:
                process.kill()
                if process.wait() > 0:
                    _check(argv[0], process.returncode, errors)
                raise
            except BaseException:
                process.kill()
                process.wait()
                raise
            finally:
                process.stdout.close()
            _check(argv[0], code, errors)


def _is_openpgp(start: bytes) -> bool:
    """Whether data begins with an OpenPGP packet that holds a session key (RFC 9580: types 1 and 3)."""
    first = start[0] if start else 0
    kind = first & 0x3F if first & 0x40 else (first >> 2) & 0xF
    return bool(first & 0x80) and kind in (1, 3)


def _check(program: str, code: int, errors: IO[bytes]) -> None:
    if code:
        errors.seek(0)
        lines = errors.read(4096).decode("utf-8", "replace").strip().splitlines()
        raise GpunodesError(
            f"{Path(program).name} failed: {lines[-1] if lines else f'exit code {code}'}",
            "",
            "check the recipient or the identity, then run again",
        )
