"""Conditions of tasks are booleans: Ansible 2.19 and later refuse any other result, also a string that is empty."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from jinja2 import nodes

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.glob("roles/*/tasks/*.yml"), *ROOT.glob("playbooks/*.yml"), *ROOT.glob("playbooks/tasks/*.yml")])
KEYS = {"when", "that", "failed_when", "changed_when", "until"}
BOOLEAN = ""
NUMBERS = {"length", "count", "int", "float", "sum"}
TEXTS = {"join", "string", "trim", "lower", "upper", "replace", "b64decode", "basename", "dirname"}


def options() -> dict[str, str]:
    """The type of each option of a role."""
    found: dict[str, str] = {}
    for path in ROOT.glob("roles/*/meta/argument_specs.yml"):
        for entry in yaml.safe_load(path.read_text())["argument_specs"].values():
            found |= {name: each.get("type", "str") for name, each in (entry.get("options") or {}).items()}
    return found


OPTIONS = options()


def conditions(value: Any) -> Iterator[str]:
    """The conditions in a playbook or a list of tasks."""
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, dict):
            continue
        for key, inner in each.items():
            if key in KEYS:
                yield from (one for one in (inner if isinstance(inner, list) else [inner]) if isinstance(one, str))
            elif isinstance(inner, list | dict):
                yield from conditions(inner)


def other(node: nodes.Node) -> str:
    """A type other than a boolean that the value of an expression may have; "" if none is known."""
    if inner := _results(node):
        return next(filter(None, map(other, inner)), BOOLEAN)
    if isinstance(node, nodes.Const):
        return BOOLEAN if isinstance(node.value, bool) else type(node.value).__name__
    if isinstance(node, nodes.Name):
        return OPTIONS.get(node.name, "bool").replace("bool", BOOLEAN)
    if isinstance(node, nodes.Filter):
        return _filtered(node)
    return type(node).__name__.lower() if isinstance(node, nodes.List | nodes.Dict) else BOOLEAN


def _results(node: nodes.Node) -> list[nodes.Node]:
    """The expressions of which one is the value: `and` and `or` return an operand."""
    if isinstance(node, nodes.And | nodes.Or):
        return [node.left, node.right]
    if isinstance(node, nodes.CondExpr):
        return [node.expr1, *([node.expr2] if node.expr2 else [])]
    return []


def _filtered(node: nodes.Filter) -> str:
    if node.name in NUMBERS:
        return "int"
    if node.name in TEXTS:
        return "str"
    if node.name in {"default", "d"} and node.args:
        return other(node.args[0]) or (other(node.node) if node.node else BOOLEAN)
    return BOOLEAN


def type_of(text: str) -> str:
    environment = jinja2.Environment()  # noqa: S701 - parses only
    environment.filters |= dict.fromkeys(("b64decode",), str)
    output = environment.parse("{{ " + text + " }}").body[0]
    assert isinstance(output, nodes.Output)
    return other(output.nodes[0])


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")  # of regular expressions in them
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_condition_of_a_task_is_a_boolean(path: Path) -> None:
    wrong = {text: found for text in conditions(yaml.safe_load(path.read_text())) if (found := type_of(text))}
    assert wrong == {}


def test_other_types_are_found() -> None:
    assert type_of("autoscaler_archive or true") == "str"
    assert type_of("a and (b or c | default('') and d)") == "str"
    assert type_of("x | length") == "int"
    assert type_of("not autoscaler_archive and (x | length > 0 or y is changed) and z | default(false)") == BOOLEAN
