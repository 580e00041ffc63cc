"""The pinned versions of the stand-in tree, typed."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gpunodes.lab.mirror import pins as mirror

HERE = Path(__file__).parent


@dataclass(frozen=True)
class StandinComponent(mirror.Component):
    """One Go module tree in standin/go/NAME/, and its build options."""

    @property
    def modules(self) -> tuple[Path, Path]:
        """Its go.mod and go.sum."""
        return HERE / "go" / self.name / "go.mod", HERE / "go" / self.name / "go.sum"


@cache
def load() -> Mapping[str, StandinComponent]:
    """Read pins.toml. Errors are not translated: a malformed file is a bug of this package."""
    raw = tomllib.loads((HERE / "pins.toml").read_text())
    return {
        name: StandinComponent(
            name, entry["version"], cgo=entry.get("cgo", False), ldflags=tuple(entry.get("ldflags", ()))
        )
        for name, entry in raw["components"].items()
    }
