"""Commands and pages that the tests on machines use are those of this tree: each of them runs once in many landings."""

from __future__ import annotations

import ast
import importlib
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from gpunodes import cli
from gpunodes.errors import WrongInput

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "tests/machines").glob("*.py"), *(ROOT / "tests/slow").glob("test_*.py")])
COMMANDS: dict[str, click.Command] = dict(runpy.run_path(str(ROOT / "docs/generate.py"))["commands"]())
COMMANDS |= {other: COMMANDS[name] for other, name in cli.MODULES.items()}
RUNS = {"gpunodes", "document", "start"}
"""The methods of an operator that take a command line."""


def lines(tree: ast.AST) -> Iterator[tuple[list[str], bool]]:
    """The known words of each command line, and whether these are all: a word that is computed is left out."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in RUNS
            and getattr(node.func.value, "id", "") == "operator"
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            words = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
            # A computed word may be the name of a machine; several of them (*words) may be options.
            computed = any(not isinstance(each, ast.Constant | ast.Name | ast.JoinedStr) for each in node.args)
            yield (words, False) if computed else ([str(getattr(each, "value", "x")) for each in node.args], True)


def wrong(words: list[str], is_whole: bool) -> str:
    """What is wrong with a command line, "" if its command and its options exist, and no argument of it is missing."""
    found = max((each for each in COMMANDS if words[: each.count(" ") + 1] == each.split()), key=len, default="")
    if not found:
        return f"no such command: {words}"
    if found == "playbook":
        return ""  # what follows are options of ansible-playbook
    if is_whole:
        try:
            COMMANDS[found].make_context(found, words[found.count(" ") + 1 :])
        except (click.ClickException, WrongInput) as error:
            if "x" not in words or isinstance(error, click.MissingParameter):
                return f"{words}: {error}"
        return ""
    known = {name for each in COMMANDS[found].params for name in (*each.opts, *each.secondary_opts)}
    return "".join(f"{found} has no {word}" for word in words if word.startswith("--") and word not in known)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_commands_of_the_tests_on_machines_exist(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [found for line in lines(ast.parse(path.read_text())) if (found := wrong(*line))] == []


def test_a_wrong_command_is_found() -> None:
    tree = ast.parse(
        'operator.gpunodes("joint", name)\noperator.document("gpu", "plan", *x, "--jason")\n'
        'operator.gpunodes("join")\noperator.start("up")\noperator.gpunodes("upgrade", "plan")\n'
        'operator.gpunodes("join", *x)'
    )
    assert [bool(wrong(*line)) for line in lines(tree)] == [True, True, True, False, True, False]
    assert sum(1 for path in FILES for _ in lines(ast.parse(path.read_text()))) > 150


def test_the_examples_of_a_page_are_those_that_its_test_takes() -> None:
    pods = importlib.import_module("tests.machines.pods")
    [login] = pods.examples("Images from a private registry")
    assert "--namespace team" in login
    for heading in ("One GPU", "Require a pool", "Prefer a generation"):
        assert pods.example(heading)
    gpu = importlib.import_module("tests.machines.test_gpu")
    assert gpu.tolerations()["tolerations"]


def test_every_walk_through_is_followed_line_by_line() -> None:
    walks = importlib.import_module("tests.machines.walks")
    pages = [walks.GUIDE, *walks.OTHERS]
    assert sorted(pages) == sorted(path.stem for path in walks.PAGES.glob("*.md"))
    for page in pages:
        found = walks.commands(page)
        assert {words[0] for words in found} <= {"gpunodes", "kubectl"}
        given = {word for words in found for word in words if word.startswith(("10.", "~"))}
        assert given <= {*walks.MACHINES, "~/.ssh/id_ed25519"}
    assert ["kubectl", "create", "namespace", "team"] in walks.commands("cdk-tensorflow")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("    gpunodes", "```\ngpunodes"), "in another form"),
        (lambda text: text.replace("    gpunodes up", "    $ gpunodes up"), "in another form"),
        (lambda text: text.replace("    gpunodes up", "    Run gpunodes up"), "cdk lacks gpunodes up"),
        (lambda _: "# CDK, today\n", "cdk lacks gpunodes preflight"),
    ],
)
def test_a_walk_through_of_which_no_line_would_be_run_fails(change: Callable[[str], str], message: str) -> None:
    walks = importlib.import_module("tests.machines.walks")
    with pytest.raises(AssertionError, match=message):
        walks.commands("cdk", change((walks.PAGES / "cdk.md").read_text()))


def test_a_plan_of_addresses_is_looked_at() -> None:
    walks = importlib.import_module("tests.machines.walks")

    def ran(code: int, text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], code, text, "")

    good = "10.1.0.2: 2 x Tesla T4\n  driver  580\n\n10.1.0.3: NOT POSSIBLE\n  nothing serves packages\n"
    walks.planned(ran(3, good), ["10.1.0.2", "10.1.0.3"])
    for code, text in ((2, good), (3, ""), (3, good.replace("NOT POSSIBLE", "UNREACHABLE: timed out"))):
        with pytest.raises((AssertionError, ValueError)):
            walks.planned(ran(code, text), ["10.1.0.2", "10.1.0.3"])


def test_the_stand_in_of_a_notebook_starts_alone() -> None:
    """In an image of the machines it is one file beside Python's own modules."""
    program = f"import runpy; runpy.run_path({str(ROOT / 'tests/jupyter.py')!r})"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
