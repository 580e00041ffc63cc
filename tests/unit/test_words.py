"""One word for one thing: the terms of docs/glossary.md, and none of the words that they replaced."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READ = ("bootstrap", "roles", "playbooks", "docs", "examples", "README.md", "CONTRIBUTING.md", "SECURITY.md")
SUFFIXES = {".py", ".md", ".yml", ".toml", ".j2", ".json"}
# Word -> the term in its place.
REPLACED = {
    "aloud": "reported",
    "climb": "escalate",
    "greeting": "SSH banner",
    "hands": "machine control",
    "ladder": "escalation",
    "rival": "conflicting module",
    "ruling": "decision",
    "rung": "escalation step",
    "somebody": "a user, another command",
    "spared": "skipped",
    "survey": "scan, diff",
    "sweep": "scan",
    "tally": "counter",
    "to be had": "available",
    "well again": "recovered",
    "whoever": "the user, the process",
    "wish": "request, setting",
}


def files() -> list[Path]:
    try:
        listed = subprocess.run(["git", "ls-files", *READ], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.splitlines() if Path(name).suffix in SUFFIXES]
    # A link shows a file that is listed elsewhere.
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def test_replaced_words_do_not_return() -> None:
    words = re.compile(rf"\b({'|'.join(REPLACED)})(s|es|ed|ing)?\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r}; use {REPLACED.get(match[1].lower(), '')}"
        for path in files()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        for match in words.finditer(line)
    ]
    assert not found


def test_the_glossary_has_each_term_once() -> None:
    terms = re.findall(r"^\| \*\*(.+?)\*\* \|", (ROOT / "docs" / "glossary.md").read_text(), flags=re.MULTILINE)
    assert terms == sorted(terms, key=str.lower)
    assert len(set(terms)) == len(terms)
    needed = {
        "pool",
        "verdict",
        "finding",
        "action",
        "escalation step",
        "stage",
        "ledger",
        "stand-in",
        "phase",
        "decision",
    }
    assert needed <= set(terms)
