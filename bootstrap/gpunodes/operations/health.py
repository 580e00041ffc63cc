"""The health of GPU machines by saved logs; explanations of codes and rules."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from gpunodes.errors import WrongInput
from gpunodes.health import catalog, judge, sources
from gpunodes.health.model import Meaning, RuleText, SiteRules, Verdict

STDIN = "-"


def of_files(paths: Sequence[str], site: SiteRules = SiteRules()) -> Verdict:  # noqa: B008 - frozen
    """The verdict on the one machine that saved these files; ``-`` is standard input.

    Raises WrongInput for a file that cannot be read or unpacked.
    """
    return judge.judge_files(_name(paths), _texts(paths), site)


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


def _unzstd(stream: BinaryIO) -> Iterator[bytes]:
    """Decompress zstd, which Python's standard library supports since 3.14."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    try:
        with zstd.ZstdFile(stream) as plain:
            while piece := plain.read(sources.PIECE):
                yield piece
    except (zstd.ZstdError, EOFError) as error:
        raise sources.BrokenArchive(str(error)) from error
