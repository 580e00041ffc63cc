"""What the wheel and the source archive carry besides the package: manual pages, and the documentation's pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Pages(BuildHookInterface[Any]):
    """Adds build/man, where `make man` has built it (pipx links what a package has in share/man), and docs/*.md.

    An install from a checkout without build/man has no manual pages. `gpunodes help --page` shows the others.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        pages = Path(self.root) / "build" / "man"
        if self.target_name == "sdist":
            # In its place, although git ignores it: the wheel that is built from the source archive has the pages, too.
            if pages.is_dir():
                build_data["force_include"][str(pages)] = "build/man"
            return
        if pages.is_dir():
            build_data["shared_data"][str(pages)] = "share/man/man1"
        for page in sorted((Path(self.root) / "docs").glob("*.md")):
            build_data["force_include"][str(page)] = f"gpunodes/docs/{page.name}"
