"""The command `gpunodes` as a function of tests.

A process of its own costs more than half a second of processor time, nearly all of it for imports. Tests start one only
for what a process has: signals, a terminal, file descriptors, what ends with it, what it imports.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from unittest import mock

import pytest
from gpunodes import cli

NONE: Mapping[str, str] = MappingProxyType({})


def run(
    folder: Path, *words: str, given: bytes = b"", variables: Mapping[str, str] = NONE
) -> subprocess.CompletedProcess[str]:
    """Run `gpunodes` with these words in a folder, ``given`` in its standard input; returns what a process would have.

    ``variables`` are added to the environment; Ansible reads its own ones once in a process, so they need a process.
    """
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    with (
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, variables),
        mock.patch.multiple(sys, argv=["gpunodes", *words], stdin=io.TextIOWrapper(io.BytesIO(given), "utf-8")),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main()
    return subprocess.CompletedProcess(words, int(ended.value.code or 0), _text(out), _text(err))


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    found = stream.buffer
    assert isinstance(found, io.BytesIO)
    return found.getvalue().decode()
