"""gpunodes report"""

from __future__ import annotations

import contextlib
from pathlib import Path

import click
from click.core import ParameterSource

from gpunodes.cli import common, options, terminal
from gpunodes.errors import WrongInput

_STDOUT = "-"


@click.command()
@click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    default=Path("report.html"),
    show_default=True,
    help="The file to write; - is standard output.",
)
@click.option("--no-scan", is_flag=True, help="Leave the health of machines out: they are not probed.")
@common.ansible_options
@options.json_option
@click.pass_context
def command(context: click.Context, path: Path, no_scan: bool, inventory_path: Path, as_json: bool) -> int:
    """Write one page about the whole cluster: machines, versions, conflicts, health, repairs.

    The page is one file of HTML that loads nothing and has no script. It is written with mode 0600, because it has
    lines of logs; with --json only if -o names its file. Nothing is changed and no lock is taken. A source that
    fails is named on the page, with the reason. Exit code 3 then, and when a node is not ready, a machine is not
    healthy, a certificate ends within 30 days, or a check of preflight fails.
    """
    from gpunodes.operations import checked, report
    from gpunodes.views import document, health_map, report_page, text
    from gpunodes.views import report as view

    wanted = not as_json or context.get_parameter_source("path") is ParameterSource.COMMANDLINE
    printed = str(path) == _STDOUT
    if as_json and printed and wanted:
        raise WrongInput("--json and -o - both print on standard output", "one of them", "name a file with -o")
    if wanted and not printed:
        report.check(path)
    inventory = checked.inventory(inventory_path, checked.Needs.MACHINES)
    progress = report.Progress(
        run=lambda: contextlib.closing(text.progress()),
        scan=lambda: contextlib.closing(health_map.progress()),
        message=terminal.progress,
    )
    found = report.gather(inventory, progress, scanned=not no_scan)
    made = view.document_of(found)
    if wanted:
        page = report_page.page(made)
        if printed:
            terminal.echo(page)
        else:
            report.write(path, page)
    if as_json:
        terminal.echo(document.dump(made))
    elif not printed:
        terminal.line(f"{path.absolute()}: {len(found.machines)} machines")
    for each in made["missing"]:
        if each["failed"]:
            terminal.line(f"warning: {each['section']} could not be read: {each['why']}", err=True)
    return int(found.exit_code)
