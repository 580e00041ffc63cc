"""The file with metrics that node exporter's textfile collector reads."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from gpunodes.errors import GpunodesError, WrongInput

_SUFFIX = ".prom"
"""node exporter ignores files without it."""


def check(path: Path) -> None:
    """Raise WrongInput unless :func:`write` can make this file."""
    folder = path.parent
    wanted, remedy = "a file in a folder that this user can write", "correct --metrics"
    if path.suffix != _SUFFIX:
        raise WrongInput(f"node exporter does not read {path}", f"a name that ends in {_SUFFIX}", remedy)
    if not folder.is_dir():
        raise WrongInput(f"there is no folder {folder}", wanted, "make it, or correct --metrics")
    if path.is_dir():
        raise WrongInput(f"{path} is a folder", wanted, remedy)
    try:
        descriptor, partial = _partial(path)
        os.close(descriptor)
        Path(partial).unlink()
    except OSError as error:
        found = f"the folder {folder} cannot be written: {error.strerror}"
        raise WrongInput(found, wanted, "give this user access to it, or correct --metrics") from error


def write(path: Path, text: str) -> None:
    """Replace the file in one step (0644: node exporter is another user); raises GpunodesError."""
    try:
        descriptor, partial = _partial(path)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fchmod(file.fileno(), 0o644)
                os.fsync(file.fileno())
            Path(partial).replace(path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise GpunodesError(
            f"the metrics cannot be written to {path}: {error.strerror}", "", "check `df` and the folder's permissions"
        ) from error


def _partial(path: Path) -> tuple[int, str]:
    """A new file in the same folder, with another suffix: node exporter must not read a part of the metrics."""
    return tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
