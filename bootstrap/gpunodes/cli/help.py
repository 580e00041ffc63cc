"""gpunodes help"""

from __future__ import annotations

import click

from gpunodes.cli import no_command, terminal
from gpunodes.errors import WrongInput


def _commands(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The commands below those that are typed already, for shell completion."""
    found = context.find_root().command
    for name in context.params.get(parameter.name or "") or ():
        child = found.get_command(context, name) if isinstance(found, click.Group) else None
        if child is None:
            return []
        found = child
    names = found.list_commands(context) if isinstance(found, click.Group) else []
    return [name for name in names if name.startswith(incomplete)]


def _page_names() -> list[str]:
    from gpunodes import settings

    return sorted(page.stem for page in settings.pages().glob("*.md"))


def _pages(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001 - click's signature
    return [name for name in _page_names() if name.startswith(incomplete)]


@click.command()
@click.argument("names", nargs=-1, metavar="[COMMAND]...", shell_complete=_commands)
@click.option("--page", metavar="PAGE", shell_complete=_pages, help="Show a page of the documentation, such as health.")
@click.pass_context
def command(context: click.Context, names: tuple[str, ...], page: str | None) -> None:
    """Show the help of a command, or a page of the documentation.

    COMMAND is a command with its sub-commands, such as `gpu plan`; without one, all commands are listed.
    """
    if page is not None:
        _show(page, names)
        return
    above = context.find_root()
    found = above.command
    for name in names:
        if not isinstance(found, click.Group):
            raise WrongInput(f"`{above.command_path}` has no sub-commands", "", f"see `{above.command_path} --help`")
        child = found.get_command(above, name)
        if child is None:
            raise no_command(above.command_path, name, found.list_commands(above))
        found = child
        # Not below the group's own context: its path would have the group's arguments in it, too.
        path = f"{above.info_name} {name}" if above.parent else name
        above = click.Context(found, info_name=path, parent=context.find_root())
    terminal.echo(above.get_help())


def _show(page: str, names: tuple[str, ...]) -> None:
    from gpunodes import settings

    if names:
        raise WrongInput("--page and a command exclude each other", "one of them", "leave one out")
    known = _page_names()
    if page not in known:
        raise WrongInput(f"there is no page {page!r}", f"one of {', '.join(known)}")
    terminal.echo((settings.pages() / f"{page}.md").read_text(encoding="utf-8").rstrip())
