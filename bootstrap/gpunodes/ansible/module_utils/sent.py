"""Runs a Python program that the controller has sent: the first part of every one (engine/remote/programs.py).

One file, standard library only, Python 3.6 and newer. A program is a module with a function ``main``, and the modules
that it imports. Only their text is sent: nothing is written on the machine.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from typing import Any, Mapping, Optional

PACKAGE = "gpunodes"
MARK = "gpunodes-answer-follows"
"""The line before the program's output. What stands before it is the banner of the login shell."""


class SentModules:
    """Imports modules from their text, given by full name (importlib.abc.MetaPathFinder and InspectLoader)."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources

    def find_spec(self, name: str, *_: Any) -> Optional[ModuleSpec]:
        if name not in self._sources:
            return None
        loader: Any = self  # by its methods, without the base class: importlib.abc is slow to import
        is_package = any(other.startswith(name + ".") for other in self._sources)
        return ModuleSpec(name, loader, origin=name, is_package=is_package)

    def create_module(self, _: ModuleSpec) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        name = module.__name__
        exec(compile(self._sources[name], name, "exec"), module.__dict__)  # noqa: S102 - as an import does

    def get_source(self, name: str) -> str:
        return self._sources[name]


def run(sources: Mapping[str, str], program: str, options: Mapping[str, Any]) -> None:
    """Run ``main`` of the module ``program`` with ``options``; the mark stands before its output."""
    sys.meta_path.insert(0, SentModules(sources))
    sys.stdout.write("\n" + MARK + "\n")
    sys.stdout.flush()
    importlib.import_module(PACKAGE + "." + program).main(options)
