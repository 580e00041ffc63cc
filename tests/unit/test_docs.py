"""The documentation matches the code: generated pages are fresh, commands have help, links and examples work."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest
import yaml
from click.testing import CliRunner
from gpunodes import cli, settings
from gpunodes.errors import WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import Role
from gpunodes.views import metrics

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATE: dict[str, Any] = runpy.run_path(str(DOCS / "generate.py"))
COMMANDS: dict[str, click.Command] = dict(GENERATE["commands"]())
NAMES = COMMANDS | {other: COMMANDS[name] for other, name in cli.MODULES.items()}
"""With the other names of commands."""
EXAMPLES = ROOT / "examples"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), *sorted(EXAMPLES.rglob("*.md"))]
WRITTEN = [page for page in PAGES if page.name not in {"commands.md", "settings.md", "roles.md"}]
"""The pages that no program writes."""
INVENTORIES = sorted(EXAMPLES.glob("*/hosts.yml"))
MANIFESTS = sorted(EXAMPLES.glob("workloads/*.yml"))


def options() -> Iterator[tuple[str, click.Option]]:
    """Every option of every command."""
    for name, command in COMMANDS.items():
        for param in command.params:
            if isinstance(param, click.Option):
                yield name, param


def test_generated_pages_are_fresh() -> None:
    # In a process of its own: click keeps the help option of a command that another test called by itself.
    done = subprocess.run(
        [sys.executable, ROOT / "docs/generate.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"run `make docs` and commit what it writes: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    assert len((COMMANDS[name].help or "").split()) >= 3, "a command's docstring is its help"


@pytest.mark.parametrize(("name", "option"), [(name, option) for name, option in options()], ids=str)
def test_every_option_has_help(name: str, option: click.Option) -> None:
    assert option.hidden or option.help, f"{name} {option.opts[0]}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name: str) -> None:
    assert f"\n## gpunodes {name}\n" in (DOCS / "commands.md").read_text()


def test_every_command_has_a_manual_page() -> None:
    pages = GENERATE["man_pages"]()
    assert set(pages) == {"gpunodes.1", *(f"gpunodes-{name.replace(' ', '-')}.1" for name in COMMANDS)}
    for page in pages.values():
        assert page.startswith(".TH GPUNODES")
        assert ".SH NAME\ngpunodes" in page
        assert "\n\n" not in page
    assert "--with-cuda".replace("-", "\\-") in pages["gpunodes-gpu-install.1"]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_manual_pages_are_valid() -> None:
    for page in GENERATE["man_pages"]().values():
        argv = ["groff", "-man", "-Tutf8", "-ww"]
        done = subprocess.run(argv, input=page, capture_output=True, text=True, check=True)
        assert done.stderr == ""


def test_every_json_document_is_documented() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "bootstrap" / "gpunodes").rglob("*.py"))
    schemas = set(re.findall(r"""["'](gpunodes\.[a-z_-]+/\d+)["']""", code))
    assert schemas
    page = (DOCS / "json.md").read_text()
    assert not {schema for schema in schemas if schema not in page}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert not broken


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_reached_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert not {str(page) for page in DOCS.rglob("*.md") if str(page.relative_to(ROOT)) not in readme}


def test_every_command_in_the_tables_of_a_walk_through_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in code blocks are parsed with the other pages'; here is what a table says to do now."""
    monkeypatch.chdir(tmp_path)
    wrong = []
    pages = sorted((DOCS / "walkthroughs").glob("*.md"))
    found = {(page.name, line) for page in pages for line in re.findall(r"`gpunodes ([^`]+)`", page.read_text())}
    for name, line in sorted(found):
        try:
            parse(shlex.split(line))
        except click.MissingParameter:
            continue  # a command that is only named
        except (click.ClickException, WrongInput) as error:
            wrong.append(f"{name}: gpunodes {line}: {error}")
    assert len(pages) == 5
    assert len(found) > 20
    assert not wrong


def name_of(path: Path) -> str:
    """A path as a test's id."""
    return str(path.relative_to(ROOT))


def blocks(page: Path) -> Iterator[str]:
    """The code blocks of a page, fenced and indented, without their indentation."""
    fence: list[str] | None = None
    indented: list[str] = []
    for line in [*page.read_text().splitlines(), "end"]:
        if indented and not line.startswith("    ") and line.strip():
            yield "\n".join(indented)
            indented = []
        if line.lstrip().startswith("```"):
            if fence is not None:
                yield "\n".join(fence)
            fence = [] if fence is None else None
        elif fence is not None:
            fence.append(line)
        elif line.startswith("    "):
            indented.append(line.strip())


def shell_lines(page: Path) -> Iterator[list[str]]:
    """The arguments of each `gpunodes` command in the code blocks of a page."""
    for block in blocks(page):
        for line in block.replace("\\\n", " ").splitlines():
            if "gpunodes" not in line:
                continue
            try:
                parts = list(shlex.shlex(line, posix=True, punctuation_chars="|&;<>"))
            except ValueError:
                continue
            for number, part in enumerate(parts):
                before = parts[number - 1] if number else ";"
                if part == "gpunodes" and (before in {"sudo", "&&", "||", ";", "|"} or "=" in before):
                    rest = parts[number + 1 :]
                    end = next((place for place, each in enumerate(rest) if set(each) <= set("|&;<>")), len(rest))
                    yield rest[:end]


def test_shell_lines_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text about gpunodes up\n\n    sudo gpunodes lab up --workers 2   # why\n    cd x && gpunodes status >>log\n\n"
        "```\ngpunodes join 'gpu-*'\nX=1 gpunodes up | less\n```\n"
    )
    assert list(shell_lines(page)) == [["lab", "up", "--workers", "2"], ["status"], ["join", "gpu-*"], ["up"]]


def parse(arguments: list[str]) -> None:
    """Parse a command line with the command's own parsers, without running it; raises WrongInput or ClickException."""
    command: click.Command = cli.root
    name = "gpunodes"
    while True:
        if isinstance(command, click.Group) and arguments:
            context = click.Context(command, info_name=name)
            # `health` takes machines as well as sub-commands: its own parser leaves nothing for the sub-command.
            if child := command.get_command(context, arguments[0]):
                command, name, arguments = child, arguments[0], arguments[1:]
                continue
        try:
            context = command.make_context(name, list(arguments))
        except (click.exceptions.Exit, click.exceptions.NoArgsIsHelpError):
            return
        rest = [*context._protected_args, *context.args]
        if not isinstance(command, cli.HelpfulGroup) or not rest:
            return
        found, child, arguments = command.resolve_command(context, rest)
        assert found is not None
        assert child is not None
        command, name = child, found


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_commands_of_a_page_exist(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = []
    for arguments in shell_lines(page):
        try:
            parse(arguments)
        except (click.ClickException, WrongInput) as error:
            wrong.append(f"gpunodes {shlex.join(arguments)}: {error}")
    assert not wrong


@pytest.mark.parametrize("line", ["joint gpu-1", "join", "status --jason", "gpu plans", "lab --name x upp", "gates"])
def test_a_wrong_command_is_found(line: str) -> None:
    with pytest.raises((click.ClickException, WrongInput)):
        parse(line.split())


OFFLINE = ("gates", "health explain", "health rules", "health timer")
"""Commands that need no machine and no file: the documentation's are run."""


def offline_lines() -> list[str]:
    found = {shlex.join(arguments) for page in WRITTEN for arguments in shell_lines(page)}
    return sorted(line for line in found if line.startswith(OFFLINE))


def test_every_offline_command_has_an_example() -> None:
    assert not [name for name in OFFLINE if not any(line.startswith(name) for line in offline_lines())]


@pytest.mark.parametrize("line", offline_lines())
def test_commands_without_machines_run(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory" / "hosts.yml").write_text("workers: {hosts: {gpu-1: {}}}\n")
    result = CliRunner().invoke(cli.root, shlex.split(line), standalone_mode=False)
    assert result.exception is None
    assert result.return_value == 0
    assert result.output


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_files_and_targets_of_a_page_exist(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    code = "\n".join([*blocks(page), *re.findall(r"`([^`\n]+)`", text)])
    assert not set(re.findall(r"^make ([a-z][a-z-]+)", code, flags=re.MULTILINE)) - targets
    assert not [
        name for name in re.findall(r"\b((?:examples|playbooks)/[\w/.-]*\w)", code) if not (ROOT / name).exists()
    ]


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_paths_in_the_pages_for_developers_exist(page: str) -> None:
    """A path may begin at the top, in the package, or in a folder of it that the page names."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    known = "\n".join(f"/{line}" for line in tracked.splitlines()) + "\n"
    named = re.findall(r"`([\w.-]+(?:/[\w.-]*)+|\w+\.(?:py|toml|yml|sh))`", (ROOT / page).read_text())
    elsewhere = {"pkg/features/kube_features.go", "gpunodes/content/", ".venv/bin"}
    missing = {path for path in named if not re.search(f"/{re.escape(path.rstrip('/'))}[/\n]", known)}
    assert missing == elsewhere & set(named)


def test_files_that_answer_a_question_exist() -> None:
    rows = re.findall(
        r"^\| [^|]+\? \| `([^`]+)`(?:, the function `(\w+)`)?", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    assert len(rows) == 10
    for name, function in rows:
        text = (ROOT / ("" if name.startswith("roles/") else "bootstrap/gpunodes") / name).read_text()
        assert f"def {function}(" in text or not function


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_commands_in_a_sentence_exist(page: Path) -> None:
    """Inline code names a command that exists; its arguments may be placeholders."""
    wrong = []
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`gpunodes ([a-z][^`]*)`", prose):
        words = span.split()
        if words[0] not in NAMES or (words[0] in {"gpu", "lab"} and words[1:] and " ".join(words[:2]) not in NAMES):
            wrong.append(span)
            continue
        if words[0] == "playbook":
            continue  # what follows are options of ansible-playbook
        deepest = " ".join(words[:2]) if " ".join(words[:2]) in NAMES else words[0]
        known = {name for param in NAMES[deepest].params for name in (*param.opts, *param.secondary_opts)}
        if words[0] == "playbook":
            continue  # what follows are options of ansible-playbook
        wrong += [span for word in words if re.fullmatch(r"--[a-z-]+", word) and word not in {*known, "--help"}]
    assert not wrong


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_settings_of_a_page_exist(page: Path) -> None:
    named = set(re.findall(r"`(gpunodes_(?:[a-z]+_)*[a-z]+)(?:: [^`]*)?`", page.read_text()))
    # Settings that the changelog names as they were.
    others = {"gpunodes_repair_sick_percent", "gpunodes_repair_look_pause"}
    others |= {metric.name for metric in metrics.METRICS}
    assert not named - set(settings.defaults()) - set(settings._options()) - others


def test_every_metric_is_documented() -> None:
    page = (DOCS / "monitoring.md").read_text()
    assert not {metric.name for metric in metrics.METRICS if f"`{metric.name}`" not in page}


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_yaml_of_a_page_is_right(page: Path) -> None:
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL):
        for document in yaml.load_all(block, Loader):
            assert list(settings.problems(document)) == []


class Loader(yaml.SafeLoader):
    """Takes a value in a vault for a text."""


Loader.add_constructor("!vault", lambda loader, node: str(node.value))


def test_a_recording_shows_every_line() -> None:
    render = runpy.run_path(str(DOCS / "record.py"))["render"]
    svg = render("$ gpunodes up\n\x1b[1;31mfailed\x1b[0m <b>\n" + "x" * 150)
    root = ElementTree.fromstring(svg)  # noqa: S314 - our own
    texts = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["$ gpunodes up", "failed <b>", "x" * 110, "    " + "x" * 40]
    assert '<tspan fill="#ff7b72" font-weight="bold">failed</tspan>' in svg


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    hooks = runpy.run_path(str(DOCS / "mkdocs_hooks.py"))
    listed = set(re.findall(r": ([a-z-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert listed == {page.name for page in DOCS.glob("*.md")} | set(hooks["ADDED"].values())


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("README.md", "[x](docs/repair.md#bmcs)", "[x](repair.md#bmcs)"),
        ("docs/security.md", "[x](../SECURITY.md)", "[x](security-policy.md)"),
        ("docs/lab.md", "[pins](../bootstrap/pins.toml)", "pins"),
        ("docs/lab.md", "[x](https://example.org/a.md)", "[x](https://example.org/a.md)"),
        ("examples/README.md", "[x](small/hosts.yml)", "[x](examples/small/hosts.yml)"),
        ("docs/lab.md", "[x](missing.md)", "[x](missing.md)"),
    ],
)
def test_links_fit_the_site(source: str, link: str, expected: str) -> None:
    hooks = runpy.run_path(str(DOCS / "mkdocs_hooks.py"))
    page = hooks["ADDED"].get(source, source.removeprefix("docs/"))
    known = {"repair.md", "security-policy.md", "examples/small/hosts.yml", "lab.md"}
    match = hooks["_LINK"].search(link)
    assert hooks["link"](match, source, page, known) == expected


def test_the_example_inventory_works(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    shutil.copy(ROOT / "inventory" / "hosts.yml.example", path)
    inventory = Inventory(path)
    assert inventory.control_plane()
    assert inventory.machines(Role.WORKER)


@pytest.mark.long
@pytest.mark.parametrize("path", INVENTORIES, ids=name_of)
def test_inventories_of_examples_work(path: Path) -> None:
    inventory = Inventory(path)
    assert inventory.control_plane()
    assert inventory.machines(Role.WORKER)
    for machine in [inventory.control_plane(), *inventory.machines(Role.WORKER)]:
        rendered = inventory.rendered(machine.name, "gpunodes_")
        assert not {key: value for key, value in rendered.items() if "{{" in str(value)}
        assert list(settings.problems(inventory.variables(machine.name) | rendered)) == []


@pytest.mark.parametrize("path", MANIFESTS, ids=name_of)
def test_manifests_of_examples_are_objects(path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text()))
    assert documents
    for document in documents:
        assert {"apiVersion", "kind", "metadata"} <= set(document)
        if document["kind"] == "Job":
            [container] = document["spec"]["template"]["spec"]["containers"]
            assert container["resources"]["limits"]["nvidia.com/gpu"] > 0
            image = container["image"]
            if "k8s-device-plugin" in image:
                assert image == settings.defaults()["gpunodes_device_plugin_image"]
