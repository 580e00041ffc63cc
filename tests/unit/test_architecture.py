"""The architecture: layers of the package, the file or folder that alone imports each external library, and sizes.

The layers, from below: model, errors, shape, identity, settings, inventory, clusters, kubeconfig and the code shared
with the machines (1); planner, health, repair and rollout, pure (2); engine, for all access to external systems, and
Ansible's plugins (3); operations (4); views and cli (5). The lab is outside of the layers: only its own command imports
it.
docs/architecture.md has the reasons.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "bootstrap" / "gpunodes"
MODULES = sorted(PACKAGE.rglob("*.py"))

LAYERS = {
    "__init__": 0,
    "model": 1,
    "errors": 1,
    "shape": 1,
    "settings": 1,
    "setting_forms": 1,
    "inventory": 1,
    "kubeconfig": 1,
    "clusters": 1,
    "identity": 1,
    "ansible": 1,
    "planner": 2,
    "health": 2,
    "repair": 2,
    "rollout": 2,
    "filter": 3,
    "callback": 3,
    "engine": 3,
    "autoscale": 4,
    "operations": 4,
    "views": 5,
    "cli": 5,
    "__main__": 5,
}
PURE = ("identity", "planner", "health", "repair", "rollout")

MANY_LINES = 400
"""The most lines of a file."""
LONG_FUNCTION = 50
"""The most lines of a function without its docstring. A longer one has a line ``# Long: REASON`` above its ``def``."""
HASHED = {"lab/standin/packages.py"}
"""Part of the key of the lab's caches: a line of comment there would rebuild the stand-in packages."""
SHARED = tuple(
    f"gpunodes.ansible.module_utils.{name}"
    for name in (
        *("problem", "host.spec", "packages", "facts", "probe.known"),
        *("proxies", "devices", "nesting", "certificates"),
    )
)
"""The value of a problem, the types of a desired state, placeholders of package sources, limits of the probe, what the
exceptions from proxies mean, the names of GPUs as resources of nodes, how deeply a document may be nested, and when a
certificate ends soon."""


def name_of(path: Path) -> str:
    """The dotted name of a file of the package, ``gpunodes.engine.runner``."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """All modules that a file imports, anywhere in its code, by absolute dotted name.

    ``from package import name`` gives ``package.name``, which may be a module or a name of the module ``package``.
    """
    found: list[str] = []
    package = name_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [f"{module}.{alias.name}" for alias in node.names]
    return tuple(found)


def part(name: str) -> str | None:
    """The part of the package that a dotted name belongs to (``engine``), None for an external module."""
    pieces = name.split(".")
    if pieces[0] != "gpunodes":
        return None
    return pieces[1] if len(pieces) > 1 else "__init__"


def own_parts(path: Path) -> set[str]:
    """The parts of the package that a file imports; a name from gpunodes/__init__.py counts as that file."""
    found = set()
    for name in imports(path):
        piece = part(name)
        if piece is not None:
            found.add(piece if piece in {*LAYERS, "lab"} else "__init__")
    return found


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def part_of(path: Path) -> str:
    """The part that a file belongs to; plugins, unlike the rest of ansible/, run on the controller."""
    parts = path.relative_to(PACKAGE).parts
    return parts[1] if parts[0] == "ansible" and parts[1] in {"filter", "callback"} else parts[0].removesuffix(".py")


def test_every_part_has_a_layer() -> None:
    unknown = {part_of(path) for path in MODULES} - set(LAYERS) - {"lab"}
    assert not unknown, f"add {unknown} to a layer here and in docs/architecture.md"


@pytest.mark.parametrize("path", [path for path in MODULES if part_of(path) != "lab"], ids=relative)
def test_only_lower_layers_are_imported(path: Path) -> None:
    layer = LAYERS[part_of(path)]
    higher = sorted(piece for piece in own_parts(path) - {"lab"} if LAYERS[piece] > layer)
    assert not higher, f"{relative(path)} is in layer {layer} and imports {higher} from higher layers"


@pytest.mark.parametrize("path", [path for path in MODULES if part_of(path) == "views"], ids=relative)
def test_views_import_neither_engine_nor_operations(path: Path) -> None:
    assert not own_parts(path) & {"engine", "operations", "cli"}


@pytest.mark.parametrize("path", [path for path in MODULES if part_of(path) in PURE], ids=relative)
def test_the_pure_parts_are_pure(path: Path) -> None:
    itself = part_of(path)
    allowed = {"__init__", "model", "errors", "shape", "identity", itself}
    if itself == "repair":
        allowed.add("health")  # decisions on repairs depend on verdicts
    if itself == "rollout":
        allowed |= {"health", "repair"}  # nodes, pools and budgets are those of repairs
    foreign = sorted(
        name
        for name in imports(path)
        if (part(name) or "") not in allowed
        and name.split(".")[0] not in sys.stdlib_module_names
        and not name.startswith(SHARED)
    )
    assert not foreign, f"{relative(path)} imports {foreign}; only {sorted(allowed)} and the standard library may be"


def test_only_its_command_imports_the_lab() -> None:
    users = [relative(path) for path in MODULES if part_of(path) != "lab" and "lab" in own_parts(path)]
    assert set(users) <= {"cli/lab.py"}


def test_the_lab_does_not_import_higher_layers() -> None:
    """The lab creates machines; it must not import the code that manages them."""
    higher = {
        relative(path): sorted(own_parts(path) & {"operations", "views", "cli"})
        for path in MODULES
        if part_of(path) == "lab"
    }
    assert not {path: found for path, found in higher.items() if found}


@pytest.mark.parametrize("library", ["ansible_runner", "sushy", "kubernetes"])
def test_one_file_imports_each_external_library(library: str) -> None:
    assert len(users_of(library)) <= 1, f"{library} is imported by {users_of(library)}: only one file may import it"


def test_one_folder_imports_paramiko() -> None:
    foreign = [path for path in users_of("paramiko") if not path.startswith("engine/remote/")]
    assert foreign == []


def users_of(library: str) -> list[str]:
    """The files that import an external library."""
    return [relative(path) for path in MODULES if any(name.split(".")[0] == library for name in imports(path))]


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.is_relative_to(PACKAGE / "ansible" / "module_utils")], ids=relative
)
def test_code_for_the_machines_is_standard_library_only(path: Path) -> None:
    """It is copied to machines that have Python without further packages."""
    foreign = sorted(
        name
        for name in imports(path)
        if name.split(".")[0] not in sys.stdlib_module_names and not name.startswith("gpunodes.ansible.module_utils")
    )
    assert not foreign


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"], ["version"], ["help"]])
def test_help_loads_no_ansible(arguments: list[str]) -> None:
    """``gpunodes --help`` is fast: only the commands that need slow imports load them."""
    code = (
        "import sys\n"
        "from gpunodes.cli import main\n"
        f"sys.argv[1:] = {arguments!r}\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'ansible', 'ansible_runner', 'rich', 'paramiko', 'yaml', 'jinja2', 'libvirt'} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_no_file_is_large() -> None:
    sizes = {relative(path): len(path.read_text().splitlines()) for path in MODULES}
    large = {name: lines for name, lines in sizes.items() if lines > MANY_LINES}
    assert not large, f"more than {MANY_LINES} lines: split them by concern, one reason to change per file"


def own_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function from its ``def`` on, without its docstring."""
    first = function.body[0]
    documented = ast.get_docstring(function, clean=False) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def unexplained(path: Path) -> Iterator[str]:
    """The long functions of a file without a reason above them."""
    text = path.read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and own_lines(node) > LONG_FUNCTION:
            begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if not re.fullmatch(r"\s*# Long: \w.*", lines[begin - 2]):
                yield f"{relative(path)}:{node.lineno} {node.name} has {own_lines(node)} lines"


def test_a_long_function_has_a_reason() -> None:
    found = [each for path in MODULES if relative(path) not in HASHED for each in unexplained(path)]
    assert not found, f"more than {LONG_FUNCTION} lines: split it, or give the reason above it (# Long: ...)"


def test_no_modules_import_each_other() -> None:
    modules = {name_of(path) for path in MODULES}
    graph = {}
    for path in MODULES:
        own = name_of(path)
        found = {name if name in modules else name.rpartition(".")[0] for name in imports(path)} & modules
        graph[own] = found - {own}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"import cycle: {' <- '.join(error.args[1])}; move what they share to a module below both")


def test_every_exemption_has_a_reason() -> None:
    root = PACKAGE.parents[1]
    files = [path for folder in ("bootstrap", "docs", "molecule", "tests") for path in (root / folder).rglob("*.py")]
    bare = [
        f"{path.relative_to(root)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"# (noqa|type: ignore)\b", line)
        and not re.search(r"# (noqa: [A-Z0-9, ]+ - |type: ignore\[[a-z, -]+\]  # )\w", line)
    ]
    assert bare == []
