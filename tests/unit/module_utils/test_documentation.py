"""The documentation of the modules."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml
from gpunodes.ansible.module_utils import packages

MODULES = sorted(
    path for path in (Path(packages.__file__).parents[1] / "modules").glob("*.py") if path.name != "__init__.py"
)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_modules_are_documented(path: Path) -> None:
    words = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    documentation = yaml.safe_load(words["DOCUMENTATION"])
    assert documentation["module"] == path.stem
    assert yaml.safe_load(words["EXAMPLES"])
    assert yaml.safe_load(words["RETURN"])
    source = path.read_text(encoding="utf-8")
    assert "supports_check_mode=True" in source
    for name in documentation.get("options") or {}:
        assert f'"{name}": {{"type"' in source or f'"{name}": {{\n' in source, name
