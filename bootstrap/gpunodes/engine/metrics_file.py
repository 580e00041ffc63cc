"""The file with metrics that node exporter's textfile collector reads."""

from __future__ import annotations

from pathlib import Path

from gpunodes.engine import whole_file
from gpunodes.errors import WrongInput

_SUFFIX = ".prom"
"""node exporter ignores files without it."""


def check(path: Path) -> None:
    """Raise WrongInput unless :func:`write` can make this file."""
    if path.suffix != _SUFFIX:
        raise WrongInput(f"node exporter does not read {path}", f"a name that ends in {_SUFFIX}", "correct --metrics")
    whole_file.check(path, "--metrics")


def write(path: Path, text: str) -> None:
    """Replace the file in one step (0644: node exporter is another user); raises GpunodesError."""
    whole_file.write(path, text, 0o644, "the metrics")
