"""Pages of the documentation that messages name: each exists, and `gpunodes help --page` shows it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from gpunodes import settings
from gpunodes.cli import help as help_of
from gpunodes.errors import WrongInput

ROOT = Path(__file__).parents[3]
SOURCES = [ROOT / "bootstrap" / "gpunodes", ROOT / "roles", ROOT / "playbooks"]
PAGE = re.compile(r"gpunodes help --page ([a-z-]+)")


@functools.cache
def texts() -> tuple[tuple[Path, str], ...]:
    """What may be printed: strings that are no docstrings, docstrings of commands, and files that are no Python."""
    return tuple(_texts())


def _texts() -> Iterator[tuple[Path, str]]:
    for folder in SOURCES:
        for path in folder.rglob("*"):
            if path.suffix in {".yml", ".toml", ".j2"}:
                yield path, path.read_text()
            elif path.suffix == ".py":
                tree = ast.parse(path.read_text())
                first = {
                    id(node.body[0].value)
                    for node in ast.walk(tree)
                    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
                    and node.body
                    and isinstance(node.body[0], ast.Expr)
                    and "cli" not in path.parts
                }
                for node in ast.walk(tree):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in first:
                        yield path, node.value


@pytest.mark.long
def test_messages_name_pages_that_exist_and_can_be_shown() -> None:
    named = {name for _, text in texts() for name in PAGE.findall(text)}
    assert named >= {"settings", "existing-cluster", "lab"}
    for name in named:
        shown = CliRunner().invoke(help_of.command, ["--page", name])
        assert shown.exit_code == 0
        assert shown.output == (ROOT / "docs" / f"{name}.md").read_text().rstrip() + "\n"


def test_no_message_names_a_file_that_an_installation_lacks() -> None:
    assert not [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path, text in texts()
        if (found := re.search(r"(?<![\w/.-])docs/[a-z-]+\.md", text))
    ]


def test_pages_of_an_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "gpunodes"
    (package / "docs").mkdir(parents=True)
    (package / "docs" / "settings.md").write_text("# Settings\n")
    monkeypatch.setattr(settings, "__file__", str(package / "settings.py"))
    assert settings.pages() == package / "docs"
    assert CliRunner().invoke(help_of.command, ["--page", "settings"]).output == "# Settings\n"


@pytest.mark.parametrize("name", ["nothing", "../README", "/etc/passwd", "settings.md"])
def test_only_pages_are_shown(name: str) -> None:
    with pytest.raises(WrongInput, match=r"one of .*settings"):
        CliRunner().invoke(help_of.command, ["--page", name], catch_exceptions=False)
