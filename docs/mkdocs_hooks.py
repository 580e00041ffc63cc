"""A hook of mkdocs: adds the pages that stand outside of docs/, and makes all links fit the site.

A link to a file of the repository that is not on the site (code, a playbook) becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ADDED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "examples/README.md": "examples.md",
}
"""Path in the repository to the page of the site."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of ADDED, and the files of the examples as they are."""
    from mkdocs.structure.files import File

    for source, page in ADDED.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for path in sorted((ROOT / "examples").rglob("*.yml")):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001 - the hook's signature
    """Turn the repository's links of a page into the site's."""
    here = page.file.src_uri
    source = next((source for source, target in ADDED.items() if target == here), f"docs/{here}")
    return _LINK.sub(lambda match: link(match, source, here, set(files.src_uris)), markdown)


def link(match: re.Match[str], source: str, here: str, known: set[str]) -> str:
    """One link of the file ``source`` of the repository, as it stands on the page ``here`` of the site."""
    image, text, target = match.groups()
    if "://" in target or target.startswith(("#", "mailto:")):
        return match.group()
    name, _, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
    page = ADDED.get(path, path.removeprefix("docs/"))
    if page not in known:
        return match.group() if path.startswith("docs/") else text
    relative = posixpath.relpath(page, posixpath.dirname(here) or ".")
    return f"{image}[{text}]({relative}{'#' + anchor if anchor else ''})"
