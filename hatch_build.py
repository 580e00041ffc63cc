"""The wheel carries the manual pages where `make man` has built them; pipx links what a package has in share/man."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ManualPages(BuildHookInterface[Any]):
    """Adds build/man to the wheel. An install from a checkout without it has no manual pages."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        pages = Path(self.root) / "build" / "man"
        if pages.is_dir():
            build_data["shared_data"][str(pages)] = "share/man/man1"
