"""The Python programs that gpunodes sends to machines: modules of ansible/module_utils/gpunodes.

A program is sent on standard input, compressed, with all modules that it imports. ``python3 -c`` only reads it, exactly
to its end, because the program may read more input. So the command line is short, and machines that log command lines
log no options. ``sent.py`` runs the program there.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import shlex
import subprocess
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpunodes.ansible.module_utils.gpunodes import sent
from gpunodes.engine.remote import commands
from gpunodes.engine.remote.commands import Become, RemoteCommand
from gpunodes.engine.remote.targets import PYTHON

_FOLDER = Path(sent.__file__).parent
# One line without control characters, as an argument must be.
_READ = "import io,zlib;exec(zlib.decompress(io.BufferedReader(io.FileIO(0,closefd=False),1).read({size})))"


def command(
    name: str, options: Mapping[str, Any], variables: Mapping[str, Any], become: Become = Become.ALWAYS
) -> RemoteCommand:
    """The command that runs ``main(options)`` of a module on a machine with these inventory variables."""
    return packed_command(packed(name, options), variables, become)


def packed_command(program: bytes, variables: Mapping[str, Any], become: Become) -> RemoteCommand:
    """The same for a program that is ``packed`` already, for many machines."""
    return commands.remote(argv(program, variables), variables, become, program, marks=True)


def argv(program: bytes, variables: Mapping[str, Any]) -> list[str]:
    """The argv that runs a packed program, which is its standard input."""
    interpreter = str(variables.get("ansible_python_interpreter") or PYTHON)
    python = shlex.split(interpreter) if interpreter.startswith("/") else [PYTHON]
    return [*python, "-c", _READ.format(size=len(program))]


def packed(name: str, options: Mapping[str, Any]) -> bytes:
    """The program of a module of module_utils/gpunodes; ``options`` hold JSON's types only."""
    runner = Path(sent.__file__).read_text(encoding="utf-8")
    return zlib.compress(f"{runner}\nrun({sources(name)!a}, {name!r}, {dict(options)!a})\n".encode(), 9)


@functools.cache
def sources(name: str) -> dict[str, str]:
    """The text of a module, and of all modules of module_utils/gpunodes that it imports, by full name."""
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
