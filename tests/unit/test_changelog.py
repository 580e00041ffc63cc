"""CHANGELOG.md keeps to Keep a Changelog 1.1.0, and a tag to the version and to it."""

from __future__ import annotations

import re
import runpy
import subprocess
from datetime import date
from itertools import pairwise
from pathlib import Path

import pytest
from gpunodes import __version__
from gpunodes.errors import GpunodesError, WrongInput

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
RELEASE = re.compile(r"\[?(\d+)\.(\d+)\.(\d+)\]? - (\d{4}-\d{2}-\d{2})")
DIST = runpy.run_path(str(ROOT / "bootstrap" / "dist.py"))


def test_releases_are_in_order() -> None:
    """The unreleased changes first, then each version with its date, the newest first."""
    headings = re.findall(r"^## (.+)$", CHANGELOG, flags=re.MULTILINE)
    assert headings[0] in {"Unreleased", "[Unreleased]"}
    releases = [RELEASE.fullmatch(heading) for heading in headings[1:]]
    versions = [tuple(int(number) for number in found.groups()[:3]) for found in releases if found]
    assert len(versions) == len(headings) - 1, f"## [1.2.3] - YYYY-MM-DD is wanted, found {headings[1:]}"
    assert all(newer > older for newer, older in pairwise(versions))
    days = [date.fromisoformat(found[4]) for found in releases if found]
    assert all(newer >= older for newer, older in pairwise(days))
    own = tuple(int(number) for number in __version__.split("."))
    assert not versions or own >= versions[0]


def test_changes_are_below_their_kind() -> None:
    """Six kinds, each at most once in a release and not empty; all that stands below one is an entry."""
    for release in re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1:]:
        before, *sections = re.split(r"^### ", release, flags=re.MULTILINE)
        assert not before.partition("\n")[2].strip(), "every change has a kind"
        kinds = [section.partition("\n")[0] for section in sections]
        assert set(kinds) <= set(KINDS)
        assert len(kinds) == len(set(kinds))
        for section in sections:
            lines = [line for line in section.splitlines()[1:] if line]
            assert lines, section
            wrong = [line for line in lines if not re.match(r"- \S|  +\S", line)]
            assert not wrong, wrong
            assert lines[0].startswith("- ")


def test_a_tag_is_that_of_the_version() -> None:
    check, released = DIST["check_release"], f"## [{__version__}] - 2030-01-31\n"
    check([], "")  # no tag: any commit can be built
    check([f"v{__version__}"], released)
    with pytest.raises(WrongInput, match=f"has the tag v99.0.0; wanted: v{re.escape(__version__)}, the package's"):
        check(["v99.0.0"], released)
    with pytest.raises(WrongInput, match=r"CHANGELOG\.md has no release"):
        check([f"v{__version__}"], "## Unreleased\n")


def test_tags_are_those_of_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A source archive has none, also where it is unpacked inside of a repository."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"], ["tag", "v99.0.0"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    monkeypatch.setitem(DIST["tags"].__globals__, "ROOT", tmp_path)
    assert DIST["tags"]() == ["v99.0.0"]
    (tmp_path / "source").mkdir()
    monkeypatch.setitem(DIST["tags"].__globals__, "ROOT", tmp_path / "source")
    assert DIST["tags"]() == []


@pytest.mark.parametrize("has_git", [True, False])
def test_tags_that_cannot_be_read_stop_the_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_git: bool
) -> None:
    """As where git refuses the checkout of another user."""
    (tmp_path / ".git").write_text("gitdir: nowhere\n")
    monkeypatch.setitem(DIST["tags"].__globals__, "ROOT", tmp_path)
    if not has_git:
        monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GpunodesError, match=r"the tags of this commit are not known: .*(nowhere|No such file)"):
        DIST["tags"]()
