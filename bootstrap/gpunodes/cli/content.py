"""gpunodes content"""

from __future__ import annotations

import click

from gpunodes import settings
from gpunodes.cli import terminal


@click.command()
def command() -> None:
    """Print the folder of the Ansible collection that gpunodes runs.

    It contains playbooks, roles and modules; `gpunodes playbook` runs one of the playbooks.
    """
    terminal.echo(str(settings.content()))
