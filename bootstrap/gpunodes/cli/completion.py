"""gpunodes completion"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from gpunodes.cli import terminal


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print a script that completes commands, machines and files in a shell.

    For bash, add `eval "$(gpunodes completion bash)"` to ~/.bashrc; for zsh, add
    `eval "$(gpunodes completion zsh)"` to ~/.zshrc; for fish, run
    `gpunodes completion fish > ~/.config/fish/completions/gpunodes.fish`.
    """
    found = get_completion_class(shell)
    if found is not None:
        terminal.echo(found(context.find_root().command, {}, "gpunodes", "_GPUNODES_COMPLETE").source())
