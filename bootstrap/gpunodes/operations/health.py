"""The health of GPU machines by saved logs; explanations of codes and rules."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from gpunodes.errors import WrongInput
from gpunodes.health import catalog, judge, scan, sources
from gpunodes.health.model import NOT_RECOGNISED, Meaning, RuleText, SavedFile, SiteRules, Verdict
from gpunodes.health.unpack import PIECE, BrokenArchive

STDIN = "-"
STDIN_NAME = "standard input"

MANY_FILES = 50_000
"""Files in a folder: more than a sosreport has."""


def of_files(paths: Sequence[str], site: SiteRules = SiteRules()) -> Verdict:  # noqa: B008 - frozen
    """The verdict on the one machine that saved these files; ``-`` is standard input, a folder all files in it.

    Raises WrongInput for a named file that cannot be read or unpacked.
    """
    files = _Files(paths)
    verdict = judge.judge_files(_name(paths), files.texts(), site, on_log=files.add)
    return dataclasses.replace(verdict, files=files.ended())


def explain(kind: str, code: int) -> Meaning:
    """The meaning of an Xid (``kind`` is ``xid``) or SXid; raises WrongInput for a code that is not in the catalog."""
    advice = catalog.xid(code) if kind == "xid" else catalog.sxid(code)
    if advice is None:
        raise WrongInput(
            f"NVIDIA's catalog has no {_KINDS[kind]} {code}",
            "a code in the catalog",
            "update gpunodes, or check the driver's release notes",
        )
    return Meaning(_KINDS[kind], code, advice.title, advice.action, advice.advice, advice.source)


_KINDS = {"xid": "Xid", "sxid": "SXid"}


def rules() -> Sequence[RuleText]:
    """The rules, in the order in which they are applied."""
    from gpunodes.health.rules import RULES

    return [RuleText(rule.name, rule.title, rule.evidence, rule.action, rule.source) for rule in RULES]


def _name(paths: Sequence[str]) -> str:
    """The name of the machine that saved these files: that of the first one, and how many others there are."""
    first = paths[0]
    if first == STDIN:
        name = STDIN_NAME
    elif Path(first).is_file() or Path(first).is_dir():
        # `.` and `..` have a name only as part of the whole path.
        name = Path(os.path.abspath(first)).name or first  # noqa: PTH100 - without following links
    else:
        name = first
    others = len(paths) - 1
    return f"{name} and {others} other file{'s' * (others > 1)}, taken as one machine" if others else name


class _Files:
    """The texts in files and folders, and what each file was recognised as."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self.found: list[SavedFile] = []

    def texts(self) -> Iterator[Iterator[bytes]]:
        """The texts, to be read in turn."""
        for path in self._paths:
            if path == STDIN:
                self.found.append(SavedFile(STDIN_NAME))
                yield from self._unpacked(sys.stdin.buffer, STDIN_NAME, named=True)
            elif Path(path).is_dir():
                for member in _members(path):
                    yield from self._opened(member, named=False)
            else:
                yield from self._opened(path, named=True)

    def add(self, log: scan.Log) -> None:
        """Take in what the text that was read last is."""
        last = self.found[-1]
        new = tuple(kind for kind in log.kinds if kind not in last.kinds)
        self.found[-1] = dataclasses.replace(last, kinds=last.kinds + new)

    def ended(self) -> tuple[SavedFile, ...]:
        """All files. A folder may have others beside its logs: those are no problem where a log was recognised."""
        named = {STDIN_NAME, *self._paths}
        recognised = any(file.kinds for file in self.found)
        return tuple(
            file
            if file.kinds or file.problem or (recognised and file.path not in named)
            else dataclasses.replace(file, problem=NOT_RECOGNISED)
            for file in self.found
        )

    def _opened(self, path: str, *, named: bool) -> Iterator[Iterator[bytes]]:
        self.found.append(SavedFile(path))
        try:
            with Path(path).open("rb", buffering=0) as stream:
                yield from self._unpacked(stream, path, named=named)
        except OSError as error:
            problem = WrongInput(f"{path} cannot be read: {error.strerror}", "a file or a folder", "correct --from")
            if named:
                raise problem from error
            self._skip(problem)

    def _unpacked(self, stream: BinaryIO, name: str, *, named: bool) -> Iterator[Iterator[bytes]]:
        try:
            for text in sources.texts(stream, name, _unzstd):
                yield self._read(text, name, named=named)
        except WrongInput as error:
            if named:
                raise
            self._skip(error)

    def _read(self, text: Iterator[bytes], name: str, *, named: bool) -> Iterator[bytes]:
        """A text, whose later parts may be broken, too."""
        try:
            yield from text
        except (BrokenArchive, WrongInput, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            problem = WrongInput(f"{name} cannot be unpacked: {reason}", "a file as it was saved", "save it again")
            if isinstance(error, WrongInput):
                problem = error
            if named:
                raise problem from error
            self._skip(problem)

    def _skip(self, error: WrongInput) -> None:
        """Go on without a file that a folder has."""
        last = self.found[-1]
        self.found[-1] = dataclasses.replace(last, problem=error.problem.found.removeprefix(f"{last.path} "))


def _members(folder: str) -> list[str]:
    """All regular files below a folder; raises WrongInput for too many. Links are not followed."""
    found: list[str] = []
    for where, folders, names in os.walk(folder):
        folders.sort()
        paths = (os.path.join(where, name) for name in sorted(names))  # noqa: PTH118 - quick for many
        found += [path for path in paths if _is_regular(path)]
        if len(found) > MANY_FILES:
            raise WrongInput(
                f"{folder} has more than {MANY_FILES} files", "a folder with the saved logs of a machine", "name it"
            )
    if not found:
        raise WrongInput(f"{folder} has no files", "a folder with the saved logs of a machine", "correct --from")
    return found


def _is_regular(path: str) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISREG(os.lstat(path).st_mode)
    return False


def _unzstd(stream: BinaryIO) -> Iterator[bytes]:
    """Decompress zstd, which Python's standard library supports since 3.14."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    try:
        with zstd.ZstdFile(stream) as plain:
            while piece := plain.read(PIECE):
                yield piece
    except (zstd.ZstdError, EOFError) as error:
        raise BrokenArchive(str(error)) from error
