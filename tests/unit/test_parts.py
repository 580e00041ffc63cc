"""The turns of the machine tests: every file has its part, and landings walk through all parts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.machines import parts

ROOT = Path(__file__).parents[2]


@pytest.fixture
def commit(tmp_path: Path) -> Callable[..., None]:
    """Makes a git checkout of the temporary folder, by commits."""

    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    git("init", "--initial-branch", "main")
    return git


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.machines.parts", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_every_file_of_machine_tests_is_in_exactly_one_part() -> None:
    listed = [file for part in parts.PARTS.values() for file in part.files]
    assert sorted(listed) == sorted(path.name for path in parts.HERE.glob("test_*.py"))


def test_each_part_stays_below_50_minutes_with_the_quick_tests() -> None:
    assert [name for name, part in parts.PARTS.items() if part.minutes > 39] == []


def test_as_many_turns_as_there_are_parts_run_all() -> None:
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


def test_a_checkout_without_history_goes_by_its_hash(tmp_path: Path, commit: Callable[..., None]) -> None:
    for message in ("one", "two"):
        commit("commit", "--allow-empty", "--message", message)
    shallow = tmp_path / "shallow"
    commit("clone", "--depth", "1", tmp_path.as_uri(), str(shallow))
    name, why = parts.by_commit(shallow)
    assert name in parts.PARTS
    assert "its history is missing" in why
    assert parts.by_commit(shallow) == (name, why)


def test_no_checkout_at_all_gets_the_first_part(tmp_path: Path) -> None:
    assert parts.by_commit(tmp_path)[0] == next(iter(parts.PARTS))


def test_a_part_can_be_named() -> None:
    done = run("docker")
    assert done.stdout.split() == ["tests/machines/test_docker.py", "tests/machines/test_gpu_alone.py"]
    assert "part 'docker'" in done.stderr
    assert run("none").stdout == ""
    wrong = run("dokcer")
    assert wrong.returncode == 2
    assert "docker" in wrong.stderr


def test_the_part_in_turn_is_told_before_anything_is_run() -> None:
    done = run()
    assert done.returncode == 0
    assert re.search(r"part '\w+', \d+ of \d+, about \d+ min, ", done.stderr)


def test_a_workflow_runs_every_part_each_night() -> None:
    assert json.loads(run("--list").stdout) == list(parts.PARTS)
    workflow = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())
    assert "schedule" in workflow[True]  # YAML's `on`
    assert "tests.machines.parts --list" in json.dumps(workflow["jobs"]["parts"])
    machines = workflow["jobs"]["machines"]
    assert machines["strategy"]["matrix"] == {"part": "${{ fromJSON(needs.parts.outputs.list) }}"}
    assert "make test-part PART=${{ matrix.part }}" in json.dumps(machines["steps"])


def test_contributing_says_after_how_many_landings_all_have_run() -> None:
    assert f"after {len(parts.PARTS)} landings" in " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
