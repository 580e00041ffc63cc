"""The Python programs that gpunodes sends to machines: modules of ansible/module_utils.

A program is sent on standard input, compressed, with all modules that it imports. ``python3 -c`` only reads it, exactly
to its end, because the program may read more input. So the command line is short, and machines that log command lines
log no options. ``sent.py`` runs the program there.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import os
import shlex
import subprocess
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpunodes.ansible.module_utils import sent
from gpunodes.engine.remote import commands
from gpunodes.engine.remote.commands import Become, RemoteCommand
from gpunodes.engine.remote.targets import PYTHON

_FOLDER = Path(sent.__file__).parent
# One line without control characters, as an argument must be.
_READ = "import io,zlib;exec(zlib.decompress(io.BufferedReader(io.FileIO(0,closefd=False),1).read({size})))"


@dataclass(frozen=True, slots=True)
class Program:
    """A program and its options, ready to be sent to any machine."""

    name: str
    packed: bytes

    def argv(self, variables: Mapping[str, Any]) -> list[str]:
        """The argv that runs it on a machine with these inventory variables; ``packed`` is its standard input."""
        interpreter = str(variables.get("ansible_python_interpreter") or PYTHON)
        python = shlex.split(interpreter) if interpreter.startswith("/") else [PYTHON]
        # The name is for people: in the machine's list of processes.
        return [*python, "-c", _READ.format(size=len(self.packed)), f"gpunodes-{self.name}"]

    def command(self, variables: Mapping[str, Any], become: Become = Become.ALWAYS) -> RemoteCommand:
        """The command that runs it on a machine with these inventory variables."""
        return commands.remote(self.argv(variables), variables, become, self.packed, marks=True)


def pack(name: str, options: Mapping[str, Any]) -> Program:
    """The program ``main(options)`` of a module of module_utils; ``options`` hold JSON's types only."""
    runner = Path(sent.__file__).read_text(encoding="utf-8")
    text = f"{runner}\nrun({sources(name)!a}, {name!r}, {dict(options)!a})\n"
    return Program(name, zlib.compress(text.encode(), 9))


@functools.cache
def sources(name: str) -> dict[str, str]:
    """The text of a module, and of all modules of module_utils that it imports, by full name."""
    found: dict[str, str] = {}
    missing = [f"{sent.PACKAGE}.{name}"]
    while missing:
        module = missing.pop()
        path = _path(module)
        if module in found or path is None:
            continue
        found[module] = path.read_text(encoding="utf-8")
        parent = module.rpartition(".")[0]
        missing += [parent or module, *_imported(found[module], module if path.name == "__init__.py" else parent)]
    return found


def _imported(text: str, package: str) -> Iterator[str]:
    """The full names of what a module of ``package`` imports relative to it: modules, or names in modules."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _path(module: str) -> Path | None:
    """The file of a module that is sent; None for a name that is no module."""
    path = _FOLDER.joinpath(*module.split(".")[1:])
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def send(process: subprocess.Popen[str], data: bytes) -> None:
    """Write the standard input of a command to a process that is otherwise written to as text; raises OSError."""
    assert process.stdin  # noqa: S101 - for the type checker
    while data:
        data = data[os.write(process.stdin.fileno(), data) :]


def end(process: subprocess.Popen[str], grace_s: float) -> None:
    """End a command by closing its standard input; it is killed after ``grace_s`` seconds."""
    with contextlib.suppress(OSError, ValueError):
        if process.stdin:
            process.stdin.close()
    try:
        process.wait(timeout=grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
