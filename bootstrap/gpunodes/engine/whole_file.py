"""A file that is written whole: it is replaced in one step, so nobody reads a part of it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from gpunodes.errors import GpunodesError, WrongInput


def check(path: Path, option: str) -> None:
    """Raise WrongInput, naming the ``option`` with its path, unless :func:`write` can make this file."""
    folder = path.parent
    wanted = "a file in a folder that this user can write"
    if not folder.is_dir():
        raise WrongInput(f"there is no folder {folder}", wanted, f"make it, or correct {option}")
    if path.is_dir():
        raise WrongInput(f"{path} is a folder", wanted, f"correct {option}")
    if path.exists() and not path.is_file():
        raise WrongInput(f"{path} is no regular file", wanted, f"correct {option}")
    try:
        descriptor, partial = _partial(path)
        os.close(descriptor)
        Path(partial).unlink()
    except OSError as error:
        found = f"the folder {folder} cannot be written: {error.strerror}"
        raise WrongInput(found, wanted, f"give this user access to it, or correct {option}") from error


def write(path: Path, text: str, mode: int, what: str) -> None:
    """Replace the file in one step; raises GpunodesError, which names ``what`` it has."""
    try:
        descriptor, partial = _partial(path)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            Path(partial).replace(path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise GpunodesError(
            f"{what} cannot be written to {path}: {error.strerror}", "", "check `df` and the folder's permissions"
        ) from error


def _partial(path: Path) -> tuple[int, str]:
    """A new file (0600) in the same folder, with another suffix: node exporter must not read a part of the metrics."""
    return tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
