"""The documentation of the modules, as ansible-doc and ``ansible-test sanity`` (validate-modules) expect it."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes import __version__
from gpunodes.ansible.module_utils import ledger, packages
from gpunodes.ansible.module_utils.host.spec import Spec

ANSIBLE = Path(packages.__file__).parents[1]
MODULES = sorted(path.stem for path in (ANSIBLE / "modules").glob("*.py") if path.name != "__init__.py")
SUPPORT = {"full", "partial", "none"}


def documents(name: str) -> dict[str, Any]:
    """DOCUMENTATION, EXAMPLES and RETURN of a module."""
    return {
        node.targets[0].id: yaml.safe_load(node.value.value)
        for node in ast.parse((ANSIBLE / "modules" / f"{name}.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def module_call(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments with which a module makes its AnsibleModule."""

    class MadeError(Exception):
        pass

    found: dict[str, Any] = {}

    def make(**arguments: Any) -> None:
        found.update(arguments)
        raise MadeError

    module = importlib.import_module(f"gpunodes.ansible.modules.{name}")
    monkeypatch.setattr(module, "AnsibleModule", make)
    with pytest.raises(MadeError):
        module.main()
    return found


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings(each)


def check_options(documented: Mapping[str, Any], specified: Mapping[str, Any]) -> None:
    assert set(documented) == set(specified)
    for name, option in documented.items():
        spec = specified[name]
        assert option["description"], name
        for key, default in (("type", "str"), ("required", False), ("elements", None), ("choices", None)):
            assert option.get(key, default) == spec.get(key, default), (name, key)
        assert option.get("default") == spec.get("default"), name
        assert not (option.get("required") and "default" in option), name
        if re.search(r"pass|secret|token|key$", name) and spec["type"] == "str" and "choices" not in spec:
            assert "no_log" in spec, name
        if "options" in spec:
            check_options(option["suboptions"], spec["options"])


@pytest.mark.parametrize("name", MODULES)
def test_documentation_matches_the_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    document = documents(name)["DOCUMENTATION"]
    assert set(document) == {
        *("module", "short_description", "version_added", "description", "options", "attributes", "author")
    }
    assert document["module"] == name
    assert not document["short_description"].endswith(".")
    assert document["version_added"] == __version__
    assert all(re.fullmatch(r"\w.* \(@[\w-]+\)", author) for author in document["author"])
    called = module_call(name, monkeypatch)
    check_options(document["options"], called["argument_spec"])
    assert called["supports_check_mode"]


@pytest.mark.parametrize("name", MODULES)
def test_attributes_are_declared(name: str) -> None:
    attributes = documents(name)["DOCUMENTATION"]["attributes"]
    assert set(attributes) == {"check_mode", "diff_mode", "platform"}
    for attribute in attributes.values():
        assert attribute["support"] in SUPPORT
        assert attribute["description"].endswith(".")
        assert attribute["support"] != "partial" or attribute["details"]
    # A module that supports check mode may not declare that it does not (validate-modules: attributes-check-mode).
    assert attributes["check_mode"]["support"] != "none"
    assert attributes["platform"]["platforms"] == "linux"


@pytest.mark.parametrize("name", MODULES)
def test_results_and_examples_are_documented(name: str) -> None:
    found = documents(name)
    for value in found["RETURN"].values():
        assert {"description", "returned", "type"} <= set(value)
        assert value["type"] != "list" or "elements" in value
    shows_diff = found["DOCUMENTATION"]["attributes"]["diff_mode"]["support"] != "none"
    assert ("diff" in found["RETURN"]) is shows_diff
    used = {word for task in found["EXAMPLES"] for word in task if "." in word}
    assert f"gpunodes.bootstrap.{name}" in used
    assert used <= {f"gpunodes.bootstrap.{each}" for each in MODULES} | {"ansible.builtin.debug"}
    options = set(found["DOCUMENTATION"]["options"])
    for text in strings({key: found[key] for key in ("DOCUMENTATION", "RETURN")}):
        assert set(re.findall(r"\bM\(([^)]*)\)", text)) <= {f"gpunodes.bootstrap.{each}" for each in MODULES}
        for referred in re.findall(r"\bO\(([^)=]*)[^)]*\)", text):
            plugin, _, option = referred.rpartition("#module:")
            assert option in (documents(plugin.rpartition(".")[2])["DOCUMENTATION"]["options"] if plugin else options)


def test_the_desired_state_is_documented_by_field() -> None:
    documented = documents("host")["DOCUMENTATION"]["options"]["wanted"]["suboptions"]
    assert list(documented) == [field.name for field in fields(Spec)]
    assert documented["section"]["choices"] == ["", *ledger.SECTIONS]
    kinds = {field.name: field.metadata["kind"] for field in fields(Spec) if "kind" in field.metadata}
    for name, kind in kinds.items():
        named = set(re.findall(r"C\((\w+)\)", documented[name]["description"]))
        assert named == {field.name for field in fields(kind)}, name
