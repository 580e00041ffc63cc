"""The documentation says what the code does: generated pages are fresh, commands have help, links lead somewhere."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from gpunodes.inventory import Inventory
from gpunodes.model import Role

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATE: dict[str, Any] = runpy.run_path(str(DOCS / "generate.py"))
COMMANDS: dict[str, click.Command] = dict(GENERATE["commands"]())
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]


def options() -> Iterator[tuple[str, click.Option]]:
    """Every option of every command."""
    for name, command in COMMANDS.items():
        for param in command.params:
            if isinstance(param, click.Option):
                yield name, param


def test_generated_pages_are_fresh() -> None:
    stale = [path.name for path in GENERATE["stale"]()]
    assert not stale, "run `make docs` and commit what it writes"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    assert len((COMMANDS[name].help or "").split()) >= 3, "a command's docstring is its help"


@pytest.mark.parametrize(("name", "option"), [(name, option) for name, option in options()], ids=str)
def test_every_option_has_help(name: str, option: click.Option) -> None:
    assert option.hidden or option.help, f"{name} {option.opts[0]}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name: str) -> None:
    assert f"\n## gpunodes {name}\n" in (DOCS / "commands.md").read_text()


def test_every_command_has_a_manual_page() -> None:
    pages = GENERATE["man_pages"]()
    assert set(pages) == {"gpunodes.1", *(f"gpunodes-{name.replace(' ', '-')}.1" for name in COMMANDS)}
    for page in pages.values():
        assert page.startswith(".TH GPUNODES")
        assert ".SH NAME\ngpunodes" in page
        assert "\n\n" not in page
    assert "--with-cuda".replace("-", "\\-") in pages["gpunodes-gpu-install.1"]


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_manual_pages_are_valid() -> None:
    for page in GENERATE["man_pages"]().values():
        argv = ["groff", "-man", "-Tutf8", "-ww"]
        done = subprocess.run(argv, input=page, capture_output=True, text=True, check=True)
        assert done.stderr == ""


def test_every_json_document_is_documented() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "bootstrap" / "gpunodes").rglob("*.py"))
    schemas = set(re.findall(r"""["'](gpunodes\.[a-z_-]+/\d+)["']""", code))
    assert schemas
    page = (DOCS / "json.md").read_text()
    assert not {schema for schema in schemas if schema not in page}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert not broken


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_reached_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert not {page.name for page in DOCS.glob("*.md") if f"docs/{page.name}" not in readme}


def test_the_example_inventory_works(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    shutil.copy(ROOT / "inventory" / "hosts.yml.example", path)
    inventory = Inventory(path)
    assert inventory.control_plane()
    assert inventory.machines(Role.WORKER)
