"""How GPU machines are: verdicts on saved logs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from gpunodes.errors import WrongInput
from gpunodes.health import judge, sources
from gpunodes.health.model import SiteRules, Verdict

STDIN = "-"


def of_files(paths: Sequence[str], site: SiteRules = SiteRules()) -> Verdict:  # noqa: B008 - frozen
    """The verdict on the one machine that saved these files; ``-`` is standard input.

    Raises WrongInput for a file that cannot be read or unpacked.
    """
    return judge.judge_files(_name(paths), _texts(paths), site)


def _name(paths: Sequence[str]) -> str:
    return "standard input" if paths[0] == STDIN else Path(paths[0]).name


def _texts(paths: Sequence[str]) -> Iterator[Iterator[bytes]]:
    for path in paths:
        if path == STDIN:
            yield from sources.texts(sys.stdin.buffer, "standard input", _unzstd)
            continue
        try:
            with Path(path).open("rb", buffering=0) as stream:
                yield from sources.texts(stream, path, _unzstd)
        except OSError as error:
            raise WrongInput(f"{path} cannot be read: {error.strerror}", "a file", "correct --from") from error


def _unzstd(stream: BinaryIO) -> BinaryIO:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return cast(BinaryIO, zstd.ZstdFile(stream))
