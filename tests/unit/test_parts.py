"""The parts of the machine tests: every file and scenario is in one part, and consecutive landings run all parts."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.machines import parts

ROOT = Path(__file__).parents[2]
_NAMED = re.compile(r"\bparts? (`[a-z-]+`(?:(?:,|,? and) `[a-z-]+`)*)")
_NAME = re.compile(r"`([a-z-]+)`")


@pytest.fixture
def commit(tmp_path: Path) -> Callable[..., None]:
    """A git repository in the temporary folder; returns a function that runs git there."""

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init", "--initial-branch", "main")
    return git


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.machines.parts", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_every_file_of_machine_tests_is_in_exactly_one_part() -> None:
    listed = [file for part in (*parts.PARTS.values(), *parts.SLOW.values()) for file in part.files]
    assert sorted(listed) == sorted(path.name for path in parts.HERE.glob("test_*.py"))


def test_every_scenario_is_in_exactly_one_part() -> None:
    listed = [scenario for part in parts.PARTS.values() for scenario in part.scenarios]
    found = {path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml")}
    assert sorted(listed) == sorted(found)


def test_a_part_has_either_files_or_scenarios() -> None:
    """`make test-part` runs files with pytest and scenarios with Molecule."""
    assert all(bool(part.files) != bool(part.scenarios) for part in parts.PARTS.values())


def test_no_part_takes_more_than_40_minutes_of_those_of_ci() -> None:
    assert [name for name, part in parts.PARTS.items() if part.minutes > 39] == []


def test_one_turn_for_each_part_runs_all_parts() -> None:
    assert sorted(parts.in_turn(265 + number) for number in range(len(parts.PARTS))) == sorted(parts.PARTS)


def test_a_landing_is_one_turn_however_many_commits_it_merges(tmp_path: Path, commit: Callable[..., None]) -> None:
    commit("commit", "--allow-empty", "--message", "the first")
    commit("checkout", "-b", "work")
    for _ in range(3):
        commit("commit", "--allow-empty", "--message", "a step")
    commit("checkout", "main")
    assert parts.by_commit(tmp_path)[0] == parts.in_turn(1)
    commit("merge", "--no-ff", "--message", "a landing", "work")
    assert parts.by_commit(tmp_path)[0] == parts.in_turn(2)


def test_a_shallow_checkout_chooses_a_part_by_its_hash(tmp_path: Path, commit: Callable[..., None]) -> None:
    for message in ("one", "two"):
        commit("commit", "--allow-empty", "--message", message)
    shallow = tmp_path / "shallow"
    commit("clone", "--depth", "1", tmp_path.as_uri(), str(shallow))
    name, why = parts.by_commit(shallow)
    assert name in parts.PARTS
    assert "its history is missing" in why
    assert parts.by_commit(shallow) == (name, why)


def test_without_a_checkout_a_named_part_is_chosen(tmp_path: Path) -> None:
    assert parts.by_commit(tmp_path)[0] == parts.WITHOUT_HISTORY
    assert parts.WITHOUT_HISTORY in parts.PARTS


def test_a_part_can_be_named() -> None:
    done = run("docker")
    assert done.stdout.split() == ["tests/machines/test_docker.py"]
    assert "part 'docker'" in done.stderr
    assert run("images").stdout.split() == ["tests/machines/test_prepare.py", "tests/machines/test_seed.py"]
    assert run("roles").stdout.split() == ["molecule/docker", "molecule/cuda", "molecule/gpu_pods"]
    assert run("none").stdout == ""
    wrong = run("dokcer")
    assert wrong.returncode == 2
    assert "docker" in wrong.stderr


def test_the_part_in_turn_is_printed_before_any_test_runs() -> None:
    done = run()
    assert done.returncode == 0
    assert re.search(r"part '[\w-]+', \d+ of \d+, about \d+ min, ", done.stderr)


def test_a_workflow_runs_every_part_each_night() -> None:
    assert json.loads(run("--list").stdout) == [*parts.PARTS, *parts.SLOW]
    workflow = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())
    assert "schedule" in workflow[True]  # YAML's `on`
    assert "tests.machines.parts --list" in json.dumps(workflow["jobs"]["parts"])
    machines = workflow["jobs"]["machines"]
    assert machines["strategy"]["matrix"] == {"part": "${{ fromJSON(needs.parts.outputs.list) }}"}
    assert "make test-part PART=${{ matrix.part }}" in json.dumps(machines["steps"])


def test_contributing_has_the_numbers_of_these_parts() -> None:
    text, number = " ".join((ROOT / "CONTRIBUTING.md").read_text().split()), len(parts.PARTS)
    assert f"after {number} landings" in text
    assert f"once in {number} landings" in text
    # Until each of so many was drawn once.
    drawn = number * sum(1 / each for each in range(1, number + 1))
    assert f"about {round(drawn, -1):.0f} landings" in text
    slow = sum(part.minutes for part in parts.SLOW.values())
    hours = slow + sum(part.minutes for part in parts.PARTS.values())
    assert f"nearly {math.ceil(hours / 60)} hours without KVM, {math.ceil(slow / 60)} of them slow parts" in text


def test_parts_that_the_documentation_names_exist() -> None:
    """Also those of a list, as in: the parts `a` and `b`."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    found = [name for page in pages for listed in _NAMED.findall(page.read_text()) for name in _NAME.findall(listed)]
    assert len(found) > 20
    assert {*found} <= {*parts.PARTS, *parts.SLOW}
